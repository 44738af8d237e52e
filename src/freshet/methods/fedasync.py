"""FedAsync: every arrival is mixed into the global model at once; stale uploads count less.

C. Xie, S. Koyejo, I. Gupta, "Asynchronous Federated Optimization", arXiv 1903.03934, 2019; OPT workshop 2020.

Device, from base ``w^b``: minimise ``f_k(u) + rho / 2 |u - w^b|^2``, per mini-batch::

    u <- u - eta (grad f_k(u; B) + lambda_wd u + rho (u - w^b))

Server, for an upload of staleness tau = s - 1 (0 when fresh)::

    alpha_tau = alpha s(tau)             w <- (1 - alpha_tau) w + alpha_tau u_k
    constant    s(tau) = 1
    polynomial  s(tau) = (tau + 1)^-a
    hinge       s(tau) = 1 if tau <= b else 1 / (a (tau - b) + 1)

alpha_tau is a function of tau alone (a public re-implementation multiplies its alpha down at every arrival).
Decisions [D]: weight decay is taken at u, not at the pulled-back u as in the authors' script. Defaults alpha = 0.6,
polynomial with a = 0.5, rho = 0.005. ``halve_after`` is the script's schedule: alpha / 2 after a given number of
updates (there: update 800 of 2000). It is off by default.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.events import Aggregated, Event
from freshet.core.messages import Upload
from freshet.core.method import LocalRule, Method, Options, Verdict, expect
from freshet.core.server import ActiveTrip, Server
from freshet.methods._shared.asynchronous import hinge_discount, mix_upload, polynomial_discount
from freshet.methods._shared.rebase import FreshOptions, with_fresh
from freshet.methods.fedprox import proximal


class FedAsyncOptions(FreshOptions):
    """Hyper-parameters with the paper's symbols."""

    alpha: float = Field(0.6, gt=0, le=1, description="weight of a fresh upload")
    staleness: Literal["constant", "polynomial", "hinge"] = Field("polynomial", description="shape of s(tau)")
    poly_a: float = Field(0.5, ge=0, description="polynomial: exponent a of (tau + 1)^-a")
    hinge_a: float = Field(10.0, gt=0, description="hinge: slope a beyond b")
    hinge_b: float = Field(4.0, ge=0, description="hinge: largest staleness b without a discount")
    rho: float = Field(0.005, ge=0, description="proximal term of the local loss (0: none)")
    halve_after: int = Field(0, ge=0, description="number of updates after which alpha is halved (0: never)")

    def discount(self, tau: int) -> float:
        """``s(tau)``."""
        if self.staleness == "polynomial":
            return polynomial_discount(tau, self.poly_a)
        return hinge_discount(tau, self.hinge_a, self.hinge_b) if self.staleness == "hinge" else 1.0

    def weight(self, discount: float, updates: int) -> float:
        """``alpha_tau`` with this ``s(tau)``, after ``updates`` updates of the global model."""
        halved = self.halve_after and updates >= self.halve_after
        return self.alpha * (0.5 if halved else 1.0) * discount


class FedAsync(Method):
    """The server's part."""

    about = About(
        "fedasync",
        "async",
        "FedAsync",
        "Xie, Koyejo, Gupta, Asynchronous Federated Optimization, 2019",
        space={
            "alpha": Range(0.05, 1.0, log=True),
            "poly_a": Range(0.0, 1.5),
            "rho": Range(1e-4, 0.1, log=True),
        },
    )
    Options: ClassVar[type[Options]] = FedAsyncOptions
    options: FedAsyncOptions

    @classmethod
    def rule(cls, options: FedAsyncOptions) -> LocalRule:
        return with_fresh(options, proximal(options.rho))

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        discount = self.options.discount(server.staleness(trip) - 1)
        alpha = self.options.weight(discount, server.version - 1)
        return mix_upload(server, upload, trip, alpha, discount=discount)

    @classmethod
    def audit(cls, options: FedAsyncOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        if isinstance(event, Aggregated):
            (part,) = event.contributions
            discount = options.discount(part.staleness - 1)
            expect("discount", event.numbers["discount"], discount)
            expect("alpha", event.numbers["alpha"], options.weight(discount, event.version - 1))
            expect("weight", part.weight, event.numbers["alpha"])
