"""What a run leaves behind."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from freshet.core.vectors import Vector
from freshet.runs.facts import Metric, metric_of
from freshet.runs.summary import time_to_target
from freshet.training.flat import Factory, FlatModel
from freshet.training.trainer import initial_module

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]


class Result:
    """What a run leaves behind: metrics, the final model, and the run directory."""

    def __init__(
        self,
        directory: Path,
        summary: dict[str, Any],
        rows: list[dict[str, Any]],
        weights: Vector,
        rebuilt: "Rebuilt",
    ) -> None:
        self.directory, self.summary, self.rows, self.weights = directory, summary, rows, weights
        self._rebuilt = rebuilt

    def __repr__(self) -> str:
        facts = "method", f"final_{self.metric.name}", "virtual_time", "status"
        return f"Result({', '.join(f'{fact}={self.summary[fact]}' for fact in facts)}, directory={self.directory})"

    @property
    def time(self) -> Floats:
        """Seconds of virtual time at which the model was tested."""
        return self._column("time")

    @property
    def metric(self) -> Metric:
        """What the run is judged by."""
        return metric_of(self.summary)

    @property
    def values(self) -> Floats:
        """That metric at each test: the accuracy, unless the task has another."""
        return self._column(self.metric.name)

    @property
    def accuracy(self) -> Floats:
        return self._column("accuracy")

    @property
    def loss(self) -> Floats:
        return self._column("loss")

    def _column(self, name: str) -> Floats:
        return np.array([np.nan if row[name] is None else row[name] for row in self.rows], dtype=np.float64)

    def frame(self) -> "pd.DataFrame":
        """All metrics as a pandas DataFrame, one row per test of the model."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def time_to(self, target: float) -> float | None:
        """First tested time at which the metric is as good as this, or None."""
        return time_to_target(self.rows, target, self.metric)

    def module(self) -> nn.Module:
        """The final model as a module, ready for prediction on inputs as they are in the data set."""
        return self._rebuilt(self.weights)


@dataclass(frozen=True)
class Rebuilt:
    """From flat weights to a module; what the data set's inputs need before they go in, comes first."""

    factory: Factory
    seed: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __call__(self, weights: Vector) -> nn.Module:
        flat = FlatModel(initial_module(self.factory, self.seed))
        flat.load(weights)
        network = flat.module.eval()
        if self.mean is None or self.std is None:
            return network
        return nn.Sequential(OrderedDict(prepare=Prepare(self.mean, self.std), network=network)).eval()


class Prepare(nn.Module):
    """``(x - mean) / std`` per channel of (N, C, H, W), with x / 255 for uint8 images."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 255.0 if x.dtype is torch.uint8 else 1.0
        return (x.float() - self.mean * scale) / (self.std * scale)
