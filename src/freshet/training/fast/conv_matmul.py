"""Convolutions of tiny images as a few matrix products, one operation for autograd.

On an image of 2 x 2 pixels a kernel of 3 x 3 covers mostly padding. Libraries are slow at the rest: few pixels, many
weights. Here each output pixel is computed row by row from the pixels under its kernel. In channels-last order the
pixels of a row are contiguous, and so are their weights. That takes one matrix product per output pixel and row, and no
copies. The sums are in another order than torch's, so results differ in the last bits.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d

Sides = tuple[int, int]


class Overlap(NamedTuple):
    """The part of one image row under the kernel of one output pixel. Columns count entries, not pixels."""

    pixel: int
    image_row: int
    image_columns: slice
    kernel_row: int
    kernel_columns: slice


def output_sides(image: Sides, kernel: Sides, padding: Sides) -> Sides:
    """Rows and columns of the result."""
    rows, columns = (n + 2 * p - k + 1 for n, k, p in zip(image, kernel, padding, strict=True))
    return rows, columns


@cache
def overlaps(image: Sides, kernel: Sides, padding: Sides, channels: int) -> tuple[Overlap, ...]:
    """The overlaps of all output pixels."""

    def find() -> Iterator[Overlap]:
        rows, columns = output_sides(image, kernel, padding)
        for pixel in range(rows * columns):
            top, left = pixel // columns - padding[0], pixel % columns - padding[1]
            first, last = max(0, left), min(image[1], left + kernel[1])
            for row in range(max(0, top), min(image[0], top + kernel[0])):
                image_columns = slice(first * channels, last * channels)
                kernel_columns = slice((first - left) * channels, (last - left) * channels)
                yield Overlap(pixel, row, image_columns, row - top, kernel_columns)

    return tuple(find())


class ConvMatmulFunction(torch.autograd.Function):
    """Convolve images (N, C, H, W) with stride 1. Images and weights are in channels-last order."""

    @staticmethod
    def forward(ctx: Any, padding: Sides, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        filters, channels, *kernel = weight.shape
        image = (x.shape[2], x.shape[3])
        rows, columns = output_sides(image, (kernel[0], kernel[1]), padding)
        y = torch.empty((len(x), rows * columns, filters), dtype=torch.float32, device="cpu")
        y.zero_() if bias is None else y.copy_(bias)
        ctx.padding, ctx.overlaps = padding, overlaps(image, (kernel[0], kernel[1]), padding, channels)
        images, weights = _by_rows(x), _by_rows(weight)
        for overlap in ctx.overlaps:
            entries = images[:, overlap.image_row, overlap.image_columns]
            y[:, overlap.pixel].addmm_(entries, weights[:, overlap.kernel_row, overlap.kernel_columns].t())
        ctx.save_for_backward(x, weight, bias)
        return y.view(len(x), rows, columns, filters).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (x, weight, bias) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient itself will be differentiated
            return None, *_differentiable_gradient(ctx.padding, (x, weight, bias), gradient)
        outer = gradient.permute(0, 2, 3, 1).reshape(len(x), -1, len(weight))
        images, weights, of_weight = _by_rows(x), _by_rows(weight), torch.zeros_like(weight)
        of_x = torch.zeros_like(x) if ctx.needs_input_grad[1] else None
        for overlap in ctx.overlaps:
            part, row, columns = outer[:, overlap.pixel], overlap.image_row, overlap.image_columns
            place = overlap.kernel_row, overlap.kernel_columns
            _by_rows(of_weight)[:, *place].addmm_(part.t(), images[:, row, columns])
            if of_x is not None:
                _by_rows(of_x)[:, row, columns].addmm_(part, weights[:, *place])
        return None, of_x, of_weight, None if bias is None else outer.sum((0, 1))


def _by_rows(images: Tensor) -> Tensor:
    """A view of channels-last images (N, C, H, W) as (N, H, W C)."""
    return images.detach().permute(0, 2, 3, 1).view(len(images), images.shape[2], -1)


def _differentiable_gradient(
    padding: Sides, inputs: tuple[Tensor, Tensor, Tensor | None], gradient: Tensor
) -> list[Any]:
    """The gradient by torch's own operations, which autograd can differentiate again."""
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    with torch.enable_grad():
        y = conv2d(*inputs, padding=padding)
        found = iter(torch.autograd.grad(y, wanted, gradient, create_graph=True))
    return [next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs]
