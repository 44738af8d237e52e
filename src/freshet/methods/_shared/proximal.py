"""Terms that several methods add to the local gradient, each through ``LocalRule.adjust``; no loop of their own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from freshet.core.method import Local, LocalRule

if TYPE_CHECKING:
    from torch import Tensor


def drift(local: Local) -> "Tensor":
    """``u - w^b``: how far local training has moved from its base; valid until the next call."""
    import torch

    if "drift" not in local.scratch:
        local.scratch["drift"] = torch.empty_like(local.base)
    out: Tensor = local.scratch["drift"]
    return torch.sub(local.weights[: local.learnable], local.base, out=out)


@dataclass(frozen=True)
class Proximal(LocalRule):
    """Minimises ``f_k(u) + rho / 2 |u - w^b|^2``: ``rho (u - w^b)`` joins the raw gradient."""

    rho: float

    def adjust(self, local: Local) -> None:
        local.gradient.add_(drift(local), alpha=self.rho)


def proximal(rho: float) -> LocalRule:
    """The proximal term, or plain SGD (the same bits) when rho is 0."""
    return Proximal(rho) if rho else LocalRule()
