"""The facade: a federation of model, data, devices and method, and its runs."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from freshet.assembly import Assembly, Overrides, differing, unequal
from freshet.compute.choice import open_executor
from freshet.compute.executor import Executor, WarmupExecutor
from freshet.compute.pool import Pool, PoolExecutor
from freshet.config import CUSTOM, SECTIONS, Config, check_section, resolve, with_added_settings
from freshet.core.method import SYNONYMS, Method
from freshet.core.saving import Tree
from freshet.core.vectors import load_kernels, tell_nobody_of_compiling
from freshet.data.adapters import is_table
from freshet.data.dataset import DataSet, own_data
from freshet.data.samples import Collate
from freshet.data.shards import is_given, is_partitioner, unwrap_loaders
from freshet.errors import ConfigError, DataError, RunError
from freshet.result import Result
from freshet.runs import checkpoint
from freshet.runs.lifecycle import OpenRun, drive
from freshet.runs.lock import RunLock
from freshet.runs.reader import RunDirectory
from freshet.runs.records import integer
from freshet.runs.software import accept_software
from freshet.runs.world import read_world, write_world
from freshet.runs.writer import Observer, RunWriter, check_observers, default_directory, write_config
from freshet.sim.driver import EvaluationSchedule, Simulation, check_state
from freshet.sim.fleet import Fleet
from freshet.training.batches import with_channels_last
from freshet.training.network import Factory, as_factory
from freshet.training.outgoing import Collusion
from freshet.training.own_loop import TrainingLoop
from freshet.training.task import Task, takes_whole_batch


class Federation:
    """A federation of devices that train one model.

    Bring your own model and data, or name built-in ones. Every section of the configuration can be given as a dict:
    ``Federation(method={"name": "fedasmu", "epsilon": 0.2}, fleet={"ratio": 20}, training={"lr": 0.1})``. Samples are
    pairs (x, y), dicts, tuples or single arrays. ``collate`` makes a batch from a list of them; "pad" pads them.
    ``load(device)`` returns the DataLoader of a device.
    """

    def __init__(
        self,
        model: Factory | nn.Module | str | Mapping[str, Any] | None = None,
        train: Any = None,
        test: Any = None,
        *,
        devices: int | None = None,
        method: str | type[Method] | Mapping[str, Any] = "fedasmu",
        fleet: Fleet | Mapping[str, Any] | None = None,
        training: Mapping[str, Any] | None = None,
        data: str | Mapping[str, Any] | None = None,
        run: Mapping[str, Any] | None = None,
        links: Mapping[str, Any] | None = None,
        defence: Mapping[str, Any] | None = None,
        attack: Mapping[str, Any] | None = None,
        privacy: Mapping[str, Any] | None = None,
        seed: int | None = None,
        task: Task | str | None = None,
        trainer: TrainingLoop | None = None,
        shards: Any = None,
        groups: Any = None,
        test_shards: Any = None,
        local: Sequence[str] | None = None,
        collate: Collate | str | None = None,
        load: Callable[[int], Any] | None = None,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            raise ConfigError(name, _suggestion(name))
        if load is not None:
            train = _load_each(load, train, devices)
        tables: dict[str, dict[str, Any]] = {
            "method": _table("method", {"name": method} if isinstance(method, str | type) else method),
            "training": _table("training", training),
            "fleet": _table("fleet", None if isinstance(fleet, Fleet) else fleet),
            "data": _table("data", {"name": data} if isinstance(data, str) else data),
            "model": {"name": model} if isinstance(model, str) else dict(model) if isinstance(model, Mapping) else {},
            "run": _table("run", run),
            "links": _table("links", links),
            "defence": _table("defence", defence),
            "attack": _table("attack", attack),
            "privacy": _table("privacy", privacy),
        }
        partition = tables["data"].get("partition")
        if is_given(partition):
            tables["data"]["partition"] = CUSTOM
        train, shards, of_loaders, own_collate = _unwrap_train(train, shards)
        collate = own_collate if collate is None else collate
        tables["training"] = of_loaders | tables["training"]
        tests = unwrap_loaders(test, "test")
        if tests is not None and tests.shards is not None:
            raise ConfigError("test", "takes one DataLoader; for tests of each device's own give test_shards")
        test = test if tests is None else tests.samples
        named = task or tables["training"].get("task")
        try:
            own = own_data(
                CUSTOM, train, test, groups, check_section("data", tables), collate, takes_whole_batch(named)
            )
        except DataError:
            if named is None and hasattr(model, "main_input_name"):  # a model of transformers, without its task
                problem = f"{type(model).__name__} is a Hugging Face model, which makes other batches"
                raise ConfigError("task", f'{problem}; add task="huggingface"') from None
            raise
        overrides = Overrides(
            dataset=None if own is None else with_channels_last(own),  # once, for all federations made from this one
            factory=None if model is None or isinstance(model, str | Mapping) else as_factory(model),
            fleet=fleet if isinstance(fleet, Fleet) else None,
            shards=shards,
            test_shards=test_shards,
            task=task if isinstance(task, Task) else None,
            trainer=trainer,
            schedule=tables["training"].get("schedule") if callable(tables["training"].get("schedule")) else None,
            selection=tables["run"].get("selection") if callable(tables["run"].get("selection")) else None,
            partition=partition if is_given(partition) else None,
            table=train if is_partitioner(partition) and is_table(train) else None,
        )
        for section, follows in overrides.defaults().items():
            tables[section] = follows | tables[section]
        for section, stands_for in overrides.tables().items():
            tables[section] |= stands_for
        if isinstance(task, str):
            tables["training"]["task"] = task
        if local is not None:
            tables["model"]["local"] = list(local)
        if devices is not None:
            tables["fleet"]["devices"] = devices
        if seed is not None:
            tables["run"]["seed"] = seed
        self.assembly = Assembly(resolve(tables), overrides).check()

    def __repr__(self) -> str:
        config, parameters = self.config, self.assembly.layout.learnable
        network = f"{config.model.name} of {parameters:,} parameters"
        return f"Federation({config.method_name} on {config.data.name}: {config.fleet.devices:,} devices, {network})"

    def _repr_html_(self) -> str:
        config, data = self.config, self.dataset
        sizes = [len(shard) for shard in self.shards]
        facts = {
            "data": f"{config.data.name}: {len(data.y_train):,} training and {len(data.y_test):,} test samples",
            "devices": f"{len(sizes):,}, with {min(sizes):,} to {max(sizes):,} samples ({config.data.partition})",
            "network": f"{config.model.name}, {self.assembly.layout.learnable:,} parameters that train",
            "task": f"{config.training.task}, judged by {self.assembly.metric.name}",
            "seed": config.run.seed,
        }
        from freshet.display import facts_html

        return facts_html(f"Federation with {config.method_name}", facts)

    @classmethod
    def from_config(cls, config: Config, overrides: Overrides | None = None) -> "Federation":
        """A federation of the parts that a configuration names, or of those that override them."""
        federation = cls.__new__(cls)
        federation.assembly = Assembly(config, overrides or Overrides()).check()
        return federation

    @property
    def config(self) -> Config:
        """The configuration, complete and checked."""
        return self.assembly.config

    def with_config(self, config: Config) -> "Federation":
        """The same federation under another configuration; what was given from Python stays.

        With ``data.validation`` the devices' own test samples are dropped: a part of the training set replaces them.
        """
        overrides = self.assembly.overrides
        if config.data.validation:
            overrides = replace(overrides, test_shards=None)
        return Federation.from_config(config, overrides)

    def with_settings(self, settings: Mapping[str, Any]) -> "Federation":
        """The same federation with other settings: ``with_settings({"training.lr": 0.1})``."""
        tables = self.config.tables()
        for name, value in settings.items():
            section, dot, key = name.partition(".")
            if not dot or section not in tables:
                raise ConfigError(name, "is not a setting; write section.key, for example training.lr")
            tables[section][key] = value
        return self.with_config(resolve(tables))

    @property
    def fingerprint(self) -> dict[str, str]:
        """Short hashes of data, shards, model and fleet. Equal hashes mean equal parts."""
        return self.assembly.fingerprint

    @property
    def dataset(self) -> DataSet:
        return self.assembly.dataset

    @property
    def factory(self) -> Factory:
        return self.assembly.factory

    @property
    def fleet(self) -> Fleet:
        return self.assembly.fleet

    @property
    def shards(self) -> list[NDArray[np.int64]]:
        """For each device, the indices of its training samples."""
        return self.assembly.shards

    def run(
        self,
        until: float | str | None = None,
        *,
        out: str | Path | None = None,
        observers: Sequence[Observer] = (),
        pool: Pool[Any] | None = None,
        progress: bool = True,
    ) -> Result:
        """Run in virtual time up to ``until`` (600 or "10m") or for ``run.rounds`` rounds; write a run directory.

        Runs can share worker processes through ``pool``. Without it a run starts its own. A terminal or notebook shows
        a progress bar; ``progress=False`` turns it off.
        """
        config, observers = self.config, check_observers(observers)
        if until is not None:
            config = config.with_run(until=_as_seconds(until))
        from freshet.display import progress_bar

        with progress_bar(config.method_name, config.run.until, config.run.rounds, progress) as bar:
            return self._run(config, out, [*bar, *observers], pool)

    def _run(
        self, config: Config, out: str | Path | None, observers: Sequence[Observer], pool: Pool[Any] | None
    ) -> Result:
        _ = self.fingerprint  # once, for all runs of this federation
        assembly = self.assembly.begin(config)
        config = assembly.config
        directory = Path(out) if out else default_directory(config.method_name, config.run.seed)
        RunWriter.check_empty(directory)

        def open_log() -> RunWriter:
            notice = self.dataset.reduction_notice()
            writer = RunWriter.create(directory, config.tables(), observers, notice, config.sha256())
            write_world(directory, assembly.run_world)
            return writer

        return self._drive(assembly, open_log, None, pool)

    def deploy(
        self,
        directory: str | Path,
        *,
        hosts: Sequence[str] = (),
        server: Mapping[str, Any] | None = None,
        observers: Sequence[Observer] = (),
        accept_changes: bool = False,
    ) -> Result:
        """Serve this federation to real devices on Flower until its run has ended.

        The directory holds keys and settings. A stopped run in it is resumed. ``hosts`` are names of this machine
        (default: loopback only). ``server`` holds initial values for server.toml. Devices bring their own samples, and
        the network unless it is built in. Samples given here only show the shape of theirs. ``accept_changes`` resumes
        a run that was computed with other software.
        """
        from freshet.flower.hosting import host

        overrides, root = self.assembly.overrides, Path(directory)
        ended = host(self.config, overrides, root, hosts, server or {}, accept_changes, observers)
        return Result(*ended, self.assembly.rebuilt)

    def resume(
        self,
        directory: str | Path,
        *,
        until: float | str | None = None,
        rounds: int | None = None,
        observers: Sequence[Observer] = (),
        pool: Pool[Any] | None = None,
        accept_changes: bool = False,
        progress: bool = True,
    ) -> Result:
        """Resume an interrupted, killed or stopped run from its last checkpoint: the same result, bit for bit.

        A later end (``until``, ``rounds``) extends a finished run, with the result of one longer run. The executor
        (``run.executor``, ``workers``, ``address``) is this federation's; all other settings are the run's. A run that
        was computed with other software is only resumed with ``accept_changes``, and says so ever after.
        """
        run = RunDirectory(directory)
        if run.is_deployed():
            raise RunError(f"{directory} is the run of a deployment; resume it with: {run.resume_command()}")
        run_until = self.config.run.until if until is None else self.config.with_run(until=_as_seconds(until)).run.until
        from freshet.display import progress_bar

        bar = progress_bar(self.config.method_name, run_until, rounds or self.config.run.rounds, progress)
        with RunLock(Path(directory)) as lock, bar as shown:
            return self._resume(directory, lock, until, rounds, [*shown, *observers], pool, accept_changes)

    def _resume(
        self,
        directory: str | Path,
        lock: RunLock,
        until: float | str | None,
        rounds: int | None,
        observers: Sequence[Observer],
        pool: Pool[Any] | None,
        accept_changes: bool,
    ) -> Result:
        """Resume in a directory that is already locked."""
        run = RunDirectory(directory)
        tables = run.trusted_config(self.config.method_name)
        if tables.get("method", {}).get("name") == self.config.method_name:  # it carries the class, if one was given
            tables["method"]["name"] = self.config.method_name
        made_with = resolve(with_added_settings(tables))
        self._check_same(run, made_with)
        config = _resumed_config(made_with, self.config, until, rounds)
        try:
            end = (made_with.run.until, made_with.run.rounds)
            run.check_resumable(longer=(config.run.until, config.run.rounds) != end)
        except RunError:
            if not made_with.run.keep_checkpoint:
                checkpoint.prune(run.directory, 0)  # left behind by a kill at the very end
            raise
        found = checkpoint.read(run.directory)
        try:
            check_state(found.tree, self.assembly.layout.size)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RunError(f"{directory} has a checkpoint of another model or version ({error})") from None
        if found.tree["log"].get("settings", "") not in ("", made_with.sha256()):
            raise RunError(f"{directory}/config.toml was changed after the run began; restore it, or start a new run")
        _check_end(run, config, found.tree["now"])
        now, remedy = self.assembly.plan.software, f"freshet resume {run.directory} --accept-changes"
        accept_software(found.tree, now, accept_changes, run.directory, remedy)

        def open_log() -> RunWriter:
            writer = RunWriter(run.directory, observers, found.tree["log"], lock, config.sha256())
            if config != made_with:
                write_config(run.directory, config.tables(), self.dataset.reduction_notice())
            found.remove_damaged()
            for message in [*found.problems, *writer.cuts]:
                writer.say(message)
            return writer

        return self._drive(self.assembly.begin(config), open_log, found.tree, pool)

    def _check_same(self, run: RunDirectory, made_with: Config) -> None:
        """Raise unless this federation made the run: the same settings, data, shards, model and fleet."""
        mine = self.config
        if mine.method_name == made_with.method_name:  # derived options are those of the run
            given = mine.method.model_dump(exclude_none=True)
            mine = replace(mine, method=made_with.method.model_copy(update=given))
        end = {"until": made_with.run.until, "rounds": made_with.run.rounds}
        other = unequal(replace(mine, run=mine.run.model_copy(update=end)).identity(), made_with.identity())
        if other:
            keys = ", ".join(other)
            raise RunError(
                f"{run.directory} was made with another configuration ({keys}); build the same federation to resume it"
            )
        world = read_world(run.directory)
        other = differing(self.fingerprint, world.fingerprint) if world is not None else []
        if other:
            raise RunError(
                f"{run.directory} was made with other {' and other '.join(other)}; build the same federation to resume "
                "it, or begin a new run"
            )

    def _drive(
        self, assembly: Assembly, open_log: Callable[[], RunWriter], tree: Tree | None, pool: Pool[Any] | None
    ) -> Result:
        """Run, from the start or from a checkpoint."""
        ended = drive(assembly.plan, self._ready(assembly, open_log, pool), tree)
        return Result(*ended, assembly.rebuilt)

    @contextmanager
    def _ready(
        self, assembly: Assembly, open_log: Callable[[], RunWriter], pool: Pool[Any] | None
    ) -> Iterator[OpenRun]:
        """Server, fleet, executor and log of a run in virtual time."""
        config, coordinator = assembly.config, assembly.coordinator
        with closing(_open_executor(assembly, pool)) as executor:
            writer = open_log()
            executor = _with_kernels(executor, writer.say)
            simulation = Simulation(
                coordinator,
                self.fleet,
                executor,
                writer,
                eval_every=config.run.eval_every,
                stop_diverged=config.run.diverged == "stop",
                device_memory=config.run.device_memory_mb * 2**20,
                device_evaluations=EvaluationSchedule.from_options(config.run.evaluate_devices, config.run.personalise),
                own_parts=bool(config.model.local),
                collusion=Collusion.from_options(
                    config.attack, config.run.seed, config.fleet.devices, assembly.layout.learnable
                ),
            )
            try:
                with closing(simulation):
                    yield OpenRun(simulation, coordinator.server, writer)
            finally:
                tell_nobody_of_compiling()


def _open_executor(assembly: Assembly, pool: Pool[Any] | None) -> Executor:
    run = assembly.config.run
    return open_executor(
        assembly.setup(), run.executor, run.workers, run.address, pool=pool, uploads=assembly.context.expected_uploads
    )


def _with_kernels(executor: Executor, say: Callable[[str], None]) -> Executor:
    """Load the server's compiled loops: now, or while workers train the first trips."""
    if isinstance(executor, PoolExecutor):
        return WarmupExecutor(executor, partial(load_kernels, say))
    load_kernels(say)
    return executor


