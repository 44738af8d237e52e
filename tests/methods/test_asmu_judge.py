"""``judge = "base"``: an upload judges the aggregation that made its base, and that device's controls move.

``local_work = "passes"``: L in the pseudo-gradient counts passes over the device's data.
"""

import json
import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet import Federation
from freshet.core.events import Event
from freshet.core.messages import Assignment
from freshet.core.method import LocalRule, Mismatch
from freshet.core.server import NOT_FINITE, Server
from freshet.data.dataset import from_arrays
from freshet.errors import ConfigError
from freshet.methods import method_options
from freshet.methods.asmu.staleness import Control
from freshet.runs.audit import Audit, audit
from freshet.runs.reader import RunDirectory
from freshet.training.batches import FederatedData
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Trainer, TripInput
from tests.methods.asmu_helpers import (
    SAMPLES,
    SmoothLoss,
    central,
    flat,
    network,
    plain_layout,
    samples,
    send,
    server_of,
    trigger,
    upload,
)
from tests.sim.helpers import Crash, CrashError, outputs

CONTROLS = {"lambda0": 0.9, "sigma0": 0.6, "iota0": 0.1, "mu_alpha": 1.3}
BASE = {"judge": "base", "eta_lambda": 0.2, "eta_sigma": 0.1, "eta_iota": 0.05, **CONTROLS}
START = Control(0.9, 0.6, 0.1)
SIZE = 30


def vector(seed: int, size: float = 1.0) -> np.ndarray:
    return (size * np.random.default_rng(seed).normal(size=SIZE)).astype(np.float32)


def scripted(**options: Any) -> Server:
    return server_of("fedasmu", vector(0), plain_layout(SIZE), devices=12, **(BASE | options))


def trip(server: Server, device: int, seed: int, **merged: float) -> dict[str, Any]:
    """Start and end a trip of a device: its base is the current version."""
    server.trigger([device])
    return send(server, device, server.weights + vector(seed, 0.3), **merged)[0]


def controls(server: Server) -> dict[int, Control]:
    return {device: kept.control for device, kept in server.method.state.devices.items()}


def check_log(server: Server, log: list[Event]) -> None:
    """Check the server's events with the method's own audit."""
    memory: dict[Any, Any] = {}
    for event in log:
        server.method.audit(server.method.options, event, 0.0, memory)


# ---- the derivative


def train_one_step(w: np.ndarray, lr: float) -> np.ndarray:
    """Return the model after one step of SGD on all samples, by the trainer."""
    x, y = samples()
    data = FederatedData.of(from_arrays("t", (x, y), (x, y)), [np.arange(SAMPLES)])
    trainer = Trainer(network, data, TrainingOptions(epochs=1, batch_size=SAMPLES, lr=lr), seed=0)
    outcome = trainer.train(TripInput(Assignment(0, 1, 1, 1, w, 1, lr), (), (), LocalRule(), {}))
    assert outcome.steps == 1
    return outcome.weights


def weight(age: int, s: int, lambda_: float, sigma: float, iota: float) -> float:
    """Alpha as the paper prints it."""
    xi = lambda_ / (math.sqrt(age) * s**sigma) + iota
    return CONTROLS["mu_alpha"] * xi / (1 + CONTROLS["mu_alpha"] * xi)


@pytest.mark.parametrize("apply", ["mix", "progress"])
@pytest.mark.parametrize("name", ["fedasmu", "fedssmu"])
def test_gradients_are_those_of_the_loss_at_the_base_by_the_controls_of_its_maker(name: str, apply: str) -> None:
    """Device 2 makes w_o with staleness 3, device 5 measures the loss there with one full-batch step.

    ``loss(w_o(lambda, sigma, iota))`` is differentiated numerically, with the aggregation written out here.
    """
    loss, rng = SmoothLoss(), np.random.default_rng(1)
    w0 = loss.flat.dump()
    server = server_of(name, w0, loss.flat.layout, apply=apply, **BASE)
    trip_of_round_1 = server.trigger([7])
    send(server, 7, w0 + 0.3 * rng.normal(size=w0.size))
    start = server.weights.astype(np.float64)
    server.trigger([0, 1, 2])
    uploads = [(start + 0.3 * rng.normal(size=w0.size)).astype(np.float32) for _ in range(3)]
    for device in (0, 1):
        send(server, device, uploads[device])
    before = server.weights.astype(np.float64)
    made = send(server, 2, uploads[2])[0]
    age = 4 if name == "fedasmu" else 2  # the version, or the round
    assert (made["staleness"], made["version"]) == (3, 4) and trip_of_round_1[0].version == 1
    along = uploads[2].astype(np.float64) - (before if apply == "mix" else start)

    def loss_at(*c: float) -> float:
        return loss(before + weight(age, 3, *c) * along)

    at = (made["lambda"], made["sigma"], made["iota"])
    np.testing.assert_allclose(before + weight(age, 3, *at) * along, server.weights, rtol=1e-5, atol=1e-6)
    true = [central(lambda v, i=i: loss_at(*at[:i], v, *at[i + 1 :]), at[i]) for i in range(3)]
    assert min(map(abs, true)) > 1e-4
    (sent,) = server.trigger([5])
    found = send(server, 5, train_one_step(sent.weights, sent.lr))[0]
    assert (found["judged"], found["gap"], found["p"], found["s_p"]) == (2, 0, age, 3)
    assert [found[k] for k in ("grad_lambda", "grad_sigma", "grad_iota")] == pytest.approx(true, rel=1e-3)
    moved = server.method.state.devices[2].control
    assert loss_at(moved.lambda_, moved.sigma, moved.iota) < loss_at(*at), "the controls descend it"


