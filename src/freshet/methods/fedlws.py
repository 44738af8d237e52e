"""FedLWS: FedAvg, then each layer of the mean is shrunk by how much the devices disagree about it.

C. Shi, J. Li, H. Zhao, D. Guo, Y. Chang, "FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking",
ICLR 2025.

Server, with a = FedAvg's mean, and per layer group l, ``g_{k,l} = u_{k,l} - w_l^t`` with plain mean gbar_l::

    q_l     = 1/|S| sum_k |g_{k,l} - gbar_l|                    (distances, not squared)
    tau_l   = clip(beta q_l, tau_min, tau_max)                  (the clamp is in the authors' code only)
    gamma_l = |w_l| / (|w_l| + tau_l |a_l - w_l|)               w_l^{t+1} = gamma_l a_l

Decisions [D]: a group is one weight with its bias and the affine parameters of the norm layer directly after it
(``layout.groups``). The authors' code includes running statistics in the next group's norms and shrinks them; here
buffers are averaged and never shrunk. |w_l| = 0 gives gamma_l = 1. One device: q = 0, so tau = tau_min.
"""

import math
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from freshet.core.about import About, Range
from freshet.core.events import Aggregated, Event
from freshet.core.method import Options, expect
from freshet.core.server import Server
from freshet.core.vectors import Vector, combine
from freshet.methods._shared.rounds import RoundUpload
from freshet.methods.fedavg import FedAvg

Group = tuple[tuple[int, int], ...]


class FedLWSOptions(Options):
    """Hyper-parameters with the paper's symbols and the authors' values."""

    beta: float = Field(0.03, ge=0, description="how strongly disagreement shrinks a layer")
    tau_min: float = Field(0.01, ge=0, description="lower bound of tau")
    tau_max: float = Field(0.2, ge=0, description="upper bound of tau")

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.tau_min > self.tau_max:
            raise ValueError("tau_min must be at most tau_max")
        return self

    def tau(self, q: float) -> float:
        """``clip(beta q, tau_min, tau_max)``."""
        return min(max(self.beta * q, self.tau_min), self.tau_max)


def shrink_factor(w_norm: float, tau: float, move_norm: float) -> float:
    """``gamma_l``."""
    return 1.0 if w_norm == 0.0 else w_norm / (w_norm + tau * move_norm)


def group_norms(group: Group, w: Vector, members: list[RoundUpload], shares: list[float]) -> tuple[float, float, float]:
    """``(q_l, |w_l|, |a_l - w_l|)`` in float64."""
    spread, length, move = np.zeros(len(members)), 0.0, 0.0
    for start, stop in group:
        u = [m.weights[start:stop].astype(np.float64) for m in members]
        base = w[start:stop].astype(np.float64)
        mean, a = np.zeros(stop - start), np.zeros(stop - start)
        for u_k, share in zip(u, shares, strict=True):
            mean += u_k
            a += share * u_k
        mean /= len(u)
        a -= base
        spread += [float(np.dot(u_k - mean, u_k - mean)) for u_k in u]
        length += float(np.dot(base, base))
        move += float(np.dot(a, a))
    return float(np.sqrt(spread).sum()) / len(members), math.sqrt(length), math.sqrt(move)


class FedLWS(FedAvg):
    """FedAvg's server, followed by the shrinking."""

    about = About(
        "fedlws",
        "sync",
        "FedLWS",
        "Shi et al., FedLWS, ICLR 2025",
        space={"beta": Range(3e-3, 0.3, log=True), "tau_max": Range(0.05, 0.5)},
    )
    Options: ClassVar[type[Options]] = FedLWSOptions
    options: FedLWSOptions

    @classmethod
    def beyond_sum(cls, options: FedLWSOptions) -> str | None:
        return "it shrinks layers by the distance of each update from the mean"

    def aggregate(
        self, server: Server, members: list[RoundUpload], shares: list[float]
    ) -> tuple[Vector, dict[str, Any]]:
        new, _ = super().aggregate(server, members, shares)
        record: dict[str, list[float]] = {name: [] for name in ("q", "w_norm", "move_norm", "tau", "gamma")}
        for group in self.context.layout.groups:
            q, w_norm, move_norm = group_norms(group, server.weights, members, shares)
            tau = self.options.tau(q)
            gamma = shrink_factor(w_norm, tau, move_norm)
            for start, stop in group:
                terms = [(gamma * share, m.weights[start:stop]) for share, m in zip(shares, members, strict=True)]
                combine(terms, out=new[start:stop])
            for name, value in zip(record, (q, w_norm, move_norm, tau, gamma), strict=True):
                record[name].append(value)
        return new, record

    @classmethod
    def audit(cls, options: FedLWSOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        super().audit(options, event, time, memory)
        if not isinstance(event, Aggregated) or not event.contributions:
            return
        columns = (event.numbers[name] for name in ("q", "w_norm", "move_norm", "tau", "gamma"))
        for group, (q, w_norm, move_norm, tau, gamma) in enumerate(zip(*columns, strict=True)):
            expect(f"tau of group {group}", tau, options.tau(q))
            expect(f"gamma of group {group}", gamma, shrink_factor(w_norm, tau, move_norm))
