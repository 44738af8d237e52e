"""What a user builds and runs: a model, data, devices, a fleet and a method, put together into a run."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freshet.compute.base import Setup
from freshet.compute.choice import open_executor
from freshet.compute.pool import Pool
from freshet.config import CUSTOM, Config, resolve
from freshet.core.layout import Layout
from freshet.core.method import World
from freshet.core.server import Server
from freshet.core.vectors import load_kernels
from freshet.data.dataset import DataSet, from_arrays
from freshet.data.partition import partition
from freshet.data.sources import load
from freshet.errors import ConfigError, DataError, RunError
from freshet.models.registry import build
from freshet.result import Result, remarks, summarise
from freshet.runs import checkpoint
from freshet.runs.reader import ENDED, Run
from freshet.runs.writer import Observer, RunWriter
from freshet.sim.budget import expected_uploads, trip_seconds
from freshet.sim.control import Checkpoints, Stopwatch, interruptible
from freshet.sim.driver import Simulation
from freshet.sim.fleet import Fleet
from freshet.sim.snapshot import Tree, check, reinstate
from freshet.training.batches import FederatedData, Samples, arranged
from freshet.training.flat import Factory, build_quietly, layout_of
from freshet.training.local import initial_weights


class Federation:
    """A federation of devices that train one model.

    Bring your own model and data, or name built-in ones; every section of the configuration can be given as a dict:
    ``Federation(method={"name": "fedasmu", "epsilon": 0.2}, fleet={"ratio": 20}, training={"lr": 0.1})``.
    """

    def __init__(
        self,
        model: Factory | str | Mapping[str, Any] | None = None,
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
            "model": dict(model) if isinstance(model, Mapping) else {},
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
        if isinstance(model, str):
            tables["model"]["name"] = model
        factory = None if model is None or isinstance(model, str | Mapping) else model
        if factory is not None:
            tables["model"]["name"] = CUSTOM
        if isinstance(fleet, Fleet):
            tables["fleet"]["custom"] = True
        if shards is not None:
            tables["data"]["partition"] = CUSTOM
        dataset = None
        if test is not None and train is None:
            raise DataError("training data are missing: give train=(x, y) or a Dataset beside test")
        if train is not None:
            if test is None:
                raise DataError("test data are missing: give test=(x, y) or a Dataset beside train")
            dataset = from_arrays(CUSTOM, train, test)
        self._prepare(resolve(tables), dataset, factory, fleet, shards)

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
        if config.data.train_samples or config.data.test_samples:
            wanted = (config.data.train_samples or None, config.data.test_samples or None)
            self.dataset = self.dataset.subset(*wanted, seed)
        if config.data.validation:
            self.dataset = self.dataset.with_validation(config.data.validation, seed)
        self.dataset = arranged(self.dataset)
        self.factory = _factory(config, self.dataset) if factory is None else factory
        _check_model(config, self.factory, self.dataset)
        if config.fleet.custom and not isinstance(fleet, Fleet):
            raise ConfigError("fleet.custom", "stands for a Fleet given from Python; set it to false or give one")
        self.fleet = fleet if isinstance(fleet, Fleet) else config.fleet.draw(seed)
        if len(self.fleet) != config.fleet.devices:
            raise ConfigError(
                "fleet.devices", f"is {config.fleet.devices}, but the fleet has {len(self.fleet)} devices"
            )
        self.shards = _deal(config, self.dataset) if shards is None else list(shards)
        _check_shards(self.shards, config.fleet.devices, len(self.dataset.y_train))

    def run(
        self,
        until: float | str | None = None,
        *,
        out: str | Path | None = None,
        observers: Sequence[Observer] = (),
        pool: Pool[Any] | None = None,
    ) -> Result:
        """Run in virtual time up to ``until`` (600 or "10m"; or ``run.rounds`` rounds) and write a run directory.

        ``pool`` lets several runs share their worker processes; without it the run starts its own.
        """
        config = self.config
        if until is not None:
            tables = config.tables()
            end = until if isinstance(until, str) else float(until)
            config = resolve(tables | {"run": tables["run"] | {"until": end}})
        config = self._settled(config)
        directory = Path(out) if out else default_directory(config)
        RunWriter.check(directory)
        return self._drive(config, lambda: RunWriter.create(directory, config.tables(), observers), None, pool)

    def resume(
        self, directory: str | Path, *, observers: Sequence[Observer] = (), pool: Pool[Any] | None = None
    ) -> Result:
        """Go on with a run that was interrupted or killed, from its last checkpoint: the same result, bit for bit."""
        run = Run(directory)
        config = resolve(run.config())
        mine = self._settled(replace(self.config, run=self.config.run.model_copy(update={"until": config.run.until})))
        if _essence(config) != _essence(mine):
            raise RunError(f"{directory} was made with another configuration; build the same federation to resume it")
        run.check_resumable()
        found = checkpoint.read(Path(directory))
        try:
            check(found.tree, layout_of(build_quietly(self.factory)).size)
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{directory} has a checkpoint of another model or version ({error})") from None

        def open_log() -> RunWriter:
            writer = RunWriter(Path(directory), observers, resume=found.tree["log"])
            found.remove_useless()
            for message in [*found.problems, *writer.cuts]:
                writer.say(message)
            return writer

        return self._drive(config, open_log, found.tree, pool)

    def _setup(self, config: Config) -> Setup:
        data = FederatedData.of(self.dataset, self.shards)
        return Setup(self.factory, data, config.training, config.run.seed)

    def _world(self, config: Config) -> World:
        """What the method knows of this federation and this run."""
        world = _world(config, [len(shard) for shard in self.shards], layout_of(build_quietly(self.factory)))
        size, run, fleet = 4 * world.layout.size, config.run, self.fleet
        uploads = expected_uploads(fleet, config.trigger(), size, run.end, run.rounds, worth=world.per_round)
        return replace(world, uploads=uploads, fastest=float(trip_seconds(fleet, size).min()))

    def _settled(self, config: Config) -> Config:
        """The configuration with those options of the method filled in that follow from this run."""
        return replace(config, method=config.method_class.settled(config.method, self._world(config)))

    def _server(self, config: Config) -> Server:
        """The server at its start: the method, and the initial model as version 1."""
        world = self._world(config)
        method = config.method_class(config.method, world)
        weights = initial_weights(self.factory, config.run.seed)
        return Server(method, world, weights, config.training.lr, config.training.lr_decay)

    def _drive(
        self, config: Config, open_log: Callable[[], RunWriter], tree: Tree | None, pool: Pool[Any] | None
    ) -> Result:
        """Put server, fleet, executor and log together and run, from the start or from a checkpoint."""
        clock = Stopwatch(0.0 if tree is None else tree["wall_seconds"])
        server = self._server(config)
        setup, uploads = self._setup(config), server.world.uploads
        with interruptible() as stop, closing(open_executor(config.run, setup, pool, uploads)) as executor:
            writer = open_log()
            load_kernels(writer.say)  # while the workers start, and before several of them compile the same
            writer.elapsed = clock.seconds
            for sentence in server.method.opening():
                writer.say(sentence)
            keeper = Checkpoints(writer.directory, clock, config.run.checkpoint_every, config.run.checkpoint_minutes)
            simulation = Simulation(
                server,
                config.trigger(),
                self.fleet,
                executor,
                writer,
                eval_every=config.run.eval_every,
                rounds=config.run.rounds,
                stop_diverged=config.run.diverged == "stop",
                device_memory=config.run.device_memory_mb * 2**20,
                stop=stop,
                pause=keeper.consider,
            )
            status = "failed"
            try:
                if tree is not None:
                    reinstate(simulation, tree, config.run.end)
                    tree.clear()  # its arrays keep the file open
                ended = simulation.run(config.run.end)
                if not ended:
                    keeper.write(simulation)
                writer.drain(wait=True)
                status = _status(config, simulation) if ended else "interrupted"
            except KeyboardInterrupt:  # a second Ctrl-C: at once, without a checkpoint of this moment
                status = "interrupted"
            except BaseException:
                status = "failed"
                raise
            finally:
                if status not in ENDED:
                    writer.abandon()
                final = server.method.evaluated(server)
                summary = summarise(config, simulation, writer.metrics, final, status, clock.seconds())
                for remark in remarks(summary, writer.metrics):
                    writer.say(remark)
                writer.close(summary, server.world.layout, final)
        if status in ENDED:
            keeper.clear()
        return Result(writer.directory, summary, writer.metrics, final, self.factory)


def _status(config: Config, simulation: Simulation) -> str:
    """How a run that came to its end has ended; the newest test is looked at too."""
    simulation.watch.settle()
    return "diverged" if config.run.diverged == "stop" and simulation.watch.diverged is not None else "finished"


def _essence(config: Config) -> dict[str, Any]:
    """What decides a run's bits: not where it trains, nor how often it is saved."""
    tables = config.tables()
    elsewhere = (
        "executor",
        "workers",
        "address",
        "checkpoint_every",
        "checkpoint_minutes",
        "device_memory_mb",
        "until",
    )
    return tables | {"run": {key: value for key, value in tables["run"].items() if key not in elsewhere}}


