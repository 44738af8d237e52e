"""Properties of each asynchronous baseline's server, on random models."""

import math
from typing import Any

import numpy as np
import pytest

from freshet.core.events import Aggregated, Hurried, Record, Triggered
from freshet.core.messages import Upload
from freshet.core.method import Mismatch, Wait
from freshet.core.server import Server
from freshet.errors import ConfigError
from freshet.methods.fedasync import FedAsyncOptions
from freshet.methods.fedsa import FedSAOptions, staged_epochs
from freshet.methods.port import PORT, PORTOptions
from tests.methods.helpers import (
    BUFFERS,
    LEARNABLE,
    MODELS,
    UNEQUAL,
    arrivals,
    close,
    column,
    fly,
    logged,
    same,
    send,
    server_of,
    vector,
)

# ---- FedAsync

TABLE = [  # tau, polynomial a = 1/2, polynomial a = 2, hinge (10, 4), hinge (1, 2)
    (0, 1.0, 1.0, 1.0, 1.0),
    (1, 1 / math.sqrt(2), 1 / 4, 1.0, 1.0),
    (3, 0.5, 1 / 16, 1.0, 1 / 2),
    (4, 1 / math.sqrt(5), 1 / 25, 1.0, 1 / 3),
    (5, 1 / math.sqrt(6), 1 / 36, 1 / 11, 1 / 4),
    (8, 1 / 3, 1 / 81, 1 / 41, 1 / 7),
    (99, 0.1, 1e-4, 1 / 951, 1 / 98),
]


@pytest.mark.parametrize("row", TABLE)
def test_polynomial_and_hinge_values(row: tuple[int, float, float, float, float]) -> None:
    tau, *expected = row
    shapes = [
        FedAsyncOptions(poly_a=0.5),
        FedAsyncOptions(poly_a=2.0),
        FedAsyncOptions(staleness="hinge", hinge_a=10.0, hinge_b=4.0),
        FedAsyncOptions(staleness="hinge", hinge_a=1.0, hinge_b=2.0),
    ]
    assert [o.discount(tau) for o in shapes] == pytest.approx(expected, rel=1e-12)
    assert FedAsyncOptions(poly_a=0.0).discount(tau) == FedAsyncOptions(staleness="constant").discount(tau) == 1.0


def test_fedasync_weight_depends_on_tau_alone() -> None:
    server = server_of("fedasync", devices=4)
    seen: dict[int, set[float]] = {}

    def note(event: Record) -> None:
        (part,) = event["contributions"]
        assert part["weight"] == event["alpha"]
        seen.setdefault(part["staleness"] - 1, set()).add(event["alpha"])

    for turn in range(60):
        server.trigger([0])
        for _ in range(turn % 4):
            (event,) = fly(server, 1, vector(turn))
            note(event)
        (event,) = send(server, 0, vector(turn))
        note(event)
    assert {tau: len(alphas) for tau, alphas in seen.items()} == {0: 1, 1: 1, 2: 1, 3: 1}
    assert seen[3] == {0.6 / 2}


# ---- PORT


def test_port_weights_do_not_depend_on_the_scale_of_alpha_and_beta() -> None:
    results = []
    for factor in (1.0, 5.0):
        server = server_of("port", samples=UNEQUAL, K=4, alpha=3.0 * factor, beta=1.0 * factor)
        for seed in (0, 40):
            arrivals(server, {d: vector(seed + d) for d in range(4)})
        results.append(server.weights)
    close(results[0], results[1], 1e-7)
    options = PORTOptions(omega=10, alpha=1.0)
    assert all(0.5 <= options.freshness(tau) <= 1.0 for tau in range(11))


def port_with_a_straggler(**options: Any) -> Server:
    """Device 7 starts from version 1; others make ``omega + 1`` aggregations of one model each."""
    server = server_of("port", K=1, omega=2, **options)
    server.trigger([7])
    for step in range(3):
        assert len(fly(server, step, vector(step))) == 1
    assert server.version == 4  # tau of device 7 is 3 > omega
    return server


