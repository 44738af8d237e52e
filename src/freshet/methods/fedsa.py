"""FedSA [R]: FedAsync with local epochs chosen per device from its expected staleness, in two stages.

M. Chen, B. Mao, T. Ma, "FedSA: A staleness-aware asynchronous Federated Learning algorithm with non-IID data",
Future Generation Computer Systems 120, 2021. **Reconstructed [R]**: the paper's formulas are not accessible to us.
Secondary texts say: asynchronous; a first stage with many local epochs, then fewer, set per device from its
staleness; control of the discrepancy between global and delayed models. All formulas below are ours ("FedSA-R"),
and a result must carry the mark [R] in every table. (Not Ma et al.'s *semi-asynchronous* FedSA of 2021, nor
FedSA-LoRA.)

Epochs, fixed when the trip starts, v = t - 1 updates so far::

    E_k = E_1                                                           while v < V_1
    E_k = max(1, floor(E_2 min(1, (1 + taubar) / (1 + tauhat_k))))      afterwards

tauhat_k is the device's estimate (0 at first), taubar the mean over devices that have reported. Device: FedAsync's
proximal problem. Arrival, tau = s - 1::

    tauhat_k <- tauhat_k / 2 + tau / 2      alpha_tau = alpha (1 + tau)^-a      w <- (1 - alpha_tau) w + alpha_tau u_k

E_2 is the common number of epochs (``training.epochs``). V_1 is 10 % of the update budget: the uploads that the run
expects at the common number of epochs, from its rounds, or from its time, fleet and trigger
(``MethodContext.uploads``; config.toml records the number). Stage one stretches the time axis by E_1 / E_2, so report a
run with ``stage1_updates = 0`` as well.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.events import Aggregated, Event, Triggered
from freshet.core.messages import Upload
from freshet.core.method import Aggregate, LocalRule, Method, MethodContext, Options, Verdict, expect
from freshet.core.server import ActiveTrip, Server
from freshet.methods._shared.asynchronous import mix_upload, polynomial_discount
from freshet.methods._shared.rebase import FreshOptions, with_fresh
from freshet.methods.fedprox import proximal


class FedSAOptions(FreshOptions):
    """Hyper-parameters of the reconstruction."""

    alpha: float = Field(0.6, gt=0, le=1, description="weight of a fresh upload")
    a: float = Field(0.5, ge=0, description="exponent of the staleness discount (1 + tau)^-a")
    rho: float = Field(0.005, ge=0, description="proximal term of the local loss (0: none)")
    stage1_epochs: int = Field(20, ge=1, description="E_1: local epochs in the first stage")
    stage1_updates: int | None = Field(
        None, ge=0, description="V_1: updates in the first stage (0: no first stage; default: 10 % of those expected)"
    )

    def with_derived(self, context: MethodContext) -> Self:
        """Set V_1 from the uploads that the run expects."""
        if self.stage1_updates is not None:
            return self
        return self.model_copy(update={"stage1_updates": round(0.1 * context.expected_uploads)})


def staged_epochs(options: FedSAOptions, updates: int, common: int, estimates: dict[int, float], device: int) -> int:
    """``E_k`` for a trip that starts now."""
    if updates < (options.stage1_updates or 0):
        return options.stage1_epochs
    mean = sum(estimates.values()) / len(estimates) if estimates else 0.0
    return max(1, math.floor(common * min(1.0, (1.0 + mean) / (1.0 + estimates.get(device, 0.0)))))


@dataclass
class FedSAState:
    """Each device's smoothed staleness."""

    tau: dict[int, float] = field(default_factory=dict)


class FedSA(Method):
    """The server's part."""

    about = About(
        "fedsa",
        "async",
        "FedSA",
        "Chen, Mao, Ma, FedSA, FGCS 120, 2021",
        reconstructed=True,
        space={
            "alpha": Range(0.05, 1.0, log=True),
            "a": Range(0.0, 1.5),
            "stage1_epochs": Range(1, 20, whole=True),
            "rho": Range(1e-4, 0.1, log=True),
        },
    )
    Options: ClassVar[type[Options]] = FedSAOptions
    options: FedSAOptions
    state: FedSAState

    def __init__(self, options: FedSAOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.state = FedSAState()

    @classmethod
    def rule(cls, options: FedSAOptions) -> LocalRule:
        return with_fresh(options, proximal(options.rho))

    def epochs(self, server: Server, device: int) -> int:
        return staged_epochs(self.options, server.version - 1, self.context.epochs, self.state.tau, device)

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        tau = server.staleness(trip) - 1
        estimate = 0.5 * self.state.tau.get(upload.device, 0.0) + 0.5 * tau
        alpha = self.options.alpha * polynomial_discount(tau, self.options.a)
        numbers = {"epochs": trip.epochs, "common_epochs": self.context.epochs, "estimate": estimate}
        verdict = mix_upload(server, upload, trip, alpha, **numbers)
        if isinstance(verdict, Aggregate):
            self.state.tau[upload.device] = estimate
        return verdict

    @classmethod
    def audit(cls, options: FedSAOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check alpha, each estimate's history, and each trip's epochs (from the estimates at its start)."""
        estimates, trips = memory.setdefault("estimates", {}), memory.setdefault("trips", {})
        if isinstance(event, Triggered):
            trips[event.device] = (event.epochs, event.version - 1, dict(estimates))
        elif isinstance(event, Aggregated):
            (part,), n = event.contributions, event.numbers
            epochs, updates, before = trips[part.device]
            expect("epochs", n["epochs"], epochs)
            expect("epochs", epochs, staged_epochs(options, updates, n["common_epochs"], before, part.device))
            tau = part.staleness - 1
            expect("estimate", n["estimate"], 0.5 * estimates.get(part.device, 0.0) + 0.5 * tau)
            expect("alpha", n["alpha"], options.alpha * polynomial_discount(tau, options.a))
            expect("weight", part.weight, n["alpha"])
            estimates[part.device] = n["estimate"]
