"""What ends a run before its time: the last of its rounds, or a model that has diverged."""

import math
from typing import Any, NamedTuple, Protocol

from freshet.core.server import Server
from freshet.errors import RunError

#: A test loss so many times the first one has diverged.
FACTOR = 1000.0
#: A first loss below this counts as this much, so that a model that starts nearly perfect is not held to it.
LEAST = 0.01
#: Trips in a row that end without use before a run that only counts rounds is given up.
PATIENCE = 1000


class Losing(Protocol):
    """What a test gives, as far as it matters here."""

    @property
    def loss(self) -> float: ...


class Test(Protocol):
    """A test whose result may still be on its way."""

    def result(self) -> Losing: ...


class Known(NamedTuple):
    """A test whose loss is known."""

    loss: float

    def result(self) -> "Known":
        return self


class Watch:
    """Looks at the losses of the tests, each when the next one begins.

    Nobody then waits for a test that has just been handed out, and what is decided depends on the log alone: not on how
    many workers there are, nor on when they answer.
    """

    def __init__(self) -> None:
        self.first: float | None = None
        self.diverged: float | None = None
        self._last: tuple[float, Test] | None = None

    def test(self, time: float, score: Test) -> None:
        """A test has begun; the one before it is looked at now."""
        self.settle()
        self._last = (time, score)

    def settle(self) -> None:
        """Look at the newest test (waits for its result)."""
        if self._last is not None:
            time, score = self._last
            self._last = None
            self._judge(time, score.result().loss)

    def _judge(self, time: float, loss: float) -> None:
        """Not finite, or more than ``FACTOR`` times the first: the time is kept, once."""
        if self.first is None:
            self.first = loss
        if self.diverged is None and not (math.isfinite(loss) and loss <= FACTOR * max(self.first, LEAST)):
            self.diverged = time

    def state(self) -> dict[str, Any]:
        """Plain values; the newest test stays to be looked at when the next one begins, as if nothing had happened."""
        last = None if self._last is None else [self._last[0], self._last[1].result().loss]
        return {"first": self.first, "diverged": self.diverged, "last": last}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of ``state``."""
        self.first, self.diverged, last = state["first"], state["diverged"], state["last"]
        self._last = None if last is None else (last[0], Known(last[1]))


class Rounds:
    """Counts the rounds of a run that ends after ``limit`` of them (0: it does not)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.consumed = 0
        self.fruitless = 0

    def over(self, server: Server) -> bool:
        """Whether the last round is over."""
        return 0 < self.limit <= server.rounds

    def ended(self, server: Server, endless: bool) -> bool:
        """A trip has ended. A run without an end in time must not wait for ever for uploads that it can use."""
        if not self.limit:
            return False
        self.fruitless = self.fruitless + 1 if server.consumed == self.consumed else 0
        self.consumed = server.consumed
        if endless and not server.synchronous and self.fruitless >= PATIENCE:
            raise RunError(
                f"run.rounds: the last {PATIENCE} trips were all rejected, discarded or lost, so that round "
                f"{server.rounds + 1} never ends; see the reasons in events.jsonl, or give run.until as well"
            )
        return self.over(server)

    def state(self) -> list[int]:
        return [self.consumed, self.fruitless]

    def restore(self, state: list[int]) -> None:
        self.consumed, self.fruitless = state
