"""The benchmark: fixed worlds, equal budgets, and kept results beside which a new method is placed.

A world is a TOML file of the package: settings that all methods share, and what each budget changes in them. Its
``version`` stands for all of them: a world never changes within a version. A run counts in a world if its settings are
those of the world in everything but method, learning rate, trigger and seed.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from freshet.config import resolve, with_added_settings
from freshet.data.catalogue import CATALOGUE
from freshet.data.sources import locate
from freshet.errors import ConfigError
from freshet.experiments.compare import to_do
from freshet.experiments.grid import (
    Entry,
    Job,
    Scenario,
    Tables,
    UserSettings,
    expand,
    seconds_left,
    shared_settings,
    tables_for,
)
from freshet.experiments.store import Store, archive_runs, archived_runs, finished_runs
from freshet.experiments.tune import LR, Budget, Tuner, read_tuned
from freshet.files import read_regular, write_atomically
from freshet.methods import class_and_preset, registry
from freshet.runs.kept_runs import open_run
from freshet.runs.reader import RunDirectory

VERSION = "bench-1"
BudgetName = Literal["quick", "standard", "full"]
#: The order of the worlds in tables.
WORLDS = ("image", "harder-image", "text", "phones", "crowd")
#: Variants that are methods of their own papers, or ours. Ablations and presets of one idea are left out.
VARIANTS = (
    *("aced", "adamasfl", "fedadam", "fedyogi", "fedavgm", "fedstale", "fedvarp"),
    *("fedasmu-course", "fedasmu-fresh", "fedssmu-course", "fedssmu-fresh"),
)
#: Methods that judge devices by models of their own. They change the network, or have no single model to test.
PERSONAL = ("ditto", "fedrep")
#: Methods that only stand for their variants here.
FAMILIES = ("fedopt",)
#: Learning rates that are tried first, the same for every method, as factors on that of the world.
RATE_FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)


class BenchBudget(NamedTuple):
    """What every method gets: seeds of the comparison, trials of tuning, and the share of a run that a trial takes."""

    seeds: int
    trials: int
    trial_share: float = 1 / 3


BUDGETS: dict[str, BenchBudget] = {
    "quick": BenchBudget(1, 0),
    "standard": BenchBudget(3, 12),
    "full": BenchBudget(5, 24),
}


# ---- worlds


@dataclass(frozen=True)
class BenchWorld:
    """One world of the benchmark."""

    name: str
    title: str
    about: str
    #: The data set of ``standard`` and ``full``; ``quick`` has the built-in digits.
    data: str
    settings: Tables = field(hash=False)
    budgets: Mapping[str, Mapping[str, Any]] = field(hash=False)

    def tables(self, budget: str) -> dict[str, dict[str, Any]]:
        """The settings that all methods share under a budget."""
        changes = {key: value for key, value in self.budgets[budget].items() if isinstance(value, dict)}
        found = {section: dict(table) for section, table in self.settings.items()}
        for section, table in changes.items():
            found[section] = found.get(section, {}) | table
        found["run"] = found.get("run", {}) | {"target": self.targets(budget)[0]}
        return found

    def targets(self, budget: str) -> tuple[float, float]:
        """The two accuracies to which time and bytes are counted."""
        first, second = self.budgets[budget]["targets"]
        return float(first), float(second)

    def seconds(self, budget: str) -> float | None:
        """About how many seconds of a busy core a run took when the world was made; None if nobody measured it."""
        found = self.budgets[budget].get("seconds")
        return None if found is None else float(found)

    def scenario(self, budget: str) -> Scenario:
        """The world for a grid."""
        tables = self.tables(budget)
        return Scenario(self.name, lambda method: tables)

    def identity(self, budget: str) -> dict[str, dict[str, Any]]:
        """What a run must have in common with the others here: all that decides its bits but method, rate and seed."""
        return _identity(self, budget)


@cache
def _identity(world: BenchWorld, budget: str) -> dict[str, dict[str, Any]]:
    entry = Entry("fedavg", "fedavg")
    shared = shared_settings(resolve(tables_for(entry, world.scenario(budget), UserSettings())))
    del shared["run"]["seed"]
    return shared


@cache
def worlds() -> dict[str, BenchWorld]:
    """The worlds of this version by name."""
    folder = files("freshet.experiments") / VERSION.replace("-", "_")
    found = {}
    for name in WORLDS:
        table = tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
        budgets = {budget: table[budget] for budget in BUDGETS}
        found[name] = BenchWorld(name, table["title"], table["about"], table["data"], table["settings"], budgets)
    return found


def choose_worlds(text: str | None) -> list[BenchWorld]:
    """The worlds with commas between; all of them without a text."""
    names = list(WORLDS) if text is None else [part.strip() for part in text.split(",") if part.strip()]
    unknown = next((name for name in names if name not in WORLDS), None)
    if unknown is not None or not names:
        raise ConfigError("--worlds", f"{unknown or text!r} is not known; choose from {', '.join(WORLDS)}")
    return [worlds()[name] for name in dict.fromkeys(names)]


def all_methods() -> list[str]:
    """Every built-in method that trains one model for all, and the variants that count as methods."""
    names = [name for name in registry() if name not in (*PERSONAL, *FAMILIES)]
    return [*names, *VARIANTS]


def check_data(chosen: Sequence[BenchWorld], budget: str) -> None:
    """Raise if this machine lacks the data of a world, before anything runs."""
    for world in chosen:
        name = world.tables(budget)["data"]["name"]
        if CATALOGUE[name].formats[0].needs and locate(name) is None:
            others = ", ".join(each.name for each in chosen if each is not world) or "none"
            problem = f"{world.name} needs {name}, which this machine lacks; get it with: freshet data get {name}"
            raise ConfigError("--worlds", f"{problem}, or run the others ({others}) or --budget quick")


def find_world(config: Tables) -> tuple[BenchWorld, str] | None:
    """The world and the budget that a run's settings belong to, or None. Nothing that they name is imported."""
    for world in worlds().values():
        for budget in BUDGETS:
            if not differences(config, world, budget):
                return world, budget
    return None


