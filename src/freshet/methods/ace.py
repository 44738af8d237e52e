"""ACE and ACED: every arrival steps along the mean of the last updates of all devices, so that fast devices count once.

X. Chang, M. Yao, S. Krishnamurthy, C. Shelton, A. Chakraborty, A. Swami, S. Oymak, A. Roy-Chowdhury, "Mitigating
Participation Imbalance Bias in Asynchronous Federated Learning", arXiv 2511.19066, 2025.

An arrival of device j from base w^b brings ``U_j = w^b - u_j`` (old minus new) and ``o_j = b``. The server keeps the
last one of every device. With M devices and v the version before the step::

    ACE     ubar = 1/M sum_k U_k                                             w <- w - eta ubar
    ACED    ubar = 1/|A| sum_A U_k,   A = {k: v - o_k <= tau_algo}           w <- w - eta ubar

Decisions [D]: U is progress, not a mean gradient, so a common rate is ``eta / C`` with C devices in flight (the option
is eta). A device that was never heard counts as 0 in ACE (the authors' code starts with an update of every device at
w^0 that takes no time). tau_algo is given as a multiple of M; the authors' class has M, their runs M / 2. The authors'
README is followed: their code for ACED steps only every M arrivals. An entry that has left A cannot return, so it is
dropped. An upload that finds A empty is discarded. Buffers of the network are mixed with the arrival's share of ubar,
1/M or 1/|A|; those of an arrival outside A do not count. A lost upload leaves the old entry. The cache is one model
per device; a run that needs more than 1 GiB says so.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.admission import overflows
from freshet.core.events import Aggregated, Contribution, Event
from freshet.core.messages import Upload
from freshet.core.method import Aggregate, Discard, LocalRule, Method, MethodContext, Options, Reject, Verdict, expect
from freshet.core.server import NOT_FINITE, ActiveTrip, Server
from freshet.core.vectors import Vector, distance, mix
from freshet.methods._shared.asynchronous import Wide, cache_notice
from freshet.methods._shared.rebase import FreshOptions, with_fresh


class ACEOptions(FreshOptions):
    """Hyper-parameters with the paper's symbols."""

    eta: float = Field(1.0, gt=0, description="server learning rate; it is divided by the number of devices in flight")
    delayed: bool = Field(False, description="average only updates that are at most tau_algo versions old (ACED)")
    tau_algo: float = Field(1.0, gt=0, description="largest age of an update, as a multiple of the number of devices")

    def is_too_old(self, age: int, devices: int) -> bool:
        return self.delayed and age > self.tau_algo * devices


@dataclass(frozen=True)
class CachedUpdate:
    """A device's last update, and the version that it started from."""

    base: int
    U: Vector


@dataclass
class ACEState:
    """The last update of every device, without those that are too old, and their sum."""

    total: Wide
    cache: dict[int, CachedUpdate] = field(default_factory=dict)


class ACE(Method):
    """The server's part; devices do plain SGD."""

    about = About(
        "ace",
        "async",
        "ACE",
        "Chang et al., Mitigating Participation Imbalance Bias in Asynchronous FL, arXiv 2511.19066, 2025",
        variants={"aced": {"delayed": True}},
        space={"eta": Range(0.1, 10.0, log=True)},
        spaces={"aced": {"tau_algo": Range(0.25, 1.0, log=True)}},
    )
    Options: ClassVar[type[Options]] = ACEOptions
    options: ACEOptions
    state: ACEState

    def __init__(self, options: ACEOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.state = ACEState(np.zeros(context.layout.learnable))

    @classmethod
    def rule(cls, options: ACEOptions) -> LocalRule:
        return with_fresh(options, LocalRule())

    def notices(self) -> list[str]:
        return cache_notice("ACE", self.context)

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        o, n, M, state = self.options, self.context.layout.learnable, self.context.devices, self.state
        base, v, device = server.start_of(upload), server.version, upload.device
        with np.errstate(over="ignore"):  # a step that is not finite is refused below
            U = (base[:n].astype(np.float64) - upload.weights[:n]).astype(np.float32)
        gone = [k for k, entry in state.cache.items() if k == device or o.is_too_old(v - entry.base, M)]
        counts = not o.is_too_old(v - trip.base, M)
        cached = len(state.cache) - len(gone) + counts
        if not cached:
            return Discard("too stale")
        total = state.total + U if counts else state.total.copy()
        for k in gone:
            total -= state.cache[k].U
        averaged = cached if o.delayed else M
        alpha = o.eta / max(1, self.context.in_flight)
        share = 1.0 / averaged if counts else 0.0
        new, length = self._step(server.weights, upload.weights, alpha * total / averaged, share)
        if overflows(new, length) or not np.isfinite(U).all():
            return Reject(NOT_FINITE)
        state.total, state.cache = total, {k: entry for k, entry in state.cache.items() if k not in gone}
        if counts:
            state.cache[device] = CachedUpdate(trip.base, U)
        part = Contribution(device, trip.base, server.staleness(trip), alpha / averaged if counts else 0.0)
        numbers = {"alpha": alpha, "in_flight": max(1, self.context.in_flight), "devices": M, "cached": cached}
        return Aggregate(new, [part], numbers, length)

    def _step(self, w: Vector, u: Vector, step: Wide, share: float) -> tuple[Vector, float]:
        layout, n = self.context.layout, self.context.layout.learnable
        new = mix(w, u, share)
        with np.errstate(over="ignore"):
            new[:n] = w[:n] - step
        layout.max_counters(new, *([w, u] if share else [w]))
        return new, distance(new[:n], w[:n])

    @classmethod
    def audit(cls, options: ACEOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check the rate, which devices are averaged, and the arrival's share."""
        if not isinstance(event, Aggregated):
            return
        (part,), n = event.contributions, event.numbers
        bases = memory.setdefault("bases", {}) | {part.device: part.base}
        memory["bases"] = {
            k: base for k, base in bases.items() if not options.is_too_old(event.version - base, n["devices"])
        }
        cached = len(memory["bases"])
        expect("cached", n["cached"], cached)
        expect("alpha", n["alpha"], options.eta / n["in_flight"])
        share = n["alpha"] / (cached if options.delayed else n["devices"])
        expect("weight", part.weight, share if part.device in memory["bases"] else 0.0)
