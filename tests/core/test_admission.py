"""The norm gate: what is far beyond recent uploads is rejected, and honest devices never notice."""

from statistics import median_low
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.core.admission import (
    GATE_FACTOR,
    MEDIAN_WINDOW,
    MIN_DEVICES,
    MIN_UPLOADS,
    STATISTICS,
    STEP,
    STEPS,
    NormGate,
    RecentLengths,
)
from freshet.core.events import Aggregated, Rejected
from freshet.core.layout import Layout
from freshet.core.messages import Upload
from freshet.core.server import Server
from freshet.core.vectors import Vector, distance_from_line
from freshet.methods import registry
from tests.methods.helpers import LAYOUT, LEARNABLE, REPORTS, SIZE, server_of, upload_of, vector

LARGEST = float(np.finfo(np.float32).max)
PLAIN = Layout.build([("w", (4,), "learnable")])


def sent(weights: Any, **vectors: Vector) -> Upload:
    return Upload(0, 1, 1, np.asarray(weights, np.float32), 1, vectors=vectors)


def measured(gate: NormGate, upload: Upload, base: Vector, fresh: Vector | None = None) -> list[float]:
    return gate.all_lengths(upload, gate.step_lengths(upload, base, {} if fresh is None else {2: fresh}))


# ---- lengths


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 150), st.floats(0, 1e6)), max_size=3 * MEDIAN_WINDOW))
def test_the_median_is_over_the_latest_lengths_of_the_last_devices(added: list[tuple[int, float]]) -> None:
    known = RecentLengths()
    for device, length in added:
        known.add(device, length)
    places = {device: place for place, (device, _) in enumerate(added)}
    latest = [added[place] for place in sorted(places.values())][-MEDIAN_WINDOW:]
    assert known.in_order() == latest
    enough = len(latest) >= MIN_DEVICES or len(added) >= MIN_UPLOADS
    assert known.median == (median_low([length for _, length in latest]) if enough else None)
    again = RecentLengths(known.in_order(), uploads=known.uploads)
    assert (again.median, again.uploads) == (known.median, known.uploads)


def test_devices_that_answer_quickly_do_not_own_the_median() -> None:
    """8 of 40 devices send most uploads. Their short steps used to become the median."""
    known = RecentLengths()
    for turn in range(2000):
        known.add(8 + turn % 32, 1.0) if turn % 5 == 0 else known.add(turn % 8, 1e-9)
    assert known.median == 1.0


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_the_distance_from_a_line_is_the_minimum(seed: int, size: int) -> None:
    u, a, b = np.random.default_rng(seed).normal(size=(3, size)).astype(np.float32)
    tried = [float(np.linalg.norm((u - a).astype(float) - x * (b - a).astype(float))) for x in np.linspace(0, 1, 201)]
    found = distance_from_line(u, a, b)
    assert found <= min(tried) + 1e-6
    assert found >= min(tried) - float(np.linalg.norm(b - a)) / 200 - 1e-6


def test_the_distance_from_a_line_of_length_0_is_that_from_a_point() -> None:
    a = np.array([3.0, 4.0], np.float32)
    assert distance_from_line(np.zeros(2, np.float32), a, a) == 5.0


# ---- the rule


def filled(factor: float = 10.0, steps: int = MIN_DEVICES, length: float = 1.0) -> NormGate:
    gate = NormGate(factor, PLAIN)
    for device in range(steps):
        gate.remember(device, [length, 5.0])
    return gate


def test_a_step_beyond_factor_times_the_median_is_rejected_with_its_numbers() -> None:
    gate, base = filled(), np.zeros(4, np.float32)
    assert gate.find_excess([10.0, 5.0], base, 50) is None
    found = gate.find_excess([10.5, 5.0], base, 50)
    assert found is not None and "run.gate" in found.reason and STEP in found.reason
    assert found.numbers == {"length": 10.5, "limit": 10.0, "usual": 1.0}


def test_a_step_no_longer_than_the_model_always_passes() -> None:
    gate, base = filled(length=1e-6), np.array([3.0, 4.0, 0.0, 0.0], np.float32)
    assert gate.find_excess([5.0, 5.0], base, 50) is None
    assert gate.find_excess([5.1, 5.0], base, 50) is not None


