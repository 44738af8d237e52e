"""Single layers that replace torch's own. They are faster on one CPU core with images in channels-last order.

Inputs that they do not support (other devices, layouts or dtypes, ``torch.func`` transforms) go through torch's code.
"""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import conv2d, pad, relu

from freshet.training.fast.conv_matmul import ConvMatmulFunction, output_sides
from freshet.training.fast.pooling import MAX_WINDOW, PoolFunction

CHANNELS_LAST = torch.channels_last
SIMD_FLOATS = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
"""Floats in one vector register."""

MIN_SAVED_PRODUCTS = 250_000
"""Vector products that pairs of outputs must save to make up for doubling the filters (about 0.15 ms)."""

MIN_POOL_ENTRIES = (250_000, 40_000)
"""Entries of images from which our pooling is faster than torch's: with enough channels to fill a vector, and with
fewer."""

MIN_CHANNELS, MAX_PIXELS = 128, 4
"""Images with at least this many channels and at most this many pixels are faster as matrix products
(``conv_matmul``): 1.5 to 3 times on 2 x 2 pixels. With 64 channels or on 3 x 3 pixels nothing is gained."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class PairedConv(nn.Conv2d):
    """A convolution of the network's input with so few filters that two neighbouring outputs fit into one vector.

    torch fills a vector with the filters of one output and leaves the rest empty: 10 of 16 entries with 6 filters. We
    use every filter twice, the second time shifted one pixel to the right, and step by two pixels. In channels-last
    order the result has the memory layout of the plain convolution. This saves 30 % of the time of both passes. The
    gradient of the input would be slower, but only later layers need it.
    """

    @staticmethod
    def covers(layer: nn.Conv2d) -> bool:
        """Whether this layer's outputs can be computed in pairs, and faster that way."""
        return is_plain(layer) and 2 * layer.out_channels <= SIMD_FLOATS

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not (is_channels_last(x) and self._pays(x)):
            plain: Tensor = super()._conv_forward(x, weight, bias)
            return plain
        wide = torch.cat((pad(weight, (0, 1)), pad(weight, (1, 0))))
        pairs = conv2d(x, wide, None if bias is None else bias.repeat(2), (1, 2), self.padding)
        samples, filters, rows, columns = pairs.shape
        return pairs.permute(0, 2, 3, 1).reshape(samples, rows, 2 * columns, filters // 2).permute(0, 3, 1, 2)

    def _pays(self, x: Tensor) -> bool:
        """Whether ``x`` is a network's input with an even number of output columns and enough pixels."""
        height, width = self.kernel_size
        rows = x.shape[2] + 2 * int(self.padding[0]) - height + 1
        columns = x.shape[3] + 2 * int(self.padding[1]) - width + 1
        saved = len(x) * rows * columns // 2 * x.shape[1] * height * (width - 1)
        return not x.requires_grad and columns % 2 == 0 and saved >= MIN_SAVED_PRODUCTS


class MatmulConv(nn.Conv2d):
    """A convolution with many channels that computes tiny images as matrix products (``conv_matmul``)."""

    @staticmethod
    def covers(layer: nn.Conv2d) -> bool:
        """Whether this layer is plain and has enough channels."""
        return is_plain(layer) and min(layer.in_channels, layer.out_channels) >= MIN_CHANNELS

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = as_pair(self.padding)
        if padding is None or not (is_supported(x) and self._pays(x, weight, padding)):
            plain: Tensor = super()._conv_forward(x, weight, bias)
            return plain
        images = x.contiguous(memory_format=CHANNELS_LAST)
        y: Tensor = ConvMatmulFunction.apply(padding, images, weight, bias)  # type: ignore[no-untyped-call]
        return y

    def _pays(self, x: Tensor, weight: Tensor, padding: tuple[int, int]) -> bool:
        """Whether the images are tiny, the kernel covers them, and ``conv_matmul`` supports the weights."""
        (rows, columns), (height, width) = x.shape[2:], self.kernel_size
        tiny = rows * columns <= MAX_PIXELS and rows <= height and columns <= width and x.shape[1] == self.in_channels
        fits = weight.dtype == torch.float32 and weight.is_contiguous(memory_format=CHANNELS_LAST)
        return tiny and fits and min(output_sides((rows, columns), (height, width), padding)) > 0


class FusedPool(nn.MaxPool2d):
    """Max pooling over windows that neither overlap nor leave gaps, optionally with a ReLU (``pooling``)."""

    @staticmethod
    def covers(layer: nn.MaxPool2d) -> bool:
        """Whether this layer has such windows."""
        window, stride = as_pair(layer.kernel_size), as_pair(layer.stride)
        simple = as_pair(layer.padding) == (0, 0) and as_pair(layer.dilation) == (1, 1)
        simple = simple and not (layer.ceil_mode or layer.return_indices)
        return simple and window is not None and stride == window and window[0] * window[1] <= MAX_WINDOW

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x, rectify=False)

    def pool(self, x: Tensor, *, rectify: bool) -> Tensor:
        """The maxima, after a ReLU if ``rectify``."""
        height, width = as_pair(self.kernel_size) or (0, 0)
        if is_channels_last(x) and self._pays(x, height, width):
            fused: Tensor = PoolFunction.apply(x, height, width, rectify)  # type: ignore[no-untyped-call]
            return fused
        y: Tensor = super().forward(x)
        return relu(y) if rectify else y

    def _pays(self, x: Tensor, height: int, width: int) -> bool:
        """Whether the images have at least one window, and enough entries."""
        enough = x.numel() >= MIN_POOL_ENTRIES[x.shape[1] < SIMD_FLOATS]
        return enough and x.shape[2] >= height and x.shape[3] >= width


def is_plain(conv: nn.Conv2d) -> bool:
    """Whether a convolution has stride 1, no dilation, one group, and zero padding or none."""
    simple = conv.stride == conv.dilation == (1, 1) and conv.groups == 1
    return simple and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


def has_hooks(layer: nn.Module) -> bool:
    """Whether a layer has hooks or a ``forward`` attribute, so that its input and output must exist."""
    own = vars(layer)
    return "forward" in own or any(map(own.get, HOOKS))


def is_supported(x: Tensor) -> bool:
    """Whether this is a non-empty batch of float32 images on the CPU, and only plain autograd records it.

    Under ``torch.func`` transforms a tensor has no memory layout. Our operations have no forward-mode derivative.
    """
    images = x.ndim == 4 and x.dtype == torch.float32 and x.device.type == "cpu" and len(x) > 0
    return images and not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


def is_channels_last(x: Tensor) -> bool:
    """Whether this is a supported batch in channels-last order."""
    return is_supported(x) and x.is_contiguous(memory_format=CHANNELS_LAST)


def as_pair(sides: object) -> tuple[int, int] | None:
    """A layer's setting for height and width, or None if it is neither one nor two integers."""
    if isinstance(sides, int):
        return sides, sides
    if isinstance(sides, tuple) and len(sides) == 2 and all(isinstance(side, int) for side in sides):
        return sides[0], sides[1]
    return None
