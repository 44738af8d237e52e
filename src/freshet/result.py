"""What a run leaves behind."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from freshet.core.vectors import Vector
from freshet.runs.summary import time_to_target
from freshet.training.flat import Factory, FlatModel, build_quietly

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]


class Result:
    """What a run leaves behind: metrics, the final model, and the run directory."""

    def __init__(
        self, directory: Path, summary: dict[str, Any], rows: list[dict[str, Any]], weights: Vector, factory: Factory
    ) -> None:
        self.directory, self.summary, self.rows, self.weights = directory, summary, rows, weights
        self._factory = factory

    def __repr__(self) -> str:
        facts = "method", "final_accuracy", "virtual_time", "status"
        return f"Result({', '.join(f'{fact}={self.summary[fact]}' for fact in facts)}, directory={self.directory})"

    @property
    def time(self) -> Floats:
        """Seconds of virtual time at which the model was tested."""
        return self._column("time")

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
        """First tested time with at least this accuracy, or None."""
        return time_to_target(self.rows, target)

    def module(self) -> nn.Module:
        """The final model as a module, ready for prediction."""
        flat = FlatModel(build_quietly(self._factory))
        flat.load(self.weights)
        return flat.module.eval()
