"""The coordinator: what a driver must do, what is counted and what is logged, whatever the clock."""

from typing import Any

import numpy as np
import pytest

from freshet.core.coordinator import Coordinator, next_multiple
from freshet.core.events import (
    Aggregated,
    Discarded,
    Hurried,
    Lost,
    Merged,
    Refused,
    Rejected,
    Requested,
    Triggered,
    Uploaded,
)
from freshet.core.messages import CONTROL_BYTES, Merge, Request, Slot, Upload
from freshet.core.scheduling import Trigger
from tests.core.test_server import SIZE, scripted, server, upload
from tests.methods.helpers import server_of, upload_of, vector

MODEL = 4 * SIZE


def coordinator(method: str = "fedasmu", kind: str = "periodic", options: Any = None, **trigger: Any) -> Coordinator:
    figures = {"per_round": 3, "period": 10.0, "in_flight": 4} | trigger
    return Coordinator(server(method, options), Trigger(kind, **figures))


def everybody(device: int) -> bool:
    return True


def ask(device: int, trip: int = 1, epoch: int = 2) -> Request:
    return Request(device, trip, Slot(epoch, "meta"))


def arrive(c: Coordinator, now: float, sent: Upload) -> Any:
    return c.upload_arrived(now, sent.device, sent.trip, lambda: sent)


# ---- ticks


def test_a_tick_sends_models_and_schedules_the_next_multiple_of_the_period():
    c = coordinator()
    assert c.wake(0.0) == 0.0
    effects = c.tick(0.0, everybody)
    assert [type(event) for event in effects.events] == [Triggered] * 3
    assert [event.device for event in effects.events] == [a.device for a in effects.assignments]
    assert effects.wake_at == 10.0
    assert (c.counts.trips, c.counts.bytes_down) == (3, 3 * MODEL)
    assert c.tick(10.0, everybody).wake_at == 20.0


def test_a_time_is_scheduled_only_once():
    c = coordinator()
    assert [c.wake(5.0), c.wake(5.0), c.wake(6.0)] == [5.0, None, 6.0]


def test_arrivals_wake_the_concurrency_trigger_and_the_clock_only_if_no_device_was_available():
    c = coordinator(kind="concurrency")
    assert c.tick(0.0, everybody).wake_at is None
    flying = sorted(c.server.active_trips)
    assert arrive(c, 3.0, upload(flying[0])).wake_at == 3.0
    assert c.tick(3.0, lambda device: False).wake_at == 10.0


def test_a_round_without_available_devices_counts():
    c = coordinator("fedavg", "rounds")
    effects = c.tick(0.0, lambda device: False)
    assert [type(event) for event in effects.events] == [Aggregated]
    assert (c.server.round, effects.wake_at) == (1, 10.0)


# ---- requests and merges


def test_a_request_is_answered_logged_and_counted():
    c = coordinator()
    c.server.trigger([0, 1])
    empty = c.request(ask(0))
    assert (empty.fresh, empty.events) == (None, [Requested(0, 1, 1, 1, 2, "meta", None)])
    arrive(c, 1.0, upload(1))
    down = c.counts.bytes_down
    answer = c.request(ask(0))
    assert answer.fresh is not None and answer.events == [Requested(0, 1, 1, 2, 2, "meta", 2)]
    assert c.counts.bytes_down - down == MODEL
    assert (c.counts.requests, c.counts.bytes_up) == (2, 2 * CONTROL_BYTES + MODEL)


@pytest.mark.parametrize(
    "bad", [ask(5), ask(0, trip=2), ask(0, epoch=99), ask(0, epoch=0), Request([], 1, Slot(1, "q"))]
)
def test_a_malformed_request_is_refused_without_an_exception(bad):
    c = coordinator()
    c.server.trigger([0])
    effects = c.request(bad)
    assert [type(event) for event in effects.events] == [Refused]
    assert (effects.fresh, c.counts.refused, c.counts.rejected, c.counts.requests) == (None, 1, 0, 0)


def with_fresh() -> Coordinator:
    c = coordinator()
    c.server.trigger([0, 1])
    arrive(c, 1.0, upload(1))
    c.request(ask(0))
    return c


MERGED = {"beta": 0.5, "n1": 1}
MERGES = (Merge(2, MERGED),)


def test_a_merge_is_logged_when_the_driver_sees_it():
    c = with_fresh()
    assert c.fresh_merged(0, 1) == Merged(0, 1, 1, 2, 2)
    assert c.fresh_merged(0, 1) is None
    events = arrive(c, 3.0, upload(0, merges=MERGES)).events
    assert [type(event) for event in events] == [Uploaded, Aggregated]
    assert c.counts.merges == 1


