"""What the page speaks of: the cells that were run, at their scales, and how their suites lie in folders.

Bringing runs in: from the folder of a grid into that of a cell, or of one of its suites.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isinf
from pathlib import Path
from statistics import median
from typing import NamedTuple

from freshet.errors import ConfigError
from freshet.methods import class_and_preset
from freshet.paper.archive import ArchivedRun, finished_runs, read, copy_runs
from freshet.paper.cells import CELLS, Cell
from freshet.runs.reader import RunDirectory

KINDS = {"async": ("Asynchronous", "fedasmu"), "sync": ("Synchronous", "fedssmu")}
#: Suites in which variants of one method differ, with that method; and what the main runs are called in the others.
VARIED = {"ablation": "fedasmu", "slots": "fedasmu", "ours": "fedasmu-progress"}
WORLDS = {
    "heterogeneity": "ratio 5",
    "bandwidth": "bandwidth 1",
    "devices": "100 devices",
    "skew": "Dirichlet 0.5",
}
#: How long the suites last in the world of the main runs.
SUITE_SECONDS = 3000.0
Runs = dict[str, list[ArchivedRun]]


@dataclass(frozen=True)
class Study:
    """A cell of the paper as it was run here, at its scale."""

    cell: Cell
    name: str
    scale: str
    #: A second target beside the paper's, which most methods reach within a few tests.
    further: float
    #: What the picture shows of the accuracies.
    shown: tuple[float, float]
    picture: str
    #: What the title has to say of tuning besides.
    twice: str
    #: Suites that belong to it.
    suites: tuple[str, ...]

    @property
    def target(self) -> float:
        return self.cell.target


STUDIES = (
    Study(
        CELLS["lenet-fmnist"],
        "Fashion-MNIST",
        "LeNet5 on 10,000 of Fashion-MNIST's 60,000 samples",
        0.80,
        (0.55, 0.88),
        "results.png",
        " (-progress: twice)",
        (*VARIED, *WORLDS),
    ),
    Study(
        CELLS["lenet-cifar10"],
        "CIFAR-10",
        "LeNet5 on 5,000 of CIFAR-10's 50,000 samples",
        0.40,
        (0.15, 0.42),
        "results-cifar10.png",
        "",
        ("ours",),
    ),
)


class StudyRuns(NamedTuple):
    """What was found of a study: its main runs, and the folder of its suites."""

    study: Study
    runs: Runs
    suites: Path

    @staticmethod
    def read(study: Study, results: Path) -> "StudyRuns":
        folder = results / study.cell.name
        return StudyRuns(study, read(folder), folder / "suites")


def kind_of(method: str) -> str:
    return class_and_preset(method)[0].about.kind


def name_with_marks(method: str) -> str:
    """Its name, with the mark of what must be said of it."""
    return " ".join([method, *(f"[{mark}]" for mark in class_and_preset(method)[0].about.marks())])


def time_to(runs: Sequence[ArchivedRun], target: float) -> str:
    return seconds(median(run.time_to(target) for run in runs))


def seconds(time: float) -> str:
    return "never" if isinf(time) else f"{time:,.0f} s"


def suite_columns(runs: Runs, suite: Path, usual: str) -> dict[str, Runs]:
    """The worlds of a suite in their order, the main runs among them as they stood then, with the suite's seeds."""
    settings = sorted(suite.glob("*/")) if suite.is_dir() else []
    found = {folder.name.replace("-", " ", 1).replace("-", "/"): read(folder) for folder in settings}
    seeds = {run.seed for group in found.values() for each in group.values() for run in each}
    methods = [method for method in runs if any(method in group for group in found.values())]
    if methods:
        found[usual] = {m: [run.truncate(SUITE_SECONDS) for run in runs[m] if run.seed in seeds] for m in methods}
    return dict(sorted(found.items(), key=lambda item: sort_key(item[0])))


def sort_key(setting: str) -> float:
    """What a setting is sorted by: ratio 440, bandwidth 1/100, 250 devices, Dirichlet 0.1; alike comes last."""
    numbers = [word.rpartition("/")[2] for word in setting.split()]
    return next((float(word) for word in numbers if word.replace(".", "").isdigit()), inf)


def import_runs(folders: Sequence[Path], results: Path, cell: Cell, suite: str | None = None) -> list[Path]:
    """Bring in the finished runs of these folders, which are of this cell; ``suite`` is NAME or NAME/SETTING."""
    into = archive_folder(results, cell, suite)
    for folder in folders:
        for run in finished_runs(folder):
            _check(run, cell)
    return copy_runs(folders, into)


def archive_folder(results: Path, cell: Cell, suite: str | None = None) -> Path:
    """Where such runs are kept."""
    if suite is None:
        return results / cell.name
    known = next((study.suites for study in STUDIES if study.cell == cell), ())
    name, _, setting = suite.partition("/")
    if name not in known:
        choice = f"choose one of {', '.join(known)}" if known else "none is kept for this cell"
        raise ConfigError("--suite", f"{cell.name} has no suite {name!r} here; {choice}")
    shape = "" if name in VARIED else r"[\w.][\w.-]*"
    if not re.fullmatch(shape, setting) or ".." in setting:
        wanted = name if name in VARIED else f"{name}/SETTING, as in skew/Dirichlet-0.1"
        raise ConfigError("--suite", f"must be {wanted}, but {suite!r} was given")
    return results / cell.name / "suites" / suite


def _check(run: Path, cell: Cell) -> None:
    """A run of other data or another network would stand in the wrong table."""
    config = RunDirectory(run).config()
    found = (config.get("data", {}).get("name"), config.get("model", {}).get("name"))
    if found != (cell.dataset, cell.model):
        told = " on ".join(str(name)[:40] for name in reversed(found))
        raise ConfigError("--cell", f"{cell.name} is {cell.model} on {cell.dataset}, but {run} is {told}")
