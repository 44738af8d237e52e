"""Records of a log: lines, numbers, contributors and metrics."""

import json
from typing import Any

import pytest

from freshet.runs.records import Contributor, contributors, first_crossing, integer, number, parse_line


def part(device: Any, base: Any, staleness: Any, weight: Any) -> dict[str, Any]:
    return {"device": device, "base": base, "staleness": staleness, "weight": weight}


def test_one_upload_has_its_alpha() -> None:
    one = {"device": 4, "trip": 1, "contributions": [part(4, 2, 3, 0.7)], "alpha": 0.7}
    assert contributors(one) == [Contributor(4, 2, 3, 0.7)]


def test_the_uploads_of_a_round_have_their_shares() -> None:
    rounds = {"contributions": [part(2, 7, 1, 0.25), part(5, 7, 1, 0.75)], "alpha": 1.0}
    assert contributors(rounds) == [(2, 7, 1, 0.25), (5, 7, 1, 0.75)]


def test_the_uploads_of_a_buffer_share_the_step() -> None:
    buffer = {"contributions": [part(2, 9, 1, 0.5), part(5, 6, 4, 0.25)], "alpha": 1.5, "device": 5, "trip": 1}
    assert contributors(buffer) == [(2, 9, 1, 1.0), (5, 6, 4, 0.5)], "alpha = eta_g * sum of the weights"


def test_without_an_alpha_the_weights_are_unchanged() -> None:
    assert contributors({"contributions": [part(2, 9, 1, 0.5), part(5, 6, 4, 0.25)]}) == [
        (2, 9, 1, 0.5),
        (5, 6, 4, 0.25),
    ]


def test_an_empty_aggregation_has_no_contributors() -> None:
    assert contributors({"contributions": [], "alpha": 0.0}) == []
    assert contributors({}) == []


def test_missing_and_invalid_values_are_none() -> None:
    odd = {"contributions": [part(1, None, "x", "no"), part(True, 1.5, [], None), {}]}
    assert contributors(odd) == [(1, None, None, None), (None, None, None, None), (None, None, None, None)]
    assert contributors({"contributions": [7, "x"], "alpha": 1.0}) == contributors({"contributions": {}}) == []
    assert contributors({"contributions": [part(1, 1, 1, 0.5)], "alpha": "x"}) == [(1, 1, 1, 0.5)]


def test_first_crossing_is_the_first_value_at_or_above_the_target() -> None:
    assert first_crossing([0, 10, 20, 30], [0.1, 0.8, 0.7, 0.9], 0.8) == 10
    assert first_crossing([0, 10], [0.1, None], 0.8) is None
    assert first_crossing([], [], 0.8) is None


@pytest.mark.parametrize("value", [None, True, "1", [1], float("nan"), float("inf"), 10**400])
def test_values_that_are_not_finite_numbers_are_none(value: object) -> None:
    assert number(value) is None and integer(value) is None
    assert (number(3), integer(3), integer(3.0), integer(2**53)) == (3.0, 3, None, None)


@pytest.mark.parametrize("value", [0.1, 1e-320, 5e-324, 1.7976931348623157e308, 2**53 + 1, -1.0, 0.30000000000000004])
def test_a_number_reads_back_unchanged(value: float) -> None:
    line = json.dumps({"a": value}).encode()
    assert parse_line(line) == {"a": value} and type((parse_line(line) or {})["a"]) is type(value)


def test_unusual_lines_are_read() -> None:
    assert parse_line(b'{"a": NaN}\n') != {} and parse_line(b'{"a": %s}' % (b"9" * 400)) == {"a": int("9" * 400)}


@pytest.mark.parametrize("line", [b"", b"nonsense", b"[1]", b"3", b'{"a": 1', b"[" * 100_000, b'{"a": "\xff"}'])
def test_an_invalid_line_is_none(line: bytes) -> None:
    assert parse_line(line) is None
