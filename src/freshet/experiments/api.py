"""Compare and tune methods on your own federation: ``freshet.compare`` and ``freshet.tune``.

Both work like the commands of the same names, over a function that builds federations: the same folder, shared workers,
and a second call continues where the first one stopped."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freshet.config import Config
from freshet.display import number, table_html, whole_table
from freshet.errors import ConfigError, RunError
from freshet.experiments import results
from freshet.experiments.compare import GridObserver, run_grid, to_do
from freshet.experiments.grid import (
    Choice,
    Entry,
    Job,
    Methods,
    Recipe,
    Scenario,
    as_entries,
    check_fair,
    choice_name,
    choices,
    run_key,
)
from freshet.experiments.results import Grid, reference_indices, summarise
from freshet.experiments.store import Store
from freshet.experiments.tune import FIRST_SEED, Budget, Tuner, load_optuna
from freshet.federation import Federation
from freshet.result import Result
from freshet.result import load as open_run

if TYPE_CHECKING:
    import pandas as pd


_log = logging.getLogger(__name__)
#: ``make(method, seed)``; pass the method to ``Federation(method=...)``: a name, or a dict of a name and options.
Make = Callable[[Any, int], Federation]


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of ``compare``; ``freshet report`` reads the same folder."""

    folder: Path
    #: The content of comparison.json.
    document: Mapping[str, Any]
    #: False after Ctrl-C; the same call continues.
    complete: bool
    _jobs: Sequence[Job]

    def __repr__(self) -> str:
        count = len(self.lines)
        said = f"best {self.best}" if self.complete else "not complete: the same call continues"
        return f"Comparison({count} {'method' if count == 1 else 'methods'}, {said}, in {self.folder})"

    def _repr_html_(self) -> str:
        several = len(self.document["worlds"]) > 1
        rows = [
            [_line_name(line["name"], world["name"]) if several else line["name"], *_line_facts(line)]
            for world in self.document["worlds"]
            for line in world["lines"]
        ]
        metric = self.document["worlds"][0]["metric"]
        return table_html(repr(self), ["method", "runs", f"final {metric}", "range", "time to target (s)"], rows)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """One record per method, in the given order; with a grid, for each of its combinations."""
        return [line for world in self.document["worlds"] for line in world["lines"]]

    @property
    def table(self) -> "pd.DataFrame":
        """One row per method: medians and spreads over the seeds, as in comparison.csv.

        With a grid, the index is the combination (``world``) and the method.
        """
        table = whole_table(results.rows(self.document))
        return whole_table(table.set_index(["world", "method"] if len(self.document["worlds"]) > 1 else "method"))

    @property
    def best(self) -> str | None:
        """The method with the best final median, the first of a tie; None while runs are missing.

        With a grid it is followed by its combination: ``fedavg (training.lr=0.1)``.
        """
        if not self.complete:
            return None
        worlds = self.document["worlds"]
        sign = -1.0 if worlds[0]["direction"] == "min" else 1.0
        ended = [
            (sign * line["accuracy"]["median"], _line_name(line["name"], world["name"]))
            for world in worlds
            for line in world["lines"]
            if line["accuracy"]["median"] is not None
        ]
        return max(ended, key=lambda pair: pair[0])[1] if ended else None

    @property
    def failures(self) -> dict[str, str]:
        """Errors of crashed runs by key; ``compare(..., retry=True)`` tries them again."""
        return {run["key"]: run["error"] for line in self.lines for run in line["runs"] if run["error"]}

    @property
    def runs(self) -> dict[str, list[Result]]:
        """The runs that have ended, by method (and combination), in the order of seeds."""
        store, found = Store(self.folder), dict[str, list[Result]]()
        for job in self._jobs:
            runs = found.setdefault(_line_name(job.entry.label, job.scenario.name), [])
            if store.state(job.key) == "finished":
                assert job.recipe is not None
                factory = job.recipe.build(job.config).factory
                runs.append(open_run(store.directory(job.key), factory))
        return found


def _line_facts(line: Mapping[str, Any]) -> list[str]:
    """Runs, median and range of the final metric, and median time to the target."""
    final, time = line["accuracy"], line["time_raw"]["median"]
    spread = "–" if final["low"] is None else f"{number(final['low'])} to {number(final['high'])}"
    return [f"{line['finished']}/{line['all']}", number(final["median"]), spread, "–" if time is None else f"{time:g}"]


@dataclass(frozen=True, repr=False)
class Tuning:
    """The result of ``tune``: the content of tuning.json."""

    folder: Path
    record: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"Tuning({self.record['method']}: score {self.score:.3f}, best {self.best}, in {self.folder})"

    @property
    def best(self) -> dict[str, Any]:
        """The best values by ``section.key``, for ``make(method, seed).with_settings(tuning.best)``."""
        return dict(self.record["values"])

    @property
    def score(self) -> float:
        """Their score on the held-out samples: the metric, negated where less is better."""
        return float(self.record["score"])

    @property
    def table(self) -> "pd.DataFrame":
        """One row per trial: its state, score and values."""
        return whole_table([{"state": t["state"], "score": t["value"], **t["values"]} for t in self.record["trials"]])