def _load(config: Config) -> DataSet:
    options = config.data
    if options.name == CUSTOM:
        raise ConfigError(
            "data.name", "'custom' stands for data given from Python; name a data set (`freshet data list`)"
        )
    return load(options.name, options.dir or None, vocabulary=options.vocabulary, length=options.length)


def _factory(config: Config, dataset: DataSet) -> Factory:
    options = config.model
    if options.name == CUSTOM:
        raise ConfigError(
            "model.name", "'custom' stands for a model given from Python; name a network (`freshet models`)"
        )

    return partial(
        build,
        options.name,
        input_shape=dataset.sample_shape,
        classes=dataset.classes,
        head=options.head,
        norm=options.norm or None,
        vocabulary=dataset.vocabulary,
        pad_id=dataset.pad_id,
        **options.own(),
    )


def _check_model(config: Config, factory: Factory, dataset: DataSet) -> None:
    """The model takes the data and has an output per class; said before anything is written."""
    module = build_quietly(factory)
    layout_of(module)
    config.method_class(config.method, _world(config, [1] * config.fleet.devices, layout_of(module))).rule().check(
        module
    )
    samples = Samples.of(dataset, test=True)
    x, _ = next(samples.chunks(2))
    try:
        with torch.no_grad():
            output = module.float().eval()(x)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        problem = str(error).splitlines()[0]
        raise ConfigError("model", f"cannot take samples of shape {dataset.sample_shape}: {problem}") from None
    if not isinstance(output, torch.Tensor) or output.shape[:1] != x.shape[:1] or output.ndim != 2:
        raise ConfigError(
            "model", f"must give one row of class scores per sample, not {getattr(output, 'shape', output)}"
        )
    if output.shape[1] < dataset.classes:
        raise ConfigError("model", f"gives {output.shape[1]} scores, but the data have {dataset.classes} classes")


def _world(config: Config, samples: Sequence[int], layout: Layout) -> World:
    """What the method knows; one round's worth of uploads is what is in flight under constant concurrency."""
    worth = config.run.in_flight if config.run.trigger == "concurrency" else config.run.per_round
    counts = np.array(samples, np.int64)
    return World(config.fleet.devices, counts, config.training.epochs, worth, layout, config.run.seed)


def _deal(config: Config, dataset: DataSet) -> list[NDArray[np.int64]]:
    options = config.data
    if options.partition == CUSTOM:
        raise ConfigError("data.partition", "'custom' stands for shards given from Python; choose another or give them")
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
    for number in range(10_000):
        path = Path("runs") / (stem if number == 0 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            problem = f"the folder runs/ cannot be written ({error.strerror}); give another with --out or out="
            raise ConfigError("run.out", problem) from None
        return path
    raise ConfigError("run.out", f"no free name like runs/{stem}; give one with --out")
