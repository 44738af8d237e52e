"""The expected uploads of a run, against the definition and against runs."""

import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet import Federation, Fleet
from freshet.core.scheduling import Trigger
from freshet.sim.forecast import expected_uploads, round_seconds, trip_seconds, uploads_per_second

TRIPS = np.array([12.0, 3.0, 7.0, 30.0, 5.0, 5.0, 19.0])


def fleet_of(*seconds: float, **changes: Any) -> Fleet:
    n = len(seconds)
    return Fleet(np.array(seconds), np.full(n, 500.0), np.full(n, 2000.0), 0.3, 0.2, **changes)


def test_a_trip_is_download_training_and_upload():
    np.testing.assert_allclose(trip_seconds(fleet_of(10.0, 40.0), 1000), [10 + 0.2 + 0.5 + 0.3 + 2, 43.0])


@pytest.mark.parametrize("members", [1, 2, 5, 7])
def test_a_round_lasts_as_long_as_its_slowest_member_on_average(members: int):
    longest = [max(chosen) for chosen in combinations(TRIPS, members)]
    assert round_seconds(TRIPS, members) == pytest.approx(np.mean(longest), rel=1e-12)


def test_one_device_at_a_time_uploads_once_per_mean_trip_and_all_devices_each_at_their_own_rate():
    assert uploads_per_second(TRIPS, 7) == pytest.approx((1 / TRIPS).sum())
    many = np.tile(TRIPS, 1000)
    assert uploads_per_second(many, 1) == pytest.approx(1 / TRIPS.mean(), rel=1e-3)
    rates = [uploads_per_second(TRIPS, busy) for busy in range(1, 8)]
    assert rates == sorted(rates)


def test_the_requested_number_of_devices_is_busy():
    rate = uploads_per_second(np.full(40, 20.0), 30)
    assert rate * 20.0 == pytest.approx(30.0)


def test_rounds_need_no_estimate_and_the_earlier_end_counts():
    fleet, periodic = fleet_of(*[9.0] * 20), Trigger("periodic", 5, 10.0, 15)
    assert expected_uploads(fleet, periodic, 0, math.inf, rounds=8, worth=5) == 40
    assert expected_uploads(fleet, periodic, 0, 1009.5, rounds=0, worth=5) == 500  # 5 every 10 s, from the first on
    assert expected_uploads(fleet, periodic, 0, 1009.5, rounds=8, worth=5) == 40
    assert expected_uploads(fleet, periodic, 0, 109.5, rounds=80, worth=5) == 50
    assert expected_uploads(fleet, periodic, 0, 3.0, rounds=0, worth=5) == 0


def test_lost_uploads_do_not_count():
    whole, half = (fleet_of(*[9.0] * 20, loss=loss) for loss in (0.0, 0.5))
    concurrency = Trigger("concurrency", 5, 10.0, 10)
    counts = [expected_uploads(fleet, concurrency, 0, 500.0, 0, 10) for fleet in (whole, half)]
    assert counts[0] == pytest.approx(2 * counts[1], abs=1)


WORLDS = {
    "periodic, limited by in_flight": ("fedasync", {"in_flight": 4}, {}),
    "periodic, limited by the period": ("fedasync", {"period": 12.0}, {}),
    "concurrency": ("fedasync", {"trigger": "concurrency"}, {}),
    "concurrency, all devices": ("fedasync", {"trigger": "concurrency", "in_flight": 8}, {"ratio": 20.0}),
    "rounds": ("fedavg", {}, {}),
    "losses": ("fedasync", {}, {"loss": 0.3}),
}


@pytest.mark.parametrize("world", WORLDS)
def test_runs_make_about_as_many_uploads_as_expected(
    federate: Callable[..., Federation], tmp_path: Path, world: str
) -> None:
    method, run, fleet = WORLDS[world]
    federation = federate(method, run=run | {"eval_every": 400.0}, fleet=fleet, training={"epochs": 1})
    result = federation.run(400, out=tmp_path / "run")
    config = federation.config
    expected = expected_uploads(federation.fleet, config.trigger(), 4 * 650, 400.0, 0, config.run.per_round)
    assert result.summary["uploads"] == pytest.approx(expected, rel=0.15)
