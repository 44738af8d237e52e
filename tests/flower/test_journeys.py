"""Where the time of a trip goes: every second of it is in one phase."""

import math

import numpy as np
import pytest

from freshet.core.messages import Assignment
from freshet.flower.driver import LiveTrip

TIMING = {"start": 1.0, "import": 2.0, "load": 0.5, "train": 4.0, "fresh": 0.25, "began": 103.0, "cpu": 3.0}


def journey(**given: object) -> LiveTrip:
    assignment = Assignment(0, 1, 1, 1, np.zeros(1, np.float32), 5, 0.1)
    made = LiveTrip(assignment, "ticket", 0.0)
    made.wall_start = 100.0
    for name, value in given.items():
        setattr(made, name, value)
    return made


def test_what_the_device_does_not_account_for_are_messages() -> None:
    found = journey().durations(12.0, TIMING)
    assert found["messages"] == pytest.approx(12.0 - 7.75)
    assert (found["down"], found["up"]) == (3.0, pytest.approx(1.25))  # its process began 3 s after the trip
    phases = ("down", "start", "import", "load", "train", "fresh", "up")
    assert sum(found[phase] for phase in phases) == pytest.approx(found["whole"]) and found["cpu"] == 3.0


def test_both_messages_of_a_trip_count() -> None:
    first = {"start": 1.0, "import": 2.0, "load": 0.5, "train": 1.0, "began": 101.0}
    found = journey(spent=first).durations(20.0, TIMING | {"began": 111.0})
    assert (found["start"], found["import"], found["train"], found["down"]) == (2.0, 4.0, 5.0, 1.0)


@pytest.mark.parametrize(("began", "down"), [(50.0, 0.0), (1e12, 4.25), (math.nan, 0.0), (math.inf, 4.25)])
def test_clocks_that_disagree_change_nothing_but_the_share_of_the_two_ways(began: float, down: float) -> None:
    found = journey().durations(12.0, TIMING | {"began": began})
    assert found["down"] == pytest.approx(down) and found["down"] + found["up"] == pytest.approx(4.25)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 1e9])
def test_a_phase_that_makes_no_sense_is_left_out(value: float) -> None:
    found = journey().durations(12.0, TIMING | {"train": value})
    assert "train" not in found and found["messages"] == pytest.approx(12.0 - 3.75)
