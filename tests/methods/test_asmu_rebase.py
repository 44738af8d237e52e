"""``merge = "rebase"``: the device's progress is carried over whole, and the server adds what training produced."""

from typing import Any

import numpy as np
import pytest
from torch import nn

from freshet.core.compression import LinkOptions, unpack
from freshet.core.messages import Assignment, Fresh, Merge, Slot, Upload
from freshet.data import from_arrays
from freshet.errors import ConfigError
from freshet.methods import method_options
from freshet.methods.asmu.rule import FreshModelRule
from freshet.methods.asmu.staleness import freshness_weight, saturate
from freshet.privacy import PrivacyOptions
from freshet.training.batches import FederatedData
from freshet.training.options import TrainingOptions
from freshet.training.outgoing import Outgoing
from freshet.training.trainer import Trainer
from freshet.training.trip import LocalTrip
from tests.methods.asmu_helpers import (
    CLASSES,
    FEATURES,
    SAMPLES,
    SmoothLoss,
    ask,
    central,
    flat,
    network,
    plain_layout,
    samples,
    send,
    server_of,
)

SLOTS = (Slot(2, "fixed"), Slot(3, "again"))


def trainer(factory: Any = network, lr: float = 0.1, **more: Any) -> Trainer:
    x, y = samples()
    data = FederatedData.of(from_arrays("t", (x, y), (x, y)), [np.arange(SAMPLES)])
    return Trainer(factory, data, TrainingOptions(epochs=4, batch_size=SAMPLES, lr=lr), seed=0, **more)


def rule(**options: Any) -> FreshModelRule:
    found: Any = method_options("fedasmu-progress", {"merge": "rebase", "slot": 2, "beta": "learned", **options})
    return FreshModelRule(found)


def begin(t: Trainer, rule: FreshModelRule, lr: float = 0.1) -> LocalTrip:
    return LocalTrip(t, Assignment(0, 1, 4, 4, t.flat.dump(), 4, lr), SLOTS, rule, {})


def far(w: np.ndarray, seed: int) -> np.ndarray:
    return w + 0.3 * np.random.default_rng(seed).normal(size=w.size).astype(np.float32)


@pytest.mark.parametrize("options", [{"beta": 1.0}, {"beta": 0.4}, {}], ids=["whole", "fixed", "learned"])
def test_local_model_moves_by_what_the_server_moved_from_the_anchor(options: dict[str, Any]) -> None:
    t = trainer()
    trip = begin(t, rule(**options))
    anchor = t.flat.dump().astype(np.float64)
    for version, seed in ((9, 1), (12, 2)):
        assert trip.to_slot()
        before, fresh = trip.snapshot().astype(np.float64), far(t.flat.dump(), seed)
        trip.merge(Fresh(version, version, fresh))
        beta = trip.merges[-1].numbers["beta"]
        assert beta == options.get("beta", beta) and 0 < beta <= 1
        np.testing.assert_allclose(trip.snapshot(), before + beta * (fresh - anchor), atol=1e-6)
        anchor = (1 - beta) * anchor + beta * fresh
        np.testing.assert_allclose(trip.anchor, anchor, atol=1e-6)


