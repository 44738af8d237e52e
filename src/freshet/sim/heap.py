"""The event queue of virtual time. Entries are plain tuples, so a run in the middle can be saved and compared."""

import heapq
import math
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple


class Rank(IntEnum):
    """Order of events at the same instant: arrivals, then answers, then new trips, then the test of the model."""

    UPLOAD = 0
    LOST = 1
    REQUEST = 2
    MERGE = 3
    TRIGGER = 4
    EVALUATE = 5


class Happening(NamedTuple):
    """Something that will happen: when, what, and to which trip of which device."""

    time: float
    rank: int
    device: int = -1
    trip: int = -1


class EventHeap:
    """A priority queue by (time, rank, device). Time never goes back."""

    def __init__(self, entries: Iterable[Happening] = (), now: float = 0.0) -> None:
        self._heap = [Happening(*entry) for entry in entries]
        heapq.heapify(self._heap)
        self.now = now

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, entry: Happening) -> None:
        """Schedule an event, now or later."""
        if not entry[0] >= self.now:
            raise ValueError(f"event at {entry.time} lies before the clock, {self.now}")
        heapq.heappush(self._heap, entry)

    def peek(self) -> float:
        """The time of the next event; infinity when there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def pop(self) -> Happening:
        """The next event; the clock moves to it."""
        entry = heapq.heappop(self._heap)
        self.now = entry[0]
        return entry

    def entries(self) -> list[Happening]:
        """All that is scheduled, in order."""
        return sorted(self._heap)
