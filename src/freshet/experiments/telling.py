"""What a grid's results are called and where they go: the same files, whoever ran it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freshet.experiments import files, results
from freshet.experiments.grid import Job
from freshet.experiments.store import Store


@dataclass(frozen=True)
class Grid:
    """What is run and how its results are told."""

    jobs: Sequence[Job]
    store: Store
    title: str
    notes: Sequence[str]
    stem: str
    scale: dict[str, Any] | None = None
    look: str = "curves"
    reference: str = ""


def tell(grid: Grid) -> tuple[dict[str, Any], list[Path]]:
    """The results as they are now, and the files they were written to: JSON, CSV and pictures."""
    from freshet.report.panel_figures import draw

    found = results.document(
        grid.jobs,
        grid.store,
        title=grid.title,
        notes=[*grid.notes, *_stopping(grid.jobs), *_beside(grid)],
        scale=grid.scale,
        look=grid.look,
        named=grid.reference,
    )
    folder = grid.store.folder
    return found, [*files.write(found, folder, grid.stem), *draw(found, folder, grid.stem)]


def _stopping(jobs: Sequence[Job]) -> list[str]:
    """Runs that end at their target are not compared by what they would have become."""
    stops = any(job.config.run.stop_at_target for job in jobs)
    return ["runs end when they reach the target: the final figures are those of that moment"] if stops else []


def _beside(grid: Grid) -> list[str]:
    """Runs that an earlier command has left in the same folder are in no table, but a report of the folder has them."""
    mine, folder = {job.key for job in grid.jobs}, grid.store.folder
    others = [path for path in (folder / "runs").glob("*") if path.is_dir() and path.name not in mine]
    if not others:
        return []
    held = "another run, which is" if len(others) == 1 else f"{len(others)} other runs, which are"
    return [f"{folder} holds {held} not counted here; -o FOLDER keeps experiments apart"]
