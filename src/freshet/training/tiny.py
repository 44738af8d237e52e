"""Convolutions of tiny images as a handful of matrix products, one operation for autograd.

On an image of 2 x 2 pixels a kernel of 3 x 3 mostly meets its padding, and libraries are slow at what is left: few
pixels, many weights. Here each output pixel takes the pixels that its kernel meets row by row; channels last, those of
a row lie beside one another, and so do their weights. One product of matrices per output pixel and row, nothing is
copied. Same mathematics as torch's convolution; sums in another order, so results differ in the last bits.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d

Sides = tuple[int, int]


class Meeting(NamedTuple):
    """An output pixel, and what its kernel meets in one row: columns of the image's row, and of the kernel's."""

    pixel: int
    image_row: int
    image_columns: slice
    kernel_row: int
    kernel_columns: slice


def outputs(image: Sides, kernel: Sides, padding: Sides) -> Sides:
    """Rows and columns of what comes out."""
    rows, columns = (n + 2 * p - k + 1 for n, k, p in zip(image, kernel, padding, strict=True))
    return rows, columns


@cache
def meetings(image: Sides, kernel: Sides, padding: Sides, channels: int) -> tuple[Meeting, ...]:
    """All of them, with columns in numbers of entries."""

    def found() -> Iterator[Meeting]:
        rows, columns = outputs(image, kernel, padding)
        for pixel in range(rows * columns):
            top, left = pixel // columns - padding[0], pixel % columns - padding[1]
            first, last = max(0, left), min(image[1], left + kernel[1])
            for row in range(max(0, top), min(image[0], top + kernel[0])):
                met = slice(first * channels, last * channels)
                yield Meeting(pixel, row, met, row - top, slice((first - left) * channels, (last - left) * channels))

    return tuple(found())


class Tiny(torch.autograd.Function):
    """Images (N, C, H, W) convolved with stride 1 and this padding; images and weights lie channels last."""

    @staticmethod
    def forward(ctx: Any, padding: Sides, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        filters, channels, *kernel = weight.shape
        image = (x.shape[2], x.shape[3])
        rows, columns = outputs(image, (kernel[0], kernel[1]), padding)
        y = torch.empty((len(x), rows * columns, filters), dtype=torch.float32, device="cpu")
        y.zero_() if bias is None else y.copy_(bias)
        ctx.padding, ctx.met = padding, meetings(image, (kernel[0], kernel[1]), padding, channels)
        images, weights = _by_rows(x), _by_rows(weight)
        for met in ctx.met:
            entries = images[:, met.image_row, met.image_columns]
            y[:, met.pixel].addmm_(entries, weights[:, met.kernel_row, met.kernel_columns].t())
        ctx.save_for_backward(x, weight, bias)
        return y.view(len(x), rows, columns, filters).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (x, weight, bias) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself
            return None, *_differentiable(ctx.padding, (x, weight, bias), gradient)
        given = gradient.permute(0, 2, 3, 1).reshape(len(x), -1, len(weight))
        images, weights, of_weight = _by_rows(x), _by_rows(weight), torch.zeros_like(weight)
        of_x = torch.zeros_like(x) if ctx.needs_input_grad[1] else None
        for met in ctx.met:
            part, row, columns = given[:, met.pixel], met.image_row, met.image_columns
            place = met.kernel_row, met.kernel_columns
            _by_rows(of_weight)[:, *place].addmm_(part.t(), images[:, row, columns])
            if of_x is not None:
                _by_rows(of_x)[:, row, columns].addmm_(part, weights[:, *place])
        return None, of_x, of_weight, None if bias is None else given.sum((0, 1))


def _by_rows(images: Tensor) -> Tensor:
    """Channels-last images (N, C, H, W) as (N, H, W C), a view."""
    return images.detach().permute(0, 2, 3, 1).view(len(images), images.shape[2], -1)


def _differentiable(padding: Sides, given: tuple[Tensor, Tensor, Tensor | None], gradient: Tensor) -> list[Any]:
    """The gradient in operations that autograd knows."""
    wanted = [tensor for tensor in given if tensor is not None and tensor.requires_grad]
    with torch.enable_grad():
        y = conv2d(*given, padding=padding)
        found = iter(torch.autograd.grad(y, wanted, gradient, create_graph=True))
    return [next(found) if tensor is not None and tensor.requires_grad else None for tensor in given]
