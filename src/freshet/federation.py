"""What a user builds and runs: a model, data, devices, a fleet and a method, put together into a run."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from freshet.compute.choice import open_executor
from freshet.compute.pool import Pool
from freshet.config import CUSTOM, Config, resolve
from freshet.core.coordinator import Coordinator
from freshet.core.saving import Tree
from freshet.core.vectors import load_kernels
from freshet.data.dataset import DataSet, own_data
from freshet.errors import RunError
from freshet.parts import Given, assemble
from freshet.result import Result
from freshet.runs import checkpoint
from freshet.runs.lifecycle import Plan, Ready, drive
from freshet.runs.lock import RunLock
from freshet.runs.reader import Run
from freshet.runs.world import write_world
from freshet.runs.writer import Observer, RunWriter, default_directory
from freshet.sim.driver import Simulation, check
from freshet.sim.fleet import Fleet
from freshet.training.flat import Factory
from freshet.training.start import as_factory
from freshet.training.task import Task


class Federation:
    """A federation of devices that train one model.

    Bring your own model and data, or name built-in ones; every section of the configuration can be given as a dict:
    ``Federation(method={"name": "fedasmu", "epsilon": 0.2}, fleet={"ratio": 20}, training={"lr": 0.1})``.
    """

    def __init__(
        self,
        model: Factory | nn.Module | str | Mapping[str, Any] | None = None,
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
        task: Task | str | None = None,
        shards: Any = None,
        groups: Any = None,
        test_shards: Any = None,
    ) -> None:
        tables = {
            "method": _named(method),
            "training": dict(training or {}),
            "fleet": {} if fleet is None or isinstance(fleet, Fleet) else dict(fleet),
            "data": _named(data),
            "model": _named(model) if isinstance(model, str | Mapping) else {},
            "run": dict(run or {}),
        }
        given = Given(
            dataset=own_data(CUSTOM, train, test, groups, resolve({"data": tables["data"]}).data),
            factory=None if model is None or isinstance(model, str | Mapping) else as_factory(model),
            fleet=fleet if isinstance(fleet, Fleet) else None,
            shards=shards,
            test_shards=test_shards,
            task=task if isinstance(task, Task) else None,
            schedule=tables["training"].get("schedule") if callable(tables["training"].get("schedule")) else None,
            selection=tables["run"].get("selection") if callable(tables["run"].get("selection")) else None,
        )
        for section, follows in given.defaults().items():
            tables[section] = follows | tables[section]
        for section, stands_for in given.tables().items():
            tables[section] |= stands_for
        if isinstance(task, str):
            tables["training"]["task"] = task
        if devices is not None:
            tables["fleet"]["devices"] = devices
        if seed is not None:
            tables["run"]["seed"] = seed
        self.config = resolve(tables)
        self.parts = assemble(self.config, given)

    @classmethod
    def from_config(cls, config: Config) -> "Federation":
        """A federation of built-in parts, as the command line makes it."""
        sections: dict[str, Any] = config.tables()
        return cls(**sections)

    @property
    def dataset(self) -> DataSet:
        return self.parts.dataset

    @property
    def factory(self) -> Factory:
        return self.parts.factory

    @property
    def fleet(self) -> Fleet:
        return self.parts.fleet

    @property
    def shards(self) -> list[NDArray[np.int64]]:
        """For each device, which samples of the training set it holds."""
        return self.parts.shards

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
        config = self.parts.settled(config)
        directory = Path(out) if out else default_directory(config.method_name, config.run.seed)
        RunWriter.check(directory)

        def open_log() -> RunWriter:
            writer = RunWriter.create(directory, config.tables(), observers, self.dataset.part())
            write_world(directory, self.parts.surroundings(config))
            writer.settings = config.sha256()
            return writer

        return self._drive(config, open_log, None, pool)

    def resume(
        self, directory: str | Path, *, observers: Sequence[Observer] = (), pool: Pool[Any] | None = None
    ) -> Result:
        """Go on with a run that was interrupted or killed, from its last checkpoint: the same result, bit for bit."""
        Run(directory)
        with RunLock(Path(directory)) as lock:
            return self._resume(directory, lock, observers, pool)

    def _resume(
        self, directory: str | Path, lock: RunLock, observers: Sequence[Observer], pool: Pool[Any] | None
    ) -> Result:
        """Go on in a directory that nobody else writes to."""
        run = Run(directory)
        config = resolve(run.trusted(self.config.method_name))
        mine = self.parts.settled(
            replace(self.config, run=self.config.run.model_copy(update={"until": config.run.until}))
        )
        if config.essence() != mine.essence():
            raise RunError(f"{directory} was made with another configuration; build the same federation to resume it")
        run.check_resumable()
        found = checkpoint.read(Path(directory))
        try:
            check(found.tree, self.parts.layout.size)
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{directory} has a checkpoint of another model or version ({error})") from None
        if found.tree["log"].get("settings", "") not in ("", config.sha256()):
            raise RunError(
                f"{directory}/config.toml was changed after the run began; put back what it said, or run anew"
            )

        def open_log() -> RunWriter:
            writer = RunWriter(Path(directory), observers, resume=found.tree["log"], lock=lock)
            writer.settings = config.sha256()
            found.remove_useless()
            for message in [*found.problems, *writer.cuts]:
                writer.say(message)
            return writer

        return self._drive(config, open_log, found.tree, pool)

    def _drive(
        self, config: Config, open_log: Callable[[], RunWriter], tree: Tree | None, pool: Pool[Any] | None
    ) -> Result:
        """Run, from the start or from a checkpoint."""
        run = config.run
        plan = Plan(
            config.method_name,
            run.seed,
            run.target,
            run.end,
            run.checkpoint_every,
            run.checkpoint_minutes,
            stop_diverged=run.diverged == "stop",
            data=self.dataset.facts(),
            metric=self.parts.metric,
            frozen=self.parts.frozen(config),
        )
        return Result(*drive(plan, self._ready(config, open_log, pool), tree), self.parts.rebuilt(config))

    @contextmanager
    def _ready(self, config: Config, open_log: Callable[[], RunWriter], pool: Pool[Any] | None) -> Iterator[Ready]:
        """Put server, fleet, executor and log together, for a run in virtual time."""
        server = self.parts.server(config)
        setup, uploads = self.parts.setup(config), server.world.uploads
        with closing(open_executor(config.run, setup, pool, uploads)) as executor:
            writer = open_log()
            load_kernels(writer.say)  # while the workers start, and before several of them compile the same
            coordinator = Coordinator(server, config.trigger(), config.run.rounds, endless=config.run.end == math.inf)
            simulation = Simulation(
                coordinator,
                self.fleet,
                executor,
                writer,
                eval_every=config.run.eval_every,
                stop_diverged=config.run.diverged == "stop",
                device_memory=config.run.device_memory_mb * 2**20,
            )
            yield Ready(simulation, server, writer)


def _named(section: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """A section that may be given by its name alone."""
    return {"name": section} if isinstance(section, str) else dict(section or {})
