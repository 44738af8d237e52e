"""From a configuration to what it names: data, model, fleet and shards, checked before anything is written."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freshet.compute.base import Setup
from freshet.config import CUSTOM, Config
from freshet.core.layout import Layout
from freshet.core.method import World
from freshet.core.selection import Choice, Selection
from freshet.core.server import Server
from freshet.data.dataset import DataSet
from freshet.data.partition import label_counts, partition
from freshet.data.shards import OwnTests, as_shards, as_tests, devices_of
from freshet.data.sources import load
from freshet.errors import ConfigError
from freshet.models.registry import build
from freshet.runs.world import RunWorld
from freshet.sim.budget import expected_uploads, trip_seconds
from freshet.sim.fleet import Fleet
from freshet.training.batches import FederatedData, Samples, arranged
from freshet.training.flat import Factory, build_quietly, layout_of
from freshet.training.optimisers import optimiser
from freshet.training.trainer import initial_weights


@dataclass(frozen=True)
class Given:
    """What a user brings from Python in place of what the configuration would name."""

    dataset: DataSet | None = None
    factory: Factory | None = None
    fleet: Fleet | None = None
    shards: Any = None
    test_shards: Any = None
    selection: Choice | None = None

    def defaults(self) -> dict[str, dict[str, Any]]:
        """What follows from it where nothing else is said: a partition by groups, as many devices as shards."""
        groups = None if self.dataset is None else self.dataset.groups
        if self.shards is not None:
            devices = devices_of(self.shards)
            return {"fleet": {"devices": devices}} if devices else {}
        if groups is None:
            return {}
        return {"data": {"partition": "natural"}, "fleet": {"devices": len(set(groups.tolist()))}}

    def tables(self) -> dict[str, dict[str, Any]]:
        """What the configuration says of it."""
        fleet = {} if self.fleet is None else {"devices": len(self.fleet), "custom": True}
        model = {} if self.factory is None else {"name": CUSTOM}
        data = {} if self.dataset is None else {"name": CUSTOM}
        dealt = {} if self.shards is None else {"partition": CUSTOM}
        selection = {} if self.selection is None else {"selection": CUSTOM}
        return {"fleet": fleet, "model": model, "data": data | dealt, "run": selection}


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

    def setup(self, config: Config) -> Setup:
        """What workers need to know."""
        data = FederatedData.of(self.dataset, self.shards, self.tests)
        return Setup(self.factory, data, config.training, config.run.seed)

    def world(self, config: Config) -> World:
        """What the method knows of this federation and this run."""
        world = _world(config, [len(shard) for shard in self.shards], self.layout)
        size, run, fleet = 4 * world.layout.size, config.run, self.fleet
        uploads = expected_uploads(fleet, config.trigger(), size, run.end, run.rounds, worth=world.per_round)
        return replace(world, uploads=uploads, fastest=float(trip_seconds(fleet, size).min()))

    def surroundings(self, config: Config) -> RunWorld:
        """Fleet and data of a run, for world.json."""
        fleet, data = self.fleet, self.dataset
        return RunWorld(
            data=config.data.name,
            classes=[str(name) for name in data.class_names or range(data.classes)],
            train_samples=len(data.y_train),
            test_samples=len(data.y_test),
            model_bytes=4 * self.layout.size,
            train_seconds=fleet.train_seconds.tolist(),
            up_rate=fleet.up_rate.tolist(),
            down_rate=fleet.down_rate.tolist(),
            samples=[len(shard) for shard in self.shards],
            label_counts=label_counts(data.y_train, self.shards, data.classes).tolist(),
            up_latency=fleet.up_latency,
            down_latency=fleet.down_latency,
            on_seconds=fleet.on_seconds,
            off_seconds=fleet.off_seconds,
            loss=fleet.loss,
            aside=config.aside(),
            curves=list(config.method_class.about.curves),
        )

    def settled(self, config: Config, world: World | None = None) -> Config:
        """The configuration with those options of the method filled in that follow from this run."""
        return replace(config, method=config.method_class.settled(config.method, world or self.world(config)))

    def server(self, config: Config, world: World | None = None) -> Server:
        """The server at its start: the method, and the initial model as version 1."""
        world = world or self.world(config)
        method = config.method_class(config.method, world)
        weights = initial_weights(self.factory, config.run.seed)
        return Server(method, world, weights, config.training.lr, config.training.lr_decay, self.selection)


def assemble(config: Config, given: Given) -> Parts:
    """Everything that a configuration names, or that was given in its place; raises with one sentence."""
    dataset = _dataset(config, given.dataset)
    factory = _factory(config, dataset) if given.factory is None else given.factory
    layout = _check_model(config, factory, dataset)
    devices, samples = config.fleet.devices, len(dataset.y_train)
    shards = _deal(config, dataset) if given.shards is None else as_shards(given.shards, devices, samples)
    fleet = _fleet(config, given.fleet, shards)
    tests = None
    if given.test_shards is not None:
        tests = as_tests(given.test_shards, devices, dataset, (config.data.input_column, config.data.label_column))
    return Parts(dataset, factory, layout, fleet, shards, tests, _selection(config, given.selection))


def _selection(config: Config, given: Choice | None) -> Selection:
    if given is not None:
        return given
    if config.run.selection == CUSTOM:
        problem = "'custom' stands for a function given from Python; choose uniform or by_samples"
        raise ConfigError("run.selection", problem)
    return config.run.selection


def _dataset(config: Config, given: DataSet | None) -> DataSet:
    options, seed = config.data, config.run.seed
    dataset = _load(config) if given is None else given
    if options.train_samples or options.test_samples:
        dataset = dataset.subset(options.train_samples or None, options.test_samples or None, seed)
    if options.validation:
        dataset = dataset.with_validation(options.validation, seed)
    return arranged(dataset)


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


def _check_model(config: Config, factory: Factory, dataset: DataSet) -> Layout:
    """The model takes the data, has an output per class and suits the method; returns its layout."""
    module = build_quietly(factory)
    layout = layout_of(module)
    config.method_class(config.method, _world(config, [1] * config.fleet.devices, layout))
    config.method_class.rule(config.method).check(module)
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
    return layout


def _world(config: Config, samples: Sequence[int], layout: Layout) -> World:
    """What the method knows; one round's worth of uploads is what is in flight under constant concurrency."""
    worth = config.run.in_flight if config.run.trigger == "concurrency" else config.run.per_round
    counts = np.array(samples, np.int64)
    reach = optimiser(config.training).reach
    return World(config.fleet.devices, counts, config.training.epochs, worth, layout, config.run.seed, reach=reach)


def _fleet(config: Config, given: Fleet | None, shards: Sequence[NDArray[np.int64]]) -> Fleet:
    if config.fleet.custom and given is None:
        raise ConfigError("fleet.custom", "stands for a Fleet given from Python; set it to false or give one")
    work = np.array([len(shard) for shard in shards]) * float(config.training.epochs)
    fleet = Fleet.draw(config.fleet, config.run.seed, work) if given is None else given
    if len(fleet) != config.fleet.devices:
        raise ConfigError("fleet.devices", f"is {config.fleet.devices}, but the fleet has {len(fleet)} devices")
    return fleet


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
