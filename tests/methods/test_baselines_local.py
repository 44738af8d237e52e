"""The device rules of the baselines: comparison with naive twins on softmax regression, and properties."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from freshet.core.layout import Layout
from freshet.core.messages import Assignment
from freshet.core.method import LocalRule
from freshet.core.vectors import Vector, distance
from freshet.data.dataset import from_arrays
from freshet.errors import ConfigError
from freshet.methods.asofed import ASOFed, ASOFedOptions, StepRule, TripRule, delay_factor, scale_features
from freshet.methods.feddyn import DualRule
from freshet.methods.fedprox import Proximal, proximal
from freshet.methods.moon import ContrastiveRule, contrastive_loss
from freshet.models.registry import build
from freshet.training.batches import FederatedData
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Trainer, TripInput
from freshet.training.trip import LocalTrip
from tests.methods.helpers import SAMPLES, WEIGHTS, Device, close, regression_weights, same, send, server_of
from tests.twins import local as twins
from tests.twins.asynchronous import aso_feature_step

SGD = [{}, {"momentum": 0.6, "weight_decay": 0.01}]


# ---- proximal term: FedAsync, FedSA, FedProx


@pytest.mark.parametrize("training", SGD)
def test_proximal_training_matches_the_twin(training: dict[str, float]) -> None:
    device, w = Device(**training), regression_weights(1)
    ours = device.train(Proximal(0.8), w).weights
    extra = twins.proximal(w, 0.8)
    close(ours, twins.local_sgd(w, device.x, device.y, device.batches(), 0.2, extra=extra, **training), 2e-6)


def test_rho_zero_is_plain_sgd_and_the_first_step_ignores_rho() -> None:
    assert type(proximal(0.0)) is LocalRule
    one_step = Device(epochs=1, batch=SAMPLES)
    w = regression_weights(1)
    for rho in (0.0, 0.3, 7.0):
        same(one_step.train(proximal(rho), w).weights, one_step.train(LocalRule(), w).weights)


def test_larger_rho_stays_closer_to_the_base() -> None:
    device, w = Device(epochs=8, batch=SAMPLES), regression_weights(1)
    moved = [distance(device.train(proximal(rho), w).weights, w) for rho in (0.0, 0.1, 1.0, 3.0)]
    assert moved == sorted(moved, reverse=True)


def test_proximal_optimum_of_a_quadratic_lies_between() -> None:
    """``f = c/2 |u|^2`` is what weight decay adds: u -> rho w / (c + rho), without a data term."""

    class NoLoss(Proximal):
        def loss(self, local: Any, x: Any, y: Any) -> Any:
            return 0.0 * local.model(x).sum()

    device, w = Device(lr=0.1, epochs=200, weight_decay=0.5), regression_weights(1)
    close(device.train(NoLoss(1.5), w).weights, 1.5 * w / 2.0, 1e-5)


def test_fedavg_with_one_full_batch_each_is_one_step_of_gradient_descent() -> None:
    layout = Layout.build([("weight", (WEIGHTS,), "learnable")])
    w, device = regression_weights(1), Device(epochs=1, batch=SAMPLES)
    server = server_of("fedavg", w, devices=2, layout=layout)
    for assignment in server.trigger([0, 1]):
        send(server, assignment.device, device.train(LocalRule(), assignment.weights).weights)
    close(server.weights, w - 0.2 * twins.gradient(w, device.x, device.y), 1e-6)


def test_fedasync_without_rho_mixes_plain_training() -> None:
    layout = Layout.build([("weight", (WEIGHTS,), "learnable")])
    server = server_of("fedasync", regression_weights(1), devices=1, layout=layout, staleness="constant", rho=0.0)
    device = Device()
    for trip in (1, 2, 3):
        w = server.weights
        u = device.train(server.rule, server.trigger([0])[0].weights, trip).weights
        send(server, 0, u)
        close(server.weights, 0.4 * w + 0.6 * u, 1e-6)
        same(u, device.train(LocalRule(), w, trip).weights)


# ---- FedDyn


@pytest.mark.parametrize("training", SGD)
def test_feddyn_trips_match_the_twin(training: dict[str, float]) -> None:
    device, memory, dual = Device(**training), {}, np.zeros(WEIGHTS)
    for trip in (1, 2, 3):
        theta = regression_weights(trip)
        outcome = device.train(DualRule(), theta, trip, memory, instruction={"alpha_k": 0.7})
        batches = device.batches(trip)
        u, dual = twins.feddyn_local(theta, dual, device.x, device.y, batches, 0.2, 0.7, **training)
        close(outcome.weights, u, 3e-6)
        close(outcome.memory["lambda"], dual, 1e-5)
        assert memory.get("lambda") is not outcome.memory["lambda"]
        memory = outcome.memory


def test_feddyn_first_step_is_plain_sgd() -> None:
    device, w = Device(epochs=1, batch=SAMPLES), regression_weights(1)
    first = device.train(DualRule(), w, instruction={"alpha_k": 5.0}).weights
    same(first, device.train(LocalRule(), w).weights)


def test_feddyn_server_dual_is_the_mean_of_the_devices_duals() -> None:
    layout = Layout.build([("weight", (WEIGHTS,), "learnable")])
    server = server_of("feddyn", regression_weights(1), devices=6, per_round=3, layout=layout, alpha=0.3)
    device, rng = Device(), np.random.default_rng(4)
    memories: list[dict[str, Any]] = [{} for _ in range(6)]
    for _ in range(6):
        chosen = sorted(int(k) for k in rng.choice(6, 3, replace=False))
        for assignment in server.trigger(chosen):
            k, memory = assignment.device, memories[assignment.device]
            # every device has the same samples but its own order of them
            trip = 100 * k + assignment.trip
            outcome = device.train(DualRule(), assignment.weights, trip, memory, instruction=assignment.instruction)
            memories[k] = outcome.memory
            send(server, k, outcome.weights)
        duals = [memory.get("lambda", np.zeros(WEIGHTS)) for memory in memories]
        close(server.method.state.G, np.mean(duals, axis=0), 1e-6)


# ---- ASO-Fed


@pytest.mark.parametrize(
    ("seconds", "unit", "r"),
    [
        (None, 1.0, 1.0),
        (2.0, 1.0, 1.0),
        (math.e, 1.0, 1.0),
        (50.0, 1.0, math.log(50.0)),
        (10.0, 10.0, 1.0),
        (50.0, 10.0, math.log(5.0)),
        (5e4, 1e4, math.log(5.0)),  # another clock, the same rate
    ],
)
def test_asofed_rate(seconds: float | None, unit: float, r: float) -> None:
    assert delay_factor(seconds, unit) == r == twins.aso_rate([seconds] if seconds else [], unit)


@pytest.mark.parametrize("training", [*SGD, {"weight_decay": 0.1}])
@pytest.mark.parametrize("variant", ["S", "R"])
def test_asofed_trips_match_the_twin(variant: str, training: dict[str, float]) -> None:
    device, w = Device(lr=0.05, **training), regression_weights(1)
    rule = ASOFed.rule(ASOFedOptions(beta=0.3, lambda_=0.4, variant=variant, delay_unit=3.0))
    memory: dict[str, Any] = {}
    H, V = np.zeros(WEIGHTS), np.zeros(WEIGHTS)
    twin = twins.aso_local_s if variant == "S" else twins.aso_local_r
    for trip, seconds in ((1, None), (2, 36.0), (3, 93.0)):
        outcome = device.train(rule, w, trip, memory, seconds=seconds)
        r = delay_factor(seconds, 3.0)
        u, H, V = twin(w, H, V, device.x, device.y, device.batches(trip), 0.05, 0.4, 0.3, r, **training)
        close(outcome.weights, u, 5e-6)
        close(outcome.memory["H"], H, 5e-6)
        close(outcome.memory["V"], V, 5e-6)
        assert outcome.report == {"r": r, "seconds": seconds or 0.0}
        memory, w = outcome.memory, regression_weights(1 + trip)


def test_asofed_weight_decay_is_part_of_the_gradient() -> None:
    """Only then do both variants take the same step on one full batch, for every r_k."""
    device, w = Device(epochs=1, batch=SAMPLES, weight_decay=0.1), regression_weights(1)
    step, trip = (device.train(rule, w, seconds=40.0).weights for rule in (StepRule(0.3, 0.5), TripRule(0.5, 0.3)))
    close(step, trip, 1e-6)
    g = twins.gradient(w, device.x, device.y) + 0.1 * w
    close(step, w - 0.2 * math.log(40.0) * g, 1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.001, 0.7])
def test_asofed_first_step_is_plain_and_both_variants_agree_on_one_full_batch(beta: float) -> None:
    device, w = Device(epochs=1, batch=SAMPLES), regression_weights(1)
    plain = device.train(LocalRule(), w)
    same(device.train(StepRule(beta, 0.5), w).weights, plain.weights)
    same(device.train(TripRule(0.5, beta), w).weights, plain.weights)


def test_asofed_with_a_constant_gradient() -> None:
    """z / g = 1, 0, 1 - beta, 1 - beta^2, ...: z uses the old H."""
    beta, g = 0.25, torch.tensor([2.0, -1.0])

    class Still:
        gradient, scratch, memory, report, learnable, seconds = g.clone(), {}, {}, {}, 2, None
        tensor = staticmethod(torch.from_numpy)

    local: Any = Still()
    rule = StepRule(beta, 0.0)
    rule.begin(local)
    ratios = []
    for _ in range(5):
        local.gradient.copy_(g)
        rule.adjust(local)
        ratios.append((local.gradient / g).tolist())
    close(ratios, [[z, z] for z in (1.0, 0.0, 1 - beta, 1 - beta**2, 1 - beta**3)], 1e-6)


def test_asofed_feature_step() -> None:
    rng = np.random.default_rng(2)
    A = rng.standard_normal((4, 6))
    close(scale_features(A), aso_feature_step(A), 1e-12)
    same(scale_features(np.zeros((4, 6))), np.zeros((4, 6)))
    ones = scale_features(np.ones((3, 5)))
    close(ones.sum(axis=1), 1.0, 1e-12)
    fresh = rng.uniform(-0.2, 0.2, (6, 25))  # a fresh 5x5 convolution
    assert np.linalg.norm(scale_features(fresh)) / np.linalg.norm(fresh) == pytest.approx(4.2e-2, rel=0.1)


# ---- MOON


def contrast(norm: str = "batch") -> tuple[Trainer, Vector, Vector]:
    """Return a trainer of the digits network on 30 samples, and two models for it."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 1, 8, 8)).astype(np.float32), rng.integers(0, 10, 30)
    data = FederatedData.of(from_arrays("t", (x, y), (x, y)), [np.arange(30)])

    def factory() -> nn.Module:
        return build("digits", input_shape=(1, 8, 8), classes=10, norm=norm)

    torch.manual_seed(0)
    trainer = Trainer(factory, data, TrainingOptions(epochs=2, batch_size=8, lr=0.1), seed=1)
    w = trainer.flat.dump()
    previous = w + 0.1 * rng.standard_normal(len(w)).astype(np.float32)
    layout = trainer.flat.layout
    variances = slice(layout.learnable, layout.floats)
    previous[variances] = np.abs(previous[variances])
    return trainer, w, previous


