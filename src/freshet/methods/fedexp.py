"""FedExP: FedAvg with a server step that grows when the devices' updates disagree.

D. Jhunjhunwala, S. Wang, G. Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023.

With ``Delta_k = u_k - w^t``, ``p_k = n_k / sum_S n``, ``Deltabar = sum_S p_k Delta_k`` and norms over learnable
weights::

    eta_g = max(1, sum_S p_k |Delta_k|^2 / (2 (|Deltabar|^2 + |S| eps_t)))          w^{t+1} = w^t + eta_g Deltabar

w^{t+1} is sent; **the mean of w^t and w^{t+1} is tested** and given to the user, after the first round w^1 itself, as
in the authors' code. One upload alone has eta_g = 1.

Decisions [D]: |S| eps as in the authors' code (the paper has eps alone). ``eps_t = eps (eta_t / eta_0)^2``, where
eta_t is the local rate of the round: the code lets eps fall with the square of its rate's decay. eps = 0.001 is its
default. Buffers of the network take FedAvg's mean. A round without uploads changes nothing.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.events import Aggregated, Event
from freshet.core.method import MethodContext, Options, expect
from freshet.core.server import Server
from freshet.core.vectors import Vector, distance, mix
from freshet.errors import ConfigError
from freshet.methods._shared.rounds import Round, RoundMethod, RoundUpload, audit_sample_shares


class FedExPOptions(Options):
    """Hyper-parameters with the paper's symbols."""

    eps: float = Field(1e-3, gt=0, description="epsilon in the denominator of the server's step")


def extrapolation(square_sum: float, square_of_mean: float, uploads: int, eps: float) -> float:
    """``eta_g``."""
    return max(1.0, square_sum / (2.0 * (square_of_mean + uploads * eps)))


@dataclass
class FedExPState(Round):
    """The model that is tested."""

    tested: Vector | None = None


class FedExP(RoundMethod):
    """The server's part; devices do plain SGD."""

    about = About(
        "fedexp",
        "sync",
        "FedExP",
        "Jhunjhunwala et al., FedExP, ICLR 2023",
        space={"eps": Range(1e-3, 0.1, log=True)},
    )
    Options: ClassVar[type[Options]] = FedExPOptions
    options: FedExPOptions
    state: FedExPState

    def __init__(self, options: FedExPOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.state = FedExPState()

    @classmethod
    def beyond_sum(cls, options: FedExPOptions) -> str | None:
        return "the length of its step follows from the length of each update"

    def aggregate(
        self, server: Server, members: list[RoundUpload], shares: list[float]
    ) -> tuple[Vector, dict[str, Any]]:
        n, w = self.context.layout.learnable, server.weights
        new, _ = super().aggregate(server, members, shares)
        self.context.layout.max_counters(new, *(member.weights for member in members))
        mean = np.zeros(n)
        for share, member in zip(shares, members, strict=True):
            mean += share * (member.weights[:n].astype(np.float64) - w[:n])
        squares = [distance(member.weights[:n], w[:n]) ** 2 for member in members]
        square_sum = sum(share * square for share, square in zip(shares, squares, strict=True))
        square_of_mean, eps = float(mean @ mean), self.options.eps * self._decay(server, members) ** 2
        eta_g = extrapolation(square_sum, square_of_mean, len(members), eps)
        new[:n] = w[:n] + eta_g * mean
        self.state.tested = new.copy() if self.state.tested is None else self._between(w, new)
        numbers = {"alpha": eta_g, "eps_t": eps, "square_sum": square_sum, "square_of_mean": square_of_mean}
        return new, numbers

    def _decay(self, server: Server, members: list[RoundUpload]) -> float:
        """``eta_t / eta_0``."""
        first = server.schedule(0)
        if first == 0.0:
            problem = "fedexp needs a learning rate above 0 in the first round, since eps falls in proportion to it"
            raise ConfigError("training.schedule", problem)
        return members[0].lr / first

    def _between(self, w: Vector, new: Vector) -> Vector:
        """The mean of two models, with the newer one's buffers."""
        n, tested = self.context.layout.learnable, new.copy()
        mix(w[:n], new[:n], 0.5, out=tested[:n])
        return tested

    def evaluation_model(self, server: Server) -> Vector:
        return server.weights if self.state.tested is None else self.state.tested

    @classmethod
    def audit(cls, options: FedExPOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        audit_sample_shares(event)
        if isinstance(event, Aggregated) and event.contributions:
            n, uploads = event.numbers, len(event.contributions)
            eta_g = extrapolation(n["square_sum"], n["square_of_mean"], uploads, n["eps_t"])
            expect("alpha", n["alpha"], eta_g)
