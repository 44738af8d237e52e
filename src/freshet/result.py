"""What a run leaves behind."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from freshet._version import __version__
from freshet.config import Config
from freshet.core.vectors import Vector
from freshet.runs.writer import weights_sha256
from freshet.sim.driver import Simulation
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
        return first_crossing(self.rows, target)

    def module(self) -> nn.Module:
        """The final model as a module, ready for prediction."""
        flat = FlatModel(build_quietly(self._factory))
        flat.load(self.weights)
        return flat.module.eval()


def first_crossing(rows: Sequence[Mapping[str, Any]], target: float) -> float | None:
    """First time on the test grid at which the accuracy reaches the target."""
    return next((row["time"] for row in rows if row["accuracy"] >= target), None)


def remarks(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a person should know of a run before reading its figures: one sentence each."""
    said, uploads, rejected = [], summary["uploads"], summary["rejected"]
    diverged = summary.get("diverged")
    if diverged is not None:
        loss = next((row["loss"] for row in rows if row["time"] == diverged), None)
        size = "is not finite" if loss is None else f"{loss:.2g}"
        said.append(f"{summary['method']} diverged at {diverged:g} s: test loss {size}; try a smaller training.lr")
    skipped = summary.get("adaptations_skipped")
    if skipped:
        whole = skipped + summary["adaptations"]
        said.append(f"{summary['method']}: {skipped} of {whole} adaptations were skipped, since steps were forgotten")
    if rejected and 2 * rejected > uploads:
        share = "all" if rejected >= uploads else f"{rejected} of"
        said.append(f"{summary['method']}: {share} {uploads} uploads were rejected; see the reasons in events.jsonl")
    return said


def summarise(
    config: Config,
    simulation: Simulation,
    rows: Sequence[Mapping[str, Any]],
    weights: Vector,
    status: str,
    wall: float,
) -> dict[str, Any]:
    """The content of summary.json."""
    accuracies = [row["accuracy"] for row in rows]
    return {
        "method": config.method_name,
        "seed": config.run.seed,
        "status": status,
        "final_accuracy": accuracies[-1] if rows else None,
        "best_accuracy": max(accuracies) if rows else None,
        "final_loss": rows[-1]["loss"] if rows else None,
        "target": config.run.target,
        "time_to_target": first_crossing(rows, config.run.target),
        **simulation.facts(),
        "weights_sha256": weights_sha256(weights),
        "wall_seconds": round(wall, 3),
        "freshet": __version__,
        **simulation.server.method.closing(),
    }
