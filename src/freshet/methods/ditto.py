"""Ditto: FedAvg, and on every device a model of its own that is held near the global one.

T. Li, S. Hu, A. Beirami, V. Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021
(algorithm 1 with FedAvg as the global solver).

Device k gets w^t, trains it for the server as in FedAvg, and then trains its own model v_k, which never leaves it::

    v_k <- v_k - eta (grad f_k(v_k; B) + lambda (v_k - w^t))        for every mini-batch B of ``personal_epochs`` epochs

A larger lambda (``pull``) holds v_k closer to the global model; 0 is training alone. Tests on the devices
(``run.evaluate_devices``) use v_k, or the global model where a device has none yet. Server: FedAvg.

Decisions [D]: v_k starts as the global model of the device's first trip; its steps are plain SGD at the trip's learning
rate; lambda = 0.1 (in the authors' experiments each device chooses among 0.1, 1 and 2, under strong attacks among 0.05,
0.1 and 0.2). Personal epochs take no virtual time, because the device can do them after its upload.
"""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.method import Local, LocalRule, Memory, Options
from freshet.core.vectors import Vector
from freshet.methods.fedavg import FedAvg

#: The key of a device's memory for v_k.
PERSONAL = "personal"


class DittoOptions(Options):
    """Hyper-parameters; ``pull`` is the paper's lambda."""

    pull: float = Field(0.1, ge=0, description="lambda, which draws a device's own model to the global one (0: alone)")
    personal_epochs: int = Field(1, ge=1, description="epochs of a device's own model in every trip")


class Ditto(FedAvg):
    """FedAvg's server; every device also has a model of its own."""

    about = About(
        "ditto",
        "sync",
        "Ditto",
        "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021",
        space={"pull": Range(0.01, 2.0, log=True)},
    )
    Options: ClassVar[type[Options]] = DittoOptions
    options: DittoOptions

    @classmethod
    def rule(cls, options: DittoOptions) -> LocalRule:
        return PersonalRule(options.pull, options.personal_epochs)


@dataclass(frozen=True)
class PersonalRule(LocalRule):
    """Plain training for the server; at the end of a trip, the training of the device's own model."""

    remembers: ClassVar[bool] = True
    personalises: ClassVar[bool] = True
    pull: float
    epochs: int

    def personal_model(self, memory: Memory, weights: Vector) -> Vector:
        own: Vector = memory.get(PERSONAL, weights)
        return own

    def finish(self, local: Local) -> None:
        import torch

        trained, lr = local.snapshot(), local.assignment.lr
        local.set_weights(self.personal_model(local.memory, local.assignment.weights))
        own = local.weights[: local.learnable]
        for _ in range(self.epochs):
            for _ in local.further_pass():
                with torch.no_grad():
                    local.gradient.add_(own - local.base, alpha=self.pull)
                    own.sub_(local.gradient, alpha=lr)
        local.memory[PERSONAL] = local.snapshot()
        local.set_weights(trained)