# ---- whose controls move


def test_maker_moves_and_the_uploader_does_not() -> None:
    server = scripted()
    first = trip(server, 0, 1)
    assert not first["adapted"] and "judged" not in first, "nobody made version 1"
    second = trip(server, 1, 2)
    assert second["adapted"] and second["judged"] == 0
    assert (second["lambda"], second["sigma"], second["iota"]) == (0.9, 0.6, 0.1), "alpha has the uploader's controls"
    gradients = [second[k] for k in ("grad_lambda", "grad_sigma", "grad_iota")]
    assert gradients[0] != 0.0 and gradients[1] == 0.0  # of staleness 1, whose power is 1 for every sigma
    kept = controls(server)
    assert kept[1] == START
    assert kept[0] == Control(0.9 - 0.2 * gradients[0], 0.6, 0.1 - 0.05 * gradients[2])
    third = trip(server, 0, 3)
    assert third["judged"] == 1 and third["lambda"] == kept[0].lambda_, "device 0 uploads with what device 1 taught it"


def test_uploader_that_made_its_base_moves_before_its_own_weight_is_computed() -> None:
    server = scripted()
    trip(server, 0, 1)
    found = trip(server, 0, 2)
    assert found["judged"] == 0 and found["lambda"] == 0.9 - 0.2 * found["grad_lambda"] != 0.9
    assert controls(server)[0].lambda_ == found["lambda"]
    assert found["alpha"] == pytest.approx(weight(2, 1, found["lambda"], found["sigma"], found["iota"]), rel=1e-12)


def test_every_device_that_starts_from_a_version_teaches_its_maker() -> None:
    """The slopes add up, each at the controls with which the version was made."""
    server = scripted()
    trip(server, 0, 1)
    start = server.weights.copy()
    server.trigger([1, 2, 3])
    found = [send(server, device, start + vector(device, 0.3))[0] for device in (1, 2, 3)]
    assert [f["judged"] for f in found] == [0, 0, 0] and [f["gap"] for f in found] == [0, 0, 0]
    assert [f["lambda_p"] for f in found] == [0.9] * 3 and [f["staleness"] for f in found] == [1, 2, 3]
    assert controls(server)[0].lambda_ == pytest.approx(0.9 - 0.2 * sum(f["grad_lambda"] for f in found), rel=1e-12)
    assert all(controls(server)[device] == START for device in (1, 2, 3))


def test_maker_in_flight_uploads_with_what_it_was_taught_meanwhile() -> None:
    server = scripted()
    trip(server, 0, 1)
    server.trigger([0, 1])
    taught = send(server, 1, server.weights + vector(2, 0.3))[0]
    found = send(server, 0, server.weights + vector(3, 0.3))[0]
    assert (taught["judged"], found["judged"]) == (0, 0)
    assert found["lambda"] == pytest.approx(0.9 - 0.2 * (taught["grad_lambda"] + found["grad_lambda"]), rel=1e-12)


def test_rejected_and_discarded_uploads_teach_nobody() -> None:
    server = scripted(tau_max=2, apply="progress")
    trip(server, 0, 1)
    server.trigger([1, 2, 3])
    base = server.weights.copy()
    kept = controls(server)
    assert send(server, 1, np.full(SIZE, 3e38))[0]["kind"] == "rejected" and controls(server) == kept
    for seed in (4, 5):
        trip(server, 9, seed)
    before = controls(server)
    late = send(server, 2, base + vector(6, 0.3))[0]
    assert late["kind"] == "discard" and controls(server) == before


