"""When the coordinator starts trips: a wake and a look at one instant, the tick that ends a run, odd times."""

from typing import Any

import pytest

from freshet.core.coordinator import Coordinator, next_multiple
from freshet.core.events import Aggregated, Lost, Triggered
from freshet.core.scheduling import Trigger
from tests.core.test_coordinator import everybody
from tests.core.test_server import server


def coordinator(method: str, kind: str, deadline: float, rounds: int = 0, **changes: Any) -> Coordinator:
    figures = {"per_round": 2, "period": 10.0, "in_flight": 6} | changes
    return Coordinator(server(method), Trigger(kind, **figures), rounds, deadline=deadline)


def kinds(events: Any) -> list[type]:
    return [type(event) for event in events]


# ---- a wake and a look at the same instant


def test_a_look_and_a_periodic_tick_at_the_same_time_are_one() -> None:
    c = coordinator("fedasync", "periodic", deadline=20.0, per_round=1)
    c.wake(0.0)
    assert (c.tick(0.0, everybody).look_at, c.tick(10.0, everybody).wake_at) == (20.0, None)
    both = c.tick(20.0, everybody)
    assert (kinds(both.events), both.wake_at, both.look_at) == ([Lost, Triggered], 30.0, None)
    assert not c.tick(20.0, everybody).events, "nobody starts twice"


def test_whichever_was_asked_for_first() -> None:
    c = coordinator("fedasync", "periodic", deadline=10.0, per_round=1)
    c.wake(0.0)
    assert c.tick(0.0, everybody)[4:6] == (10.0, None)
    assert kinds(c.tick(10.0, everybody).events) == [Lost, Triggered]


def test_a_round_for_which_nobody_is_there_is_counted_once_at_such_a_time() -> None:
    c = coordinator("fedavg", "rounds", deadline=20.0)
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
    assert rounds == [20.0, 20.0], "that of device 3, and one without anybody"


# ---- the tick that ends a run


@pytest.mark.parametrize(
    ("method", "kind"), [("fedavg", "rounds"), ("fedbuff", "concurrency"), ("fedasync", "periodic")]
)
def test_where_giving_up_ends_the_run_it_is_woken_again_at_that_time_if_it_goes_on(method: str, kind: str) -> None:
    c = coordinator(method, kind, deadline=20.0, rounds=1, in_flight=3)
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
def test_from_multiple_to_multiple_none_is_left_out_or_met_twice(period: float) -> None:
    time = 0.0
    for number in range(1, 5000):
        time = next_multiple(time, period)
        assert time == number * period
    assert next_multiple(0.1 + 0.2, 0.1) == 4 * 0.1, "a time that was added up is a multiple, too"
