"""The learning rate over a run, as its settings say."""

from collections.abc import Callable

from freshet.core import schedules
from freshet.core.schedules import Schedule
from freshet.errors import ConfigError
from freshet.training.options import TrainingOptions

#: ``schedule(lr, rounds)``.
OwnSchedule = Callable[[float, int], float]


def rates(o: TrainingOptions, own: OwnSchedule | None, length: int) -> Schedule:
    """The learning rate over rounds: a function from Python, or the one that is named; a cosine is so many long."""
    if own is not None:
        return lambda rounds: float(own(o.lr, rounds))
    if o.schedule == "custom":
        problem = "'custom' stands for a function given from Python; choose another or give one"
        raise ConfigError("training.schedule", problem)
    return {
        "constant": schedules.constant(o.lr),
        "exponential": schedules.exponential(o.lr, o.lr_decay),
        "step": schedules.step(o.lr, o.lr_decay, o.schedule_every),
        "cosine": schedules.cosine(o.lr, length),
    }[o.schedule]