def test_step_too_large_for_float32_teaches_nobody_and_the_log_passes_the_audit() -> None:
    server = server_of("fedasmu", np.full(3, -3e38), plain_layout(3), **BASE)
    log: list[Event] = [trigger(server, 0), *upload(server, 0, np.full(3, -2.9e38))]
    kept, makers = controls(server), server.method.state.makers.made
    log += [trigger(server, 1), *upload(server, 1, np.full(3, 3e38))]
    assert (flat(log[-1])["kind"], flat(log[-1])["reason"]) == ("rejected", NOT_FINITE)
    assert controls(server) == kept == {0: START} and server.method.state.makers.made is makers
    assert server.method.summary()["adaptations"] == 0
    log += [trigger(server, 1), *upload(server, 1, np.full(3, -2.8e38))]
    assert flat(log[-1])["judged"] == 0
    check_log(server, log)


def test_learning_rate_of_zero_teaches_nobody() -> None:
    server = scripted()
    trip(server, 0, 1)
    server.trigger([1])
    server.active_trips[1].lr = 0.0
    found = send(server, 1, server.weights)[0]
    assert found["untaught"] and not found["adapted"]
    assert controls(server) == {0: START, 1: START}


def test_without_a_dynamic_server_nothing_is_judged_or_kept() -> None:
    server = scripted(dynamic_server=False)
    assert not any(trip(server, seed % 3, seed)["adapted"] for seed in range(6))
    assert server.method.state.makers is None


def test_steps_need_no_memory_per_device() -> None:
    server = scripted(control_memory="budget", control_budget_mb=1)
    events = [trip(server, device % 12, device) for device in range(30)]
    assert not any("forgotten" in event for event in events) and server.method.state.steps.bytes == 0
    assert not any("control_budget_mb" in notice for notice in server.method.notices())


def test_base_and_course_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="choose one of them"):
        method_options("fedasmu", {"judge": "base", "controls": "course", "apply": "progress"})


# ---- what the server keeps


def test_makers_are_kept_as_long_as_the_store_keeps_their_version() -> None:
    server, rng, most = scripted(), np.random.default_rng(3), 0
    server.trigger([11])  # holds version 1 for a long time
    for number in range(200):
        idle = [d for d in range(11) if d not in server.active_trips]
        if len(idle) > 5:
            server.trigger([int(d) for d in rng.choice(idle, size=2, replace=False)])
        device = int(rng.choice([d for d in server.active_trips if d != 11]))
        base, version = server.active_trips[device].base, server.version
        send(server, device, server.weights + vector(number, 0.1))
        made = set(server.method.state.makers.made)
        stored = {v for v, _, _ in server.store.items()}
        # the version that was current and the base of the upload are dropped with the next upload
        assert stored - {1} <= made <= stored | {base, version}
        assert all(maker.past.version == v - 1 for v, maker in server.method.state.makers.made.items())
        most = max(most, len(made))
    assert most <= 9 and server.version == 201


def test_state_of_the_server_survives_a_round_trip() -> None:
    here, there = scripted(), scripted()
    for seed in range(5):
        trip(here, seed % 3, seed)
    here.trigger([4, 5])
    there.restore(deepcopy(here.state()))  # as if from a file
    assert there.method.state.makers.made.keys() == here.method.state.makers.made.keys()
    for device in (4, 5, 0, 4):
        for server in (here, there):
            if device not in server.active_trips:
                server.trigger([device])
        w = here.weights + vector(device, 0.2)
        assert send(here, device, w) == send(there, device, w)
    assert controls(here) == controls(there)
    np.testing.assert_array_equal(here.weights, there.weights)


# ---- whole runs

RUN = {"name": "fedasmu", "judge": "base", "eta_lambda": 0.05, "eta_sigma": 0.05, "eta_iota": 0.01, "epsilon": 0.5}
READINGS = [
    {"judge": "base"},
    {"judge": "base", "local_work": "passes"},
    {"judge": "base", "equations": "published"},
    {"judge": "base", "apply": "progress", "controls": "direction", "local_work": "passes"},
    {"local_work": "passes", "apply": "progress"},
    {"local_work": "passes", "equations": "published"},
]


@pytest.mark.parametrize("name", ["fedasmu", "fedssmu"])
@pytest.mark.parametrize("reading", READINGS, ids=lambda r: "-".join(r.values()))
def test_log_of_every_reading_passes_the_audit(
    name: str, reading: dict[str, str], tmp_path: Path, federate: Callable[..., Federation]
) -> None:
    options = RUN | {"name": name, "judge": "own"} | reading
    run = RunDirectory(federate(options).run(300, out=tmp_path / "run").directory)
    found = audit(run)
    assert found.problem is None and found.aggregations > 20
    adapted = [event for event in run.events() if event["kind"] == "aggregate" and event["adapted"]]
    assert len(adapted) > 20
    if options["judge"] == "base":
        assert all(event["gap"] == 0 for event in adapted)
        assert any(event["judged"] != event["device"] for event in adapted)
    if reading.get("local_work") == "passes":
        assert {event["passes"] for event in adapted} == {4}


