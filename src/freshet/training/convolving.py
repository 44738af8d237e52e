"""Convolutions with the ReLU and max pooling that follow them, several in a row, as one operation for autograd.

Inside, images lie with the sample innermost (``tiles``). They are brought into that order once at the start of the row
and out of it at its end, and nothing but what the gradient needs is written to memory in between: the images that each
convolution was given, and a byte per output that says which entry of its window won, if any. Same mathematics as
torch's layers; sums in another order, so results differ in the last bits.
"""

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d, relu

#: Samples that go through the row together, so that what one pixel needs stays in the processor's nearest cache.
MOST = 64


class Stage(NamedTuple):
    """One convolution and what follows it."""

    padding: int
    pool: tuple[int, int]
    rectify: bool

    def plainly(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same in torch's operations."""
        y = conv2d(x, weight, bias, padding=self.padding)
        y = relu(y) if self.rectify else y
        return y if self.pool == (1, 1) else max_pool2d(y, self.pool)

    def shape(self, images: Sequence[int], weight: Tensor) -> tuple[int, int, int]:
        """Channels, rows and columns of the result."""
        sides = (images[1:], weight.shape[2:], self.pool)
        rows, columns = ((n + 2 * self.padding - k + 1) // p for n, k, p in zip(*sides, strict=True))
        return len(weight), rows, columns


class Convolved(torch.autograd.Function):
    """Images (N, C, H, W) through stages; weights and biases (or None) of all stages follow in turn."""

    @staticmethod
    def forward(ctx: Any, stages: tuple[Stage, ...], x: Tensor, *parameters: Tensor | None) -> Tensor:
        weights = [_array(weight) for weight in parameters[::2] if weight is not None]
        pairs = zip(parameters[1::2], weights, strict=True)
        biases = [np.zeros(len(w), np.float32) if b is None else _array(b) for b, w in pairs]
        ctx.stages, ctx.parts = stages, []
        shape = tuple(x.shape[1:])
        for stage, weight in zip(stages, parameters[::2], strict=True):
            assert weight is not None
            shape = stage.shape(shape, weight)
        y = torch.empty((len(x), *shape), dtype=torch.float32, device="cpu")
        packed = [_packed(w, turned=False) for w in weights]
        images, result = _array(x), _array(y)
        for start in range(0, len(x), MOST):
            part = _forward(stages, images[start : start + MOST], weights, packed, biases, result[start : start + MOST])
            ctx.parts.append(part)
        ctx.save_for_backward(x, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (x, *parameters) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself
            return None, *_differentiable(ctx.stages, x, parameters, gradient)
        found: list[Tensor | None] = [None if p is None else torch.zeros_like(p) for p in parameters]
        outer = torch.empty_like(x) if ctx.needs_input_grad[1] else None
        turned = [_packed(_array(w), turned=True) for w in parameters[2 if outer is None else 0 :: 2]]
        incoming = _array(gradient)
        for place, part in enumerate(ctx.parts):
            rows = slice(place * MOST, (place + 1) * MOST)
            inner = None if outer is None else _array(outer)[rows]
            _backward(ctx.stages, part, incoming[rows], turned, found, inner)
        return None, outer, *found


def _forward(
    stages: Sequence[Stage],
    x: NDArray[Any],
    weights: Sequence[NDArray[Any]],
    packed: Sequence[NDArray[Any]],
    biases: Sequence[NDArray[Any]],
    result: NDArray[Any],
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Images through all stages; gives what each was given, and its winners."""
    kernels, seen = _kernels(), []
    lanes = kernels.LANES
    samples = -(-len(x) // lanes) * lanes
    images = _images((*x.shape[1:], samples), stages[0].padding)
    kernels.innermost(x, images, stages[0].padding)
    borders = [stage.padding for stage in stages[1:]] + [0]
    for stage, w, flat, bias, border in zip(stages, weights, packed, biases, borders, strict=True):
        height, width = w.shape[2:]
        rows, columns = (
            (n - k + 1) // p for n, k, p in zip(images.shape[1:3], (height, width), stage.pool, strict=True)
        )
        shape = (len(w), rows, columns, samples)
        out, winners = _images(shape, border), np.empty(shape, np.uint8)
        kernels.convolve(images, flat, bias, out, winners, (height, width), (0, 0), stage.pool, border, stage.rectify)
        seen.append((images, winners))
        images = out
    kernels.outermost(images, result, 0)
    return seen


def _backward(
    stages: Sequence[Stage],
    seen: Sequence[tuple[NDArray[Any], NDArray[Any]]],
    gradient: NDArray[Any],
    turned: Sequence[NDArray[Any]],
    found: list[Tensor | None],
    outer: NDArray[Any] | None,
) -> None:
    """Add the gradients of all weights and biases to ``found``; that of the images goes into ``outer``, if wanted."""
    kernels = _kernels()
    incoming = _images(seen[-1][1].shape)
    kernels.innermost(gradient, incoming, 0)
    turned_of = list(turned) if outer is not None else [None, *turned]
    for place in reversed(range(len(stages))):
        stage, (images, winners) = stages[place], seen[place]
        weight, bias = found[2 * place : 2 * place + 2]
        assert weight is not None
        filters, depth, height, width = weight.shape
        rows, columns = images.shape[1] - height + 1, images.shape[2] - width + 1
        outgoing, sums = _images((filters, rows, columns, images.shape[3])), np.empty(filters, np.float32)
        kernels.spread(incoming, winners, outgoing, sums, *stage.pool)
        if bias is not None:
            bias += torch.from_numpy(sums)
        kernels.weight_gradient(images, outgoing, _array(weight))
        flat = turned_of[place]
        if flat is not None:
            shape = (depth, *(n - 2 * stage.padding for n in images.shape[1:3]), images.shape[3])
            incoming, beyond = _images(shape), (height - 1 - stage.padding, width - 1 - stage.padding)
            nothing, unused = np.zeros(depth, np.float32), np.empty(shape, np.uint8)
            kernels.convolve(outgoing, flat, nothing, incoming, unused, (height, width), beyond, (1, 1), 0, False)
    if outer is not None:
        kernels.outermost(incoming, outer, 0)


def _differentiable(
    stages: Sequence[Stage], x: Tensor, parameters: Sequence[Tensor | None], gradient: Tensor
) -> list[Tensor | None]:
    """The gradient in operations that autograd knows."""
    y, wanted = x, [t for t in (x, *parameters) if t is not None and t.requires_grad]
    with torch.enable_grad():
        for stage, weight, bias in zip(stages, parameters[::2], parameters[1::2], strict=True):
            assert weight is not None
            y = stage.plainly(y, weight, bias)
        found = iter(torch.autograd.grad(y, wanted, gradient, create_graph=True))
    return [next(found) if t is not None and t.requires_grad else None for t in (x, *parameters)]


def _images(shape: Sequence[int], border: int = 0) -> NDArray[Any]:
    """Memory for images (C, H, W, N) with a border of zeros; torch's begins where the processor's vectors like it."""
    channels, rows, columns, samples = shape
    make = torch.zeros if border else torch.empty
    return make((channels, rows + 2 * border, columns + 2 * border, samples), dtype=torch.float32, device="cpu").numpy()


def _packed(w: NDArray[Any], *, turned: bool) -> NDArray[Any]:
    flat = np.empty(w.size, np.float32)
    _kernels().pack(w, flat, turned)
    return flat


def _array(tensor: Tensor | None) -> NDArray[Any]:
    assert tensor is not None
    array: NDArray[Any] = tensor.detach().numpy()
    return array


@cache
def _kernels() -> ModuleType:
    from freshet.training import convolving_kernels

    return convolving_kernels
