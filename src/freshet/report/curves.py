"""Accuracy over time as a few numbers: median and extremes over seeds on a common grid."""

from collections.abc import Sequence

from freshet.report.log import Record
from freshet.report.reading import RunData
from freshet.report.statistics import band, on_grid, regular
from freshet.runs.facts import Maybe

#: A curve in a file has at most so many points.
MOST_POINTS = 120


def curve(runs: Sequence[RunData], step: float) -> Record | None:
    """Median, least and greatest accuracy over the seeds; a run that diverged keeps its last value to the end."""
    tested = [run for run in runs if run.metrics]
    if not tested:
        return None
    grid = thinned(regular(step, last_of(tested)))
    found = [on_grid([float(row["time"]) for row in run.metrics], run.column(run.metric.name), grid) for run in tested]
    points = band(found)
    return {
        "time": [round(time, 3) for time in grid],
        "median": _rounded([point.median for point in points]),
        "low": _rounded([point.low for point in points]),
        "high": _rounded([point.high for point in points]),
    }


def last_of(runs: Sequence[RunData]) -> float:
    """Where a common curve ends: as far as all runs reach, those that diverged aside."""
    ends = [run.end for run in runs if run.diverged is None]
    return min(ends) if ends else max((run.end for run in runs), default=0.0)


def thinned(grid: list[float]) -> list[float]:
    """At most ``MOST_POINTS`` of a grid, evenly, the last one included."""
    every = -(-len(grid) // MOST_POINTS)
    return grid[(len(grid) - 1) % every :: every] if grid else grid


def _rounded(values: Sequence[Maybe]) -> list[Maybe]:
    return [None if value is None else round(value, 5) for value in values]
