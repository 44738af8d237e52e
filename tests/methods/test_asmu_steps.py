"""The server's memory of steps stays within its budget and still adapts the controls."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from freshet.core import saving
from freshet.core.events import Event, Triggered
from freshet.core.server import NOT_FINITE, Server
from freshet.methods.asmu.staleness import Control, PastUpload
from freshet.methods.asmu.steps import SKETCH_SIZE, CountSketch, Makers, StepMemory, TrainedModel
from tests.methods.asmu_helpers import flat, plain_layout, send, server_of, trigger, upload

LENGTH = 20_000


def vectors(count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=LENGTH).astype(np.float32) for _ in range(count)]


def test_exact_and_budget_give_the_true_inner_product() -> None:
    a, b, c = vectors(3)
    for kind in ("exact", "budget"):
        memory = StepMemory(kind, LENGTH, 10**9, seed=0)
        memory.remember(4, a.copy())
        product, step, length = memory.measure(4, TrainedModel(b, c, c), c, 0.0, 0.0)
        assert product == pytest.approx(np.dot((b - c).astype(np.float64), a), rel=1e-12)
        np.testing.assert_array_equal(step, b - c)
        assert length == pytest.approx(np.linalg.norm(step.astype(np.float64)), rel=1e-12)


@pytest.mark.parametrize("kind", ["exact", "budget", "sketch"])
def test_first_step_of_a_device_has_no_product(kind: str) -> None:
    a, b = vectors(2)
    memory = StepMemory(kind, LENGTH, 10**9, seed=0)
    product, step, _ = memory.measure(4, TrainedModel(a, b, b), b, 0.0, 0.0)
    assert product is None
    np.testing.assert_array_equal(step, a - b)


def test_sketch_measures_training_and_keeps_the_models_step() -> None:
    last, u, base, fresh, start = vectors(5)
    memory, sketch = StepMemory("sketch", LENGTH, 0, seed=0), CountSketch(LENGTH, 0)
    memory.remember(4, last)
    product, step, _ = memory.measure(4, TrainedModel(u, base, fresh), start, 0.0, 0.5)
    measured = (u - base) - np.float32(0.5) * (fresh - base)
    assert product == pytest.approx(np.dot(sketch(measured).astype(np.float64), sketch(last)), rel=1e-12)
    np.testing.assert_array_equal(step, u - start)


def test_budget_drops_the_least_recently_used_step() -> None:
    memory = StepMemory("budget", LENGTH, 3 * 4 * LENGTH, seed=0)
    for device, vector in enumerate(vectors(3)):
        memory.remember(device, vector)
    memory.remember(0, vectors(1)[0])
    memory.remember(9, vectors(1)[0])
    assert [device in memory for device in (0, 1, 2, 9)] == [True, False, True, True]
    assert memory.bytes == 3 * 4 * LENGTH


def test_exact_spills_to_a_file_and_restores_bit_for_bit() -> None:
    steps = vectors(6)
    memory, roomy = (StepMemory("exact", LENGTH, count * 4 * LENGTH, seed=0) for count in (2, 100))
    for m in (memory, roomy):
        for device, vector in enumerate(steps):
            m.remember(device, vector.copy())
    assert (memory.bytes, memory.spilled_count, roomy.spilled_count) == (2 * 4 * LENGTH, 4, 0)
    rng = np.random.default_rng(5)
    for _ in range(40):
        device = int(rng.integers(6))
        u, base = vectors(2, seed=int(rng.integers(1000)))
        here, there = (m.measure(device, TrainedModel(u, base, base), base, 0.0, 0.0) for m in (memory, roomy))
        assert here[0] == there[0] is not None
        np.testing.assert_array_equal(here[1], there[1])
        memory.remember(device, here[1])
        roomy.remember(device, there[1])
    assert memory.spilled_count == 4 and all(device in memory for device in range(6))


@pytest.mark.parametrize("kind", ["exact", "budget", "sketch"])
def test_measured_step_that_is_not_remembered_leaves_no_trace(kind: str) -> None:
    memory = StepMemory(kind, LENGTH, 2 * 4 * LENGTH, seed=0)
    for device, vector in enumerate(vectors(3)):
        memory.remember(device, vector)
    before = deepcopy([(device, np.array(step)) for device, step in memory.state()])
    for device in (0, 2, 9):
        u, base = vectors(2, seed=8)
        memory.measure(device, TrainedModel(u, base, base), base, 0.0, 0.0)
    for (device, step), (was, kept) in zip(memory.state(), before, strict=True):
        assert device == was
        np.testing.assert_array_equal(step, kept)


def test_spilled_steps_are_saved_and_restored_without_loading_them() -> None:
    memory, other = (StepMemory("exact", LENGTH, 2 * 4 * LENGTH, seed=0) for _ in range(2))
    for device, vector in enumerate(vectors(5)):
        memory.remember(device, vector)
    state = memory.state()
    assert [device for device, _ in state] == [0, 1, 2, 3, 4]
    assert sum(isinstance(step, np.memmap) for _, step in state) == 3
    other.restore(deepcopy(state))
    assert (other.bytes, other.spilled_count) == (memory.bytes, 3)
    for (_, mine), (_, restored) in zip(state, other.state(), strict=True):
        np.testing.assert_array_equal(mine, restored)


def test_sketch_takes_four_kib_for_every_model() -> None:
    memory = StepMemory("sketch", LENGTH, 0, seed=0)
    memory.remember(1, vectors(1)[0])
    assert memory.bytes == 4 * SKETCH_SIZE == 4096


def test_the_sketch_estimates_inner_products_without_bias_and_within_its_error() -> None:
    a, noise = vectors(2)
    b = (0.6 * a + 0.8 * noise).astype(np.float32)
    true = float(np.dot(a.astype(np.float64), b))
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    errors = []
    for seed in range(60):
        sketch = CountSketch(LENGTH, seed)
        errors.append((float(np.dot(sketch(a).astype(np.float64), sketch(b))) - true) / scale)
    bound = np.sqrt(2 / SKETCH_SIZE)
    assert abs(np.mean(errors)) < 4 * bound / np.sqrt(len(errors))
    assert np.std(errors) < bound
    assert np.std(errors) > bound / 4, "an estimate without error would not be a sketch"


@pytest.mark.parametrize("kind", ["exact", "budget", "sketch"])
def test_state_survives_a_round_trip(kind: str) -> None:
    memory, other = (StepMemory(kind, LENGTH, 10**9, seed=3) for _ in range(2))
    a, b = vectors(2)
    memory.remember(7, a)
    other.restore(deepcopy(memory.state()))  # as if from a file
    trained = TrainedModel(b, a.copy(), a.copy())
    here, there = (m.measure(7, trained, trained.base, 0.0, 0.0) for m in (memory, other))
    assert here[0] == there[0]


def past_upload(version: int) -> PastUpload:
    return PastUpload(version, version, 2, 0.4, Control(0.9, 0.6, 0.1 * version), 1.5)


def test_makers_keep_whoever_made_a_version_that_is_held() -> None:
    makers, steps, held = Makers(), vectors(5), {3, 5}
    for version, step in enumerate(steps, start=1):
        makers.add(10 + version, past_upload(version), step, held.__contains__)
    assert sorted(makers.made) == [3, 5, 6], "the newest version is kept too: devices will start from it"
    for version, maker in makers.made.items():
        assert (maker.device, maker.past) == (9 + version, past_upload(version - 1))
        np.testing.assert_array_equal(maker.step, steps[version - 2])


def test_makers_survive_a_round_trip() -> None:
    makers, other = Makers(), Makers()
    for version, step in enumerate(vectors(3), start=1):
        makers.add(version, past_upload(version), step, lambda _: True)
    saving.restore(other, deepcopy(saving.dump(makers)))  # as if from a file
    assert other.made.keys() == makers.made.keys() == {2, 3, 4}
    for version, maker in makers.made.items():
        assert (other.made[version].device, other.made[version].past) == (maker.device, maker.past)
        np.testing.assert_array_equal(other.made[version].step, maker.step)
        assert other.made[version].step.dtype == np.float32


def test_device_with_a_dropped_step_skips_one_adaptation_and_logs_it() -> None:
    size = 2**18  # one step is one MiB
    rng = np.random.default_rng(0)
    server = server_of(
        "fedasmu", rng.normal(size=size), plain_layout(size), control_memory="budget", control_budget_mb=2
    )
    events = []
    for device in (0, 1, 2, 0, 0):
        server.trigger([device])
        events.append(send(server, device, server.weights + 0.1 * rng.normal(size=size))[0])
    assert [event["adapted"] for event in events] == [False, False, False, False, True]
    assert [event.get("forgotten", False) for event in events] == [False, False, False, True, False]
    assert server.method.summary() == {"adaptations": 1, "adaptations_skipped": 1}
    sentence, *_ = server.method.notices()
    assert "hold the steps of 2 devices of 8" in sentence and "skips one adaptation" in sentence


def test_nothing_is_forgotten_by_default() -> None:
    size = 2**18
    rng = np.random.default_rng(0)
    server = server_of("fedasmu", rng.normal(size=size), plain_layout(size), control_budget_mb=2)
    for device in (0, 1, 2, 3, 0, 1, 2, 3):
        server.trigger([device])
        send(server, device, server.weights + 0.1 * rng.normal(size=size))
    assert server.method.summary() == {"adaptations": 4, "adaptations_skipped": 0}
    assert "go to a temporary file" in server.method.notices()[0]


def test_step_too_large_for_float32_is_rejected_without_trace() -> None:
    server = server_of("fedasmu", np.full(3, -3e38), plain_layout(3), apply="mix")
    log: list[Event] = []
    for weights in (np.full(3, -2.9e38), np.full(3, 3e38), np.full(3, -2.8e38), np.full(3, -2.7e38)):
        log += [trigger(server, 0), *upload(server, 0, weights)]
    events = [flat(event) for event in log if not isinstance(event, Triggered)]
    assert [event["kind"] for event in events] == ["aggregate", "rejected", "aggregate", "aggregate"]
    assert [event.get("adapted") for event in events] == [False, None, True, True]
    assert events[1]["reason"] == NOT_FINITE
    check_log(server, log)


def test_overflowing_model_is_rejected_and_the_log_passes_the_audit() -> None:
    server = server_of("fedasmu", np.full(3, 1e38), plain_layout(3), apply="progress")
    log: list[Event] = []
    for _ in range(4):
        log += [trigger(server, 0), trigger(server, 1)]
        for device in (0, 1):
            log += upload(server, device, np.full(3, 3.3e38))
            assert np.isfinite(server.weights).all()
    kinds = [(event["kind"], event.get("reason")) for event in map(flat, log)]
    assert ("aggregate", None) in kinds and ("rejected", NOT_FINITE) in kinds
    check_log(server, log)


def check_log(server: Server, log: list[Event]) -> None:
    """Check the server's events with the method's own audit."""
    memory: dict[Any, Any] = {}
    for event in log:
        server.method.audit(server.method.options, event, 0.0, memory)
