"""What a run leaves behind.

``freshet.load``: the ``Result`` of a run that is over, from its directory alone.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from freshet.assembly import built_in
from freshet.config import CUSTOM, resolve
from freshet.core.vectors import Vector
from freshet.errors import ConfigError, RunError
from freshet.runs.reader import RunDirectory
from freshet.runs.records import ACCURACY, Metric, metric_of
from freshet.runs.summary import time_to_target
from freshet.runs.world import RunWorld
from freshet.runs.writer import weights_sha256
from freshet.training.network import Factory, ModuleBuilder, as_factory

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
        rebuilt: ModuleBuilder,
    ) -> None:
        self.directory, self.summary, self.rows, self.weights = directory, summary, rows, weights
        self._rebuilt = rebuilt

    def __repr__(self) -> str:
        from freshet.display import number

        name, value, seconds = self.metric.name, self.summary[f"final_{self.metric.name}"], self.summary["virtual_time"]
        reached = f"{name} {number(value)} after {seconds:g} s"
        return f"Result({self.summary['method']}: {reached}, {self.summary['status']}, in {self.directory})"

    def _repr_html_(self) -> str:
        from freshet.display import facts_html, number

        summary, name = self.summary, self.metric.name
        facts = {f"final {name}": number(summary[f"final_{name}"]), f"best {name}": number(summary[f"best_{name}"])}
        if summary["target"] is not None:
            reached = summary["time_to_target"]
            facts[f"time to {summary['target']:g}"] = "not reached" if reached is None else f"{reached:g} s"
        facts |= {"end": f"{summary['virtual_time']:g} s ({summary['status']})", "uploads": f"{summary['uploads']:,}"}
        return facts_html(str(summary["method"]), facts | {"directory": str(self.directory)})

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
        """All metrics as a pandas DataFrame, one row per test of the model: time, metric and loss first."""
        from freshet.display import whole_table

        first = [name for name in ("time", self.metric.name, "loss") if self.rows and name in self.rows[0]]
        return whole_table([{name: row.get(name) for name in first} | row for row in self.rows])

    def time_to(self, target: float) -> float | None:
        """First tested time at which the metric is as good as this, or None."""
        if self.metric == ACCURACY and target >= 2.0:
            raise ConfigError(
                "target", f"is an accuracy of at most 1, not a percentage; did you mean {target / 100:g}?"
            )
        return time_to_target(self.rows, target, self.metric)

    def module(self, model: Factory | nn.Module | None = None, *, best: bool = False) -> nn.Module:
        """The final model as a module, ready for prediction on inputs as they are in the data set.

        For a run loaded from disk, pass any model that is not built in. With ``best`` it is the model of the best test,
        which ``run.keep = "best"`` keeps.
        """
        rebuilt = self._rebuilt if model is None else replace(self._rebuilt, factory=as_factory(model))
        return rebuilt(RunDirectory(self.directory).weights(best=True)[0] if best else self.weights)

    def save_pretrained(self, directory: str | Path, model: Factory | nn.Module | None = None) -> None:
        """Write the final model as Hugging Face's ``from_pretrained`` reads it; of a PEFT model only the adapter.

        For a run loaded from disk, pass the model as to ``module``.
        """
        module: Any = self.module(model)
        if not hasattr(module, "save_pretrained"):
            kind = type(module).__name__
            raise RunError(f"{kind} is no Hugging Face model and has no save_pretrained; use result.module()")
        module.save_pretrained(directory)


def load(directory: str | Path, model: Factory | nn.Module | None = None) -> Result:
    """Load the result of a run: rows, summary, weights, and the final model as a module.

    A built-in network is rebuilt from the run's settings. Pass your own network here or to ``module``.
    """
    run = RunDirectory(directory)
    summary = run.summary()
    weights, frozen = run.weights()
    if weights_sha256(weights) != summary.get("weights_sha256"):
        raise RunError(f"{directory}/model.safetensors is not the model that summary.json names")
    world = run.world()
    factory = _built_in(run, world) if model is None else as_factory(model)
    config = resolve(run.config())
    rebuilt = ModuleBuilder(factory, config.run.seed, frozen=frozen, local=tuple(config.model.local or ()))
    if world is not None and world.mean is not None and world.std is not None:
        rebuilt = replace(rebuilt, mean=tuple(world.mean), std=tuple(world.std))
    return Result(run.directory, summary, run.metrics(), weights, rebuilt)


def _built_in(run: RunDirectory, world: RunWorld | None) -> Factory | None:
    """What builds the network that the run's settings name; None for one that was given from Python."""
    config = resolve(run.config())
    if config.model.name == CUSTOM or world is None or world.sample_shape is None or world.outputs is None:
        return None
    return built_in(config, world.sample_shape, world.outputs, world.vocabulary, world.pad_id)
