"""What a driver expects of an executor, and what an executor needs to know of a federation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from freshet.core.vectors import Vector
from freshet.training.batches import FederatedData
from freshet.training.devices import DeviceScores, Exam
from freshet.training.flat import Factory
from freshet.training.options import TrainingOptions
from freshet.training.outcome import Outcome, Score
from freshet.training.outgoing import AS_IT_IS, Outgoing
from freshet.training.task import Task
from freshet.training.trainer import Trainer, Work

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Future(Protocol[T_co]):
    """A result that may still be on its way."""

    def result(self) -> T_co: ...

    def done(self) -> bool: ...

    def cancel(self) -> object: ...


class OnDemand(Generic[T]):
    """A future whose work is handed out only when somebody needs it."""

    def __init__(self, submit: Callable[[], Future[T]]) -> None:
        self._submit: Callable[[], Future[T]] = submit
        self._future: Future[T] | None = None

    def start(self) -> Future[T]:
        """Hand the work out, if it was not yet."""
        if self._future is None:
            self._future = self._submit()
        return self._future

    def result(self) -> T:
        return self.start().result()

    def done(self) -> bool:
        return self._future is not None and self._future.done()

    def cancel(self) -> None:
        if self._future is not None:
            self._future.cancel()


class Executor(Protocol):
    """Trains trips and scores models somewhere. ``due`` is the virtual time at which the result is needed."""

    def train(self, work: Work, due: float) -> Future[Outcome]: ...

    def evaluate(self, weights: Vector) -> Future[Score]: ...

    def examine(self, exam: Exam, due: float) -> Future[DeviceScores]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Setup:
    """A federation's fixed part: built once by every worker."""

    factory: Factory
    data: FederatedData
    training: TrainingOptions
    seed: int
    #: The user's own; else the one that ``training`` names.
    task: Task | None = None
    #: What becomes of a trained model before it is sent.
    outgoing: Outgoing = AS_IT_IS

    def trainer(self) -> Trainer:
        return Trainer(self.factory, self.data, self.training, self.seed, self.task, self.outgoing)
