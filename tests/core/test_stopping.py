"""Overdue trips are given up, their devices wait until they are heard from, and a stalled run says so."""

from collections import deque
from typing import Any

import pytest

from freshet.core.coordinator import Coordinator
from freshet.core.events import Aggregated, Lost, Rejected, Triggered, Uploaded
from freshet.core.scheduling import Trigger
from freshet.core.stopping import GIVEN_UP, Deadline, StallDetector
from tests.core.test_coordinator import arrive, everybody
from tests.core.test_server import server, upload


def coordinator(method: str, kind: str, deadline: float = 25.0, **changes: Any) -> Coordinator:
    figures = {"per_round": 3, "period": 10.0, "in_flight": 4} | changes
    return Coordinator(server(method), Trigger(kind, **figures), deadline=deadline)


# ---- the deadline queue


class Flying:
    """A stand-in for an active trip."""

    def __init__(self, trip: int) -> None:
        self.trip = trip


def test_trips_in_flight_past_their_deadline_are_overdue() -> None:
    d, active = Deadline(10.0), {1: Flying(1), 2: Flying(2)}
    for now, device, trip in ((0.0, 1, 1), (0.0, 2, 1), (5.0, 2, 2)):
        d.trip_started(now, device, trip)
    assert d.overdue(9.9, active) == []
    assert d.overdue(10.0, active) == [(1, 1)]
    assert d.overdue(15.0, active) == [(2, 2)]


def test_one_check_is_scheduled_at_a_time() -> None:
    d, active = Deadline(10.0), {1: Flying(1), 2: Flying(1)}
    assert d.schedule_check() is None
    d.trip_started(0.0, 1, 1)
    d.trip_started(3.0, 2, 1)
    assert (d.schedule_check(), d.schedule_check()) == (10.0, None)
    d.overdue(10.0, active)
    assert d.schedule_check() == 13.0
    del active[2]
    d.overdue(13.0, active)
    assert (d.schedule_check(), d.trips) == (None, deque())


def test_without_a_deadline_nothing_is_kept() -> None:
    d = Deadline()
    d.trip_started(0.0, 1, 1)
    assert not d.trips and d.schedule_check() is None


# ---- triggers with a deadline


def test_a_round_ends_without_overdue_devices() -> None:
    c = coordinator("fedavg", "rounds")
    started = c.tick(0.0, everybody)
    assert (started.look_at, started.wake_at) == (25.0, None)
    first, *others = (a.device for a in started.assignments)
    arrive(c, 3.0, upload(first))
    assert (c.server.round, len(c.server.active_trips)) == (1, 2)
    ended = c.tick(25.0, everybody)
    kinds = [type(event) for event in ended.events]
    assert kinds == [Lost, Lost, Aggregated, Triggered, Triggered, Triggered]
    assert ended.events[0] == Lost(others[0], 1, GIVEN_UP)
    assert [part.device for part in ended.events[2].contributions] == [first]
    assert sorted(ended.given_up) == others and c.counts.lost == 2
    assert not {a.device for a in ended.assignments} & set(others), "they may still be training"
    assert ended.look_at == 50.0


def test_a_round_that_ended_in_time_is_unaffected() -> None:
    c = coordinator("fedavg", "rounds")
    for assignment in c.tick(0.0, everybody).assignments:
        woken = arrive(c, 7.0, upload(assignment.device)).wake_at
    assert woken == 7.0
    c.tick(7.0, everybody)
    looked = c.tick(25.0, everybody)
    assert (list(looked.events), list(looked.given_up), looked.look_at) == ([], [], 32.0)


def test_a_device_is_triggered_again_after_it_was_heard_from() -> None:
    c = coordinator("fedavg", "rounds", per_round=6, in_flight=6)
    devices = [a.device for a in c.tick(0.0, everybody).assignments]
    again = c.tick(25.0, everybody)
    assert sorted(again.given_up) == devices and not again.assignments and again.wake_at == 30.0
    late = arrive(c, 27.0, upload(devices[0]))
    assert [type(event) for event in late.events] == [Rejected]
    c.trip_lost(28.0, devices[1], 1, "gone")
    assert sorted(a.device for a in c.tick(30.0, everybody).assignments) == devices[:2]


