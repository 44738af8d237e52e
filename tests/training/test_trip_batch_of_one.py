"""BatchNorm and a batch of one sample give one sentence with remedies that work, on every executor."""

from pathlib import Path

import numpy as np
import pytest
from torch import nn

from freshet import Federation
from freshet.core.method import LocalRule
from freshet.errors import ConfigError
from freshet.training.device_eval import DeviceEvaluation
from freshet.training.network import initial_weights
from freshet.training.trip import explain_batch_of_one
from tests.training.test_trainer import SAMPLES, SEED, trainer, trip_input, with_batch_norm

TORCH = ValueError("Expected more than 1 value per channel when training, got input size torch.Size([1, 7])")
SENTENCE = r"training\.batch_size: 13 leaves device 0 \(53 samples\) a batch of one, but BatchNorm needs two or more"


@pytest.mark.parametrize("options", [{}, {"steps": 5}])
@pytest.mark.parametrize("slot", [None, 3])
def test_a_trip_that_ends_in_a_batch_of_one_names_the_setting(slot, options):
    assert SAMPLES % 13 == 1
    with pytest.raises(ConfigError, match=SENTENCE) as caught:
        trainer(with_batch_norm, batch_size=13, **options).train(trip_input(with_batch_norm, slot=slot))
    assert caught.value.key == "training.batch_size"
    assert "\n" not in str(caught.value)
    assert 'such as 14, or take a norm without batch statistics (model.norm = "group"' in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_the_suggested_batch_size_trains():
    assert trainer(with_batch_norm, batch_size=14).train(trip_input(with_batch_norm)).steps == 3 * 4


def test_a_personalised_evaluation_raises_the_same():
    evaluation = DeviceEvaluation(initial_weights(with_batch_norm, SEED), 1, np.arange(2), 5, 0.1)
    with pytest.raises(ConfigError, match=SENTENCE):
        trainer(with_batch_norm, batch_size=13).evaluate_devices(evaluation)


def test_held_out_samples_do_not_count():
    class HoldsOut(LocalRule):
        holds_out = True

    kept = SAMPLES - SAMPLES // 10
    with pytest.raises(ConfigError, match=rf"47 leaves device 0 \({kept} samples\) .* such as 48, or"):
        trainer(with_batch_norm, batch_size=kept - 1).train(trip_input(with_batch_norm, rule=HoldsOut()))


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_device_with_a_single_sample_needs_more_samples(batch_size):
    found = explain_batch_of_one(TORCH, 3, 1, batch_size, [1, 5])
    assert found is not None and found.key == "data.min_samples"
    assert "device 3 trains on a single sample" in found.problem
    assert "give every device at least two" in found.problem


@pytest.mark.parametrize(
    ("batch_size", "shards", "suggested"),
    [(1, [9], 3), (8, [9, 10], 10), (10, [61, 40, 0, 1], 11), (10, [61, 56, 45, 37], 13), (2, [3], 3), (3, [4, 5], 5)],
)
def test_the_suggested_batch_size_is_the_next_that_leaves_no_batch_of_one(batch_size, shards, suggested):
    found = explain_batch_of_one(TORCH, 0, shards[0], batch_size, shards)
    assert found is not None and f"such as {suggested}, " in found.problem
    assert all(samples % suggested != 1 for samples in shards if samples > 1)


def test_other_errors_are_not_changed():
    assert explain_batch_of_one(ValueError("something else"), 0, 9, 8, [9]) is None
    assert explain_batch_of_one(TORCH, 0, 10, 8, [10]) is None  # the model itself split the batch

    class Picky(nn.Linear):
        def forward(self, x):
            raise ValueError("I do not like this")

    def picky() -> nn.Module:
        return Picky(6, 3)

    with pytest.raises(ValueError, match=r"^I do not like this$") as caught:
        trainer(picky).train(trip_input(picky))
    assert not caught.value.__suppress_context__


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_a_run_raises_the_sentence_from_worker_processes_too(executor, tmp_path: Path):
    rng = np.random.default_rng(0)
    data = rng.standard_normal((44, 6)).astype(np.float32), np.arange(44) % 3
    run = {"executor": executor, "workers": 1}
    made = Federation(
        with_batch_norm, data, data, devices=4, data={"partition": "iid"}, training={"batch_size": 10}, run=run
    )
    with pytest.raises(ConfigError, match=r"training\.batch_size: 10 leaves device \d \(11 samples\)") as caught:
        made.run(60, out=tmp_path / "run")
    assert "\n" not in str(caught.value)
