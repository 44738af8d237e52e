"""Archived runs, the source of the results pages: settings, tests, world and summary, without logs and models.

The protocol fixes how they count: accuracy is the mean of the last tests, and a win needs all seeds."""

import re
from collections.abc import Callable, Iterable, Sequence
from math import inf, isinf
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from freshet.errors import ConfigError, RunError
from freshet.experiments.store import archive_runs, archived_runs, open_run
from freshet.experiments.store import finished_runs as ended_runs
from freshet.methods import builtin_about

#: How two methods compare over seeds. ``open``: seeds disagree; ``few``: too few seeds; ``coarse``: too few tests
#: before the target; ``never``: neither reaches the target; ``none``: nothing to compare.
Outcome = Literal["win", "loss", "tie", "open", "few", "coarse", "never", "none"]
#: Accuracy is the mean of this many last tests; a smaller difference of accuracies is a tie.
LAST_TESTS, TIE = 5, 0.01
#: Fewer seeds give no verdict.
MIN_SEEDS = 3
#: A time to the target with fewer tests before it gives no verdict: with ten tests it is known to a tenth.
MIN_TESTS = 10
#: Types of values that are safe to print on a page.
Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Numbers = Annotated[list[Number], Field(min_length=1)]
Count = Annotated[int, Field(ge=0, lt=2**53, strict=True)]
Sha = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", strict=True)]


class ArchivedRun(NamedTuple):
    """The facts of one run that the results need."""

    method: str
    seed: Count
    times: Numbers
    accuracies: Numbers
    reached: Number | None
    sha: Sha
    lr: Number
    optimiser: Annotated[str, Field(pattern=r"^[a-z]{1,20}$", strict=True)]
    batch: Count
    samples: Count
    """Training samples; 0 means all."""
    network: Annotated[str, Field(pattern=r"^[A-Za-z0-9 _.,=-]{1,120}$", strict=True)]
    """The model's name and its options."""
    uploads: Count
    staleness: Number | None
    diverged: Number | None
    options: dict[str, Any]

    @property
    def accuracy(self) -> float:
        return fmean(self.accuracies[-LAST_TESTS:])

    @property
    def tests_before_target(self) -> int:
        """How many tests came before the target was reached; all tests if it never was."""
        return sum(self.reached is None or time < self.reached for time in self.times)

    def time_to(self, target: float) -> float:
        """Time of the first test at or above the target, or infinity."""
        pairs = zip(self.times, self.accuracies, strict=True)
        return next((time for time, accuracy in pairs if accuracy >= target), inf)

    def with_target(self, target: float) -> "ArchivedRun":
        """The same run, timed to this target."""
        time = self.time_to(target)
        return self._replace(reached=None if isinf(time) else time)

    def truncate(self, end: float) -> "ArchivedRun":
        """Truncate to ``end``; earlier behaviour does not depend on the end of a run."""
        tests = max(1, sum(time <= end for time in self.times))
        reached = None if self.reached is None or self.reached > end else self.reached
        return self._replace(times=self.times[:tests], accuracies=self.accuracies[:tests], reached=reached)

    @staticmethod
    def read(folder: Path) -> "ArchivedRun":
        """Read a kept run or a run directory and check the type of every value."""
        run = open_run(folder)
        summary, rows, config = run.summary(), run.metrics(), run.config()
        values = {
            "method": summary.get("method"),
            "seed": summary.get("seed"),
            "times": [row.get("time") for row in rows],
            "accuracies": [row.get("accuracy") for row in rows],
            "reached": summary.get("time_to_target"),
            "sha": summary.get("weights_sha256"),
            "lr": config.get("training", {}).get("lr"),
            "optimiser": config.get("training", {}).get("optimiser"),
            "batch": config.get("training", {}).get("batch_size"),
            "samples": config.get("data", {}).get("train_samples"),
            "network": _network(config.get("model", {})),
            "uploads": summary.get("uploads"),
            "staleness": summary.get("mean_staleness"),
            "diverged": summary.get("diverged"),
            "options": config.get("method", {}),
        }
        try:
            found = _RUN.validate_python(values)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise RunError(f"{folder} cannot be used: {where}: {problem['msg'].lower()}") from None
        if builtin_about(found.method) is None:
            raise RunError(f"{folder} cannot be used: its method, {found.method[:40]!r}, is not a built-in one")
        return found


_RUN = TypeAdapter(ArchivedRun)


def _network(table: dict[str, Any]) -> str:
    """The model's name and the options that are set; empty and false ones are left out."""
    options = {key: value for key, value in table.items() if key != "name" and value != "" and value is not False}
    return ", ".join([str(table.get("name")), *(f"{key} = {value}" for key, value in options.items())])


def finished_runs(folder: Path) -> list[Path]:
    """The runs of a grid's folder that have ended; raise if one of them is broken."""
    if not (folder / "runs").is_dir():
        raise ConfigError("--take", f"{folder} has no folder runs; give a folder made by freshet compare")
    found = ended_runs(folder)
    if not found:
        raise ConfigError("--take", f"no run in {folder} has ended yet")
    for run in found:
        ArchivedRun.read(run)
    return found


