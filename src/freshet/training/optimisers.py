"""Optimisers and learning-rate schedules.

An optimiser is a pair of functions on the flat vector: ``init`` makes the state of one trip, ``update`` takes a step.

Each trip starts with a new state, as in the papers. ``reach(n)`` is the distance of n steps along a constant unit
gradient, in units of the learning rate. Methods that read a gradient from a displacement divide by it.

A schedule is a function of the completed rounds r (for an asynchronous method, of as many uploads). With
``training.schedule_by = "time"`` r is the time since the start divided by ``training.schedule_seconds``, a fraction.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from freshet.core.server import Schedule
from freshet.errors import ConfigError
from freshet.training.options import TrainingOptions

if TYPE_CHECKING:
    from torch import Tensor

    from freshet.training.options import TrainingOptions


#: Vectors by name. ``t`` counts steps; it is a tensor, so that everything is saved the same way.
OptimiserState = dict[str, "Tensor"]
BETAS, EPS = (0.9, 0.999), 1e-8


class Optimiser(NamedTuple):
    """``update(w, g, state, lr)`` changes w in place, and may overwrite g."""

    init: "Callable[[Tensor], OptimiserState]"
    update: "Callable[[Tensor, Tensor, OptimiserState, float], None]"
    reach: Callable[[int], float]
    #: True if a step is just ``w - lr g``.
    plain: bool = False
    #: True if weight decay is added to the gradient. False if ``update`` shrinks the weights itself.
    couples_decay: bool = True


def make_optimiser(options: "TrainingOptions") -> Optimiser:
    """The optimiser that the options name."""
    if options.optimiser == "sgd":
        return sgd(options.momentum, options.nesterov)
    return adam(options.weight_decay if options.optimiser == "adamw" else None)


def sgd(momentum: float = 0.0, nesterov: bool = False) -> Optimiser:
    """``v <- mu v + g``, starting with v = g. ``w <- w - lr v``, or with Nesterov ``w - lr (g + mu v)``."""

    def init(w: "Tensor") -> OptimiserState:
        return {}

    def plain(w: "Tensor", g: "Tensor", state: OptimiserState, lr: float) -> None:
        w.add_(g, alpha=-lr)

    def heavy(w: "Tensor", g: "Tensor", state: OptimiserState, lr: float) -> None:
        if "v" in state:
            state["v"].mul_(momentum).add_(g)
        else:
            state["v"] = g.clone()
        w.add_(g.add_(state["v"], alpha=momentum) if nesterov else state["v"], alpha=-lr)

    def reach(n: int) -> float:
        if not momentum:
            return float(n)
        total = sum((1.0 - momentum**i) / (1.0 - momentum) for i in range(1, n + 1))  # of v
        return n + momentum * total if nesterov else total

    return Optimiser(init, heavy if momentum else plain, reach, plain=not momentum)


def adam(decoupled_decay: float | None = None) -> Optimiser:
    """Adam, or AdamW with a decoupled decay: ``w <- (1 - lr decay) w`` before each step.

    ``m <- b1 m + (1 - b1) g``, ``v <- b2 v + (1 - b2) g^2``, ``w <- w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) +
    eps)``. A constant gradient g gives steps of ``lr g / (|g| + eps)``, so a unit gradient has reach n.
    """
    b1, b2 = BETAS

    def init(w: "Tensor") -> OptimiserState:
        import torch

        return {"m": torch.zeros_like(w), "v": torch.zeros_like(w), "t": torch.zeros((), dtype=torch.int64)}

    def update(w: "Tensor", g: "Tensor", state: OptimiserState, lr: float) -> None:
        m, v = state["m"], state["v"]
        t = int(state["t"].add_(1))
        if decoupled_decay:
            w.mul_(1.0 - lr * decoupled_decay)
        m.lerp_(g, 1.0 - b1)
        v.mul_(b2).addcmul_(g, g, value=1.0 - b2)
        scale = (v.sqrt() / math.sqrt(1.0 - b2**t)).add_(EPS)
        w.addcdiv_(m, scale, value=-lr / (1.0 - b1**t))

    return Optimiser(init, update, float, couples_decay=decoupled_decay is None)


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


#: ``schedule(lr, rounds)``; the rounds are whole numbers unless time is counted.
CustomSchedule = Callable[[float, Any], float]


def make_schedule(o: TrainingOptions, own: CustomSchedule | None, length: int) -> Schedule:
    """The user's own schedule, or the one that the options name. ``length`` is the length of a cosine in rounds."""
    if o.round_seconds == 0:
        problem = '"time" needs the seconds of a round; give training.schedule_seconds'
        raise ConfigError("training.schedule_by", problem)
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