def differences(config: Tables, world: BenchWorld, budget: str) -> list[str]:
    """``section.key`` of the settings in which a run is not one of this world."""
    given = with_added_settings(config)
    return [
        f"{section}.{key}"
        for section, table in world.identity(budget).items()
        for key, value in table.items()
        if given.get(section, {}).get(key) != value
    ]


# ---- jobs


def tuning_tables(method: str, world: BenchWorld, budget: str, settings: Sequence[str] = ()) -> dict[str, Any]:
    """The settings of a method's trials: those of the world, for a part of its length."""
    tables = tables_for(Entry(method, method), world.scenario(budget), UserSettings(settings=settings))
    run = tables["run"]
    tests = max(1, round(BUDGETS[budget].trial_share * run["until"] / run["eval_every"]))
    tables["run"] = run | {"until": tests * run["eval_every"], "evaluate_devices": "never"}
    return tables


def tuner_for(method: str, world: BenchWorld, budget: str, folder: Path, settings: Sequence[str] = ()) -> Tuner:
    """The study of a method in a world: first the rates that all methods try, then the method's own options."""
    tables = tuning_tables(method, world, budget, settings)
    rates = list(dict.fromkeys(LR.clip(factor * tables["training"]["lr"]) for factor in RATE_FACTORS))
    place = study_folder(folder, world, method)
    return Tuner(method, tables, place, Budget(BUDGETS[budget].trials, 1), rates=rates)


def study_folder(folder: Path, world: BenchWorld, method: str) -> Path:
    """Where a study lies in the folder of a benchmark."""
    return folder / "tune" / world.name / method.rpartition("/")[2].replace(":", ".")


def tuned_tables(entries: Sequence[Entry], world: BenchWorld, folder: Path) -> list[Tables]:
    """The results of the studies of a world that are done."""
    methods = [entry.method for entry in entries]
    places = [study_folder(folder, world, method) for method in methods]
    return [read_tuned(place, methods) for place in places if (place / "best.toml").is_file()]


