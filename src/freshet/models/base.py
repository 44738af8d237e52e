"""What all built-in networks share: encoder h(x), optional MOON projection head, dropout, classifier.

    h = encode(x)          the vector that feeds the final Linear layer, after its ReLU or pooling, before dropout
    z = features(x)        projection of h with a head, h itself without: the vector that MOON compares
    logits = classify(z)   dropout (if the network has any), then the final Linear layer
    forward(x) = classify(features(x))

The head is that of MOON (Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021):
Linear(d, d) - ReLU - Linear(d, 256). The classifier reads its 256 outputs.

The module also holds layers that several networks share, checks of network options, and ``layer_groups``.
"""

from collections.abc import Sequence
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from freshet.errors import ConfigError

HEAD_WIDTH = 256
"""Outputs of the projection head (MOON's out_dim)."""

HEAD_LIMIT = 4096
"""Widest h that gets a head. A wider Linear(d, d) would dwarf the rest of the network."""


class Contrastive(Protocol):
    """The two calls that MOON needs besides `forward`."""

    def features(self, x: Tensor) -> Tensor: ...

    def classify(self, z: Tensor) -> Tensor: ...


def has_features(module: object) -> TypeGuard[Contrastive]:
    """Whether MOON can train this module. Every other method accepts any `nn.Module`."""
    return callable(getattr(module, "features", None)) and callable(getattr(module, "classify", None))


class BuiltInModel(nn.Module):
    """Base of the built-in networks. A subclass builds its encoder, calls `add_classifier`, and defines `encode`."""

    project: nn.Module
    dropout: nn.Module
    classifier: nn.Linear

    def add_classifier(self, width: int, classes: int, *, head: bool, dropout: float = 0.0) -> None:
        """Register head and classifier behind an encoder of `width` outputs. Call it last."""
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
"""Choices of `model.norm`. GroupNorm has 2 groups and, unlike BatchNorm, no buffers."""


def norm_layers(norm: str, channels: int) -> list[nn.Module]:
    """Return the normalisation after a convolution: a list of one layer or none."""
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
    """Return convolution with bias, optional normalisation, ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding)
    return [conv, *norm_layers(norm, outputs), nn.ReLU()]


def he_initialise(module: nn.Module) -> None:
    """Set the weights of He et al. (ICCV 2015) and zero biases. With torch's default, plain SGD starts slowly."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def global_max(x: Tensor) -> Tensor:
    """Return the maximum of each channel. On a 2x2 map this equals a 2x2 max pool and flatten."""
    return torch.amax(x, dim=(2, 3))


def check_whole(key: str, value: object, low: int = 1) -> int:
    """Return the value if it is a whole number of at least `low`; an error names `key`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(key, f"{value!r} is not a whole number of at least {low}")
    return value


def check_wholes(key: str, value: object) -> tuple[int, ...]:
    """Return a tuple of whole numbers of at least 1; it may be empty."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(key, f"{value!r} is not a list of whole numbers")
    return tuple(check_whole(key, v) for v in value)


def check_rate(key: str, value: object) -> float:
    """Return a dropout rate in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ConfigError(key, f"{value!r} is not a number in [0, 1)")
    return float(value)


def check_flag(key: str, value: object) -> bool:
    """Return a bool; 0, 1 and texts are errors."""
    if not isinstance(value, bool):
        raise ConfigError(key, f"{value!r} is not true or false")
    return value


def check_image_shape(name: str, shape: Sequence[int], smallest: int) -> tuple[int, int, int]:
    """Return (channels, height, width) if each side has at least `smallest` pixels."""
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


_NORM_LAYERS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def _outputs(layer: nn.Module) -> int | None:
    """Return the output features of a convolution, linear or embedding layer; None for any other module."""
    weight = getattr(layer, "weight", None)
    if weight is None:
        return None
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag | _ConvTransposeNd):
        groups = layer.groups if isinstance(layer, _ConvTransposeNd) else 1
        return int(weight.shape[1]) * groups
    if isinstance(layer, nn.Linear | _ConvNd):
        return int(weight.shape[0])
    return None


def layer_groups(module: nn.Module) -> list[list[str]]:
    """Group all names of `named_parameters()` by layer, in registration order.

    These groups are the unit in which FedLWS shrinks a model (Shi et al., ICLR 2025). A group holds weight and bias of
    one convolution, linear or embedding layer and the affine parameters of the norm layer that directly follows it.
    That norm layer is the next registered module with parameters; its features must match the layer's outputs.
    The parameters of any other module (LSTM, attention, bare `nn.Parameter`) form one group. A shared parameter counts
    once, where it is first registered. Buffers belong to no group.
    """
    groups: list[list[str]] = []
    seen: set[int] = set()
    outputs: int | None = None
    for prefix, layer in module.named_modules():
        own = [(name, p) for name, p in layer.named_parameters(prefix, recurse=False) if id(p) not in seen]
        if not own:
            continue
        seen.update(id(p) for _, p in own)
        names = [name for name, _ in own]
        if outputs is not None and isinstance(layer, _NORM_LAYERS) and own[0][1].numel() == outputs:
            groups[-1].extend(names)
            outputs = None
        else:
            groups.append(names)
            outputs = _outputs(layer)
    return groups
