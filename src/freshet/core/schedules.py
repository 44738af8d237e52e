"""Learning rates over a run, as functions of the rounds that are over (of an asynchronous method: their worth)."""

import math
from collections.abc import Callable

#: ``schedule(rounds)`` is the learning rate of a trip that starts after so many rounds.
Schedule = Callable[[int], float]


def constant(lr: float) -> Schedule:
    """``eta``."""
    return lambda rounds: lr


def exponential(lr: float, decay: float) -> Schedule:
    """``eta decay^r``."""
    return lambda rounds: lr * decay**rounds


def step(lr: float, factor: float, every: int) -> Schedule:
    """``eta factor^floor(r / every)``."""
    return lambda rounds: lr * factor ** (rounds // every)


def cosine(lr: float, length: int) -> Schedule:
    """``eta / 2 (1 + cos(pi r / length))``, and 1 % of eta from there on: a rate of 0 would train nothing."""
    return lambda rounds: lr * max(0.01, 0.5 * (1.0 + math.cos(math.pi * min(1.0, rounds / length))))
