"""The fleet's timeline from the log, checked against times computed by hand."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freshet import Result
from freshet.report.closeup import closeup
from freshet.report.reading import read
from freshet.report.trips import count_entries, timeline, trips_of
from tests.conftest import small

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
    assert (trip.start, trip.base) == (0.0, 3)
    assert trip.train == pytest.approx(1.0)
    (fresh,) = trip.fresh
    assert (fresh.slot, fresh.slot_by, fresh.version, fresh.pushed, fresh.beta) == (3, "q", 4, False, 0.25)
    assert fresh.asked == pytest.approx(5.0)
    assert (fresh.sent, fresh.merged) == (5.500064, 6.500064) and fresh.arrived == pytest.approx(6.500064)
    assert trip.sent == pytest.approx(12.500064)
    assert (trip.end, trip.outcome, trip.staleness, trip.alpha) == (14.000064, "aggregated", 2, 0.125)


def test_legs_of_a_trip_that_asks_three_times(written: Write) -> None:
    """1 s down; 2 s before each request, with a model, nothing (64 bytes) and a model in answer; 4 s; 1.5 s up."""
    asks = [(3.500064, 4, 2), (7.000128, None, 3), (10.000224, 5, 4)]
    events: list[dict[str, Any]] = [TRIGGER]
    for time, version, slot in asks:
        events.append(REQUEST | {"time": time, "fresh": version, "slot": slot})
        if version is not None:
            events.append(MERGE | {"time": time + 1.0, "fresh": version, "beta": version / 10})
    (trip,) = trips_of(
        read(written("a", events=[*events, UPLOAD | {"time": 16.500224}, AGGREGATE | {"time": 16.500224}]))
    )
    first, second, third = trip.fresh
    assert [fresh.asked for fresh in trip.fresh] == pytest.approx([3.0, 6.500064, 9.50016])
    assert [fresh.sent for fresh in trip.fresh] == [time for time, _, _ in asks]
    assert (first.merged, first.beta, third.merged, third.beta) == (4.500064, 0.4, 11.000224, 0.5)
    assert (second.version, second.merged) == (None, None) and second.arrived == pytest.approx(7.50016)
    assert trip.sent == pytest.approx(15.000224), "the fleet explains the log, with all waiting times"
    columns = timeline(read(written("b")), [trip])["fresh"]
    assert (columns["trip"], columns["version"], columns["merged"]) == ([0, 0, 0], [4, None, 5], [4.5, None, 11.0])


PUSH = {"time": 4.2, "kind": "push", "device": 1, "trip": 1, "base": 3, "fresh": 4}
PUSHED = [
    TRIGGER,
    PUSH,
    MERGE | {"time": 7.0, "slot": 4},
    PUSH | {"time": 10.5, "fresh": 6},
    UPLOAD | {"time": 12.5},
    AGGREGATE | {"time": 12.5},
]


def test_legs_of_a_trip_that_is_pushed_to(written: Write) -> None:
    """Training is not interrupted: 1 s down, 10 s, 1.5 s up. The second push comes too late for an epoch."""
    (trip,) = trips_of(read(written("a", events=PUSHED)))
    first, second = trip.fresh
    assert first.pushed and second.pushed and (first.asked, second.asked) == (None, None)
    assert (first.sent, first.arrived, first.merged, first.slot) == (4.2, pytest.approx(5.2), 7.0, 4)
    assert (second.version, second.arrived, second.merged) == (6, pytest.approx(11.5), None)
    assert (trip.train, trip.sent) == (pytest.approx(1.0), pytest.approx(11.0))


def test_merges_reported_with_the_upload_have_no_time_of_their_own(written: Write) -> None:
    """On a real network: two answers, and both merges logged when the upload arrives."""
    answers = [REQUEST | {"time": time, "fresh": fresh} for time, fresh in ((5.0, 4), (9.0, 5))]
    merges = [MERGE | {"time": 30.0, "fresh": fresh} for fresh in (4, 5)]
    (trip,) = trips_of(read(written("a", events=[TRIGGER, *answers, *merges, UPLOAD | {"time": 30.0}])))
    assert [(fresh.merged, fresh.arrived) for fresh in trip.fresh] == [(5.0, None), (9.0, None)]


def test_merge_of_a_model_that_was_not_sent_is_skipped(written: Write) -> None:
    (trip,) = trips_of(read(written("a", events=[TRIGGER, REQUEST, MERGE | {"fresh": 9}, MERGE, MERGE])))
    assert [(fresh.version, fresh.merged) for fresh in trip.fresh] == [(4, 6.500064)]


def test_a_fleet_that_does_not_explain_the_log_is_not_used(written: Write) -> None:
    late = [event | {"time": event["time"] * 2} for event in TRIP]
    (trip,) = trips_of(read(written("a", events=late)))
    (fresh,) = trip.fresh
    assert (trip.train, fresh.asked, fresh.arrived, trip.sent) == (None, None, None, None)
    assert (fresh.sent, trip.end, trip.outcome) == (11.000128, 28.000128, "aggregated")
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
    sent = [fresh for trip in trips for fresh in trip.fresh]
    assert sum(fresh.merged is not None for fresh in sent) == result.summary["merges"]
    assert sum(not fresh.pushed for fresh in sent) == result.summary["requests"]
    for trip in trips:
        between = [time for fresh in trip.fresh for time in (fresh.asked, fresh.sent, fresh.merged)]
        times = [trip.start, trip.train, *between, trip.sent, trip.end]
        there = [time for time in times if time is not None]
        assert there == sorted(there)
        assert trip.train is not None, "the fleet of world.json explains the log"
    text = json.dumps(timeline(run, trips), allow_nan=False)
    assert json.loads(text)["devices"] == 8


@pytest.mark.parametrize(
    "options", [{"refresh": "every", "slot": 2}, {"slot": "never", "push_after": 2}], ids=["every", "push"]
)
def test_several_fresh_models_of_a_real_run(options: dict[str, Any], tmp_path: Path) -> None:
    result = small({"name": "fedasmu", **options}).run(60, out=tmp_path / "run")
    run = read(result.directory)
    trips = trips_of(run)
    sent = [fresh for trip in trips for fresh in trip.fresh]
    assert sum(fresh.merged is not None for fresh in sent) == result.summary["merges"]
    assert sum(fresh.pushed for fresh in sent) == result.summary.get("pushes", 0)
    assert sum(not fresh.pushed for fresh in sent) == result.summary["requests"]
    assert max(len(trip.fresh) for trip in trips) > 1
    for trip in trips:
        assert trip.train is not None, "the fleet of world.json explains the log"
        for fresh in trip.fresh:
            assert fresh.arrived is not None
            if fresh.merged is not None:
                assert (
                    fresh.merged >= fresh.arrived - 1e-9
                    if fresh.pushed
                    else fresh.merged == pytest.approx(fresh.arrived)
                )
    shown = timeline(run, trips)["fresh"]
    assert len(shown["trip"]) == len(sent) and shown["pushed"] == [fresh.pushed for fresh in sent]
    figure = closeup(run, trips)["slots"]
    counted = "merges" if "push_after" in options else "requests"
    assert figure["layout"]["yaxis"]["title"]["text"] == f"share of {counted} (%)"
    assert sum(sum(trace["customdata"]) for trace in figure["data"]) == result.summary[counted]


def test_requests_and_pushes_count_against_the_limit(written: Write) -> None:
    events = []
    for trip in range(4):
        events.append(TRIGGER | {"trip": trip, "time": float(trip)})
        events += [REQUEST | {"trip": trip, "time": float(trip), "slot": slot} for slot in range(3)]
    run = read(written("a", events=events))
    trips = trips_of(run)
    assert count_entries(trips) == 12
    assert timeline(run, trips, limit=7)["trips"]["number"] == [2, 3]
    assert timeline(run, trips, limit=2)["trips"]["number"] == [3], "one trip is always shown"


def test_only_the_newest_trips_are_shown(written: Write) -> None:
    run = read(written("a", events=[TRIGGER | {"time": float(t), "trip": t} for t in range(10)]))
    shown = timeline(run, trips_of(run), limit=4)
    assert (shown["left_out"], shown["first"], shown["trips"]["number"]) == (6, 6.0, [6, 7, 8, 9])


@pytest.mark.parametrize(
    "broken", [{}, {"device": None}, {"device": "<b>"}, {"device": -1}, {"device": [1]}, {"device": 1e300}]
)
def test_nonsense_in_the_log_is_skipped(written: Write, broken: dict[str, Any]) -> None:
    kinds = ("trigger", "request", "push", "merge", "hurry", "upload", "lost", "discard", "rejected", "aggregate")
    run = read(written("a", events=[{"time": 1.0, "kind": kind, **broken} for kind in kinds]))
    assert trips_of(run) == []
