"""FedStaleWeight: in a buffer of K uploads, devices that are stale on average weigh more, so slow ones count fairly.

J. Ma, A. Tu, Y. Chen, V. Janapa Reddi, "FedStaleWeight: Buffered Asynchronous Federated Learning with Fair Aggregation
via Staleness Reweighting", arXiv 2406.02877, 2024.

Every arrival from base w^b brings ``Delta_k = u_k - w^b`` and tau_k = s_k - 1. At the K-th, each tau enters the window
of its device, which holds the last W; sigma_k is the mean of the window::

    p_k = sigma_k / sum_buffer sigma            w <- w + sum_buffer p_k Delta_k

Decisions [D]: p = 1/K if all sigma are 0 (the authors' code then stops learning). A full window loses its oldest value
(the code's loses the newest). The code multiplies sigma by K/M, which cancels. ``plus_one`` weighs by ``1 + K sigma``,
as another public implementation does with the momentary tau; which of the two is printed we could not read. If a
device is twice in a buffer, both values enter its window first. Updates that are lost or refused, or in a step that is
not finite, leave no trace. Buffers of the network become the plain mean. W = 5 is the code's; K = 10 is FedBuff's.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from freshet.core.about import About, UploadCount
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
from freshet.methods._shared.asynchronous import Arrival, arrival_of, stepped_model
from freshet.methods._shared.rebase import FreshOptions, with_fresh

#: The last staleness values tau of each device.
Windows = dict[int, list[int]]


class FedStaleWeightOptions(FreshOptions):
    """Hyper-parameters with the paper's symbols."""

    K: int = Field(10, ge=1, description="uploads per aggregation")
    W: int = Field(5, ge=1, description="staleness values that are kept of each device")
    plus_one: bool = Field(False, description="weigh by 1 + K sigma instead of sigma")

    def weights(self, sigma: list[float]) -> list[float]:
        """``p_k``."""
        raw = [1.0 + self.K * each for each in sigma] if self.plus_one else sigma
        total = sum(raw)
        return [each / total for each in raw] if total else [1.0 / len(raw)] * len(raw)


def with_values(windows: Windows, arrived: list[tuple[int, int]], W: int) -> Windows:
    """The windows after these (device, tau), each with its last W values."""
    found = dict(windows)
    for device, tau in arrived:
        found[device] = [*found.get(device, []), tau][-W:]
    return found


def mean_staleness(windows: Windows, device: int) -> float:
    """``sigma_k``."""
    return sum(windows[device]) / len(windows[device])


@dataclass
class FedStaleWeightState:
    """The buffer, and the windows of staleness."""

    buffer: list[Arrival] = field(default_factory=list)
    windows: dict[int, list[int]] = field(default_factory=dict)


class FedStaleWeight(Method):
    """The server's part; devices do plain SGD."""

    about = About(
        "fedstaleweight",
        "async",
        "FedStaleWeight",
        "Ma et al., FedStaleWeight, arXiv 2406.02877, 2024",
        space={"K": UploadCount(2, 20, whole=True)},
    )
    Options: ClassVar[type[Options]] = FedStaleWeightOptions
    options: FedStaleWeightOptions
    state: FedStaleWeightState

    def __init__(self, options: FedStaleWeightOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.state = FedStaleWeightState()

    @classmethod
    def rule(cls, options: FedStaleWeightOptions) -> LocalRule:
        return with_fresh(options, LocalRule())

    @classmethod
    def beyond_sum(cls, options: FedStaleWeightOptions) -> str | None:
        return None

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        self.state.buffer.append(arrival_of(server, upload, trip, server.start_of(upload)))
        return self._step(server) if len(self.state.buffer) == self.options.K else Wait()

    def _step(self, server: Server) -> Verdict:
        o, layout, buffer = self.options, self.context.layout, self.state.buffer
        self.state.buffer = []
        taus = [server.version - each.base for each in buffer]
        windows = with_values(self.state.windows, [(b.device, t) for b, t in zip(buffer, taus, strict=True)], o.W)
        sigma = [mean_staleness(windows, each.device) for each in buffer]
        p = o.weights(sigma)
        step = np.zeros(layout.learnable)
        for p_k, each in zip(p, buffer, strict=True):
            step += p_k * each.progress
        parts = [Contribution(b.device, b.base, t + 1, p_k) for b, t, p_k in zip(buffer, taus, p, strict=True)]
        step = server.release(step, parts)
        new, length = stepped_model(layout, server.weights, step, [each.weights for each in buffer])
        if overflows(new, length):
            return Reject(NOT_FINITE)
        self.state.windows = windows
        return Aggregate(new, parts, {"alpha": 1.0, "sigma": sigma}, length)

    @classmethod
    def audit(cls, options: FedStaleWeightOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check every sigma_k from the log's staleness, and every p_k."""
        if not isinstance(event, Aggregated):
            return
        parts, sigma = event.contributions, event.numbers["sigma"]
        if len(parts) != options.K:
            raise Mismatch(f"{len(parts)} uploads make an aggregation, not K = {options.K}")
        arrived = [(part.device, part.staleness - 1) for part in parts]
        memory["windows"] = with_values(memory.get("windows", {}), arrived, options.W)
        for part, sigma_k, p_k in zip(parts, sigma, options.weights(sigma), strict=True):
            expect(f"sigma of device {part.device}", sigma_k, mean_staleness(memory["windows"], part.device))
            expect(f"weight of device {part.device}", part.weight, p_k)
