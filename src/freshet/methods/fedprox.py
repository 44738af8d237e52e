"""FedProx: FedAvg with a proximal term that holds devices close to the global model.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated Optimization in Heterogeneous
Networks", MLSys 2020.

Device: minimise ``f_k(u) + mu / 2 |u - w^t|^2``, per mini-batch ``u <- u - eta (grad f_k(u; B) + mu (u - w^t))``,
with the term on the raw gradient, before weight decay and momentum. Server: FedAvg.

Partial work (``drop``, from the original evaluation): that share of each round's devices is slow. A slow device trains
only ``E' ~ U{1, ..., E - 1}`` epochs and is aggregated with its full n_k. Decisions [D]: E' = 1 when E = 1; mu = 0.01
(the authors tune it in 0.001 ... 1 and offer no universal value).
"""

from typing import ClassVar

from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.method import LocalRule, Options
from freshet.core.server import Server
from freshet.core.streams import stream
from freshet.methods._shared.proximal import proximal
from freshet.methods.fedavg import FedAvg


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
