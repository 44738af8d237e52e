"""MIFA, FedVARP and FedStale: rounds that use the last update of every device, also of those that are away.

X. Gu, K. Huang, J. Zhang, L. Huang, "Fast Federated Learning in the Presence of Arbitrary Device Unavailability",
NeurIPS 2021 (MIFA); D. Jhunjhunwala, P. Sharma, A. Nagarkatti, G. Joshi, "FedVARP: Tackling the Variance Due to
Partial Client Participation in Federated Learning", UAI 2022; A. Rodio, G. Neglia, "FedStale: Leveraging Stale Client
Updates in Federated Learning", arXiv 2405.04171, 2024.

S the devices that uploaded, ``Delta_k = u_k - w``, M all devices, eta_l the local rate of the round. MIFA keeps
``G_k``, the others h_k (zero before a device's first upload)::

    MIFA         G_k <- Delta_k / eta_l for k in S;   then    w <- w + eta_l / M sum_all G_j
    FedStale     w <- w + sum_S alpha_k / p_k (Delta_k - beta h_k) + beta sum_all alpha_j h_j;   h_k <- Delta_k for S
    FedVARP      FedStale with beta = 1

``alpha_k = n_k / sum_all n``, p_k the probability that k takes part in a round. beta = 0 is unbiased FedAvg. With
everybody in S and equal n, each of them is FedAvg.

Decisions [D]: MIFA starts with G = 0 (the authors' code waits until every device was heard once). ``p_k = m' / M``
with m' devices per round: the probability under uniform selection if nobody is lost. beta = 0.5 is that of FedStale's
code. Updates enter the cache with the step that they are part of. A lost upload leaves the old entry. Buffers of the
network take the plain mean. The cache is one model per device; a run that needs more than 1 GiB says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.defence import counted_samples
from freshet.core.events import Aggregated, Event
from freshet.core.method import MethodContext, Options, expect
from freshet.core.server import Server
from freshet.core.vectors import Vector, combine
from freshet.errors import ConfigError
from freshet.methods._shared.asynchronous import cache_notice
from freshet.methods._shared.rounds import Round, RoundMethod, RoundUpload

Wide = NDArray[np.float64]


class MIFAOptions(Options):
    """Hyper-parameters with the papers' symbols."""

    correction: Literal["mean", "participation"] = Field(
        "mean", description="mean of all last updates (MIFA), or weights by participation (FedStale, FedVARP)"
    )
    beta: float = Field(0.5, ge=0, le=1, description="weight of old updates under participation (1: FedVARP)")


@dataclass(frozen=True)
class RememberedUpdate:
    """A device's last update, and its share of the sum of all."""

    share: float
    update: Vector


@dataclass
class MIFAState(Round):
    """The last update of every device that was heard, and the sum of all, each with its share."""

    total: Wide = field(default_factory=lambda: np.zeros(0))
    cache: dict[int, RememberedUpdate] = field(default_factory=dict)


def with_update(total: Wide, before: RememberedUpdate | None, after: RememberedUpdate) -> Wide:
    """The sum of all updates after a device's last one was replaced."""
    change = after.share * after.update.astype(np.float64)
    return total + (change if before is None else change - before.share * before.update.astype(np.float64))


def stale_step(
    beta: float, shares: Sequence[float], updates: Sequence[Wide], cached: Sequence[Vector | None], total: Wide
) -> Wide:
    """FedStale's step: ``shares`` are alpha_k / p_k, ``cached`` the h_k, and ``total`` is sum_all alpha_j h_j."""
    step = beta * total
    for share, update, h in zip(shares, updates, cached, strict=True):
        step = step + share * (update if h is None else update - beta * h.astype(np.float64))
    return step


class MIFA(RoundMethod):
    """The server's part; devices do plain SGD."""

    about = About(
        "mifa",
        "sync",
        "MIFA",
        "Gu et al., Arbitrary Device Unavailability, NeurIPS 2021",
        variants={
            "fedstale": {"correction": "participation"},
            "fedvarp": {"correction": "participation", "beta": 1.0},
        },
        spaces={"fedstale": {"beta": Range(0.0, 1.0)}},
    )
    Options: ClassVar[type[Options]] = MIFAOptions
    options: MIFAOptions
    state: MIFAState

    def __init__(self, options: MIFAOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.state = MIFAState(total=np.zeros(context.layout.learnable))

    def notices(self) -> list[str]:
        return cache_notice("MIFA", self.context)

    def participation(self, device: int) -> float:
        """``p_k``."""
        return min(1.0, self.context.per_round / self.context.devices)

    def alpha(self, member: RoundUpload) -> float:
        """``alpha_k``: the device's share of all samples."""
        return member.samples / float(counted_samples(self.context).sum())

    def shares(self, members: list[RoundUpload]) -> list[float]:
        if self.options.correction == "mean":
            return [1.0 / self.context.devices] * len(members)
        return [self.alpha(member) / self.participation(member.device) for member in members]

    @classmethod
    def beyond_sum(cls, options: MIFAOptions) -> str | None:
        return "it keeps each device's last update and uses it again"

    def aggregate(
        self, server: Server, members: list[RoundUpload], shares: list[float]
    ) -> tuple[Vector, dict[str, Any]]:
        n, w, state, mean = self.context.layout.learnable, server.weights, self.state, self.options.correction == "mean"
        new = combine([(1.0 / len(members), member.weights) for member in members])
        updates = [member.weights[:n].astype(np.float64) - w[:n] for member in members]
        cached = [state.cache.get(member.device) for member in members]
        unit = members[0].lr if mean else 1.0
        if unit == 0.0:
            problem = "mifa divides updates by the learning rate, so no round may have a rate of 0"
            raise ConfigError("training.schedule", problem)
        old, total, cache = state.total, state.total, dict(state.cache)
        for member, update, before in zip(members, updates, cached, strict=True):
            share = 1.0 / self.context.devices if mean else self.alpha(member)
            after = cache[member.device] = RememberedUpdate(share, (update / unit).astype(np.float32))
            total = with_update(total, before, after)
        state.total, state.cache = total, cache
        h = [None if before is None else before.update for before in cached]
        step = unit * total if mean else stale_step(self.options.beta, shares, updates, h, old)
        new[:n] = w[:n] + step
        return new, self._numbers(members, [int(before is not None) for before in cached])

    def _numbers(self, members: list[RoundUpload], cached: list[int]) -> dict[str, Any]:
        everybody = {"devices": self.context.devices, "cached": cached}
        if self.options.correction == "mean":
            return everybody
        p = [self.participation(member.device) for member in members]
        return {**everybody, "p": p, "all_samples": int(counted_samples(self.context).sum()), "beta": self.options.beta}

    def is_sane(self) -> bool:
        return bool(np.isfinite(self.state.total).all())

    @classmethod
    def audit(cls, options: MIFAOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check every share, and which devices had an update before."""
        if not (isinstance(event, Aggregated) and event.contributions):
            return
        n, known = event.numbers, memory.setdefault("known", set())
        for number, part in enumerate(event.contributions):
            share = 1.0 / n["devices"]
            if options.correction == "participation":
                share = n["samples"][number] / n["all_samples"] / n["p"][number]
            expect(f"weight of device {part.device}", part.weight, share)
            expect(f"cached of device {part.device}", n["cached"][number], int(part.device in known))
        if options.correction == "participation":
            expect("beta", n["beta"], options.beta)
        known.update(part.device for part in event.contributions)
