"""Rivals that decide by time: FedCompass, Pisces and SAFA, with test vectors, twins, timers and cancelled trips."""

from typing import Any

import numpy as np
import pytest

from freshet.core.coordinator import Coordinator, Effects
from freshet.core.scheduling import Trigger, View
from freshet.core.server import Server
from freshet.methods import class_and_preset
from tests.methods.helpers import (
    TWIN_LAYOUT,
    UNEQUAL,
    Device,
    arrivals,
    close,
    column,
    fly,
    hold_round,
    logged,
    regression_weights,
    same,
    send,
    server_of,
    upload_of,
    vector,
)
from tests.methods.test_rivals_twin import A, B, scalar_server, value
from tests.twins import local
from tests.twins import rivals as twins
from tests.twins.helpers import f64


def arrive(c: Coordinator, now: float, device: int, delta: float, **report: float) -> Effects:
    """An upload with this progress."""
    start = c.server.store.get(c.server.active_trips[device].base)
    upload = upload_of(c.server, device, start + np.float32(delta), report=report)
    return c.upload_arrived(now, device, upload.trip, lambda: upload)


def tick(c: Coordinator, now: float) -> dict[int, int]:
    """The epochs of the devices that start now."""
    return {each.device: each.epochs for each in c.tick(now, lambda device: True).assignments}


# ---- FedCompass


def compass(**options: Any) -> Coordinator:
    """Two devices, both always in flight."""
    given = {"Q_max": 10, "Q_min": 2, "alpha": 0.9, **options}
    return Coordinator(scalar_server("fedcompass", in_flight=2, **given), Trigger("concurrency", 2, 10.0, 2))


def test_vector_of_fedcompass() -> None:
    c = compass()
    assert tick(c, 0.0) == {A: 10, B: 10}
    arrive(c, 10.0, A, 1.0)
    assert value(c.server) == pytest.approx(0.45)
    assert tick(c, 10.0) == {A: 10}
    state = c.server.method.state
    assert [(group.expected, group.latest) for group in state.groups.values()] == [(20.0, 25.0)]
    arrive(c, 20.0, A, 0.6)
    assert value(c.server) == pytest.approx(0.72)
    assert tick(c, 20.0) == {A: 10}
    assert [(group.expected, group.latest) for group in state.groups.values()] == [(30.0, 35.0)]
    arrive(c, 28.0, B, -2.0)
    assert value(c.server) == pytest.approx(0.2003848, abs=1e-6)
    assert tick(c, 28.0) == {B: 6}
    assert [group.expected for group in state.groups.values()] == pytest.approx([30.0, 44.8])
    assert [group.latest for group in state.groups.values()] == pytest.approx([35.0, 53.2])


def grouped() -> Coordinator:
    """A and B in one group: z is 1 for A and 2 for B, both are expected at 30, at the latest at 35."""
    c = compass()
    tick(c, 0.0)
    arrive(c, 10.0, A, 0.0)
    tick(c, 10.0)
    arrive(c, 20.0, A, 0.0)
    arrive(c, 20.0, B, 0.0)
    assert tick(c, 20.0) == {A: 10, B: 5}
    return c


def test_group_of_fedcompass_steps_when_its_last_member_is_in() -> None:
    c = grouped()
    version = c.server.version
    arrive(c, 30.0, B, 1.0)
    assert tick(c, 30.0) == {}, "B waits for A"
    assert c.server.version == version
    before = value(c.server)
    arrive(c, 31.0, A, 1.0)
    assert value(c.server) - before == pytest.approx(0.9)
    assert tick(c, 31.0).keys() == {A, B}


def test_group_of_fedcompass_steps_at_its_latest_time_and_then_takes_late_uploads() -> None:
    c = grouped()
    arrive(c, 30.0, B, 1.0)
    before, version = value(c.server), c.server.version
    assert c.server.timer == 35.0
    events = c.tick(35.0, lambda device: True).events
    assert [type(event).__name__ for event in events] == ["Aggregated", "Triggered"]
    assert value(c.server) - before == pytest.approx(0.45)
    arrive(c, 40.0, A, 1.0)
    assert c.server.version == version + 1, "a late upload waits"
    assert A in tick(c, 40.0), "and its device starts again"
    before = value(c.server)
    arrive(c, 45.0, B, 1.0)
    c.trip_lost(46.0, A, c.server.active_trips[A].trip, "gone")
    assert c.server.version == version + 2
    assert value(c.server) - before == pytest.approx(0.45 + 0.45 / 2**0.5, abs=1e-6)


def test_lost_device_of_fedcompass_leaves_its_group() -> None:
    c = grouped()
    arrive(c, 30.0, B, 1.0)
    version = c.server.version
    events = c.trip_lost(31.0, A, c.server.active_trips[A].trip, "gone").events
    assert [type(event).__name__ for event in events] == ["Lost", "Aggregated"]
    assert c.server.version == version + 1


