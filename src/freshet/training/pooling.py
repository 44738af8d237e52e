"""Max pooling and the ReLU beside it, compiled: one pass forward, one pass back.

torch compares few channels entry by entry, writes 8 bytes of index per output, zeroes the gradient before it fills it
in, and runs the ReLU on its own. Here the k-th entries of all windows in a row are gathered first, so that comparing
runs over long vectors whatever the number of channels, and one byte per output says which entry won. The same entry
wins as in torch (the first of equal ones, the last NaN), so values and gradients have the same bits.
"""

from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

LARGEST = 255
"""Entries of the largest window: a byte holds the number of the winner, or that there is none."""


@cache
def _kernels() -> ModuleType:
    from freshet.training import pooling_kernels

    return pooling_kernels


class Pooled(torch.autograd.Function):
    """``pool`` and ``unpool`` for autograd: channels-last float32 images into their windows' maxima."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, height: int, width: int, rectify: bool) -> Tensor:
        samples, channels, rows, columns = x.shape
        # not a view of anything: the caller may change it in place
        y = _images(samples, channels, rows // height, columns // width)
        stored = _as_stored(y)
        ctx.window, ctx.shape, ctx.winners = (height, width), x.shape, np.empty(stored.shape, np.uint8)
        _kernels().pool(_as_stored(x).reshape(samples, rows, -1), stored, ctx.winners, height, width, rectify)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,), (height, width) = gradients, ctx.window
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself
            winners = torch.from_numpy(ctx.winners).permute(0, 3, 1, 2)
            return _unpool_by_torch(gradient, winners, height, width, ctx.shape), None, None, None
        samples, channels, rows, columns = ctx.shape
        out = _images(samples, channels, rows, columns)
        stored = _as_stored(gradient.contiguous(memory_format=torch.channels_last))
        _kernels().unpool(stored, ctx.winners, _as_stored(out).reshape(samples, rows, -1), height, width)
        return out, None, None, None


def _images(*shape: int) -> Tensor:
    """Memory for images (N, C, H, W), channels last."""
    return torch.empty(shape, dtype=torch.float32, device="cpu", memory_format=torch.channels_last)


def _as_stored(images: Tensor) -> NDArray[Any]:
    """Channels-last images (N, C, H, W) as the array (N, H, W, C) that they are in memory."""
    array: NDArray[Any] = images.detach().permute(0, 2, 3, 1).numpy()
    return array


def _unpool_by_torch(gradient: Tensor, winners: Tensor, height: int, width: int, shape: torch.Size) -> Tensor:
    """``unpool`` in operations that autograd knows."""
    samples, channels, rows, columns = gradient.shape
    entries = torch.stack([gradient * (winners == k) for k in range(height * width)], -1)
    blocks = entries.view(*gradient.shape, height, width).transpose(3, 4)
    covered = blocks.reshape(samples, channels, rows * height, columns * width)
    return pad(covered, (0, shape[3] - columns * width, 0, shape[2] - rows * height))