def moon_work(w: Vector, memory: dict[str, Any], rule: LocalRule | None = None) -> TripInput:
    return TripInput(Assignment(0, 1, 1, 1, w, 2, 0.1), (), (), rule or ContrastiveRule(1.0, 0.5), memory)


def trip_of(trainer: Trainer, work: TripInput) -> LocalTrip:
    """Return a trip that has begun but taken no step."""
    return LocalTrip(trainer, work.assignment, work.slots, work.rule, work.memory)


def test_moon_contrastive_loss_matches_the_twin() -> None:
    rng = np.random.default_rng(3)
    z, z_g, z_p = (rng.standard_normal((7, 4)) for _ in range(3))
    ours = contrastive_loss(*(torch.from_numpy(v) for v in (z, z_g, z_p)), 0.5).item()
    assert ours == pytest.approx(twins.moon_contrastive(z, z_g, [z_p], 0.5), rel=1e-9)
    one = contrastive_loss(*(torch.from_numpy(v[:1]) for v in (z, z_g, z_p)), 0.5).item()  # a batch of one sample
    assert one == pytest.approx(twins.moon_contrastive(z[:1], z_g[:1], [z_p[:1]], 0.5), rel=1e-9)


def test_moon_contrastive_loss_is_on_the_models_device() -> None:
    """A loss on another device refuses tensors in main memory."""
    z, z_g, z_p = (torch.empty(7, 4, device="meta") for _ in range(3))
    loss = contrastive_loss(z, z_g, z_p, 0.5)
    assert (loss.device.type, loss.shape) == ("meta", ())


