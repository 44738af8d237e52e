"""Layers that stand for torch's own: the same mathematics, faster on one processor core with images channels last.

Where what they are good at is not given (another device, layout or type of number, ``torch.func`` transforms), they do
what torch's layers do.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad, relu

from freshet.training.pooling import LARGEST, Pooled

LANES = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)
"""Floats in one of the processor's vectors."""

WORTH = 250_000
"""Products of vectors that pairs of outputs must save to make up for doubling the filters (about 0.15 ms)."""

ENTRIES = (250_000, 40_000)
"""Entries of images that make our pooling pay for its call: with enough channels to fill a vector, and with fewer."""


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
    """Max pooling of windows that neither overlap nor leave gaps, then ReLU if ``rectify``; see ``pooling``."""

    def __init__(self, like: nn.MaxPool2d, *, rectify: bool) -> None:
        super().__init__(like.kernel_size)
        self.window, self.rectify = _pair(like.kernel_size), rectify

    @staticmethod
    def covers(layer: nn.MaxPool2d) -> bool:
        """Whether this layer pools such windows."""
        height, width = _pair(layer.kernel_size)
        simple = _pair(layer.padding) == (0, 0) and _pair(layer.dilation) == (1, 1)
        simple = simple and not (layer.ceil_mode or layer.return_indices)
        return simple and _pair(layer.stride) == (height, width) and height * width <= LARGEST

    def forward(self, x: Tensor) -> Tensor:
        height, width = self.window
        if _is_fast(x) and x.numel() >= ENTRIES[x.shape[1] < LANES] and x.shape[2] >= height and x.shape[3] >= width:
            pooled: Tensor = Pooled.apply(x, height, width, self.rectify)  # type: ignore[no-untyped-call]
            return pooled
        y: Tensor = super().forward(x)
        return relu(y) if self.rectify else y


def _is_fast(x: Tensor) -> bool:
    """Whether this is a batch of float32 images, channels last, in this process's memory."""
    ours = x.ndim == 4 and x.dtype == torch.float32 and x.device.type == "cpu"
    ours = ours and not torch._C._are_functorch_transforms_active()  # they cannot say how images lie in memory
    return ours and x.is_contiguous(memory_format=torch.channels_last)


def _pair(sides: int | tuple[int, ...]) -> tuple[int, int]:
    return (sides, sides) if isinstance(sides, int) else (sides[0], sides[1])
