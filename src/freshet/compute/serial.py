"""Training in this process, when a result is first asked for (so work that nobody needs is never done)."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from freshet.core.vectors import Vector
from freshet.training.local import Outcome, Score, Trainer, Work

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Future(Protocol[T_co]):
    """A result that may still be on its way."""

    def result(self) -> T_co: ...

    def done(self) -> bool: ...

    def cancel(self) -> object: ...


class Executor(Protocol):
    """Trains trips and scores models somewhere."""

    def train(self, work: Work) -> Future[Outcome]: ...

    def evaluate(self, weights: Vector) -> Future[Score]: ...

    def close(self) -> None: ...


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

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def train(self, work: Work) -> Lazy[Outcome]:
        return Lazy(lambda: self._trainer.train(work))

    def evaluate(self, weights: Vector) -> Lazy[Score]:
        return Lazy(lambda: self._trainer.evaluate(weights))

    def close(self) -> None:
        torch.set_num_threads(self._threads)
