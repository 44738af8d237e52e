"""What one run's log says about staleness, controls, slots and data."""

from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest

from freshet import Result
from freshet.report.closeup import bands, chooser_shares, closeup, controls, slot_shares, weighted_uploads
from freshet.report.plots import stalenesses
from freshet.report.reading import RunData, read
from freshet.report.trips import trips_of

from .conftest import Write


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


def test_what_is_drawn_stands_in_the_run_directory(written: Write) -> None:
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


def test_a_closeup_of_an_empty_run_has_nothing_and_fails_nowhere(written: Write) -> None:
    place = written("a", accuracy=[], status=None)
    (place / "world.json").unlink()
    found = closeup(read(place))
    assert found == {key: [] if key == "controls" else None for key in found}
