"""The close-up of a run shows the fleet that the run had, be it drawn or given from Python."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from freshet import Federation, Result
from freshet.report.closeup import closeup
from freshet.report.reading import RunFollower, read
from freshet.sim.fleet import Fleet

from .conftest import Write

SECONDS = np.array([3.0, 31.0, 5.5, 7.25, 12.0, 2.0, 9.0, 21.0])


def test_a_fleet_given_from_python_is_shown_with_its_own_seconds(
    federate: Callable[..., Federation], tmp_path: Path
) -> None:
    fleet = Fleet(SECONDS, np.full(8, 6e3), np.full(8, 2.5e3), up_latency=0.1, down_latency=0.2)
    result = federate("fedasmu", fleet=fleet).run(60, out=tmp_path / "run")
    found = closeup(read(result.directory))
    (trace,) = found["alpha"]["data"]
    devices = [device for device, _ in trace["customdata"]]
    assert len(set(devices)) > 1
    assert trace["marker"]["color"] == [round(float(SECONDS[device]), 1) for device in devices]
    assert trace["marker"]["colorbar"]["title"]["text"] == "training time (s)"
    assert found["timeline"]["seconds"] == SECONDS.tolist()
    assert found["timeline"]["legs"], "the run's own fleet explains its log"


def test_the_data_on_the_devices_are_those_of_the_run(finished: Callable[[str], Result]) -> None:
    run = read(finished("fedavg").directory)
    figure = closeup(run)["partition"]
    counts = np.array(figure["data"][0]["z"]).T
    assert counts.shape == (8, 10) and counts.sum() == 240
    logged = next(e for e in run.events if e["kind"] == "aggregate" and e["contributions"])
    devices = [part["device"] for part in logged["contributions"]]
    assert counts.sum(axis=1)[devices].tolist() == logged["samples"]


def test_data_given_from_python_are_shown_too(written: Write) -> None:
    figure = closeup(read(written("a")))["partition"]
    assert figure["data"][0]["z"] == [[3, 3], [2, 2]]
    assert figure["layout"]["yaxis"]["ticktext"] == ["cat", "dog"]


def test_without_a_world_weights_are_coloured_by_device_and_it_is_said(written: Write) -> None:
    part = {"device": 1, "base": 1, "staleness": 2, "weight": 0.5}
    place = written("old", events=[{"time": 1.0, "kind": "aggregate", "contributions": [part], "alpha": 0.5}])
    assert closeup(read(place))["alpha"]["data"][0]["marker"]["color"] == [10.0]
    (place / "world.json").unlink()
    run = read(place)
    found = closeup(run)
    marker = found["alpha"]["data"][0]["marker"]
    assert (marker["color"], marker["colorbar"]["title"]["text"]) == ([1], "device")
    assert found["partition"] is None
    assert run.notes == [
        "there is no world.json; the devices' speeds, the legs of their trips and their data are not shown"
    ]


def test_a_broken_world_is_said_in_one_sentence_and_not_used(written: Write) -> None:
    place = written("broken", world={"loss": "high"})
    run = read(place)
    assert run.world is None and closeup(run)["partition"] is None
    assert run.notes == [f"{place / 'world.json'} cannot be used: loss must be a number from 0 to 1"]


def test_a_world_that_comes_while_a_run_is_watched_is_taken_in(written: Write) -> None:
    place = written("new", status=None)
    world = (place / "world.json").rename(place / "later")
    reader = RunFollower(place)
    assert reader.refresh() and reader.data().world is None
    assert not reader.refresh()
    world.rename(place / "world.json")
    assert reader.refresh() and reader.data().world is not None
    assert reader.data().notes == []
