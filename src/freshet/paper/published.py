"""The paper's numbers beside ours, and where the paper contradicts its own table (erratum E12).

A published number is shown only beside a run with the resolved configuration of the bare cell for the same method;
only seed, data folder, executor, workers, checkpoints and tests on devices may differ. Any other change (rates, initial
controls, scale, length, tuning, ...) removes the number, and so does another target, for which the paper has no time.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from freshet.config import Config, resolve
from freshet.experiments.grid import Entry, Job, Scenario, UserSettings, tables_for
from freshet.paper.cells import CELLS, METHODS, Cell, cell_scenario

_SYNC = METHODS[7:]
#: Cells in which FedSSMU's time is printed in bold, as the shortest of the synchronous methods.
BOLD_TIMES = (
    "lenet-fmnist",
    "lenet-cifar10",
    "resnet-cifar100",
    "resnet-tiny",
    "alexnet-cifar10",
    "alexnet-cifar100",
    "vgg-cifar100",
)


def slower_cells() -> dict[str, str]:
    """Cells in which FedSSMU is not the fastest synchronous method, with the fastest one."""
    found = {}
    for name, cell in CELLS.items():
        times = {m: time for m in ("fedssmu", *_SYNC) if (time := cell.published[m].time) is not None}
        fastest = min(times, key=lambda method: times[method])
        if fastest != "fedssmu":
            found[name] = fastest
    return found


def less_accurate_cells() -> dict[str, str]:
    """Cells in which FedSSMU is not the most accurate synchronous method, with the most accurate one."""
    best = {name: max(("fedssmu", *_SYNC), key=lambda m: c.published[m].accuracy) for name, c in CELLS.items()}
    return {name: method for name, method in best.items() if method != "fedssmu"}


def contradictions() -> list[str]:
    """The paper's statements about FedSSMU that its main table contradicts, recomputed from the table."""
    slower, worse = slower_cells(), less_accurate_cells()
    by = ", ".join(f"{name} ({fastest})" for name, fastest in slower.items())
    notes = [
        "the paper says that FedSSMU has the highest accuracy and speed, and gives its gains in speed over the cells "
        f"with a gain only; by its own table FedSSMU is not the fastest in {len(slower)} of {len(CELLS)} cells: {by}"
    ]
    for name, method in worse.items():
        ours, theirs = (CELLS[name].published[m].accuracy for m in ("fedssmu", method))
        change = 100 * (ours / theirs - 1)
        notes.append(
            f"by its own table FedSSMU is less accurate than {method} on {name}: {ours:g} against {theirs:g} "
            f"({change:.1f} %)"
        )
    for name in BOLD_TIMES:
        if name in slower:
            bold, least = (CELLS[name].published[m].time for m in ("fedssmu", slower[name]))
            notes.append(
                f"the paper prints FedSSMU's time on {name} in bold, {bold:,g}, but {slower[name]} has {least:,g}"
            )
    return notes


#: Suffix of the variants with the printed formulas.
_PRINTED = "-published"


def published_numbers(jobs: Sequence[Job]) -> dict[str, dict[str, Any]]:
    """The paper's accuracy and time by run key, for the runs of a grid that the paper has numbers for."""
    first: dict[tuple[Scenario, Entry], dict[str, Any] | None] = {}  # seeds do not matter
    found: dict[str, dict[str, Any]] = {}
    for job in jobs:
        line = job.scenario, job.entry
        if line not in first:
            first[line] = _numbers(job)
        if (numbers := first[line]) is not None:
            found[job.key] = numbers
    return found


def _numbers(job: Job) -> dict[str, Any] | None:
    cell = CELLS.get(job.scenario.cell or "")
    if cell is None:
        return None
    numbers = cell.published.get(job.entry.method.removesuffix(_PRINTED))
    return asdict(numbers) if numbers is not None and as_printed(job, cell) else None


def as_printed(job: Job, cell: Cell) -> bool:
    """Whether the job's configuration is that of the bare cell."""
    bare = tables_for(Entry(job.entry.method, job.entry.method), cell_scenario(cell), UserSettings())
    return _decisive_settings(job.config) == _decisive_settings(resolve(bare))


def _decisive_settings(config: Config) -> dict[str, Any]:
    """The settings that a published number depends on."""
    tables = config.identity()
    watched = ("seed", "evaluate_devices", "personalise")  # tests on devices do not change a run
    tables["run"] = {key: value for key, value in tables["run"].items() if key not in watched}
    return tables | {"target": config.run.target}
