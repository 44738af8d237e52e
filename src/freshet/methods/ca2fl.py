"""CA2FL: a buffer of M uploads, calibrated with the last update of every device, including absent ones.

Y. Wang, Y. Cao, J. Wu, R. Chen, J. Chen, "Tackling the Data Heterogeneity in Asynchronous Federated Learning with
Cached Update Calibration", ICLR 2024.

An arrival from base ``x_{t-tau}`` brings ``Delta^i = u - x_{t-tau}``. The server keeps each device's last one, h^i
(zero before the first), and their mean over all n devices, ``h_t = 1/n sum_i h_t^i``. At the M-th arrival, S_t the
buffer::

    v_t = h_t + 1/M sum_{S_t} (Delta^i - h_t^i)      x_{t+1} = x_t + eta v_t      h_{t+1}^i = Delta^i for i in S_t

With an empty cache this is FedBuff without its discount: staleness alone does not change a weight.

Decisions [D]: a device that is twice in a buffer is calibrated both times by the h_t^i from before that buffer, and its
newest update is kept (a public implementation calibrates the second by the first). Updates enter the cache with the
step that they are part of. Updates that are refused, lost, in a buffer that never filled, or in a step that is not
finite leave no trace. Buffers of the network become the plain mean over the M devices. Defaults M = 10, eta = 1. The
cache is one model per device in the server's memory; a run that needs more than 1 GiB says so.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

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
from freshet.core.vectors import Vector, distance
from freshet.methods._shared.asynchronous import UploadBuffer, Wide, cache_notice
from freshet.methods._shared.rebase import FreshOptions, with_fresh


class CA2FLOptions(FreshOptions):
    """Hyper-parameters with the paper's symbols."""

    M: int = Field(10, ge=1, description="uploads per aggregation")
    eta: float = Field(1.0, gt=0, description="server learning rate")


@dataclass
class CA2FLState:
    """The buffer, its pending updates for the cache, the cache h^i by device, and its mean h."""

    buffer: UploadBuffer
    h: Wide
    pending: dict[int, Vector] = field(default_factory=dict)
    h_i: dict[int, Vector] = field(default_factory=dict)


class CA2FL(Method):
    """The server's part; devices do plain SGD."""

    about = About(
        "ca2fl",
        "async",
        "CA2FL",
        "Wang et al., Cached Update Calibration, ICLR 2024",
        space={"M": UploadCount(2, 20, whole=True), "eta": Range(0.1, 3.0, log=True)},
    )
    Options: ClassVar[type[Options]] = CA2FLOptions
    options: CA2FLOptions
    state: CA2FLState

    def __init__(self, options: CA2FLOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.state = CA2FLState(UploadBuffer.empty(context.layout), np.zeros(context.layout.learnable))

    @classmethod
    def rule(cls, options: CA2FLOptions) -> LocalRule:
        return with_fresh(options, LocalRule())

    def notices(self) -> list[str]:
        return cache_notice("CA2FL", self.context)

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        layout, u, state, device = self.context.layout, upload.weights, self.state, upload.device
        delta = u[: layout.learnable].astype(np.float64) - server.start_of(upload)[: layout.learnable]
        calibrated = delta - state.h_i[device] if device in state.h_i else delta
        state.buffer.add(layout, calibrated, u, device, trip.base, server.staleness(trip))
        with np.errstate(over="ignore"):  # a step that is not finite is refused later
            state.pending[device] = delta.astype(np.float32)
        return self._step(server) if len(state.buffer.arrived) == self.options.M else Wait()

    def _step(self, server: Server) -> Verdict:
        o, state, x, layout = self.options, self.state, server.weights, self.context.layout
        n, buffer, pending = layout.learnable, state.buffer, state.pending
        state.buffer, state.pending = UploadBuffer.empty(layout), {}
        v = state.h + buffer.B / o.M
        new = buffer.model(layout, x[:n] + o.eta * v)
        length = distance(new[:n], x[:n])
        if overflows(new, length) or not all(np.isfinite(delta).all() for delta in pending.values()):
            return Reject(NOT_FINITE)
        parts = [Contribution(*who, o.eta / o.M) for who in buffer.arrived]
        numbers = {"alpha": o.eta, "cached": [int(part.device in state.h_i) for part in parts]}
        norms = {"h_norm": float(np.linalg.norm(state.h)), "v_norm": float(np.linalg.norm(v))}
        self._remember(pending)
        return Aggregate(new, parts, numbers | norms, length)

    def _remember(self, pending: dict[int, Vector]) -> None:
        """``h^i <- Delta^i``, and h their mean over all devices."""
        state = self.state
        for device in sorted(pending):
            before = state.h_i.get(device)
            change = pending[device].astype(np.float64)
            state.h += (change if before is None else change - before) / self.context.devices
            state.h_i[device] = pending[device]

    @classmethod
    def audit(cls, options: CA2FLOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check that M equally weighted uploads make a step, and that known devices are calibrated."""
        if not isinstance(event, Aggregated):
            return
        parts, known = event.contributions, memory.setdefault("cached", set())
        if len(parts) != options.M:
            raise Mismatch(f"{len(parts)} uploads make an aggregation, not M = {options.M}")
        for part, cached in zip(parts, event.numbers["cached"], strict=True):
            expect(f"weight of device {part.device}", part.weight, options.eta / options.M)
            expect(f"cached of device {part.device}", cached, int(part.device in known))
        expect("alpha", event.numbers["alpha"], options.eta)
        known.update(part.device for part in parts)
