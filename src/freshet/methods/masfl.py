"""MasFL and AdaMasFL [R]: control variates and momentum, on devices and server; Ada normalises every local step.

W. Yan, X. Zhong, X. Wang, Y.-J. Zhang, "Momentum-Driven Adaptivity: Towards Tuning-Free Asynchronous Federated
Learning", ICML 2025. **Reconstructed [R]**: we could read the abstract, a review and one third-party implementation,
whose formulas these are but for our decisions. A result must carry the mark [R] in every table.

The server keeps a control c_k of every device, their mean c over all M, and a momentum g, all zero at first. Each
local step, from the gradient of a mini-batch::

    d = beta (grad f - c_k + c) + (1 - beta) g         MasFL: u <- u - eta_l d         Ada: u <- u - eta_l d / |d|

A device uploads u_k and gbar_k, the mean of its plain gradients over the trip. At the S-th upload, ``delta_k = gbar_k
- c_k``::

    g <- beta (c + mean delta_k) + (1 - beta) g        c <- c + sum delta_k / M        c_k <- gbar_k
    MasFL: w <- w - gamma g                            Ada: w <- w + gamma mean((u_k - w^b) / (eta_l steps_k))

Decisions [D]: means are plain (the code weighs by samples). The server sends the one vector ``beta (c - c_k) + (1 -
beta) g`` instead of three. Weight decay is part of grad f. |d| is at least 1e-12. If a device is twice in a buffer,
its second delta is against its first gbar, as in the code. Updates that are lost or refused, or in a step that is not
finite, leave no trace. Buffers of the network become the plain mean. beta = 0.9, S = 1, gamma = 0.01, with Ada 1, are
the code's. The controls are one model per device; a run that needs more than 1 GiB says so.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.admission import overflows
from freshet.core.events import Aggregated, Contribution, Event
from freshet.core.messages import Upload, Vectors
from freshet.core.method import (
    Aggregate,
    ConditionalDefaults,
    Local,
    LocalRule,
    Method,
    MethodContext,
    Mismatch,
    Options,
    Reject,
    Verdict,
    Wait,
    expect,
)
from freshet.core.server import NOT_FINITE, ActiveTrip, Server
from freshet.core.vectors import Vector
from freshet.methods._shared.asynchronous import Arrival, Wide, arrival_of, cache_notice, stepped_model


class MasFLOptions(Options):
    """Hyper-parameters of the reconstruction."""

    conditional_defaults: ClassVar[ConditionalDefaults] = {("local", "normalised"): {"gamma": 1.0}}

    local: Literal["plain", "normalised"] = Field("plain", description="local steps: plain, or of unit length (Ada)")
    beta: float = Field(0.9, gt=0, le=1, description="weight of the corrected gradient; the rest is momentum")
    gamma: float = Field(0.01, gt=0, description="server learning rate (default under normalised: 1)")
    S: int = Field(1, ge=1, description="uploads per aggregation")


@dataclass(frozen=True)
class GradientUpload:
    """An upload in the buffer with its mean gradient, and its progress per unit of local learning rate."""

    arrival: Arrival
    gradient: Vector
    rate: float


@dataclass
class MasFLState:
    """The momentum g, the mean control c, the controls c_k, and the buffer."""

    g: Wide
    c: Wide
    c_k: dict[int, Vector] = field(default_factory=dict)
    buffer: list[GradientUpload] = field(default_factory=list)


class MasFL(Method):
    """The server's part."""

    about = About(
        "masfl",
        "async",
        "MasFL",
        "Yan et al., Momentum-Driven Adaptivity, ICML 2025",
        variants={"adamasfl": {"local": "normalised"}},
        reconstructed=True,
        space={"beta": Range(0.1, 0.9), "gamma": Range(0.01, 3.0, log=True)},
    )
    Options: ClassVar[type[Options]] = MasFLOptions
    options: MasFLOptions
    state: MasFLState

    def __init__(self, options: MasFLOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        n = context.layout.learnable
        self.state = MasFLState(np.zeros(n), np.zeros(n))

    def notices(self) -> list[str]:
        return cache_notice("MasFL", self.context)

    @classmethod
    def rule(cls, options: MasFLOptions) -> LocalRule:
        return MomentumRule(options.beta, options.local == "normalised")

    def vectors(self, server: Server, device: int) -> Vectors:
        beta, state = self.options.beta, self.state
        control = state.c - state.c_k[device] if device in state.c_k else state.c
        return {"direction": (beta * control + (1.0 - beta) * state.g).astype(np.float32)}

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        arrival = arrival_of(server, upload, trip, server.store.get(trip.base))
        rate = 1.0 / (trip.lr * upload.steps) if trip.lr else 0.0  # a rate of 0 makes no progress
        self.state.buffer.append(GradientUpload(arrival, upload.vectors["gradient"], rate))
        return self._step(server) if len(self.state.buffer) == self.options.S else Wait()

    def _step(self, server: Server) -> Verdict:
        o, state, layout, buffer = self.options, self.state, self.context.layout, self.state.buffer
        state.buffer = []
        total, mean_step, c_k = np.zeros(layout.learnable), np.zeros(layout.learnable), dict(state.c_k)
        for each in buffer:
            before = c_k.get(each.arrival.device)
            total += each.gradient if before is None else each.gradient.astype(np.float64) - before
            mean_step += each.rate * each.arrival.progress / o.S
            c_k[each.arrival.device] = each.gradient
        g = o.beta * (state.c + total / o.S) + (1.0 - o.beta) * state.g
        c = state.c + total / self.context.devices
        step = o.gamma * (mean_step if o.local == "normalised" else -g)
        new, length = stepped_model(layout, server.weights, step, [each.arrival.weights for each in buffer])
        with np.errstate(over="ignore"):
            is_sane = all(np.isfinite(vector.astype(np.float32)).all() for vector in (g, c))
        if overflows(new, length) or not is_sane:
            return Reject(NOT_FINITE)
        state.g, state.c, state.c_k = g, c, c_k
        parts = [
            Contribution(each.arrival.device, each.arrival.base, server.version - each.arrival.base + 1, 1.0 / o.S)
            for each in buffer
        ]
        norms = {"g_norm": float(np.linalg.norm(g)), "c_norm": float(np.linalg.norm(c))}
        return Aggregate(new, parts, {"alpha": o.gamma, **norms}, length)

    @classmethod
    def audit(cls, options: MasFLOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check the number of uploads, their weights and the rate."""
        if not isinstance(event, Aggregated):
            return
        parts = event.contributions
        if len(parts) != options.S:
            raise Mismatch(f"{len(parts)} uploads make an aggregation, not S = {options.S}")
        for part in parts:
            expect(f"weight of device {part.device}", part.weight, 1.0 / options.S)
        expect("alpha", event.numbers["alpha"], options.gamma)


@dataclass(frozen=True)
class MomentumRule(LocalRule):
    """The device's part: the direction d, and the mean of the plain gradients."""

    beta: float
    normalise: bool
    sends: ClassVar[tuple[str, ...]] = ("gradient",)
    decay_first: ClassVar[bool] = True

    def begin(self, local: Local) -> None:
        local.scratch["direction"] = local.tensor(local.assignment.vectors["direction"])
        local.scratch["sum"] = local.base.new_zeros(local.base.shape)

    def adjust(self, local: Local) -> None:
        d = local.gradient
        local.scratch["sum"].add_(d)
        d.mul_(self.beta).add_(local.scratch["direction"])
        if self.normalise:
            d.div_(d.norm().clamp_min(1e-12))

    def finish(self, local: Local) -> None:
        mean: Vector = (local.scratch["sum"] / local.steps).cpu().numpy()
        local.vectors["gradient"] = mean