def test_nothing_that_was_trained_is_lost() -> None:
    """With a loss whose gradient is constant, ``w_i - a`` is that gradient times all steps, whatever is merged."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(np_zeros(FEATURES))

        def forward(self, x: Any) -> Any:
            return (x @ self.weight)[:, None]

    class Slope:
        def batch_loss(self, model: Any, x: Any, y: Any) -> Any:
            return model(x).mean()

    t = trainer(Linear, task=Slope())
    trip = begin(t, rule(beta=0.7))
    for version, seed in ((9, 1), (12, 2)):
        trip.to_slot()
        trip.merge(Fresh(version, version, far(t.flat.dump(), seed)))
    done = trip.finish()
    gradient = samples()[0].mean(axis=0)
    np.testing.assert_allclose(done.weights - trip.anchor, -0.1 * done.steps * gradient, atol=1e-6)


def np_zeros(size: int) -> Any:
    import torch

    return torch.zeros(size)


def test_gamma_and_upsilon_follow_the_derivatives_at_both_merges() -> None:
    """dw_a / dbeta = w_g - a, so q = <h, w_g - a>."""
    loss, t = SmoothLoss(), trainer()
    trip = begin(t, rule(eta_gamma=1.0, eta_upsilon=1.0, mu_beta=1.5, gamma0=1.2, upsilon0=0.7))
    anchor, held = t.flat.dump().astype(np.float64), 4
    for version, seed in ((9, 1), (12, 2)):
        trip.to_slot()
        before, fresh = trip.snapshot().astype(np.float64), far(t.flat.dump(), seed)
        gamma, upsilon = (float(trip.memory[name]) for name in ("gamma", "upsilon"))

        def at(gamma: float, upsilon: float) -> float:
            beta = saturate(1.5, freshness_weight(gamma, upsilon, version, version - held + 1))  # noqa: B023
            return loss(before + beta * (fresh - anchor))  # noqa: B023

        true = central(lambda v: at(v, upsilon), gamma), central(lambda v: at(gamma, v), upsilon)  # noqa: B023
        trip.merge(Fresh(version, version, fresh))
        numbers = trip.merges[-1].numbers
        moved = numbers["gamma"] - numbers["gamma_after"], numbers["upsilon"] - numbers["upsilon_after"]
        assert moved == pytest.approx(true, rel=2e-3, abs=1e-6)
        anchor, held = trip.anchor.astype(np.float64), version


def test_fixed_weight_is_not_learned() -> None:
    trip = begin(trainer(), rule(beta=0.5, eta_gamma=1.0, eta_upsilon=1.0))
    trip.to_slot()
    trip.merge(Fresh(9, 9, far(trip.snapshot(), 1)))
    assert trip.memory["gamma"] == trip.rule.options.gamma0 and trip.merges[0].numbers["beta"] == 0.5  # type: ignore[attr-defined]


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES))


def test_statistics_are_mixed_so_that_a_variance_stays_positive() -> None:
    t = trainer(with_batch_norm)
    trip, n = begin(t, rule(beta=1.0)), t.flat.layout.learnable
    trip.to_slot()
    fresh = t.flat.dump()
    fresh[n:] = 0.01  # a base variance of 1 and this one differ by more than the device has
    trip.merge(Fresh(9, 9, fresh))
    np.testing.assert_array_equal(trip.snapshot()[n : n + 8], fresh[n : n + 8])
    trip.to_slot()
    trip.merge(None)
    assert np.isfinite(trip.finish().weights).all()


def test_paused_trip_keeps_its_anchor() -> None:
    whole, parts = trainer(), trainer()
    models = [far(whole.flat.dump(), seed) for seed in (1, 2)]
    trip = begin(whole, rule(beta=0.6))
    for version, model in zip((9, 12), models, strict=True):
        trip.to_slot()
        trip.merge(Fresh(version, version, model))
    expected = trip.finish()
    first = begin(parts, rule(beta=0.6))
    first.to_slot()
    first.merge(Fresh(9, 9, models[0]))
    first.to_slot()
    saved, base = first.save(), first.assignment.weights
    again = LocalTrip(parts, first.assignment._replace(weights=base), SLOTS, rule(beta=0.6), {})
    again.restore(saved)
    again.merge(Fresh(12, 12, models[1]))
    np.testing.assert_array_equal(again.finish().weights, expected.weights)


# ---- the server


@pytest.mark.parametrize("name", ["fedasmu-progress", "fedasmu-course", "fedssmu-progress"])
@pytest.mark.parametrize("count", [1, 3])
def test_server_adds_what_training_produced(name: str, count: int) -> None:
    rng = np.random.default_rng(0)
    size = 12
    server = server_of(name, rng.normal(size=size), plain_layout(size), epochs=5, merge="rebase", refresh=3, slot=2)
    devices = list(range(count + 1)) if server.synchronous else [0]
    server.trigger(devices)
    base, models = server.weights.astype(np.float64), []
    for place in range(count):
        if not server.synchronous:
            server.trigger([1 + place])
        send(server, 1 + place, server.weights + 0.1 * rng.normal(size=size))
        fresh = ask(server, 0, 2 + place)
        assert fresh is not None
        models.append(fresh.weights.astype(np.float64))
    active, progress = server.active_trips[0], 0.2 * rng.normal(size=size)
    anchor, merges = base, []
    for place, (sent, model) in enumerate(zip(active.sent, models, strict=True)):
        beta = 1.0 if place == 0 else 0.4
        anchor = (1 - beta) * anchor + beta * model
        merges.append(Merge(sent.version, {"beta": beta, "n1": 2 + place}))
    weights = (anchor + progress).astype(np.float32)
    before = server.weights.astype(np.float64)
    record = flat(server.upload(Upload(0, active.trip, active.base, weights, 9, merges=tuple(merges)))[0])
    np.testing.assert_allclose(server.weights, before + record["alpha"] * progress, atol=1e-5)


def test_pseudo_gradient_divides_by_all_steps() -> None:
    rng = np.random.default_rng(1)
    size, lr = 10, 0.1
    server = server_of("fedasmu-progress", rng.normal(size=size), plain_layout(size), epochs=5, merge="rebase", slot=2)
    server.trigger([0])
    first = 0.1 * rng.normal(size=size)
    send(server, 0, server.weights + first)
    server.trigger([0])
    server.trigger([1])
    send(server, 1, server.weights + 0.1 * rng.normal(size=size))
    base, fresh = server.store.get(server.active_trips[0].base), ask(server, 0, 2)
    assert fresh is not None
    gradient, steps = rng.normal(size=size), 8
    weights = base - lr * steps * gradient + 1.0 * (fresh.weights - base)
    (record,) = send(server, 0, weights, steps=steps, beta=1.0, n1=5)
    assert record["q"] == pytest.approx(float(gradient @ first), rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"merge": "rebase"},
        {"merge": "rebase", "apply": "progress", "equations": "published"},
        {"beta": 1.0},
        {"beta": 1.5},
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        method_options("fedasmu", options)


def test_weight_of_one_is_rejected_where_models_are_mixed() -> None:
    size = 6
    server = server_of("fedasmu-progress", np.zeros(size), plain_layout(size), epochs=5)
    server.trigger([0, 1])
    send(server, 1, server.weights + 0.1)
    ask(server, 0, 2)
    (record,) = send(server, 0, server.weights + 0.1, steps=5, beta=1.0, n1=2)
    assert record["kind"] == "rejected" and "with weight 1.0" in record["reason"]


# ---- what goes up is the progress


def rebased(outgoing: Outgoing) -> tuple[LocalTrip, Any]:
    t = trainer(outgoing=outgoing)
    trip = begin(t, rule(beta=1.0))
    for version, seed in ((9, 1), (12, 2)):
        trip.to_slot()
        trip.merge(Fresh(version, version, far(t.flat.dump(), seed)))
    return trip, trip.finish()


def test_compressed_upload_is_the_progress_not_the_servers_move() -> None:
    trip, plain = rebased(Outgoing())
    _, packed = rebased(Outgoing(links=LinkOptions(up="int8")))
    progress = plain.weights - trip.anchor
    difference, _ = unpack(packed.packed, trip.layout, 1.0)
    np.testing.assert_allclose(difference, progress, atol=np.abs(progress).max() / 100)


def test_privacy_clips_the_progress_not_the_servers_move() -> None:
    trip, plain = rebased(Outgoing())
    length = float(np.linalg.norm(plain.weights - trip.anchor))
    clip = length / 2
    _, private = rebased(Outgoing(privacy=PrivacyOptions(clip=clip, noise=1e-9)))
    assert np.linalg.norm(private.weights - trip.anchor) == pytest.approx(clip, rel=1e-4)
    np.testing.assert_allclose(private.weights - trip.anchor, (plain.weights - trip.anchor) / 2, atol=1e-5)
