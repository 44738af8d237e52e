"""What takes virtual time: work (steps x batch), or a whole trip whatever it does."""

import numpy as np
import pytest

from freshet import Fleet
from freshet.runs.reader import RunDirectory


def trained_seconds(federation, folder) -> dict[int, float]:
    """Seconds between a device's first model and its first upload, less the two links."""
    federation.run(400, out=folder)
    begun, seconds, fleet, size = {}, {}, federation.fleet, 4 * 650
    for event in RunDirectory(folder).events():
        device = event.get("device")
        if event["kind"] == "trigger":
            begun[device] = event["time"]
        if event["kind"] == "upload" and device not in seconds:
            seconds[device] = event["time"] - begun[device] - fleet.down(device, size) - fleet.up(device, size)
    return seconds


def made(federate, time: str, **training):
    fleet = {"time": time, "ratio": 3.0}
    return federate("fedavg", fleet=fleet, training=training, run={"per_round": 8, "eval_every": 400.0})


@pytest.mark.parametrize(("epochs", "share"), [(1, 0.2), (5, 1.0), (20, 4.0)])
def test_time_follows_the_work_by_default(federate, tmp_path, epochs, share):
    """A device's seconds are those of five epochs of an average shard."""
    own = Fleet.draw(federate("fedavg", fleet={"ratio": 3.0}).config.fleet, 0).train_seconds
    federation = made(federate, "work", epochs=epochs)
    sizes = np.array([len(shard) for shard in federation.shards])
    seconds = trained_seconds(federation, tmp_path / "run")
    assert len(seconds) == 8 and sizes.max() > 2 * sizes.min()
    for device, took in seconds.items():
        assert took == pytest.approx(share * own[device] * sizes[device] / sizes.mean(), rel=1e-9)


@pytest.mark.parametrize("epochs", [1, 5, 20])
def test_a_trip_takes_the_devices_seconds_where_that_is_asked_for(federate, tmp_path, epochs):
    federation = made(federate, "trip", epochs=epochs)
    for device, took in trained_seconds(federation, tmp_path / "run").items():
        assert took == pytest.approx(federation.fleet.train_seconds[device], rel=1e-9)


def test_local_steps_take_time_by_the_batch(federate, tmp_path):
    own = Fleet.draw(federate("fedavg", fleet={"ratio": 3.0}).config.fleet, 0).train_seconds
    federation = made(federate, "work", epochs=4, steps=30, batch_size=5)
    average = np.mean([len(shard) for shard in federation.shards])
    for device, took in trained_seconds(federation, tmp_path / "run").items():
        assert took == pytest.approx(own[device] * 30 * 5 / (5 * average), rel=1e-9)


def test_a_fleet_from_python_means_what_it_says(federate):
    fleet = Fleet([5.0] * 8, 1e6, 1e6)
    federation = federate("fedavg", fleet=fleet, training={"epochs": 20})
    assert federation.config.fleet.time == "trip"
    assert federation.fleet.train_seconds.tolist() == [5.0] * 8


def test_the_papers_cells_take_its_time():
    from freshet.paper.cells import CELLS, cell_tables

    assert {cell_tables(cell, "fedavg")["fleet"]["time"] for cell in CELLS.values()} == {"trip"}
