"""Training in this process, when a result is first asked for (so work that nobody needs is never done)."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from freshet.compute.base import Setup
from freshet.core.vectors import Vector
from freshet.training.devices import DeviceScores, Exam
from freshet.training.outcome import Outcome, Score
from freshet.training.trainer import Work

T = TypeVar("T")


class Lazy(Generic[T]):
    """A future that is computed at the first call of ``result``."""

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute: Callable[[], T] | None = compute
        self._value: list[T] = []

    def result(self) -> T:
        if not self._value:
            assert self._compute is not None, "cancelled"
            self._value.append(self._compute())
            self._compute = None
        return self._value[0]

    def done(self) -> bool:
        return bool(self._value)

    def cancel(self) -> None:
        self._compute = None


class SerialExecutor:
    """One trip at a time, with one torch thread (as every executor uses, so that all give the same bits)."""

    def __init__(self, setup: Setup) -> None:
        self._trainer = setup.trainer()
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def train(self, work: Work, due: float) -> Lazy[Outcome]:
        return Lazy(lambda: self._trainer.train(work))

    def evaluate(self, weights: Vector) -> Lazy[Score]:
        score = Lazy(lambda: self._trainer.evaluate(weights))
        score.result()  # a test is always needed, and the log should not wait for it
        return score

    def examine(self, exam: Exam, due: float) -> Lazy[DeviceScores]:
        scores = Lazy(lambda: self._trainer.examine(exam))
        scores.result()
        return scores

    def close(self) -> None:
        torch.set_num_threads(self._threads)
