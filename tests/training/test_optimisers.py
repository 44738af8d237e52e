"""Optimisers equal torch's, step by step, and ``reach`` is the distance along a unit gradient."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from freshet.training.optimisers import make_optimiser
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Trainer
from tests.training.test_trainer import same, trainer, trip_input

SETTINGS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.5, "weight_decay": 0.1},
    {"optimiser": "adam"},
    {"optimiser": "adam", "weight_decay": 0.1},
    {"optimiser": "adamw"},
    {"optimiser": "adamw", "weight_decay": 0.1},
]


def torchs(options: TrainingOptions, w: torch.Tensor) -> torch.optim.Optimizer:
    if options.optimiser == "sgd":
        more = {"momentum": options.momentum, "nesterov": options.nesterov}
        return torch.optim.SGD([w], options.lr, weight_decay=options.weight_decay, **more)
    kind = torch.optim.Adam if options.optimiser == "adam" else torch.optim.AdamW
    return kind([w], options.lr, weight_decay=options.weight_decay)


@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_steps_equal_torchs(given):
    options = TrainingOptions(lr=0.05, **given)
    rng = torch.Generator().manual_seed(1)
    w = torch.randn(50, generator=rng)
    reference = w.clone().requires_grad_()
    theirs, ours = torchs(options, reference), make_optimiser(options)
    state = ours.init(w)
    for _ in range(12):
        g = torch.randn(50, generator=rng)
        reference.grad = g.clone()
        theirs.step()
        if options.weight_decay and ours.couples_decay:
            g.add_(w, alpha=options.weight_decay)
        ours.update(w, g, state, options.lr)
        np.testing.assert_allclose(w.numpy(), reference.detach().numpy(), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("given", SETTINGS, ids=str)
def test_reach_is_the_distance_along_a_constant_unit_gradient(given):
    options = TrainingOptions(lr=0.05, **(given | {"weight_decay": 0.0}))
    ours, w = make_optimiser(options), torch.zeros(1, dtype=torch.float64)
    state = ours.init(w)
    for n in range(1, 30):
        ours.update(w, torch.ones(1, dtype=torch.float64), state, options.lr)
        assert -w.item() / options.lr == pytest.approx(ours.reach(n), rel=1e-6)


@pytest.mark.parametrize("given", SETTINGS[4:], ids=str)
def test_every_trip_starts_with_a_new_state(given: dict) -> None:
    t: Trainer = trainer(**given)
    first = t.train(trip_input(lr=0.01))
    t.train(trip_input(trip=2, lr=0.01))
    assert same(t.train(trip_input(lr=0.01)), first)
    assert (first.weights != trainer().train(trip_input(lr=0.01)).weights).any()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optimiser": "adam", "momentum": 0.9}, "are for optimiser"),
        ({"nesterov": True}, "nesterov needs a momentum"),
        ({"optimiser": "adagrad"}, "sgd"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given, words):
    with pytest.raises(ValidationError, match=words):
        TrainingOptions(**given)
