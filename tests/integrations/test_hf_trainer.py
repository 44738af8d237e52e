"""The Trainer of transformers carries out a trip: its steps are counted, fresh models are merged, bits repeat."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from freshet.core.method import LocalRule
from freshet.integrations.hf_trainer import ColumnCollator, TransformersTrainer, input_names
from tests.integrations.helpers import METHODS, events, run_on_one_and_two
from tests.training.test_own_loop import with_loop
from tests.training.test_trainer import SAMPLES, fresh_model, fresh_rule, trip_input

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
STEPS = -(-SAMPLES // 16)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Dropout(0.2), nn.Linear(7, 3))

    def forward(self, values: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.layers(values)
        return logits if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}


def loop(**more: Any) -> TransformersTrainer:
    return TransformersTrainer(per_device_train_batch_size=16, optim="sgd", **more)


@pytest.mark.parametrize("method", METHODS)
def test_three_methods_on_one_process_and_on_two_workers(method, pool, tmp_path, capfd):
    result = run_on_one_and_two(Net, loop(), method, pool, tmp_path)
    assert any("train_loss" in row for row in events(result) if row["kind"] == "upload")
    assert any(row["kind"] == "merge" for row in events(result)) == (method == "fedasmu")
    assert "train_runtime" not in capfd.readouterr().out


def test_trips_differ_and_repeat():
    one, again, other = (with_loop(loop(), Net).train(trip_input(Net, trip=trip)) for trip in (1, 1, 2))
    assert one.weights.tobytes() == again.weights.tobytes() != other.weights.tobytes()
    assert one.steps == 3 * STEPS and one.report.keys() == {"train_loss"}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_epoch_ends_where_the_trainers_epoch_ends(accumulate):
    given = {"slot": 2, "rule": fresh_rule(), "fresh": fresh_model(Net)}
    found = with_loop(loop(gradient_accumulation_steps=accumulate), Net).train(trip_input(Net, **given))
    assert found.merges[0].numbers["n1"] == STEPS // accumulate and found.steps == 3 * STEPS // accumulate


def test_the_merge_reaches_the_trainers_model():
    given = {"slot": 3, "rule": fresh_rule(slot=3, beta=0.5), "fresh": fresh_model(Net)}
    plain, merged = (with_loop(loop(), Net).train(trip_input(Net, **more)) for more in ({}, given))
    assert plain.weights.tobytes() != merged.weights.tobytes()


def test_a_hurried_training_stops_at_the_end_of_its_epoch():
    class Hurry(transformers.Trainer):
        def training_step(self, *given: Any, **more: Any) -> Any:
            if self.state.global_step == STEPS + 1:
                trip.hurry()
            return super().training_step(*given, **more)

    one = with_loop(loop(trainer_class=Hurry), Net)
    trip = one.begin(trip_input(Net).assignment, (), LocalRule(), {})
    assert trip.advance(lambda: True) and trip.finish().steps == 2 * STEPS


def test_samples_become_arguments_of_forward():
    pairs = [(torch.ones(2), torch.tensor(1)), (torch.zeros(2), torch.tensor(0))]
    batch = ColumnCollator(input_names(Net()))(pairs)
    assert batch.keys() == {"values", "labels"} and batch["labels"].tolist() == [1, 0]
    assert ColumnCollator(("a", "b"))([{"ids": torch.tensor(1)}, {"ids": torch.tensor(2)}])["ids"].tolist() == [1, 2]
    named = Net()
    named.main_input_name = "pixel_values"
    assert input_names(named) == ("pixel_values", "labels")
