"""What lies in the folders that a person names: run directories, and the results of grids and tunings beside them."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from freshet.errors import RunError

#: How far below a named folder runs are looked for: ``runs / compare / runs / KEY`` is three.
DEPTH = 4
#: A place where runs may be, or several: run directories, or folders that hold some.
Places = str | Path | Iterable[str | Path]


class Found(NamedTuple):
    """Run directories, and JSON files that may hold results."""

    runs: list[Path]
    results: list[Path]


def find(places: Places) -> Found:
    """Runs are the folders with a ``config.toml``; what ``compare``, ``tune`` and ``paper`` write lies around them.

    A place that does not exist is returned as it is, for whoever reads it to say so.
    """
    runs: list[Path] = []
    results: list[Path] = []
    for place in _paths(places):
        if not place.is_dir() or _is_run(place):
            runs.append(place)
            continue
        folders = list(_below(place, DEPTH))
        inside = [folder for folder in folders if _is_run(folder)]
        files = [path for folder in folders if not _is_run(folder) for path in sorted(folder.glob("*.json"))]
        if not inside and not files:
            raise RunError(f"{place} holds no run and no results; name a run directory or a folder with some")
        runs += inside
        results += files
    return Found(runs, results)


def runs_to(purpose: str, places: Places) -> list[Path]:
    """The runs that are found there; one sentence where there are only results of runs that are gone."""
    runs = find(places).runs
    if not runs:
        raise RunError(f"there is no run to {purpose}, only results of some; name a folder with run directories")
    return runs


def _paths(places: Places) -> list[Path]:
    return [Path(place) for place in ([places] if isinstance(places, str | Path) else places)]


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file()


def _below(folder: Path, depth: int) -> Iterator[Path]:
    """The folder and those in it, without looking into runs, hidden folders or links."""
    yield folder
    if depth and not _is_run(folder):
        for inside in sorted(folder.iterdir()):
            if inside.is_dir() and not inside.is_symlink() and not inside.name.startswith("."):
                yield from _below(inside, depth - 1)
