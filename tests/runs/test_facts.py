"""What a log's lines say, read in one place."""

import pytest

from freshet.runs.facts import Contributor, contributors, first_crossing, number, whole


def test_one_upload_has_the_events_own_numbers() -> None:
    assert contributors({"device": 4, "base": 2, "staleness": 3, "alpha": 0.5}) == [Contributor(4, 2, 3, 0.5)]


def test_a_rounds_members_share_base_and_staleness() -> None:
    rounds = {"devices": [2, 5], "base": 7, "staleness": 1, "alpha": 1.0, "weights": [0.25, 0.75]}
    assert contributors(rounds) == [(2, 7, 1, 0.25), (5, 7, 1, 0.75)]


def test_members_of_a_buffer_have_their_own_and_share_the_step() -> None:
    buffer = {"devices": [2, 5], "bases": [9, 6], "stalenesses": [1, 4], "alpha": 1.5, "weights": [0.5, 0.25]}
    found = contributors(buffer | {"device": 5, "trip": 1, "base": 6, "staleness": 4})
    assert found == [(2, 9, 1, 1.0), (5, 6, 4, 0.5)], "alpha = eta_g * sum of the weights"


def test_an_aggregation_of_nobody_has_no_contributors() -> None:
    assert contributors({"devices": [], "alpha": 0.0, "weights": []}) == []
    assert contributors({}) == []


def test_what_is_missing_or_makes_no_sense_is_none() -> None:
    assert contributors({"devices": [1, "x"], "weights": ["no"]}) == [(1, None, None, None), (None, None, None, None)]
    assert contributors({"devices": [1], "staleness": 3, "stalenesses": [1, 2]}) == [(1, None, None, None)]
    assert contributors({"device": True, "staleness": 1.5, "alpha": "x"}) == [(None, None, None, None)]


def test_first_crossing_is_the_first_value_at_or_above_the_target() -> None:
    assert first_crossing([0, 10, 20, 30], [0.1, 0.8, 0.7, 0.9], 0.8) == 10
    assert first_crossing([0, 10], [0.1, None], 0.8) is None
    assert first_crossing([], [], 0.8) is None


@pytest.mark.parametrize("value", [None, True, "1", [1], float("nan"), float("inf"), 10**400])
def test_what_is_no_finite_number(value: object) -> None:
    assert number(value) is None and whole(value) is None
    assert (number(3), whole(3), whole(3.0), whole(2**53)) == (3.0, 3, None, None)
