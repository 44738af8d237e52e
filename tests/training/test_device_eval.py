"""Evaluation on each device: by its own tests or by its mix of classes, and after local steps."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from freshet.core.streams import stream
from freshet.data import from_arrays
from freshet.data.shards import DeviceTests
from freshet.training.batches import FederatedData
from freshet.training.device_eval import DeviceEvaluation, device_share, evaluate_devices, summarise_scores
from freshet.training.network import FlatModel, initial_weights
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Trainer

from .test_trainer import mlp, trip_input, with_batch_norm, with_dropout

SEED, CLASSES = 5, 3


def data(own: DeviceTests | None = None, test_classes: int = CLASSES) -> FederatedData:
    """Four devices: the class proportions of the test set, one class, two classes, and a random mix."""
    rng = np.random.default_rng(2)
    y_test = np.repeat(np.arange(test_classes), 10 * np.arange(1, test_classes + 1))
    y = np.concatenate([[0, 1, 1, 2, 2, 2] * 2, [2] * 7, [0] * 9 + [1] * 3, rng.integers(0, CLASSES, 20)])
    sets = [(rng.standard_normal((len(labels), 6)).astype(np.float32), labels) for labels in (y, y_test)]
    dataset = from_arrays("toy", *sets, classes=CLASSES)
    return FederatedData.of(dataset, np.split(np.arange(len(y)), [12, 19, 31]), own)


def trainer(federated: FederatedData | None = None, factory=mlp, **options) -> Trainer:
    chosen = TrainingOptions(**({"epochs": 3, "batch_size": 8} | options))
    return Trainer(factory, federated or data(), chosen, SEED)


def by_hand(module: nn.Module, federated: FederatedData) -> tuple[torch.Tensor, torch.Tensor]:
    """Accuracy (0 or 1) and loss of each test sample, by plain torch."""
    x, y = federated.test.x, federated.test.y
    with torch.no_grad():
        output = module.eval()(x)
    return (output.argmax(1) == y).double(), cross_entropy(output, y, reduction="none").double()


def module_of(weights: np.ndarray, factory=mlp) -> nn.Module:
    flat = FlatModel(factory())
    flat.load(weights)
    return flat.module


WEIGHTS = initial_weights(mlp, 11)


def test_without_own_tests_classes_are_weighted_as_on_the_device() -> None:
    federated = data()
    right, losses = by_hand(module_of(WEIGHTS), federated)
    scores = evaluate_devices(trainer(federated), DeviceEvaluation(WEIGHTS, 4, range(4)))
    for device, shard in enumerate(federated.shards):
        labels = federated.train.y[torch.from_numpy(shard)]
        for found, values in ((scores.accuracy, right), (scores.loss, losses)):
            means = [values[federated.test.y == c].mean() for c in range(CLASSES)]
            expected = sum((labels == c).double().mean() * mean for c, mean in enumerate(means))
            assert found[device] == pytest.approx(float(expected), rel=1e-6)


def test_a_device_with_the_test_sets_mix_of_classes_scores_the_global_score() -> None:
    one = trainer()
    scores, whole = evaluate_devices(one, DeviceEvaluation(WEIGHTS, 4, [0])), one.evaluate(WEIGHTS)
    assert scores.accuracy[0] == pytest.approx(whole.metrics["accuracy"], rel=1e-12)
    assert scores.loss[0] == pytest.approx(whole.loss, rel=1e-6)


def test_only_classes_of_the_device_count() -> None:
    federated = data()
    share = device_share(federated, 1)
    assert set(federated.test.y[torch.from_numpy(share.samples)].tolist()) == {2}
    assert share.weight.sum() == pytest.approx(1.0)


def test_classes_missing_from_the_test_set_are_left_out_and_a_device_with_no_other_class_has_no_score() -> None:
    federated = data(test_classes=2)
    scores = evaluate_devices(trainer(federated), DeviceEvaluation(WEIGHTS, 4, range(4)))
    assert math.isnan(scores.accuracy[1]) and math.isnan(scores.loss[1])
    assert np.isfinite(scores.accuracy[[0, 2, 3]]).all()
    assert device_share(federated, 0).weight.sum() == pytest.approx(1.0)
    personal = evaluate_devices(trainer(federated), DeviceEvaluation(WEIGHTS, 4, range(4), steps=2, lr=0.1))
    assert np.isnan(personal.accuracy).tolist() == [False, True, False, False]


def test_a_device_with_its_own_tests_scores_their_mean() -> None:
    shards = [np.array([0, 5, 9]), np.array([11]), np.arange(30), np.array([3, 3, 4])]
    federated = data(DeviceTests(shards))
    right, losses = by_hand(module_of(WEIGHTS), federated)
    scores = evaluate_devices(trainer(federated), DeviceEvaluation(WEIGHTS, 4, range(4)))
    assert scores.accuracy == pytest.approx([float(right[shard].mean()) for shard in shards])
    assert scores.loss == pytest.approx([float(losses[shard].mean()) for shard in shards], rel=1e-6)


@pytest.mark.parametrize("steps", [1, 4, 9])  # device 2 has two batches of samples: also beyond an epoch
def test_a_personalised_score_follows_the_given_number_of_sgd_steps(steps: int) -> None:
    federated = data()
    module = copy.deepcopy(module_of(WEIGHTS)).train()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    rng, shard, batches = stream(SEED, "rehearsal", 2, 4), federated.shards[2], []
    while len(batches) < steps:
        order = shard[rng.permutation(len(shard))]
        batches += [order[:8], order[8:]]
    for index in batches[:steps]:
        optimiser.zero_grad()
        cross_entropy(module(federated.train.x[index]), federated.train.y[index]).backward()
        optimiser.step()
    right, losses = by_hand(module, federated)
    share = device_share(federated, 2)
    ours = trainer(federated, momentum=0.9, weight_decay=0.01).evaluate_devices(
        DeviceEvaluation(WEIGHTS, 4, [2], steps, 0.1)
    )
    assert ours.accuracy[0] == pytest.approx((share.weight * right[share.samples].numpy()).sum())
    assert ours.loss[0] == pytest.approx((share.weight * losses[share.samples].numpy()).sum(), rel=1e-5)


@pytest.mark.parametrize("factory", [mlp, with_dropout, with_batch_norm])
def test_an_evaluation_changes_nothing_else(factory) -> None:
    quiet, busy = trainer(factory=factory), trainer(factory=factory)
    weights = initial_weights(factory, SEED)
    before = torch.get_rng_state()
    evaluations = [DeviceEvaluation(weights, 4, range(4)), DeviceEvaluation(weights, 4, [3, 0], steps=3, lr=0.1)]
    first = [busy.evaluate_devices(each) for each in evaluations]
    assert torch.equal(torch.get_rng_state(), before)
    one, other = quiet.train(trip_input(factory, weights=weights)), busy.train(trip_input(factory, weights=weights))
    assert one.weights.tobytes() == other.weights.tobytes()
    assert quiet.evaluate(weights) == busy.evaluate(weights)
    for each, scores in zip(evaluations, first, strict=True):  # and nothing before affects it
        assert [a.tobytes() for a in busy.evaluate_devices(each)] == [a.tobytes() for a in scores]


def test_devices_score_the_same_bits_one_by_one_and_together() -> None:
    one = trainer(factory=with_dropout)
    weights = initial_weights(with_dropout, SEED)
    together = one.evaluate_devices(DeviceEvaluation(weights, 4, range(4), steps=3, lr=0.1))
    alone = [one.evaluate_devices(DeviceEvaluation(weights, 4, [device], steps=3, lr=0.1)) for device in range(4)]
    assert together.accuracy.tobytes() == np.concatenate([scores.accuracy for scores in alone]).tobytes()
    assert together.loss.tobytes() == np.concatenate([scores.loss for scores in alone]).tobytes()


def test_the_summary_over_devices() -> None:
    found = summarise_scores(np.array([0.2, 0.4, 0.6, 0.8, math.nan]))
    assert found == pytest.approx({"median": 0.5, "p10": 0.26, "worst": 0.2, "best": 0.8, "jain": 4.0 / (4 * 1.2)})
    assert summarise_scores(np.array([0.0, 0.0, 1.0, 0.0]))["jain"] == pytest.approx(0.25)
    assert summarise_scores(np.full(7, 0.3))["jain"] == pytest.approx(1.0)
    assert summarise_scores(np.zeros(3))["jain"] == 1.0
    assert set(summarise_scores(np.array([math.nan])).values()) == {None}
