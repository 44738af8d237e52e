"""Properties of several baselines' servers: which method reduces to which, and invariances."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from freshet.core.vectors import Vector
from tests.methods.helpers import (
    ASYNCHRONOUS,
    BUFFERS,
    LEARNABLE,
    MODELS,
    SYNCHRONOUS,
    UNEQUAL,
    arrivals,
    close,
    fedavg,
    hold_round,
    same,
    server_of,
    vector,
)

EQUAL = [10] * 8
#: Which option counts the uploads that a method waits for.
BUFFERED = {
    "fedbuff": "K",
    "port": "K",
    "ca2fl": "M",
    "fadas": "M",
    "fedac": "K",
    "fedat": "K",
    "fedfa": "K",
    "fedstaleweight": "K",
    "masfl": "S",
}
#: What else makes a method wait for just these.
ALSO: dict[str, dict[str, Any]] = {"fedat": {"G": 1}}


def waiting_for(uploads: int, name: str) -> dict[str, Any]:
    """Options with which a method that buffers makes a step of this many uploads."""
    return {BUFFERED[name]: uploads, **ALSO.get(name, {})} if name in BUFFERED else {}


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
    options = waiting_for(2, name)
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


@pytest.mark.parametrize("name", ["fedavg", "fedlws", "fednova", "fedopt", "fedprox", "moon", "port", "asofed"])
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


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *BUFFERED])
def test_the_order_of_uploads_changes_rounding_only(name: str) -> None:
    options = waiting_for(4, name)
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


@pytest.mark.parametrize("name", [*BUFFERED, *SYNCHRONOUS])
def test_model_that_is_not_finite_changes_nothing(name: str) -> None:
    options = waiting_for(3, name)
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