def test_otherwise_the_upload_reports_the_merge():
    c = with_fresh()
    events = arrive(c, 3.0, upload(0, merges=MERGES)).events
    assert [type(event) for event in events] == [Merged, Uploaded, Aggregated]
    assert events[0] == Merged(0, 1, 1, 2, 2, numbers=MERGED)
    assert c.counts.merges == 1


def test_a_merge_reported_by_a_rejected_upload_is_not_logged():
    c = with_fresh()
    events = arrive(c, 3.0, upload(0, merges=MERGES, steps=0)).events
    assert [type(event) for event in events] == [Uploaded, Rejected]
    assert c.counts.merges == 0


def test_a_finished_trip_or_one_without_a_fresh_model_has_no_merge():
    c = coordinator()
    c.server.trigger([0])
    assert c.fresh_merged(0, 1) is None
    assert c.fresh_merged(4, 1) is None


# ---- the end of a trip


def test_a_stale_upload_is_discarded_unopened():
    c = coordinator(options={"tau_max": 1})
    c.server.trigger([0, 1])
    arrive(c, 1.0, upload(0))

    def look() -> Upload:
        raise AssertionError("nobody needs this training")

    effects = c.upload_arrived(2.0, 1, 1, look)
    assert [type(event) for event in effects.events] == [Uploaded, Discarded]
    assert (c.counts.discards, c.counts.uploads, c.counts.bytes_up) == (1, 2, 2 * MODEL)


@pytest.mark.parametrize(("device", "trip"), [(5, 1), (0, 9), (0, None), (5, None), ([], 1), (None, None), ("0", 1)])
def test_an_upload_of_an_unknown_trip_is_rejected_and_changes_nothing(device, trip):
    c = coordinator()
    c.server.trigger([0])
    before = c.server.weights.tobytes()
    effects = c.upload_arrived(1.0, device, trip, lambda: upload(0))
    assert [type(event) for event in effects.events] == [Rejected]
    assert (c.server.weights.tobytes(), list(c.server.active_trips), c.counts.uploads) == (before, [0], 0)


@pytest.mark.parametrize("weights", [None, 3, [1.0], np.ones((2, 2), np.float32)])
def test_an_upload_without_a_model_is_rejected_and_counted(weights):
    c = coordinator()
    c.server.trigger([0])
    effects = arrive(c, 1.0, upload(0, weights=weights))
    assert [type(event) for event in effects.events] == [Uploaded, Rejected]
    assert c.counts.uploads == 1


def test_a_lost_device_frees_its_place_and_its_sent_bytes_count():
    c = coordinator(kind="concurrency", in_flight=2)
    c.server.trigger([0, 1])
    effects = c.trip_lost(4.0, 0, 1, "upload lost", sent=MODEL)
    assert list(effects.events) == [Lost(0, 1, "upload lost")]
    assert (effects.wake_at, c.counts.lost, c.counts.bytes_up) == (4.0, 1, MODEL)


def test_devices_that_should_hurry_are_named_and_logged():
    from freshet.core.method import Wait

    c = Coordinator(scripted(Wait(urgent=(1,))), Trigger("concurrency", 2, 10.0, 2))
    c.server.trigger([0, 1])
    effects = arrive(c, 1.0, upload(0))
    assert (list(effects.hurry), effects.events[-1]) == ([1], Hurried(1, 1))
    assert c.counts.bytes_down == CONTROL_BYTES


def test_the_last_round_ends_the_run():
    c = Coordinator(server("fedavg"), Trigger("rounds", 2, 10.0, 2), rounds=2)
    for number in (1, 2):
        assert not c.over
        for assignment in list(c.tick(float(number), everybody).assignments):
            arrive(c, number + 0.5, upload(assignment.device, assignment.trip, assignment.version))
    assert c.over


# ---- checkpoint


def test_a_restored_coordinator_continues_the_same_way():
    one, two = with_fresh(), coordinator()
    one.wake(20.0)
    two.restore(one.state())
    assert two.counts == one.counts
    assert two.wake(20.0) is None
    for c in (one, two):
        arrive(c, 3.0, upload(0, merges=MERGES))
    assert one.facts(3.0) == two.facts(3.0)
    assert one.server.weights.tobytes() == two.server.weights.tobytes()


def with_deadline(method: str, kind: str, deadline: float, rounds: int = 0, **changes: Any) -> Coordinator:
    figures = {"per_round": 2, "period": 10.0, "in_flight": 6} | changes
    return Coordinator(server(method), Trigger(kind, **figures), rounds, deadline=deadline)


def kinds(events: Any) -> list[type]:
    return [type(event) for event in events]


