"""Learning-rate schedules: functions of the completed rounds r (for an asynchronous method, of as many uploads)."""

import math
from collections.abc import Callable

from freshet.core.server import Schedule
from freshet.errors import ConfigError
from freshet.training.options import TrainingOptions


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
    """``eta / 2 (1 + cos(pi r / length))``, but at least 1 % of eta, because a rate of 0 trains nothing."""
    return lambda rounds: lr * max(0.01, 0.5 * (1.0 + math.cos(math.pi * min(1.0, rounds / length))))


#: ``schedule(lr, rounds)``.
CustomSchedule = Callable[[float, int], float]


def make_schedule(o: TrainingOptions, own: CustomSchedule | None, length: int) -> Schedule:
    """The user's own schedule, or the one that the options name. ``length`` is the length of a cosine in rounds."""
    if own is not None:
        return lambda rounds: float(own(o.lr, rounds))
    if o.schedule == "custom":
        problem = "'custom' needs a function from Python; give one or choose another schedule"
        raise ConfigError("training.schedule", problem)
    return {
        "constant": constant(o.lr),
        "exponential": exponential(o.lr, o.lr_decay),
        "step": step(o.lr, o.lr_decay, o.schedule_every),
        "cosine": cosine(o.lr, length),
    }[o.schedule]