@pytest.mark.parametrize("T", [0.1, 0.5, 1.0])
def test_moon_loss_is_bounded_and_flat_where_global_and_previous_agree(T: float) -> None:
    z = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    other = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    level = contrastive_loss(z, other, other, T)
    level.backward()
    assert level.item() == pytest.approx(math.log(2.0))
    close(z.grad, 0.0, 1e-12)
    right, wrong = (
        contrastive_loss(z, z.detach(), -z.detach(), T).item(),
        contrastive_loss(z, -z.detach(), z.detach(), T).item(),
    )
    assert right == pytest.approx(math.log1p(math.exp(-2.0 / T)))
    assert wrong == pytest.approx(math.log1p(math.exp(2.0 / T)))


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_moon_first_trip_equals_fedavg_and_later_ones_do_not(norm: str) -> None:
    trainer, w, previous = contrast(norm)
    plain = trainer.train(moon_work(w, {}, LocalRule()))
    first = trainer.train(moon_work(w, {}))
    same(first.weights, plain.weights)
    same(first.memory["previous"][: trainer.flat.layout.floats], first.weights[: trainer.flat.layout.floats])
    later = trainer.train(moon_work(w, {"previous": previous}))
    assert not np.array_equal(later.weights, plain.weights)


def test_moon_frozen_branches_are_in_evaluation_mode_and_unchanged() -> None:
    trainer, w, previous = contrast()
    work = moon_work(w, {"previous": previous})
    local = trip_of(trainer, work)
    trainer.flat.module.train()
    x, _ = local.next_batch()
    before, kept = trainer.flat.dump(), previous.copy()
    z = local.frozen_features(previous)(x)
    same(trainer.flat.dump(), before)
    same(previous, kept)
    assert not z.requires_grad
    assert all(module.training for module in trainer.flat.module.modules())
    trainer.flat.load(previous)
    trainer.flat.module.eval()
    with torch.no_grad():
        close(z, trainer.flat.module.features(x), 1e-6)
    trainer.train(work)
    same(previous, kept)
    same(work.assignment.weights, before)


