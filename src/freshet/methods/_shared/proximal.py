"""The proximal term, which several methods add to the local gradient."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from freshet.core.method import Local, LocalRule

if TYPE_CHECKING:
    from torch import Tensor


def drift(local: Local) -> "Tensor":
    """Return ``u - w^b``, the distance of local training from its base. Valid until the next call."""
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
    """Return the proximal rule, or plain SGD (the same bits) if rho is 0."""
    return Proximal(rho) if rho else LocalRule()
