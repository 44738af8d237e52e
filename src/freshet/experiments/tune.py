"""Tuning a method with Optuna on a held-out part of the training set; the test set is never scored.

Every method gets the same budget of trials and seeds; the first trial is the defaults. A hopeless trial is pruned and
counts. Optuna's journal lies beside the runs, so that the same command continues after an interruption.

``read_tuned`` reads the folder of a study. The folder is not trusted: no code that it names is imported.
"""

import hashlib
import importlib
import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import tomli_w

from freshet.config import Config, load_tables, resolve
from freshet.core.about import Range
from freshet.errors import ConfigError, RunError
from freshet.experiments.compare import GridObserver, Workers, execute
from freshet.experiments.grid import Entry, Job, Recipe, Scenario, Tables, run_key, tuned_as
from freshet.experiments.store import State, Store
from freshet.files import open_own, reason, write_atomically
from freshet.methods import builtin_about, class_and_preset
from freshet.report.statistics import WINDOW
from freshet.runs.lifecycle import interrupt_listener
from freshet.runs.reader import RunDirectory
from freshet.runs.records import ACCURACY, Metric, integer, metric_of, number

#: Trials, seeds, and seconds of each run.
TuningBudget = tuple[int, int, float]


def read_tuned(folder: Path, methods: Collection[str]) -> Tables:
    """The settings in best.toml; its method must be built in or named by the user."""
    if not (folder / "best.toml").is_file():
        raise ConfigError("--tuned", f"{folder} has no best.toml; give a folder made by `freshet tune`")
    tables = load_tables(folder / "best.toml")
    name, rate = tables.get("method", {}).get("name"), tables.get("training", {}).get("lr")
    if not isinstance(name, str) or number(rate) is None:
        raise ConfigError("--tuned", f"{folder}/best.toml does not name a method and its learning rate")
    if builtin_about(name) is None and name not in methods:
        problem = "which is neither built in nor compared here, and is not imported from there"
        raise ConfigError("--tuned", f"{folder} is for {name:.80}, {problem}")
    if (studied := _budget(folder)[0]) != name:
        problem = f"best.toml is for {name:.80} and tuning.json for {studied:.80}"
        raise ConfigError("--tuned", f"{folder} is mixed: {problem}; give a folder as `freshet tune` left it")
    return tables


def tuning_notes(folders: Sequence[Path], methods: Sequence[str]) -> list[str]:
    """The budget of each tuned method, and a warning if budgets differ or a method was not tuned."""
    budgets: dict[str, TuningBudget] = {}
    for name, budget in map(_budget, folders):
        if name in budgets:
            raise ConfigError("--tuned", f"two folders are for {name:.80}; give one of them")
        budgets[name] = budget
    if not budgets:
        return []
    source = {method: tuned_as(method, budgets) for method in methods}
    used = {name: budget for name, budget in budgets.items() if name in source.values()}
    said = [f"{name} {trials} trials x {seeds} seeds of {s:g} s" for name, (trials, seeds, s) in used.items()]
    said += [f"{method} as {name}" for method, name in source.items() if name not in (method, None)]
    untuned = [method for method, name in source.items() if name is None]
    warnings = ["UNEQUAL BUDGETS"] if len(set(used.values())) > 1 else []
    warnings += [f"NOT TUNED: {', '.join(untuned)}"] if untuned else []
    return ["; ".join([f"tuned: {', '.join(said) or 'none of these methods'}", *warnings])]


