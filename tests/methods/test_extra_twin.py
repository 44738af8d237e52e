"""SCAFFOLD, FedOpt, FedNova, CA2FL and FADAS: comparison with naive twins, and limiting cases."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from freshet.core.method import MethodContext
from freshet.core.server import Server
from freshet.core.vectors import Vector
from freshet.methods import class_and_preset, method_options
from freshet.methods.fednova import path_length
from freshet.training.optimisers import constant, sgd
from tests.methods.helpers import (
    LAYOUT,
    LEARNABLE,
    MODELS,
    TWIN_LAYOUT,
    UNEQUAL,
    arrivals,
    close,
    column,
    fedavg,
    hold_round,
    logged,
    same,
    send,
    server_of,
    upload_of,
    vector,
)
from tests.twins import extra as twins

LR = 0.1  # of every server in the laboratory
SAMPLES = dict(enumerate(UNEQUAL))
ADAPTIVE = {"eta": 0.3, "beta1": 0.8, "beta2": 0.9, "tau": 0.05}
DELAYED = {"eta": 0.2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "tau_c": 1}


def nova_server(momentum: float = 0.0, **options: Any) -> Server:
    """Return a FedNova server with devices that train with momentum."""
    counts = np.array(UNEQUAL, np.int64)
    context = MethodContext(len(counts), counts, 1, 4, LAYOUT, seed=3, reach=sgd(momentum).reach)
    return Server(
        class_and_preset("fednova")[0](method_options("fednova", options), context), context, vector(1), constant(LR)
    )


def nova(momentum: float = 0.0, **options: Any) -> tuple[Server, Any]:
    return nova_server(momentum, **options), twins.FedNovaTwin(
        vector(1), lr=LR, momentum=momentum, **options, **TWIN_LAYOUT
    )


def fedopt(server: str) -> tuple[Server, Any]:
    options = {"server": server, **ADAPTIVE}
    return server_of("fedopt", samples=UNEQUAL, **options), twins.FedOptTwin(vector(1), **options, **TWIN_LAYOUT)


def scaffold(**options: Any) -> tuple[Server, Any]:
    return server_of("scaffold", samples=UNEQUAL, **options), twins.SCAFFOLDTwin(
        vector(1), N=8, **options, **TWIN_LAYOUT
    )


ROUNDS: dict[str, Callable[[], tuple[Server, Any]]] = {
    "scaffold": scaffold,
    "scaffold eta_g": lambda: scaffold(eta_g=0.4),
    "fedavgm": lambda: fedopt("sgd"),
    "fedadagrad": lambda: fedopt("adagrad"),
    "fedadam": lambda: fedopt("adam"),
    "fedyogi": lambda: fedopt("yogi"),
    "fednova": nova,
    "fednova momentum": lambda: nova(0.9),
    "fednova proximal": lambda: nova(mu=2.0),
    "fednova both": lambda: nova(0.6, mu=2.0),
    "fednova by steps": lambda: nova(mu=2.0, tau_eff="steps"),
}


@pytest.mark.parametrize("case", ROUNDS)
def test_synchronous_servers_match_the_twins(case: str) -> None:
    (server, twin), rng = ROUNDS[case](), np.random.default_rng(6)
    for number in range(12):
        members = [int(d) for d in rng.choice(8, size=4, replace=False)]  # they upload in this order
        gone = members if number == 5 else members[:1] if number == 7 else []
        uploads, more = {}, {}
        server.trigger(sorted(members))
        events: list[Any] = []
        for device in members:
            if device in gone:
                events = logged(server.drop_trip(device, server.active_trips[device].trip, "gone"))
                continue
            steps, change = int(rng.integers(1, 9)), rng.standard_normal(LEARNABLE).astype(np.float32)
            u = uploads[device] = vector(int(rng.integers(1 << 30)))
            vectors = dict.fromkeys(server.rule.sends, change)
            events = logged(server.upload(upload_of(server, device, u, steps, vectors=vectors)))
            more[device] = change if "scaffold" in case else steps
        result = twin.aggregate(uploads, *[more] if "scaffold" in case else [SAMPLES, more][: 1 + ("nova" in case)])
        event = events[-1]
        assert (event["version"], column(event, "device")) == (result["version"], result["devices"])
        close(column(event, "weight"), result["weights"], 1e-12)
        for key in ("a", "tau_eff"):
            if key in result:
                close(event[key], result[key], 1e-12)
        close(server.weights, twin.w, 3e-7)
        if "scaffold" in case:
            close(server.method.state.c, twin.c, 1e-6)


def ca2fl(**options: Any) -> tuple[Server, Any]:
    settings = {"M": 3, **options}
    return server_of("ca2fl", **settings), twins.CA2FLTwin(vector(1), n=8, **settings, **TWIN_LAYOUT)


def fadas(**options: Any) -> tuple[Server, Any]:
    settings = {"M": 3, **DELAYED, **options}
    return server_of("fadas", **settings), twins.FADASTwin(vector(1), **settings, **TWIN_LAYOUT)


ARRIVALS: dict[str, Callable[[], tuple[Server, Any]]] = {
    "ca2fl": ca2fl,
    "ca2fl eta": lambda: ca2fl(eta=0.6),
    "fadas": fadas,
    "fadas cap": lambda: fadas(delay="cap", eta=0.5),
    "fadas none": lambda: fadas(delay="none"),
}


@pytest.mark.parametrize("case", ARRIVALS)
def test_asynchronous_servers_match_the_twins(case: str) -> None:
    (server, twin), rng = ARRIVALS[case](), np.random.default_rng(5)
    taus, count = set(), 0
    for _ in range(300):
        idle = [d for d in range(8) if d not in server.active_trips]
        if idle and (rng.random() < 0.5 or not server.active_trips):
            device = int(rng.choice(idle))
            assert server.trigger([device])[0].version == twin.trigger(device)
            continue
        device = int(rng.choice([d for d in server.active_trips if d != 7 or rng.random() < 0.1] or [7]))
        if rng.random() < 0.1:
            server.drop_trip(device, server.active_trips[device].trip, "gone")
            twin.lose(device)
            continue
        u = vector(int(rng.integers(1 << 30)))
        u[:LEARNABLE] = server.weights[:LEARNABLE] + 0.3 * u[:LEARNABLE]
        events, result = send(server, device, u), twin.upload(device, u)
        assert len(events) == (result is not None)
        for event in events:
            assert (column(event, "device"), column(event, "base")) == (result["devices"], result["base"])
            assert [s - 1 for s in column(event, "staleness")] == result["staleness"]
            close(column(event, "weight"), result["weights"], 1e-12)
            for key in ("cached", "eta_t", "tau_max"):
                if key in result:
                    close(event[key], result[key], 1e-12)
            taus.add(max(result["staleness"]))
            count += 1
        close(server.weights, twin.w, 1e-6)
    assert count > 15
    assert min(taus) <= 1 < max(taus)  # on both sides of tau_c


def play(server: Server, seed: int) -> None:
    """Run a few trips: the rest of a round, or arrivals of four devices in flight."""
    rng = np.random.default_rng(seed)
    if not server.synchronous or not server.active_trips:
        server.trigger([d for d in range(4) if d not in server.active_trips])
    for device in list(server.active_trips)[:4]:
        vectors = {name: rng.standard_normal(LEARNABLE).astype(np.float32) for name in server.rule.sends}
        server.upload(upload_of(server, device, vector(seed + device), 1 + device, vectors=vectors))


@pytest.mark.parametrize("case", [*ROUNDS, *ARRIVALS])
def test_restored_method_continues_bit_for_bit(case: str) -> None:
    make = (ROUNDS | ARRIVALS)[case]
    first, second = make()[0], make()[0]
    for seed in (10, 20, 30):
        play(first, seed)
    if first.synchronous:  # in the middle of a round
        first.trigger([0, 1, 2, 3])
        send(first, 2, vector(77))
    second.restore(deepcopy(first.state()))  # as if from a file
    for seed in (40, 50, 60):
        for server in (first, second):
            play(server, seed)
        same(first.weights, second.weights)
        same(first.trigger([7])[0].vectors.get("c", 0), second.trigger([7])[0].vectors.get("c", 0))
        for server in (first, second):
            server.drop_trip(7, server.active_trips[7].trip, "gone")


# ---- limits


def rounds(name: str, samples: list[int] = UNEQUAL, **options: Any) -> Vector:
    server = server_of(name, samples=samples, **options)
    for shift in (0, 40):
        hold_round(server, {device: vector(shift + device) for device in range(4)})
    return server.weights


EQUAL = [10] * 8


def test_scaffold_with_zero_controls_is_fedavg_of_equal_devices() -> None:
    same(rounds("scaffold", EQUAL), rounds("fedavg", EQUAL))


def test_fedopt_with_plain_sgd_of_rate_one_is_fedavg() -> None:
    close(rounds("fedopt", server="sgd", beta1=0.0), rounds("fedavg"), 1e-7)


@pytest.mark.parametrize("server", ["adagrad", "adam", "yogi"])
def test_fedopt_with_a_large_tau_is_fedavg(server: str) -> None:
    """sqrt(v) + tau -> 2 tau, since v starts at tau^2 (times beta2 for each round of Adam, which is 1 here nearly)."""
    options = {"server": server, "beta1": 0.0, "beta2": 1.0 - 1e-9, "tau": 1e6, "eta": 2e6}
    close(rounds("fedopt", **options), rounds("fedavg"), 1e-5)


def test_fednova_with_equal_steps_is_fedavg_to_the_bit() -> None:
    same(rounds("fednova"), rounds("fedavg"))


def test_fednova_gives_longer_training_no_extra_weight() -> None:
    """Two devices each follow one gradient, one of them ten times as far. Both have equal weight."""
    server = server_of("fednova", samples=[10, 10])
    w, directions = server.weights, [vector(5), vector(6)]
    server.trigger([0, 1])
    for device, steps in ((0, 1), (1, 10)):
        u = w.copy()
        u[:LEARNABLE] += steps * 0.01 * directions[device][:LEARNABLE]
        server.upload(upload_of(server, device, u, steps))
    mean = 0.5 * (directions[0] + directions[1])[:LEARNABLE]
    close(server.weights[:LEARNABLE], w[:LEARNABLE] + 5.5 * 0.01 * mean, 1e-6)  # tau_eff = 5.5


@pytest.mark.parametrize("steps", [1, 2, 7, 30])
@pytest.mark.parametrize("eta_mu", [0.0, 0.02, 0.4])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_path_length_matches_unrolled_training(steps: int, eta_mu: float, momentum: float, nesterov: bool) -> None:
    found = path_length(sgd(momentum, nesterov).reach, steps, eta_mu)
    assert found == pytest.approx(twins.path_by_unrolling(steps, momentum, nesterov, eta_mu), rel=1e-10)
    if not momentum and eta_mu:
        assert found == pytest.approx((1.0 - (1.0 - eta_mu) ** steps) / eta_mu, rel=1e-12)  # as printed


def test_ca2fl_with_an_empty_cache_is_fedbuff_without_discount() -> None:
    close(
        arrivals(server_of("ca2fl", M=4), MODELS),
        arrivals(server_of("fedbuff", K=4, exponent=0.0), MODELS),
        1e-7,
    )


def test_ca2fl_of_all_devices_at_once_is_fedavg_for_every_cache() -> None:
    """``h + mean(Delta - h^i)`` over all devices is the mean of their Deltas."""
    server, samples = server_of("ca2fl", devices=4, M=4), [10] * 4
    arrivals(server, {device: vector(70 + device) for device in range(4)})
    reference = server_of("fedavg", server.weights, samples=samples)
    hold_round(reference, MODELS)
    close(arrivals(server, MODELS), reference.weights, 1e-6)


def test_fadas_with_a_large_eps_is_fedbuff_without_discount() -> None:
    options = {"M": 4, "beta1": 0.0, "beta2": 0.0, "eps": 1e6, "eta": 1e6, "delay": "none"}
    close(
        arrivals(server_of("fadas", **options), MODELS),
        arrivals(server_of("fedbuff", K=4, exponent=0.0), MODELS),
        1e-5,
    )


def test_fadas_without_memory_takes_the_sign() -> None:
    server = server_of("fadas", M=4, beta1=0.0, beta2=0.0, eta=0.25)
    w = server.weights
    moved = arrivals(server, MODELS)[:LEARNABLE] - w[:LEARNABLE]
    close(moved, 0.25 * np.sign(fedavg(MODELS, EQUAL)[:LEARNABLE] - w[:LEARNABLE]), 1e-5)


@pytest.mark.parametrize(
    ("delay", "tau_max", "rate"),
    [("scale", 3, 0.2), ("scale", 4, 0.05), ("cap", 4, 0.2), ("cap", 10, 0.1), ("none", 10, 0.2)],
)
def test_fadas_rate_falls_with_late_uploads(delay: str, tau_max: int, rate: float) -> None:
    assert method_options("fadas", {"eta": 0.2, "tau_c": 3, "delay": delay}).rate(tau_max) == rate
