"""The fleet of a deployment in virtual time: every phase of a trip takes its measured time."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from freshet import Fleet
from freshet.cli.app import app
from freshet.core.messages import CONTROL_BYTES
from freshet.errors import ConfigError
from freshet.report.reading import read
from freshet.report.trips import trips_of
from freshet.runs.reader import RunDirectory
from freshet.runs.world import read_world, write_world

DEVICES, FRESH = 8, 0.25
START = np.arange(DEVICES) + 3.0
TRAIN = np.arange(DEVICES) / 4 + 5.0
UP = np.arange(DEVICES) / 8 + 1.0


@pytest.fixture
def deployed(tmp_path: Path) -> Path:
    """The run directory of a deployment, with a different duration for every device."""
    out = tmp_path / "real"
    sizes = ["data.train_samples=200", "data.test_samples=50", "run.trigger=concurrency", f"run.in_flight={DEVICES}"]
    small = [word for each in [*sizes, f"fleet.devices={DEVICES}", "run.eval_every=50"] for word in ("-s", each)]
    run("-m", "fedasmu", "--until", "100", *small, "--out", str(out))
    world = read_world(out)
    assert world is not None
    rates = (world.model_bytes / UP).tolist()
    measured = {"start_seconds": START.tolist(), "train_seconds": TRAIN.tolist(), "up_rate": rates}
    measured |= {"down_rate": [np.inf] * DEVICES, "up_latency": 0.0, "down_latency": FRESH}
    write_world(out, replace(world, **measured))
    return out


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["run", *words, "--executor", "serial", "-q"])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_trip_takes_start_training_fresh_model_and_upload(deployed: Path, tmp_path: Path) -> None:
    run("--fleet-from", str(deployed), "--out", str(tmp_path / "sim"))
    world = read_world(tmp_path / "sim")
    assert world is not None
    size, triggered, requested, seen = world.model_bytes, {}, {}, set()
    for event in RunDirectory(tmp_path / "sim").events():
        device = event.get("device")
        if event["kind"] == "trigger":
            triggered[device] = event["time"]
        if event["kind"] == "request":
            requested[device] = event["time"]
        if event["kind"] == "upload":
            request = CONTROL_BYTES / size * UP[device]  # as a share of an upload
            took = FRESH + START[device] + TRAIN[device] + request + FRESH + UP[device]
            assert event["time"] - triggered[device] == pytest.approx(took)
            assert requested[device] - triggered[device] >= FRESH + START[device]
            seen.add(device)
    assert seen == set(range(DEVICES))
    legs = [trip.train - trip.start for trip in trips_of(read(tmp_path / "sim")) if trip.train is not None]
    assert sorted(set(np.round(legs, 6))) == sorted(np.round(START + FRESH, 6)), "the report shows them"


def test_settings_come_from_the_deployment_unless_given(deployed: Path, tmp_path: Path) -> None:
    run("--fleet-from", str(deployed), "--out", str(tmp_path / "same"))
    run("--fleet-from", str(deployed), "-m", "fedasync", "--until", "60", "--out", str(tmp_path / "other"))
    mine, same, other = (RunDirectory(path).config() for path in (deployed, tmp_path / "same", tmp_path / "other"))
    assert same["fleet"].pop("measured") == str(deployed) and mine["fleet"].pop("measured") == ""
    assert same["fleet"] == mine["fleet"] and same["method"] == mine["method"] and same["run"]["until"] == 100.0
    assert other["method"]["name"] == "fedasync" and other["run"]["until"] == 60.0
    world = read_world(tmp_path / "other")
    assert world is not None and world.start_seconds == START.tolist() and world.train_seconds == TRAIN.tolist()


def test_a_run_without_measured_devices_is_one_sentence(deployed: Path) -> None:
    options = Fleet.draw.__annotations__["options"](devices=DEVICES, measured=str(deployed))
    assert Fleet.draw(options, 0).start_seconds.tolist() == START.tolist()
    with pytest.raises(ConfigError, match="devices"):
        Fleet.draw(options.model_copy(update={"devices": 3}), 0)
    world = read_world(deployed)
    assert world is not None
    write_world(deployed, replace(world, train_seconds=[0.0, *TRAIN.tolist()[1:]]))
    with pytest.raises(ConfigError, match="device 0 has not completed a trip"):
        Fleet.draw(options, 0)
    (deployed / "world.json").unlink()
    with pytest.raises(ConfigError, match=r"no world\.json"):
        Fleet.draw(options, 0)
