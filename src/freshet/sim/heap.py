"""The event queue of virtual time. Its entries are tuples, so that a running simulation can be saved."""

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


class Scheduled(NamedTuple):
    """An event to come: when, what, and to which trip of which device (-1: none)."""

    time: float
    rank: int
    device: int = -1
    trip: int = -1


class EventHeap:
    """A priority queue by (time, rank, device). Time never goes back."""

    def __init__(self, entries: Iterable[tuple[float, int, int, int]] = (), now: float = 0.0) -> None:
        self._heap = [Scheduled(*entry) for entry in entries]
        heapify(self._heap)
        self.now = now

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, scheduled: Scheduled) -> None:
        """Schedule an event, now or later."""
        if not scheduled.time >= self.now:  # NaN too
            raise ValueError(f"the event at {scheduled.time} lies before the clock, {self.now}")
        heappush(self._heap, scheduled)

    def has_event_before(self, end: tuple[float, int]) -> bool:
        """Return whether an event lies before this time and rank."""
        return bool(self._heap) and self._heap[0] < end

    def pop(self) -> Scheduled:
        """Return the next event and move the clock to it."""
        scheduled = heappop(self._heap)
        self.now = scheduled.time
        return scheduled

    def in_order(self) -> list[Scheduled]:
        """Return all events in order."""
        return sorted(self._heap)
