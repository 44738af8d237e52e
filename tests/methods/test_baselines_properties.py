"""What every baseline's server must satisfy (specs of the baselines, "sanity properties"), on made-up models."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from freshet.core.audit import Mismatch
from freshet.core.method import Wait
from freshet.core.server import Server
from freshet.core.vectors import Vector
from freshet.errors import ConfigError
from freshet.methods import options_for
from freshet.methods.fedasync import FedAsyncOptions
from freshet.methods.fedlws import shrink
from freshet.methods.fedsa import FedSAOptions, staged_epochs
from freshet.methods.port import PORT, PORTOptions
from tests.methods.lab import (
    ASYNCHRONOUS,
    BUFFERS,
    LEARNABLE,
    SYNCHRONOUS,
    close,
    fly,
    hold_round,
    same,
    send,
    server_of,
    vector,
)

EQUAL = [10] * 8
UNEQUAL = [5, 20, 1, 7, 11, 3, 40, 13]
MODELS = {device: vector(100 + device) for device in range(4)}


def fedavg(uploads: dict[int, Vector], samples: list[int]) -> Vector:
    server = server_of("fedavg", samples=samples)
    hold_round(server, uploads)
    return server.weights


def arrivals(server: Server, uploads: dict[int, Vector]) -> Vector:
    """All start from the same model and upload in turn."""
    for device in uploads:
        server.trigger([device])
    for device, weights in uploads.items():
        send(server, device, weights)
    return server.weights


# ---- the reduction lattice, as far as it needs no training (the rest is in test_baselines_runs.py)

Case = Callable[[], tuple[Vector, Vector]]
ONE = {3: vector(50)}
LATTICE: dict[str, tuple[Case, float]] = {
    "fedprox mu=0": (
        lambda: (_round("fedprox", mu=0.0), fedavg(MODELS, UNEQUAL)),
        0.0,
    ),
    "moon mu=0": (lambda: (_round("moon", mu=0.0), fedavg(MODELS, UNEQUAL)), 0.0),
    "fedlws beta=tau_min=0": (
        lambda: (_round("fedlws", beta=0.0, tau_min=0.0), fedavg(MODELS, UNEQUAL)),
        0.0,
    ),
    "feddyn without dual, equal samples": (
        lambda: (_round("feddyn", EQUAL, alpha=0.0), fedavg(MODELS, EQUAL)),
        0.0,
    ),
    "fedavg of one": (lambda: (fedavg(ONE, UNEQUAL), ONE[3]), 0.0),
    "fedasync alpha=1": (lambda: (_arrivals("fedasync", ONE, alpha=1.0, staleness="constant"), ONE[3]), 0.0),
    "fedbuff K=1, fresh": (lambda: (_arrivals("fedbuff", ONE, K=1), ONE[3]), 1e-7),
    "port K=1": (lambda: (_arrivals("port", ONE, K=1), ONE[3]), 0.0),
    "port, equal staleness, beta=0": (
        lambda: (_arrivals("port", MODELS, K=4, beta=0.0), fedavg(MODELS, UNEQUAL)),
        1e-7,
    ),
    "fedbuff K=P, fresh, equal samples": (
        lambda: (_arrivals("fedbuff", MODELS, EQUAL, K=4), fedavg(MODELS, EQUAL)),
        1e-6,
    ),
    "fedsa without stages": (lambda: (_stale("fedsa", stage1_updates=0), _stale("fedasync")), 0.0),
    "asofed alone": (lambda: (_arrivals("asofed", {0: vector(50)}, [9]), vector(50)), 1e-7),
}


def _round(name: str, samples: list[int] = UNEQUAL, **options: Any) -> Vector:
    server = server_of(name, samples=samples, **options)
    hold_round(server, MODELS)
    return server.weights


def _arrivals(name: str, uploads: dict[int, Vector], samples: list[int] = UNEQUAL, **options: Any) -> Vector:
    return arrivals(server_of(name, samples=samples, **options), uploads)


def _stale(name: str, **options: Any) -> Vector:
    """Arrivals with staleness 0 to 3, twice."""
    server = server_of(name, samples=UNEQUAL, alpha=0.6, **options)
    for seed in (0, 1):
        arrivals(server, {device: vector(seed * 10 + device) for device in range(4)})
    return server.weights


@pytest.mark.parametrize("case", LATTICE)
def test_reduction_lattice(case: str) -> None:
    make, tolerance = LATTICE[case]
    ours, expected = make()
    n = LEARNABLE + BUFFERS  # counters follow C4, whatever the weights
    if tolerance == 0.0:
        same(ours[:n], expected[:n])
    else:
        close(ours[:n], expected[:n], tolerance)


# ---- properties that several methods share


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_uploads_equal_to_the_model_change_nothing(name: str) -> None:
    options = {"fedbuff": {"K": 2}, "port": {"K": 2}}.get(name, {})
    server = server_of(name, samples=UNEQUAL, **options)
    w0 = server.weights
    for _ in range(3):  # for FedLWS gamma is 1, for FedDyn lambda and G stay 0
        if server.synchronous:
            hold_round(server, dict.fromkeys(range(4), w0))
        else:
            arrivals(server, dict.fromkeys(range(4), w0))
    assert server.version > 3
    close(server.weights, w0, 1e-7)
    if name not in ("asofed", "fedbuff"):  # (w + p u) - p w is rounded
        same(server.weights, w0)


@pytest.mark.parametrize("name", ["fedavg", "fedlws", "fedprox", "moon", "port", "asofed"])
def test_scaling_all_sample_counts_changes_nothing(name: str) -> None:
    options = {"port": {"K": 4}}.get(name, {})
    results = []
    for factor in (1, 7):
        server = server_of(name, samples=[factor * n for n in UNEQUAL], **options)
        for seed in (0, 40):
            uploads = {d: vector(seed + d) for d in range(4)}
            if server.synchronous:
                hold_round(server, uploads)
            else:
                arrivals(server, uploads)
        results.append(server.weights)
    close(results[0], results[1], 1e-7)


@pytest.mark.parametrize("name", [*SYNCHRONOUS, "fedbuff", "port"])
def test_the_order_of_uploads_changes_rounding_only(name: str) -> None:
    options: dict[str, Any] = {"K": 4} if name in ("fedbuff", "port") else {}
    results = []
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        server = server_of(name, samples=UNEQUAL, **options)
        uploads = {device: MODELS[device] for device in order}
        if server.synchronous:
            hold_round(server, uploads)
        else:
            arrivals(server, uploads)
        results.append(server.weights)
    close(results[0], results[1], 1e-6)
    if name in SYNCHRONOUS:  # evaluated in ascending order of device, whoever came first
        same(results[0], results[1])


@pytest.mark.parametrize("name", ["fedbuff", "port", *SYNCHRONOUS])
def test_a_model_that_is_not_finite_counts_nowhere(name: str) -> None:
    options: dict[str, Any] = {"K": 3} if name in ("fedbuff", "port") else {}
    bad = vector(9)
    bad[2] = np.inf
    results = []
    for uploads in ({0: MODELS[0], 1: MODELS[1], 3: MODELS[3]}, {0: MODELS[0], 5: bad, 1: MODELS[1], 3: MODELS[3]}):
        server = server_of(name, samples=UNEQUAL, **options)
        if server.synchronous:
            hold_round(server, uploads)
        else:
            arrivals(server, uploads)
        assert server.version == 2
        results.append(server.weights)
    same(results[0], results[1])


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


def test_fedasyncs_weight_depends_on_tau_alone() -> None:
    server = server_of("fedasync", devices=4)
    seen: dict[int, set[float]] = {}
    for turn in range(60):
        server.trigger([0])
        for _ in range(turn % 4):
            (event,) = fly(server, 1, vector(turn))
            seen.setdefault(event["staleness"] - 1, set()).add(event["alpha"])
        (event,) = send(server, 0, vector(turn))
        seen.setdefault(event["staleness"] - 1, set()).add(event["alpha"])
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


def test_port_waits_for_the_overdue_device_and_names_it_once() -> None:
    server = port_with_a_straggler()
    assert server.take_urgent() == []
    assert fly(server, 3, vector(3)) == []
    assert server.take_urgent() == [7]
    assert fly(server, 4, vector(4)) == []
    assert server.take_urgent() == []
    assert (server.version, server.waiting) == (4, {3, 4})
    (event,) = send(server, 7, vector(7))
    assert (event["devices"], event["stalenesses"]) == ([3, 4, 7], [1, 1, 4])
    assert server.waiting == set()


def test_port_without_urgent_pull_just_waits() -> None:
    server = port_with_a_straggler(urgent=False)
    assert fly(server, 3, vector(3)) == []
    assert server.take_urgent() == []


def test_port_goes_on_when_the_overdue_device_is_lost() -> None:
    server = port_with_a_straggler()
    fly(server, 3, vector(3))
    events = server.lost(7, server.flights[7].trip, "gone")
    assert [event["kind"] for event in events] == ["lost", "aggregate"]
    assert events[1]["devices"] == [3]


def test_port_strict_and_non_strict_waiting_differ_by_one() -> None:
    taus = {}
    for wait in ("gt", "ge"):
        server = server_of("port", K=1, omega=2, wait=wait)
        server.trigger([7])
        while fly(server, 0, vector(server.version)):
            pass
        taus[wait] = send(server, 7, vector(7))[0]["staleness"] - 1
    assert taus == {"gt": 3, "ge": 2}


def test_port_cannot_wait_for_more_models_than_there_are_devices() -> None:
    with pytest.raises(ConfigError, match=r"method.K: must be at most fleet.devices = 4"):
        server_of("port", devices=4, K=5)


# ---- ASO-Fed


def test_aso_feds_step_is_linear_in_the_share_of_samples() -> None:
    w, u = vector(1), vector(2)
    for share in (1, 3, 9):
        server = server_of("asofed", samples=[share, 10 - share])
        (event,) = fly(server, 0, u)
        assert event["alpha"] == share / 10
        close(server.weights[:LEARNABLE], w[:LEARNABLE] + share / 10 * (u - w)[:LEARNABLE], 1e-6)


def test_aso_feds_feature_step_acts_on_the_first_layer_only() -> None:
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
    assert (event["devices"], server.version) == ([0, 1, 2, 3], 2)


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


def test_fedsas_epochs() -> None:
    o = FedSAOptions(stage1_updates=3, stage1_epochs=20)
    assert [staged_epochs(o, v, 5, {}, 0) for v in range(5)] == [20, 20, 20, 5, 5]
    estimates = {device: float(device) for device in range(12)}
    epochs = [staged_epochs(o, 9, 5, estimates, device) for device in range(12)]
    assert epochs == sorted(epochs, reverse=True)
    assert (epochs[0], epochs[-1]) == (5, math.floor(5 * 6.5 / 12))
    assert staged_epochs(o, 9, 5, {0: 0.0, 1: 1e6, 2: 0.0}, 1) == 1


def test_fedsas_epochs_are_fixed_when_the_trip_starts() -> None:
    server = server_of("fedsa", epochs=4, stage1_updates=1)
    server.trigger([0])
    assert fly(server, 1, vector(2))[0]["epochs"] == 20
    (event,) = send(server, 0, vector(3))
    assert (event["epochs"], event["estimate"]) == (20, 0.5)
    assert server.trigger([2])[0].epochs == 4


# ---- FedProx


def test_fedprox_partial_work_is_aggregated_with_its_full_weight() -> None:
    for drop, slow in ((0.0, 0), (0.25, 1), (0.5, 2), (1.0, 4)):
        server = server_of("fedprox", samples=UNEQUAL, epochs=5, drop=drop)
        for _ in range(6):
            event = hold_round(server, MODELS)
            close(event["weights"], [n / sum(UNEQUAL[:4]) for n in UNEQUAL[:4]], 1e-12)
            epochs = [server_epochs for server_epochs in _epochs(server)]
            assert sum(e < 5 for e in epochs) == slow
            assert all(1 <= e <= 5 for e in epochs)
    assert _epochs(server_of("fedprox", epochs=1, drop=1.0)) == [1, 1, 1, 1]


def _epochs(server: Server) -> list[int]:
    epochs = [assignment.epochs for assignment in server.trigger([0, 1, 2, 3])]
    for device in range(4):
        send(server, device, vector(device))
    return epochs


# ---- FedDyn


@pytest.mark.parametrize("devices", [4, 10])
def test_feddyns_first_round_and_what_is_evaluated(devices: int) -> None:
    server = server_of("feddyn", devices=devices)
    theta, n = server.weights, LEARNABLE
    same(server.method.evaluated(server), theta)
    hold_round(server, MODELS)
    mean = np.mean([u.astype(np.float64) for u in MODELS.values()], axis=0)
    close(server.weights[:n], (mean + 4 / devices * (mean - theta))[:n], 1e-6)
    close(server.method.evaluated(server)[:-2], mean[:-2], 1e-6)
    if devices == 4:
        close(server.weights[:n], (2 * mean - theta)[:n], 1e-6)
    close(server.weights[n:-2], mean[n:-2], 1e-6)  # buffers: the plain mean, never the dual
    G, sent = server.method.G.copy(), server.weights  # type: ignore[attr-defined]
    hold_round(server, dict.fromkeys(range(4), sent))
    same(server.method.G, G)  # type: ignore[attr-defined]
    close(server.weights[:n], sent[:n] + G, 1e-6)


def test_feddyns_alpha_follows_the_share_of_samples() -> None:
    server = server_of("feddyn", samples=[10, 30], alpha=0.1)
    assert [a.instruction["alpha_k"] for a in server.trigger([0, 1])] == pytest.approx([0.2, 0.1 / 1.5])
    assert server_of("feddyn", alpha=0.0).trigger([0])[0].instruction == {}


# ---- FedLWS


def test_fedlws_shrinks_by_a_bounded_factor() -> None:
    server = server_of("fedlws", samples=UNEQUAL)
    event = hold_round(server, MODELS)
    for w_norm, move, tau, gamma in zip(*(event[k] for k in ("w_norm", "move_norm", "tau", "gamma")), strict=True):
        assert 0.01 <= tau <= 0.2
        assert w_norm / (w_norm + 0.2 * move) <= gamma < 1.0
    close(server.weights[LEARNABLE:], fedavg(MODELS, UNEQUAL)[LEARNABLE:], 1e-7)  # buffers are not shrunk


def test_fedlws_edges() -> None:
    identical = hold_round(server_of("fedlws"), dict.fromkeys(range(3), vector(2)))
    alone = hold_round(server_of("fedlws"), {0: vector(2)})
    for event in (identical, alone):
        assert event["tau"] == [0.01, 0.01]
        assert all(gamma < 1.0 for gamma in event["gamma"])
    zero = server_of("fedlws", np.zeros_like(vector(1)))
    assert hold_round(zero, {0: vector(2)})["gamma"] == [1.0, 1.0]
    same(zero.weights, vector(2))
    gammas = [shrink(1.0, 0.1, move) for move in (0.0, 0.1, 1.0, 10.0)]
    assert gammas[0] == 1.0
    assert gammas == sorted(gammas, reverse=True)
    with pytest.raises(ConfigError, match="tau_min must be at most tau_max"):
        options_for("fedlws", {"tau_min": 0.5})


# ---- audit


def test_ports_audit_sees_who_was_left_out_and_who_was_hurried_for_nothing() -> None:
    options = PORTOptions(K=1, omega=1)
    trigger = {"kind": "trigger", "device": 0, "version": 1}
    with pytest.raises(Mismatch, match="hurried without being overdue"):
        memory: dict[Any, Any] = {"version": 2}
        PORT.audit(options, trigger, memory)
        PORT.audit(options, {"kind": "urgent", "device": 0}, memory)
    server = server_of("port", K=1, omega=1)
    (event,) = fly(server, 1, vector(2))
    memory = {}
    PORT.audit(options, trigger, memory)
    PORT.audit(options, event, memory)
    late = event | {"version": 3, "bases": [3], "cos": [1.0]}
    with pytest.raises(Mismatch, match="overdue"):
        PORT.audit(options, late, memory)


def test_wait_is_what_a_buffer_says() -> None:
    server = server_of("port", K=2)
    server.trigger([0])
    assert server.method.forget(server, 5) == Wait()