def _suggestion(name: str) -> str:
    """What a user may have meant by an argument that does not exist."""
    known = list(inspect.signature(Federation).parameters)
    section, _, key = SYNONYMS.get(name, "").partition(".")
    if key in known:
        return f"is not an argument of Federation; did you mean {key}?"
    if section in known:
        return f'is not an argument of Federation; did you mean {section}={{"{key}": ...}}?'
    own = next((table for table, model in SECTIONS.items() if name in model.model_fields), None)
    if own is not None:
        return f'is not an argument of Federation; write {own}={{"{name}": ...}}'
    close = get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known[:-1])}"
    return f"is not an argument of Federation; {hint}"


def _load_each(load: Callable[[int], Any], train: Any, devices: int | None) -> list[Any]:
    """The DataLoader of each device."""
    if train is not None or devices is None:
        problem = "takes the place of train" if train is not None else "gives each device its DataLoader"
        raise ConfigError("load", f"{problem}; {'leave train out' if train is not None else 'give devices, too'}")
    loaders = [load(device) for device in range(devices)]
    strange = [type(loader).__name__ for loader in loaders if unwrap_loaders(loader, "load") is None]
    if strange:
        raise ConfigError("load", f"must return a DataLoader for each device, not {strange[0]}")
    return loaders


def _unwrap_train(train: Any, shards: Any) -> tuple[Any, Any, dict[str, Any], Any]:
    """Training samples, shards, settings of training and ``collate``, taken from DataLoaders if there are any."""
    found = unwrap_loaders(train, "train")
    if found is None:
        return train, shards, {}, None
    if found.shards is not None and shards is not None:
        raise ConfigError("shards", "are given by the list of DataLoaders, one per device; leave one of them out")
    settings = {} if found.batch_size is None else {"batch_size": found.batch_size}
    return found.samples, shards if found.shards is None else found.shards, settings, found.collate