def test_port_waits_for_the_overdue_device_and_hurries_it_once() -> None:
    server = port_with_a_straggler()
    assert server.take_urgent() == []
    assert fly(server, 3, vector(3)) == []
    assert server.take_urgent() == [7]
    assert fly(server, 4, vector(4)) == []
    assert server.take_urgent() == []
    assert (server.version, server.waiting) == (4, {3, 4})
    (event,) = send(server, 7, vector(7))
    assert (column(event, "device"), column(event, "staleness")) == ([3, 4, 7], [1, 1, 4])
    assert server.waiting == set()


def test_port_without_urgent_only_waits() -> None:
    server = port_with_a_straggler(urgent=False)
    assert fly(server, 3, vector(3)) == []
    assert server.take_urgent() == []


def test_port_continues_when_the_overdue_device_is_lost() -> None:
    server = port_with_a_straggler()
    fly(server, 3, vector(3))
    events = logged(server.drop_trip(7, server.active_trips[7].trip, "gone"))
    assert [event["kind"] for event in events] == ["lost", "aggregate"]
    assert column(events[1], "device") == [3]


def test_port_strict_and_non_strict_waiting_differ_by_one() -> None:
    taus = {}
    for wait in ("gt", "ge"):
        server = server_of("port", K=1, omega=2, wait=wait)
        server.trigger([7])
        while fly(server, 0, vector(server.version)):
            pass
        taus[wait] = max(column(send(server, 7, vector(7))[0], "staleness")) - 1
    assert taus == {"gt": 3, "ge": 2}


def test_port_refuses_k_above_the_number_of_devices() -> None:
    with pytest.raises(ConfigError, match=r"method.K: must be at most fleet.devices = 4"):
        server_of("port", devices=4, K=5)


# ---- ASO-Fed


def test_asofed_step_is_linear_in_the_share_of_samples() -> None:
    w, u = vector(1), vector(2)
    for share in (1, 3, 9):
        server = server_of("asofed", samples=[share, 10 - share])
        (event,) = fly(server, 0, u)
        assert event["alpha"] == share / 10
        close(server.weights[:LEARNABLE], w[:LEARNABLE] + share / 10 * (u - w)[:LEARNABLE], 1e-6)


def test_asofed_feature_step_acts_on_the_first_layer_only() -> None:
    plain, scaled = (server_of("asofed", feature_step=on) for on in (False, True))
    for server in (plain, scaled):
        fly(server, 0, vector(2))
    first = slice(0, 6)
    assert np.linalg.norm(scaled.weights[first]) < np.linalg.norm(plain.weights[first])
    same(scaled.weights[6:], plain.weights[6:])


# ---- FedBuff


def test_fedbuff_does_not_change_the_model_before_the_buffer_is_full() -> None:
    server = server_of("fedbuff", K=4)
    w0 = server.weights.copy()
    for device in range(3):
        assert fly(server, device, MODELS[device]) == []
        assert server.version == 1
        same(server.weights, w0)
    (event,) = fly(server, 3, MODELS[3])
    assert (column(event, "device"), server.version) == ([0, 1, 2, 3], 2)


def test_fedbuff_takes_half_the_step_at_tau_3_and_deltas_not_mixtures() -> None:
    fresh, stale = server_of("fedbuff", K=2), server_of("fedbuff", K=2)
    start = fresh.weights
    for server in (fresh, stale):
        for device in (0, 1):
            server.trigger([device])
    for turn in range(6):
        fly(stale, 2 + turn % 2, start)  # deltas of zero: three versions pass, the model stays
    close(stale.weights, start, 1e-7)
    for server in (fresh, stale):
        for device in (0, 1):
            send(server, device, MODELS[device])
    n = LEARNABLE
    close(2.0 * (stale.weights[:n] - start[:n]), fresh.weights[:n] - start[:n], 1e-6)
    # buffers of the network are never scaled, neither by staleness nor by the server's rate
    close(stale.weights[n : n + BUFFERS], fresh.weights[n : n + BUFFERS], 1e-6)


