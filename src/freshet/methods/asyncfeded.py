"""AsyncFedED: how far the server has moved, relative to the length of an update, sets its weight and the next epochs.

Q. Wang, Q. Yang, S. He, Z. Shi, J. Chen, "AsyncFedED: Asynchronous Federated Learning with Euclidean Distance based
Adaptive Weight Aggregation", arXiv 2205.13797, 2022.

An arrival of device k from base w^b, ``Delta = u - w^b``, with the server at w^v (norms over learnable weights)::

    gamma = |w^v - w^b| / |Delta|       eta_k = lambda / (gamma + eps)       w <- w + eta_k Delta
    E_k <- E_k + floor(kappa (gammabar - gamma)), clipped to [1, E_max]

E_k, the local epochs of the device's next trip, starts at the common number. A fresh upload has gamma = 0 and the
weight lambda / eps.

Decisions [D]: the equations are those of a third-party implementation (the authors published results only), as are the
defaults lambda = 0.1, eps = 1, gammabar = 5, kappa = 0.05. Its norms include buffers, and it has no clip; here E_max
is twice the common number of epochs. floor is towards minus infinity. ``Delta = 0`` changes neither w nor E_k. Buffers
of the network are mixed with eta_k, at most 1. A lost or refused upload leaves E_k.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.admission import overflows
from freshet.core.events import Aggregated, Contribution, Event, Triggered
from freshet.core.messages import Upload
from freshet.core.method import Aggregate, LocalRule, Method, MethodContext, Options, Reject, Verdict, expect
from freshet.core.server import NOT_FINITE, ActiveTrip, Server
from freshet.core.vectors import distance, mix
from freshet.methods._shared.rebase import FreshOptions, with_fresh


class AsyncFedEDOptions(FreshOptions):
    """Hyper-parameters with the paper's symbols."""

    lambda_: float = Field(0.1, gt=0, description="lambda: weight of a fresh upload, times eps")
    eps: float = Field(1.0, gt=0, description="epsilon in the denominator of the weight")
    gamma_bar: float = Field(5.0, ge=0, description="the relative distance gamma that local epochs aim at")
    kappa: float = Field(0.05, ge=0, description="how fast local epochs follow gamma (0: they stay)")
    E_max: int | None = Field(None, ge=1, description="most local epochs (default: twice the common number)")

    def with_derived(self, context: MethodContext) -> Self:
        """Set E_max from the common number of epochs."""
        return self if self.E_max is not None else self.model_copy(update={"E_max": 2 * context.most_epochs})

    def next_epochs(self, epochs: int, gamma: float) -> int:
        """``E_k`` after an upload with this gamma."""
        moved = epochs + math.floor(self.kappa * (self.gamma_bar - gamma))
        return max(1, min(moved, self.E_max or epochs))


@dataclass
class AsyncFedEDState:
    """The local epochs of each device that was heard."""

    epochs: dict[int, int] = field(default_factory=dict)


class AsyncFedED(Method):
    """The server's part; devices do plain SGD."""

    about = About(
        "asyncfeded",
        "async",
        "AsyncFedED",
        "Wang et al., AsyncFedED, arXiv 2205.13797, 2022",
        space={
            "lambda_": Range(0.1, 3.0, log=True),
            "gamma_bar": Range(1.0, 5.0),
            "kappa": Range(0.0, 0.5),
        },
    )
    Options: ClassVar[type[Options]] = AsyncFedEDOptions
    options: AsyncFedEDOptions
    state: AsyncFedEDState

    def __init__(self, options: AsyncFedEDOptions, context: MethodContext) -> None:
        super().__init__(options.with_derived(context), context)
        self.state = AsyncFedEDState()

    def epochs(self, server: Server, device: int) -> int:
        known = self.state.epochs.get(device)
        return super().epochs(server, device) if known is None else known

    @classmethod
    def rule(cls, options: AsyncFedEDOptions) -> LocalRule:
        return with_fresh(options, LocalRule())

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        o, layout, w, u = self.options, self.context.layout, server.weights, upload.weights
        n, base = layout.learnable, server.start_of(upload)
        moved, progress = distance(w[:n], base[:n]), distance(u[:n], base[:n])
        gamma = moved / progress if progress else 0.0
        eta = o.lambda_ / (gamma + o.eps) if progress else 0.0
        new = mix(w, u, min(1.0, eta))
        with np.errstate(over="ignore"):  # a model that is not finite is refused below
            new[:n] = w[:n] + eta * (u[:n].astype(np.float64) - base[:n])
        layout.max_counters(new, w, u)
        length = distance(new[:n], w[:n])
        if overflows(new, length):
            return Reject(NOT_FINITE)
        following = o.next_epochs(trip.epochs, gamma) if progress else trip.epochs
        self.state.epochs[upload.device] = following
        numbers = {"alpha": eta, "gamma": gamma, "moved": moved, "progress": progress, "next_epochs": following}
        return Aggregate(new, [Contribution(upload.device, trip.base, server.staleness(trip), eta)], numbers, length)

    @classmethod
    def audit(cls, options: AsyncFedEDOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check gamma, eta_k, and the epochs of every trip."""
        expected, running = memory.setdefault("expected", {}), memory.setdefault("running", {})
        if isinstance(event, Triggered):
            expect("epochs", event.epochs, expected.get(event.device, event.epochs))
            running[event.device] = event.epochs
        elif isinstance(event, Aggregated):
            (part,), n = event.contributions, event.numbers
            expect("gamma", n["gamma"], n["moved"] / n["progress"] if n["progress"] else 0.0)
            expect("alpha", n["alpha"], options.lambda_ / (n["gamma"] + options.eps) if n["progress"] else 0.0)
            expect("weight", part.weight, n["alpha"])
            epochs = running[part.device]
            following = options.next_epochs(epochs, n["gamma"]) if n["progress"] else epochs
            expect("next_epochs", n["next_epochs"], following)
            expected[part.device] = n["next_epochs"]
