"""How long a run's training takes on one core, before it is run: an estimate that is the same on every machine."""

import math

import torch

from freshet.compute.base import Setup
from freshet.training.flat import build_quietly

#: Roughly, on one core: seconds of an SGD step whatever the model, and operations of a model per second.
STEP_SECONDS, OPERATIONS_PER_SECOND = 5e-4, 3e10


def training_seconds(setup: Setup, trips: float) -> float:
    """Seconds of ``trips`` local trainings with an average shard.

    ``trips (steps STEP_SECONDS + 3 f epochs n / OPERATIONS_PER_SECOND)``: n samples, f operations of a forward pass of
    one of them, of which the backward pass takes twice as many.
    """
    epochs, batch = setup.training.epochs, setup.training.batch_size
    samples = sum(len(shard) for shard in setup.data.shards) / len(setup.data.shards)
    steps = epochs * math.ceil(samples / batch)
    return trips * (steps * STEP_SECONDS + 3 * operations(setup) * epochs * samples / OPERATIONS_PER_SECOND)


def operations(setup: Setup) -> int:
    """Additions and multiplications of one sample's forward pass, at least two per parameter."""
    from torch.utils.flop_counter import FlopCounterMode

    module = build_quietly(setup.factory).float().eval()
    least = 2 * sum(parameter.numel() for parameter in module.parameters())
    x, _ = next(setup.data.test.chunks(1))
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            module(x)
    except Exception:  # an operation that cannot be counted: an estimate must not stop a run
        return least
    return max(least, int(counter.get_total_flops()))
