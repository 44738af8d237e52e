"""What ends a run before its time: the last of its rounds, or a model that has diverged.

Devices that do not come back: trips are given up after a while, and a run that waits in vain says so.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from freshet.core.saving import Tree
from freshet.errors import RunError

if TYPE_CHECKING:
    from freshet.core.server import ActiveTrip, Server


#: A test loss so many times the first one has diverged.
DIVERGENCE_FACTOR = 1000.0
#: A first loss below this counts as this much, so that a model that starts nearly perfect is not held to it.
MIN_FIRST_LOSS = 0.01
#: Trips in a row that end without use before a run that only counts rounds is given up.
MAX_UNUSED_TRIPS = 1000


class HasLoss(Protocol):
    """What a test gives, as far as it matters here."""

    @property
    def loss(self) -> float: ...


class PendingTest(Protocol):
    """A test whose result may still be on its way."""

    def result(self) -> HasLoss: ...


class KnownLoss(NamedTuple):
    """A test whose loss is known."""

    loss: float

    def result(self) -> "KnownLoss":
        return self


class DivergenceMonitor:
    """Looks at the losses of the tests, each when the next one begins.

    Nobody then waits for a test that has just been handed out, and what is decided depends on the log alone: not on how
    many workers there are, nor on when they answer.
    """

    def __init__(self) -> None:
        self.first: float | None = None
        self.diverged: float | None = None
        self._last: tuple[float, PendingTest] | None = None

    def test(self, time: float, score: PendingTest) -> None:
        """A test has begun; the one before it is looked at now."""
        self.check_latest()
        self._last = (time, score)

    def check_latest(self) -> None:
        """Look at the newest test (waits for its result)."""
        if self._last is not None:
            time, score = self._last
            self._last = None
            self._judge(time, score.result().loss)

    def _judge(self, time: float, loss: float) -> None:
        """Not finite, or more than ``FACTOR`` times the first: the time is kept, once."""
        if self.first is None:
            self.first = loss
        if self.diverged is None and not (
            math.isfinite(loss) and loss <= DIVERGENCE_FACTOR * max(self.first, MIN_FIRST_LOSS)
        ):
            self.diverged = time

    def state(self) -> dict[str, Any]:
        """Plain values; the newest test stays to be looked at when the next one begins, as if nothing had happened."""
        last = None if self._last is None else [self._last[0], self._last[1].result().loss]
        return {"first": self.first, "diverged": self.diverged, "last": last}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        self.first, self.diverged, last = state["first"], state["diverged"], state["last"]
        self._last = None if last is None else (last[0], KnownLoss(last[1]))


class RoundLimit:
    """Counts the rounds of a run that ends after ``limit`` of them (0: it does not)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.consumed = 0
        self.fruitless = 0

    def over(self, server: "Server") -> bool:
        """Whether the last round is over."""
        return 0 < self.limit <= server.rounds

    def trip_ended(self, server: "Server", endless: bool) -> bool:
        """A trip has ended. A run without an end in time must not wait for ever for uploads that it can use."""
        if not self.limit:
            return False
        self.fruitless = self.fruitless + 1 if server.consumed == self.consumed else 0
        self.consumed = server.consumed
        if endless and not server.synchronous and self.fruitless >= MAX_UNUSED_TRIPS:
            raise RunError(
                f"run.rounds: the last {MAX_UNUSED_TRIPS} trips were all rejected, discarded or lost, so that round "
                f"{server.rounds + 1} never ends; see the reasons in events.jsonl, or give run.until as well"
            )
        return self.over(server)

    def state(self) -> list[int]:
        return [self.consumed, self.fruitless]

    def restore(self, state: list[int]) -> None:
        self.consumed, self.fruitless = state


GIVEN_UP = "no upload within run.round_deadline"
#: A run has stalled when it waits so many times longer for a useful upload than it ever had to before.
STALL_FACTOR = 3.0


@dataclass
class Deadline:
    """Trips in the order in which they began, as (due, device, trip); none is given up where ``seconds`` is 0."""

    seconds: float = 0.0
    trips: deque[tuple[float, int, int]] = field(default_factory=deque)
    #: The time at which to look next, if that was asked for.
    next_check: float | None = None

    def trip_started(self, now: float, device: int, trip: int) -> None:
        if self.seconds:
            self.trips.append((now + self.seconds, device, trip))

    def overdue(self, now: float, flights: "Mapping[int, ActiveTrip]") -> list[tuple[int, int]]:
        """Trips to give up: their time is over and they are still in flight."""
        if self.next_check is not None and self.next_check <= now:
            self.next_check = None
        found = []
        while self.trips and (self.trips[0][0] <= now or not _is_active(self.trips[0], flights)):
            entry = self.trips.popleft()
            if _is_active(entry, flights):
                found.append(entry[1:])
        return found

    def schedule_check(self) -> float | None:
        """When to look for the first of them; None when that was asked for before."""
        if self.next_check is not None or not self.trips:
            return None
        self.next_check = self.trips[0][0]
        return self.next_check

    def state(self) -> Tree:
        return {"look": self.next_check, "trips": [list(entry) for entry in self.trips]}

    def restore(self, tree: Tree) -> None:
        self.next_check, self.trips = tree["look"], deque((due, device, trip) for due, device, trip in tree["trips"])


def _is_active(entry: tuple[float, int, int], flights: "Mapping[int, ActiveTrip]") -> bool:
    flight = flights.get(entry[1])
    return flight is not None and flight.trip == entry[2]


@dataclass
class StallDetector:
    """When an upload was last of use, how many were, and the longest wait for one so far."""

    last: float = 0.0
    used: int = 0
    longest: float = 0.0

    def record(self, now: float, used: int) -> None:
        if used != self.used:
            waited = now - self.last
            if waited > self.longest:
                self.longest = waited
            self.last, self.used = now, used

    def stalled_since(self, now: float, in_flight: int) -> float | None:
        """Since when the run has been waiting in vain; None if it has not."""
        waits = self.used and in_flight and now - self.last > STALL_FACTOR * self.longest
        return self.last if waits else None
