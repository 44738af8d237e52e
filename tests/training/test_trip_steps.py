"""``training.steps``, ``training.local_epochs`` and ``training.clip``."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from freshet import ConfigError
from freshet.core.messages import Assignment, Slot
from freshet.core.method import LocalRule
from freshet.core.streams import stream
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.training.network import FlatModel, initial_weights
from freshet.training.trainer import TripInput
from freshet.training.trip import LocalTrip
from tests.training.test_trainer import SEED, mlp, trainer, trip_input


def run_trip(t, epochs: int = 3, trip: int = 1):
    assignment = Assignment(0, trip, 1, 1, initial_weights(mlp, SEED), epochs, 0.1)
    return t.train(TripInput(assignment, (), (), LocalRule(), {}))


@pytest.mark.parametrize("steps", [3, 7, 10, 25])
def test_a_trip_takes_exactly_the_given_steps(steps):
    outcome = run_trip(trainer(steps=steps))
    assert outcome.steps == steps


def test_steps_of_whole_passes_equal_epochs():
    """53 samples in batches of 8 make 7 steps per pass."""
    assert run_trip(trainer(steps=21)).weights.tobytes() == run_trip(trainer()).weights.tobytes()
    assert run_trip(trainer(steps=20)).weights.tobytes() != run_trip(trainer()).weights.tobytes()


def test_a_slot_divides_the_steps_into_equal_parts():
    t = trainer(steps=10)
    assignment = Assignment(0, 1, 1, 1, initial_weights(mlp, SEED), 3, 0.1)
    seen = []
    for slot in (1, 2, 3):
        trip = LocalTrip(t, assignment, [Slot(slot, "fixed")], LocalRule(), {})
        trip.to_slot()
        seen.append(trip.steps)
        trip.merge(None)
        assert trip.finish().steps == 10
    assert seen == [0, 3, 6]


@pytest.mark.parametrize("epochs", [1, 2, 3, 5])
def test_steps_scale_with_the_epochs_that_a_method_assigns(epochs):
    """``training.steps`` belong to ``training.epochs``. Both time and steps scale with the epochs."""
    assert run_trip(trainer(steps=12), epochs).steps == 4 * epochs
    assert run_trip(trainer(steps=10), epochs).steps == 10 * epochs // 3


class Hurried(LocalRule):
    """Hurries its trip during one epoch, and notes the steps before each epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.steps = epoch, dict[int, int]()

    def loss(self, local: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.steps[local.epoch] = local.steps
        if local.epoch == self.epoch:
            local.hurry()
        return super().loss(local, x, y)


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_a_hurried_trip_takes_the_steps_of_its_remaining_epochs(epoch):
    """A real device learns of it during the trip, a simulated one by its assignment. Both give the same bits."""
    t, rule, epochs = trainer(steps=10), Hurried(epoch), max(1, epoch)
    trip = LocalTrip(t, Assignment(0, 1, 1, 1, initial_weights(mlp, SEED), 3, 0.1), (), rule, {})
    trip.to_slot()
    if epoch == 0:
        trip.hurry()
    hurried, assigned = trip.finish(), run_trip(t, epochs=epochs)
    assert [*rule.steps.values(), hurried.steps] == [0, 3, 6, 10][: epochs + 1]
    assert (hurried.steps, hurried.weights.tobytes()) == (assigned.steps, assigned.weights.tobytes())


def test_clipping_bounds_the_length_of_a_step():
    t = trainer(steps=3, clip=0.01, lr=1.0)
    start, end = initial_weights(mlp, SEED), run_trip(t).weights
    assert np.linalg.norm(end - start) <= 3 * 0.1 * 0.01 * (1 + 1e-5)
    huge = trainer(clip=1e6)
    np.testing.assert_allclose(run_trip(huge).weights, run_trip(trainer()).weights, rtol=1e-5, atol=1e-6)


def test_clipping_equals_torchs():
    t = trainer(steps=3, clip=0.3)
    flat = FlatModel(mlp())
    flat.load(initial_weights(mlp, SEED))
    order = t.data.shards[0][stream(SEED, "batches", 0, 1).permutation(53)]
    for k in range(3):
        x, y = t.data.train.take(torch.from_numpy(order[8 * k : 8 * k + 8]))
        loss = cross_entropy(flat.module(x), y)
        gradients = flat.gradients_of(loss)
        parameters = flat.parameters
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(parameters, 0.3)
        with torch.no_grad():
            for parameter in parameters:
                parameter.sub_(parameter.grad, alpha=0.1)
    np.testing.assert_allclose(run_trip(t).weights, flat.dump(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["fedasmu", "fedssmu", "fedprox", "fedavg"])
def test_local_epochs_gives_each_device_a_fixed_number_of_epochs(federate, tmp_path, method):
    federation = federate(method, training={"local_epochs": [2, 6]})
    federation.run(80, out=tmp_path / "run")
    by_device: dict[int, set[int]] = {}
    for event in RunDirectory(tmp_path / "run").events():
        if event["kind"] == "trigger":
            by_device.setdefault(event["device"], set()).add(event["epochs"])
    assert all(len(found) == 1 for found in by_device.values())
    every = {epochs for found in by_device.values() for epochs in found}
    assert every <= {2, 3, 4, 5, 6} and len(every) > 2
    assert audit(RunDirectory(tmp_path / "run")).problem is None


@pytest.mark.parametrize(
    ("training", "sentence"),
    [
        ({"steps": 2}, r"training: steps = 2 cannot be divided into 4 epochs"),
        ({"local_epochs": [3]}, r"local_epochs must be \[least, most\]"),
        ({"local_epochs": [5, 2]}, r"local_epochs must be \[least, most\]"),
        ({"local_epochs": [1, 2], "steps": 9}, "exclude each other"),
        ({"clip": -1.0}, r"training\.clip"),
    ],
)
def test_invalid_settings_give_one_sentence(federate, training, sentence):
    with pytest.raises(ConfigError, match=sentence):
        federate("fedavg", training=training)


def test_zero_steps_means_whole_epochs():
    assert run_trip(trainer()).weights.tobytes() == trainer().train(trip_input()).weights.tobytes()
