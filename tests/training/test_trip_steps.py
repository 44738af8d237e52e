"""How much a device trains: steps instead of epochs, its own number of epochs, gradients of bounded length."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from freshet import ConfigError
from freshet.core.messages import Assignment
from freshet.core.method import LocalRule
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.training.network import FlatModel, initial_weights
from freshet.training.trainer import TripInput
from tests.training.test_trainer import SEED, mlp, trainer, work


def whole(t, epochs: int = 3, trip: int = 1):
    assignment = Assignment(0, trip, 1, 1, initial_weights(mlp, SEED), epochs, 0.1)
    return t.train(TripInput(assignment, None, None, LocalRule(), {}))


@pytest.mark.parametrize("steps", [3, 7, 10, 25])
def test_a_trip_takes_just_the_steps_it_was_given(steps):
    outcome = whole(trainer(steps=steps))
    assert outcome.steps == steps


def test_the_steps_of_whole_passes_are_those_of_epochs():
    """53 samples in batches of 8 are 7 steps a pass."""
    assert whole(trainer(steps=21)).weights.tobytes() == whole(trainer()).weights.tobytes()
    assert whole(trainer(steps=20)).weights.tobytes() != whole(trainer()).weights.tobytes()


def test_a_slot_divides_the_steps_into_equal_parts():
    from freshet.training.trip import LocalTrip
    from tests.training.test_trip import Slot

    t = trainer(steps=10)
    assignment = Assignment(0, 1, 1, 1, initial_weights(mlp, SEED), 3, 0.1)
    seen = []
    for slot in (1, 2, 3):
        trip = LocalTrip(t, assignment, Slot(slot, "fixed"), LocalRule(), {})
        trip.to_slot()
        seen.append(trip.steps)
        trip.merge(None)
        assert trip.finish().steps == 10
    assert seen == [0, 3, 6]


@pytest.mark.parametrize("epochs", [1, 2, 3, 5])
def test_a_method_that_changes_the_epochs_changes_the_steps_with_them(epochs):
    """Time follows the epochs, and so does the work: ``training.steps`` are those of ``training.epochs``."""
    assert whole(trainer(steps=12), epochs).steps == 4 * epochs
    assert whole(trainer(steps=10), epochs).steps == 10 * epochs // 3


@pytest.mark.parametrize("heard", [0, 1, 2])
def test_a_device_that_hurries_makes_the_steps_of_the_epochs_it_was_left(heard):
    """On a real device, which hears of it in mid-trip, as in a simulation, where the assignment says so."""
    from freshet.training.trip import LocalTrip

    t = trainer(steps=10)
    trip = LocalTrip(t, Assignment(0, 1, 1, 1, initial_weights(mlp, SEED), 3, 0.1), None, LocalRule(), {})
    train, seen = trip._train_epoch, []

    def epoch():
        train()
        if trip.epoch == heard:
            trip.hurry()
        seen.append(trip.steps)

    trip._train_epoch = epoch
    trip.to_slot()
    if not heard:
        trip.hurry()
    hurried, told = trip.finish(), whole(t, epochs=max(1, heard))
    assert seen == [3, 6, 10][: max(1, heard)]
    assert (hurried.steps, hurried.weights.tobytes()) == (told.steps, told.weights.tobytes())


def test_a_clipped_step_is_the_gradient_shortened_to_the_limit():
    t = trainer(steps=3, clip=0.01, lr=1.0)
    start, end = initial_weights(mlp, SEED), whole(t).weights
    assert np.linalg.norm(end - start) <= 3 * 0.1 * 0.01 * (1 + 1e-5)
    huge = trainer(clip=1e6)
    np.testing.assert_allclose(whole(huge).weights, whole(trainer()).weights, rtol=1e-5, atol=1e-6)


def test_clipping_is_torchs():
    t = trainer(steps=3, clip=0.3)
    flat = FlatModel(mlp())
    flat.load(initial_weights(mlp, SEED))
    from freshet.core.streams import stream

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
    np.testing.assert_allclose(whole(t).weights, flat.dump(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["fedasmu", "fedssmu", "fedprox", "fedavg"])
def test_every_device_has_its_own_number_of_epochs_where_asked(federate, tmp_path, method):
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
def test_what_makes_no_sense_is_one_sentence(federate, training, sentence):
    with pytest.raises(ConfigError, match=sentence):
        federate("fedavg", training=training)


def test_work_is_what_it_was():
    assert whole(trainer()).weights.tobytes() == trainer().train(work()).weights.tobytes()
