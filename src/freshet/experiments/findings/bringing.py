"""Bringing runs in: from the folder of a grid into that of a cell, or of one of its suites."""

import re
from collections.abc import Sequence
from pathlib import Path

from freshet.errors import ConfigError
from freshet.experiments.cells import Cell
from freshet.experiments.findings.studies import STUDIES, VARIED
from freshet.experiments.kept import ended, take
from freshet.runs.reader import Run


def bring(folders: Sequence[Path], results: Path, cell: Cell, suite: str | None = None) -> list[Path]:
    """Bring in the finished runs of these folders, which are of this cell; ``suite`` is NAME or NAME/SETTING."""
    into = place(results, cell, suite)
    for folder in folders:
        for run in ended(folder):
            _check(run, cell)
    return take(folders, into)


def place(results: Path, cell: Cell, suite: str | None = None) -> Path:
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
    config = Run(run).config()
    found = (config.get("data", {}).get("name"), config.get("model", {}).get("name"))
    if found != (cell.dataset, cell.model):
        told = " on ".join(str(name)[:40] for name in reversed(found))
        raise ConfigError("--cell", f"{cell.name} is {cell.model} on {cell.dataset}, but {run} is {told}")
