"""Options beyond the paper: ``controls = "direction"``, ``probe = "held-out"`` and ``distance``."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freshet import Federation
from freshet.core.messages import Assignment, Fresh, Number, Slot
from freshet.data.dataset import from_arrays
from freshet.errors import ConfigError
from freshet.methods import method_options
from freshet.methods.asmu.rule import FreshModelRule
from freshet.methods.asmu.staleness import cosine, distance_factor, freshness_weight, saturate
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.training.batches import FederatedData
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Trainer, TripInput
from freshet.training.trip import LocalTrip
from tests.methods.asmu_helpers import SAMPLES, SmoothLoss, central, network, plain_layout, samples, send, server_of

OURS = {"controls": "direction", "probe": "held-out", "distance": True}


# ---- controls that learn from a direction


def adapted(size: float, **options: Any) -> tuple[dict[str, Any], float]:
    """Return a device's second aggregation and minus the cosine of its two steps, both of this size."""
    first, second = np.random.default_rng(2).normal(size=(2, 40)) * size
    w0 = np.zeros(40, np.float32)
    server = server_of("fedasmu-progress", w0, plain_layout(40), controls="direction", **options)
    for step in (first, second):
        server.trigger([0])
        base = server.weights.astype(np.float64)
        (found,) = send(server, 0, base + step, steps=3)
    return found, -float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


def test_slope_is_minus_the_cosine_of_the_last_step_and_current_training() -> None:
    found, expected = adapted(1.0)
    assert found["q"] == pytest.approx(expected, rel=1e-5)
    assert found["grad_iota"] != 0 and np.sign(found["grad_iota"]) == np.sign(expected)


@pytest.mark.parametrize("size", [1e-6, 1e-3, 30.0])
def test_slope_does_not_depend_on_the_size_of_the_network(size: float) -> None:
    there, here = adapted(size)[0], adapted(1.0)[0]
    for key in ("q", "grad_lambda", "grad_sigma", "grad_iota"):
        assert there[key] == pytest.approx(here[key], rel=1e-3)


def test_rates_of_direction_move_the_controls() -> None:
    found, _ = adapted(1e-3)
    paper = adapted(1e-3, eta_lambda=1e-4, eta_sigma=1e-4, eta_iota=1e-4)[0]
    assert abs(found["iota"] - 0.05) == pytest.approx(200 * abs(paper["iota"] - 0.05), rel=1e-6)


def test_cosine_is_clamped_and_zero_without_length() -> None:
    assert cosine(5.0, 1.0, 2.0) == 1.0 and cosine(-5.0, 1.0, 2.0) == -1.0 and cosine(0.0, 0.0, 2.0) == 0.0


def test_notice_names_rates_meant_for_a_loss() -> None:
    direction = {"controls": "direction"}
    given = {"eta_lambda": 1e-4, "eta_iota": 0.0}
    (notice,) = method_options("fedasmu-progress", direction | given).slow_rate_notices()
    assert "method.eta_lambda)" in notice and "0.02" in notice, "a rate of 0 is deliberate"
    assert method_options("fedasmu-progress", direction).slow_rate_notices() == []
    assert method_options("fedasmu-progress", given).slow_rate_notices() == []


def test_it_needs_progress() -> None:
    with pytest.raises(ConfigError, match='it needs apply = "progress"'):
        method_options("fedasmu", {"controls": "direction"})


# ---- a merge weight that also knows distance


def merged(w_b: np.ndarray, w_g: np.ndarray, **options: Any) -> Mapping[str, Number]:
    """Return the numbers of the merge of a trip that asks before its first step. Its base lies close to ``w_b``."""
    x, y = samples()
    data = FederatedData.of(from_arrays("t", (x, y), (x, y)), [np.arange(SAMPLES)])
    trainer = Trainer(network, data, TrainingOptions(epochs=1, batch_size=SAMPLES, lr=1e-6), seed=0)
    rates = {"eta_gamma": 1.0, "eta_upsilon": 1.0, "mu_beta": 1.5}
    rule = FreshModelRule(method_options("fedasmu-progress", rates | options))  # type: ignore[arg-type]
    sent, fresh = Assignment(0, 1, 4, 4, w_b, 1, 1e-6), Fresh(9, 9, w_g)
    (merge,) = trainer.train(
        TripInput(sent, (Slot(1, "fixed"),), (fresh,), rule, {"gamma": 1.2, "upsilon": 0.7})
    ).merges
    assert merge.version == 9
    return merge.numbers


@pytest.fixture
def models() -> tuple[np.ndarray, np.ndarray]:
    w_b = SmoothLoss().flat.dump()
    return w_b, w_b + 0.5 * np.random.default_rng(5).normal(size=w_b.size).astype(np.float32)


