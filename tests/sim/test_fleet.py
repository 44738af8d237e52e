"""The fleet: speeds between the two ends, links, availability, loss, and what takes time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from freshet.errors import ConfigError
from freshet.runs.reader import RunDirectory
from freshet.sim.fleet import Fleet, FleetOptions

modest = settings(deadline=None, max_examples=60)


@modest
@given(st.integers(2, 60), st.floats(0.1, 100), st.floats(1, 500), st.integers(0, 10**6))
def test_speeds_lie_between_the_two_ends_and_include_them(devices, fastest, ratio, seed):
    seconds = Fleet.draw(FleetOptions(devices=devices, fastest=fastest, ratio=ratio), seed).train_seconds
    assert seconds.min() == fastest
    assert seconds.max() == fastest * ratio
    assert len(seconds) == devices


def test_ratio_1_makes_all_equal():
    assert (Fleet.draw(FleetOptions(devices=20, fastest=3.0, ratio=1.0), 0).train_seconds == 3.0).all()


def test_a_single_device_is_the_fastest():
    assert Fleet.draw(FleetOptions(devices=1, fastest=3.0, ratio=9.0), 0).train_seconds.tolist() == [3.0]


def test_speeds_are_uniform_between_the_ends():
    seconds = Fleet.draw(FleetOptions(devices=4000, fastest=10.0, ratio=5.0), 0).train_seconds
    counts, _ = np.histogram(seconds, bins=8, range=(10.0, 50.0))
    assert np.abs(counts - 500).max() < 100  # 4.8 standard deviations


def test_the_same_seed_draws_the_same_fleet():
    options = FleetOptions(devices=20, link_ratio=4.0)
    one, two, other = Fleet.draw(options, 1), Fleet.draw(options, 1), Fleet.draw(options, 2)
    np.testing.assert_array_equal(one.train_seconds, two.train_seconds)
    np.testing.assert_array_equal(one.up_rate, two.up_rate)
    assert (one.train_seconds != other.train_seconds).any()


def test_a_leg_takes_latency_plus_bytes_over_bandwidth():
    options = FleetOptions(devices=2, up_mbps=8.0, down_mbps=80.0, up_latency=0.25, down_latency=0.5)
    fleet = Fleet.draw(options, 0)
    assert fleet.upload_seconds(0, 2_000_000) == pytest.approx(0.25 + 2.0)
    assert fleet.download_seconds(0, 2_000_000) == pytest.approx(0.5 + 0.2)


def test_link_ratio_bounds_the_worst_link():
    fleet = Fleet.draw(FleetOptions(devices=500, up_mbps=8.0, link_ratio=10.0), 0)
    assert 1e5 <= fleet.up_rate.min() < fleet.up_rate.max() <= 1e6
    np.testing.assert_allclose(fleet.up_rate / 8, fleet.down_rate / 50)


def test_by_default_a_device_is_always_available_and_loses_nothing():
    fleet = Fleet.draw(FleetOptions(devices=3), 0)
    assert fleet.available(1, 1e9)
    assert fleet.leave_time(1, 0.0) == float("inf")
    assert not any(fleet.is_lost(0, trip) for trip in range(100))


def on_off(**changes) -> Fleet:
    options = {"devices": 40, "on_seconds": 30.0, "off_seconds": 10.0}
    return Fleet.draw(FleetOptions(**(options | changes)), 3)


def test_devices_are_available_for_their_share_of_the_time():
    fleet = on_off()
    grid = np.arange(0.5, 2000, 1.0)
    share = np.mean([[fleet.available(device, time) for time in grid] for device in range(len(fleet))])
    assert share == pytest.approx(0.75, abs=0.03)
    at_start = np.mean([on_off(devices=1000).available(device, 0.0) for device in range(1000)])
    assert at_start == pytest.approx(0.75, abs=0.06)


def test_a_device_is_available_until_its_leave_time_and_away_then():
    fleet = on_off()
    for device in range(10):
        for time in np.linspace(0, 300, 40):
            leaves = fleet.leave_time(device, time)
            assert leaves > time
            if fleet.available(device, time):
                assert all(fleet.available(device, t) for t in np.linspace(time, leaves, 7)[:-1])
                assert not fleet.available(device, leaves)


def test_availability_does_not_depend_on_the_order_of_queries():
    ahead, back = on_off(), on_off()
    times = [float(t) for t in np.linspace(0, 500, 60)]
    forwards = [ahead.available(5, t) for t in times]
    assert forwards == [back.available(5, t) for t in reversed(times)][::-1]


def test_uploads_are_lost_at_the_given_rate_and_the_same_ones_every_time():
    fleet, again = on_off(loss=0.2), on_off(loss=0.2)
    lost = [[fleet.is_lost(device, trip) for trip in range(100)] for device in range(40)]
    assert np.mean(lost) == pytest.approx(0.2, abs=0.025)
    assert lost[7][::-1] == [again.is_lost(7, trip) for trip in reversed(range(100))]


def test_links_of_rate_0_cost_no_time_and_leave_the_draws_as_they_are():
    options = FleetOptions(devices=5, up_mbps=0.0, down_mbps=0.0, up_latency=0.0, down_latency=0.25, link_ratio=3.0)
    fleet = Fleet.draw(options, 3)
    assert [fleet.upload_seconds(device, 10**12) for device in range(5)] == [0.0] * 5
    assert [fleet.download_seconds(device, 10**12) for device in range(5)] == [0.25] * 5
    assert np.array_equal(fleet.train_seconds, Fleet.draw(FleetOptions(devices=5), 3).train_seconds)


@pytest.mark.parametrize(
    "bad",
    [
        {"devices": 0},
        {"ratio": 0.99},
        {"fastest": 0.0},
        {"loss": 1.0},
        {"loss": -0.1},
        {"up_mbps": -1.0},
        {"down_latency": -1.0},
        {"on_seconds": 5.0},
        {"off_seconds": 5.0},
        {"ratio": float("nan")},
        {"ratio": "5"},
    ],
)
def test_an_impossible_fleet_is_rejected(bad):
    with pytest.raises(ValidationError):
        FleetOptions(**bad)


# ---- fleets given from Python


def test_lists_and_single_numbers_are_accepted():
    fleet = Fleet([1, 2, 3], up_rate=1e6, down_rate=(1e6, 2e6, 3e6))
    assert fleet.train_seconds.dtype == np.float64
    assert fleet.up_rate.tolist() == [1e6] * 3
    assert fleet.epoch_seconds(2, 3) == 1.0
    assert fleet.download_seconds(1, 2_000_000) == 1.0


BAD_FLEETS = {
    "a wrong length": ({"up_rate": [1.0]}, "fleet.up_rate: has 1 numbers, but train_seconds has 2; one per device"),
    "negative": (
        {"train_seconds": [1.0, -2.0]},
        "fleet.train_seconds: must be positive and finite, but device 1 has -2",
    ),
    "zero": ({"down_rate": [0.0, 1.0]}, "fleet.down_rate: must be positive, but device 0 has 0"),
    "NaN": ({"train_seconds": [np.nan, 1.0]}, "device 0 has nan"),
    "infinity": ({"train_seconds": [1.0, np.inf]}, "device 1 has inf"),
    "no devices": ({"train_seconds": []}, "must be one number per device"),
    "a table": ({"train_seconds": [[1.0, 2.0]]}, "but its shape is (1, 2)"),
    "texts": ({"train_seconds": ["fast", "slow"]}, "fleet.train_seconds: must be one number per device"),
    "ragged": ({"up_rate": [[1.0], [1.0, 2.0]]}, "fleet.up_rate: must be one number per device"),
    "a single number of seconds": ({"train_seconds": 3.0}, "but its shape is ()"),
    "a negative start": ({"start_seconds": [0.0, -1.0]}, "fleet.start_seconds: must be positive and finite"),
    "a negative latency": ({"up_latency": -0.1}, "fleet.up_latency: must be a finite number from 0"),
    "a missing latency": ({"down_latency": None}, "fleet.down_latency: must be a finite number from 0"),
    "a loss above 1": ({"loss": 1.5}, "fleet.loss: must be a probability in 0..1"),
    "on without off": ({"on_seconds": 5.0}, "must both be 0"),
    "a negative seed": ({"seed": -1}, "fleet.seed: must be a whole number from 0"),
}


@pytest.mark.parametrize("case", BAD_FLEETS)
def test_a_bad_fleet_is_one_sentence(case):
    changes, message = BAD_FLEETS[case]
    with pytest.raises(ConfigError) as caught:
        Fleet(**({"train_seconds": [1.0, 2.0], "up_rate": [1.0, 1.0], "down_rate": [1.0, 1.0]} | changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- fleet.time: what takes virtual time


def measure_training_seconds(federation, folder) -> dict[int, float]:
    """Seconds between a device's first model and its first upload, less the two links."""
    federation.run(400, out=folder)
    triggered, seconds, fleet, size = {}, {}, federation.fleet, 4 * 650
    for event in RunDirectory(folder).events():
        device = event.get("device")
        if event["kind"] == "trigger":
            triggered[device] = event["time"]
        if event["kind"] == "upload" and device not in seconds:
            seconds[device] = (
                event["time"]
                - triggered[device]
                - fleet.download_seconds(device, size)
                - fleet.upload_seconds(device, size)
            )
    return seconds


