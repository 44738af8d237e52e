"""Layers that stand for torch's own: the same mathematics, faster on one processor core with images channels last.

Where what they are good at is not given (another device, layout or type of number, ``torch.func`` transforms), they do
what torch's layers do.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import conv2d, pad, relu

from freshet.training.convolving import Convolved, Stage
from freshet.training.pooling import LARGEST, Pooled

LANES = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
"""Floats in one of the processor's vectors."""

WORTH = 250_000
"""Products of vectors that pairs of outputs must save to make up for doubling the filters (about 0.15 ms)."""

ENTRIES = (250_000, 40_000)
"""Entries of images that make our pooling pay for its call: with enough channels to fill a vector, and with fewer."""


FEW, LEAST, ENOUGH = 16, 9, 50_000
"""Channels with which torch does not fill the processor's vectors; entries of a kernel, and products per image in a row
of convolutions, that make our own way pay."""


class PairedConv(nn.Conv2d):
    """A convolution of the network's input with so few filters that two neighbouring outputs fit into one vector.

    The processor fills a vector with one output's filters and leaves the rest of it empty: 10 of 16 entries with 6
    filters. So we take every filter twice, the second one pixel to the right, and step two pixels at a time. Channels
    last, the result lies in memory exactly as that of the plain convolution. Worth 30 % of its time both ways; the
    gradient of the input, which only later layers need, would be slower.
    """

    @staticmethod
    def covers(layer: nn.Conv2d) -> bool:
        """Whether pairs of this layer's outputs can be computed together, and are faster so."""
        simple = layer.stride == (1, 1) and layer.dilation == (1, 1) and layer.groups == 1
        simple = simple and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        return simple and 2 * layer.out_channels <= LANES

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not (_is_fast(x) and self._pays(x)):
            plain: Tensor = super()._conv_forward(x, weight, bias)
            return plain
        wide = torch.cat((pad(weight, (0, 1)), pad(weight, (1, 0))))
        pairs = conv2d(x, wide, None if bias is None else bias.repeat(2), (1, 2), self.padding)
        samples, filters, rows, columns = pairs.shape
        return pairs.permute(0, 2, 3, 1).reshape(samples, rows, 2 * columns, filters // 2).permute(0, 3, 1, 2)

    def _pays(self, x: Tensor) -> bool:
        """Whether these are images as a network gets them, with outputs in pairs, and enough of them."""
        height, width = self.kernel_size
        rows = x.shape[2] + 2 * int(self.padding[0]) - height + 1
        columns = x.shape[3] + 2 * int(self.padding[1]) - width + 1
        saved = len(x) * rows * columns // 2 * x.shape[1] * height * (width - 1)
        return not x.requires_grad and columns % 2 == 0 and saved >= WORTH


class FusedPool(nn.MaxPool2d):
    """Max pooling of windows that neither overlap nor leave gaps; see ``pooling``."""

    @staticmethod
    def covers(layer: nn.MaxPool2d) -> bool:
        """Whether this layer pools such windows."""
        window, stride = _pair(layer.kernel_size), _pair(layer.stride)
        simple = _pair(layer.padding) == (0, 0) and _pair(layer.dilation) == (1, 1)
        simple = simple and not (layer.ceil_mode or layer.return_indices)
        return simple and window is not None and stride == window and window[0] * window[1] <= LARGEST

    def forward(self, x: Tensor) -> Tensor:
        return self.pooled(x, rectify=False)

    def pooled(self, x: Tensor, *, rectify: bool) -> Tensor:
        """The maxima, after a ReLU if ``rectify``."""
        height, width = _pair(self.kernel_size) or (0, 0)
        if _is_fast(x) and x.numel() >= ENTRIES[x.shape[1] < LANES] and x.shape[2] >= height and x.shape[3] >= width:
            fused: Tensor = Pooled.apply(x, height, width, rectify)  # type: ignore[no-untyped-call]
            return fused
        y: Tensor = super().forward(x)
        return relu(y) if rectify else y


class FusedSequential(nn.Sequential):
    """Layers in a row, where convolutions with few filters and the pools after them are one operation (``convolving``),
    and other max pools do the ReLU directly before or after them.

    ``max(relu(x)) = relu(max(x))``, bit for bit and in the gradient too, and there are fewer maxima than entries.
    """

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        place = 0
        while place < len(layers):
            run = Run.find(layers, place, x)
            if run is not None:
                x, place = run(x), run.after
                continue
            pool = _couple(layers, place)
            x = layers[place](x) if pool is None else pool.pooled(x, rectify=True)
            place += 1 if pool is None else 2
        return x


class Run(NamedTuple):
    """Convolutions in a row, what becomes of their images, and the place after them."""

    convs: list[nn.Conv2d]
    stages: list[Stage]
    after: int

    @staticmethod
    def find(layers: list[nn.Module], place: int, x: Tensor) -> "Run | None":
        """The run that begins at this place, if ``convolving`` is good at it."""
        if not (isinstance(layers[place], nn.Conv2d) and is_ours(x)):
            return None
        run, shape, products = Run([], [], place), tuple(x.shape[1:]), 0
        while (found := _stage(layers[run.after : run.after + 3], shape)) is not None:
            conv, stage, shape = found
            products += math.prod(shape) * math.prod(stage.pool) * conv.in_channels * math.prod(conv.kernel_size)
            run = Run([*run.convs, conv], [*run.stages, stage], run.after + 3)
        return run if products >= ENOUGH else None

    def __call__(self, x: Tensor) -> Tensor:
        parameters = [parameter for conv in self.convs for parameter in (conv.weight, conv.bias)]
        y: Tensor = Convolved.apply(tuple(self.stages), x, *parameters)  # type: ignore[no-untyped-call]
        return y


def _stage(layers: list[nn.Module], shape: tuple[int, ...]) -> tuple[nn.Conv2d, Stage, tuple[int, int, int]] | None:
    """A plain convolution with few channels, ReLU and a pool, in any order, for images of this shape; and the shape of
    what comes out."""
    conv, follow = layers[0] if layers else None, {type(layer): layer for layer in layers[1:]}
    pool = follow.get(FusedPool)
    if not (type(conv) in (nn.Conv2d, PairedConv) and isinstance(conv, nn.Conv2d) and isinstance(pool, FusedPool)):
        return None
    if nn.ReLU not in follow or any(is_watched(layer) for layer in layers):
        return None
    plain = conv.stride == conv.dilation == (1, 1) and conv.groups == 1 and conv.padding_mode == "zeros"
    if not plain or isinstance(conv.padding, str) or conv.padding[0] != conv.padding[1]:
        return None
    few = max(conv.in_channels, conv.out_channels) <= FEW and math.prod(conv.kernel_size) >= LEAST
    if not few or conv.weight.dtype != torch.float32 or shape[0] != conv.in_channels:
        return None
    stage = Stage(int(conv.padding[0]), _pair(pool.kernel_size) or (0, 0), rectify=True)
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


def is_watched(layer: nn.Module) -> bool:
    """Whether somebody has hooked into a layer or given it a ``forward`` of its own."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return any(hooks) or "forward" in vars(layer)


def is_ours(x: Tensor) -> bool:
    """Whether this is a batch of float32 images in this process's memory, and nothing but autograd looks on:
    transforms cannot say how images lie in memory, and forward-mode differentiation does not know our operations."""
    ours = x.ndim == 4 and x.dtype == torch.float32 and x.device.type == "cpu" and len(x) > 0
    return ours and not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def _is_fast(x: Tensor) -> bool:
    """Whether the same holds, and the images lie channels last."""
    return is_ours(x) and x.is_contiguous(memory_format=torch.channels_last)


def _pair(sides: object) -> tuple[int, int] | None:
    """A layer's setting for height and width; None if it is something else than one or two integers."""
    if isinstance(sides, int):
        return sides, sides
    if isinstance(sides, tuple) and len(sides) == 2 and all(isinstance(side, int) for side in sides):
        return sides[0], sides[1]
    return None
