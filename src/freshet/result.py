"""What a run leaves behind."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from freshet.core.vectors import Vector
from freshet.errors import RunError
from freshet.runs.facts import Metric, metric_of
from freshet.runs.summary import time_to_target
from freshet.training.network import Factory, FlatModel, as_factory
from freshet.training.trainer import initial_module

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]


class NoSuchMetric(RunError, AttributeError):
    """The run's task has no such metric; ``hasattr`` and ``getattr`` with a default see it as not there."""


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
        """Share of the test samples that are classified correctly; not there for regression (see ``values``)."""
        return self._column("accuracy")

    @property
    def loss(self) -> Floats:
        return self._column("loss")

    def _column(self, name: str) -> Floats:
        if any(name not in row for row in self.rows):
            judged = f"this run is judged by {self.metric.name}"
            raise NoSuchMetric(f"{judged} and has no {name}; use result.values, or result.frame() for all its metrics")
        return np.array([np.nan if row[name] is None else row[name] for row in self.rows], dtype=np.float64)

    def frame(self) -> "pd.DataFrame":
        """All metrics as a pandas DataFrame, one row per test of the model."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def time_to(self, target: float) -> float | None:
        """First tested time at which the metric is as good as this, or None."""
        return time_to_target(self.rows, target, self.metric)

    def module(self, model: Factory | nn.Module | None = None) -> nn.Module:
        """The final model as a module, ready for prediction on inputs as they are in the data set.

        A run that was opened again needs to be told a model that is not built in.
        """
        rebuilt = self._rebuilt if model is None else replace(self._rebuilt, factory=as_factory(model))
        return rebuilt(self.weights)


@dataclass(frozen=True)
class Rebuilt:
    """From flat weights to a module; what the data set's inputs need before they go in, comes first."""

    #: None where only the user knows the model.
    factory: Factory | None
    seed: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    #: Parameters that do not train, where they are known better than by building the model.
    frozen: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __call__(self, weights: Vector) -> nn.Module:
        if self.factory is None:
            raise RunError("the model of this run came from Python; give it, as in result.module(build_model)")
        flat = FlatModel(initial_module(self.factory, self.seed))
        if flat.layout.size != len(weights):
            raise RunError(f"this model has {flat.layout.size:,} numbers, but the run's has {len(weights):,}")
        flat.load(weights)
        self._thaw(flat.module)
        network = flat.module.eval()
        if self.mean is None or self.std is None:
            return network
        return nn.Sequential(OrderedDict(prepare=Prepare(self.mean, self.std), network=network)).eval()

    def _thaw(self, module: nn.Module) -> None:
        """Put the parameters that do not train into their places."""
        named = dict(module.named_parameters())
        for name, array in self.frozen.items():
            if name not in named or tuple(named[name].shape) != array.shape:
                raise RunError(f"this model has no {name!r} of shape {array.shape}, but the run's has")
            named[name].data.copy_(torch.from_numpy(np.array(array)))


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