def test_a_tick_is_scheduled_once_for_each_time_of_the_method() -> None:
    c = compass()
    tick(c, 0.0)
    arrive(c, 10.0, A, 1.0)
    assert c.tick(10.0, lambda device: True).timer_at == 25.0
    assert c.tick(11.0, lambda device: True).timer_at is None


def test_fedcompass_matches_its_twin() -> None:
    options = {"alpha": 0.9, "a": 0.4, "lambda_": 1.2, "Q_max": 10, "Q_min": 2}
    server, rng = server_of("fedcompass", **options), np.random.default_rng(8)
    twin, steps, timed = twins.FedCompassTwin(vector(1), M=8, **options, **TWIN_LAYOUT), 0, 0
    speed, due = rng.uniform(0.5, 4.0, 8), dict[int, float]()
    for _ in range(400):
        waiting = server.method.state.waiting
        device = int(rng.choice([d for d in range(8) if d not in waiting or d in due]))
        server.now += float(rng.exponential(0.7))
        if due and (device in due or rng.random() < 0.4):
            device = min(due, key=lambda each: due[each])
            server.now = max(server.now, due[device])
        events: list[Any] = []
        while (time := server.method.timer(server)) is not None and time <= server.now:
            events += logged(server.run_timer())
        found = twin.expire(server.now)
        timed += len(found)
        if device not in due:
            (assignment,) = server.trigger([device], server.now)
            assert assignment.epochs == twin.start_trip(device, server.now)
            due[device] = server.now + assignment.epochs * speed[device] * float(rng.uniform(0.8, 1.4))
        elif rng.random() < 0.1:
            del due[device]
            events += logged(server.drop_trip(device, server.active_trips[device].trip, "gone"))[1:]
            found.append(twin.lose_trip(device))
        else:
            del due[device]
            u = vector(int(rng.integers(1 << 30)))
            events += send(server, device, u)
            found.append(twin.upload(device, u, server.now))
        results = [each for each in found if each is not None]
        assert len(events) == len(results)
        for event, result in zip(events, results, strict=True):
            weights = dict(zip(column(event, "device"), column(event, "weight"), strict=True))
            assert weights == pytest.approx(result["shares"])
            steps += 1
        close(server.weights, twin.w, 5e-6)
    assert steps > 40 and timed > 5


# ---- Pisces


def pisces(samples: list[int] | None = None, **options: Any) -> Server:
    return scalar_server("pisces", samples=samples or [30, 10], in_flight=2, **options)


def report(server: Server, now: float, device: int, u: float, loss: float = 1.0) -> list[Any]:
    server.now = now
    return send(server, device, np.array([u], np.float32), loss=loss)


def test_vector_of_pisces() -> None:
    """Tested at arrivals alone; a timer would aggregate B's upload at 150."""
    server = pisces()
    server.trigger([A, B], 0.0)
    report(server, 100.0, A, 1.0)
    assert value(server) == 1.0, "B was never timed: 100 >= 180 / 2"
    server.trigger([A], 100.0)
    assert report(server, 140.0, B, -1.0) == [], "40 < 100 / 2"
    assert server.timer == 150.0
    report(server, 160.0, A, 2.0)
    assert value(server) == pytest.approx(1.3964466, abs=1e-6)
    assert server.timer is None


def test_pisces_aggregates_at_its_pace() -> None:
    c = Coordinator(pisces(), Trigger("concurrency", 2, 10.0, 2))
    tick(c, 0.0)
    arrive(c, 100.0, A, 1.0, loss=1.0)
    tick(c, 100.0)
    assert arrive(c, 140.0, B, -1.0, loss=1.0).timer_at == 150.0
    events = c.tick(150.0, lambda device: True).events
    assert [type(event).__name__ for event in events] == ["Aggregated", "Triggered"]


def test_lost_last_device_of_pisces_ends_the_wait() -> None:
    server = pisces()
    server.trigger([A, B], 0.0)
    assert report(server, 10.0, A, 1.0) == []
    server.now = 11.0
    assert len(server.drop_trip(B, 1, "gone")) == 2
    assert value(server) == 1.0


def view(seed: int = 0) -> View:
    return View(1, 0, np.ones(1, np.int64), {}, np.random.default_rng(seed))


def test_pisces_prefers_high_losses_many_samples_and_little_staleness() -> None:
    method = scalar_server("pisces", samples=[10, 10, 20, 10], epsilon=0.0).method
    state = method.state
    state.explored = dict.fromkeys(range(4), True)
    state.root_loss = {0: 1.0, 1: 2.0, 2: 1.5, 3: 2.0}
    state.taus = {1: [1, 5], 3: [0]}
    assert [method.utility(device) for device in range(4)] == pytest.approx([10.0, 10.0, 30.0, 20.0])
    assert method.select(view(), 2, [0, 1, 2, 3]) == [2, 3]
    state.buffer[2] = None
    assert method.select(view(), 1, [0, 1, 2, 3]) == [3], "a device in the buffer does not start"


