"""From a configuration to what it names: data, model, fleet and shards, checked before anything is written."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freshet.compute.executor import Setup
from freshet.config import CUSTOM, Config, check_layout
from freshet.core.compression import Links, down_and_up
from freshet.core.defence import Defence
from freshet.core.layout import Layout
from freshet.core.method import World
from freshet.core.scheduling import Choice, Selection
from freshet.core.server import Server
from freshet.core.streams import stream
from freshet.data.dataset import DataSet
from freshet.data.partition import label_counts, partition
from freshet.data.shards import OwnTests, as_shards, as_tests, devices_of, remaining
from freshet.data.sources import load
from freshet.errors import ConfigError
from freshet.fingerprints import fingerprint
from freshet.models.registry import build
from freshet.privacy import Accountant
from freshet.runs.lifecycle import Plan
from freshet.runs.records import Metric
from freshet.runs.segments import rotating
from freshet.runs.world import RunWorld
from freshet.sim.fleet import Fleet
from freshet.sim.forecast import check_length, expected_uploads, lightened, trip_seconds
from freshet.training.batches import FederatedData, Samples, arranged
from freshet.training.network import (
    Factory,
    Rebuilt,
    build_quietly,
    initial_module,
    initial_weights,
    layout_of,
    started,
)
from freshet.training.optimisers import optimiser
from freshet.training.options import TrainingOptions
from freshet.training.outgoing import Outgoing
from freshet.training.schedules import OwnSchedule, rates
from freshet.training.task import TASKS, Task, check_output, check_targets

#: Epochs of an average shard that take a device its seconds, when time follows work.
USUAL_EPOCHS = TrainingOptions().epochs


@dataclass(frozen=True)
class Given:
    """What a user brings from Python in place of what the configuration would name."""

    dataset: DataSet | None = None
    factory: Factory | None = None
    fleet: Fleet | None = None
    shards: Any = None
    test_shards: Any = None
    selection: Choice | None = None
    task: Task | None = None
    schedule: OwnSchedule | None = None

    def defaults(self) -> dict[str, dict[str, Any]]:
        """What follows from it where nothing else is said: a partition by groups, as many devices as shards."""
        groups = None if self.dataset is None else self.dataset.groups
        if self.shards is not None:
            devices = devices_of(self.shards)
            return {"fleet": {"devices": devices}} if devices else {}
        if groups is None:
            dealt = self.dataset is None or self.dataset.has_classes
            return {} if dealt else {"data": {"partition": "iid"}}
        return {"data": {"partition": "natural"}, "fleet": {"devices": len(set(groups.tolist()))}}

    def tables(self) -> dict[str, dict[str, Any]]:
        """What the configuration says of it."""
        # The seconds of a fleet from Python are what they say: those of a whole local training.
        fleet = {} if self.fleet is None else {"devices": len(self.fleet), "custom": True, "time": "trip"}
        model = {} if self.factory is None else {"name": CUSTOM}
        data = {} if self.dataset is None else {"name": CUSTOM}
        dealt = {} if self.shards is None else {"partition": CUSTOM}
        selection = {} if self.selection is None else {"selection": CUSTOM}
        training = ({} if self.task is None else {"task": CUSTOM}) | (
            {} if self.schedule is None else {"schedule": CUSTOM}
        )
        return {"fleet": fleet, "model": model, "data": data | dealt, "run": selection, "training": training}


@dataclass(frozen=True)
class Parts:
    """What a federation is made of."""

    dataset: DataSet
    factory: Factory
    layout: Layout
    fleet: Fleet
    shards: list[NDArray[np.int64]]
    tests: OwnTests | None
    selection: Selection
    task: Task
    schedule: OwnSchedule | None = None

    @property
    def metric(self) -> Metric:
        """What runs are judged by."""
        return Metric(self.task.primary, str(self.task.direction))

    def rebuilt(self, config: Config) -> Rebuilt:
        """How the final model is handed out: the network, and in front of it what its inputs need."""
        return Rebuilt(self.factory, config.run.seed, self.dataset.mean, self.dataset.std)

    def plan(self, config: Config) -> Plan:
        """What is asked of a run, whoever drives it."""
        run = config.run
        return Plan(
            config.method_name,
            run.seed,
            run.target,
            run.end,
            run.checkpoint_every,
            run.checkpoint_minutes,
            stop_diverged=run.diverged == "stop",
            stop_at_target=run.stop_at_target,
            keep=run.keep_checkpoint,
            data=self.dataset.facts(),
            metric=self.metric,
            frozen=self.frozen(config),
            rotate_bytes=rotating(run.rotate_log),
            accountant=Accountant(config.privacy) if config.privacy.on else None,
        )

    def frozen(self, config: Config) -> dict[str, NDArray[np.float32]]:
        """Parameters that do not train, and so do not travel; they are part of the final model all the same."""
        module = initial_module(self.factory, config.run.seed)
        fixed = ((name, tensor) for name, tensor in module.named_parameters() if not tensor.requires_grad)
        return {name: tensor.detach().numpy().copy() for name, tensor in fixed}

    def setup(self, config: Config) -> Setup:
        """What workers need to know."""
        data = FederatedData.of(self.dataset, self.shards, self.tests)
        own = self.task if self.task.name == CUSTOM else None
        outgoing = Outgoing(config.links, config.attack, config.privacy, config.run.seed)
        return Setup(self.factory, data, config.training, config.run.seed, own, outgoing)

    def world(self, config: Config) -> World:
        """What the method knows of this federation and this run."""
        world = _world(config, [len(shard) for shard in self.shards], self.layout)
        size, run = 4 * world.layout.size, config.run
        fleet = lightened(self.fleet, size, down_and_up(config.links, self.layout))
        uploads = expected_uploads(fleet, config.trigger(), size, run.end, run.rounds, worth=world.per_round)
        check_length(fleet, config.trigger(), size, run.end, uploads, run.eval_every)
        return replace(world, uploads=uploads, fastest=float(trip_seconds(fleet, size).min()))

    def fingerprint(self, config: Config) -> dict[str, str]:
        """Short hashes of data, shards, model and fleet."""
        return fingerprint(self.dataset, self.tests, self.shards, self.factory, self.fleet, config.run.seed)

    def surroundings(self, config: Config, hashes: dict[str, str]) -> RunWorld:
        """Fleet and data of a run, for world.json."""
        fleet, data = self.fleet, self.dataset
        return RunWorld(
            data=config.data.name,
            classes=[str(name) for name in data.class_names or range(data.classes)] if data.has_classes else [],
            train_samples=len(data.y_train),
            test_samples=len(data.y_test),
            model_bytes=4 * self.layout.size,
            train_seconds=fleet.train_seconds.tolist(),
            up_rate=fleet.up_rate.tolist(),
            down_rate=fleet.down_rate.tolist(),
            start_seconds=fleet.start_seconds.tolist(),
            samples=[len(shard) for shard in self.shards],
            label_counts=_label_counts(data, self.shards),
            up_latency=fleet.up_latency,
            down_latency=fleet.down_latency,
            on_seconds=fleet.on_seconds,
            off_seconds=fleet.off_seconds,
            loss=fleet.loss,
            aside=config.aside(),
            curves=list(config.method_class.about.curves),
            metric=self.metric.name,
            direction=self.metric.direction,
            mean=None if data.mean is None else list(data.mean),
            std=None if data.std is None else list(data.std),
            sample_shape=list(data.sample_shape),
            outputs=data.classes,
            vocabulary=data.vocabulary,
            pad_id=data.pad_id,
            fingerprint=hashes,
        )

    def settled(self, config: Config, world: World | None = None) -> Config:
        """The configuration with those options filled in that follow from this run and hold however long it becomes:
        the method's, and the length of a cosine."""
        world, training = world or self.world(config), config.training
        if training.schedule == "cosine":
            training = training.model_copy(update={"schedule_rounds": _schedule_rounds(config, world)})
        return replace(config, method=config.method_class.settled(config.method, world), training=training)

    def server(self, config: Config, world: World | None = None) -> Server:
        """The server at its start: the method, and the initial model as version 1."""
        world = world or self.world(config)
        method = config.method_class(config.method, world)
        weights = initial_weights(self.factory, config.run.seed)
        gate = None if config.run.gate == "off" else float(config.run.gate)
        links = None if config.links.plain else Links(config.links, self.layout)
        defence = None if config.defence.rule == "none" else Defence(config.defence, self.layout)
        schedule = rates(config.training, self.schedule, _schedule_rounds(config, world))
        return Server(method, world, weights, schedule, self.selection, gate, links, defence)


