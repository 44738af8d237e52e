"""The event queue of virtual time. Entries are plain tuples, so a run in the middle can be saved and compared."""

import math
from collections.abc import Iterable
from enum import IntEnum
from heapq import heapify, heappop, heappush
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


#: Device and trip of what happens to none.
NO_TRIP = (-1, -1)
#: A happening, or its four fields alone, which are made in a fraction of the time: there is one for every trip.
Entry = tuple[float, int, int, int]


class EventHeap:
    """A priority queue by (time, rank, device). Time never goes back.

    What is due at this very instant (new trips after an arrival) is kept apart: it comes next and need not travel
    through the many entries of trips under way.
    """

    def __init__(self, entries: Iterable[Entry] = (), now: float = 0.0) -> None:
        self._heap: list[Entry] = [Happening(*entry) for entry in entries]
        heapify(self._heap)
        self._due: list[Entry] = []
        self.now = now

    def __len__(self) -> int:
        return len(self._heap) + len(self._due)

    def push(self, entry: Entry) -> None:
        """Schedule an event, now or later."""
        time, now = entry[0], self.now
        if time > now:
            heappush(self._heap, entry)
        elif time == now:
            heappush(self._due, entry)
        else:
            raise ValueError(f"event at {time} lies before the clock, {now}")

    def peek(self) -> float:
        """The time of the next event; infinity when there is none."""
        if self._due:
            return self.now
        return self._heap[0][0] if self._heap else math.inf

    def is_before(self, end: tuple[float, int]) -> bool:
        """Whether there is an event before this time and rank."""
        due, heap = self._due, self._heap
        return bool(heap and heap[0] < end) or bool(due and due[0] < end)

    def pop(self) -> Entry:
        """The next event; the clock moves to it."""
        due, heap = self._due, self._heap
        if due and not (heap and heap[0] < due[0]):
            return heappop(due)
        entry = heappop(heap)
        self.now = entry[0]
        return entry

    def entries(self) -> list[Entry]:
        """All that is scheduled, in order."""
        return sorted([*self._heap, *self._due])