def test_pisces_explores_less_and_less() -> None:
    method = scalar_server("pisces", samples=[10] * 8, epsilon=1.0).method
    assert len(method.select(view(), 3, list(range(8)))) == 3
    assert method.state.epsilon == 0.98
    for seed in range(100):
        method.select(view(seed), 1, list(range(8)))
    assert method.state.epsilon == 0.3
    assert sorted(method.state.explored) == list(range(8))


def test_device_reports_the_moving_average_of_its_first_epoch() -> None:
    device, w = Device(lr=0.2), regression_weights(3)
    outcome = device.train(class_and_preset("pisces")[0].rule(None), w, instruction={"loss_decay": 0.25})
    expected, u = None, f64(w)
    for index in device.batches()[0]:
        loss = local.loss(u, device.x[index], device.y[index])
        expected = loss if expected is None else 0.75 * expected + 0.25 * loss
        u = u - 0.2 * local.gradient(u, device.x[index], device.y[index])
    assert outcome.report["loss"] == pytest.approx(expected, rel=1e-5)
    assert "loss" not in device.train(class_and_preset("fedavg")[0].rule(None), w).report


@pytest.mark.parametrize("loss", [{}, {"loss": -1.0}])
def test_pisces_rejects_an_impossible_loss(loss: dict[str, float]) -> None:
    server = pisces()
    server.trigger([A])
    (event,) = logged(server.upload(upload_of(server, A, server.weights, report=loss)))
    assert "loss" in event["reason"]
    assert server.method.state.buffer == {}


def test_pisces_matches_its_twin() -> None:
    server, rng = server_of("pisces", samples=UNEQUAL, beta=0.6, first_latency=6.0), np.random.default_rng(3)
    twin = twins.PiscesTwin(vector(1), n=dict(enumerate(UNEQUAL)), beta=0.6, C=1, first=6.0, **TWIN_LAYOUT)
    steps = 0
    for _ in range(300):
        server.now += float(rng.exponential(1.0))
        events = []
        while (time := server.method.timer(server)) is not None and time <= server.now:
            events += logged(server.run_timer())
        found = twin.look(server.now)
        idle = [d for d in range(8) if d not in server.active_trips]
        if idle and (rng.random() < 0.5 or not server.active_trips):
            device = int(rng.choice(idle))
            server.trigger([device], server.now)
            twin.start_trip(device, server.now)
        else:
            device = int(rng.choice(list(server.active_trips)))
            u, loss = vector(int(rng.integers(1 << 30))), float(rng.random())
            events += send(server, device, u, loss=loss)
            found += twin.upload(device, u, loss, server.now)
        assert [dict(zip(column(e, "device"), column(e, "weight"), strict=True)) for e in events] == [
            pytest.approx(each) for each in found
        ]
        for each in range(8):
            assert server.method.utility(each) == pytest.approx(twin.utility(each))
        steps += len(found)
        close(server.weights, twin.w, 5e-6)
    assert steps > 50


# ---- SAFA


def safa(**options: Any) -> Server:
    return scalar_server("safa", samples=[30, 10], C=0.5, **options)  # quota 1


def test_vector_of_safa() -> None:
    server = safa()
    server.trigger([A, B])
    send(server, A, np.float32([1.0]))
    assert value(server) == 0.75
    server.trigger([A])
    assert send(server, A, np.float32([2.0])) == [], "A was picked in the last round"
    (event,) = send(server, B, np.float32([-1.0]))
    assert (column(event, "device"), event["bypassed"]) == ([B], [A])
    assert value(server) == 0.5
    assert {k: float(v[0]) for k, v in server.method.state.cache.items()} == {A: 2.0, B: -1.0}


def test_safa_cancels_trips_that_are_too_far_behind() -> None:
    c = Coordinator(safa(), Trigger("concurrency", 2, 10.0, 2))
    tick(c, 0.0)
    arrive(c, 10.0, A, 1.0)
    assert tick(c, 10.0).keys() == {A}
    c.server.method.state.picked = []  # so that A alone reaches the quota again
    effects = arrive(c, 20.0, A, 1.0)
    assert [type(event).__name__ for event in effects.events] == ["Uploaded", "Aggregated", "Lost"]
    assert list(effects.cancelled) == [B]
    same(c.server.method.state.cache[B], c.server.weights)
    assert tick(c, 20.0).keys() == {A, B}, "both start from the new model"
    assert c.server.active_trips[B].base == c.server.version


