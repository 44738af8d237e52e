"""``nn.Sequential`` that finds consecutive layers which train faster as one operation for autograd."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from freshet.training.fast.fused_conv_pool import ConvPoolFunction, Stage
from freshet.training.fast.fused_conv_relu import ConvReluFunction, ConvSettings
from freshet.training.fast.layers import (
    FusedPool,
    PairedConv,
    as_pair,
    has_hooks,
    is_channels_last,
    is_plain,
    is_supported,
)

MAX_FEW_CHANNELS, MIN_KERNEL_ENTRIES, MIN_PRODUCTS = 16, 9, 50_000
"""``fused_conv_pool`` pays with at most this many channels (torch does not fill a vector with them), at least this many
entries per kernel, and at least this many products per image."""

MIN_ENTRIES = 250_000
"""Entries of the images between convolutions from which ``fused_conv_relu`` pays."""

MAX_REMEMBERED = 1024
"""Search results that a sequence remembers, one per position and kind of input."""


class FusedSequential(nn.Sequential):
    """Layers in a row, some of them as one operation.

    Convolutions with few filters, ReLU and the pools after them are one operation (``fused_conv_pool``). Other
    convolutions with a ReLU after each are another (``fused_conv_relu``). Other max pools compute the ReLU before or
    after them: ``max(relu(x)) = relu(max(x))``, bit for bit and in the gradient too, and there are fewer maxima than
    entries.
    """

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self._modules.values())
        place = 0
        while place < len(layers):
            run = self._fused_run(layers[place:], x) if isinstance(layers[place], nn.Conv2d) else None
            if run is not None:
                x, place = run(x), place + len(run.layers)
                continue
            pool = _pool_with_relu(layers, place)
            x = layers[place](x) if pool is None else pool.pool(x, rectify=True)
            place += 1 if pool is None else 2
        return x

    def _fused_run(self, layers: list[nn.Module], x: Tensor) -> "FusedRun | None":
        """The run at the start of these layers, if any. The search runs once per position and kind of input."""
        if not is_supported(x):
            return None
        searches: dict[tuple[int, ...], Search] = vars(self).setdefault("_searches", {})
        key = (len(layers), *x.shape, *x.stride())
        search = searches.get(key)
        if search is None or search.layers != layers:
            if len(searches) >= MAX_REMEMBERED:
                searches.clear()
            search = searches[key] = Search(layers, find_run(layers, x))
        if search.run is None:
            return None
        for place, layer in enumerate(search.run.layers):
            if has_hooks(layer):  # hooks come and go, so this shorter run is not remembered
                return find_run(layers[:place], x)
        return search.run


class ConvPoolRun(NamedTuple):
    """Layers that ``fused_conv_pool`` computes as one: convolutions with ReLU and pooling."""

    layers: list[nn.Module]
    stages: tuple[Stage, ...]

    @staticmethod
    def find(layers: list[nn.Module], shape: tuple[int, ...]) -> "ConvPoolRun | None":
        """The run at the start of these layers for images of this shape, if it is faster than torch."""
        stages, products, place = list[Stage](), 0, 0
        while (found := _stage(layers[place : place + 3], shape)) is not None:
            conv, stage, shape = found
            products += math.prod(shape) * math.prod(stage.pool) * conv.in_channels * math.prod(conv.kernel_size)
            stages.append(stage)
            place += 3
        return ConvPoolRun(layers[:place], tuple(stages)) if products >= MIN_PRODUCTS else None

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = ConvPoolFunction.apply(self.stages, x, *_parameters(self.layers))  # type: ignore[no-untyped-call]
        return y


class ConvReluRun(NamedTuple):
    """Layers that ``fused_conv_relu`` computes as one: convolutions with ReLU, and ``nn.Flatten`` if ``flat``."""

    layers: list[nn.Module]
    settings: tuple[ConvSettings, ...]
    flat: bool

    @staticmethod
    def find(layers: list[nn.Module], x: Tensor) -> "ConvReluRun | None":
        """The run at the start of these layers, if its outputs are large."""
        settings, place, entries, shape = list[ConvSettings](), 0, 0, tuple(x.shape[1:])
        while is_channels_last(x) and (found := _settings(layers[place : place + 3], shape)) is not None:
            each, shape = found
            entries += len(x) * math.prod(shape)
            settings.append(each)
            place += 2
        flat = place < len(layers) and _is_flatten(layers[place])
        return ConvReluRun(layers[: place + flat], tuple(settings), flat) if entries >= MIN_ENTRIES else None

    def __call__(self, x: Tensor) -> Tensor:
        parameters = _parameters(self.layers)
        y: Tensor = ConvReluFunction.apply(self.settings, self.flat, x, *parameters)  # type: ignore[no-untyped-call]
        return y


FusedRun = ConvPoolRun | ConvReluRun


class Search(NamedTuple):
    """The result of a search in these layers. Most searches find nothing, and that is remembered, too."""

    layers: list[nn.Module]
    run: FusedRun | None


def find_run(layers: list[nn.Module], x: Tensor) -> FusedRun | None:
    """The run at the start of these layers for such images, whether or not its layers have hooks."""
    return ConvPoolRun.find(layers, tuple(x.shape[1:])) or ConvReluRun.find(layers, x)


def _parameters(layers: list[nn.Module]) -> list[Tensor | None]:
    """Weight and bias of each convolution in turn."""
    return [parameter for conv in layers if isinstance(conv, nn.Conv2d) for parameter in (conv.weight, conv.bias)]


def _stage(layers: list[nn.Module], shape: tuple[int, ...]) -> tuple[nn.Conv2d, Stage, tuple[int, int, int]] | None:
    """A plain convolution with few channels, then ReLU and a pool in either order; with its stage and output shape."""
    conv, follow = layers[0] if layers else None, {type(layer): layer for layer in layers[1:]}
    pool = follow.get(FusedPool)
    if not (type(conv) in (nn.Conv2d, PairedConv) and isinstance(conv, nn.Conv2d) and isinstance(pool, FusedPool)):
        return None
    if nn.ReLU not in follow or not is_plain(conv) or conv.padding[0] != conv.padding[1]:
        return None
    few = max(conv.in_channels, conv.out_channels) <= MAX_FEW_CHANNELS
    if not few or math.prod(conv.kernel_size) < MIN_KERNEL_ENTRIES:
        return None
    if conv.weight.dtype != torch.float32 or shape[0] != conv.in_channels:
        return None
    stage = Stage(int(conv.padding[0]), as_pair(pool.kernel_size) or (0, 0), rectify=True)
    outcome = stage.shape(shape, conv.weight)
    return (conv, stage, outcome) if min(outcome) > 0 else None


def _settings(layers: list[nn.Module], shape: tuple[int, ...]) -> tuple[ConvSettings, tuple[int, int, int]] | None:
    """The settings of a convolution with a ReLU after it, and its output shape; None if a pool computes that ReLU."""
    kinds, conv = [type(layer) for layer in layers], layers[0] if layers else None
    if kinds[:2] != [nn.Conv2d, nn.ReLU] or FusedPool in kinds:
        return None
    assert isinstance(conv, nn.Conv2d)
    stride, padding, dilation = as_pair(conv.stride), as_pair(conv.padding), as_pair(conv.dilation)
    if not (stride and padding and dilation and conv.padding_mode == "zeros"):
        return None
    sides = zip(shape[1:], conv.kernel_size, stride, padding, dilation, strict=True)
    rows, columns = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)
    fits = min(rows, columns) > 0 and shape[0] == conv.in_channels and conv.weight.dtype == torch.float32
    return (ConvSettings(stride, padding, dilation, conv.groups), (conv.out_channels, rows, columns)) if fits else None


def _is_flatten(layer: nn.Module) -> bool:
    """Whether a layer makes one row of each sample."""
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)


def _pool_with_relu(layers: list[nn.Module], place: int) -> FusedPool | None:
    """The pool of a pool and a ReLU at this place, in either order, unless one of them has hooks."""
    first, second = layers[place], layers[place + 1] if place + 1 < len(layers) else None
    if type(first) is FusedPool and type(second) is nn.ReLU:
        pool, relu = first, second
    elif type(first) is nn.ReLU and type(second) is FusedPool and not (first.inplace and place == 0):
        pool, relu = second, first  # at the first place, an in-place ReLU changes the caller's tensor
    else:
        return None
    return None if has_hooks(pool) or has_hooks(relu) else pool