# ---- a tick and a deadline check at the same time


def test_a_deadline_check_and_a_periodic_tick_at_one_time_are_one_call() -> None:
    c = with_deadline("fedasync", "periodic", deadline=20.0, per_round=1)
    c.wake(0.0)
    assert (c.tick(0.0, everybody).look_at, c.tick(10.0, everybody).wake_at) == (20.0, None)
    both = c.tick(20.0, everybody)
    assert (kinds(both.events), both.wake_at, both.look_at) == ([Lost, Triggered], 30.0, None)
    assert not c.tick(20.0, everybody).events, "no device starts twice"


def test_they_are_one_call_in_either_order() -> None:
    c = with_deadline("fedasync", "periodic", deadline=10.0, per_round=1)
    c.wake(0.0)
    assert c.tick(0.0, everybody)[4:6] == (10.0, None)
    assert kinds(c.tick(10.0, everybody).events) == [Lost, Triggered]


def test_an_empty_round_counts_once_at_such_a_time() -> None:
    c = with_deadline("fedavg", "rounds", deadline=20.0)
    asked = [0.0]
    c.wake(0.0)
    rounds = []
    while asked[0] <= 20.0:
        now = asked.pop(0)
        effects = c.tick(now, lambda device, now=now: now == 0.0 and device == 3)
        rounds += [now for event in effects.events if type(event) is Aggregated]
        asked = sorted([*asked, *(at for at in (effects.wake_at, effects.look_at) if at is not None)])
        if now == 10.0:
            asked += [at for at in (c.wake(20.0),) if at is not None]
    assert rounds == [20.0, 20.0], "the round of device 3, and an empty one"


# ---- the tick that ends a run


@pytest.mark.parametrize(
    ("method", "kind"), [("fedavg", "rounds"), ("fedbuff", "concurrency"), ("fedasync", "periodic")]
)
def test_an_extended_run_continues_at_the_time_when_giving_up_ended_it(method: str, kind: str) -> None:
    c = with_deadline(method, kind, deadline=20.0, rounds=1, in_flight=3)
    c.rounds.trip_ended = lambda server, endless: True  # type: ignore[method-assign]
    c.wake(0.0)
    c.tick(0.0, everybody)
    if kind == "periodic":
        c.tick(10.0, everybody)
    ended = c.tick(20.0, everybody)
    assert c.over and Lost in kinds(ended.events) and Triggered not in kinds(ended.events)
    assert ended.wake_at == 20.0
    c.over, c.rounds.limit = False, 5
    assert Triggered in kinds(c.tick(20.0, everybody).events)


# ---- multiples


@pytest.mark.parametrize(
    ("time", "period", "expected"),
    [
        (0.0, 10.0, 10.0),
        (10.0, 10.0, 20.0),
        (12.0, 10.0, 20.0),
        (15.0, 10.0, 20.0),
        (17.3, 10.0, 20.0),
        (19.999, 10.0, 20.0),
        (1e-9, 10.0, 10.0),
        (0.7, 0.1, 8 * 0.1),
        (1e4 + 0.0009, 0.001, 10000.001),
    ],
)
def test_the_next_multiple_is_the_first_after_a_time(time: float, period: float, expected: float) -> None:
    assert next_multiple(time, period) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("period", [0.1, 0.3, 1 / 3, 7.0, 10.0])
def test_next_multiple_skips_none_and_repeats_none(period: float) -> None:
    time = 0.0
    for number in range(1, 5000):
        time = next_multiple(time, period)
        assert time == number * period
    assert next_multiple(0.1 + 0.2, 0.1) == 4 * 0.1, "a sum with rounding errors is a multiple, too"


def test_repeated_fetch_of_a_pushed_model_is_answered_but_not_logged_again() -> None:
    """A deployed device that restarts its trip fetches what it was sent before."""
    server = server_of("fedasmu", epochs=3, push_after=1, slot="never")
    c = Coordinator(server, Trigger("concurrency", 3, 10.0, 4))
    server.trigger([0, 1, 2])
    pushed = []
    for device, epoch in ((1, 2), (2, 3)):
        arrive(c, 1.0, upload_of(server, device, vector(device)))
        pushed += c.request(Request(0, 1, Slot(epoch, "push"))).events
    assert [(event.device, event.fresh) for event in pushed] == [(0, 2), (0, 3)]  # type: ignore[union-attr]
    again = c.request(Request(0, 1, Slot(2, "push")))
    assert again.fresh is not None and (again.fresh.version, list(again.events)) == (2, [])
    assert c.counts.pushes == 2 and [sent.version for sent in server.active_trips[0].sent] == [2, 3]
