"""FedProx: FedAvg with a proximal term that holds devices close to the global model.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated Optimization in Heterogeneous
Networks", MLSys 2020.

Device: minimise ``f_k(u) + mu / 2 |u - w^t|^2``, per mini-batch ``u <- u - eta (grad f_k(u; B) + mu (u - w^t))``,
with the term on the raw gradient, before weight decay and momentum. Server: FedAvg.

Partial work (``drop``, from the original evaluation): that share of each round's devices is slow. A slow device trains
only ``E' ~ U{1, ..., E - 1}`` epochs and is aggregated with its full n_k. Decisions [D]: E' = 1 when E = 1; mu = 0.01
(the authors tune it in 0.001 ... 1 and offer no universal value). Other methods add the
same term through ``proximal``.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.method import Local, LocalRule, Options
from freshet.core.server import Server
from freshet.core.streams import stream
from freshet.methods.fedavg import FedAvg

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


class FedProxOptions(Options):
    """Hyper-parameters with the paper's symbols."""

    mu: float = Field(0.01, ge=0, description="proximal term of the local loss (0: FedAvg)")
    drop: float = Field(0.0, ge=0, le=1, description="share of each round's devices that train only part of the epochs")


class FedProx(FedAvg):
    """FedAvg's server; the device's rule differs."""

    about = About(
        "fedprox",
        "sync",
        "FedProx",
        "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020",
        space={"mu": Range(1e-4, 1.0, log=True)},
    )
    Options: ClassVar[type[Options]] = FedProxOptions
    options: FedProxOptions

    @classmethod
    def rule(cls, options: FedProxOptions) -> LocalRule:
        return proximal(options.mu)

    def epochs(self, server: Server, device: int) -> int:
        """Return all epochs, or fewer for the slow places of the round (drawn per round, filled in order)."""
        seed, places, place, E = (
            self.context.seed,
            self.context.per_round,
            len(server.active_trips),
            super().epochs(server, device),
        )
        slow = round(self.options.drop * places)
        if slow == 0 or E == 1 or place not in stream(seed, "slow", server.round).permutation(places)[:slow]:
            return E
        return int(stream(seed, "partial", server.round, device).integers(1, E))
