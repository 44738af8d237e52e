"""FedASMU and FedSSMU compared with naive twins written from the specification, on scripted events."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from freshet.core.messages import Assignment, Fresh, Slot
from freshet.core.server import Server
from freshet.core.streams import stream
from freshet.data.dataset import from_arrays
from freshet.methods import method_options
from freshet.methods.asmu.rule import FreshModelRule
from freshet.training.batches import FederatedData
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Trainer, TripInput
from tests.methods.asmu_helpers import ask, plain_layout, send, server_of
from tests.twins.fedasmu import FedASMUServerTwin, FedSSMUServerTwin
from tests.twins.local import fedasmu_trip

LEARNABLE, BUFFERS = 40, 4
CONTROLS = {"mu_alpha": 1.2, "lambda0": 0.8, "sigma0": 0.4, "iota0": 0.05, "tau_max": 6, "xi_min": 1e-3}
RATES = {"eta_lambda": 0.02, "eta_sigma": 0.03, "eta_iota": 0.01}
NUMBERS = ("version", "base", "staleness", "alpha", "xi", "lambda", "sigma", "iota")
ADAPTED = ("q", "p", "s_p", "xi_p", "lambda_p", "sigma_p", "grad_lambda", "grad_sigma", "grad_iota")
#: Large enough that the controls move visibly, small enough that rounding stays small.
LARGE_RATES = {"eta_lambda": 0.05, "eta_sigma": 0.03, "eta_iota": 0.01}
DEVICES, OWN_EPOCHS = 9, np.array([1, 2, 3, 4, 5, 1, 2, 3, 4])
STEPS_PER_PASS = 3
READINGS = [
    (judge, work, equations, apply)
    for judge in ("own", "base")
    for work in ("steps", "passes")
    for equations in ("corrected", "published")
    for apply in ("mix", "progress")
]
VARIANTS = [(e, a, d) for e in ("corrected", "published") for a in ("mix", "progress") for d in (True, False)]


def agree(event: dict, twin: dict) -> None:
    """Check that the logged event and the twin's result hold the same numbers.

    q and the gradients are compared relative to |g| |step| if that is large, because their terms cancel.
    """
    assert event["kind"] == twin["kind"]
    if event["kind"] == "discard":
        return
    assert event["adapted"] == twin["adapted"]
    for key in NUMBERS + (ADAPTED if event["adapted"] else ()):
        # the twin remembers its steps in float64, the server in float32: a cancelling q differs by its rounding
        size = max(1.0, twin["size"]) if key == "q" or key.startswith("grad_") else 1.0
        assert event[key] == pytest.approx(twin[key], rel=1e-6, abs=1e-6 * size), key


@pytest.mark.parametrize(("equations", "apply", "dynamic"), VARIANTS)
def test_fedasmu_server_matches_the_twin(equations: str, apply: str, dynamic: bool) -> None:
    rng = np.random.default_rng(11)
    options = {**CONTROLS, **RATES, "equations": equations, "apply": apply, "dynamic_server": dynamic}
    w0 = rng.normal(size=LEARNABLE + BUFFERS).astype(np.float32)
    server = server_of("fedasmu", w0, plain_layout(LEARNABLE, BUFFERS), devices=9, epochs=3, **options)
    twin = FedASMUServerTwin(w0, **options)
    kinds = set()
    for _ in range(120):
        idle = [d for d in range(9) if d not in server.active_trips]
        if idle and (rng.random() < 0.5 or len(idle) == 9):
            device = int(rng.choice(idle))
            assert server.trigger([device])[0].version == twin.trigger(device)
            continue
        # device 8 is slow: it uploads rarely and is discarded as too stale
        busy = [d for d in server.active_trips if d != 8 or rng.random() < 0.1] or [next(iter(server.active_trips))]
        device = int(rng.choice(busy))
        trip, beta = server.active_trips[device], 0.0
        if not trip.sent and rng.random() < 0.6:
            fresh, expected = ask(server, device), twin.request(device)
            assert (fresh is None) == (expected is None)
            if fresh is not None:
                assert fresh.version == expected[0]
                np.testing.assert_allclose(fresh.weights, expected[1], rtol=1e-6, atol=1e-7)
                beta = float(rng.uniform(0.05, 0.9))
        w_i = (server.weights + 0.2 * rng.normal(size=w0.size)).astype(np.float32)
        merge = {"beta": beta, "n1": int(rng.integers(7))} if beta else {}
        result = twin.upload(device, w_i, eta=0.1, steps=7, learnable=LEARNABLE, **merge)
        agree(send(server, device, w_i, steps=7, **merge)[0], result)
        kinds.add(result["kind"])
        assert server.version == twin.version
        np.testing.assert_allclose(server.weights, twin.w, rtol=1e-6, atol=1e-7)
    assert kinds == {"aggregate", "discard"}
    assert len(server.store) <= 1 + 2 * len(server.active_trips)


@pytest.mark.parametrize(("equations", "apply", "dynamic"), VARIANTS)
def test_fedssmu_server_matches_the_twin(equations: str, apply: str, dynamic: bool) -> None:
    rng = np.random.default_rng(5)
    options = {**CONTROLS, **RATES, "equations": equations, "apply": apply, "dynamic_server": dynamic}
    w0 = rng.normal(size=LEARNABLE).astype(np.float32)
    server = server_of("fedssmu", w0, plain_layout(LEARNABLE), devices=6, epochs=3, **options)
    twin = FedSSMUServerTwin(w0, **options)
    for _ in range(8):
        members = sorted(int(d) for d in rng.choice(6, size=4, replace=False))
        server.trigger(members)
        twin.start_round(members)
        for device in rng.permutation(members):
            beta, trip = 0.0, server.active_trips[int(device)]
            fresh, expected = ask(server, int(device)), twin.request(int(device))
            assert (fresh is None) == (expected is None)
            if fresh is not None:
                assert (fresh.version - trip.base, fresh.age) == (server.version - trip.base, server.round)
                beta = float(rng.uniform(0.05, 0.9))
            w_i = (server.weights + 0.2 * rng.normal(size=LEARNABLE)).astype(np.float32)
            merge = {"beta": beta, "n1": int(rng.integers(5))} if beta else {}
            event = send(server, int(device), w_i, steps=5, **merge)[0]
            result = twin.upload(int(device), w_i, eta=0.1, steps=5, **merge)
            agree(event, result)
            assert (event["round"], event["k"]) == (result["round"], result["k"])
            np.testing.assert_allclose(server.weights, twin.w, rtol=1e-6, atol=1e-7)
        twin.end_round()


def pair(name: str, reading: tuple[str, str, str, str]) -> tuple[Server, Any, np.random.Generator]:
    """Return a server whose devices train for different numbers of epochs, its twin, and a stream."""
    judge, work, equations, apply = reading
    options = {**CONTROLS, **LARGE_RATES, "judge": judge, "local_work": work, "equations": equations, "apply": apply}
    rng = np.random.default_rng(23)
    w0 = rng.normal(size=LEARNABLE + BUFFERS).astype(np.float32)
    server = server_of(name, w0, plain_layout(LEARNABLE, BUFFERS), devices=DEVICES, epochs=5, **options)
    server.method.context = replace(server.method.context, own_epochs=OWN_EPOCHS)
    twin = (FedASMUServerTwin if name == "fedasmu" else FedSSMUServerTwin)(w0, **options)
    return server, twin, rng


def exchange(server: Server, twin: Any, device: int, rng: np.random.Generator) -> dict:
    """Let a device ask, perhaps, and upload to both. Compare the event, the model and the controls of all devices."""
    passes = int(OWN_EPOCHS[device])
    steps, merge = STEPS_PER_PASS * passes, {}
    assert server.active_trips[device].epochs == passes
    if rng.random() < 0.6:
        fresh, expected = ask(server, device), twin.request(device)
        assert (fresh is None) == (expected is None)
        if fresh is not None:
            merge = {"beta": float(rng.uniform(0.05, 0.9)), "n1": int(rng.integers(steps))}
    w_i = (server.weights + 0.2 * rng.normal(size=server.weights.size)).astype(np.float32)
    result = twin.upload(device, w_i, eta=0.1, steps=steps, passes=passes, learnable=LEARNABLE, **merge)
    event = send(server, device, w_i, steps=steps, **merge)[0]
    agree(event, result)
    if event.get("adapted"):
        assert event["gap"] == result["gap"]
        assert event.get("judged", device) == result["judged"]
    np.testing.assert_allclose(server.weights, twin.w, rtol=1e-6, atol=1e-6)
    compare_controls(server, twin)
    return result


def compare_controls(server: Server, twin: Any) -> None:
    kept = {d: s.control for d, s in server.method.state.devices.items()}
    assert kept.keys() == twin.controls.keys()
    for device, control in kept.items():
        found = (control.lambda_, control.sigma, control.iota)
        assert found == pytest.approx(twin.controls[device], rel=1e-6, abs=3e-6), device


def check_coverage(results: list[dict], twin: Any, judge: str) -> None:
    """Check that the script held what the readings differ in."""
    adapted = [(r["device"], r) for r in results if r["adapted"]]
    assert len(adapted) > 100 and any(r["kind"] == "discard" for r in results)
    others = [r for device, r in adapted if r["judged"] != device]
    assert all(r["gap"] == 0 for _, r in adapted) and others if judge == "base" else not others
    bases = [r["base"] for _, r in adapted]
    assert len(set(bases)) < len(bases) - 20, "several devices start from one version"
    start = np.array([CONTROLS[name] for name in ("lambda0", "sigma0", "iota0")])
    moved = [np.abs(np.array(control) - start).max() > 0.005 for control in twin.controls.values()]
    assert sum(moved) > DEVICES / 2


@pytest.mark.parametrize("reading", READINGS, ids="-".join)
def test_fedasmu_matches_the_twin_in_every_reading_of_the_control_update(reading: tuple[str, str, str, str]) -> None:
    server, twin, rng = pair("fedasmu", reading)
    results: list[dict] = []
    while len(results) < 300:
        idle = [d for d in range(DEVICES) if d not in server.active_trips]
        if len(idle) > 4:  # several devices leave with one version
            for device in map(int, rng.choice(idle, size=3, replace=False)):
                assert server.trigger([device])[0].version == twin.trigger(device)
        # device 8 is slow: it uploads rarely and is discarded as too stale
        busy = [d for d in server.active_trips if d != 8 or rng.random() < 0.05] or [8]
        device = int(rng.choice(busy))
        results.append(exchange(server, twin, device, rng) | {"device": device})
        assert server.version == twin.version
    check_coverage(results, twin, reading[0])


@pytest.mark.parametrize("reading", READINGS, ids="-".join)
def test_fedssmu_matches_the_twin_in_every_reading_of_the_control_update(reading: tuple[str, str, str, str]) -> None:
    server, twin, rng = pair("fedssmu", reading)
    results: list[dict] = []
    for number in range(50):
        members = sorted(int(d) for d in rng.choice(DEVICES, size=8 if number % 5 == 0 else 5, replace=False))
        server.trigger(members)
        twin.start_round(members)
        for device in map(int, rng.permutation(members)):
            results.append(exchange(server, twin, device, rng) | {"device": device, "base": twin.round_base})
        twin.end_round()
    check_coverage(results, twin, reading[0])


def test_fedssmu_with_c_1_ends_a_round_in_the_plain_mean_of_the_old_model_and_all_uploads() -> None:
    rng = np.random.default_rng(2)
    w0 = rng.normal(size=LEARNABLE).astype(np.float32)
    options = {"lambda0": 1.0, "sigma0": 1.0, "iota0": 0.0, "mu_alpha": 1.0, "dynamic_server": False, "apply": "mix"}
    server = server_of("fedssmu", w0, plain_layout(LEARNABLE), **options)
    server.trigger([0, 1, 2, 3])
    uploads = [rng.normal(size=LEARNABLE).astype(np.float32) for _ in range(4)]
    alphas = [send(server, device, upload)[0]["alpha"] for device, upload in enumerate(uploads)]
    assert alphas == pytest.approx([1 / (k + 2) for k in range(4)])
    np.testing.assert_allclose(server.weights, np.mean([w0, *uploads], axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("equations", ["corrected", "published"])
@pytest.mark.parametrize("slot", [1, 3, 5])
def test_whole_trip_matches_the_twin(equations: str, slot: int) -> None:
    from torch import nn

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(23, 6)).astype(np.float32), rng.integers(0, 3, 23)
    data = FederatedData.of(from_arrays("t", (x, y), (x, y)), [np.arange(23)])
    training = TrainingOptions(epochs=5, batch_size=10, lr=0.2, momentum=0.5, weight_decay=1e-3)
    trainer = Trainer(lambda: nn.Linear(6, 3), data, training, seed=4)
    w_o = rng.normal(size=21).astype(np.float32)
    w_g = (w_o + rng.normal(size=21)).astype(np.float32)
    device = {"mu_beta": 1.4, "eta_gamma": 0.3, "eta_upsilon": 0.2}
    rule = FreshModelRule(method_options("fedasmu", {"equations": equations, **device}))
    sent = Assignment(0, 2, 3, 3, w_o, 5, 0.2)
    memory = {"gamma": 1.3, "upsilon": 0.4, "slot": slot, "table": np.zeros((5, 3)), "b": 0.0}
    outcome = trainer.train(TripInput(sent, (Slot(slot, "fixed"),), (Fresh(8, 8, w_g),), rule, memory))
    order = stream(4, "batches", 0, 2)
    epochs = [np.split(order.permutation(23), [10, 20]) for _ in range(5)]
    twin = fedasmu_trip(
        w_o, x, y, epochs, slot=slot, o=3, request=lambda: (8, w_g), gamma=1.3, upsilon=0.4, lr=0.2,
        momentum=0.5, weight_decay=1e-3, equations=equations, **device,
    )  # fmt: skip
    np.testing.assert_allclose(outcome.weights, twin["w_i"], rtol=2e-5, atol=2e-6)
    assert outcome.steps == twin["steps"] == 15
    (merge,) = outcome.merges
    assert (merge.version, merge.numbers["n1"]) == (8, 3 * (slot - 1))
    for key in ("phi", "beta", "q", "gamma_after", "upsilon_after", "reward"):
        assert merge.numbers[key] == pytest.approx(twin["merge"][key], rel=1e-4, abs=1e-6), key
