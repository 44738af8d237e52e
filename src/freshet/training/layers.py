"""Layers that stand for torch's own: the same mathematics, faster on one processor core with images channels last.

Where what they are good at is not given (another device, layout or type of number, ``torch.func`` transforms), they do
what torch's layers do.
"""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
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
    """Layers in a row, where a max pool does the ReLU directly before or after it.

    ``max(relu(x)) = relu(max(x))``, bit for bit and in the gradient too, and there are fewer maxima than entries.
    """

    def forward(self, x: Tensor) -> Tensor:
        layers = list(self)
        place = 0
        while place < len(layers):
            pool = _couple(layers, place)
            x = layers[place](x) if pool is None else pool.pooled(x, rectify=True)
            place += 1 if pool is None else 2
        return x


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


def _is_fast(x: Tensor) -> bool:
    """Whether this is a batch of float32 images, channels last, in this process's memory."""
    ours = x.ndim == 4 and x.dtype == torch.float32 and x.device.type == "cpu"
    # transforms cannot say how images lie in memory, and forward-mode differentiation does not know our pooling
    ours = ours and not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0
    return ours and x.is_contiguous(memory_format=torch.channels_last)


def _pair(sides: object) -> tuple[int, int] | None:
    """A layer's setting for height and width; None if it is something else than one or two integers."""
    if isinstance(sides, int):
        return sides, sides
    if isinstance(sides, tuple) and len(sides) == 2 and all(isinstance(side, int) for side in sides):
        return sides[0], sides[1]
    return None