def test_at_the_start_the_norm_of_the_model_replaces_the_median() -> None:
    gate = NormGate(10.0, PLAIN)
    for base, limit in ((np.zeros(4, np.float32), 20.0), (np.full(4, 50.0, np.float32), 1000.0)):
        assert gate.find_excess([limit, 5.0], base, 50) is None
        found = gate.find_excess([limit * 1.01, 5.0], base, 50)
        assert found is not None and found.numbers == {"length": limit * 1.01, "limit": limit}


def test_steps_of_length_0_do_not_count() -> None:
    gate = filled(steps=MIN_DEVICES - 1)
    for _ in range(MEDIAN_WINDOW):
        gate.remember(0, [0.0, 5.0])
    assert [length for _, length in gate.state()[STEP]["latest"]] == [1.0] * (MIN_DEVICES - 1)


def test_the_servers_progress_between_base_and_fresh_model_does_not_count() -> None:
    gate, base = NormGate(10.0, PLAIN), np.zeros(4, np.float32)
    fresh = np.array([1000.0, 0.0, 0.0, 0.0], np.float32)
    for weight in (0.0, 0.3, 1.0):
        upload = sent(weight * fresh + np.array([0.0, 2.0, 0.0, 0.0]))
        assert measured(gate, upload, base, fresh) == [pytest.approx(2.0), 1.0]
    assert measured(gate, sent(fresh), base) == [1000.0, 1.0]


def test_buffers_and_named_vectors_have_bounds_of_their_own() -> None:
    gate, base = NormGate(10.0, LAYOUT, ("c",)), vector(1)
    n = LEARNABLE
    for seed in range(MIN_DEVICES):
        lengths = measured(gate, sent(base + 0.1 * vector(seed), c=vector(seed)[:n]), base)
        assert gate.find_excess(lengths, base, 50) is None
        gate.remember(seed, lengths)
    assert list(gate.state()) == [STEP, STATISTICS, "c", STEPS]
    wild = base.copy()
    wild[n] = 1e30
    for upload, name in (
        (sent(wild, c=vector(1)[:n]), STATISTICS),
        (sent(base, c=np.full(n, 1e30, np.float32)), "c"),
    ):
        found = gate.find_excess(measured(gate, upload, base), base, 50)
        assert found is not None and found.reason.startswith(f"its {name} ")


@pytest.mark.parametrize(("usual", "work", "most"), [(None, 50, 500), (5, 50, 50), (8, 50, 80)])
def test_the_number_of_steps_is_bounded(usual: Any, work: int, most: int) -> None:
    gate, base = NormGate(10.0, PLAIN), np.zeros(4, np.float32)
    for device in range(MIN_DEVICES if usual else 0):
        gate.remember(device, [1.0, usual])
    assert gate.find_excess([1.0, most], base, work) is None
    found = gate.find_excess([1.0, most + 1], base, work)
    assert found is not None and found.reason == f"its {STEPS} exceeds the bound of the norm gate (run.gate)"


def test_a_restored_state_continues_the_same_way() -> None:
    gate, other = filled(steps=2 * MEDIAN_WINDOW, length=3.0), NormGate(10.0, PLAIN)
    other.restore(gate.state())
    for g in (gate, other):
        g.remember(7, [5.0, 5.0])
    assert other.state() == gate.state()


def test_a_state_of_an_older_version_counts_every_length() -> None:
    gate = NormGate(10.0, PLAIN)
    gate.restore({STEP: [1.0, 2.0, 3.0] * 4, STEPS: [5.0] * 12})
    assert gate.find_excess([20.5, 5.0], np.zeros(4, np.float32), 50) is not None
    gate.remember(0, [5.0, 5.0])
    assert gate.state()[STEP]["uploads"] == 13 == len(gate.state()[STEP]["latest"])


# ---- the server, for every method


def honest(server: Server, rng: np.random.Generator) -> list[Any]:
    """One round, or two trips, of devices that move by about the same distance."""
    idle = [d for d in range(server.context.devices) if d not in server.active_trips and d not in server.waiting]
    chosen = [int(d) for d in rng.choice(idle, 2, replace=False)]
    server.trigger(chosen)
    return [event for device in chosen for event in server.upload(training(server, device, rng))]