def test_safa_replaces_the_cache_of_an_idle_device_that_falls_behind() -> None:
    """As the authors' code does for every device, also for those that are away: their old models must not pull."""
    server = scalar_server("safa", samples=[10] * 4, C=0.25, lag_tol=1)
    fly(server, 0, np.float32([8.0]))
    assert value(server) == 2.0
    fly(server, 1, np.float32([6.0]))  # the third version: devices 2 and 3 still have the first
    assert value(server) == 3.5
    state = server.method.state
    assert {k: float(v[0]) for k, v in state.cache.items()} == {0: 8.0, 1: 6.0, 2: 3.5, 3: 3.5}
    fly(server, 2, np.float32([0.5]))  # device 0 has the second version, now 2 behind
    assert value(server) == 4.5
    assert {k: float(v[0]) for k, v in state.cache.items()} == {0: 4.5, 1: 6.0, 2: 0.5, 3: 3.5}


def test_cancelled_device_that_cannot_be_interrupted_is_away_until_it_is_heard() -> None:
    c = Coordinator(safa(), Trigger("concurrency", 2, 10.0, 2))
    c.server.can_interrupt = False
    tick(c, 0.0)
    late = upload_of(c.server, B, c.server.weights)
    for now in (10.0, 20.0):
        arrive(c, now, A, 1.0)
        c.server.method.state.picked = []
        assert tick(c, now).keys() == {A}
    (event,) = c.upload_arrived(25.0, B, late.trip, lambda: late).events
    assert event.reason == "no such trip in flight"
    assert tick(c, 25.0).keys() == {B}


def test_round_of_safa_ends_at_its_deadline() -> None:
    c = Coordinator(scalar_server("safa", samples=[30, 10], C=1.0, deadline=15.0), Trigger("concurrency", 2, 99.0, 2))
    assert c.tick(0.0, lambda device: True).timer_at == 15.0
    arrive(c, 10.0, A, 1.0)
    assert c.server.version == 1
    effects = c.tick(15.0, lambda device: True)
    assert [type(event).__name__ for event in effects.events] == ["Aggregated", "Triggered"]
    assert effects.timer_at == 30.0
    assert value(c.server) == 0.75
    assert c.tick(30.0, lambda device: True).timer_at == 45.0, "a round without arrivals just goes on"
    assert c.server.version == 2


def test_safa_matches_its_twin() -> None:
    server, rng = server_of("safa", samples=UNEQUAL, C=0.3, lag_tol=2), np.random.default_rng(4)
    twin = twins.SAFATwin(vector(1), n=dict(enumerate(UNEQUAL)), quota=3, lag_tol=2, **TWIN_LAYOUT)
    steps = cancelled = bypassed = 0
    for _ in range(400):
        idle = [d for d in range(8) if d not in server.active_trips and d not in server.waiting]
        if idle and (rng.random() < 0.5 or not server.active_trips):
            device = int(rng.choice(idle))
            server.trigger([device])
            twin.trigger(device)
            continue
        device = int(
            rng.choice([d for d in server.active_trips if d < 6 or rng.random() < 0.1] or [*server.active_trips])
        )
        if rng.random() < 0.1:
            events = logged(server.drop_trip(device, server.active_trips[device].trip, "gone"))[1:]
            result = twin.lose_trip(device)
        else:
            u = vector(int(rng.integers(1 << 30)))
            events, result = send(server, device, u), twin.upload(device, u)
        assert bool(events) == (result is not None)
        if result is not None:
            step, *lost = events
            weights = dict(zip(column(step, "device"), column(step, "weight"), strict=True))
            assert weights == pytest.approx(result["picks"])
            assert step["bypassed"] == result["bypassed"]
            assert sorted(event["device"] for event in lost) == sorted(result["cancelled"])
            steps, cancelled, bypassed = steps + 1, cancelled + len(lost), bypassed + len(step["bypassed"])
        close(server.weights, twin.w, 2e-6)
    assert steps > 30 and cancelled > 5 and bypassed > 3


def test_safa_with_a_full_quota_and_equal_speed_is_fedavg() -> None:
    samples = UNEQUAL[:4]
    server, reference = server_of("safa", samples=samples, C=1.0), server_of("fedavg", samples=samples)
    for seed in (0, 40):
        uploads = {device: vector(seed + device) for device in range(4)}
        hold_round(reference, uploads)
        close(arrivals(server, uploads), reference.weights, 1e-6)


def test_fedac_keeps_the_control_of_a_device_whose_upload_still_waits() -> None:
    """The device may start again before its upload is used. It must not go back to its older control."""
    server = scalar_server("fedac", samples=[10, 10, 10], K=2)
    server.trigger([0])
    upload = upload_of(server, 0, server.weights + np.float32(0.5))
    server.upload(upload)
    assert server.method.instruct(server, 0) == {"heard": 1} and server.method.instruct(server, 1) == {"heard": 0}