def assemble(config: Config, given: Given) -> Parts:
    """Everything that a configuration names, or that was given in its place; raises with one sentence."""
    task = _task(config, given.task)
    dataset, held = _dataset(config, given.dataset)
    check_targets(task, dataset.y_train, dataset.name)
    factory = given.factory
    if factory is None:
        factory = built_in(config, dataset.sample_shape, dataset.classes, dataset.vocabulary, dataset.pad_id)
    factory = _started(config, factory)
    layout = _check_model(config, factory, dataset, task)
    devices = config.fleet.devices
    shards = _deal(config, dataset) if given.shards is None else _own_shards(given.shards, devices, dataset, held)
    fleet = _fleet(config, given.fleet, shards)
    tests = None
    if given.test_shards is not None:
        tests = as_tests(given.test_shards, devices, dataset, (config.data.input_column, config.data.label_column))
    return Parts(
        dataset, factory, layout, fleet, shards, tests, _selection(config, given.selection), task, given.schedule
    )


def _started(config: Config, factory: Factory) -> Factory:
    """The factory, or one whose modules begin with the weights of ``model.start``."""
    return started(factory, Path(config.model.start)) if config.model.start else factory


def _task(config: Config, given: Task | None) -> Task:
    if given is not None:
        return given
    if config.training.task == CUSTOM:
        raise ConfigError("training.task", "'custom' stands for a Task given from Python; choose another or give one")
    return TASKS[config.training.task]