def bench_jobs(
    entries: Sequence[Entry],
    chosen: Sequence[BenchWorld],
    budget: str,
    folder: Path,
    seeds: Sequence[int],
    settings: Sequence[str] = (),
) -> list[Job]:
    """Every run of a benchmark, with the settings that tuning has found so far."""
    return [
        job
        for world in chosen
        for job in expand(
            entries,
            seeds,
            UserSettings(tuned=tuned_tables(entries, world, folder), settings=settings),
            [world.scenario(budget)],
        )
    ]


# ---- running


@dataclass(frozen=True)
class Plan:
    """What a call of the benchmark is about to do."""

    entries: Sequence[Entry]
    worlds: Sequence[BenchWorld]
    budget: str
    store: Store
    seeds: Sequence[int]
    settings: Sequence[str] = ()
    #: Kept runs that need not be made again: (world, method, seed).
    present: frozenset[tuple[str, str, int]] = frozenset()

    def jobs(self) -> list[Job]:
        """All runs of the plan that are not kept."""
        found = bench_jobs(self.entries, self.worlds, self.budget, self.store.folder, self.seeds, self.settings)
        return [job for job in found if (job.scenario.name, job.entry.label, job.seed) not in self.present]

    def studies(self) -> list[tuple[Entry, BenchWorld]]:
        """The studies that are not done, of methods with runs that are not kept."""
        if not BUDGETS[self.budget].trials:
            return []
        pairs = [(entry, world) for world in self.worlds for entry in self.entries]
        return [(entry, world) for entry, world in pairs if self._needs_study(entry, world)]

    def _needs_study(self, entry: Entry, world: BenchWorld) -> bool:
        missing = any((world.name, entry.label, seed) not in self.present for seed in self.seeds)
        return missing and not (study_folder(self.store.folder, world, entry.method) / "best.toml").is_file()


#: Called with a study that begins; runs it and returns False at Ctrl-C.
RunStudy = Callable[[Entry, BenchWorld, Tuner], bool]


def run_studies(plan: Plan, run_study: RunStudy) -> bool:
    """Tune what is not tuned; return False at Ctrl-C."""
    return all(
        run_study(entry, world, tuner_for(entry.method, world, plan.budget, plan.store.folder, plan.settings))
        for entry, world in plan.studies()
    )


def expected_seconds(plan: Plan, kept: "Sequence[BenchRun]" = (), *, retry: bool = False) -> float | None:
    """Seconds of one core for what is left: paces of kept and finished runs, else those measured for the world."""
    left: float = 0.0
    jobs, studies = plan.jobs(), plan.studies()
    runs = [*kept, *runs_in_store(plan)]
    for world in plan.worlds:
        done = [(run.method, run.until, run.wall) for run in runs if run.world == world.name and run.wall is not None]
        measured, until = world.seconds(plan.budget), world.tables(plan.budget)["run"]["until"]
        if not done and measured is not None:
            done = [("", float(until), measured)]
        budget = BUDGETS[plan.budget]
        waiting = [job for job in to_do(jobs, plan.store, retry=retry) if job.scenario.name == world.name]
        todo = [(job.entry.label, job.config.run.until) for job in waiting]
        todo += [(e.label, budget.trials * budget.trial_share * until) for e, w in studies if w == world]
        found = seconds_left(done, todo) if todo else 0.0
        if found is None:
            return None
        left += found
    return left


# ---- runs that count


@dataclass(frozen=True)
class BenchRun:
    """One finished run of the benchmark, from a folder of runs or from the kept ones."""

    world: str
    budget: str
    method: str
    seed: int
    kind: str
    marks: Mapping[str, str] = field(hash=False)
    until: float
    rows: Sequence[Mapping[str, Any]] = field(hash=False)
    summary: Mapping[str, Any] = field(hash=False)
    source: Literal["kept", "run"]
    path: Path

    @property
    def wall(self) -> float | None:
        """Seconds that it took."""
        found = self.summary.get("wall_seconds")
        return float(found) if isinstance(found, int | float) else None


