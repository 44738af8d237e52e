"""The statistics of the benchmark, against examples computed by hand and published tables."""

import math

import numpy as np
import pytest

from freshet.experiments.ranking import (
    area,
    critical_difference,
    final,
    friedman,
    friedman_p,
    groups,
    range_probability,
    rank,
    rank_methods,
)


def test_the_area_is_the_mean_accuracy_over_the_run():
    # 0..10: (0.1 + 0.5) / 2 * 10 = 3; 10..30: (0.5 + 0.7) / 2 * 20 = 12; 15 / 30 = 0.5
    assert area([0.0, 10.0, 30.0], [0.1, 0.5, 0.7], 30.0) == pytest.approx(0.5)
    assert area([0.0, 10.0, 30.0], [0.1, 0.5, 0.7], 60.0) == pytest.approx(0.25), "no model after the last test"
    assert area([10.0, 30.0], [0.5, 0.7], 30.0) == pytest.approx((5 + 12) / 30), "the first test counts backwards"
    assert area([0.0], [0.9], 10.0) == 0.0 == area([], [], 10.0)


def test_the_end_is_the_mean_of_the_last_five_tests():
    assert final([0.0, 0.9, 0.5, 0.6, 0.7, 0.8, 0.9]) == pytest.approx(0.7)
    assert final([0.5]) == 0.5 and final([]) == 0.0


def test_equal_scores_share_the_mean_of_their_places():
    assert rank([0.9, 0.7, 0.8]) == [1.0, 3.0, 2.0]
    assert rank([0.5, 0.9, 0.5, 0.1]) == [2.5, 1.0, 2.5, 4.0]
    assert rank([0.3, 0.3, 0.3]) == [2.0, 2.0, 2.0]
    assert rank([]) == []


def test_friedmans_statistic_of_a_table_computed_by_hand():
    # N = 4, k = 3; rank sums 5, 7, 12, means 1.25, 1.75, 3; 12*4/(3*4) * (1.5625 + 3.0625 + 9 - 12) = 4 * 1.625 = 6.5
    table = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [2.0, 1.0, 3.0], [1.0, 2.0, 3.0]])
    assert friedman(table) == pytest.approx(6.5)


def test_friedmans_statistic_with_ties_computed_by_hand():
    # N = 2, k = 3; means 1.25, 1.75, 3: 12*2/12 * 1.625 = 3.25; one pair of ties: 6 / (2 * 3 * 8) = 1/8; 3.25 / (7/8)
    table = np.array([[1.5, 1.5, 3.0], [1.0, 2.0, 3.0]])
    assert friedman(table) == pytest.approx(3.25 / (7 / 8))
    assert friedman(np.full((3, 4), 2.5)) == 0.0


def test_the_p_value_is_the_share_of_arrangements_counted_by_hand():
    # Two methods in three worlds, always the same first: of the 2^3 orders, two are as extreme.
    assert friedman_p(np.array([[1.0, 2.0]] * 3), 4000) == pytest.approx(2 / 8, abs=0.03)
    # Three methods in two worlds, the same order twice: 6 of 36 pairs of orders agree.
    assert friedman_p(np.array([[1.0, 2.0, 3.0]] * 2), 4000) == pytest.approx(6 / 36, abs=0.03)
    assert friedman_p(np.full((3, 4), 2.5), 50) == 1.0


def test_the_range_of_two_normal_numbers_has_a_known_distribution():
    # The difference of two has the standard deviation sqrt(2): P(|x - y| < w) = erf(w / 2).
    for width in (0.5, 1.0, 2.7718):
        assert range_probability(width, 2) == pytest.approx(math.erf(width / 2), abs=1e-9)


@pytest.mark.parametrize(
    ("methods", "q"), [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (6, 2.850), (7, 2.949), (8, 3.031), (10, 3.164)]
)
def test_the_quantiles_are_those_of_the_published_table(methods: int, q: float):
    """Two-tailed Nemenyi test at 0.05 (Demšar, JMLR 2006, table 5)."""
    factor = math.sqrt(methods * (methods + 1) / (6 * 14))
    assert critical_difference(methods, 14) / factor == pytest.approx(q, abs=1e-3)


def test_the_critical_difference_of_an_example():
    # Demšar's example: four classifiers on 14 data sets, CD = 2.569 * sqrt(4 * 5 / (6 * 14)) = 1.25
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.01)


def test_groups_are_the_largest_runs_of_close_ranks():
    assert groups([1.0, 1.5, 2.4, 4.0], 1.0) == [(0, 1), (1, 2)]
    assert groups([1.0, 1.2, 1.4], 1.0) == [(0, 2)]
    assert groups([1.0, 3.0], 1.0) == [] == groups([], 1.0)


def test_methods_are_ranked_by_medians_and_banded_by_seeds():
    scores = {
        "one": {"a": {0: 0.9, 1: 0.7, 2: 0.8}, "b": {0: 0.6, 1: 0.75, 2: 0.6}, "c": {0: 0.1, 1: 0.1, 2: 0.1}},
        "two": {"a": {0: 0.5, 1: 0.5, 2: 0.5}, "b": {0: 0.6, 1: 0.6, 2: 0.6}, "c": {0: 0.1, 1: 0.1, 2: 0.1}},
    }
    found = rank_methods(scores)
    assert found.methods == ["a", "b", "c"] and found.means == [1.5, 1.5, 3.0]
    assert found.by_world == [[1.0, 2.0], [2.0, 1.0], [3.0, 3.0]]
    assert found.bands == [(1.5, 2.0), (1.0, 1.5), (3.0, 3.0)], "with seed 1 alone b is first in both worlds"
    assert found.difference == pytest.approx(2.343 * math.sqrt(1), abs=1e-3)
    assert found.statistic == pytest.approx(12 * 2 / 12 * (1.5**2 + 1.5**2 + 9 - 12))
    assert found.groups == [(0, 2)] and found.p is not None and 0 < found.p <= 1


def test_one_world_has_ranks_but_no_test():
    found = rank_methods({"one": {"a": {0: 0.1}, "b": {0: 0.2}}})
    assert found.methods == ["b", "a"] and (found.p, found.difference, found.groups) == (None, None, [])
    assert rank_methods({}).methods == []