def test_fedbuff_server_rate_scales_parameters_but_not_buffers() -> None:
    one, half = (server_of("fedbuff", K=4, eta_g=eta_g) for eta_g in (1.0, 0.5))
    for server in (one, half):
        arrivals(server, MODELS)
    n, w0 = LEARNABLE, vector(1)
    close(2.0 * (half.weights[:n] - w0[:n]), one.weights[:n] - w0[:n], 1e-6)
    same(half.weights[n:], one.weights[n:])


# ---- FedSA


def test_fedsa_epochs() -> None:
    o = FedSAOptions(stage1_updates=3, stage1_epochs=20)
    assert [staged_epochs(o, v, 5, {}, 0) for v in range(5)] == [20, 20, 20, 5, 5]
    estimates = {device: float(device) for device in range(12)}
    epochs = [staged_epochs(o, 9, 5, estimates, device) for device in range(12)]
    assert epochs == sorted(epochs, reverse=True)
    assert (epochs[0], epochs[-1]) == (5, math.floor(5 * 6.5 / 12))
    assert staged_epochs(o, 9, 5, {0: 0.0, 1: 1e6, 2: 0.0}, 1) == 1


def test_fedsa_epochs_are_fixed_when_the_trip_starts() -> None:
    server = server_of("fedsa", epochs=4, stage1_updates=1)
    server.trigger([0])
    assert fly(server, 1, vector(2))[0]["epochs"] == 20
    (event,) = send(server, 0, vector(3))
    assert (event["epochs"], event["estimate"]) == (20, 0.5)
    assert server.trigger([2])[0].epochs == 4


# ---- audit of PORT's waiting


def test_port_audit_finds_devices_left_out_and_hurried_without_cause() -> None:
    options = PORTOptions(K=1, omega=1)
    trigger = Triggered(device=0, trip=1, version=1, epochs=5, lr=0.1)
    with pytest.raises(Mismatch, match="hurried without being overdue"):
        memory: dict[Any, Any] = {"version": 2}
        PORT.audit(options, trigger, 0.0, memory)
        PORT.audit(options, Hurried(device=0, trip=1), 1.0, memory)
    server = server_of("port", K=1, omega=1)
    server.trigger([1])
    (event,) = server.upload(Upload(1, 1, 1, vector(2), 1))
    assert isinstance(event, Aggregated)
    memory = {}
    PORT.audit(options, trigger, 0.0, memory)
    PORT.audit(options, event, 1.0, memory)
    late = event._replace(version=3, contributions=(event.contributions[0]._replace(base=3),))
    with pytest.raises(Mismatch, match=r"devices \[0\] were overdue"):
        PORT.audit(options, late, 2.0, memory)


def test_port_audit_knows_the_first_version_before_any_aggregation() -> None:
    """With omega = 0 and wait = "ge" a device is overdue from the start."""
    trigger = Triggered(device=0, trip=1, version=1, epochs=5, lr=0.1)
    for options, hurries in ((PORTOptions(K=2, omega=0, wait="ge"), True), (PORTOptions(K=2, omega=0), False)):
        memory: dict[Any, Any] = {}
        PORT.audit(options, trigger, 0.0, memory)
        if hurries:
            PORT.audit(options, Hurried(device=0, trip=1), 1.0, memory)
            continue
        with pytest.raises(Mismatch, match="hurried without being overdue"):
            PORT.audit(options, Hurried(device=0, trip=1), 1.0, memory)


def test_buffer_returns_wait_until_full() -> None:
    server = server_of("port", K=2)
    server.trigger([0])
    assert server.method.forget(server, 5) == Wait()
