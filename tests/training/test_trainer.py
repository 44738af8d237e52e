"""A trip is a pure function: SGD on a flat vector equals torch's, and the same input gives the same bits."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from freshet.core.messages import Assignment, Fresh, Slot
from freshet.core.method import LocalRule
from freshet.core.streams import stream
from freshet.data import from_arrays
from freshet.methods import method_options
from freshet.methods.fedasmu import FreshModelRule
from freshet.training.batches import FederatedData
from freshet.training.network import FlatModel, initial_weights
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Trainer, TripInput

SEED, SAMPLES = 5, 53


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Dropout(0.5), nn.Linear(7, 3))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))


def federated_data() -> FederatedData:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((60, 6)).astype(np.float32), rng.integers(0, 3, 60)
    dataset = from_arrays("toy", (x, y), (x[:20], y[:20]), classes=3)
    return FederatedData.of(dataset, [np.arange(SAMPLES), np.arange(SAMPLES, 60)])


def trainer(factory=mlp, **options: Any) -> Trainer:
    return Trainer(factory, federated_data(), TrainingOptions(**({"epochs": 3, "batch_size": 8} | options)), SEED)


def trip_input(
    factory=mlp, *, trip: int = 1, device: int = 0, lr: float = 0.1, slot: int | None = None, **more: Any
) -> TripInput:
    slots, weights = () if slot is None else (Slot(slot, "fixed"),), more.pop("weights", None)
    weights = initial_weights(factory, SEED) if weights is None else weights
    answers = (more.pop("fresh", None),) if slots else ()
    values = {"slots": slots, "fresh": answers, "rule": LocalRule(), "memory": {}}
    return TripInput(Assignment(device, trip, 1, 1, weights, 3, lr), **(values | more))


def fresh_rule(**options: Any) -> FreshModelRule:
    return FreshModelRule(method_options("fedasmu", {"slot": 2} | options))


def fresh_model(factory=mlp, version: int = 5) -> Fresh:
    return Fresh(version, version, initial_weights(factory, SEED + 1))


def same(one, two) -> bool:
    return one.weights.tobytes() == two.weights.tobytes() and one[1:5] == two[1:5]


# ---- the same numbers as torch


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("factory", [mlp, with_batch_norm])
def test_flat_sgd_is_torch_sgd_on_the_same_batches(factory, momentum, decay):
    outcome = trainer(factory, momentum=momentum, weight_decay=decay).train(trip_input(factory))

    flat = FlatModel(factory())
    flat.load(initial_weights(factory, SEED))
    module = copy.deepcopy(flat.module).train()
    for parameter in module.parameters():
        parameter.grad = None
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum, weight_decay=decay)
    data = federated_data()
    rng, shard, steps = stream(SEED, "batches", 0, 1), data.shards[0], 0
    for _ in range(3):
        for batch in np.array_split(shard[rng.permutation(len(shard))], range(8, len(shard), 8)):
            x, y = data.train.take(torch.from_numpy(batch))
            optimiser.zero_grad()
            cross_entropy(module(x), y).backward()
            optimiser.step()
            steps += 1
    reference = FlatModel(module).dump()
    np.testing.assert_allclose(outcome.weights, reference, rtol=2e-5, atol=2e-6)
    assert outcome.steps == steps == 3 * 7  # 53 samples in batches of 8: the last, smaller one is kept


def test_momentum_and_decay_are_not_ignored():
    plain = trainer().train(trip_input()).weights
    assert (trainer(momentum=0.9).train(trip_input()).weights != plain).any()
    assert (trainer(weight_decay=0.01).train(trip_input()).weights != plain).any()


def test_every_trip_starts_without_momentum():
    t = trainer(momentum=0.9)
    first = t.train(trip_input())
    t.train(trip_input(trip=2))
    assert same(t.train(trip_input()), first)


def test_evaluate_matches_a_plain_loop():
    t = trainer(with_batch_norm)
    weights = t.train(trip_input(with_batch_norm)).weights
    score = t.evaluate(weights)
    flat = FlatModel(with_batch_norm())
    flat.load(weights)
    module = flat.module.eval()
    data = federated_data()
    right, losses = 0, []
    with torch.no_grad():
        for i in range(20):
            logits = module(data.test.x[i : i + 1])
            right += int(logits.argmax()) == int(data.test.y[i])
            losses.append(float(cross_entropy(logits, data.test.y[i : i + 1])))
    assert score.metrics["accuracy"] == right / 20
    assert score.loss == pytest.approx(np.mean(losses), rel=1e-5)


# ---- purity


@pytest.mark.parametrize("factory", [mlp, with_batch_norm, with_dropout])
def test_the_same_input_gives_the_same_bits_whatever_happens_in_between(factory):
    t = trainer(factory)
    mine = trip_input(factory, slot=2, fresh=fresh_model(factory), rule=fresh_rule())
    first = t.train(mine)
    t.train(trip_input(factory, device=1, trip=9))
    t.evaluate(initial_weights(factory, 99))
    torch.rand(100)
    second = t.train(mine)
    assert same(first, second)
    assert same(first, trainer(factory).train(mine))
    assert first.memory == second.memory


@pytest.mark.parametrize("other", [{"trip": 2}, {"device": 1}])
def test_another_trip_or_device_sees_other_batches(other):
    t = trainer()
    assert not same(t.train(trip_input()), t.train(trip_input(**other)))


def test_dropout_depends_on_the_trip_and_not_on_the_global_random_state():
    torch.manual_seed(1)
    one = trainer(with_dropout).train(trip_input(with_dropout))
    torch.manual_seed(2)
    two = trainer(with_dropout).train(trip_input(with_dropout))
    assert same(one, two)
    assert not same(one, trainer(with_dropout).train(trip_input(with_dropout, trip=2)))


def test_the_users_random_state_stays_unchanged():
    t = trainer(with_dropout)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    t.train(trip_input(with_dropout))
    t.evaluate(initial_weights(with_dropout, SEED))
    assert torch.equal(torch.get_rng_state(), torch_state)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)


def test_inputs_stay_unchanged():
    base, fresh = initial_weights(mlp, SEED), fresh_model()
    memory = {"gamma": 0.7, "upsilon": 0.4, "slot": 2, "table": np.zeros((3, 3)), "b": 0.0}
    kept = base.tobytes(), fresh.weights.tobytes()
    rule = fresh_rule(slot="rl")
    outcome = trainer().train(trip_input(slot=2, fresh=fresh, rule=rule, weights=base, memory=memory))
    assert (base.tobytes(), fresh.weights.tobytes()) == kept
    assert memory["gamma"] == 0.7 and (memory["table"] == 0).all()
    assert outcome.memory["gamma"] != 0.7 and (outcome.memory["table"] != 0).any()


# ---- buffers and counters


def span(factory, name: str) -> slice:
    return next(e.span for e in FlatModel(factory()).layout.entries if e.name == name)


def test_batch_norm_statistics_and_counters_travel_with_the_weights():
    t = trainer(with_batch_norm)
    once = t.train(trip_input(with_batch_norm))
    counter = span(with_batch_norm, "1.num_batches_tracked")
    assert once.weights[counter] == [21.0]
    assert (once.weights[span(with_batch_norm, "1.running_mean")] != 0).all()
    twice = t.train(trip_input(with_batch_norm, weights=once.weights))
    assert twice.weights[counter] == [42.0]


def test_a_merge_keeps_the_larger_counter():
    fresh = fresh_model(with_batch_norm)
    counter = span(with_batch_norm, "1.num_batches_tracked")
    fresh.weights[counter] = 1000
    outcome = trainer(with_batch_norm).train(trip_input(with_batch_norm, slot=2, fresh=fresh, rule=fresh_rule()))
    assert outcome.weights[counter] == [1000 + 14]  # one epoch of 7 steps before the merge, two after it


def test_evaluating_losses_in_a_merge_does_not_change_batch_norm_statistics():
    fresh = fresh_model(with_batch_norm)
    nothing = {"gamma": 0.0, "upsilon": 0.0}
    mean = span(with_batch_norm, "1.running_mean")
    rule = fresh_rule(eta_gamma=0.0, eta_upsilon=0.0)
    merged = trainer(with_batch_norm).train(trip_input(with_batch_norm, slot=2, fresh=fresh, rule=rule, memory=nothing))
    plain = trainer(with_batch_norm).train(trip_input(with_batch_norm))
    assert [(merge.version, merge.numbers["beta"]) for merge in merged.merges] == [(5, 0.0)]
    np.testing.assert_array_equal(merged.weights[mean], plain.weights[mean])
    np.testing.assert_array_equal(merged.weights, plain.weights)


# ---- the merge


def test_the_merge_happens_at_the_start_of_the_slots_epoch():
    """With beta -> 1 the fresh model replaces everything before it, so only the epochs from the slot on count."""
    fresh = fresh_model()
    rule = fresh_rule(mu_beta=1e12, eta_gamma=0.0, eta_upsilon=0.0)
    late = trainer().train(trip_input(slot=3, fresh=fresh, rule=rule))
    one_epoch = np.linalg.norm(late.weights - fresh.weights)
    early = trainer().train(trip_input(slot=1, fresh=fresh, rule=rule))
    from_fresh = trainer().train(trip_input(weights=fresh.weights))
    np.testing.assert_allclose(early.weights, from_fresh.weights, atol=1e-5)
    assert 0 < one_epoch < np.linalg.norm(early.weights - fresh.weights)


def test_without_a_fresh_model_a_slot_changes_nothing():
    asked = trainer().train(trip_input(slot=2, rule=fresh_rule()))
    assert asked.weights.tobytes() == trainer().train(trip_input()).weights.tobytes()
    assert asked.merges == ()


def test_the_reward_is_the_drop_of_the_loss_on_the_same_mini_batch():
    (merge,) = trainer().train(trip_input(slot=2, fresh=fresh_model(), rule=fresh_rule())).merges
    merged = merge.numbers
    assert (merge.version, merge.diverged) == (5, False)
    assert merged["reward"] == merged["loss_before"] - merged["loss_after"]


# ---- divergence


def test_a_diverged_trip_is_marked_and_leaves_the_memory_unchanged():
    memory = {"gamma": 0.7, "upsilon": 0.4}
    outcome = trainer().train(trip_input(lr=1e38, slot=2, fresh=fresh_model(), rule=fresh_rule(), memory=memory))
    assert outcome.diverged
    assert not np.isfinite(outcome.weights).all()
    assert outcome.memory == memory


def test_a_trainer_recovers_from_a_diverged_trip():
    t = trainer(with_batch_norm, momentum=0.9)
    first = t.train(trip_input(with_batch_norm))
    assert t.train(trip_input(with_batch_norm, lr=1e38)).diverged
    assert same(t.train(trip_input(with_batch_norm)), first)


# ---- the first model


def test_the_first_model_depends_only_on_the_seed():
    torch.manual_seed(123)
    state = torch.get_rng_state()
    one = initial_weights(mlp, 1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(9)
    assert one.tobytes() == initial_weights(mlp, 1).tobytes()
    assert one.tobytes() != initial_weights(mlp, 2).tobytes()


def test_a_missing_device_gives_one_sentence():
    from freshet.errors import ConfigError
    from freshet.training.trainer import pick_device

    assert pick_device("cpu") == "cpu"
    assert pick_device("auto") in ("cpu", "cuda", "mps")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"training\.device: this machine has no cuda device; use auto or cpu"):
            pick_device("cuda")


def test_augmentation_is_off_by_default_changes_training_and_is_keyed_by_the_trip():
    from freshet.data.dataset import DataSet
    from freshet.models.registry import build

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (24, 3, 16, 16), dtype=np.uint8), rng.integers(0, 3, 24)
    data = DataSet("t", x, y, x, y, 3, mean=(0.5,) * 3, std=(0.5,) * 3)

    def trained(augment, trip=1):
        options = TrainingOptions(epochs=2, batch_size=8, lr=0.1, augment=augment)
        trainer = Trainer(
            lambda: build("lenet5", input_shape=(3, 16, 16), classes=3),
            FederatedData.of(data, [np.arange(24)]),
            options,
            0,
        )
        w = np.full(trainer.flat.layout.size, 0.01, np.float32)
        return trainer.train(TripInput(Assignment(0, trip, 1, 1, w, 2, 0.1), (), (), LocalRule(), {})).weights

    assert TrainingOptions().augment is False
    np.testing.assert_array_equal(trained(True), trained(True))
    assert not np.array_equal(trained(True), trained(False))


class Impatient(LocalRule):
    """Reads the duration of its trips."""

    def begin(self, local: Any) -> None:
        local.report["seconds"] = local.seconds


class Timed(Impatient):
    timed = True


def test_durations_are_only_for_timed_rules():
    assert trainer().train(trip_input(rule=Timed(), seconds=12.5)).report["seconds"] == 12.5
    with pytest.raises(AttributeError, match="timed = True"):
        trainer().train(trip_input(rule=Impatient(), seconds=12.5))
