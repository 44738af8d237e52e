"""The paper's numbers: they stand beside a run made exactly as its cell says, and beside no other.

A run qualifies when its resolved configuration is the one that the bare cell gives for the same method, seed and place
of the data aside. So whatever decides bits (devices, rates, initial controls, scale, length, tuning, ...) takes the
number away, and so does another target, to which the paper has no time.
"""

from dataclasses import asdict
from typing import Any

from freshet.config import Config, resolve
from freshet.experiments.cells import CELLS, Cell
from freshet.experiments.grid import Entry, GridWorld, Job, Request, tables_for

#: The same method of the paper in its printed formulas.
_PRINTED = "-published"


def published(job: Job) -> dict[str, Any] | None:
    """The paper's accuracy and time for a run of the grid, or None where it has none for this very run."""
    cell = job.world.cell
    known = None if cell is None else CELLS.get(cell.name)
    if known is None:
        return None
    numbers = known.published.get(job.entry.method.removesuffix(_PRINTED))
    return asdict(numbers) if numbers is not None and as_printed(job, known) else None


def as_printed(job: Job, cell: Cell) -> bool:
    """Whether the job's configuration is that of the bare cell."""
    bare = tables_for(Entry(job.entry.method, job.entry.method), GridWorld(cell.name, cell), Request())
    return _measured(job.config) == _measured(resolve(bare))


def _measured(config: Config) -> dict[str, Any]:
    """What a published number depends on."""
    tables = config.essence()
    watched = ("seed", "evaluate_devices", "personalise")  # tests on the devices change nothing of a run
    tables["run"] = {key: value for key, value in tables["run"].items() if key not in watched}
    return tables | {"target": config.run.target}
