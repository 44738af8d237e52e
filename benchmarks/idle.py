"""Shared by benchmarks without training: an executor that does nothing, and the memory of this process."""

import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np

from freshet.core.vectors import Vector
from freshet.training.device_eval import DeviceEvaluation
from freshet.training.task import Score
from freshet.training.trainer import TripInput
from freshet.training.trip import TripOutcome


class Done:
    """A completed result."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value

    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        pass


class NoTraining:
    """An executor whose trips return their weights unchanged, or shifted by ``move``.

    Trips from the same model share one result, so that almost no time is spent here.
    """

    def __init__(self, move: float = 0.0) -> None:
        self._move = np.float32(move)
        self._last: tuple[Vector | None, Done] = (None, Done(None))

    def train(self, work: TripInput, due: float) -> Done:
        weights = work.assignment.weights
        if self._last[0] is not weights:
            moved = weights + self._move if self._move else weights
            self._last = (weights, Done(TripOutcome(moved, 1, {}, (), {}, {})))
        return self._last[1]

    def evaluate(self, weights: Vector) -> Done:
        return Done(Score({"accuracy": 0.0}, 1.0))

    def evaluate_devices(self, evaluation: DeviceEvaluation, due: float) -> Done:
        raise NotImplementedError("this benchmark evaluates no devices")

    def close(self) -> None:
        pass


def resident() -> int:
    """Resident memory of this process in bytes: now (Linux) or at its peak (elsewhere)."""
    status = Path("/proc/self/statm")
    if status.is_file():
        return int(status.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
