"""The servers of the baselines compared with naive twins written from the specification, on scripted events.

Counters of the twins: if the server's model is mixed in, its counters take part too (``server_counts``). If only
uploads are averaged, only their counters do.
"""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from freshet.core.server import Server
from tests.methods.helpers import (
    LAYOUT,
    LEARNABLE,
    TWIN_LAYOUT,
    close,
    column,
    hold_round,
    logged,
    same,
    send,
    server_of,
    vector,
)
from tests.twins import asynchronous as twins
from tests.twins import synchronous as round_twins

SAMPLES = [5, 20, 1, 7, 11, 3, 40, 13]
MIXED = TWIN_LAYOUT | {"server_counts": True}


def fedasync(**options: Any) -> tuple[Server, Any]:
    shape = {"a": options.get("poly_a", options.get("hinge_a", 0.5)), "b": options.get("hinge_b", 4.0)}
    twin = twins.FedAsyncTwin(
        vector(1),
        alpha=0.7,
        staleness=options["staleness"],
        halve_after=options.get("halve_after"),
        **shape,
        **MIXED,
    )
    return server_of("fedasync", samples=SAMPLES, alpha=0.7, **options), twin


def fedsa() -> tuple[Server, Any]:
    options = {"alpha": 0.5, "a": 0.8}
    server = server_of("fedsa", samples=SAMPLES, epochs=5, stage1_epochs=9, stage1_updates=6, **options)
    return server, twins.FedSARTwin(vector(1), E1=9, E2=5, V1=6, **options, **MIXED)


def asofed() -> tuple[Server, Any]:
    twin = twins.ASOFedTwin(vector(1), samples=dict(enumerate(SAMPLES)), **MIXED)
    return server_of("asofed", samples=SAMPLES), twin


def fedbuff(**options: Any) -> tuple[Server, Any]:
    settings = {"K": 3, **options}
    given = {key: value for key, value in settings.items() if key != "beta"}
    twin = twins.FedBuffTwin(vector(1), momentum=options.get("beta", 0.0), **given, **TWIN_LAYOUT)
    return server_of("fedbuff", samples=SAMPLES, **settings), twin


def port(**options: Any) -> tuple[Server, Any]:
    settings = {"K": 3, "omega": 2, "alpha": 3.0, "beta": 1.5, **options}
    twin = twins.PORTTwin(vector(1), **settings, **TWIN_LAYOUT)
    return server_of("port", samples=SAMPLES, **settings), twin


CASES = {
    "fedasync constant": lambda: fedasync(staleness="constant"),
    "fedasync polynomial": lambda: fedasync(staleness="polynomial", poly_a=0.5),
    "fedasync hinge": lambda: fedasync(staleness="hinge", hinge_a=10.0, hinge_b=2.0),
    "fedasync halved": lambda: fedasync(staleness="polynomial", poly_a=0.5, halve_after=10),
    "fedsa": fedsa,
    "asofed": asofed,
    "fedbuff": fedbuff,
    "fedbuff server lr, momentum": lambda: fedbuff(eta_g=0.7, beta=0.9),
    "fedbuff tau_max": lambda: fedbuff(tau_max=1),
    "port": port,
    "port gate": lambda: port(gate=True),
    "port ge": lambda: port(wait="ge"),
    "port omega 0": lambda: port(omega=0, K=2),
}


def agree(event: dict[str, Any], twin: dict[str, Any], device: int) -> None:
    """Check that the logged event and the twin's result hold the same numbers (twins count staleness from 0)."""
    assert (event["kind"], event["version"]) == (twin["kind"], twin["version"])
    if isinstance(twin["staleness"], list):
        assert [s - 1 for s in column(event, "staleness")] == twin["staleness"]
        assert (column(event, "device"), column(event, "base")) == (twin["devices"], twin["base"])
    else:
        (part,) = event.get("contributions", [event])
        assert (part["device"], part["base"], part["staleness"]) == (device, twin["base"], twin["staleness"] + 1)
    if "p" in twin:
        close(column(event, "weight"), twin["p"], 1e-9)
    names = {"alpha": "alpha", "cos": "cos", "estimate": "estimate", "epochs": "epochs"}
    names |= {"s": "s", "discounts": "s"}
    for ours, theirs in names.items():
        if ours in event and theirs in twin:
            close(event[ours], twin[theirs], 1e-9 if ours != "cos" else 1e-7)


