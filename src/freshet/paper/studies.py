"""What the results pages are made of: the two studies of the former world with their suites, the other ten cells, and
the runs of the new world, which take FedASMU apart in the paper's cells for that.

``import_runs`` keeps runs from the folder of a grid in the archive of a cell, of one of its suites, or of the new
world.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, isinf
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from freshet import RunDirectory
from freshet.config import resolve
from freshet.errors import ConfigError
from freshet.experiments.store import archived_folders
from freshet.methods import class_and_preset
from freshet.paper.archive import ArchivedRun, finished_runs, keep_runs, read, read_named, setting_text
from freshet.paper.cells import CELLS, Cell, cell_settings

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

# ---- the former world

FORMER_WORLD = "The former world: fastest device 10 s, 10 and 50 Mbit/s, decay per round."


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


#: The cells without a study, in the order of results/CELLS.md, which gives the reasons.
OTHERS = (
    "lenet-cifar100",
    "cnn-cifar10",
    "cnn-cifar100",
    "alexnet-cifar10",
    "alexnet-cifar100",
    "resnet-cifar100",
    "textcnn-imdb",
    "vgg-cifar10",
    "vgg-cifar100",
    "resnet-tiny",
)


def read_others(results: Path) -> dict[str, Runs]:
    """The archived runs of each of these cells that was run."""
    found = {name: read(results / name) for name in OTHERS}
    return {name: runs for name, runs in found.items() if runs}


# ---- the new world

NEW_WORLD = "The new world: fastest device 190 s, links that cost no time, decay by virtual time."
NEW_FOLDER = "world-2"
#: What makes a run one of the new world; one of the former world has a fastest device of ``FORMER_FASTEST`` seconds.
NEW_SETTINGS = {
    "fleet.fastest": 190.0,
    "fleet.up_mbps": 0.0,
    "fleet.down_mbps": 0.0,
    "training.schedule_by": "time",
}
FORMER_FASTEST = 10.0
#: The cells in which the paper takes FedASMU apart.
ABLATED = {"lenet-cifar10": "LeNet5 on CIFAR-10", "cnn-cifar10": "CNN on CIFAR-10"}
#: What is planned there: variants, and options of FedASMU.
PARTS = (
    *("fedasmu", "fedasmu-da", "fedasmu-fa", "fedasmu-0", "judge = base", "fedasmu-published", "fedavg"),
    *(f"slot = {slot}" for slot in ("h1", "h2", "h3", "random", "never")),
)
#: The suites of claims that only these runs answer.
PART_SUITES = ("ablation", "slots")
#: Options that name a run if they differ from the cell's.
NAMED_OPTIONS = ("slot", "judge", "local_work", "selector", "meta_from")


class AblationRuns(NamedTuple):
    """The runs of the new world in one cell, by method, or by the options in which they differ from FedASMU there.

    They count to the cell's target, whatever target they were run with.
    """

    cell: Cell
    runs: Runs

    @staticmethod
    def read(name: str, results: Path) -> "AblationRuns":
        cell = CELLS[name]
        found = read_named(results / NEW_FOLDER / name, lambda run: part_name(run, cell))
        return AblationRuns(
            cell, {part: [run.with_target(cell.target) for run in runs] for part, runs in found.items()}
        )

    @property
    def name(self) -> str:
        return ABLATED[self.cell.name]


def part_name(run: ArchivedRun, cell: Cell) -> str:
    """``fedasmu``, ``fedasmu-da``, ``slot = h1``, ...; options of another method than FedASMU stand behind its name."""
    usual = _usual_options(cell.name, run.method)
    differ = [key for key in NAMED_OPTIONS if key in run.options and run.options[key] != usual.get(key)]
    words = [setting_text(key, run.options[key]) for key in differ]
    return ", ".join(words if words and run.method == "fedasmu" else [run.method, *words])


@cache
def _usual_options(cell: str, method: str) -> dict[str, Any]:
    """The options of a method in a cell."""
    return resolve({"method": cell_settings(CELLS[cell], method)["method"]}).tables()["method"]


class Archive(NamedTuple):
    """All archived runs."""

    studies: list[StudyRuns]
    cells: dict[str, Runs]
    ablations: list[AblationRuns]

    @staticmethod
    def read(results: Path) -> "Archive":
        return Archive(
            [StudyRuns.read(study, results) for study in STUDIES],
            read_others(results),
            [AblationRuns.read(name, results) for name in ABLATED],
        )

    @property
    def has_main_runs(self) -> bool:
        return any(each.runs for each in self.studies)

    @property
    def empty(self) -> bool:
        return not (self.cells or self.has_main_runs or any(each.runs for each in self.ablations))


# ---- words and order


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
    settings = archived_folders(suite)
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


# ---- importing runs


def import_runs(folders: Sequence[Path], results: Path, cell: Cell, suite: str | None = None) -> list[Path]:
    """Keep the finished runs of these folders in the archive of a cell and of their world.

    ``suite`` is NAME or NAME/SETTING; only the former world has suites.
    """
    worlds = {_checked_world(run, cell) for folder in folders for run in finished_runs(folder)}
    if len(worlds) > 1:
        raise ConfigError("--take", "the runs are of two worlds (fleet.fastest); import each world by itself")
    if worlds == {"new"}:
        return keep_runs(folders, _new_world_folder(results, cell, suite), Path())
    return keep_runs(folders, results / cell.name, _suite_folder(cell, suite))


def _new_world_folder(results: Path, cell: Cell, suite: str | None) -> Path:
    if cell.name not in ABLATED:
        raise ConfigError("--cell", f"the pages show runs of the new world only for {' and '.join(ABLATED)}")
    if suite is not None:
        raise ConfigError("--suite", "the new world has no suites; all its runs of a cell lie together: omit --suite")
    return results / NEW_FOLDER / cell.name


def archive_folder(results: Path, cell: Cell, suite: str | None = None) -> Path:
    """The archive of a cell, or of one of its suites."""
    return results / cell.name / _suite_folder(cell, suite)


def _suite_folder(cell: Cell, suite: str | None) -> Path:
    """The folder of a suite in the archive of its cell."""
    if suite is None:
        return Path()
    known = next((study.suites for study in STUDIES if study.cell == cell), ())
    name, _, setting = suite.partition("/")
    if name not in known:
        choice = f"choose one of {', '.join(known)}" if known else "this cell has no suites"
        raise ConfigError("--suite", f"{cell.name} has no suite {name!r}; {choice}")
    shape = "" if name in VARIED else r"[\w.][\w.-]*"
    if not re.fullmatch(shape, setting) or ".." in setting:
        wanted = name if name in VARIED else f"{name}/SETTING, as in skew/Dirichlet-0.1"
        raise ConfigError("--suite", f"must be {wanted}, but {suite!r} was given")
    return Path("suites") / suite


def _checked_world(run: Path, cell: Cell) -> Literal["former", "new"]:
    """The world of a run; raise if the run has other data, another network or another world."""
    config = RunDirectory(run).config()
    found = (config.get("data", {}).get("name"), config.get("model", {}).get("name"))
    if found != (cell.dataset, cell.model):
        actual = " on ".join(str(name)[:40] for name in reversed(found))
        raise ConfigError("--cell", f"{cell.name} is {cell.model} on {cell.dataset}, but {run} is {actual}")
    if config.get("fleet", {}).get("fastest") == FORMER_FASTEST:
        return "former"
    for key, wanted in NEW_SETTINGS.items():
        section, _, name = key.partition(".")
        value = config.get(section, {}).get(name)
        if value != wanted:
            known = f"{wanted} (the former one: fleet.fastest = {FORMER_FASTEST:g})"
            raise ConfigError("--take", f"{run} has {key} = {str(value)[:20]}, but the new world has {known}")
    return "new"
