"""Layers in a row that train faster together: several of torch's layers as one operation for autograd."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from freshet.training.convolving import Convolved, Stage
from freshet.training.layers import FusedPool, PairedConv, is_fast, is_ours, is_plain, is_watched, pair
from freshet.training.rectifying import Rectified, Setting

FEW, LEAST, ENOUGH = 16, 9, 50_000
"""Channels with which torch does not fill the processor's vectors; entries of a kernel, and products per image in a row
of convolutions, that make our own way pay."""

LARGE = 250_000
"""Entries of images between convolutions that make it pay to spare a pass over them."""

REMEMBERED = 64
"""Places and shapes of images of which a sequence remembers what can be taken together there."""


class FusedSequential(nn.Sequential):
    """Layers in a row, where convolutions with few filters and the pools after them are one operation (``convolving``),
    others and the ReLU between them another (``rectifying``), and other max pools do the ReLU before or after them.

    ``max(relu(x)) = relu(max(x))``, bit for bit and in the gradient too, and there are fewer maxima than entries.
    """

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self._modules.values())
        place = 0
        while place < len(layers):
            run = self._run(layers, place, x)
            if run is not None:
                x, place = run(x), place + len(run.layers)
                continue
            pool = _couple(layers, place)
            x = layers[place](x) if pool is None else pool.pooled(x, rectify=True)
            place += 1 if pool is None else 2
        return x

    def _run(self, layers: list[nn.Module], place: int, x: Tensor) -> "Run | Wide | None":
        """The run that begins at this place; one found before for such images, as long as its layers are the same."""
        if not (isinstance(layers[place], nn.Conv2d) and is_ours(x)):
            return None
        known: dict[tuple[int, ...], Run | Wide] = vars(self).setdefault("_runs", {})
        key = (place, *x.shape, *x.stride())
        run = known.get(key)
        if run is None or run.layers != layers[place : place + len(run.layers)] or any(map(is_watched, run.layers)):
            run = Run.find(layers[place:], tuple(x.shape[1:])) or Wide.find(layers[place:], x)
            if len(known) >= REMEMBERED:
                known.clear()
            if run is not None:
                known[key] = run
        return run


class Run(NamedTuple):
    """Layers in a row that ``convolving`` takes as one: convolutions, and what becomes of their images."""

    layers: list[nn.Module]
    stages: tuple[Stage, ...]

    @staticmethod
    def find(layers: list[nn.Module], shape: tuple[int, ...]) -> "Run | None":
        """The run at the beginning of these layers for images of this shape, if ``convolving`` is good at it."""
        stages, products, place = list[Stage](), 0, 0
        while (found := _stage(layers[place : place + 3], shape)) is not None:
            conv, stage, shape = found
            products += math.prod(shape) * math.prod(stage.pool) * conv.in_channels * math.prod(conv.kernel_size)
            stages.append(stage)
            place += 3
        return Run(layers[:place], tuple(stages)) if products >= ENOUGH else None

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = Convolved.apply(self.stages, x, *_parameters(self.layers))  # type: ignore[no-untyped-call]
        return y


class Wide(NamedTuple):
    """Convolutions with a ReLU after each, and perhaps a ``Flatten``, that ``rectifying`` takes as one."""

    layers: list[nn.Module]
    settings: tuple[Setting, ...]
    flat: bool

    @staticmethod
    def find(layers: list[nn.Module], x: Tensor) -> "Wide | None":
        """Those at the beginning of these layers, if what comes out of them is large."""
        settings, place, entries, shape = list[Setting](), 0, 0, tuple(x.shape[1:])
        while is_fast(x) and (found := _setting(layers[place : place + 3], shape)) is not None:
            setting, shape = found
            entries += len(x) * math.prod(shape)
            settings.append(setting)
            place += 2
        flat = place < len(layers) and _is_flatten(layers[place])
        return Wide(layers[: place + flat], tuple(settings), flat) if entries >= LARGE else None

    def __call__(self, x: Tensor) -> Tensor:
        parameters = _parameters(self.layers)
        y: Tensor = Rectified.apply(self.settings, self.flat, x, *parameters)  # type: ignore[no-untyped-call]
        return y


def _parameters(layers: list[nn.Module]) -> list[Tensor | None]:
    """Weights and biases of the convolutions among these layers, in turn."""
    return [parameter for conv in layers if isinstance(conv, nn.Conv2d) for parameter in (conv.weight, conv.bias)]


def _setting(layers: list[nn.Module], shape: tuple[int, ...]) -> tuple[Setting, tuple[int, int, int]] | None:
    """That of a convolution with a ReLU after it which no pool wants to take along, for images of this shape; and the
    shape of what comes out."""
    kinds, conv = [type(layer) for layer in layers], layers[0] if layers else None
    if kinds[:2] != [nn.Conv2d, nn.ReLU] or FusedPool in kinds or any(map(is_watched, layers[:2])):
        return None
    assert isinstance(conv, nn.Conv2d)
    stride, padding, dilation = pair(conv.stride), pair(conv.padding), pair(conv.dilation)
    if not (stride and padding and dilation and conv.padding_mode == "zeros"):
        return None
    sides = zip(shape[1:], conv.kernel_size, stride, padding, dilation, strict=True)
    rows, columns = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)
    fits = min(rows, columns) > 0 and shape[0] == conv.in_channels and conv.weight.dtype == torch.float32
    return (Setting(stride, padding, dilation, conv.groups), (conv.out_channels, rows, columns)) if fits else None


def _is_flatten(layer: nn.Module) -> bool:
    """Whether a layer makes one row of every sample and nobody watches."""
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1) and not is_watched(layer)


def _stage(layers: list[nn.Module], shape: tuple[int, ...]) -> tuple[nn.Conv2d, Stage, tuple[int, int, int]] | None:
    """A plain convolution with few channels, ReLU and a pool, in any order, for images of this shape; and the shape of
    what comes out."""
    conv, follow = layers[0] if layers else None, {type(layer): layer for layer in layers[1:]}
    pool = follow.get(FusedPool)
    if not (type(conv) in (nn.Conv2d, PairedConv) and isinstance(conv, nn.Conv2d) and isinstance(pool, FusedPool)):
        return None
    if nn.ReLU not in follow or any(is_watched(layer) for layer in layers):
        return None
    if not is_plain(conv) or conv.padding[0] != conv.padding[1]:
        return None
    few = max(conv.in_channels, conv.out_channels) <= FEW and math.prod(conv.kernel_size) >= LEAST
    if not few or conv.weight.dtype != torch.float32 or shape[0] != conv.in_channels:
        return None
    stage = Stage(int(conv.padding[0]), pair(pool.kernel_size) or (0, 0), rectify=True)
    outcome = stage.shape(shape, conv.weight)
    return (conv, stage, outcome) if min(outcome) > 0 else None


def _couple(layers: list[nn.Module], place: int) -> FusedPool | None:
    """The pool of a pool and a ReLU at this place, if nobody can see what is between them."""
    first, second = layers[place], layers[place + 1] if place + 1 < len(layers) else None
    if type(first) is FusedPool and type(second) is nn.ReLU:
        pool, other = first, second
    elif type(first) is nn.ReLU and type(second) is FusedPool and not (first.inplace and place == 0):
        pool, other = second, first  # at the first place, a ReLU in place changes what the caller holds
    else:
        return None
    return None if is_watched(pool) or is_watched(other) else pool
