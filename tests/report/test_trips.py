"""The fleet's timeline from the log, checked against times computed by hand."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from freshet import Result
from freshet.report.reading import read
from freshet.report.trips import timeline, trips_of

from .conftest import Write

TRIGGER = {"time": 0.0, "kind": "trigger", "device": 1, "trip": 1, "version": 3, "epochs": 5}
REQUEST = {"time": 5.500064, "kind": "request", "device": 1, "trip": 1, "fresh": 4, "slot": 3, "slot_by": "q"}
MERGE = {"time": 6.500064, "kind": "merge", "device": 1, "trip": 1, "fresh": 4, "beta": 0.25}
UPLOAD = {"time": 14.000064, "kind": "upload", "device": 1, "trip": 1, "base": 3, "bytes": 1_000_000}
PART = {"device": 1, "base": 3, "staleness": 2, "weight": 0.125}
AGGREGATE = {"time": 14.000064, "kind": "aggregate", "device": 1, "trip": 1, "contributions": [PART], "alpha": 0.125}
TRIP = [TRIGGER, REQUEST, MERGE, UPLOAD, AGGREGATE]


def test_legs_of_a_trip_by_hand(written: Write) -> None:
    """1 s down, two epochs of 2 s, ask (0.5 s and 64 bytes), 1 s down, three epochs, 1.5 s up."""
    (trip,) = trips_of(read(written("a", events=TRIP)))
    assert (trip.start, trip.base, trip.slot, trip.slot_by) == (0.0, 3, 3, "q")
    assert trip.train == pytest.approx(1.0)
    assert trip.asked == pytest.approx(5.0)
    assert (trip.answered, trip.merged, trip.resume) == (5.500064, 6.500064, 6.500064)
    assert trip.sent == pytest.approx(12.500064)
    assert (trip.end, trip.outcome, trip.staleness, trip.alpha, trip.beta) == (14.000064, "aggregated", 2, 0.125, 0.25)


def test_a_fleet_that_does_not_explain_the_log_is_not_used(written: Write) -> None:
    late = [event | {"time": event["time"] * 2} for event in TRIP]
    (trip,) = trips_of(read(written("a", events=late)))
    assert (trip.train, trip.asked, trip.sent) == (None, None, None)
    assert (trip.answered, trip.end, trip.outcome) == (11.000128, 28.000128, "aggregated")
    assert timeline(read(written("b", events=late)), [trip])["legs"] is False


@pytest.mark.parametrize(("kind", "outcome"), [("discard", "discarded"), ("rejected", "rejected")])
def test_refused_uploads(written: Write, kind: str, outcome: str) -> None:
    refusal = {"time": 14.000064, "kind": kind, "device": 1, "trip": 1, "reason": "too stale"}
    (trip,) = trips_of(read(written("a", events=[*TRIP[:4], refusal])))
    assert (trip.outcome, trip.reason, trip.alpha) == (outcome, "too stale", None)


def test_device_zero_is_a_device(written: Write) -> None:
    discard = {"time": 14.000064, "kind": "discard", "device": 0, "trip": 1, "reason": "too stale"}
    events = [event | {"device": 0} for event in TRIP[:4]]
    (trip,) = trips_of(read(written("a", events=[*events, discard])))
    assert (trip.device, trip.outcome) == (0, "discarded")


def test_lost_and_unfinished_trips(written: Write) -> None:
    lost = {"time": 3.0, "kind": "lost", "device": 1, "trip": 1, "reason": "device left"}
    again = TRIGGER | {"time": 4.0, "trip": 2}
    first, second = trips_of(read(written("a", events=[TRIGGER, lost, again])))
    assert (first.outcome, first.reason, first.end, first.sent) == ("lost", "device left", 3.0, None)
    assert (second.outcome, second.end) == ("flying", None)


def test_buffered_uploads_wait_for_their_aggregation(written: Write) -> None:
    events = [
        *(TRIGGER | {"device": d} for d in (0, 1)),
        *(UPLOAD | {"device": d, "time": 12.5} for d in (0, 1)),
        {"time": 12.5, "kind": "aggregate", "contributions": [PART | {"device": 0, "weight": 1.0}], "alpha": 1.0},
    ]
    assert [trip.outcome for trip in trips_of(read(written("a", events=events)))] == ["aggregated", "waiting"]


@pytest.mark.parametrize("method", ["fedasmu", "fedssmu", "fedavg"])
def test_every_trip_of_a_real_run_in_order(finished: Callable[[str], Result], method: str) -> None:
    result = finished(method)
    run = read(result.directory)
    trips = trips_of(run)
    outcomes = Counter(trip.outcome for trip in trips)
    assert len(trips) == result.summary["trips"]
    assert sum(outcomes[name] for name in ("aggregated", "waiting", "discarded")) == result.summary["uploads"]
    assert sum(trip.merged is not None for trip in trips) == result.summary["merges"]
    for trip in trips:
        times = [trip.start, trip.train, trip.asked, trip.answered, trip.resume, trip.sent, trip.end]
        there = [time for time in times if time is not None]
        assert there == sorted(there)
        assert trip.train is not None, "the fleet of world.json explains the log"
    text = json.dumps(timeline(run, trips), allow_nan=False)
    assert json.loads(text)["devices"] == 8


def test_only_the_newest_trips_are_shown(written: Write) -> None:
    run = read(written("a", events=[TRIGGER | {"time": float(t), "trip": t} for t in range(10)]))
    shown = timeline(run, trips_of(run), limit=4)
    assert (shown["left_out"], shown["first"], shown["trips"]["number"]) == (6, 6.0, [6, 7, 8, 9])


@pytest.mark.parametrize(
    "broken", [{}, {"device": None}, {"device": "<b>"}, {"device": -1}, {"device": [1]}, {"device": 1e300}]
)
def test_nonsense_in_the_log_is_skipped(written: Write, broken: dict[str, Any]) -> None:
    kinds = ("trigger", "request", "merge", "hurry", "upload", "lost", "discard", "rejected", "aggregate")
    run = read(written("a", events=[{"time": 1.0, "kind": kind, **broken} for kind in kinds]))
    assert trips_of(run) == []