def test_an_old_trip_does_not_end_a_later_one() -> None:
    c = coordinator("fedavg", "rounds")
    device = c.tick(0.0, everybody).assignments[0].device
    c.tick(25.0, everybody)
    c.server.mark_heard(device, 2)
    assert c.server.away[device] == 1


def test_the_periodic_trigger_follows_only_its_clock() -> None:
    c = coordinator("fedasync", "periodic", in_flight=3)
    assert c.wake(0.0) == 0.0
    assert (c.tick(0.0, everybody).wake_at, c.deadline.next_check) == (10.0, 25.0)
    for now in (10.0, 20.0):
        assert not c.tick(now, everybody).assignments
    looked = c.tick(25.0, everybody)
    assert [type(event) for event in looked.events] == [Lost] * 3 and looked.wake_at is None
    assert len(c.tick(30.0, everybody).assignments) == 3


def test_the_other_triggers_fill_the_places_at_once() -> None:
    c = coordinator("fedasync", "concurrency", in_flight=3)
    c.tick(0.0, everybody)
    assert len(c.tick(25.0, everybody).assignments) == 3


def test_port_aggregates_without_an_overdue_device_that_does_not_return() -> None:
    c = Coordinator(server("port", {"K": 1, "omega": 0}), Trigger("concurrency", 3, 10.0, 3), deadline=25.0)
    silent, *others = (a.device for a in c.tick(0.0, everybody).assignments)
    for device in others:
        arrive(c, 5.0, upload(device))
    assert c.server.version == 2 and silent in c.server.active_trips, "the first step; tau of the silent device is 1"
    ended = c.tick(25.0, everybody)
    assert [type(event) for event in ended.events][:2] == [Lost, Aggregated]


def test_the_last_round_may_end_by_its_deadline() -> None:
    c = Coordinator(server("fedavg"), Trigger("rounds", 2, 10.0, 2), rounds=1, deadline=25.0)
    c.tick(0.0, everybody)
    assert not c.tick(25.0, everybody).assignments and c.over


def test_a_restored_state_continues_the_same_way() -> None:
    one, two = coordinator("fedavg", "rounds"), coordinator("fedavg", "rounds")
    devices = [a.device for a in one.tick(0.0, everybody).assignments]
    arrive(one, 3.0, upload(devices[0]))
    one.tick(25.0, everybody)
    two.restore(one.state())
    assert (two.server.away, two.deadline) == (one.server.away, one.deadline)
    assert two.tick(50.0, everybody).events == one.tick(50.0, everybody).events


# ---- stalls


@pytest.mark.parametrize(("now", "in_flight", "since"), [(31.0, 1, 10.0), (30.0, 1, None), (90.0, 0, None)])
def test_a_run_has_stalled_when_it_waits_much_longer_than_ever_before(now: float, in_flight: int, since: Any) -> None:
    pulse = StallDetector()
    for time, used in ((4.0, 1), (9.0, 2), (9.5, 2), (10.0, 3)):
        pulse.record(time, used)
    assert (pulse.last, pulse.longest) == (10.0, 5.0)
    assert StallDetector().stalled_since(100.0, 3) is None, "a run without any usable upload"
    pulse.longest = 20.0 / 3.0
    assert pulse.stalled_since(now, in_flight) == since


def test_the_summary_reports_a_stall() -> None:
    c = coordinator("fedavg", "rounds", deadline=0.0)
    devices = [a.device for a in c.tick(0.0, everybody).assignments]
    assert [type(event) for event in arrive(c, 3.0, upload(devices[0])).events] == [Uploaded]
    assert (c.facts(12.0)["stalled"], c.facts(12.5)["stalled"]) == (None, 3.0)
