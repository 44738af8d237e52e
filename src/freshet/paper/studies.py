"""The two studies of the results pages: cells of the paper at the scale at which they were run, and their suites.

``import_runs`` copies runs from the folder of a grid into the archive of a cell or of one of its suites.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isinf
from pathlib import Path
from statistics import median
from typing import NamedTuple

from freshet import RunDirectory
from freshet.errors import ConfigError
from freshet.methods import class_and_preset
from freshet.paper.archive import ArchivedRun, copy_runs, finished_runs, read
from freshet.paper.cells import CELLS, Cell

KINDS = {"async": ("Asynchronous", "fedasmu"), "sync": ("Synchronous", "fedssmu")}
#: Suites of variants, with the method that varies; and suites of worlds, with the name of the main runs' world.
VARIED = {"ablation": "fedasmu", "slots": "fedasmu", "ours": "fedasmu-progress"}
WORLDS = {
    "heterogeneity": "ratio 5",
    "bandwidth": "bandwidth 1",
    "devices": "100 devices",
    "skew": "Dirichlet 0.5",
}
#: Length of the suites' runs in the world of the main runs.
SUITE_SECONDS = 3000.0
Runs = dict[str, list[ArchivedRun]]


@dataclass(frozen=True)
class Study:
    """A cell of the paper at the scale at which it was run here."""

    cell: Cell
    name: str
    scale: str
    #: A second target: most methods reach the paper's within a few tests.
    further: float
    #: Range of accuracies in the picture.
    shown: tuple[float, float]
    picture: str
    #: An addition to the picture's title about tuning.
    tuning_note: str
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
    """The archived runs of a study: its main runs, and the folder of its suites."""

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
    """The method's name with the marks of its remarks."""
    return " ".join([method, *(f"[{mark}]" for mark in class_and_preset(method)[0].about.marks())])


def time_to(runs: Sequence[ArchivedRun], target: float) -> str:
    return seconds(median(run.time_to(target) for run in runs))


def seconds(time: float) -> str:
    return "never" if isinf(time) else f"{time:,.0f} s"


def suite_columns(runs: Runs, suite: Path, usual: str) -> dict[str, Runs]:
    """The worlds of a suite in order; the main runs are among them, cut to the suite's length and seeds."""
    settings = sorted(suite.glob("*/")) if suite.is_dir() else []
    found = {folder.name.replace("-", " ", 1).replace("-", "/"): read(folder) for folder in settings}
    seeds = {run.seed for group in found.values() for each in group.values() for run in each}
    methods = [method for method in runs if any(method in group for group in found.values())]
    if methods:
        found[usual] = {m: [run.truncate(SUITE_SECONDS) for run in runs[m] if run.seed in seeds] for m in methods}
    return dict(sorted(found.items(), key=lambda item: sort_key(item[0])))


def sort_key(setting: str) -> float:
    """The number in a setting's name: ratio 440, bandwidth 1/100, 250 devices, Dirichlet 0.1; iid comes last."""
    numbers = [word.rpartition("/")[2] for word in setting.split()]
    return next((float(word) for word in numbers if word.replace(".", "").isdigit()), inf)


def import_runs(folders: Sequence[Path], results: Path, cell: Cell, suite: str | None = None) -> list[Path]:
    """Copy the finished runs of these folders into the archive of a cell; ``suite`` is NAME or NAME/SETTING."""
    into = archive_folder(results, cell, suite)
    for folder in folders:
        for run in finished_runs(folder):
            _check_cell(run, cell)
    return copy_runs(folders, into)


def archive_folder(results: Path, cell: Cell, suite: str | None = None) -> Path:
    """The archive of a cell, or of one of its suites."""
    if suite is None:
        return results / cell.name
    known = next((study.suites for study in STUDIES if study.cell == cell), ())
    name, _, setting = suite.partition("/")
    if name not in known:
        choice = f"choose one of {', '.join(known)}" if known else "this cell has no suites"
        raise ConfigError("--suite", f"{cell.name} has no suite {name!r}; {choice}")
    shape = "" if name in VARIED else r"[\w.][\w.-]*"
    if not re.fullmatch(shape, setting) or ".." in setting:
        wanted = name if name in VARIED else f"{name}/SETTING, as in skew/Dirichlet-0.1"
        raise ConfigError("--suite", f"must be {wanted}, but {suite!r} was given")
    return results / cell.name / "suites" / suite


def _check_cell(run: Path, cell: Cell) -> None:
    """Raise if a run has other data or another network than the cell."""
    config = RunDirectory(run).config()
    found = (config.get("data", {}).get("name"), config.get("model", {}).get("name"))
    if found != (cell.dataset, cell.model):
        actual = " on ".join(str(name)[:40] for name in reversed(found))
        raise ConfigError("--cell", f"{cell.name} is {cell.model} on {cell.dataset}, but {run} is {actual}")
