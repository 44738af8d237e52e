"""FedBuff: K uploads fill a buffer, then their discounted progress makes one step of the global model.

J. Nguyen, K. Malik, H. Zhan, A. Yousefpour, M. Rabbat, M. Malek, D. Huba, "Federated Learning with Buffered
Asynchronous Aggregation", AISTATS 2022.

An arrival with base ``w^b`` brings ``delta_k = w^b - u_k`` (old minus new) and tau = s - 1::

    B <- B + s(tau) delta_k      s(tau) = (1 + tau)^-1/2

At the K-th arrival::

    gbar = B / K      m <- beta m + gbar (gbar at the first)      w <- w - eta_g m      B <- 0

B is divided by K, not by the sum of the discounts, so stale buffers take smaller steps. Samples do not count.
(FLSim, by the same group, sums instead and gives a fresh upload the weight sqrt(2): its rate is
``eta_g / (K sqrt(2))``.) Decisions [D]: a buffer that is not full at the end of a run is dropped. Buffers of the
network (BatchNorm) become the plain mean over the K devices; eta_g and momentum do not apply to them. Defaults K = 10,
eta_g = 1, beta = 0, exponent 1/2, no bound on tau.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from freshet.core.about import About, Range, UploadCount
from freshet.core.admission import overflows
from freshet.core.events import Aggregated, Contribution, Discarded, Event
from freshet.core.messages import Upload
from freshet.core.method import (
    Aggregate,
    Discard,
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
from freshet.core.vectors import distance
from freshet.methods._shared.asynchronous import UploadBuffer, Wide, polynomial_discount
from freshet.methods._shared.rebase import FreshOptions, with_fresh


class FedBuffOptions(FreshOptions):
    """Hyper-parameters with the paper's symbols."""

    K: int = Field(10, ge=1, description="uploads per aggregation")
    eta_g: float = Field(1.0, gt=0, description="server learning rate")
    beta: float = Field(0.0, ge=0, lt=1, description="server momentum")
    exponent: float = Field(0.5, ge=0, description="exponent of the staleness discount (1 + tau)^-exponent")
    tau_max: int = Field(-1, ge=-1, description="largest tau; staler uploads are discarded (-1: no limit)")

    def is_too_stale(self, tau: int) -> bool:
        return 0 <= self.tau_max < tau


@dataclass
class MomentumBuffer(UploadBuffer):
    """The buffer, and the server's momentum."""

    m: Wide | None = None


class FedBuff(Method):
    """The server's part; devices do plain SGD."""

    about = About(
        "fedbuff",
        "async",
        "FedBuff",
        "Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022",
        space={
            "K": UploadCount(2, 20, whole=True),
            "eta_g": Range(0.1, 3.0, log=True),
            "exponent": Range(0.0, 1.5),
        },
    )
    Options: ClassVar[type[Options]] = FedBuffOptions
    options: FedBuffOptions
    state: MomentumBuffer

    def __init__(self, options: FedBuffOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.state = MomentumBuffer.empty(context.layout)

    @classmethod
    def rule(cls, options: FedBuffOptions) -> LocalRule:
        return with_fresh(options, LocalRule())

    @classmethod
    def beyond_sum(cls, options: FedBuffOptions) -> str | None:
        return None

    def discard_early(self, server: Server, trip: ActiveTrip) -> Discard | None:
        s = server.staleness(trip)
        return Discard("too stale") if self.options.is_too_stale(s - 1) else None

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        o, n, u, s, buffer = (
            self.options,
            self.context.layout.learnable,
            upload.weights,
            server.staleness(trip),
            self.state,
        )
        delta = server.start_of(upload)[:n].astype(np.float64) - u[:n]
        buffer.add(self.context.layout, polynomial_discount(s - 1, o.exponent) * delta, u, upload.device, trip.base, s)
        return self._flush(server) if len(buffer.arrived) == o.K else Wait()

    def _flush(self, server: Server) -> Verdict:
        o, layout, w, buffer = self.options, self.context.layout, server.weights, self.state
        self.state = MomentumBuffer.empty(layout)
        self.state.m = buffer.m
        discounts = [polynomial_discount(s - 1, o.exponent) for _, _, s in buffer.arrived]
        parts = [Contribution(*who, discount / o.K) for who, discount in zip(buffer.arrived, discounts, strict=True)]
        step = server.release(buffer.B / o.K, parts)
        if o.beta and buffer.m is not None:
            step = o.beta * buffer.m + step
        new = buffer.model(layout, w[: layout.learnable] - o.eta_g * step)
        length = distance(new[: layout.learnable], w[: layout.learnable])
        if overflows(new, length):
            return Reject(NOT_FINITE)
        if o.beta:
            self.state.m = step
        numbers = {"alpha": o.eta_g * sum(part.weight for part in parts), "discounts": discounts}
        return Aggregate(new, parts, numbers, length)

    @classmethod
    def audit(cls, options: FedBuffOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        if isinstance(event, Discarded) and not options.is_too_stale(event.staleness - 1):
            raise Mismatch(f"discarded at staleness {event.staleness}, within tau_max")
        if not isinstance(event, Aggregated):
            return
        parts = event.contributions
        if len(parts) != options.K:
            raise Mismatch(f"{len(parts)} uploads make an aggregation, not K = {options.K}")
        for part, discount in zip(parts, event.numbers["discounts"], strict=True):
            if options.is_too_stale(part.staleness - 1):
                raise Mismatch(f"device {part.device} is aggregated at staleness {part.staleness}, beyond tau_max")
            expect(
                f"discount of device {part.device}", discount, polynomial_discount(part.staleness - 1, options.exponent)
            )
            expect(f"weight of device {part.device}", part.weight, discount / options.K)
        expect("alpha", event.numbers["alpha"], options.eta_g * sum(part.weight for part in parts))
