"""The executor interface, training in this process, and an estimate of how long a run's training takes."""

import math
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from freshet.core.vectors import Vector
from freshet.training.device_eval import DeviceEvaluation, DeviceScores
from freshet.training.network import build_module
from freshet.training.task import Score
from freshet.training.trainer import Setup, TripInput
from freshet.training.trip import TripOutcome

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Future(Protocol[T_co]):
    """A result that may not be ready yet."""

    def result(self) -> T_co: ...

    def done(self) -> bool: ...

    def cancel(self) -> object: ...


class DeferredFuture(Generic[T]):
    """A future that submits its work only when the result is needed."""

    def __init__(self, submit: Callable[[], Future[T]]) -> None:
        self._submit: Callable[[], Future[T]] | None = submit
        self._future: Future[T] | None = None

    def start(self) -> Future[T]:
        """Submit the work, unless it has been submitted."""
        if self._future is None:
            assert self._submit is not None
            self._future, self._submit = self._submit(), None  # what it refers to may refer to this future
        return self._future

    def result(self) -> T:
        return self.start().result()

    def done(self) -> bool:
        return self._future is not None and self._future.done()

    def cancel(self) -> None:
        if self._future is not None:
            self._future.cancel()


class Executor(Protocol):
    """Trains trips and scores models. ``due`` is the virtual time at which the result is needed."""

    def train(self, work: TripInput, due: float) -> Future[TripOutcome]: ...

    def evaluate(self, weights: Vector) -> Future[Score]: ...

    def evaluate_devices(self, evaluation: DeviceEvaluation, due: float) -> Future[DeviceScores]: ...

    def close(self) -> None: ...


class LazyFuture(Generic[T]):
    """A future that computes its value at the first call of ``result``."""

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
    """Trains one trip at a time, when its result is needed.

    It uses one torch thread, as every executor does, so all executors give the same bits.
    """

    def __init__(self, setup: Setup) -> None:
        self._trainer = setup.trainer()
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def train(self, work: TripInput, due: float) -> LazyFuture[TripOutcome]:
        return LazyFuture(lambda: self._trainer.train(work))

    def evaluate(self, weights: Vector) -> LazyFuture[Score]:
        score = LazyFuture(lambda: self._trainer.evaluate(weights))
        score.result()  # every test is needed, and the log should not wait for it
        return score

    def evaluate_devices(self, evaluation: DeviceEvaluation, due: float) -> LazyFuture[DeviceScores]:
        scores = LazyFuture(lambda: self._trainer.evaluate_devices(evaluation))
        scores.result()
        return scores

    def close(self) -> None:
        torch.set_num_threads(self._threads)


#: Seconds to wait for the first result before the warm-up starts anyway.
WARMUP_DELAY_SECONDS = 1.0


class WarmupFuture(Generic[T]):
    """A future that calls ``before`` with the inner future before it returns the result."""

    def __init__(self, inner: Future[T], before: Callable[[Future[T]], None]) -> None:
        self._inner, self._before = inner, before
        self.done, self.cancel = inner.done, inner.cancel

    def result(self) -> T:
        self._before(self._inner)
        return self._inner.result()


class WarmupExecutor:
    """Calls ``warm_up`` once, when the first training result is ready, so that workers start without delay."""

    def __init__(self, inner: Executor, warm_up: Callable[[], None]) -> None:
        self._inner, self._warm_up = inner, warm_up
        self._is_warm = False

    def train(self, work: TripInput, due: float) -> Future[TripOutcome]:
        future = self._inner.train(work, due)
        return future if self._is_warm else WarmupFuture(future, self._warm_up_once)

    def evaluate(self, weights: Vector) -> Future[Score]:
        return self._inner.evaluate(weights)

    def evaluate_devices(self, evaluation: DeviceEvaluation, due: float) -> Future[DeviceScores]:
        return self._inner.evaluate_devices(evaluation, due)

    def close(self) -> None:
        self._inner.close()

    def _warm_up_once(self, awaited: Future[TripOutcome]) -> None:
        """Warm up, unless done before, once the result is ready or the delay is over."""
        end = time.monotonic() + WARMUP_DELAY_SECONDS
        while not self._is_warm and not awaited.done() and time.monotonic() < end:
            time.sleep(0.002)
        if not self._is_warm:
            self._warm_up()
            self._is_warm = True


#: Rough figures for one core: fixed seconds per SGD step, and model operations per second.
STEP_SECONDS, OPERATIONS_PER_SECOND = 5e-4, 3e10


def estimate_training_seconds(setup: Setup, trips: float) -> float:
    """Estimate the seconds of ``trips`` local trainings with an average shard on one core, the same on every machine.

    ``trips (steps STEP_SECONDS + 3 f epochs n / OPERATIONS_PER_SECOND)`` for n samples, where f counts the operations
    of one sample's forward pass. The backward pass takes twice as many.
    """
    epochs, batch = setup.training.epochs, setup.training.batch_size
    samples = sum(len(shard) for shard in setup.data.shards) / len(setup.data.shards)
    steps = epochs * math.ceil(samples / batch)
    return trips * (steps * STEP_SECONDS + 3 * forward_operations(setup) * epochs * samples / OPERATIONS_PER_SECOND)


def forward_operations(setup: Setup) -> int:
    """Count the additions and multiplications of one sample's forward pass, at least two per parameter."""
    from torch.utils.flop_counter import FlopCounterMode

    module = build_module(setup.factory).float().eval()
    least = 2 * sum(parameter.numel() for parameter in module.parameters())
    x, _ = next(setup.data.test.chunks(1))
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            module(x)
    except Exception:  # some operations cannot be counted; an estimate must not stop a run
        return least
    return max(least, int(counter.get_total_flops()))
