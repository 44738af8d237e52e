"""Devices that do not come back: trips are given up after a while, and a run that waits in vain says so."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from freshet.core.saving import Tree

if TYPE_CHECKING:
    from freshet.core.server import Flight

GIVEN_UP = "no upload within run.round_deadline"
#: A run has stalled when it waits so many times longer for a useful upload than it ever had to before.
PATIENCE = 3.0


@dataclass
class Deadline:
    """Trips in the order in which they began, as (due, device, trip); none is given up where ``seconds`` is 0."""

    seconds: float = 0.0
    trips: deque[tuple[float, int, int]] = field(default_factory=deque)
    #: The time at which to look next, if that was asked for.
    look: float | None = None

    def began(self, now: float, device: int, trip: int) -> None:
        if self.seconds:
            self.trips.append((now + self.seconds, device, trip))

    def overdue(self, now: float, flights: "Mapping[int, Flight]") -> list[tuple[int, int]]:
        """Trips to give up: their time is over and they are still in flight."""
        if self.look is not None and self.look <= now:
            self.look = None
        found = []
        while self.trips and (self.trips[0][0] <= now or not _flies(self.trips[0], flights)):
            entry = self.trips.popleft()
            if _flies(entry, flights):
                found.append(entry[1:])
        return found

    def next_look(self) -> float | None:
        """When to look for the first of them; None when that was asked for before."""
        if self.look is not None or not self.trips:
            return None
        self.look = self.trips[0][0]
        return self.look

    def state(self) -> Tree:
        return {"look": self.look, "trips": [list(entry) for entry in self.trips]}

    def restore(self, tree: Tree) -> None:
        self.look, self.trips = tree["look"], deque((due, device, trip) for due, device, trip in tree["trips"])


def _flies(entry: tuple[float, int, int], flights: "Mapping[int, Flight]") -> bool:
    flight = flights.get(entry[1])
    return flight is not None and flight.trip == entry[2]


@dataclass
class Pulse:
    """When an upload was last of use, how many were, and the longest wait for one so far."""

    last: float = 0.0
    used: int = 0
    longest: float = 0.0

    def beat(self, now: float, used: int) -> None:
        if used != self.used:
            waited = now - self.last
            if waited > self.longest:
                self.longest = waited
            self.last, self.used = now, used

    def stalled(self, now: float, in_flight: int) -> float | None:
        """Since when the run has been waiting in vain; None if it has not."""
        waits = self.used and in_flight and now - self.last > PATIENCE * self.longest
        return self.last if waits else None