def bench_run(
    run: RunDirectory, world: BenchWorld, budget: str, label: str, source: Literal["kept", "run"]
) -> BenchRun:
    """A run of a world; the method's kind and marks come from the code if it is built in or was named by the user."""
    config, summary = run.config(), run.summary()
    method = class_and_preset(label.partition("@")[0])[0]
    seed, until = int(config["run"]["seed"]), float(config["run"]["until"])
    return BenchRun(
        world.name,
        budget,
        label,
        seed,
        method.about.kind,
        method.marks(),
        until,
        run.metrics(),
        summary,
        source,
        run.directory,
    )


def runs_in_store(plan: Plan) -> list[BenchRun]:
    """The finished runs of a plan."""
    by_name = {world.name: world for world in plan.worlds}
    finished = [job for job in plan.jobs() if plan.store.state(job.key) == "finished"]
    return [
        bench_run(
            RunDirectory(plan.store.directory(job.key)), by_name[job.scenario.name], plan.budget, job.entry.label, "run"
        )
        for job in finished
    ]


def crashes(plan: Plan) -> dict[tuple[str, str], str]:
    """Why runs of a plan crashed, by world and method; the first error of each."""
    found: dict[tuple[str, str], str] = {}
    for job in plan.jobs():
        error = plan.store.error(job.key) if plan.store.state(job.key) == "failed" else None
        if error is not None:
            found.setdefault((job.scenario.name, job.entry.label), f"seed {job.seed} crashed: {error}")
    return found


def kept_folder(kept: Path, budget: str, world: BenchWorld) -> Path:
    """Where the kept runs of a world lie."""
    return kept / budget / world.name


def read_kept(kept: Path, chosen: Sequence[BenchWorld], budget: str) -> tuple[list[BenchRun], list[str]]:
    """The kept runs of these worlds, and notes on those that do not count: of another world, or of no built-in method.

    Each line is checked by its hash when it is read, and each run by the settings of its world.
    """
    found: list[BenchRun] = []
    notes: list[str] = []
    for world in chosen:
        for path in archived_runs(kept_folder(kept, budget, world)):
            run = open_run(path)
            name, other = run.method(), differences(run.config(), world, budget)
            if other:
                notes.append(f"{path} is not a run of {VERSION} ({', '.join(other[:3])} differ) and does not count")
            elif name not in _builtin_names():
                notes.append(f"{path} is of {name[:60]}, which is not built in, and does not count")
            else:
                found.append(bench_run(run, world, budget, name, "kept"))
    return found, notes


@cache
def _builtin_names() -> frozenset[str]:
    return frozenset(name for method in registry().values() for name in method.about.names)


def keep_bench(folder: Path, kept: Path) -> dict[str, int]:
    """Keep the finished runs of a benchmark's folder, each in its world; return how many by budget and world.

    Only built-in methods are kept, with the options that they come with or that the folder's own studies found.
    """
    places: dict[tuple[BenchWorld, str], list[Path]] = {}
    for path in finished_runs(folder):
        run = RunDirectory(path)
        belongs = find_world(run.config())
        if belongs is not None and run.method() in _builtin_names():
            places.setdefault(belongs, []).append(path)
    counts = {}
    for (world, budget), runs in places.items():
        expected = _expected_keys(runs, world, budget, folder)
        counted = [path for path in runs if path.name in expected]
        place = kept_folder(kept, budget, world)
        archive_runs(counted, place, Path())
        _keep_studies(folder / "tune" / world.name, place / "tune")
        counts[f"{budget}/{world.name}"] = len(counted)
    return counts


def _expected_keys(runs: Sequence[Path], world: BenchWorld, budget: str, folder: Path) -> set[str]:
    """The keys of runs as this folder's benchmark makes them."""
    names = sorted({RunDirectory(path).method() for path in runs})
    seeds = sorted({int(RunDirectory(path).config()["run"]["seed"]) for path in runs})
    return {job.key for job in bench_jobs([Entry(n, n) for n in names], [world], budget, folder, seeds)}


def _keep_studies(studies: Path, kept: Path) -> None:
    """Copy what the studies found, without their journals and runs."""
    for study in sorted(studies.glob("*/best.toml")):
        place = kept / study.parent.name
        place.mkdir(parents=True, exist_ok=True)
        for name in ("best.toml", "tuning.json"):
            write_atomically(place / name, read_regular(study.parent / name))
