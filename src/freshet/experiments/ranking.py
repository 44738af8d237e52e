"""Scores of a run over virtual time, ranks of methods, and how far ranks must differ to mean something.

Every function is pure. The tests compare the statistics with examples computed by hand and with published tables.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from freshet.core.streams import stream

#: Accuracy at the end is the mean of this many last tests.
LAST_TESTS = 5
#: Level of the critical difference.
ALPHA = 0.05
#: Random arrangements of the ranks behind a p-value.
ARRANGEMENTS = 9_999
Ranks = NDArray[np.float64]


# ---- scores of one run


def area(times: Sequence[float], values: Sequence[float], until: float) -> float:
    """Mean accuracy over the run: ``(1 / until) * integral of a(t) from 0 to until``, with lines between tests.

    Before the first test the accuracy is that of the first test, after the last one it is 0: a run that ended early
    (it diverged) has no model then.
    """
    if not times:
        return 0.0
    before = times[0] * values[0]
    pieces = [(times[n] - times[n - 1]) * (values[n] + values[n - 1]) / 2 for n in range(1, len(times))]
    return (before + math.fsum(pieces)) / until


def final(values: Sequence[float]) -> float:
    """Accuracy at the end: the mean of the last five tests."""
    return fmean(values[-LAST_TESTS:]) if values else 0.0


# ---- ranks


def rank(scores: Sequence[float]) -> list[float]:
    """Ranks from 1, the greatest score first. Equal scores share the mean of their places."""
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    found, start = [0.0] * len(scores), 0
    while start < len(order):
        end = start + 1
        while end < len(order) and scores[order[start]] == scores[order[end]]:
            end += 1
        for place in order[start:end]:
            found[place] = (start + 1 + end) / 2
        start = end
    return found


def friedman(ranks: Ranks) -> float:
    """Friedman's statistic of ranks, a row per world and a column per method.

    ``12 N / (k (k + 1)) * (sum_j R_j^2 - k (k + 1)^2 / 4)`` with the mean ranks R_j of k methods in N worlds, over
    ``1 - sum (t^3 - t) / (N k (k^2 - 1))`` over groups of t equal ranks in a world. 0 if all ranks are equal.
    """
    worlds, methods = ranks.shape
    means = ranks.mean(axis=0)
    statistic = 12 * worlds / (methods * (methods + 1)) * (float(means @ means) - methods * (methods + 1) ** 2 / 4)
    counts = [np.unique(row, return_counts=True)[1] for row in ranks]
    ties = sum(int((count**3 - count).sum()) for count in counts)
    correction = 1 - ties / (worlds * methods * (methods**2 - 1))
    return statistic / correction if correction > 1e-12 else 0.0


def friedman_p(ranks: Ranks, arrangements: int = ARRANGEMENTS) -> float:
    """Share of random arrangements of the ranks in each world with a statistic at least as large.

    If the methods were all alike, every order in a world would be equally likely. Few worlds are no problem, as they
    are for the usual approximation by a chi-squared distribution. The arrangements come from a fixed random stream.
    """
    observed = friedman(ranks)
    rng, extreme = stream(0, "friedman"), 0
    for _ in range(arrangements):
        extreme += friedman(rng.permuted(ranks, axis=1)) >= observed - 1e-9
    return (extreme + 1) / (arrangements + 1)


def range_probability(width: float, count: int) -> float:
    """Probability that ``count`` standard normal numbers lie within ``width`` of each other.

    ``k * integral of phi(z) (Phi(z + width) - Phi(z))^(k - 1) dz``, where z is the least of them.
    """
    z = np.linspace(-9.0, 9.0, 4001)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    inside = _normal(z + width) - _normal(z)
    return float(count * np.trapezoid(density * inside ** (count - 1), z))


def _normal(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in values])


def critical_difference(methods: int, worlds: int, alpha: float = ALPHA) -> float:
    """Nemenyi's critical difference of two mean ranks: ``q / sqrt(2) * sqrt(k (k + 1) / (6 N))``.

    q is the quantile of the range of k standard normal numbers. Mean ranks that are closer do not differ at this level.
    """
    low, high = 0.0, 20.0
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (middle, high) if range_probability(middle, methods) < 1 - alpha else (low, middle)
    return high / math.sqrt(2) * math.sqrt(methods * (methods + 1) / (6 * worlds))


def groups(means: Sequence[float], difference: float) -> list[tuple[int, int]]:
    """The largest groups of methods that do not differ, as (first, last) places in the sorted mean ranks."""
    found: list[tuple[int, int]] = []
    for first in range(len(means)):
        last = max(place for place in range(first, len(means)) if means[place] - means[first] < difference)
        if last > first and (not found or last > found[-1][1]):
            found.append((first, last))
    return found


@dataclass(frozen=True)
class Ranking:
    """Mean ranks over worlds, the best first."""

    methods: list[str]
    means: list[float]
    #: Least and greatest mean rank over single seeds.
    bands: list[tuple[float, float]]
    #: Ranks by method in each world.
    by_world: list[list[float]]
    statistic: float | None
    p: float | None
    #: None for fewer than two methods or worlds.
    difference: float | None

    @property
    def groups(self) -> list[tuple[int, int]]:
        """Methods that do not differ, as places."""
        return [] if self.difference is None else groups(self.means, self.difference)


def rank_methods(scores: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Ranking:
    """Rank methods by their medians over seeds in each world, from ``scores[world][method][seed]``.

    Every world has the same methods. The band of a method is that of its mean rank when only one seed is counted, over
    the seeds that all have.
    """
    worlds = list(scores)
    methods = list(scores[worlds[0]]) if worlds else []
    table = np.array([rank([_median(scores[world][method]) for method in methods]) for world in worlds])
    if not methods:
        return Ranking([], [], [], [], None, None, None)
    seeds = set.intersection(*(set(each) for world in worlds for each in scores[world].values()))
    single = [
        np.mean([rank([scores[world][method][seed] for method in methods]) for world in worlds], axis=0)
        for seed in sorted(seeds)
    ] or [table.mean(axis=0)]
    means = table.mean(axis=0)
    order = sorted(range(len(methods)), key=lambda place: (means[place], methods[place]))
    enough = len(methods) > 1 and len(worlds) > 1
    return Ranking(
        [methods[place] for place in order],
        [float(means[place]) for place in order],
        [(min(float(each[place]) for each in single), max(float(each[place]) for each in single)) for place in order],
        [[float(value) for value in table[:, place]] for place in order],
        friedman(table) if enough else None,
        friedman_p(table) if enough else None,
        critical_difference(len(methods), len(worlds)) if enough else None,
    )


def _median(by_seed: Mapping[int, float]) -> float:
    return float(np.median(list(by_seed.values())))