def compare(
    make: Make,
    methods: Methods,
    *,
    seeds: int | Sequence[int] = 3,
    grid: Mapping[str, Sequence[Any]] | None = None,
    out: str | Path = "runs/compare",
    reference: str = "",
    retry: bool = False,
    watch: GridObserver | None = None,
) -> Comparison:
    """Run several methods on your own federation and compare them, as ``freshet compare`` does.

    ``make(method, seed)`` builds a federation; every run calls it, so that only one is in memory. A finished run is not
    repeated while settings, data, shards, model and fleet stay the same.

    ``grid={"fleet.ratio": [1, 20], "training.lr": [0.01, 0.1]}`` compares the methods under every combination of these
    settings.
    """
    entries = as_entries(methods)
    reference_indices(entries, reference)
    jobs = [
        _job(make, entry, seed, choice) for choice in choices(grid or {}) for seed in _seeds(seeds) for entry in entries
    ]
    check_fair(jobs)
    made = Grid(jobs, Store(out), "comparison", [], "comparison", reference=reference)
    done = run_grid(jobs, made.store, watch=watch, retry=retry)
    if not done:
        left = f"{len(to_do(jobs, made.store))} of {len(jobs)}"
        _log.warning("the comparison in %s was interrupted; to do: %s; make the same call again to continue", out, left)
    found, _ = summarise(made)
    return Comparison(made.store.folder, found, done, jobs)


def tune(
    make: Make,
    method: str | type | Mapping[str, Any],
    *,
    trials: int = 20,
    seeds: int = 2,
    out: str | Path | None = None,
    seed: int = 0,
    watch: GridObserver | None = None,
) -> Tuning:
    """Tune a method's options and learning rate on a held-out fifth of your training set, as ``freshet tune`` does.

    The settings come from ``make(method, 1000)``; data, shards, model and fleet from each seed, starting at 1000.
    """
    load_optuna()
    (entry,) = as_entries([method])
    folder = Path(out) if out is not None else Path("runs/tune") / entry.method.replace(":", ".")
    tables = _federation(make, entry, FIRST_SEED).config.tables()

    def recipe(number: int) -> Recipe:
        first = _federation(make, entry, number)
        hashes = first.fingerprint

        def build(config: Config) -> Federation:
            again = _federation(make, entry, number)
            if again.fingerprint != hashes:
                raise _not_repeatable(entry, number)
            return again.with_config(config)

        return Recipe(build, hashes, 4 * first.assembly.layout.size)

    if not Tuner(entry.method, tables, folder, Budget(trials, seeds), seed, recipe).run(watch):
        raise RunError(f"the tuning in {folder} was interrupted; make the same call again to continue")
    return Tuning(folder, json.loads((folder / "tuning.json").read_text(encoding="utf-8")))


def _line_name(method: str, world: str) -> str:
    return f"{method} ({world})" if world else method


def _job(make: Make, entry: Entry, seed: int, choice: Choice) -> Job:
    """One run of a comparison: its federation is built now for its hashes, and again when it runs."""

    def make_choice() -> Federation:
        made = _federation(make, entry, seed)
        return made.with_settings(choice) if choice else made

    first = make_choice()
    key = run_key(first.config, first.fingerprint)

    def build(config: Config) -> Federation:
        again = make_choice()
        if run_key(again.config, again.fingerprint) != key:
            raise _not_repeatable(entry, seed)
        return again.with_config(config)

    keep = first.config.run.keep_checkpoint and "keep_checkpoint" in first.config.run.model_fields_set
    config = replace(first.config, run=first.config.run.model_copy(update={"keep_checkpoint": keep}))
    scenario = Scenario(choice_name(choice))
    return Job(scenario, entry, seed, config, Recipe(build, first.fingerprint, 4 * first.assembly.layout.size))


def _federation(make: Make, entry: Entry, seed: int) -> Federation:
    """Call ``make`` and check that it returns what was asked for."""
    if not callable(make):
        raise ConfigError("make", f"must be a function of (method, seed), but {make!r:.60} was given")
    federation = make({"name": entry.method, **entry.options} if entry.options else entry.method, seed)
    if not isinstance(federation, Federation):
        raise ConfigError("make", f"must return a Federation, but {type(federation).__name__} was returned")
    config = federation.config
    if config.run.seed != seed:
        raise ConfigError("make", f"was asked for seed {seed} and gave {config.run.seed}; write Federation(seed=seed)")
    given = config.tables()["method"]
    if config.method_name != entry.method or any(given.get(key) != value for key, value in entry.options.items()):
        raise ConfigError("make", f"was asked for {entry.label} and gave {given}; write Federation(method=method)")
    return federation


def _not_repeatable(entry: Entry, seed: int) -> RunError:
    return RunError(
        f"make({entry.label!r}, {seed}) gives another federation each time; make it depend on its arguments only"
    )


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    found = list(range(seeds)) if isinstance(seeds, int) else [int(each) for each in seeds]
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise ConfigError("seeds", f"must be a number of seeds, or different ones as in [4, 7]; {seeds!r} was given")
    return found
