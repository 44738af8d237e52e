"""Small pieces that several networks share."""

import torch
from torch import Tensor, nn

from freshet.errors import ConfigError

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
