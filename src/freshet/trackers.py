"""Trackers for TensorBoard, MLflow and Weights & Biases. Each is an ``Observer``, as a user can write one.

A tracker never changes or ends a run. If its server fails, it logs one warning and stops tracking.
"""

import importlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from freshet.core.events import KIND_OF, DevicesEvaluated
from freshet.errors import ConfigError, RunError
from freshet.runs.records import metric_of
from freshet.runs.writer import Observer

Record = dict[str, Any]
Tables = Mapping[str, Mapping[str, Any]]
_log = logging.getLogger(__name__)


class Tracker(Observer):
    """Turns a run into named series over virtual time. Subclasses send them somewhere."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._broken = False

    # ---- for subclasses

    def series(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each named series. The step is virtual time in whole seconds."""

    def close(self, summary: Record) -> None:
        """End the tracking; the run has ended."""

    # ---- from the run

    def on_event(self, event: Record) -> None:
        """Sum up staleness and alpha of the aggregations for the next point; send the scores of every device."""
        if event.get("kind") == KIND_OF[DevicesEvaluated]:
            scores = _scores_by_device(event)
            self._guard(lambda: self.series(scores, round(event["time"])))
        if event.get("kind") != "aggregate":
            return
        stalest = max((part["staleness"] for part in event["contributions"]), default=None)
        for key, value in (("staleness", stalest), ("alpha", event.get("alpha"))):
            if isinstance(value, int | float):
                total, count = self._sums.get(key, (0.0, 0))
                self._sums[key] = (total + value, count + 1)

    def on_metrics(self, row: Record) -> None:
        values = {key: float(row[key]) for key in row if key != "time" and isinstance(row[key], int | float)}
        values |= {f"mean_{key}": total / count for key, (total, count) in self._sums.items()}
        self._sums = {}
        self._guard(lambda: self.series(values, round(row["time"])))

    def on_end(self, summary: Record) -> None:
        self._guard(lambda: self.close(summary))

    def _guard(self, action: Callable[[], None]) -> None:
        """Run an action. If it fails, log that once and stop tracking."""
        if self._broken:
            return
        try:
            action()
        except Exception as error:
            self._broken = True
            _log.warning("%s stops tracking this run: %s", type(self).__name__, error)


class TensorBoardTracker(Tracker):
    """Writes event files for TensorBoard; ``tensorboard --logdir DIR`` shows them."""

    def __init__(self, logdir: str, config: Tables | None = None) -> None:
        super().__init__()
        try:
            writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError:
            raise _missing("TensorBoard") from None
        self._writer: Any = writer(logdir)
        if config:
            lines = "".join(f"| {key} | {value} |\n" for key, value in _flat(config).items())
            self._writer.add_text("config", f"| setting | value |\n|---|---|\n{lines}")

    def series(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(f"freshet/{key}", value, step)

    def close(self, summary: Record) -> None:
        lines = "".join(f"| {key} | {value} |\n" for key, value in summary.items())
        self._writer.add_text("summary", f"| fact | value |\n|---|---|\n{lines}")
        self._writer.close()


#: The most metrics that MLflow takes in one call.
MLFLOW_BATCH = 1000


class MLflowTracker(Tracker):
    """Logs to an MLflow server or local store: settings as parameters, metrics over virtual time, a summary."""

    def __init__(
        self, uri: str, experiment: str = "freshet", config: Tables | None = None, name: str | None = None
    ) -> None:
        super().__init__()
        try:
            mlflow = importlib.import_module("mlflow")
            self._metric: Any = importlib.import_module("mlflow.entities").Metric
        except ImportError:
            raise _missing("MLflow") from None
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        try:
            known = self._client.get_experiment_by_name(experiment)
            number = known.experiment_id if known is not None else self._client.create_experiment(experiment)
            self._run: str = self._client.create_run(number, run_name=name).info.run_id
            for key, value in _flat(config or {}).items():
                self._client.log_param(self._run, key, value)
        except Exception as error:
            raise RunError(f"MLflow at {uri} cannot be used ({error})") from None

    def series(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self._metric(key, value, now, step) for key, value in values.items()]
        for start in range(0, len(metrics), MLFLOW_BATCH):
            self._client.log_batch(self._run, metrics=metrics[start : start + MLFLOW_BATCH])

    def close(self, summary: Record) -> None:
        name = metric_of(summary).name
        for key in (f"best_{name}", f"final_{name}", "time_to_target", "wall_seconds"):
            if isinstance(summary.get(key), int | float):
                self._client.log_metric(self._run, f"summary.{key}", float(summary[key]))
        for key in ("method", "seed", "status", "weights_sha256", "freshet"):
            self._client.set_tag(self._run, f"freshet.{key}", str(summary.get(key)))
        ends = {"finished": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED"}
        self._client.set_terminated(self._run, status=ends.get(str(summary.get("status")), "FAILED"))


class WandbTracker(Tracker):
    """Logs to a Weights & Biases project; with ``WANDB_MODE=offline`` to a local folder for ``wandb sync``.

    The x axis of every series is ``time``, virtual time in whole seconds.
    """

    def __init__(self, project: str, config: Tables | None = None, name: str | None = None) -> None:
        super().__init__()
        try:
            wandb = importlib.import_module("wandb")
        except ImportError:
            raise _missing("Weights & Biases") from None
        entity, _, rest = project.rpartition("/")
        try:
            self._run: Any = wandb.init(
                entity=entity or None, project=rest, name=name, config=_flat(config or {}), reinit="create_new"
            )
            self._run.define_metric("time")
            self._run.define_metric("*", step_metric="time")
        except Exception as error:
            raise RunError(f"the Weights & Biases project {project} cannot be used ({error})") from None

    def series(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "time": step})

    def close(self, summary: Record) -> None:
        for key, value in summary.items():
            if isinstance(value, str | int | float):
                self._run.summary[f"summary.{key}"] = value
        self._run.finish(exit_code=0 if summary.get("status") in ("finished", "stopped") else 1)


def tracker(spec: str, config: Tables | None = None, name: str | None = None) -> Tracker:
    """The tracker of one run for ``tensorboard:DIR``, ``mlflow:URI`` or ``wandb:PROJECT``."""
    kind, colon, place = spec.partition(":")
    if kind == "tensorboard" and place:
        return TensorBoardTracker(place, config)
    if kind == "mlflow" and colon and place:
        return MLflowTracker(place, config=config, name=name)
    if kind == "wandb" and place.rpartition("/")[2]:
        return WandbTracker(place, config, name)
    raise ConfigError("--track", f"expects tensorboard:DIR, mlflow:URI or wandb:PROJECT, but {spec!r} was given")


def _scores_by_device(event: Record) -> dict[str, float]:
    """The scores of each device as series: ``devices/accuracy/7``. A device without a score has no point."""
    return {
        f"devices/{name}/{device}": float(value)
        for name, values in event.items()
        if isinstance(values, list)
        for device, value in enumerate(values)
        if isinstance(value, int | float)
    }


def _flat(config: Tables) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, table in config.items() for key, value in table.items()}


def _missing(what: str) -> RunError:
    return RunError(f"tracking with {what} needs packages that are not installed: pip install 'freshet-fl[track]'")
