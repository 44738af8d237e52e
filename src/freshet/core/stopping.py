"""What ends a run early: a round limit or divergence. Also deadlines for trips, and the detection of stalled runs."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from freshet.core.saving import Tree
from freshet.errors import RunError

if TYPE_CHECKING:
    from freshet.core.server import ActiveTrip, Server


#: A run has diverged if its test loss is this many times the first one.
DIVERGENCE_FACTOR = 1000.0
#: A smaller first loss counts as this much, so that a model may start nearly perfect.
MIN_FIRST_LOSS = 0.01
#: A run without a time limit gives up after this many consecutive trips without a usable upload.
MAX_UNUSED_TRIPS = 1000


class HasLoss(Protocol):
    """The result of a test, reduced to its loss."""

    @property
    def loss(self) -> float: ...


class PendingTest(Protocol):
    """A test that may still be running."""

    def result(self) -> HasLoss: ...


class KnownLoss(NamedTuple):
    """A finished test."""

    loss: float

    def result(self) -> "KnownLoss":
        return self


class DivergenceMonitor:
    """Checks the loss of each test when the next test begins.

    So no one waits for a test that has just started, and the decision depends on the log alone, not on the number of
    workers or their timing.
    """

    def __init__(self) -> None:
        self.first: float | None = None
        self.diverged: float | None = None
        self._last: tuple[float, PendingTest] | None = None

    def test(self, time: float, score: PendingTest) -> None:
        """A test has begun. Check the one before it."""
        self.check_latest()
        self._last = (time, score)

    def check_latest(self) -> None:
        """Check the newest test. Waits for its result."""
        if self._last is not None:
            time, score = self._last
            self._last = None
            self._judge(time, score.result().loss)

    def _judge(self, time: float, loss: float) -> None:
        """Keep the first time at which the loss is not finite or above ``DIVERGENCE_FACTOR`` times the first."""
        if self.first is None:
            self.first = loss
        if self.diverged is None and not (
            math.isfinite(loss) and loss <= DIVERGENCE_FACTOR * max(self.first, MIN_FIRST_LOSS)
        ):
            self.diverged = time

    def state(self) -> dict[str, Any]:
        """Plain values. The newest test is still unchecked, so that a resumed run checks it at the same time."""
        last = None if self._last is None else [self._last[0], self._last[1].result().loss]
        return {"first": self.first, "diverged": self.diverged, "last": last}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        self.first, self.diverged, last = state["first"], state["diverged"], state["last"]
        self._last = None if last is None else (last[0], KnownLoss(last[1]))


class RoundLimit:
    """Ends a run after ``limit`` rounds (0: no limit)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.consumed = 0
        self.fruitless = 0

    def over(self, server: "Server") -> bool:
        """Whether the last round is over."""
        return 0 < self.limit <= server.rounds

    def trip_ended(self, server: "Server", endless: bool) -> bool:
        """Whether the run is over after this trip. A run without a time limit must not wait forever."""
        if not self.limit:
            return False
        self.fruitless = self.fruitless + 1 if server.consumed == self.consumed else 0
        self.consumed = server.consumed
        if endless and not server.synchronous and self.fruitless >= MAX_UNUSED_TRIPS:
            raise RunError(
                f"run.rounds: the last {MAX_UNUSED_TRIPS} trips were all rejected, discarded or lost, so round "
                f"{server.rounds + 1} never ends; see the reasons in events.jsonl, or set run.until as well"
            )
        return self.over(server)

    def state(self) -> list[int]:
        return [self.consumed, self.fruitless]

    def restore(self, state: list[int]) -> None:
        self.consumed, self.fruitless = state


GIVEN_UP = "no upload within run.round_deadline"
CANCELLED = "cancelled by the method"
#: A run has stalled if it waits this many times longer for a usable upload than ever before.
STALL_FACTOR = 3.0


@dataclass
class Deadline:
    """Trips in the order of their start, as (due, device, trip). No trip is given up if ``seconds`` is 0."""

    seconds: float = 0.0
    trips: deque[tuple[float, int, int]] = field(default_factory=deque)
    #: The time of the next scheduled check, if any.
    next_check: float | None = None

    def trip_started(self, now: float, device: int, trip: int) -> None:
        if self.seconds:
            self.trips.append((now + self.seconds, device, trip))

    def overdue(self, now: float, active: "Mapping[int, ActiveTrip]") -> list[tuple[int, int]]:
        """Trips to give up: they are past their deadline and still in flight."""
        if self.next_check is not None and self.next_check <= now:
            self.next_check = None
        found = []
        while self.trips and (self.trips[0][0] <= now or not _is_active(self.trips[0], active)):
            entry = self.trips.popleft()
            if _is_active(entry, active):
                found.append(entry[1:])
        return found

    def schedule_check(self) -> float | None:
        """The time to check for overdue trips; None if there are no trips or a check is already scheduled."""
        if self.next_check is not None or not self.trips:
            return None
        self.next_check = self.trips[0][0]
        return self.next_check

    def state(self) -> Tree:
        return {"look": self.next_check, "trips": [list(entry) for entry in self.trips]}

    def restore(self, tree: Tree) -> None:
        self.next_check, self.trips = tree["look"], deque((due, device, trip) for due, device, trip in tree["trips"])


def _is_active(entry: tuple[float, int, int], active: "Mapping[int, ActiveTrip]") -> bool:
    trip = active.get(entry[1])
    return trip is not None and trip.trip == entry[2]


@dataclass
class StallDetector:
    """The time of the last usable upload, the number of usable uploads, and the longest wait for one."""

    last: float = 0.0
    used: int = 0
    longest: float = 0.0

    def record(self, now: float, used: int) -> None:
        if used != self.used:
            self.longest = max(self.longest, now - self.last)
            self.last, self.used = now, used

    def stalled_since(self, now: float, in_flight: int) -> float | None:
        """When the run stalled; None if it has not."""
        waits = self.used and in_flight and now - self.last > STALL_FACTOR * self.longest
        return self.last if waits else None
