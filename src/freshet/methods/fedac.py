"""FedAC [R]: a buffer weighted by agreement with the server's course, a look-ahead adaptive step, local correction.

Y. Zang, Z. Xue, S. Ou, L. Chu, J. Du, Y. Long, "Efficient Asynchronous Federated Learning with Prospective Momentum
Aggregation and Fine-Grained Correction", AAAI 2024. **Reconstructed [R]**: we could read the abstract only. It names
weights from the similarity of directions, prospective momentum with an adaptive rate, and a correction of local
gradients. Three public implementations disagree; the formulas below are those of AFL-Lib but for our decisions, and a
result must carry the mark [R] in every table. (Not the FedAc of Yuan and Ma, 2020.)

An arrival from base w^b brings ``Delta_i = u_i - w^b`` and a change dc_i of its control. At the K-th, per coordinate::

    r_i = max(cos(w^v - w^b, Delta_i), 0.1)       p_i = r_i / sum r       G = sum p_i Delta_i
    m <- beta1 m + (1 - beta1) G                  V <- beta2 V + (1 - beta2) G^2
    w <- w + eta_g (beta1 m + (1 - beta1) G) / (sqrt(V) + 1e-8)           c <- c + sum p_i dc_i

The device is SCAFFOLD's: every step adds c - c_i to the gradient, and c_i becomes the mean gradient of the trip.

Decisions [D]: r = 1 for a fresh upload, which has no course to compare (AFL-Lib: 0.1, the other two: 1), and 0.1 for
one without progress. The correction acts at every step (AFL-Lib: once, after training). A device adopts its control
when it hears, at its next trip, that its upload was used or waits in the buffer; so lost uploads leave no trace. If a
device is twice in a buffer, both enter. Buffers of the network become the plain mean. K = 5, beta1 = 0.6, beta2 = 0.9
and eta_g = 0.001 are AFL-Lib's.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from freshet.core.about import About, Range, UploadCount
from freshet.core.admission import overflows
from freshet.core.events import Aggregated, Contribution, Event
from freshet.core.messages import Number, Upload, Vectors
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
from freshet.core.vectors import Vector
from freshet.methods._shared.asynchronous import Arrival, Wide, arrival_of, stepped_model
from freshet.methods.scaffold import ControlledRule

#: The least weight of an upload before normalisation, and what keeps the step finite where V is 0.
LEAST_AGREEMENT, TINY = 0.1, 1e-8


class FedACOptions(Options):
    """Hyper-parameters of the reconstruction."""

    K: int = Field(5, ge=1, description="uploads per aggregation")
    eta_g: float = Field(1e-3, gt=0, description="server learning rate")
    beta1: float = Field(0.6, ge=0, lt=1, description="momentum of the server's step")
    beta2: float = Field(0.9, ge=0, lt=1, description="decay rate of the second moment V")


def agreement(course: Wide, progress: Wide) -> float:
    """``r_i``: the cosine of the server's course since the base and an upload's progress, at least 0.1."""
    if not course.any():
        return 1.0
    lengths = float(np.linalg.norm(course)) * float(np.linalg.norm(progress))
    return max(float(course @ progress) / lengths, LEAST_AGREEMENT) if lengths else LEAST_AGREEMENT


def to_shares(r: list[float]) -> list[float]:
    """``p_i``."""
    return [each / sum(r) for each in r]


@dataclass(frozen=True)
class JudgedUpload:
    """An upload in the buffer with its trip, its agreement r and the change of its control."""

    arrival: Arrival
    trip: int
    r: float
    change: Vector


@dataclass
class FedACState:
    """The moments m and V, the control c, per device the last trip that changed c, and the buffer."""

    m: Wide
    V: Wide
    c: Vector
    heard: dict[int, int] = field(default_factory=dict)
    buffer: list[JudgedUpload] = field(default_factory=list)


class FedAC(Method):
    """The server's part."""

    about = About(
        "fedac",
        "async",
        "FedAC",
        "Zang et al., Prospective Momentum Aggregation and Fine-Grained Correction, AAAI 2024",
        reconstructed=True,
        space={
            "K": UploadCount(2, 20, whole=True),
            "eta_g": Range(1e-3, 0.3, log=True),
            "beta1": Range(0.0, 0.95),
        },
    )
    Options: ClassVar[type[Options]] = FedACOptions
    options: FedACOptions
    state: FedACState

    def __init__(self, options: FedACOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        n = context.layout.learnable
        self.state = FedACState(np.zeros(n), np.zeros(n), np.zeros(n, np.float32))

    @classmethod
    def rule(cls, options: FedACOptions) -> LocalRule:
        return ControlledRule()

    def instruct(self, server: Server, device: int) -> dict[str, Number]:
        """The last trip of the device whose upload has come: used, or waiting in the buffer."""
        waiting = [each.trip for each in self.state.buffer if each.arrival.device == device]
        return {"heard": max([self.state.heard.get(device, 0), *waiting])}

    def vectors(self, server: Server, device: int) -> Vectors:
        return {"c": self.state.c}

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        n, start = self.context.layout.learnable, server.store.get(trip.base)
        arrival = arrival_of(server, upload, trip, start)
        r = agreement(server.weights[:n].astype(np.float64) - start[:n], arrival.progress)
        self.state.buffer.append(JudgedUpload(arrival, upload.trip, r, upload.vectors["change"]))
        return self._step(server) if len(self.state.buffer) == self.options.K else Wait()

    def _step(self, server: Server) -> Verdict:
        o, state, layout, buffer = self.options, self.state, self.context.layout, self.state.buffer
        state.buffer = []
        p = to_shares([each.r for each in buffer])
        G, c = np.zeros(layout.learnable), state.c.astype(np.float64)
        for p_i, each in zip(p, buffer, strict=True):
            G += p_i * each.arrival.progress
            c += p_i * each.change
        m, V = o.beta1 * state.m + (1.0 - o.beta1) * G, o.beta2 * state.V + (1.0 - o.beta2) * G * G
        step = o.eta_g * (o.beta1 * m + (1.0 - o.beta1) * G) / (np.sqrt(V) + TINY)
        new, length = stepped_model(layout, server.weights, step, [each.arrival.weights for each in buffer])
        with np.errstate(over="ignore"):
            control = c.astype(np.float32)
        if overflows(new, length) or not np.isfinite(control).all():
            return Reject(NOT_FINITE)
        state.m, state.V, state.c = m, V, control
        state.heard = state.heard | {each.arrival.device: each.trip for each in buffer}
        parts = [
            Contribution(each.arrival.device, each.arrival.base, server.version - each.arrival.base + 1, p_i)
            for p_i, each in zip(p, buffer, strict=True)
        ]
        norms = {"G_norm": float(np.linalg.norm(G)), "c_norm": float(np.linalg.norm(c))}
        return Aggregate(new, parts, {"alpha": o.eta_g, "r": [each.r for each in buffer], **norms}, length)

    @classmethod
    def audit(cls, options: FedACOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check the number of uploads, their agreements as far as the log tells, and every p_i."""
        if not isinstance(event, Aggregated):
            return
        parts, r = event.contributions, event.numbers["r"]
        if len(parts) != options.K:
            raise Mismatch(f"{len(parts)} uploads make an aggregation, not K = {options.K}")
        for part, r_i, p_i in zip(parts, r, to_shares(r), strict=True):
            if not LEAST_AGREEMENT <= r_i <= 1.0 + 1e-9 or (part.staleness == 1 and r_i != 1.0):
                raise Mismatch(f"r of device {part.device} is {r_i}")
            expect(f"weight of device {part.device}", part.weight, p_i)
        expect("alpha", event.numbers["alpha"], options.eta_g)
