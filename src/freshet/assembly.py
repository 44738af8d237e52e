"""From a configuration to the parts that it names: data, network, shards, fleet, server.

Fingerprints are short hashes of these parts. A run is never resumed with other data unnoticed. Arrays count with every
bit. Inputs outside memory count with an even sample, their labels in full.
"""

import hashlib
import json
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from freshet.config import CUSTOM, Config, check_layout
from freshet.core.compression import Links, model_bytes
from freshet.core.coordinator import Coordinator
from freshet.core.defence import Defence
from freshet.core.layout import Layout
from freshet.core.messages import Assignment
from freshet.core.method import LocalRule, MethodContext
from freshet.core.scheduling import SELECTIONS, Choice, Selection
from freshet.core.server import ActiveTrip, Server
from freshet.core.streams import stream
from freshet.core.vectors import Vector, combine
from freshet.data.adapters import LazyRows, differs_when_read_again, evenly_spaced, own_draws
from freshet.data.dataset import DataSet, Rows
from freshet.data.partition import label_counts, partition
from freshet.data.samples import Records
from freshet.data.shards import (
    DeviceTests,
    as_device_tests,
    as_shards,
    by_function,
    by_partitioner,
    columns_of,
    device_count,
    is_partitioner,
    natural_tests,
    overlap_notices,
    without_held_out,
)
from freshet.data.sources import load
from freshet.errors import ConfigError
from freshet.methods._shared.rounds import RoundMethod
from freshet.models.registry import build
from freshet.privacy import Accountant, NoisedSum
from freshet.runs.lifecycle import RunPlan
from freshet.runs.records import Metric
from freshet.runs.segments import rotation_bytes
from freshet.runs.software import software
from freshet.runs.world import RunWorld
from freshet.sim.fleet import Fleet
from freshet.sim.forecast import check_length, expected_uploads, scale_links, trip_seconds
from freshet.training.batches import FederatedData, Samples, with_channels_last
from freshet.training.network import (
    Factory,
    FlatModel,
    FrozenTensors,
    ModuleBuilder,
    enable_checkpointing,
    in_training_precision,
    initial_module,
    layout_of,
    precision_notices,
    with_own_parts,
    with_start_weights,
)
from freshet.training.optimisers import CustomSchedule, make_optimiser, make_schedule
from freshet.training.options import TrainingOptions
from freshet.training.outgoing import Outgoing
from freshet.training.own_loop import TrainingLoop, check_loop
from freshet.training.task import TASKS, Task, check_output, check_targets, output_notices
from freshet.training.trainer import Setup, Trainer, TripInput

#: What each hash covers, in words for messages.
WORDS = {"data": "data", "shards": "shards (which device holds which samples)", "model": "model", "fleet": "fleet"}
#: What else the hash of a part depends on: shards depend on the data, and a fleet's work on both.
FOLLOWS = {"shards": {"data"}, "fleet": {"data", "shards"}}
#: Number of inputs outside memory that are hashed, and rows of an array that are hashed at a time.
SAMPLED, ROWS = 64, 1024
Tables = Mapping[str, Mapping[str, Any]]
_DIGITS = 16


def digest(pieces: Iterable[Any]) -> str:
    """The hash of arrays and plain values, in order; an array's type and shape are part of it."""
    found = hashlib.sha256()
    for piece in pieces:
        if isinstance(piece, np.ndarray):
            found.update(f"{piece.dtype.str}{piece.shape}\n".encode())
            rows = np.atleast_1d(piece)
            for start in range(0, len(rows), ROWS):
                found.update(np.ascontiguousarray(rows[start : start + ROWS]).tobytes())
        else:
            found.update((json.dumps(piece, default=lambda scalar: scalar.item()) + "\n").encode())
    return found.hexdigest()[:_DIGITS]


def fingerprint(
    dataset: DataSet,
    tests: DeviceTests | None,
    shards: Sequence[NDArray[np.int64]],
    model: str,
    fleet: Fleet,
) -> dict[str, str]:
    """One hash each of data, shards, model (names, shapes, the numbers it starts with) and fleet."""
    return {
        "data": digest(_data_content(dataset, tests)),
        "shards": digest(shards),
        "model": model,
        "fleet": digest(_fleet_content(fleet)),
    }


