"""FADAS: a buffer of M uploads is a gradient for AMSGrad on the server; the rate falls when uploads are late.

Y. Wang, S. Wang, S. Lu, J. Chen, "FADAS: Towards Federated Adaptive Asynchronous Optimization", ICML 2024.

An arrival from base ``x_{t-tau}`` brings ``Delta^i = u - x_{t-tau}``; tau = s - 1. At the M-th, per coordinate::

    Delta_t = 1/M sum Delta^i                       m <- beta1 m + (1 - beta1) Delta_t
    v <- beta2 v + (1 - beta2) Delta_t^2            vhat <- max(vhat, v)
    x <- x + eta_t m / (sqrt(vhat) + eps)           m = v = vhat = 0 at first, no bias correction

With tau_max the largest tau in the buffer, eta_t = eta up to ``tau_max = tau_c``. Beyond that::

    delay = "scale"   eta / tau_max           (the authors' code)
    delay = "cap"     min(eta, 1 / tau_max)   (as printed: only a tau beyond 100 changes a rate of 0.01)
    delay = "none"    eta                     (FADAS without delay adaptation)

Decisions [D]: "scale" is the default, since a cap that never applies adapts nothing. There is no bias correction, as
printed (the authors' code has it). beta1 = 0.9, beta2 = 0.99 and eps = 1e-8 are the authors'. eta = 0.01 (better than
0.03 in a few runs on the digits) and tau_c = 3 are Freshet's. M = 10 as in FedBuff here. Samples do not count. Buffers
of the network become the plain mean over the M devices. A step that is not finite changes neither m nor v nor vhat.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from freshet.core.about import About, Range, UploadCount
from freshet.core.admission import overflows
from freshet.core.events import Aggregated, Contribution, Event
from freshet.core.messages import Upload
from freshet.core.method import (
    Aggregate,
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
from freshet.methods._shared.asynchronous import UploadBuffer, Wide
from freshet.methods._shared.rebase import FreshOptions, with_fresh


class FADASOptions(FreshOptions):
    """Hyper-parameters with the paper's symbols."""

    M: int = Field(10, ge=1, description="uploads per aggregation")
    eta: float = Field(0.01, gt=0, description="server learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay rate of the first moment m")
    beta2: float = Field(0.99, ge=0, lt=1, description="decay rate of the second moment v")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    tau_c: int = Field(3, ge=1, description="largest staleness tau at which the rate is eta")
    delay: Literal["scale", "cap", "none"] = Field(
        "scale", description="rate beyond tau_c: eta / tau_max, min(eta, 1 / tau_max), or eta"
    )

    def rate(self, tau_max: int) -> float:
        """``eta_t``."""
        if self.delay == "none" or tau_max <= self.tau_c:
            return self.eta
        return self.eta / tau_max if self.delay == "scale" else min(self.eta, 1.0 / tau_max)


@dataclass
class FADASState:
    """The buffer, and the moments of its means."""

    buffer: UploadBuffer
    m: Wide
    v: Wide
    v_hat: Wide


class FADAS(Method):
    """The server's part; devices do plain SGD."""

    about = About(
        "fadas",
        "async",
        "FADAS",
        "Wang et al., Federated Adaptive Asynchronous Optimization, ICML 2024",
        space={
            "M": UploadCount(2, 20, whole=True),
            "eta": Range(1e-3, 0.3, log=True),
            "tau_c": Range(1, 10, whole=True),
        },
    )
    Options: ClassVar[type[Options]] = FADASOptions
    options: FADASOptions
    state: FADASState

    def __init__(self, options: FADASOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        n = context.layout.learnable
        self.state = FADASState(UploadBuffer.empty(context.layout), np.zeros(n), np.zeros(n), np.zeros(n))

    @classmethod
    def rule(cls, options: FADASOptions) -> LocalRule:
        return with_fresh(options, LocalRule())

    @classmethod
    def beyond_sum(cls, options: FADASOptions) -> str | None:
        return None

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        layout, u, buffer = self.context.layout, upload.weights, self.state.buffer
        delta = u[: layout.learnable].astype(np.float64) - server.start_of(upload)[: layout.learnable]
        buffer.add(layout, delta, u, upload.device, trip.base, server.staleness(trip))
        return self._step(server) if len(buffer.arrived) == self.options.M else Wait()

    def _step(self, server: Server) -> Verdict:
        o, state, x, layout = self.options, self.state, server.weights, self.context.layout
        n, buffer = layout.learnable, state.buffer
        state.buffer = UploadBuffer.empty(layout)
        parts = [Contribution(*who, 1.0 / o.M) for who in buffer.arrived]
        delta = server.release(buffer.B / o.M, parts)
        m = o.beta1 * state.m + (1.0 - o.beta1) * delta
        v = o.beta2 * state.v + (1.0 - o.beta2) * delta * delta
        v_hat = np.maximum(state.v_hat, v)
        tau_max = max(staleness for _, _, staleness in buffer.arrived) - 1
        eta_t = o.rate(tau_max)
        new = buffer.model(layout, x[:n] + eta_t * m / (np.sqrt(v_hat) + o.eps))
        length = distance(new[:n], x[:n])
        if overflows(new, length):
            return Reject(NOT_FINITE)
        state.m, state.v, state.v_hat = m, v, v_hat
        norms = {"delta_norm": float(np.linalg.norm(delta)), "m_norm": float(np.linalg.norm(m))}
        return Aggregate(new, parts, {"alpha": eta_t, "eta_t": eta_t, "tau_max": tau_max} | norms, length)

    @classmethod
    def audit(cls, options: FADASOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check that M uploads make a step with weight 1/M each, tau_max, and the rate."""
        if not isinstance(event, Aggregated):
            return
        parts, n = event.contributions, event.numbers
        if len(parts) != options.M:
            raise Mismatch(f"{len(parts)} uploads make an aggregation, not M = {options.M}")
        for part in parts:
            expect(f"weight of device {part.device}", part.weight, 1.0 / options.M)
        expect("tau_max", n["tau_max"], max(part.staleness for part in parts) - 1)
        for name in ("eta_t", "alpha"):
            expect(name, n[name], options.rate(n["tau_max"]))
