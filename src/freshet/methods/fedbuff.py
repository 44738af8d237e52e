"""FedBuff: K uploads fill a buffer, then their discounted progress makes one step of the global model.

J. Nguyen, K. Malik, H. Zhan, A. Yousefpour, M. Rabbat, M. Malek, D. Huba, "Federated Learning with Buffered
Asynchronous Aggregation", AISTATS 2022.

An arrival with base ``w^b`` brings ``delta_k = w^b - u_k`` (old minus new) and tau = s - 1::

    B <- B + s(tau) delta_k      s(tau) = (1 + tau)^-1/2

At the K-th arrival::

    gbar = B / K      m <- beta m + gbar (gbar at the first)      w <- w - eta_g m      B <- 0

B is divided by K, not by the sum of the discounts, so stale buffers take smaller steps; samples do not count.
(FLSim, by the same group, sums instead and weighs a fresh upload sqrt(2): its rate is ``eta_g / (K sqrt(2))``.)
Decisions of ours [D]: a buffer that is not full at the end of a run is dropped; buffers of the network (BatchNorm)
become the plain mean over the K devices, untouched by eta_g and momentum; the defaults K = 10, eta_g = 1, beta = 0,
exponent 1/2, no bound on tau.
"""

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from freshet.core.about import About, Range, Uploads
from freshet.core.audit import Mismatch, expect
from freshet.core.messages import Upload
from freshet.core.method import Aggregate, Discard, Method, Options, Verdict, Wait, World
from freshet.core.server import Flight, Server
from freshet.core.vectors import Vector, distance
from freshet.methods.parts.arrivals import polynomial


class FedBuffOptions(Options):
    """Hyper-parameters with the paper's symbols."""

    K: int = Field(10, ge=1, description="uploads per aggregation")
    eta_g: float = Field(1.0, gt=0, description="server learning rate")
    beta: float = Field(0.0, ge=0, lt=1, description="server momentum")
    exponent: float = Field(0.5, ge=0, description="exponent of the staleness discount (1 + tau)^-exponent")
    tau_max: int = Field(-1, ge=-1, description="discard uploads with tau beyond this (-1: never)")

    def too_stale(self, tau: int) -> bool:
        return 0 <= self.tau_max < tau


class FedBuff(Method):
    """The server's part; devices do plain SGD."""

    about = About(
        "fedbuff",
        "async",
        "FedBuff",
        "Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022",
        space={
            "K": Uploads(2, 20, whole=True),
            "eta_g": Range(0.1, 3.0, log=True),
            "exponent": Range(0.0, 1.5),
        },
    )
    Options: ClassVar[type[Options]] = FedBuffOptions
    options: FedBuffOptions

    def __init__(self, options: FedBuffOptions, world: World) -> None:
        super().__init__(options, world)
        self.m: NDArray[np.float64] | None = None
        self._empty()

    def _empty(self) -> None:
        layout = self.world.layout
        self.buffered: list[tuple[int, int, int]] = []  # (device, base, staleness) in order of arrival
        self.B: NDArray[np.float64] = np.zeros(layout.learnable)
        self.statistics: NDArray[np.float64] = np.zeros(layout.floats - layout.learnable)
        self.counters: Vector = np.zeros(layout.size - layout.floats, np.float32)

    def prejudge(self, server: Server, flight: Flight) -> Discard | None:
        s = server.staleness(flight)
        if not self.options.too_stale(s - 1):
            return None
        return Discard("too stale", {"version": server.version, "base": flight.base, "staleness": s})

    def receive(self, server: Server, upload: Upload, flight: Flight) -> Verdict:
        o, layout, u, s = self.options, self.world.layout, upload.weights, server.staleness(flight)
        n, floats = layout.learnable, layout.floats
        delta = server.store.get(flight.base)[:n].astype(np.float64) - u[:n]
        self.B += polynomial(s - 1, o.exponent) * delta
        self.statistics += u[n:floats]
        np.maximum(self.counters, u[floats:], out=self.counters)
        self.buffered.append((upload.device, flight.base, s))
        return self._flush(server) if len(self.buffered) == o.K else Wait()

    def _flush(self, server: Server) -> Aggregate:
        o, n, floats, w = self.options, self.world.layout.learnable, self.world.layout.floats, server.weights
        step = self.B / o.K
        if o.beta:
            step = self.m = step if self.m is None else o.beta * self.m + step
        new = w.copy()
        new[:n] = w[:n] - o.eta_g * step
        new[n:floats] = self.statistics / o.K
        new[floats:] = self.counters
        devices, bases, stalenesses = (list(column) for column in zip(*self.buffered, strict=True))
        discounts = [polynomial(s - 1, o.exponent) for s in stalenesses]
        weights = [discount / o.K for discount in discounts]
        record = {"base": min(bases), "staleness": max(stalenesses), "alpha": o.eta_g * sum(weights)}
        record |= {"devices": devices, "bases": bases, "stalenesses": stalenesses}
        record |= {"discounts": discounts, "weights": weights, "update_norm": distance(new[:n], w[:n])}
        self._empty()
        return Aggregate(new, record)

    def state(self) -> dict[str, Any]:
        arrays = {"B": self.B.copy(), "statistics": self.statistics.copy(), "counters": self.counters.copy()}
        momentum = {} if self.m is None else {"m": self.m}
        return {"buffered": [list(entry) for entry in self.buffered], **arrays, **momentum}

    def restore(self, state: dict[str, Any]) -> None:
        self.buffered = [(int(device), int(base), int(s)) for device, base, s in state["buffered"]]
        self.B, self.statistics, self.counters = (np.array(state[name]) for name in ("B", "statistics", "counters"))
        self.m = None if state.get("m") is None else np.array(state["m"])

    @classmethod
    def audit(cls, options: FedBuffOptions, event: dict[str, Any], memory: dict[Any, Any]) -> None:
        if event["kind"] == "discard" and not options.too_stale(event["staleness"] - 1):
            raise Mismatch(f"discarded at staleness {event['staleness']}, within tau_max")
        if event["kind"] != "aggregate":
            return
        if len(event["devices"]) != options.K:
            raise Mismatch(f"{len(event['devices'])} uploads make an aggregation, not K = {options.K}")
        columns = zip(event["devices"], event["stalenesses"], event["discounts"], event["weights"], strict=True)
        for device, s, discount, weight in columns:
            if options.too_stale(s - 1):
                raise Mismatch(f"device {device} is aggregated at staleness {s}, beyond tau_max")
            expect(f"discount of device {device}", discount, polynomial(s - 1, options.exponent))
            expect(f"weight of device {device}", weight, discount / options.K)
        expect("alpha", event["alpha"], options.eta_g * sum(event["weights"]))