def _selection(config: Config, given: Choice | None) -> Selection:
    if given is not None:
        return given
    if config.run.selection == CUSTOM:
        problem = "'custom' stands for a function given from Python; choose uniform or by_samples"
        raise ConfigError("run.selection", problem)
    return config.run.selection


def _dataset(config: Config, given: DataSet | None) -> tuple[DataSet, NDArray[np.int64]]:
    """The data, and which samples of the training set are held out for validation."""
    options, seed = config.data, config.run.seed
    dataset = _load(config) if given is None else given
    if options.train_samples or options.test_samples:
        dataset = dataset.subset(options.train_samples or None, options.test_samples or None, seed)
    held = np.empty(0, np.int64)
    if options.validation:
        held = dataset.held_out_by(options.validation, seed)
        dataset = dataset.with_validation(options.validation, seed)
    return arranged(dataset), held


def _own_shards(given: Any, devices: int, dataset: DataSet, held: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Shards given from Python: of the whole training set, less what is held out."""
    samples = len(dataset.y_train) + len(held)
    shards = as_shards(given, devices, samples)
    return remaining(shards, held, samples) if len(held) else shards


def _load(config: Config) -> DataSet:
    options = config.data
    if options.name == CUSTOM:
        raise ConfigError(
            "data.name", "'custom' stands for data given from Python; name a data set (`freshet data list`)"
        )
    return load(options.name, options.dir or None, vocabulary=options.vocabulary, length=options.length)


def built_in(config: Config, shape: Sequence[int], classes: int, vocabulary: int | None, pad_id: int | None) -> Factory:
    """What builds the network that a configuration names, for samples of this shape."""
    options = config.model
    if options.name == CUSTOM:
        raise ConfigError(
            "model.name", "'custom' stands for a model given from Python; name a network (`freshet models`)"
        )
    return partial(
        build,
        options.name,
        input_shape=tuple(shape),
        classes=1 if config.training.task == "binary" else classes,
        head=options.head,
        norm=options.norm or None,
        vocabulary=vocabulary,
        pad_id=pad_id,
        **options.own(),
    )


def _check_model(config: Config, factory: Factory, dataset: DataSet, task: Task) -> Layout:
    """The model takes the data, its outputs suit the task, and it suits the method; returns its layout."""
    module = build_quietly(factory)
    layout = layout_of(module)
    config.method_class(config.method, _world(config, [1] * config.fleet.devices, layout))
    config.method_class.rule(config.method).check(module)
    check_layout(config, layout)
    samples = Samples.of(dataset, test=True)
    x, y = next(samples.chunks(2))
    try:
        with torch.no_grad():
            output = module.float().eval()(x)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        problem = str(error).splitlines()[0]
        raise ConfigError("model", f"cannot take samples of shape {dataset.sample_shape}: {problem}") from None
    check_output(task, output, y, dataset.classes)
    return layout


def _world(config: Config, samples: Sequence[int], layout: Layout) -> World:
    """What the method knows; one round's worth of uploads is what is in flight under constant concurrency."""
    worth = config.run.in_flight if config.run.trigger == "concurrency" else config.run.per_round
    counts = np.array(samples, np.int64)
    reach = optimiser(config.training).reach
    shape = (config.fleet.devices, counts, config.training.epochs, worth, layout, config.run.seed)
    under_way = config.run.per_round if config.method_class.about.kind == "sync" else config.run.in_flight
    return World(*shape, own_epochs=_own_epochs(config), under_way=under_way, reach=reach)


def _schedule_rounds(config: Config, world: World) -> int:
    """Rounds that the run has, or may expect from its end in time; where it goes on later, those of its first end."""
    return config.training.schedule_rounds or config.run.rounds or max(1, world.uploads // world.per_round)


def _fleet(config: Config, given: Fleet | None, shards: Sequence[NDArray[np.int64]]) -> Fleet:
    if config.fleet.custom and given is None:
        raise ConfigError("fleet.custom", "stands for a Fleet given from Python; set it to false or give one")
    work = _work(config.training, shards)
    fleet = Fleet.draw(config.fleet, config.run.seed, work) if given is None else given
    if len(fleet) != config.fleet.devices:
        raise ConfigError("fleet.devices", f"is {config.fleet.devices}, but the fleet has {len(fleet)} devices")
    if config.fleet.time == "trip" or fleet.trace is not None or config.fleet.measured:
        return fleet
    return fleet.working(work, USUAL_EPOCHS * sum(len(shard) for shard in shards) / len(shards))


def _work(options: TrainingOptions, shards: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Samples that each device goes through in one local training: steps x batch, or all of its own once per epoch."""
    if options.steps:
        return np.full(len(shards), float(options.steps * options.batch_size))
    return np.array([len(shard) for shard in shards]) * float(options.epochs)


def _own_epochs(config: Config) -> NDArray[np.int64] | None:
    """Each device's number of local epochs, drawn once, where they differ."""
    span, seed = config.training.local_epochs, config.run.seed
    if not span:
        return None
    return stream(seed, "local epochs").integers(span[0], span[1] + 1, size=config.fleet.devices)


def _label_counts(dataset: DataSet, shards: list[NDArray[np.int64]]) -> list[list[int]]:
    """Samples of each class that each device has; empty rows where there are no classes."""
    if not dataset.has_classes:
        return [[] for _ in shards]
    counts: list[list[int]] = label_counts(dataset.y_train, shards, dataset.classes).tolist()
    return counts


def _deal(config: Config, dataset: DataSet) -> list[NDArray[np.int64]]:
    options = config.data
    if options.partition == CUSTOM:
        raise ConfigError("data.partition", "'custom' stands for shards given from Python; choose another or give them")
    if not dataset.has_classes and options.partition not in ("iid", "natural"):
        problem = f"{options.partition} deals by class, and these targets are no classes; use iid or natural"
        raise ConfigError("data.partition", problem)
    labels = dataset.y_train if dataset.has_classes else np.zeros(len(dataset.y_train), np.int64)
    return partition(
        labels,
        config.fleet.devices,
        options.partition,
        seed=config.run.seed,
        concentration=options.concentration,
        min_samples=options.min_samples,
        shards_per_device=options.shards_per_device,
        groups=dataset.groups,
    )