def _budget(folder: Path) -> tuple[str, TuningBudget]:
    """The method of a study, with its trials, seeds, and seconds of each run."""
    try:
        record = json.loads((folder / "tuning.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--tuned", f"{folder}/tuning.json cannot be read ({reason(error)})") from None
    except (ValueError, RecursionError):
        record = None
    name, budget = (record.get(key) for key in ("method", "budget")) if isinstance(record, dict) else (None, None)
    found: Mapping[str, Any] = budget if isinstance(budget, dict) else {}
    trials, seeds, until = integer(found.get("trials")), integer(found.get("seeds")), number(found.get("until"))
    if not isinstance(name, str) or trials is None or seeds is None or until is None:
        raise ConfigError("--tuned", f"{folder} has no tuning.json made by `freshet tune`")
    return name, (trials, seeds, until)


#: Share of the training set held out for scoring.
VALIDATION = 0.2
#: First seed of tuning, so that no method is tuned on the partitions that it is compared on.
FIRST_SEED = 1000
#: Range of the learning rate, which is tuned for every method.
LR = Range(1e-3, 0.5, log=True)
#: Score of a diverged run if the metric has no known worst value.
WORST = -1e9
#: Optuna's journal of a study.
JOURNAL = "study.journal"
Values = dict[str, Any]


@dataclass(frozen=True)
class Budget:
    """The budget of every method."""

    trials: int = 20
    seeds: int = 2


class Pruned(Exception):
    """Raised inside a run to end it: its trial is pruned."""


class Interrupted(Exception):
    """The user pressed Ctrl-C."""


def load_optuna() -> Any:
    """Import Optuna; raise with the command that installs it."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise RunError("freshet tune needs Optuna; install it with: pip install 'freshet-fl[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


# ---- configurations and scores


def space_for(method: str, in_flight: int | None = None) -> dict[str, Range]:
    """The ranges to search, by ``section.key``: the learning rate, and the method's ``about.space``.

    ``in_flight`` limits the number of uploads to wait for.
    """
    about = class_and_preset(method)[0].about
    declared = {**about.space, **about.spaces.get(method, {})}
    space = {"training.lr": LR} | {f"method.{key}": each for key, each in declared.items() if each is not None}
    return space if in_flight is None else {key: each.within(in_flight) for key, each in space.items()}


def with_values(tables: Tables, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Set ``section.key`` values in a copy of the tables."""
    changed = {section: dict(table) for section, table in tables.items()}
    for name, value in values.items():
        section, _, key = name.partition(".")
        changed.setdefault(section, {})[key] = value
    return changed


def trial_config(tables: Tables, values: Mapping[str, Any], seed: int) -> Config:
    """The configuration of one run of a trial, always scored on held-out training data."""
    whole = {"run.stop_at_target": False, "run.keep_checkpoint": False}
    return resolve(with_values(tables, {**values, **whole, "data.validation": VALIDATION, "run.seed": seed}))


def best_config(tables: Tables, values: Mapping[str, Any]) -> Config:
    """The configuration to use afterwards: the best values, all training data, the real test set."""
    return resolve(with_values(tables, {**values, "data.validation": 0.0}))


def defaults(tables: Tables, space: Mapping[str, Range]) -> Values:
    """The method's default values: the first trial."""
    resolved = resolve(tables).tables()
    given = {name: resolved[name.partition(".")[0]][name.partition(".")[2]] for name in space}
    return {name: each.clip(given[name]) for name, each in space.items()}


def score(rows: Sequence[Mapping[str, Any]]) -> float:
    """Mean worth of the last tests of a run on the held-out samples."""
    return fmean([worth(row) for row in rows[-WINDOW:]]) if rows else 0.0


def worth(row: Mapping[str, Any]) -> float:
    """The worth of a test: its metric, negated where less is better; a diverged test is worth nothing."""
    metric = metric_of(row)
    value = metric.of(row)
    if value is None:
        return 0.0 if metric == ACCURACY else WORST
    return -value if metric.direction == "min" else value


def step_of(row: Mapping[str, Any], place: int, config: Config) -> int:
    """The index of a test in its trial, after all tests of earlier seeds."""
    per_seed = int(config.run.until / config.run.eval_every) + 2
    return place * per_seed + int(row["time"] / config.run.eval_every + 1e-9)


def fingerprint(
    tables: Tables,
    space: Mapping[str, Range],
    seeds: Sequence[int],
    recipes: Sequence[Recipe] = (),
    rates: Sequence[float] = (),
) -> str:
    """The hash of a study's settings; a study of other settings is not continued."""
    content = [run_key(trial_config(tables, {}, 0)), {name: asdict(each) for name, each in space.items()}, list(seeds)]
    content += [dict(each.hashes) for each in recipes]
    content += [list(rates)] if rates else []
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def truncate_journal(path: Path) -> None:
    """Cut off a half-written last line, which would make Optuna lose what it appends. Refuse a link or a pipe."""
    try:
        with open_own(path, create=True) as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    except OSError as error:
        raise RunError(f"{path} cannot be used ({reason(error)})") from None


# ---- pruning


class Pruner(GridObserver):
    """Reports each test to the trial and ends the run when the trial is pruned."""

    def __init__(self, trial: Any, place: int, config: Config) -> None:
        self._trial, self._place, self._config = trial, place, config
        self._seen: set[int] = set()
        self.rows: list[Mapping[str, Any]] = []
        self.over = False

    def on_metrics(self, row: Mapping[str, Any]) -> None:
        step = step_of(row, self._place, self._config)
        if self.over or step in self._seen:
            return
        self._seen.add(step)
        self._trial.report(worth(row), step)
        if self._trial.should_prune():
            self.over = True
            raise Pruned


# ---- the study


class Tuner:
    """One study: a method, its space, its budget, and its folder.

    With ``rates``, the first trials have these learning rates and otherwise the defaults, and the later ones search the
    method's own options at the best of these rates. A method without options goes on searching its rate.
    """

    def __init__(
        self,
        method: str,
        tables: Tables,
        folder: str | Path,
        budget: Budget | None = None,
        sampler_seed: int = 0,
        recipe: Callable[[int], Recipe] | None = None,
        rates: Sequence[float] = (),
    ) -> None:
        self.method, self.budget, self._sampler_seed = method, budget or Budget(), sampler_seed
        self.tables = with_values(tables, {"method.name": method})
        self.store, self.folder = Store(folder), Path(folder)
        self.space = space_for(method, trial_config(self.tables, {}, 0).run.in_flight)
        self.seeds = [FIRST_SEED + place for place in range(self.budget.seeds)]
        self._recipes = {} if recipe is None else {seed: recipe(seed) for seed in self.seeds}
        self._rates = [LR.clip(rate) for rate in rates]

    def run(self, watch: GridObserver | None = None, on_trial: Any = None) -> bool:
        """Run trials until the budget is spent; return False at Ctrl-C. ``on_trial`` gets each trial's record."""
        optuna = load_optuna()
        with self.store.lock(), closing(Workers()) as workers, interrupt_listener() as asked:
            study = self._open(optuna)
            try:
                while (number := len(self._spent_trials(optuna, study))) < self.budget.trials:
                    if asked():
                        return False
                    study.sampler = self._sampler(optuna, study, number)
                    record = self._trial(optuna, study, watch or GridObserver(), workers, asked)
                    if on_trial is not None:
                        on_trial(record, number + 1)
            except (Interrupted, KeyboardInterrupt):
                return False
            self._write(optuna, study)
        return True

    def _sampler(self, optuna: Any, study: Any, number: int) -> Any:
        """What draws the next values: all of them, or after a grid of rates all but the rate."""
        sampler = optuna.samplers.TPESampler(seed=self._sampler_seed * 100_003 + number)
        if number < len(self._rates) or not self._rates or len(self.space) == 1:
            return sampler
        complete = [t for t in study.trials if t.state == optuna.trial.TrialState.COMPLETE]
        first = [trial for trial in complete if trial.params["training.lr"] in self._rates]
        if not first:
            return sampler
        best = max(first, key=lambda trial: (trial.value, -trial.number))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.PartialFixedSampler({"training.lr": best.params["training.lr"]}, sampler)

    def _open(self, optuna: Any) -> Any:
        """Open or create the study of this folder; a trial that was cut off is queued again."""
        truncate_journal(self.folder / JOURNAL)
        journal = optuna.storages.journal.JournalFileBackend(str(self.folder / JOURNAL))
        warmup = max(1, step_of({"time": resolve(self.tables).run.until}, 0, trial_config(self.tables, {}, 0)) // 4)
        try:
            study = optuna.create_study(
                study_name=self.method,
                direction="maximize",
                storage=optuna.storages.JournalStorage(journal),
                pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=warmup),
                load_if_exists=True,
            )
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError, RecursionError) as error:
            problem = f"{type(error).__name__}: {str(error)[:160]}"
            raise RunError(
                f"{self.folder / JOURNAL} is damaged ({problem}); remove it to start again: finished runs stay"
            ) from error
        mine = fingerprint(self.tables, self.space, self.seeds, list(self._recipes.values()), self._rates)
        theirs = study.user_attrs.get("fingerprint", mine)
        if theirs != mine:
            raise RunError(f"{self.folder} holds a study of other settings; choose another --out")
        if not study.trials:
            study.set_user_attr("fingerprint", mine)
            usual = defaults(self.tables, self.space)
            for trial in [usual | {"training.lr": rate} for rate in self._rates] or [usual]:
                study.enqueue_trial(trial)
        for trial in study.trials:
            if trial.state == optuna.trial.TrialState.RUNNING:
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
                study.enqueue_trial(trial.params)
        return study

    def _spent_trials(self, optuna: Any, study: Any) -> list[Any]:
        """Trials that count against the budget: completed, pruned or crashed."""
        states = optuna.trial.TrialState
        return [t for t in study.trials if t.state in (states.COMPLETE, states.PRUNED) or "error" in t.user_attrs]

    def _trial(
        self, optuna: Any, study: Any, watch: GridObserver, workers: Workers, asked: Callable[[], bool]
    ) -> dict[str, Any]:
        trial = study.ask()
        values = {name: suggest(trial, name, each) for name, each in self.space.items()}
        states = optuna.trial.TrialState
        value, error = None, None
        try:
            scores = []
            for place in range(len(self.seeds)):
                if asked():
                    raise Interrupted
                scores.append(self._score(trial, values, place, watch, workers))
            value = fmean(scores)
            state = states.COMPLETE
        except Pruned:
            state = states.PRUNED
        except Interrupted:
            raise
        except Exception as problem:
            state, error = states.FAIL, f"{type(problem).__name__}: {problem}"
            trial.set_user_attr("error", error)
            workers.close()
        study.tell(trial, value, state=state)
        best = max((done.value for done in study.trials if done.state == states.COMPLETE), default=None)
        return {"state": state.name.lower(), "value": value, "values": values, "error": error, "best": best}

    def _score(self, trial: Any, values: Values, place: int, watch: GridObserver, workers: Workers) -> float:
        """Run one seed of a trial, or read it if it exists, and score it on the held-out samples."""
        config = trial_config(self.tables, values, self.seeds[place])
        assert config.data.validation == VALIDATION, "trials are scored on held-out training data only"
        seed = self.seeds[place]
        job = Job(Scenario(), Entry(self.method, self.method), seed, config, self._recipes.get(seed))
        pruner = Pruner(trial, place, config)
        directory, state = self.store.directory(job.key), self.store.state(job.key)
        try:
            if state is not State.FINISHED:
                watch.on_begin(job, state)
                summary = execute(job, self.store, [pruner, watch], workers.pool(job))
                if summary["status"] == "interrupted":
                    raise Interrupted
                watch.on_done(job, State.FINISHED, None)
            run = RunDirectory(directory)
            rows = run.metrics()
            for row in rows:
                pruner.on_metrics(row)
        except Pruned:
            if self.store.state(job.key) is not State.FINISHED:
                self.store.clear(job.key)
            watch.on_done(job, State.UNFINISHED, None)
            raise
        summary = run.summary()
        trial.set_user_attr("metric", list(metric_of(summary)))
        if summary.get("diverged") is not None:
            return 0.0 if metric_of(summary) == ACCURACY else WORST
        return score(rows)

    # ---- the result

    def _write(self, optuna: Any, study: Any) -> None:
        """Write best.toml, ready for ``freshet run --config``, and tuning.json with every trial."""
        states = optuna.trial.TrialState
        complete = [trial for trial in study.trials if trial.state == states.COMPLETE]
        if not complete:
            errors = [trial.user_attrs["error"] for trial in study.trials if "error" in trial.user_attrs]
            raise RunError(f"no trial of {self.method} was completed{f' ({errors[0]})' if errors else ''}")
        best = max(complete, key=lambda trial: (trial.value, -trial.number))
        config = best_config(self.tables, best.params)
        trials, metric = self._spent_trials(optuna, study), Metric(*best.user_attrs.get("metric", ACCURACY))
        ended = [trial.state.name.lower() for trial in trials]
        record = {
            "method": self.method,
            "budget": asdict(self.budget) | {"until": config.run.until},
            "validation": VALIDATION,
            "seeds": self.seeds,
            "metric": metric.name,
            "direction": metric.direction,
            "score": best.value,
            "values": best.params,
            "space": {name: asdict(each) for name, each in self.space.items()},
            "counts": {state: ended.count(state) for state in ("complete", "pruned", "fail")},
            "trials": [
                {"state": state, "value": t.value, "values": t.params, "error": t.user_attrs.get("error")}
                for t, state in zip(trials, ended, strict=True)
            ],
        }
        header = (
            f"# {self.method}, tuned by freshet: {len(trials)} trials x {self.budget.seeds} seeds, "
            f"{score_text(record)} on a held-out {VALIDATION:g} of the training set; the test set was not used\n"
        )
        write_atomically(self.folder / "tuning.json", (json.dumps(record, indent=2) + "\n").encode())
        write_atomically(self.folder / "best.toml", header.encode() + tomli_w.dumps(config.tables()).encode())


def score_text(record: Mapping[str, Any]) -> str:
    """The best score in words: the metric's name and its value."""
    value = -record["score"] if record["direction"] == "min" else record["score"]
    return f"{record['metric']} {value:.4f}"


def suggest(trial: Any, name: str, each: Range) -> float | int:
    """Ask the trial for a value in a range."""
    if each.whole:
        return int(trial.suggest_int(name, int(each.low), int(each.high), log=each.log))
    return float(trial.suggest_float(name, each.low, each.high, log=each.log))
