"""What a user builds and runs: a model, data, devices, a fleet and a method, put together into a run."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from freshet import __version__
from freshet.compute.serial import SerialExecutor
from freshet.config import CUSTOM, Config, resolve
from freshet.core.method import World
from freshet.core.server import Server
from freshet.core.vectors import Vector
from freshet.data.dataset import DataSet, from_arrays
from freshet.data.partition import partition
from freshet.data.sources import load
from freshet.errors import ConfigError, DataError
from freshet.models.registry import build
from freshet.runs.writer import Observer, RunWriter, weights_sha256
from freshet.sim.driver import Simulation
from freshet.sim.fleet import Fleet
from freshet.training.batches import FederatedData
from freshet.training.flat import Factory, FlatModel, layout_of
from freshet.training.local import Trainer, initial_weights

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
        flat = FlatModel(self._factory())
        flat.load(self.weights)
        return flat.module.eval()


def first_crossing(rows: Sequence[Mapping[str, Any]], target: float) -> float | None:
    """First time on the test grid at which the accuracy reaches the target."""
    return next((row["time"] for row in rows if row["accuracy"] >= target), None)


class Federation:
    """A federation of devices that train one model.

    Bring your own model and data, or name built-in ones; every section of the configuration can be given as a dict:
    ``Federation(method={"name": "fedasmu", "epsilon": 0.2}, fleet={"ratio": 20}, training={"lr": 0.1})``.
    """

    def __init__(
        self,
        model: Factory | str | None = None,
        train: Any = None,
        test: Any = None,
        *,
        devices: int | None = None,
        method: str | Mapping[str, Any] = "fedasmu",
        fleet: Fleet | Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        data: str | Mapping[str, Any] | None = None,
        run: Mapping[str, Any] | None = None,
        seed: int | None = None,
        shards: Sequence[NDArray[np.int64]] | None = None,
    ) -> None:
        tables: dict[str, dict[str, Any]] = {
            "method": {"name": method} if isinstance(method, str) else dict(method),
            "training": dict(training or {}),
            "fleet": {} if fleet is None or isinstance(fleet, Fleet) else dict(fleet),
            "data": {"name": data} if isinstance(data, str) else dict(data or {}),
            "model": {},
            "run": dict(run or {}),
        }
        if devices is not None:
            tables["fleet"]["devices"] = devices
        elif isinstance(fleet, Fleet):
            tables["fleet"]["devices"] = len(fleet)
        if seed is not None:
            tables["run"]["seed"] = seed
        if train is not None:
            tables["data"]["name"] = CUSTOM
        if model is not None:
            tables["model"]["name"] = model if isinstance(model, str) else CUSTOM
        dataset = None
        if train is not None:
            if test is None:
                raise DataError("test data are missing: give test=(x, y) or a Dataset beside train")
            dataset = from_arrays(CUSTOM, train, test)
        self._prepare(resolve(tables), dataset, None if isinstance(model, str) else model, fleet, shards)

    @classmethod
    def from_config(cls, config: Config) -> "Federation":
        """A federation of built-in parts, as the command line makes it."""
        federation = cls.__new__(cls)
        federation._prepare(config, None, None, None, None)
        return federation

    def _prepare(
        self,
        config: Config,
        dataset: DataSet | None,
        factory: Factory | None,
        fleet: Fleet | Mapping[str, Any] | None,
        shards: Sequence[NDArray[np.int64]] | None,
    ) -> None:
        seed = config.run.seed
        self.config = config
        self.dataset = _load(config) if dataset is None else dataset
        if config.data.validation:
            self.dataset = self.dataset.with_validation(config.data.validation, seed)
        self.factory = _factory(config, self.dataset) if factory is None else factory
        self.fleet = fleet if isinstance(fleet, Fleet) else config.fleet.draw(seed)
        if len(self.fleet) != config.fleet.devices:
            raise ConfigError(
                "fleet.devices", f"is {config.fleet.devices}, but the fleet has {len(self.fleet)} devices"
            )
        self.shards = _deal(config, self.dataset) if shards is None else list(shards)
        _check_shards(self.shards, config.fleet.devices, len(self.dataset.y_train))

    def run(
        self,
        until: float | None = None,
        *,
        out: str | Path | None = None,
        observers: Sequence[Observer] = (),
    ) -> Result:
        """Run in virtual time up to ``until`` seconds and write a run directory."""
        config = self.config
        if until is not None:
            tables = config.tables()
            config = resolve(tables | {"run": tables["run"] | {"until": float(until)}})
        started = time.perf_counter()
        weights = initial_weights(self.factory, config.run.seed)
        data = FederatedData.of(self.dataset, self.shards)
        trainer = Trainer(self.factory, data, config.training, config.run.seed)
        world = World(
            config.fleet.devices,
            np.array([len(shard) for shard in self.shards], np.int64),
            config.training.epochs,
            config.run.per_round,
            layout_of(self.factory()),
            config.run.seed,
        )
        server = Server(
            config.method_class(config.method, world), world, weights, config.training.lr, config.training.lr_decay
        )
        executor = SerialExecutor(trainer)
        writer = RunWriter(Path(out) if out else default_directory(config), config.tables(), list(observers))
        with _interruptible() as stop:
            simulation = Simulation(
                server, config.trigger(), self.fleet, executor, writer, eval_every=config.run.eval_every, stop=stop
            )
            status = "failed"
            try:
                status = "finished" if simulation.run(config.run.until) else "interrupted"
            except KeyboardInterrupt:
                status = "interrupted"
            finally:
                if status == "finished":
                    writer.drain(wait=True)
                else:
                    writer.abandon()
                final = server.method.evaluated(server)
                summary = _summary(config, simulation, writer, final, status, time.perf_counter() - started)
                writer.close(summary, world.layout, final)
                executor.close()
        return Result(writer.directory, summary, writer.metrics, final, self.factory)


def _load(config: Config) -> DataSet:
    options = config.data
    if options.name == CUSTOM:
        raise ConfigError(
            "data.name", "'custom' stands for data given from Python; name a data set (`freshet data list`)"
        )
    dataset = load(options.name, options.dir or None, vocabulary=options.vocabulary, length=options.length)
    if options.train_samples or options.test_samples:
        dataset = dataset.subset(options.train_samples or None, options.test_samples or None, config.run.seed)
    return dataset


def _factory(config: Config, dataset: DataSet) -> Factory:
    options = config.model
    if options.name == CUSTOM:
        raise ConfigError(
            "model.name", "'custom' stands for a model given from Python; name a network (`freshet models`)"
        )

    def factory() -> nn.Module:
        return build(
            options.name,
            input_shape=dataset.sample_shape,
            classes=dataset.classes,
            head=options.head,
            norm=options.norm or None,
            vocabulary=dataset.vocabulary,
            pad_id=dataset.pad_id,
        )

    factory()
    return factory


def _deal(config: Config, dataset: DataSet) -> list[NDArray[np.int64]]:
    options = config.data
    return partition(
        dataset.y_train,
        config.fleet.devices,
        options.partition,
        seed=config.run.seed,
        concentration=options.concentration,
        min_samples=options.min_samples,
        shards_per_device=options.shards_per_device,
        groups=dataset.groups,
    )


def _check_shards(shards: Sequence[NDArray[np.int64]], devices: int, samples: int) -> None:
    if len(shards) != devices:
        raise ConfigError("shards", f"there must be one per device ({devices}), but {len(shards)} were given")
    for device, shard in enumerate(shards):
        if len(shard) == 0:
            raise ConfigError("shards", f"device {device} has no samples; every device needs at least one")
        if shard.min() < 0 or shard.max() >= samples:
            raise ConfigError("shards", f"device {device} names a sample outside 0..{samples - 1}")


def default_directory(config: Config) -> Path:
    """``runs/<time>-<method>-seed<n>``, with a number added if that is taken."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{config.method_name.replace(':', '.')}-seed{config.run.seed}"
    candidates = (Path("runs") / (stem if n == 0 else f"{stem}-{n}") for n in range(10_000))
    return next(path for path in candidates if not path.exists())


def _summary(
    config: Config, simulation: Simulation, writer: RunWriter, weights: Vector, status: str, wall: float
) -> dict[str, Any]:
    counts, rows = simulation.counts, writer.metrics
    stale = counts.staleness_sum / counts.staleness_count if counts.staleness_count else None
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
        "virtual_time": simulation.heap.now,
        "versions": simulation.server.version,
        "trips": counts.trips,
        "requests": counts.requests,
        "merges": counts.merges,
        "aggregations": counts.aggregations,
        "uploads": counts.uploads,
        "discards": counts.discards,
        "rejected": counts.rejected,
        "lost": counts.lost,
        "mean_staleness": stale,
        "bytes_up": counts.bytes_up,
        "bytes_down": counts.bytes_down,
        "weights_sha256": weights_sha256(weights),
        "wall_seconds": round(wall, 3),
        "freshet": __version__,
    }


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C ends the run at the next event, with everything written; the second one at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def handler(*_: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