def test_moon_gradient_flows_through_the_local_branch_only() -> None:
    trainer, w, previous = contrast("none")
    local = trip_of(trainer, moon_work(w, {"previous": previous}))
    rule, (x, y) = ContrastiveRule(3.0, 0.5), local.next_batch()
    rule.begin(local)
    trainer.flat.load(w + np.float32(0.01))
    local.gradient.zero_()
    rule.loss(local, x, y).backward()
    ours = local.gradient.clone()

    def features(weights: Vector) -> torch.Tensor:
        module = build("digits", input_shape=(1, 8, 8), classes=10, norm="none")
        entries = trainer.flat.layout.entries
        module.load_state_dict({e.name: torch.from_numpy(e.array(weights)) for e in entries})
        return module.features(x).detach()

    local.gradient.zero_()
    module = trainer.flat.module
    z = module.features(x)
    loss = nn.functional.cross_entropy(module.classify(z), y)
    (loss + 3.0 * contrastive_loss(z, features(w), features(previous), 0.5)).backward()
    close(ours, local.gradient, 1e-5)


def test_moon_names_a_model_without_features() -> None:
    with pytest.raises(ConfigError, match=r"model.name: MOON needs a module with features\(x\) and classify\(z\)"):
        ContrastiveRule(1.0, 0.5).check(Device().trainer.flat.module)
