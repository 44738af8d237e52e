"""An executor whose user gets ready late: when the first training is done, so that workers begin without delay."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from freshet.compute.base import Executor, Future
from freshet.core.vectors import Vector
from freshet.training.devices import DeviceScores, Exam
from freshet.training.outcome import Outcome, Score
from freshet.training.trainer import Work

T = TypeVar("T")
#: Seconds after which one who waits for the first result gets ready meanwhile.
PATIENCE = 1.0


class Awaited(Generic[T]):
    """A future; something is done with it before its result is handed out."""

    def __init__(self, inner: Future[T], before: Callable[[Future[T]], None]) -> None:
        self._inner, self._before = inner, before
        self.done, self.cancel = inner.done, inner.cancel

    def result(self) -> T:
        self._before(self._inner)
        return self._inner.result()


class LateExecutor:
    """Another executor, and what its user has to do once before it can use a trained model."""

    def __init__(self, inner: Executor, get_ready: Callable[[], None]) -> None:
        self._inner, self._get_ready = inner, get_ready
        self._is_ready = False

    def train(self, work: Work, due: float) -> Future[Outcome]:
        future = self._inner.train(work, due)
        return future if self._is_ready else Awaited(future, self._once)

    def evaluate(self, weights: Vector) -> Future[Score]:
        return self._inner.evaluate(weights)

    def examine(self, exam: Exam, due: float) -> Future[DeviceScores]:
        return self._inner.examine(exam, due)

    def close(self) -> None:
        self._inner.close()

    def _once(self, awaited: Future[Outcome]) -> None:
        """Get ready, if that was not done before, when a result is there or long in coming."""
        end = time.monotonic() + PATIENCE
        while not self._is_ready and not awaited.done() and time.monotonic() < end:
            time.sleep(0.002)
        if not self._is_ready:
            self._get_ready()
            self._is_ready = True
