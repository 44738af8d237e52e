"""What every network here shares: encoder h(x), optional MOON projection head, dropout, classifier.

    h = encode(x)          the vector that feeds the final Linear layer, after its ReLU or pooling, before dropout
    z = features(x)        projection of h with a head, h itself without: the vector that MOON compares
    logits = classify(z)   dropout (if the network has any), then the final Linear layer
    forward(x) = classify(features(x))

The head is the universal one of MOON (Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021):
Linear(d, d) - ReLU - Linear(d, 256), and the classifier reads its 256 outputs.
"""

from typing import Protocol, TypeGuard

from torch import Tensor, nn

from freshet.errors import ConfigError

HEAD_WIDTH = 256
"""Outputs of the projection head (MOON's out_dim)."""

HEAD_LIMIT = 4096
"""Widest h that still gets a head: Linear(d, d) would otherwise dwarf the network it serves."""


class Contrastive(Protocol):
    """The two extra calls that MOON needs from a network."""

    def features(self, x: Tensor) -> Tensor: ...

    def classify(self, z: Tensor) -> Tensor: ...


def has_features(module: object) -> TypeGuard[Contrastive]:
    """Whether MOON can train this module; every other method takes any `nn.Module`."""
    return callable(getattr(module, "features", None)) and callable(getattr(module, "classify", None))


class Network(nn.Module):
    """Base of the built-in networks: a subclass builds its encoder, calls `finish`, and defines `encode`."""

    project: nn.Module
    dropout: nn.Module
    classifier: nn.Linear

    def finish(self, width: int, classes: int, *, head: bool, dropout: float = 0.0) -> None:
        """Register head and classifier behind an encoder of `width` outputs (last, so that they come last in order)."""
        if head and width > HEAD_LIMIT:
            raise ConfigError(
                "model.head",
                f"a projection head on {width} features would add {width * width / 1e6:,.0f} million parameters; "
                "use head = false, or an option of the network that narrows its last layer",
            )
        if head:
            self.project = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, HEAD_WIDTH))
        else:
            self.project = nn.Identity()
        self.dropout = nn.Dropout(dropout) if dropout > 0.0 else nn.Identity()
        self.classifier = nn.Linear(HEAD_WIDTH if head else width, classes)

    def encode(self, x: Tensor) -> Tensor:
        """h(x), shape (batch, d)."""
        raise NotImplementedError

    def features(self, x: Tensor) -> Tensor:
        """z(x), the vector that MOON compares."""
        z: Tensor = self.project(self.encode(x))
        return z

    def classify(self, z: Tensor) -> Tensor:
        """Logits of z."""
        logits: Tensor = self.classifier(self.dropout(z))
        return logits

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))