def test_beta_grows_with_the_servers_lead() -> None:
    assert [distance_factor(server, 1.0) for server in (0.0, 1.0, 3.0)] == [0.0, 1.0, 1.5]
    assert distance_factor(1.0, 0.0) == 2.0 and distance_factor(0.0, 0.0) == 1.0


def test_gamma_and_upsilon_follow_the_derivatives_with_distance(models: tuple[np.ndarray, np.ndarray]) -> None:
    w_b, w_g = models
    found, loss = merged(w_b, w_g, distance=True), SmoothLoss()
    assert found["far"] == pytest.approx(2.0, abs=1e-4), "the device has not moved yet, the server has"

    def at(gamma: float, upsilon: float) -> float:
        beta = saturate(1.5, freshness_weight(gamma, upsilon, 9, 6, found["far"]))
        return loss((1 - beta) * w_b.astype(np.float64) + beta * w_g.astype(np.float64))

    true = central(lambda v: at(v, 0.7), 1.2), central(lambda v: at(1.2, v), 0.7)
    assert (1.2 - found["gamma_after"], 0.7 - found["upsilon_after"]) == pytest.approx(true, rel=1e-3)


def test_merge_slope_under_direction_is_a_cosine(models: tuple[np.ndarray, np.ndarray]) -> None:
    w_b, w_g = models
    found, loss = merged(w_b, w_g, controls="direction"), SmoothLoss()
    after = (1 - found["beta"]) * w_b.astype(np.float64) + found["beta"] * w_g.astype(np.float64)
    h, way = loss.gradient(after), (w_g - w_b).astype(np.float64)
    assert found["q"] == pytest.approx(h @ way / np.linalg.norm(h) / np.linalg.norm(way), rel=1e-3)


# ---- samples kept apart


def trip_of(shard: np.ndarray, number: int, probe: str = "held-out") -> LocalTrip:
    x, y = np.arange(200, dtype=np.float32).reshape(40, 5), np.arange(40) % 3
    data = FederatedData.of(from_arrays("t", (x, y), (x, y)), [shard])
    trainer = Trainer(network, data, TrainingOptions(epochs=1, batch_size=4, lr=1e-6), seed=0)
    rule = FreshModelRule(method_options("fedasmu-progress", {"probe": probe}))  # type: ignore[arg-type]
    sent = Assignment(0, number, 4, 4, trainer.flat.dump(), 1, 1e-6)
    return LocalTrip(trainer, sent, (), rule, {})


def rows(x: torch.Tensor) -> set[int]:
    return {int(value) // 5 for value in x[:, 0].tolist()}


def test_held_out_tenth_is_the_same_in_every_trip_and_never_trained_on() -> None:
    shard, kept = np.arange(0, 40, 2), set()
    for number in (1, 2, 3):
        trip = trip_of(shard, number)
        trained = {int(index) for batch in trip._batches_of_epoch() for index in batch}
        apart = rows(trip.held_out()[0])
        assert len(apart) == 2 and apart.isdisjoint(trained) and apart | trained == set(shard.tolist())
        kept.add(frozenset(apart))
    assert len(kept) == 1


def test_every_sample_is_trained_on_without_held_out() -> None:
    trained = {int(index) for batch in trip_of(np.arange(20), 1, "batch")._batches_of_epoch() for index in batch}
    assert trained == set(range(20))


def test_device_with_too_few_samples_uses_its_next_mini_batch() -> None:
    trip = trip_of(np.arange(6), 1)
    assert rows(trip.held_out()[0]) == rows(trip.next_batch()[0])


# ---- whole runs


@pytest.mark.parametrize("name", ["fedasmu-progress", "fedssmu-progress"])
def test_run_with_all_options_passes_the_audit(name: str, tmp_path: Path, federate: Callable[..., Federation]) -> None:
    result = federate({"name": name, **OURS}).run(120, out=tmp_path / "run")
    found = audit(RunDirectory(result.directory))
    assert found.passed and found.audited and found.merges > 5, found.problem
    events = list(RunDirectory(result.directory).events())
    assert all(0 <= event["far"] <= 2 and abs(event["q"]) <= 1 for event in events if event["kind"] == "merge")


def test_audit_finds_a_changed_length(tmp_path: Path, federate: Callable[..., Federation]) -> None:
    result = federate({"name": "fedasmu-progress", **OURS}).run(60, out=tmp_path / "run")
    log = result.directory / "events.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    place = next(place for place, event in enumerate(lines) if "length_p" in event)
    lines[place]["length_p"] *= 2
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert f"line {place + 1} (aggregate): length_p" in str(audit(RunDirectory(result.directory)).problem)