def build(federate, time: str, **training):
    fleet = {"time": time, "ratio": 3.0}
    return federate("fedavg", fleet=fleet, training=training, run={"per_round": 8, "eval_every": 400.0})


@pytest.mark.parametrize(("epochs", "share"), [(1, 0.2), (5, 1.0), (20, 4.0)])
def test_time_is_proportional_to_work_by_default(federate, tmp_path, epochs, share):
    """A device's seconds are for five epochs of an average shard."""
    own = Fleet.draw(federate("fedavg", fleet={"ratio": 3.0}).config.fleet, 0).train_seconds
    federation = build(federate, "work", epochs=epochs)
    sizes = np.array([len(shard) for shard in federation.shards])
    seconds = measure_training_seconds(federation, tmp_path / "run")
    assert len(seconds) == 8 and sizes.max() > 2 * sizes.min()
    for device, took in seconds.items():
        assert took == pytest.approx(share * own[device] * sizes[device] / sizes.mean(), rel=1e-9)


@pytest.mark.parametrize("epochs", [1, 5, 20])
def test_with_time_trip_every_trip_takes_the_devices_seconds(federate, tmp_path, epochs):
    federation = build(federate, "trip", epochs=epochs)
    for device, took in measure_training_seconds(federation, tmp_path / "run").items():
        assert took == pytest.approx(federation.fleet.train_seconds[device], rel=1e-9)


def test_local_steps_take_time_in_proportion_to_the_batch(federate, tmp_path):
    own = Fleet.draw(federate("fedavg", fleet={"ratio": 3.0}).config.fleet, 0).train_seconds
    federation = build(federate, "work", epochs=4, steps=30, batch_size=5)
    average = np.mean([len(shard) for shard in federation.shards])
    for device, took in measure_training_seconds(federation, tmp_path / "run").items():
        assert took == pytest.approx(own[device] * 30 * 5 / (5 * average), rel=1e-9)


def test_seconds_of_a_fleet_from_python_are_not_scaled(federate):
    fleet = Fleet([5.0] * 8, 1e6, 1e6)
    federation = federate("fedavg", fleet=fleet, training={"epochs": 20})
    assert federation.config.fleet.time == "trip"
    assert federation.fleet.train_seconds.tolist() == [5.0] * 8


def test_the_cells_of_the_paper_use_time_trip():
    from freshet.paper.cells import CELLS, cell_tables

    assert {cell_tables(cell, "fedavg")["fleet"]["time"] for cell in CELLS.values()} == {"trip"}