def keep_runs(folders: Iterable[Path], home: Path, inside: Path) -> list[Path]:
    """Keep the finished runs of these folders in an archive, without logs and models; return their paths there."""
    return archive_runs([run for folder in folders for run in finished_runs(folder)], home, inside)


def read(folder: Path) -> dict[str, list[ArchivedRun]]:
    """Runs by method, in the order of seeds; a method that lacks a seed is left out."""
    found = read_named(folder, lambda run: run.method)
    seeds = max((len(runs) for runs in found.values()), default=0)
    return {method: runs for method, runs in found.items() if len(runs) == seeds}


def read_named(folder: Path, name_of: Callable[[ArchivedRun], str]) -> dict[str, list[ArchivedRun]]:
    """Runs by a name, in the order of seeds; two runs of one name and seed are refused."""
    found: dict[str, list[ArchivedRun]] = {}
    for run in map(ArchivedRun.read, archived_runs(folder)):
        name = name_of(run)
        group = found.setdefault(name, [])
        if any(other.seed == run.seed for other in group):
            raise RunError(f"{folder} holds two runs of {name} with seed {run.seed}; remove one of them")
        group.append(run)
    return {name: sorted(runs, key=lambda run: run.seed) for name, runs in found.items()}


def variants(folder: Path, main: Sequence[ArchivedRun]) -> dict[str, list[ArchivedRun]]:
    """Runs of a suite by name: their method, or the options in which they differ from the main runs."""
    usual, found = main[0].options, dict[str, list[ArchivedRun]]()
    for run in map(ArchivedRun.read, archived_runs(folder)):
        own = run.method != main[0].method
        differ = {} if own else {key: value for key, value in run.options.items() if value != usual.get(key, value)}
        words = [setting_text(key, value) for key, value in differ.items() if not key.startswith("eta_")]
        found.setdefault(", ".join(words) or run.method, []).append(run)
    return {name: sorted(runs, key=lambda run: run.seed) for name, runs in found.items()}


def setting_text(key: str, value: Any) -> str:
    """A setting as ``key = value``, without characters that markdown or HTML would interpret."""
    return re.sub(r"[^\w .,:=+/'()-]", "?", f"{key} = {str(value).lower()}")[:80]


def median_accuracy(runs: Sequence[ArchivedRun]) -> float:
    return median(run.accuracy for run in runs)


def median_time(runs: Sequence[ArchivedRun]) -> float:
    """Median time to the target; never counts as infinity."""
    return median(map(_time, runs))


def median_tests(runs: Sequence[ArchivedRun]) -> float:
    """Median number of tests before the target was reached."""
    return median(run.tests_before_target for run in runs)


def common_seeds(
    ours: Sequence[ArchivedRun], theirs: Sequence[ArchivedRun]
) -> tuple[list[ArchivedRun], list[ArchivedRun]]:
    """The runs with seeds that both have, in the same order."""
    pairs = [(a, b) for a in ours for b in theirs if a.seed == b.seed]
    return [a for a, _ in pairs], [b for _, b in pairs]


def compare_paired(ours: Sequence[float], theirs: Sequence[float], least: float = 0.0) -> Outcome:
    """Compare paired values of the same seeds; more is better.

    A win needs medians more than ``least`` apart and every seed on its side.
    """
    if not ours:
        return "none"
    middle = median(ours) - median(theirs)
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    if abs(middle) < least or middle == 0.0:
        return "tie"
    if all(difference > 0 for difference in differences):
        return "win"
    return "loss" if all(difference < 0 for difference in differences) else "open"


def outcome(ours: Sequence[ArchivedRun], theirs: Sequence[ArchivedRun], gain: str = "accuracy") -> Outcome:
    """Who wins on the seeds that both have: in accuracy, or in time on those where one of them reaches the target.

    Time needs ``MIN_TESTS`` tests before the target on both sides (medians). Who never reaches it has all its tests
    before it, so a rival that never does loses to a method that does after enough tests.
    """
    ours, theirs = common_seeds(ours, theirs)
    if not ours:
        return "none"
    if gain == "accuracy":
        accuracies = [run.accuracy for run in ours], [run.accuracy for run in theirs]
        return compare_paired(*accuracies, TIE) if len(ours) >= MIN_SEEDS else "few"
    pairs = [(_time(a), _time(b)) for a, b in zip(ours, theirs, strict=True)]
    pairs = [pair for pair in pairs if min(pair) < inf]
    if not pairs:
        return "never"
    if min(median_tests(ours), median_tests(theirs)) < MIN_TESTS:
        return "coarse"
    return compare_paired([-a for a, _ in pairs], [-b for _, b in pairs]) if len(pairs) >= MIN_SEEDS else "few"


def _time(run: ArchivedRun) -> float:
    return inf if run.reached is None else run.reached
