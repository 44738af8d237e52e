"""MOON: FedAvg with a loss that draws features towards the global model's and away from the device's previous ones.

Q. Li, B. He, D. Song, "Model-Contrastive Federated Learning", CVPR 2021.

Device, with z(.; x) the network's ``features`` (the projection with a head, the last hidden vector without)::

    l_con = -log( e^(cos(z, z_g) / T) / (e^(cos(z, z_g) / T) + e^(cos(z, z_p) / T)) )      loss = CE + mu l_con

z comes from the model in training, z_g from the global model w^t, z_p from the model that this device last trained (one
previous model, the authors' default). z_g and z_p are computed in evaluation mode and without gradient. Server: FedAvg.

The authors' first round has no previous model, so l_con = 0. Decisions [D]: l_con = 0 until *this device* has a
previous model (their code compares with its untrained initialisation); mu = 1. The head is a property of the model
(``model.head``), the same for every method of a comparison.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.method import Local, LocalRule, Options
from freshet.errors import ConfigError
from freshet.methods.fedavg import FedAvg

if TYPE_CHECKING:
    from torch import Tensor, nn


class MOONOptions(Options):
    """Hyper-parameters with the paper's symbols."""

    mu: float = Field(1.0, ge=0, description="weight of the contrastive loss (0: FedAvg)")
    T: float = Field(0.5, gt=0, description="temperature of the contrastive loss")


class MOON(FedAvg):
    """FedAvg's server; the device's rule differs."""

    about = About(
        "moon",
        "sync",
        "MOON",
        "Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021",
        space={"mu": Range(0.1, 10.0, log=True), "T": Range(0.1, 1.0)},
    )
    Options: ClassVar[type[Options]] = MOONOptions
    options: MOONOptions

    @classmethod
    def rule(cls, options: MOONOptions) -> LocalRule:
        return ContrastiveRule(options.mu, options.T) if options.mu else LocalRule()


def contrastive_loss(z: "Tensor", z_g: "Tensor", z_p: "Tensor", T: float) -> "Tensor":
    """``l_con``, mean over the batch: softmax cross-entropy on two logits; the first is the target."""
    import torch
    from torch.nn.functional import cosine_similarity, cross_entropy

    z, z_g, z_p = (vectors.flatten(0, -2) for vectors in (z, z_g, z_p))  # one row per sample, or per token of a sample
    logits = torch.stack([cosine_similarity(z, z_g), cosine_similarity(z, z_p)], dim=1) / T
    return cross_entropy(logits, torch.zeros(len(z), dtype=torch.long, device=z.device))


@dataclass(frozen=True)
class ContrastiveRule(LocalRule):
    """The device's part: the contrastive loss, and in memory the device's last model."""

    remembers: ClassVar[bool] = True
    mu: float
    T: float

    def check(self, module: "nn.Module") -> None:
        from freshet.models import has_features

        if not has_features(module):
            problem = f"MOON needs a module with features(x) and classify(z), which {type(module).__name__} has not"
            raise ConfigError("model.name", problem)

    def begin(self, local: Local) -> None:
        if "previous" in local.memory:
            local.scratch["global"] = local.frozen_features(local.snapshot())
            local.scratch["previous"] = local.frozen_features(local.memory["previous"])

    def loss(self, local: Local, x: Any, y: Any) -> "Tensor":
        from freshet.models import has_features

        if "previous" not in local.scratch:
            return super().loss(local, x, y)
        z_g, z_p = local.scratch["global"](x), local.scratch["previous"](x)
        network = local.model
        assert has_features(network)
        z = network.features(x)
        return local.task.mean_loss(network.classify(z), y) + self.mu * contrastive_loss(z, z_g, z_p, self.T)

    def finish(self, local: Local) -> None:
        local.memory["previous"] = local.snapshot()
