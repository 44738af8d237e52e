"""What a driver expects of an executor, and what an executor needs to know of a federation.

Training in this process, when a result is first asked for (so work that nobody needs is never done).

An executor whose user gets ready late: when the first training is done, so that workers begin without delay.

How long a run's training takes on one core, before it is run: an estimate that is the same on every machine.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from freshet.core.vectors import Vector
from freshet.training.batches import FederatedData
from freshet.training.device_eval import DeviceScores, Exam
from freshet.training.network import Factory, build_quietly
from freshet.training.options import TrainingOptions
from freshet.training.outgoing import AS_IT_IS, Outgoing
from freshet.training.task import Score, Task
from freshet.training.trainer import Trainer, Work
from freshet.training.trip import Outcome

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


#: Seconds after which one who waits for the first result gets ready meanwhile.
SECONDS_TO_WAIT = 1.0


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
        end = time.monotonic() + SECONDS_TO_WAIT
        while not self._is_ready and not awaited.done() and time.monotonic() < end:
            time.sleep(0.002)
        if not self._is_ready:
            self._get_ready()
            self._is_ready = True


#: Roughly, on one core: seconds of an SGD step whatever the model, and operations of a model per second.
STEP_SECONDS, OPERATIONS_PER_SECOND = 5e-4, 3e10


def training_seconds(setup: Setup, trips: float) -> float:
    """Seconds of ``trips`` local trainings with an average shard.

    ``trips (steps STEP_SECONDS + 3 f epochs n / OPERATIONS_PER_SECOND)``: n samples, f operations of a forward pass of
    one of them, of which the backward pass takes twice as many.
    """
    epochs, batch = setup.training.epochs, setup.training.batch_size
    samples = sum(len(shard) for shard in setup.data.shards) / len(setup.data.shards)
    steps = epochs * math.ceil(samples / batch)
    return trips * (steps * STEP_SECONDS + 3 * operations(setup) * epochs * samples / OPERATIONS_PER_SECOND)


def operations(setup: Setup) -> int:
    """Additions and multiplications of one sample's forward pass, at least two per parameter."""
    from torch.utils.flop_counter import FlopCounterMode

    module = build_quietly(setup.factory).float().eval()
    least = 2 * sum(parameter.numel() for parameter in module.parameters())
    x, _ = next(setup.data.test.chunks(1))
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            module(x)
    except Exception:  # an operation that cannot be counted: an estimate must not stop a run
        return least
    return max(least, int(counter.get_total_flops()))
