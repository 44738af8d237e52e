"""The statistics of a report as small pure functions: over seeds, to a target, between two methods, over time.

``None`` stands for a missing number: a diverged test, or a target that was not reached.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median

from freshet.report.reading import Record, RunData
from freshet.runs.records import ACCURACY, Maybe, Metric, first_crossing

#: Points of the trailing mean. Its crossing is reported beside the raw one.
WINDOW = 5
#: The sign-flip test enumerates 2^n cases and is not made for more pairs than this.
MAX_PAIRS = 20


@dataclass(frozen=True)
class Spread:
    """Median and extremes over seeds; ``count`` of ``of`` runs have a number."""

    median: Maybe
    low: Maybe
    high: Maybe
    count: int
    of: int


def over_seeds(values: Sequence[Maybe]) -> Spread:
    """Median, least and greatest of the numbers that are not missing."""
    present = [value for value in values if value is not None]
    if not present:
        return Spread(None, None, None, 0, len(values))
    return Spread(median(present), min(present), max(present), len(present), len(values))


def over_seeds_reached(values: Sequence[Maybe]) -> Spread:
    """The same for times to a target. ``None`` counts as later than any time, so a median needs half of the seeds.

    Leaving out the seeds that miss the target would reward a method for failing.
    """
    present = [value for value in values if value is not None]
    middle = median([math.inf if value is None else value for value in values]) if values else math.inf
    if not present:
        return Spread(None, None, None, 0, len(values))
    return Spread(middle if math.isfinite(middle) else None, min(present), max(present), len(present), len(values))


def on_grid(times: Sequence[float], values: Sequence[Maybe], grid: Sequence[float]) -> list[Maybe]:
    """The latest value at each point of the grid; None before the first value. Times must not decrease."""
    found: list[Maybe] = []
    position, latest = 0, None
    for point in grid:
        while position < len(times) and times[position] <= point + 1e-9:
            latest = values[position]
            position += 1
        found.append(latest)
    return found


def regular_grid(step: float, until: float) -> list[float]:
    """0, step, 2 step, ... up to and including ``until``."""
    return [index * step for index in range(math.floor(until / step + 1e-9) + 1)]


def trailing_mean(values: Sequence[Maybe], window: int = WINDOW) -> list[Maybe]:
    """Mean of each value and the ``window - 1`` before it; None if one of them is missing."""
    means: list[Maybe] = []
    for end in range(1, len(values) + 1):
        part = [value for value in values[max(0, end - window) : end] if value is not None]
        means.append(fmean(part) if len(part) == window else None)
    return means


def mean_crossing(
    times: Sequence[float],
    values: Sequence[Maybe],
    target: Maybe,
    metric: Metric = ACCURACY,
    window: int = WINDOW,
) -> Maybe:
    """First time at which the trailing mean reaches the target."""
    return first_crossing(times, trailing_mean(values, window), target, metric)


def band(columns: Sequence[Sequence[Maybe]]) -> list[Spread]:
    """Median and extremes over seeds at each point of a common grid."""
    return [over_seeds(column) for column in zip(*columns, strict=True)]


def histogram(values: Sequence[int], width: int = 1) -> list[tuple[int, float]]:
    """(first value of the bin, share of all values) for each bin from the least to the greatest, also empty ones."""
    if not values:
        return []
    bins = [(value - 1) // width for value in values]
    counts = dict.fromkeys(range(min(bins), max(bins) + 1), 0)
    for index in bins:
        counts[index] += 1
    return [(index * width + 1, count / len(values)) for index, count in counts.items()]


@dataclass(frozen=True)
class PairedComparison:
    """Two methods on the seeds that both have: mean difference and exact two-sided p-value."""

    pairs: int
    difference: Maybe
    p: Maybe


def sign_flip(differences: Sequence[float]) -> float | None:
    """Exact permutation test: the share of sign patterns with a mean at least as far from 0 as the observed one.

    Under the null hypothesis each paired difference is as likely to have the other sign. With n pairs the p-value is at
    least 2 / 2^n, so three seeds give 0.25 or more. Above ``MAX_PAIRS`` pairs the result is None.
    """
    if not differences or len(differences) > MAX_PAIRS:
        return None
    observed = abs(math.fsum(differences))
    least = observed - 1e-12 * max(1.0, observed)
    extreme = 0
    for signs in product((1, -1), repeat=len(differences)):
        extreme += abs(math.fsum(map(operator.mul, signs, differences))) >= least
    return extreme / (1 << len(differences))


def compare_paired(ours: dict[int, Maybe], theirs: dict[int, Maybe]) -> PairedComparison:
    """Compare two methods by seed. A seed that only one of them has does not count."""
    differences = []
    for seed in sorted(ours.keys() & theirs.keys()):
        a, b = ours[seed], theirs[seed]
        if a is not None and b is not None:
            differences.append(a - b)
    if not differences:
        return PairedComparison(0, None, None)
    return PairedComparison(len(differences), fmean(differences), sign_flip(differences))


#: Most points of a curve in a file of results.
MAX_CURVE_POINTS = 120


def curve(runs: Sequence[RunData], step: float) -> Record | None:
    """Median, least and greatest value over the seeds. A diverged run keeps its last value to the end."""
    tested = [run for run in runs if run.metrics]
    if not tested:
        return None
    grid = thin(regular_grid(step, last_of(tested)))
    found = [on_grid([float(row["time"]) for row in run.metrics], run.column(run.metric.name), grid) for run in tested]
    points = band(found)
    return {
        "time": [round(time, 3) for time in grid],
        "median": _round_all([point.median for point in points]),
        "low": _round_all([point.low for point in points]),
        "high": _round_all([point.high for point in points]),
    }


def last_of(runs: Sequence[RunData]) -> float:
    """End of a common curve: as far as all runs reach, without the diverged ones."""
    ends = [run.end for run in runs if run.diverged_at is None]
    return min(ends) if ends else max((run.end for run in runs), default=0.0)


def thin(grid: list[float]) -> list[float]:
    """At most ``MAX_CURVE_POINTS`` evenly chosen points of a grid, including the last one."""
    every = -(-len(grid) // MAX_CURVE_POINTS)
    return grid[(len(grid) - 1) % every :: every] if grid else grid


def _round_all(values: Sequence[Maybe]) -> list[Maybe]:
    return [None if value is None else round(value, 5) for value in values]