def _table(section: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of a section's settings."""
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(section, f"must be a dict of settings, but {' '.join(repr(given).split())[:60]} was given")
    return dict(given or {})


def _resumed_config(made_with: Config, mine: Config, until: float | str | None, rounds: int | None) -> Config:
    """A run's configuration as it is resumed: on this machine's executor, perhaps to a later end."""
    here = {key: getattr(mine.run, key) for key in ("executor", "workers", "address")}
    return made_with.with_run(until=None if until is None else _as_seconds(until), rounds=rounds, **here)


def _as_seconds(until: float | str) -> float | str:
    return until if isinstance(until, str) else float(until)


def _check_end(run: RunDirectory, config: Config, now: float) -> None:
    """Raise if nothing is left to do between the checkpoint and the new end."""
    if not run.finished() or run.summary()["status"] != "finished":
        if config.run.end < now:
            raise ConfigError("run.until", f"must not be before {now:g} s, where {run.directory} stands")
        return
    rounds = integer(run.summary().get("rounds")) or 0
    if 0 < config.run.rounds <= rounds:
        raise ConfigError("run.rounds", f"must be more than the {rounds} rounds after which {run.directory} ended")
    if config.run.end <= now:
        raise ConfigError("run.until", f"must be later than {now:g} s, where {run.directory} ended")
