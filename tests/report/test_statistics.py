"""The statistics against values computed by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.report.statistics import (
    PairedComparison,
    Spread,
    band,
    compare_paired,
    histogram,
    mean_crossing,
    on_grid,
    over_seeds,
    over_seeds_reached,
    regular_grid,
    sign_flip,
    trailing_mean,
)
from freshet.runs.records import first_crossing


def test_median_and_extremes_over_seeds() -> None:
    assert over_seeds([0.3, 0.1, 0.2]) == Spread(0.2, 0.1, 0.3, 3, 3)
    assert over_seeds([4.0, 1.0]) == Spread(2.5, 1.0, 4.0, 2, 2)
    assert over_seeds([None, 7.0]) == Spread(7.0, 7.0, 7.0, 1, 2)
    assert over_seeds([]) == Spread(None, None, None, 0, 0)


def test_a_seed_that_misses_the_target_counts_as_latest() -> None:
    assert over_seeds_reached([30.0, None, 10.0]) == Spread(30.0, 10.0, 30.0, 2, 3)
    assert over_seeds_reached([30.0, None]) == Spread(None, 30.0, 30.0, 1, 2)
    assert over_seeds_reached([None, None, 5.0]).median is None
    assert over_seeds_reached([None]) == Spread(None, None, None, 0, 1)


def test_the_trailing_mean_needs_a_full_window() -> None:
    assert trailing_mean([1.0, 2.0, 3.0, 4.0], 3) == [None, None, 2.0, 3.0]
    assert trailing_mean([1.0, None, 3.0, 4.0, 5.0], 3) == [None, None, None, None, 4.0]


def test_crossing_of_the_five_point_mean_by_hand() -> None:
    times = [0, 10, 20, 30, 40, 50, 60]
    values = [0.0, 0.9, 0.5, 0.8, 0.8, 0.9, 1.0]
    # means: 40 s (0+.9+.5+.8+.8)/5 = 0.6, 50 s (.9+.5+.8+.8+.9)/5 = 0.78, 60 s (.5+.8+.8+.9+1)/5 = 0.8
    assert first_crossing(times, values, 0.8) == 10
    assert mean_crossing(times, values, 0.8) == 60
    assert mean_crossing(times, values, 0.78) == 50
    assert mean_crossing(times, values, 0.81) is None
    assert mean_crossing(times[:4], values[:4], 0.1) is None, "four points are no window of five"


def test_the_grid_takes_the_latest_model() -> None:
    assert on_grid([0, 4, 9, 10, 25], [1.0, 2.0, 3.0, 4.0, 5.0], [0, 10, 20, 30]) == [1.0, 4.0, 4.0, 5.0]
    assert on_grid([5], [1.0], [0, 10]) == [None, 1.0]
    assert regular_grid(10, 35) == [0, 10, 20, 30]
    assert regular_grid(0.1, 0.3) == pytest.approx([0, 0.1, 0.2, 0.3])


def test_bands_point_by_point() -> None:
    points = band([[1.0, 2.0], [3.0, None], [2.0, 4.0]])
    assert points == [Spread(2.0, 1.0, 3.0, 3, 3), Spread(3.0, 2.0, 4.0, 2, 3)]


def test_histogram_shares_with_empty_bins() -> None:
    assert histogram([1, 1, 4, 1]) == [(1, 0.75), (2, 0.0), (3, 0.0), (4, 0.25)]
    assert histogram([1, 2, 3, 5], width=2) == [(1, 0.5), (3, 0.25), (5, 0.25)]
    assert histogram([]) == []


def test_sign_flip_by_hand() -> None:
    # (1, 2, 3): sums of all sign patterns are ±6, ±4, ±2, 0, 0; only ±6 are as far out: 2 / 8
    assert sign_flip([1, 2, 3]) == 0.25
    # (1, -1): sums 0, 2, -2, 0; all are at least 0 away: 1
    assert sign_flip([1, -1]) == 1.0
    # (3, 1, -1): observed 3; sums ±3 (twice each), ±5, ±1: 6 of 8 are at least 3 away
    assert sign_flip([3, 1, -1]) == 0.75
    assert sign_flip([1] * 6) == 2 / 64
    assert sign_flip([0, 0]) == 1.0
    assert sign_flip([]) is None
    assert sign_flip([1] * 21) is None


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=7))
def test_sign_flip_is_a_p_value_that_ignores_the_direction(differences: list[float]) -> None:
    p = sign_flip(differences)
    assert p is not None
    assert 2 / 2 ** len(differences) <= p <= 1
    assert math.isclose(p, sign_flip([-d for d in differences]) or 0)


def test_pairs_are_made_by_seed() -> None:
    assert compare_paired({1: 0.9, 2: 0.8, 3: None}, {2: 0.7, 1: 0.6, 3: 0.1, 4: 0.2}) == PairedComparison(
        2, pytest.approx(0.2), 0.5
    )
    assert compare_paired({1: 0.9}, {2: 0.7}) == PairedComparison(0, None, None)