def training(server: Server, device: int, rng: np.random.Generator) -> Upload:
    step, n = 0.01 * rng.standard_normal(SIZE), server.context.layout.learnable
    weights = (server.store.get(server.active_trips[device].base) + step).astype(np.float32)
    vectors = {name: (0.1 * rng.standard_normal(n)).astype(np.float32) for name in server.rule.sends}
    report = REPORTS.get(server.method.about.name, {})
    return upload_of(server, device, weights, report=report, vectors=vectors)


def places(name: str) -> list[str]:
    """The parts of an upload that hold numbers, for this method."""
    return ["model", "one entry", "buffers", *(["vector"] if server_of(name).rule.sends else [])]


@pytest.mark.parametrize("rounds", [0, 1, 198])
@pytest.mark.parametrize(("name", "place"), [(name, place) for name in sorted(registry()) for place in places(name)])
def test_the_largest_float_is_rejected_with_every_method(name: str, rounds: int, place: str) -> None:
    server, rng = server_of(name, norm_gate=GATE_FACTOR), np.random.default_rng(0)
    happened = [event for _ in range(rounds) for event in honest(server, rng)]
    assert not any(isinstance(event, Rejected) for event in happened)
    before, version = server.weights.tobytes(), server.version
    idle = next(d for d in range(8) if d not in server.active_trips and d not in server.waiting)
    server.trigger([idle])
    upload = training(server, idle, rng)
    target = upload.weights if place != "vector" else upload.vectors[server.rule.sends[0]]
    part = {"one entry": slice(0, 1), "buffers": slice(LEARNABLE, None)}.get(place, slice(None))
    target[part] = LARGEST
    events = server.upload(upload)
    assert isinstance(events[0], Rejected) and "exceeds the bound of the norm gate" in events[0].reason
    assert events[0].numbers["length"] > events[0].numbers["limit"]
    assert (events[0].device, server.weights.tobytes()) == (idle, before)
    assert server.version - version == sum(isinstance(event, Aggregated) for event in events)
    after = [event for _ in range(20) for event in honest(server, rng)]
    assert not any(isinstance(event, Rejected) for event in after)
    assert np.abs(server.weights).max() < 100


@pytest.mark.parametrize("name", ["fedasync", "fedavg"])
def test_without_the_gate_one_such_upload_ruins_the_model(name: str) -> None:
    server, rng = server_of(name), np.random.default_rng(0)
    server.trigger([0])
    upload = training(server, 0, rng)
    upload.weights[:] = LARGEST / 2
    server.upload(upload)
    assert np.abs(server.weights).max() > 1e37


def test_a_minority_cannot_move_the_median_and_a_majority_is_the_median() -> None:
    gate, base = NormGate(GATE_FACTOR, PLAIN), np.zeros(4, np.float32)
    for device, length in enumerate([1.0, 1e30] * MIN_DEVICES):
        gate.remember(device, [length, 5.0])
    assert gate.find_excess([101.0, 5.0], base, 50) is not None
    gate.remember(1, [1e30, 5.0])
    assert gate.find_excess([101.0, 5.0], base, 50) is not None, "a device has one place"
    gate.remember(2 * MIN_DEVICES, [1e30, 5.0])
    assert gate.find_excess([101.0, 5.0], base, 50) is None


def test_a_too_large_learning_rate_still_diverges_and_says_so(federate: Any, tmp_path: Any) -> None:
    result = federate("fedavg", training={"lr": 1e9}, run={"eval_every": 4.0}).run(200, out=tmp_path / "run")
    assert result.summary["status"] == "diverged" and result.summary["rejected"] > 0


def test_a_factor_with_an_infinite_square_admits_everything():
    gate = NormGate(1e300, Layout.build([("w", (2,), "learnable"), ("b", (2,), "buffer")]))
    for device in range(MIN_DEVICES + 1):
        lengths = [1e38, 1e38, 5.0]
        assert gate.find_excess(lengths, np.ones(4, np.float32), 5) is None
        gate.remember(device, lengths)
