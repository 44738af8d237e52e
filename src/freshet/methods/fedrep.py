"""FedRep: a shared representation, and on every device a head of its own. The two train in turn.

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai, "Exploiting Shared Representations for Personalized Federated
Learning", ICML 2021.

The model is a representation phi (all that travels) and a head h_k that stays on device k (``model.local``; without it
the last layer). In a trip of E epochs device k gets phi^t and trains::

    h_k <- h_k - eta grad_h f_k(h_k, phi)      for E - E_phi epochs, phi fixed
    phi <- phi - eta grad_phi f_k(h_k, phi)    for the last E_phi epochs, h_k fixed

Server: FedAvg of phi. Tests on the devices (``run.evaluate_devices``) use each device's own head; a test of the global
model has the untrained head. FedAvg with ``model.local`` is FedPer, which trains both at once.

Decisions [D]: E_phi = 1, as the authors' experiments; the mean of phi has FedAvg's weights n_k, where the paper has
equal shards. A trip of fewer than E_phi + 1 epochs trains phi alone.
"""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.method import Local, LocalRule, Moves, Options
from freshet.methods.fedavg import FedAvg


class FedRepOptions(Options):
    """Hyper-parameters."""

    body_epochs: int = Field(1, ge=1, description="E_phi: last epochs of a trip, which train what travels")


class FedRep(FedAvg):
    """FedAvg's server on the representation; devices train head and representation in turn."""

    about = About(
        "fedrep",
        "sync",
        "FedRep",
        "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021",
        space={"body_epochs": Range(1, 4, whole=True)},
    )
    Options: ClassVar[type[Options]] = FedRepOptions
    options: FedRepOptions

    @classmethod
    def rule(cls, options: FedRepOptions) -> LocalRule:
        return TurnsRule(options.body_epochs)


@dataclass(frozen=True)
class TurnsRule(LocalRule):
    """First the head, then the representation."""

    needs_own_parts: ClassVar[bool] = True
    body_epochs: int

    def moves(self, local: Local) -> Moves:
        body = local.epoch > local.epochs - self.body_epochs
        return Moves(shared=body, own=not body)
