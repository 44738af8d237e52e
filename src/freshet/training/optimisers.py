"""Optimisers as pairs of functions on the flat vector: ``init`` makes the state of one trip, ``update`` takes a step.

Each trip starts with a new state, as the papers' devices do. ``reach(n)`` says how far n steps along a constant unit
gradient lead, in units of the learning rate: what a method needs that reads a gradient from a displacement.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from freshet.training.options import TrainingOptions

#: Vectors of a trip by name; ``t`` counts steps, as a tensor so that all of it is saved alike.
OptimiserState = dict[str, "Tensor"]
BETAS, EPS = (0.9, 0.999), 1e-8


class Optimiser(NamedTuple):
    """``update(w, g, state, lr)`` changes w (and, where it helps, g) in place."""

    init: "Callable[[Tensor], OptimiserState]"
    update: "Callable[[Tensor, Tensor, OptimiserState, float], None]"
    reach: Callable[[int], float]
    #: True when a step is ``w - lr g`` and nothing else.
    plain: bool = False
    #: True when weight decay joins the gradient; False when ``update`` shrinks the weights by itself.
    couples_decay: bool = True


def make_optimiser(options: "TrainingOptions") -> Optimiser:
    """The optimiser that the options name."""
    if options.optimiser == "sgd":
        return sgd(options.momentum, options.nesterov)
    return adam(options.weight_decay if options.optimiser == "adamw" else None)


def sgd(momentum: float = 0.0, nesterov: bool = False) -> Optimiser:
    """``v <- mu v + g`` with v = g at first; ``w <- w - lr v``, with Nesterov ``w - lr (g + mu v)``."""

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
    """Adam; with a decay of its own, AdamW: ``w <- (1 - lr decay) w`` before each step.

    ``m <- b1 m + (1 - b1) g``, ``v <- b2 v + (1 - b2) g^2``, ``w <- w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) +
    eps)``. A constant gradient g gives steps of ``lr g / (|g| + eps)``, so that a unit one reaches n.
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