def differing(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The parts, in words, of which both know a hash and the hashes differ; not what may follow from another's."""
    found = [name for name in mine if theirs.get(name, mine[name]) != mine[name]]
    return [WORDS.get(name, name) for name in found if not FOLLOWS.get(name, set()) & set(found)]


def unequal(mine: Tables, theirs: Tables) -> list[str]:
    """``section.key`` of the settings that are not the same; of another method only that it is one."""
    both = {section: (mine.get(section, {}), theirs.get(section, {})) for section in {**mine, **theirs}}
    found = [f"{section}.{key}" for section, (a, b) in both.items() for key in {**a, **b} if a.get(key) != b.get(key)]
    return ["method.name"] if "method.name" in found else found


def _data_content(dataset: DataSet, tests: DeviceTests | None) -> Iterable[Any]:
    yield [dataset.classes, dataset.mean, dataset.std, dataset.pad_id, dataset.vocabulary]
    for x, y in ((dataset.x_train, dataset.y_train), (dataset.x_test, dataset.y_test)):
        yield from (y, *_rows_content(x))
    if tests is not None:
        yield from tests.shards
        yield from tests.data or ()


def _rows_content(x: Rows) -> Iterable[Any]:
    """All samples, or of those outside memory an even sample; a source that draws anew each time has no content."""
    if isinstance(x, Records):
        yield from x.content()
        return
    if not isinstance(x, LazyRows):
        yield x
        return
    yield [list(x.shape), x.dtype.str]
    some = evenly_spaced(len(x), SAMPLED)
    if not differs_when_read_again(lambda: x.read(some).tobytes()):
        yield x.read(some)


def model_digest(module: nn.Module) -> str:
    """The hash of a module at its start: layout, parameters that train, parameters that do not, buffers."""
    return digest(_model_content(module))


def _model_content(module: nn.Module) -> Iterable[Any]:
    yield [[entry.name, list(entry.shape), entry.kind] for entry in layout_of(module).entries]
    for named in (module.named_parameters(), module.named_buffers()):
        for name, tensor in named:
            yield name
            yield tensor.detach().float().cpu().numpy()


def _fleet_content(fleet: Fleet) -> Iterable[Any]:
    """Every figure; of a trace the rows of every device."""
    for each in fields(fleet):
        value = getattr(fleet, each.name)
        if each.name.startswith("_") or (each.name == "start_seconds" and not value.any()):
            continue
        yield each.name
        if each.name == "trace":
            yield None if value is None else [[history.rows, history.cycle] for history in value.histories]
        else:
            yield value


#: Epochs over an average shard that take a device its seconds, when time follows work.
USUAL_EPOCHS = TrainingOptions().epochs


@dataclass(frozen=True)
class Overrides:
    """What a user passes from Python instead of naming it in the configuration."""

    dataset: DataSet | None = None
    factory: Factory | None = None
    fleet: Fleet | None = None
    shards: Any = None
    test_shards: Any = None
    selection: Choice | None = None
    task: Task | None = None
    schedule: CustomSchedule | None = None
    #: A function or a partitioner that deals the samples, and the user's own table for the partitioner's columns.
    partition: Any = None
    table: Any = None
    trainer: TrainingLoop | None = None

    def defaults(self) -> dict[str, dict[str, Any]]:
        """Defaults that these overrides imply: a partition by groups, one device per shard."""
        groups = None if self.dataset is None else self.dataset.groups
        if self.shards is not None:
            devices = device_count(self.shards)
            return {"fleet": {"devices": devices}} if devices else {}
        if self.partition is not None:
            if self.dataset is None or not is_partitioner(self.partition):
                return {}
            return {"fleet": {"devices": len(self.partitioner_shards(self.dataset))}}
        if groups is None:
            dealt = self.dataset is None or self.dataset.has_classes
            return {} if dealt else {"data": {"partition": "iid"}}
        return {"data": {"partition": "natural"}, "fleet": {"devices": len(set(groups.tolist()))}}

    def partitioner_shards(self, dataset: DataSet, devices: int | None = None) -> list[NDArray[np.int64]]:
        """The shards that the user's partitioner makes of the user's table, or of a data set in memory."""
        return by_partitioner(self.partition, columns_of(dataset) if self.table is None else self.table, devices)

    def tables(self) -> dict[str, dict[str, Any]]:
        """The settings that these overrides imply."""
        # The seconds of a fleet from Python are those of a whole local training.
        fleet = {} if self.fleet is None else {"devices": len(self.fleet), "custom": True, "time": "trip"}
        model = {} if self.factory is None else {"name": CUSTOM}
        data = {} if self.dataset is None else {"name": CUSTOM}
        dealt = {} if self.shards is None and self.partition is None else {"partition": CUSTOM}
        selection = {} if self.selection is None else {"selection": CUSTOM}
        own = {"task": self.task, "schedule": self.schedule, "trainer": self.trainer}
        training = {key: CUSTOM for key, given in own.items() if given is not None}
        return {"fleet": fleet, "model": model, "data": data | dealt, "run": selection, "training": training}


@dataclass(frozen=True)
class InitialModel:
    """The network as every run starts it."""

    layout: Layout
    weights: Vector
    #: Parameters that do not train. They do not travel, but they are part of the final model.
    frozen: FrozenTensors = field(repr=False)
    #: A hash of every number that the module starts with.
    digest: str = ""
    #: What the user should know about it.
    notices: tuple[str, ...] = ()


#: Parts that all runs of one federation share.
_SHARED = {"task", "_data", "shards", "tests", "fleet", "selection", "factory", "initial", "_context", "fingerprint"}


@dataclass(frozen=True, eq=False)
class Assembly:
    """The parts of a federation under one configuration. Each part is made once, on first use.

    ``check()`` makes every part that a user can get wrong. A mistake is then one sentence, before a file is written.
    ``begin()`` gives the parts of one run: data, network, shards and fleet are shared, the server is new.
    """

    config: Config
    overrides: Overrides = Overrides()
    #: A deployment does not know how fast its devices are.
    deployed: bool = False

    def check(self) -> Self:
        """Make all parts; raise ``ConfigError`` or ``DataError`` with one sentence. Returns itself."""
        _ = self.task, self.trainer, self.dataset, self.initial, self.shards, self.fleet, self.tests, self.selection
        self.config.method_class(self.config.method, self._context)
        return self

    def begin(self, config: Config | None = None) -> "Assembly":
        """The parts of one run, with the options filled in that follow from it.

        ``config`` may differ from this one in where the run trains and when it ends, and in nothing else.
        """
        made = {name: part for name, part in vars(self).items() if name in _SHARED}
        run = replace(self, config=config or self.config)
        vars(run).update(made)
        made["context"] = run.context
        run = replace(run, config=run._with_derived())
        vars(run).update(made)
        return run

    # ---- data and devices

    @cached_property
    def task(self) -> Task:
        """Loss and metrics."""
        if self.overrides.task is not None:
            return self.overrides.task
        if self.config.training.task == CUSTOM:
            problem = "'custom' stands for a Task given from Python; choose another or give one"
            raise ConfigError("training.task", problem)
        return TASKS[self.config.training.task]

    @cached_property
    def trainer(self) -> TrainingLoop | None:
        """The user's own training loop, or None for the built-in one."""
        config, loop = self.config, self.overrides.trainer
        if loop is not None:
            check_loop(loop, config.training, config.method_class.rule(config.method), config.method_name)
        elif config.training.trainer == CUSTOM and not self.deployed:  # a server does not train
            problem = "'custom' stands for a function given from Python (trainer=, --trainer); give it, or set built-in"
            raise ConfigError("training.trainer", problem)
        return loop

    @property
    def metric(self) -> Metric:
        """The metric that runs are judged by."""
        return Metric(self.task.primary, str(self.task.direction))

    @property
    def dataset(self) -> DataSet:
        """Training and test samples, without those held out for validation."""
        return self._data[0]

    @cached_property
    def _data(self) -> tuple[DataSet, NDArray[np.int64]]:
        """The data set, and the indices of the training samples that are held out for validation."""
        options, seed = self.config.data, self.config.run.seed
        dataset = self.overrides.dataset
        if dataset is None:
            dataset = _load(self.config)
        if options.train_samples or options.test_samples:
            dataset = dataset.subset(options.train_samples or None, options.test_samples or None, seed)
        held_out = np.empty(0, np.int64)
        if options.validation:
            held_out = dataset.validation_indices(options.validation, seed)
            dataset = dataset.with_validation(options.validation, seed)
        dataset = with_channels_last(dataset)
        check_targets(self.task, dataset.y_train, dataset.name)
        if not dataset.has_classes:
            _check_needs_no_classes(self.config)
        return dataset, held_out

    @cached_property
    def shards(self) -> list[NDArray[np.int64]]:
        """The training samples that each device holds, as indices."""
        given, (dataset, held_out), devices = self.overrides.shards, self._data, self.config.fleet.devices
        if given is not None and self.overrides.partition is not None:
            raise ConfigError("data.partition", "shards were given too; give one of them")
        if self.overrides.table is not None:
            if self.config.data.train_samples:
                problem = "a partitioner deals all rows of a table; select rows of the table instead"
                raise ConfigError("data.train_samples", problem)
            given = self.overrides.partitioner_shards(dataset, devices)
        if given is None:
            return _deal(self.config, dataset, self.overrides)
        samples = len(dataset.y_train) + len(held_out)
        shards = as_shards(given, devices, samples)
        return without_held_out(shards, held_out, samples) if len(held_out) else shards

    @cached_property
    def tests(self) -> DeviceTests | None:
        """The test samples that each device holds, if the user gave any."""
        if self.overrides.test_shards is None:
            natural = self.config.data.partition == "natural"
            return natural_tests(self.dataset, self.shards) if natural else None
        options = self.config.data
        columns = (options.input_column, options.label_column)
        return as_device_tests(self.overrides.test_shards, self.config.fleet.devices, self.dataset, columns)

    @cached_property
    def fleet(self) -> Fleet:
        """How fast the devices and their links are."""
        return _fleet(self.config, self.overrides.fleet, self.shards)

    @cached_property
    def selection(self) -> Selection:
        """How idle devices are chosen."""
        if self.overrides.selection is not None:
            return self.overrides.selection
        if self.config.run.selection == CUSTOM:
            problem = f"'custom' stands for a function given from Python; choose one of {', '.join(SELECTIONS)}"
            raise ConfigError("run.selection", problem)
        return self.config.run.selection

    # ---- the network

    @cached_property
    def factory(self) -> Factory:
        """Builds the network; with the weights of ``model.start``, if there is such a file."""
        factory, data = self.overrides.factory, self.dataset
        if factory is None:
            factory = built_in(self.config, data.sample_shape, data.classes, data.vocabulary, data.pad_id)
        factory = with_own_parts(factory, self.config.model.local)
        return with_start_weights(factory, Path(self.config.model.start)) if self.config.model.start else factory

    @cached_property
    def initial(self) -> InitialModel:
        """The network at the start. It takes the data, its outputs suit the task, and it suits the method."""
        module = initial_module(self.factory, self.config.run.seed)
        digest, notices = model_digest(module), precision_notices(module)
        flat = FlatModel(module)
        weights = flat.dump()
        _check_finite(flat.layout, weights)
        notices += self._check_module(module, flat.layout)
        return InitialModel(flat.layout, weights, FrozenTensors.of(module), digest, tuple(notices))

    def check_network(self) -> None:
        """Build the network and check it, for a device: the weights come from the server."""
        module = initial_module(self.factory, self.config.run.seed)
        self._check_module(module, layout_of(module))

    def _check_module(self, module: nn.Module, layout: Layout) -> list[str]:
        """Raise one sentence if the module does not suit the run; return what the user should know about it."""
        rule = self.config.method_class.rule(self.config.method)
        rule.check(module)
        if rule.needs_own_parts and not self.config.model.local:
            problem = f"{self.config.method_name} needs a part that stays on the devices: name the head"
            raise ConfigError("model.local", f'{problem}, for example ["last"]')
        check_layout(self.config, layout)
        if self.config.training.gradient_checkpointing:
            enable_checkpointing(module)
        if isinstance(self.dataset.x_train, Records):
            self._check_records(rule)
        return _check_outputs(module, self.dataset, self.task)

    def _check_records(self, rule: LocalRule) -> None:
        """What needs one input tensor per sample cannot use samples of another form."""
        if rule.changes_loss:
            problem = f"{self.config.method_name} looks at the features of one input tensor"
            raise ConfigError("method.name", f"{problem}, but samples have another form; choose another method")
        if self.config.attack.kind == "backdoor":
            raise ConfigError("attack.kind", "backdoor marks images, but samples have another form; use label-flip")

    @property
    def layout(self) -> Layout:
        """Where each tensor of the network lies in the flat vector."""
        return self.initial.layout

    @property
    def rebuilt(self) -> ModuleBuilder:
        """Turns final weights into a module that takes inputs as they are in the data set."""
        data, local = self.dataset, tuple(self.config.model.local or ())
        return ModuleBuilder(self.factory, self.config.run.seed, data.mean, data.std, local=local)

    # ---- one run

    @cached_property
    def _context(self) -> MethodContext:
        """What the method may know about the federation, whatever the length of the run.

        Under constant concurrency, a round has as many uploads as there are devices in flight.
        """
        config, run = self.config, self.config.run
        per_round = run.in_flight if run.trigger == "concurrency" else run.per_round
        return MethodContext(
            config.fleet.devices,
            np.array([len(shard) for shard in self.shards], np.int64),
            config.training.epochs,
            per_round,
            self.layout,
            run.seed,
            own_epochs=_own_epochs(config),
            in_flight=run.per_round if config.method_class.about.kind == "sync" else run.in_flight,
            reach=make_optimiser(config.training).reach,
            samples_reported=self.deployed,
            max_share=config.defence.max_share,
        )

    @cached_property
    def context(self) -> MethodContext:
        """What the method may know about this run."""
        context, config, run = self._context, self.config, self.config.run
        size, trigger = 4 * self.layout.size, config.trigger()
        fleet = scale_links(self.fleet, size, model_bytes(config.links, self.layout))
        uploads = expected_uploads(fleet, trigger, size, run.end, run.rounds, worth=context.per_round)
        check_length(fleet, trigger, size, run.end, uploads, run.eval_every)
        if self.deployed:
            return context
        seconds = trip_seconds(fleet, size)
        return replace(context, expected_uploads=uploads, fastest_seconds=float(seconds.min()), seconds=seconds)

    def _with_derived(self) -> Config:
        """The configuration with options that follow from this run and hold however long it becomes: the method's, and
        the length of a cosine schedule."""
        config, training = self.config, self.config.training
        if training.schedule == "cosine":
            training = training.model_copy(update={"schedule_rounds": self._schedule_rounds})
        method = config.method.with_derived(self.context)
        return replace(config, method=method, training=training)

    @property
    def _schedule_rounds(self) -> int:
        """The rounds of the run, or those expected until its end. An extended run keeps those of its first end."""
        config, context = self.config, self.context
        seconds, end = config.training.round_seconds, config.run.end
        by_time = max(1, round(end / seconds)) if seconds and end < math.inf else 0
        return (
            config.training.schedule_rounds
            or by_time
            or config.run.rounds
            or max(1, context.expected_uploads // context.per_round)
        )

    @cached_property
    def server(self) -> Server:
        """The server at its start: the method, and the initial model as version 1."""
        config, layout = self.config, self.layout
        return Server(
            config.method_class(config.method, self.context),
            self.context,
            self.initial.weights.copy(),  # a method that writes to it spoils no other run
            make_schedule(config.training, self.overrides.schedule, self._schedule_rounds),
            self.selection,
            None if config.run.gate == "off" else float(config.run.gate),
            None if config.links.plain else Links(config.links, layout),
            self._defence(),
            config.training.round_seconds,
            self._sum_noise(),
        )

    def _sum_noise(self) -> NoisedSum | None:
        """Noise on sums. Devices know the seed of a deployment, so its noise has a key that only the server knows."""
        config = self.config
        key = secrets.randbits(128) if self.deployed else config.run.seed
        return NoisedSum(config.privacy, key) if config.privacy.on_server else None

    def _defence(self) -> Defence | None:
        config, layout = self.config, self.layout
        if config.defence.rule == "none":
            return None
        root = self._train_root if config.defence.rule == "root" else None
        return Defence(config.defence, layout, issubclass(config.method_class, RoundMethod), root)

    def _train_root(self, base: Vector, active: ActiveTrip) -> Vector:
        """Train on the server's own samples from a model, as a device did in a trip. Returns the step."""
        root = self.config.fleet.devices  # the number after those of the devices
        assignment = Assignment(root, active.base, active.base, active.age, base, active.epochs, active.lr)
        outcome = self._root_trainer.train(TripInput(assignment, (), (), LocalRule(), {}))
        return combine([(1.0, outcome.weights), (-1.0, base)])

    @cached_property
    def _root_trainer(self) -> Trainer:
        """A trainer for one more device: the server, which holds a few training samples."""
        config, samples = self.config, len(self.dataset.y_train)
        rows = np.sort(stream(config.run.seed, "root").permutation(samples)[: config.defence.root_samples])
        shards = [np.empty(0, np.int64)] * config.fleet.devices + [rows.astype(np.int64)]
        own_task = self.task if self.task.name == CUSTOM else None
        data = FederatedData.of(self.dataset, shards)
        return Setup(self.factory, data, config.training, config.run.seed, own_task).trainer()

    @cached_property
    def coordinator(self) -> Coordinator:
        """The rules of the run over this server."""
        run = self.config.run
        return Coordinator(self.server, self.config.trigger(), run.rounds, run.end == math.inf, run.round_deadline)

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know about data and model before the run."""
        given = self.overrides.shards is not None or self.overrides.partition is not None
        overlaps = overlap_notices(self.shards, len(self.dataset.y_train)) if given else []
        return (*overlaps, *self.initial.notices)

    @property
    def plan(self) -> RunPlan:
        """What the run is to do, whatever drives it."""
        config, run = self.config, self.config.run
        return RunPlan(
            config.method_name,
            run.seed,
            run.target,
            run.end,
            run.checkpoint_every,
            run.checkpoint_minutes,
            stop_diverged=run.diverged == "stop",
            stop_at_target=run.stop_at_target,
            patience=run.patience,
            keep_best=run.keep == "best",
            keep=run.keep_checkpoint,
            data=self.dataset.facts(),
            metric=self.metric,
            frozen=self.initial.frozen,
            rotate_bytes=rotation_bytes(run.rotate_log),
            accountant=Accountant(config.privacy) if config.privacy.on else None,
            software=software(config.method_class, config.method_class.rule(config.method)),
            notices=self.notices,
        )

    def setup(self, data: FederatedData | None = None, *, secret: bool = False) -> Setup:
        """What a worker needs to train. A real device gives its own ``data``, and its noise is ``secret``."""
        config = self.config
        if data is None:
            data = FederatedData.of(self.dataset, self.shards, self.tests)
        own_task = self.task if self.task.name == CUSTOM else None
        outgoing = Outgoing(config.links, config.attack, config.privacy, config.run.seed, secret)
        return Setup(self.factory, data, config.training, config.run.seed, own_task, outgoing, self.trainer)

    # ---- what a run writes down about its parts

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Short hashes of data, shards, model and fleet."""
        return fingerprint(self.dataset, self.tests, self.shards, self.initial.digest, self.fleet)

    @property
    def run_world(self) -> RunWorld:
        """Fleet and data of the run, for world.json."""
        config, fleet, data = self.config, self.fleet, self.dataset
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
            aside=config.non_semantic(),
            curves=list(config.method_class.about.curves),
            metric=self.metric.name,
            direction=self.metric.direction,
            mean=None if data.mean is None else list(data.mean),
            std=None if data.std is None else list(data.std),
            sample_shape=list(data.sample_shape),
            outputs=data.classes,
            vocabulary=data.vocabulary,
            pad_id=data.pad_id,
            fingerprint=self.fingerprint,
        )


def _load(config: Config) -> DataSet:
    options = config.data
    if options.name == CUSTOM:
        raise ConfigError(
            "data.name", "'custom' stands for data given from Python; name a data set (`freshet data list`)"
        )
    return load(options.name, options.dir or None, vocabulary=options.vocabulary, length=options.length)


def built_in(config: Config, shape: Sequence[int], classes: int, vocabulary: int | None, pad_id: int | None) -> Factory:
    """A factory of the network that a configuration names, for samples of this shape."""
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


def _check_finite(layout: Layout, weights: Vector) -> None:
    """Refuse a network with a tensor that is not finite from the start: every upload of it would be rejected."""
    for entry in layout.entries:
        if np.isfinite(weights[entry.span]).all():
            continue
        if entry.kind == "learnable":
            raise ConfigError(
                "model", f"the parameter {entry.name} is not finite at the start; check its initialisation"
            )
        problem = f"the buffer {entry.name} has entries that are not finite, such as a causal mask has"
        raise ConfigError("model", f"{problem}; register it with persistent=False, so that it does not travel")


def _check_outputs(module: nn.Module, dataset: DataSet, task: Task) -> list[str]:
    """Raise one sentence unless the network takes the samples and its outputs suit the task. Return notices."""
    with own_draws():  # a user's Dataset or collate may draw
        x, y = next(Samples.of(dataset, test=True).chunks(2))
    try:
        with torch.no_grad():
            output = task.output(in_training_precision(module).eval(), x, y)
    except (RuntimeError, IndexError, TypeError, ValueError, AttributeError, KeyError) as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError("model", f"cannot take {_describe_inputs(x, dataset)}: {problem}") from None
    check_output(task, output, y, dataset.classes)
    return output_notices(task, output, y)


def _check_needs_no_classes(config: Config) -> None:
    """Raise one sentence for settings that need one class label per sample."""
    for key, value, off in (
        ("run.evaluate_devices", config.run.evaluate_devices, ("never",)),
        (
            "attack.kind",
            config.attack.kind,
            ("none", "little-is-enough", "inner-product", "free-rider", "sign-flip"),
        ),
    ):
        if value not in off:
            raise ConfigError(key, f"needs one class label per sample, and these have none; set it to {off[-1]}")


def _describe_inputs(x: Any, dataset: DataSet) -> str:
    """What a model is called with, in words for an error."""
    if isinstance(x, Mapping):
        return f"a batch of {', '.join(str(name) for name in x)}"
    if isinstance(x, tuple):
        return f"a batch of {len(x)} parts"
    shape = tuple(x.shape[1:]) if isinstance(dataset.x_test, Records) and hasattr(x, "shape") else dataset.sample_shape
    return f"samples of shape {shape}"


def _fleet(config: Config, given: Fleet | None, shards: Sequence[NDArray[np.int64]]) -> Fleet:
    if config.fleet.custom and given is None:
        raise ConfigError("fleet.custom", "stands for a Fleet given from Python; set it to false or give one")
    work = _work(config.training, shards)
    fleet = Fleet.draw(config.fleet, config.run.seed, work) if given is None else given
    if len(fleet) != config.fleet.devices:
        raise ConfigError("fleet.devices", f"is {config.fleet.devices}, but the fleet has {len(fleet)} devices")
    if config.fleet.time == "trip" or fleet.trace is not None or config.fleet.measured:
        return fleet
    return fleet.scale_to_work(work, USUAL_EPOCHS * sum(len(shard) for shard in shards) / len(shards))


def _work(options: TrainingOptions, shards: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    """Samples that each device goes through in one local training: steps x batch, or its whole shard once per epoch."""
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


def _deal(config: Config, dataset: DataSet, overrides: Overrides) -> list[NDArray[np.int64]]:
    options = config.data
    if is_partitioner(overrides.partition):
        return overrides.partitioner_shards(dataset, config.fleet.devices)
    if overrides.partition is not None:
        draws = stream(config.run.seed, "partition")
        return by_function(overrides.partition, dataset.y_train, config.fleet.devices, draws)
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
