"""Runs as they are kept beside a page of results: settings, tests, world and summary, without logs and models.

How they are counted is a protocol's: accuracy is the mean of the last tests, and a win needs all seeds.
"""

import json
import shutil
import tomllib
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from freshet.experiments.claims import Outcome, compare
from freshet.runs.reader import ENDED

KEPT = ("config.toml", "metrics.jsonl", "summary.json", "world.json")
#: Tests that the accuracy is the mean of, and the difference below which two methods are called equal.
LAST, TIE = 5, 0.01
#: With fewer seeds nothing is told.
SEEDS = 3


class Run(NamedTuple):
    """One run, as far as results tell of it."""

    method: str
    seed: int
    times: list[float]
    accuracies: list[float]
    reached: float | None
    sha: str
    lr: float
    uploads: int
    staleness: float | None
    diverged: float | None
    options: dict[str, Any]

    @property
    def accuracy(self) -> float:
        return fmean(self.accuracies[-LAST:])

    def time_to(self, target: float) -> float:
        """First test at or above it, or never."""
        pairs = zip(self.times, self.accuracies, strict=True)
        return next((time for time, accuracy in pairs if accuracy >= target), inf)

    def until(self, end: float) -> "Run":
        """The run as it stood then: what it does not know of its end, it does alike."""
        tests = sum(time <= end for time in self.times)
        reached = None if self.reached is None or self.reached > end else self.reached
        return self._replace(times=self.times[:tests], accuracies=self.accuracies[:tests], reached=reached)

    @staticmethod
    def read(folder: Path) -> "Run":
        summary = json.loads((folder / "summary.json").read_text())
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        config = tomllib.loads((folder / "config.toml").read_text())
        return Run(
            summary["method"],
            summary["seed"],
            [row["time"] for row in rows],
            [row["accuracy"] for row in rows],
            summary["time_to_target"],
            summary["weights_sha256"],
            config["training"]["lr"],
            summary["uploads"],
            summary["mean_staleness"],
            summary["diverged"],
            config.get("method", {}),
        )


def take(folders: Iterable[Path], into: Path) -> None:
    """Bring finished runs in: what draws every figure again, without logs and models."""
    for folder in folders:
        for run in sorted((folder / "runs").iterdir()):
            summary = run / "summary.json"
            if summary.is_file() and json.loads(summary.read_text())["status"] in ENDED:
                place = into / "runs" / run.name
                place.mkdir(parents=True, exist_ok=True)
                for name in KEPT:
                    shutil.copy(run / name, place / name)


def read(folder: Path) -> dict[str, list[Run]]:
    """Runs by method, seeds in order; only methods all of whose seeds are there."""
    found: dict[str, list[Run]] = {}
    for run in sorted(folder.glob("runs/*/")):
        one = Run.read(run)
        found.setdefault(one.method, []).append(one)
    seeds = max((len(runs) for runs in found.values()), default=0)
    return {method: sorted(runs, key=lambda run: run.seed) for method, runs in found.items() if len(runs) == seeds}


def variants(folder: Path, main: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of a suite by what they are called: their method and the options in which they differ from the main runs."""
    usual, found = main[0].options, dict[str, list[Run]]()
    for run in map(Run.read, sorted(folder.glob("runs/*/"))):
        own = run.method != main[0].method
        differ = {} if own else {key: value for key, value in run.options.items() if value != usual.get(key, value)}
        words = [f"{key} = {str(value).lower()}" for key, value in differ.items() if not key.startswith("eta_")]
        found.setdefault(", ".join(words) or run.method, []).append(run)
    return {name: sorted(runs, key=lambda run: run.seed) for name, runs in found.items()}


def middle(runs: Sequence[Run]) -> float:
    return median(run.accuracy for run in runs)


def time_of(runs: Sequence[Run]) -> float:
    """Median time to the target, never being later than everything."""
    return median(inf if run.reached is None else run.reached for run in runs)


def shared(ours: Sequence[Run], theirs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """The runs of the seeds that both have, in the same order."""
    pairs = [(a, b) for a in ours for b in theirs if a.seed == b.seed]
    return [a for a, _ in pairs], [b for _, b in pairs]


def outcome(ours: Sequence[Run], theirs: Sequence[Run], gain: str = "accuracy") -> Outcome:
    """Who wins on the seeds that both have: in accuracy by more than a tie, in time where one of them gets there."""
    ours, theirs = shared(ours, theirs)
    if 0 < len(ours) < SEEDS:
        return "few"
    if gain == "accuracy":
        return compare([run.accuracy for run in ours], [run.accuracy for run in theirs], TIE)
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.reached or b.reached]
    return compare([-(a.reached or inf) for a, _ in pairs], [-(b.reached or inf) for _, b in pairs])
