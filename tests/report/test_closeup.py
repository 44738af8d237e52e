"""The close-up of a run: numbers from its log, its fleet, and the accuracy on its devices."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from freshet import Federation, Result
from freshet.report.closeup import (
    _with_still_axis,
    bands,
    chooser_shares,
    closeup,
    controls,
    device_accuracies,
    devices_figures,
    slot_shares,
    weighted_uploads,
)
from freshet.report.plots import stalenesses
from freshet.report.reading import RunData, RunFollower, read
from freshet.report.trips import trips_of
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


def test_without_a_world_weights_are_coloured_by_device_with_a_note(written: Write) -> None:
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


def test_a_broken_world_is_one_note_and_not_used(written: Write) -> None:
    place = written("broken", world={"loss": "high"})
    run = read(place)
    assert run.world is None and closeup(run)["partition"] is None
    assert run.notes == [f"{place / 'world.json'} cannot be used: loss must be a number from 0 to 1"]


def test_a_world_written_while_a_run_is_watched_is_read(written: Write) -> None:
    place = written("new", status=None)
    world = (place / "world.json").rename(place / "later")
    reader = RunFollower(place)
    assert reader.refresh() and reader.data().world is None
    assert not reader.refresh()
    world.rename(place / "world.json")
    assert reader.refresh() and reader.data().world is not None
    assert reader.data().notes == []


def test_staleness_agrees_with_the_summary(finished: Callable[[str], Result]) -> None:
    for method in ("fedasmu", "fedavg"):
        result = finished(method)
        assert fmean(stalenesses(read(result.directory))) == pytest.approx(result.summary["mean_staleness"])


def test_weights_agree_with_the_log(finished: Callable[[str], Result]) -> None:
    run = read(finished("fedasmu").directory)
    logged = [e for e in run.events if e["kind"] == "aggregate"]
    assert [(w.device, w.staleness, w.alpha) for w in weighted_uploads(run)] == [
        (e["device"], e["contributions"][0]["staleness"], e["alpha"]) for e in logged
    ]


def listed(run: RunData) -> dict[str, dict[int, list[tuple[float, float]]]]:
    return {name: {device: list(track) for device, track in by.items()} for name, by in controls(run).items()}


def test_controls_by_device(written: Write, finished: Callable[[str], Result]) -> None:
    events = [
        {"time": 1.0, "kind": "aggregate", "device": 0, "lambda": 1.0, "sigma": [0.5]},
        {"time": 2.0, "kind": "aggregate", "device": 1, "lambda": 3.0},
        {"time": 3.0, "kind": "aggregate", "device": 0, "lambda": 2.0},
        {"time": 4.0, "kind": "merge", "device": 0, "gamma": 1.0, "gamma_after": 1.5},
    ]
    found = listed(read(written("a", events=events)))
    assert found == {"lambda": {0: [(1.0, 1.0), (3.0, 2.0)], 1: [(2.0, 3.0)]}, "gamma": {0: [(4.0, 1.5)]}}
    fleet = bands(found["lambda"], end=4.0, points=4)
    assert (fleet.times, fleet.middle) == ([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 2.5, 2.5])
    assert (fleet.low, fleet.high) == ([1.0, 1.0, 2.0, 2.0], [1.0, 3.0, 3.0, 3.0])
    assert set(controls(read(finished("fedasmu").directory))) == {"lambda", "sigma", "iota", "gamma", "upsilon"}


HEAT = ["warmth", "upload", "heat", "h", "of the device"]


def test_the_run_directory_names_the_curves(written: Write) -> None:
    events = [{"time": 1.0, "kind": "upload", "device": 3, "heat": 7, "lambda": 1.0}]
    assert controls(read(written("a", method="mine:Mine", events=events))) == {}  # nothing is imported to find out
    world = {"curves": [HEAT, ["none", "merge", *HEAT[2:]]]}
    run = read(written("b", method="mine:Mine", events=events, world=world))
    assert listed(run) == {"warmth": {3: [(1.0, 7.0)]}}
    (figure,) = closeup(run)["controls"]
    assert (figure["name"], figure["symbol"], figure["meaning"]) == ("warmth", "h", "of the device")


@pytest.mark.parametrize("damaged", ["x", [1], {}, [["warmth"]], None, [[["x"], *HEAT[1:]]]])
def test_a_damaged_description_of_curves_draws_nothing(written: Write, damaged: Any) -> None:
    events = [{"time": 1.0, "kind": "upload", "device": 3, "heat": 7}]
    run = read(written("a", method="mine:Mine", events=events, world={"curves": damaged}))
    assert controls(run) == {}
    assert any("curves must be" in note for note in run.notes)


def test_slots_over_time(written: Write, finished: Callable[[str], Result]) -> None:
    trigger = {"kind": "trigger", "version": 1, "epochs": 5}
    chosen = [(0.0, 1, "q"), (1.0, 2, "meta"), (9.0, 2, "meta"), (10.0, 2, "<b>")]
    events = []
    for device, (time, slot, by) in enumerate(chosen):
        who = {"time": time, "device": device, "trip": 1}
        events += [trigger | who, {"kind": "request", "slot": slot, "slot_by": by, "fresh": None} | who]
    run = read(written("a", events=events, accuracy=[0.1, 0.2], fleet={"devices": 4}))
    slots = slot_shares(run, trips_of(run), bins=2)
    assert slots is not None
    assert (slots.edges, slots.counts) == ([0.0, 5.0, 10.0], {"1": [1, 0], "2": [1, 2]})
    who = chooser_shares(run, trips_of(run), bins=2)
    assert who is not None
    assert who.counts == {"meta": [1, 1], "q": [1, 0]}
    plain = read(finished("fedavg").directory)
    assert slot_shares(plain, trips_of(plain)) is None


def test_a_closeup_of_an_empty_run_is_empty(written: Write) -> None:
    place = written("a", accuracy=[], status=None)
    (place / "world.json").unlink()
    found = closeup(read(place))
    assert found.pop("clock") == "virtual time"
    assert found == {key: [] if key == "controls" else None for key in found}


def sounded(time: float, accuracy: list[Any], **more: Any) -> dict[str, Any]:
    return {"time": time, "kind": "devices", "version": 2, "accuracy": accuracy, **more}


SPEEDS = {"train_seconds": [10.0, 20.0, 40.0], "samples": [5, 5, 5]}
FLEET = {"fleet": {"devices": 3}, "world": SPEEDS}


def test_bands_are_percentiles_over_the_devices(written: Write) -> None:
    values = [0.1, 0.5, 0.9]
    run = read(written("a", events=[sounded(0.0, [0.2] * 3), sounded(10.0, values)], **FLEET))
    figure = devices_figures(run)["band"]
    worst, best, low, high, middle = figure["data"]
    assert [trace["x"] for trace in figure["data"]] == [[0.0, 10.0]] * 5
    expected = [100 * np.quantile(values, q) for q in (0.0, 1.0, 0.1, 0.9, 0.5)]
    assert [trace["y"][1] for trace in (worst, best, low, high, middle)] == pytest.approx(expected)
    assert (best["fill"], high["fill"]) == ("tonexty", "tonexty")


def test_scatters_hold_a_point_per_device_with_a_score(written: Write) -> None:
    last = sounded(10.0, [0.1, None, 0.9], personal_accuracy=[0.3, None, 1.0])
    figures = devices_figures(read(written("a", events=[sounded(0.0, [0.0, 0.0, 0.0]), last], **FLEET)))
    plain, personal = figures["speed"]["data"]
    assert (plain["x"], plain["y"], plain["customdata"]) == ([10.0, 40.0], [10.0, 90.0], [0, 2])
    assert personal["y"] == [30.0, 100.0]
    assert plain["marker"]["color"] == [5, 5]
    assert figures["samples"]["data"][0]["x"] == [5, 5]
    assert [trace["name"] for trace in figures["band"]["data"][-2:]] == ["median, personalised", "worst, personalised"]
    json.dumps(figures, allow_nan=False)


def test_without_device_evaluations_there_is_no_figure(written: Write) -> None:
    assert closeup(read(written("a")))["devices"] is None


def test_without_the_fleet_there_are_bands_only(written: Write) -> None:
    place = written("a", events=[sounded(0.0, [0.5, 0.6])])
    (place / "world.json").unlink()
    figures = devices_figures(read(place))
    assert figures["band"] is not None
    assert (figures["speed"], figures["samples"]) == (None, None)


@pytest.mark.parametrize("accuracy", [None, "high", [], ["x"], [None], {"a": 1}])
def test_damaged_lists_count_as_missing(accuracy: Any, written: Write) -> None:
    run = read(written("a", events=[sounded(0.0, accuracy), sounded(1.0, [0.5, True])], **FLEET))
    assert [test.plain for test in device_accuracies(run)] == [[0.5, None]]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([5.0, 5.001, 4.9995], "hardly moves: 4.9995 to 5.001"),
        ([5.0, 5.0, 5.0], "always 5"),
        ([0.0, 0.0, 0.0], "always 0"),
        ([5.0, 5.02, 5.0], None),
        ([0.0, 1e-9, 0.0], None),
    ],
)
def test_a_control_that_hardly_moves_says_so(values: list[float], said: str | None) -> None:
    layout = _with_still_axis({"yaxis": {"nticks": 5}}, min(values), max(values))
    if said is None:
        assert layout == {"yaxis": {"nticks": 5}}
        return
    low, high = layout["yaxis"]["range"]
    assert layout["annotations"][0]["text"] == said
    assert low < min(values) <= max(values) < high
    assert high - low > 50 * (max(values) - min(values)), "the values do not fill the axis"
