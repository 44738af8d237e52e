"""Layers that stand for torch's own: the same mathematics, faster on one processor core with images channels last.

Where what they are good at is not given (another device, layout or type of number, ``torch.func`` transforms), they do
what torch's layers do.
"""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import conv2d, pad, relu

from freshet.training.pooling import LARGEST, Pooled
from freshet.training.tiny import Tiny, outputs

LAST = torch.channels_last
LANES = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
"""Floats in one of the processor's vectors."""

WORTH = 250_000
"""Products of vectors that pairs of outputs must save to make up for doubling the filters (about 0.15 ms)."""

ENTRIES = (250_000, 40_000)
"""Entries of images that make our pooling pay for its call: with enough channels to fill a vector, and with fewer."""

MANY, PIXELS = 128, 4
"""Channels, at least, and pixels, at most, of images that are faster as matrix products (``tiny``): on 2 x 2 pixels 1.5
to 3 times, with 64 channels or on 3 x 3 pixels not at all."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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
        return is_plain(layer) and 2 * layer.out_channels <= LANES

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not (is_fast(x) and self._pays(x)):
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


class TinyConv(nn.Conv2d):
    """A convolution with many channels, which takes tiny images as matrix products (``tiny``)."""

    @staticmethod
    def covers(layer: nn.Conv2d) -> bool:
        """Whether this layer is plain and has enough channels."""
        return is_plain(layer) and min(layer.in_channels, layer.out_channels) >= MANY

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = pair(self.padding)
        if padding is None or not (is_ours(x) and self._pays(x, weight, padding)):
            plain: Tensor = super()._conv_forward(x, weight, bias)
            return plain
        last = x.contiguous(memory_format=LAST)
        y: Tensor = Tiny.apply(padding, last, weight, bias)  # type: ignore[no-untyped-call]
        return y

    def _pays(self, x: Tensor, weight: Tensor, padding: tuple[int, int]) -> bool:
        """Whether these are tiny images that the kernel covers, and nothing stands against it."""
        (rows, columns), (height, width) = x.shape[2:], self.kernel_size
        tiny = rows * columns <= PIXELS and rows <= height and columns <= width and x.shape[1] == self.in_channels
        fits = weight.dtype == torch.float32 and weight.is_contiguous(memory_format=LAST)
        return tiny and fits and min(outputs((rows, columns), (height, width), padding)) > 0


class FusedPool(nn.MaxPool2d):
    """Max pooling of windows that neither overlap nor leave gaps; see ``pooling``."""

    @staticmethod
    def covers(layer: nn.MaxPool2d) -> bool:
        """Whether this layer pools such windows."""
        window, stride = pair(layer.kernel_size), pair(layer.stride)
        simple = pair(layer.padding) == (0, 0) and pair(layer.dilation) == (1, 1)
        simple = simple and not (layer.ceil_mode or layer.return_indices)
        return simple and window is not None and stride == window and window[0] * window[1] <= LARGEST

    def forward(self, x: Tensor) -> Tensor:
        return self.pooled(x, rectify=False)

    def pooled(self, x: Tensor, *, rectify: bool) -> Tensor:
        """The maxima, after a ReLU if ``rectify``."""
        height, width = pair(self.kernel_size) or (0, 0)
        if is_fast(x) and x.numel() >= ENTRIES[x.shape[1] < LANES] and x.shape[2] >= height and x.shape[3] >= width:
            fused: Tensor = Pooled.apply(x, height, width, rectify)  # type: ignore[no-untyped-call]
            return fused
        y: Tensor = super().forward(x)
        return relu(y) if rectify else y


def is_plain(conv: nn.Conv2d) -> bool:
    """Whether a convolution moves pixel by pixel over all channels, with a border of zeros or none."""
    simple = conv.stride == conv.dilation == (1, 1) and conv.groups == 1
    return simple and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


def is_watched(layer: nn.Module) -> bool:
    """Whether somebody has hooked into a layer or given it a ``forward`` of its own."""
    own = vars(layer)
    return "forward" in own or any(map(own.get, HOOKS))


def is_ours(x: Tensor) -> bool:
    """Whether this is a batch of float32 images in this process's memory, and nothing but autograd looks on:
    transforms cannot say how images lie in memory, and forward-mode differentiation does not know our operations."""
    ours = x.ndim == 4 and x.dtype == torch.float32 and x.device.type == "cpu" and len(x) > 0
    return ours and not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def is_fast(x: Tensor) -> bool:
    """Whether the same holds, and the images lie channels last."""
    return is_ours(x) and x.is_contiguous(memory_format=LAST)


def pair(sides: object) -> tuple[int, int] | None:
    """A layer's setting for height and width; None if it is something else than one or two integers."""
    if isinstance(sides, int):
        return sides, sides
    if isinstance(sides, tuple) and len(sides) == 2 and all(isinstance(side, int) for side in sides):
        return sides[0], sides[1]
    return None
