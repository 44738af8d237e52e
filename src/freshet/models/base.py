"""What every network here shares: encoder h(x), optional MOON projection head, dropout, classifier.

    h = encode(x)          the vector that feeds the final Linear layer, after its ReLU or pooling, before dropout
    z = features(x)        projection of h with a head, h itself without: the vector that MOON compares
    logits = classify(z)   dropout (if the network has any), then the final Linear layer
    forward(x) = classify(features(x))

The head is the universal one of MOON (Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021):
Linear(d, d) - ReLU - Linear(d, 256), and the classifier reads its 256 outputs.

Small pieces that several networks share.

Checks of a network's own options; each failure names the key as the user writes it in a configuration.
"""

from collections.abc import Sequence
from typing import Protocol, TypeGuard

import torch
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


class BuiltInModel(nn.Module):
    """Base of the built-in networks: a subclass builds its encoder, calls `finish`, and defines `encode`."""

    project: nn.Module
    dropout: nn.Module
    classifier: nn.Linear

    def add_classifier(self, width: int, classes: int, *, head: bool, dropout: float = 0.0) -> None:
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


NORMS = ("batch", "group", "none")
"""Choices of `model.norm`; GroupNorm always has 2 groups and, unlike BatchNorm, no buffers."""


def norm_layers(norm: str, channels: int) -> list[nn.Module]:
    """The normalisation after a convolution, as a list of one layer or none."""
    if norm == "none":
        return []
    if norm == "batch":
        return [nn.BatchNorm2d(channels)]
    if norm == "group":
        return [nn.GroupNorm(2, channels)]
    raise ConfigError("model.norm", f"{norm!r} is not known; choose one of {', '.join(NORMS)}")


def conv_block(
    inputs: int, outputs: int, kernel: int, norm: str, *, stride: int = 1, padding: int = 0
) -> list[nn.Module]:
    """Convolution with bias, normalisation if wanted, ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding)
    return [conv, *norm_layers(norm, outputs), nn.ReLU()]


def he_initialise(module: nn.Module) -> None:
    """Weights of He et al. (ICCV 2015), biases zero: with torch's own, plain SGD is slow to start."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def global_max(x: Tensor) -> Tensor:
    """Largest value of each channel; on a 2x2 map this is the usual last 2x2 max pool and flatten."""
    return torch.amax(x, dim=(2, 3))


def check_whole(key: str, value: object, low: int = 1) -> int:
    """A whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(key, f"{value!r} is not a whole number of at least {low}")
    return value


def check_wholes(key: str, value: object) -> tuple[int, ...]:
    """A list of whole numbers of at least 1; it may be empty."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(key, f"{value!r} is not a list of whole numbers")
    return tuple(check_whole(key, v) for v in value)


def check_rate(key: str, value: object) -> float:
    """A dropout rate: a number from 0 up to, but not including, 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ConfigError(key, f"{value!r} is not a number in [0, 1)")
    return float(value)


def check_flag(key: str, value: object) -> bool:
    """True or false, nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise ConfigError(key, f"{value!r} is not true or false")
    return value


def check_image_shape(name: str, shape: Sequence[int], smallest: int) -> tuple[int, int, int]:
    """(channels, height, width), each side at least `smallest` pixels."""
    if len(shape) != 3:
        raise ConfigError(
            "model.name", f"{name} reads images (channels, height, width), but one sample has shape {tuple(shape)}"
        )
    channels, height, width = shape
    if min(height, width) < smallest:
        raise ConfigError(
            "model.name", f"{name} needs images of at least {smallest}x{smallest} pixels, not {height}x{width}"
        )
    return channels, height, width