@pytest.fixture(scope="module")
def finished_base(tmp_path_factory: pytest.TempPathFactory, federate: Callable[..., Federation]) -> Path:
    options = RUN | {"local_work": "passes"}
    return federate(options).run(120, out=tmp_path_factory.mktemp("base") / "run").directory


def audit_changed(source: Path, target: Path, change: Callable[[list[dict[str, Any]]], None]) -> Audit:
    """Return the audit of a copy of a run whose events somebody changed."""
    events = [json.loads(line) for line in (source / "events.jsonl").read_text().splitlines()]
    change(events)
    (target / "config.toml").write_bytes((source / "config.toml").read_bytes())
    (target / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return audit(RunDirectory(target))


@pytest.mark.parametrize(
    "key", ["judged", "passes", "gap", "p", "s_p", "xi_p", "lambda_p", "sigma_p", "iota_p", "q", "product", "steps"]
)
def test_changed_number_of_a_judgement_is_found(finished_base: Path, tmp_path: Path, key: str) -> None:
    line = []

    def change(events: list[dict[str, Any]]) -> None:
        event = [e for e in events if e["kind"] == "aggregate" and e["adapted"] and e["judged"] != e["device"]][-1]
        event[key] += 1 if isinstance(event[key], int) else 1e-4 * (1 + abs(event[key]))
        line.append(event["seq"])

    found = audit_changed(finished_base, tmp_path, change)
    assert found.problem is not None and f"line {line[0]} (aggregate)" in found.problem
    if key == "judged":
        assert "judged" in found.problem


@pytest.mark.parametrize("key", ["judged", "passes", "steps"])
@pytest.mark.parametrize("value", [None, "x", 0, -1, [1]])
def test_malformed_judgement_gives_a_sentence(finished_base: Path, tmp_path: Path, key: str, value: object) -> None:
    def change(events: list[dict[str, Any]]) -> None:
        event = [e for e in events if e["kind"] == "aggregate" and e["adapted"] and e["judged"] != 0][-1]
        event[key] = value

    found = audit_changed(finished_base, tmp_path, change)
    assert found.problem is not None and found.problem.startswith("events.jsonl, line ") and "\n" not in found.problem


def test_controls_that_moved_the_uploader_in_place_of_the_maker_are_found(finished_base: Path, tmp_path: Path) -> None:
    def change(events: list[dict[str, Any]]) -> None:
        event = next(e for e in events if e["kind"] == "aggregate" and e["adapted"] and e["judged"] != e["device"])
        event["lambda"] -= RUN["eta_lambda"] * event["grad_lambda"]

    found = audit_changed(finished_base, tmp_path, change)
    assert found.problem is not None and "lambda" in found.problem


@pytest.mark.parametrize("name", ["fedasmu", "fedssmu"])
def test_run_that_crashes_and_resumes_gives_the_same_bits(
    name: str, tmp_path: Path, federate: Callable[..., Federation]
) -> None:
    def federation() -> Federation:
        run = {"until": 120.0, "checkpoint_every": 13.0}
        return federate(RUN | {"name": name}, fleet={"loss": 0.05}, run=run, seed=3)

    whole = federation().run(out=tmp_path / "whole").directory
    total = len((whole / "events.jsonl").read_bytes().splitlines())
    directory = tmp_path / "cut"
    with pytest.raises(CrashError):
        federation().run(out=directory, observers=[Crash(total // 3)])
    with pytest.raises(CrashError):
        federation().resume(directory, observers=[Crash(total // 3)])
    federation().resume(directory)
    assert outputs(directory) == outputs(whole)
    assert audit(RunDirectory(directory)).passed


def test_scripted_log_passes_the_audit_and_another_maker_does_not() -> None:
    server = scripted()
    log: list[Event] = []
    for device in (0, 1, 1, 2, 0):
        log += [trigger(server, device)]
        log += upload(server, device, server.weights + vector(device + len(log), 0.3))
    check_log(server, log)
    assert [flat(e).get("judged") for e in log if flat(e)["kind"] == "aggregate"] == [None, 0, 1, 1, 2]
    last = log[-1]
    with pytest.raises(Mismatch, match="judged"):
        check_log(server, [*log[:-1], last._replace(numbers=last.numbers | {"judged": 0})])