@pytest.mark.parametrize("case", CASES)
def test_asynchronous_servers_match_the_twins(case: str) -> None:
    server, twin = CASES[case]()
    rng = np.random.default_rng(5)
    kinds: list[str] = []
    for _ in range(300):
        idle = [d for d in range(8) if d not in server.active_trips and d not in server.waiting]
        if idle and (rng.random() < 0.5 or not server.active_trips):
            device = int(rng.choice(idle))
            assert server.trigger([device])[0].version == twin.trigger(device)
            if "fedsa" in case:
                assert server.active_trips[device].epochs == twin.epochs[device]
            continue
        # device 7 is slow, so that others overtake it by far
        device = int(rng.choice([d for d in server.active_trips if d != 7 or rng.random() < 0.1] or [7]))
        if case.startswith("port") and rng.random() < 0.1:
            events, result = (
                logged(server.drop_trip(device, server.active_trips[device].trip, "gone")),
                twin.lose(device),
            )
            events = [event for event in events if event["kind"] != "lost"]
        else:
            u = vector(int(rng.integers(1 << 30)))
            u[:LEARNABLE] = server.weights[:LEARNABLE] + 0.3 * u[:LEARNABLE]
            events, result = send(server, device, u), twin.upload(device, u, n_k=SAMPLES[device])
        assert len(events) == (result is not None)
        for event in events:
            agree(event, result, device)
            kinds.append(event["kind"])
        assert server.version == twin.version
        close(server.weights, twin.w, 3e-7)
    assert kinds.count("aggregate") > 15
    assert ("discard" in kinds) == (case == "fedbuff tau_max")


ROUNDS = {
    "fedavg": round_twins.FedAvgTwin,
    "fedprox": round_twins.FedProxServerTwin,
    "moon": round_twins.MOONServerTwin,
    "feddyn": lambda w0, **more: round_twins.FedDynTwin(w0, M=len(SAMPLES), **more),
    "fedlws": lambda w0, **more: round_twins.FedLWSTwin(w0, groups=[(0, 8), (8, LEARNABLE)], **more),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_synchronous_servers_match_the_twins(name: str) -> None:
    assert LAYOUT.groups == (((0, 6), (6, 8)), ((8, 16), (16, 18)))
    server, twin = server_of(name, samples=SAMPLES), ROUNDS[name](vector(1), **TWIN_LAYOUT)
    rng = np.random.default_rng(6)
    for number in range(12):
        members = [int(d) for d in rng.choice(8, size=4, replace=False)]  # they upload in this order
        if number == 5:  # everybody is lost
            server.trigger(sorted(members))
            events = [e for d in members for e in logged(server.drop_trip(d, server.active_trips[d].trip, "gone"))]
            event, result = events[-1], twin.aggregate({}, {})
        else:
            uploads = {d: vector(int(rng.integers(1 << 30))) for d in members}
            event, result = hold_round(server, uploads), twin.aggregate(uploads, dict(enumerate(SAMPLES)))
        assert event["kind"] == "aggregate"
        assert (event["version"], column(event, "device")) == (result["version"], result["devices"])
        if "weights" in result:
            close(column(event, "weight"), result["weights"], 1e-9)
        for key in ("gamma", "tau", "q"):
            if key in event and key in result:
                close(event[key], result[key], 1e-9)
        close(server.weights, twin.w, 3e-7)
        evaluated = server.method.evaluation_model(server)
        close(evaluated, getattr(twin, "a_bar", twin.w), 3e-7)
        if name != "feddyn":
            same(evaluated, server.weights)


def play(server: Server, seed: int) -> None:
    """Run a few trips: a round (or the rest of an open one), or arrivals of four devices in flight."""
    if server.synchronous:
        if not server.active_trips:
            server.trigger([0, 1, 2, 3])
        for device in list(server.active_trips):
            send(server, device, vector(seed + device))
        return
    for device in range(6):
        if device not in server.active_trips and device not in server.waiting:
            server.trigger([device])
    for step, device in enumerate(list(server.active_trips)[:4]):
        send(server, device, vector(seed + step))


@pytest.mark.parametrize("case", [*CASES, *ROUNDS])
def test_restored_method_continues_bit_for_bit(case: str) -> None:
    first, second = (CASES[case]()[0] if case in CASES else server_of(case, samples=SAMPLES) for _ in range(2))
    for seed in (10, 20, 30):
        play(first, seed)
    if first.synchronous:  # in the middle of a round
        first.trigger([0, 1, 2, 3])
        send(first, 2, vector(77))
    second.restore(deepcopy(first.state()))  # as if from a file
    for seed in (40, 50):
        for server in (first, second):
            play(server, seed)
        same(first.weights, second.weights)
        same(first.method.evaluation_model(first), second.method.evaluation_model(second))
