"""Max pooling and the ReLU beside it, compiled: one pass forward, one pass back.

With few channels torch compares entry by entry. It also writes 8 bytes of index per output, zeroes the gradient before
filling it in, and runs the ReLU separately. Here the k-th entries of all windows in a row are gathered first, so
comparisons run over long vectors for any number of channels. One byte per output says which entry won. The same entry
wins as in torch (the first of equal ones, or the last NaN), so values and gradients have the same bits.
"""

from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

MAX_WINDOW = 255
"""Entries of the largest window: one byte holds the index of the winner, or the size of the window if none won."""


@cache
def _kernels() -> ModuleType:
    from freshet.training.fast import layer_kernels

    return layer_kernels


class PoolFunction(torch.autograd.Function):
    """Maxima over windows of channels-last float32 images, after a ReLU if ``rectify``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, height: int, width: int, rectify: bool) -> Tensor:
        samples, channels, rows, columns = x.shape
        # not a view, since the caller may change it in place
        y = _images(samples, channels, rows // height, columns // width)
        stored = _as_stored(y)
        ctx.window, ctx.shape, ctx.winners = (height, width), x.shape, np.empty(stored.shape, np.uint8)
        _kernels().pool(_as_stored(x).reshape(samples, rows, -1), stored, ctx.winners, height, width, rectify)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,), (height, width) = gradients, ctx.window
        if torch.is_grad_enabled():  # the gradient itself will be differentiated
            winners = torch.from_numpy(ctx.winners).permute(0, 3, 1, 2)
            return _differentiable_unpool(gradient, winners, height, width, ctx.shape), None, None, None
        samples, channels, rows, columns = ctx.shape
        out = _images(samples, channels, rows, columns)
        stored = _as_stored(gradient.contiguous(memory_format=torch.channels_last))
        _kernels().unpool(stored, ctx.winners, _as_stored(out).reshape(samples, rows, -1), height, width)
        return out, None, None, None


def _images(*shape: int) -> Tensor:
    """Uninitialised images (N, C, H, W) in channels-last order."""
    return torch.empty(shape, dtype=torch.float32, device="cpu", memory_format=torch.channels_last)


def _as_stored(images: Tensor) -> NDArray[Any]:
    """A view of channels-last images (N, C, H, W) as an array (N, H, W, C)."""
    array: NDArray[Any] = images.detach().permute(0, 2, 3, 1).numpy()
    return array


def _differentiable_unpool(gradient: Tensor, winners: Tensor, height: int, width: int, shape: torch.Size) -> Tensor:
    """``unpool`` by torch's own operations, which autograd can differentiate again."""
    samples, channels, rows, columns = gradient.shape
    entries = torch.stack([gradient * (winners == k) for k in range(height * width)], -1)
    blocks = entries.view(*gradient.shape, height, width).transpose(3, 4)
    covered = blocks.reshape(samples, channels, rows * height, columns * width)
    return pad(covered, (0, shape[3] - columns * width, 0, shape[2] - rows * height))
