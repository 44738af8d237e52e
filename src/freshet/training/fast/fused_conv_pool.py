"""Consecutive convolutions, each followed by ReLU and max pooling, as one operation for autograd.

Inside, the sample is the innermost dimension of images (``layer_kernels``). Images are converted to that order before
the first convolution and back after the last. In between, only what the gradient needs is written to memory: the input
of each convolution, and one byte per output that says which entry of its window won, if any. The sums are in another
order than torch's, so results differ in the last bits.
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

#: Samples processed together, so that the data of one pixel stay in the L1 cache.
MAX_CHUNK = 64


class Stage(NamedTuple):
    """One convolution with its pooling and ReLU."""

    padding: int
    pool: tuple[int, int]
    rectify: bool

    def apply_plainly(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same by torch's own operations."""
        y = conv2d(x, weight, bias, padding=self.padding)
        y = relu(y) if self.rectify else y
        return y if self.pool == (1, 1) else max_pool2d(y, self.pool)

    def shape(self, images: Sequence[int], weight: Tensor) -> tuple[int, int, int]:
        """Channels, rows and columns of the result."""
        sides = (images[1:], weight.shape[2:], self.pool)
        rows, columns = ((n + 2 * self.padding - k + 1) // p for n, k, p in zip(*sides, strict=True))
        return len(weight), rows, columns


class ConvPoolFunction(torch.autograd.Function):
    """Apply stages to images (N, C, H, W). ``parameters`` holds weight and bias (or None) of each stage in turn."""

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
        packed = [_pack(w, rotated=False) for w in weights]
        images, result = _array(x), _array(y)
        for start in range(0, len(x), MAX_CHUNK):
            chunk = slice(start, start + MAX_CHUNK)
            ctx.parts.append(_forward(stages, images[chunk], weights, packed, biases, result[chunk]))
        ctx.save_for_backward(x, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (x, *parameters) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient itself will be differentiated
            return None, *_differentiable_gradient(ctx.stages, x, parameters, gradient)
        found: list[Tensor | None] = [None if p is None else torch.zeros_like(p) for p in parameters]
        outer = torch.empty_like(x) if ctx.needs_input_grad[1] else None
        rotated = [_pack(_array(w), rotated=True) for w in parameters[2 if outer is None else 0 :: 2]]
        incoming = _array(gradient)
        for place, part in enumerate(ctx.parts):
            rows = slice(place * MAX_CHUNK, (place + 1) * MAX_CHUNK)
            inner = None if outer is None else _array(outer)[rows]
            _backward(ctx.stages, part, incoming[rows], rotated, found, inner)
        return None, outer, *found


def _forward(
    stages: Sequence[Stage],
    x: NDArray[Any],
    weights: Sequence[NDArray[Any]],
    packed: Sequence[NDArray[Any]],
    biases: Sequence[NDArray[Any]],
    result: NDArray[Any],
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Apply all stages and return the input and the winners of each."""
    kernels, kept = _kernels(), []
    lanes = kernels.LANES
    samples = -(-len(x) // lanes) * lanes
    images = _images((*x.shape[1:], samples), stages[0].padding)
    kernels.to_samples_last(x, images, stages[0].padding)
    borders = [stage.padding for stage in stages[1:]] + [0]
    for stage, w, flat, bias, border in zip(stages, weights, packed, biases, borders, strict=True):
        height, width = w.shape[2:]
        rows, columns = (
            (n - k + 1) // p for n, k, p in zip(images.shape[1:3], (height, width), stage.pool, strict=True)
        )
        shape = (len(w), rows, columns, samples)
        out, winners = _images(shape, border), np.empty(shape, np.uint8)
        kernels.convolve(images, flat, bias, out, winners, (height, width), (0, 0), stage.pool, border, stage.rectify)
        kept.append((images, winners))
        images = out
    kernels.from_samples_last(images, result, 0)
    return kept


def _backward(
    stages: Sequence[Stage],
    kept: Sequence[tuple[NDArray[Any], NDArray[Any]]],
    gradient: NDArray[Any],
    rotated: Sequence[NDArray[Any]],
    found: list[Tensor | None],
    outer: NDArray[Any] | None,
) -> None:
    """Add the gradients of weights and biases to ``found``. Write that of the images into ``outer`` if it is given."""
    kernels = _kernels()
    incoming = _images(kept[-1][1].shape)
    kernels.to_samples_last(gradient, incoming, 0)
    rotated_of = list(rotated) if outer is not None else [None, *rotated]
    for place in reversed(range(len(stages))):
        stage, (images, winners) = stages[place], kept[place]
        weight, bias = found[2 * place : 2 * place + 2]
        assert weight is not None
        filters, depth, height, width = weight.shape
        rows, columns = images.shape[1] - height + 1, images.shape[2] - width + 1
        outgoing, sums = _images((filters, rows, columns, images.shape[3])), np.empty(filters, np.float32)
        kernels.scatter_to_winners(incoming, winners, outgoing, sums, *stage.pool)
        if bias is not None:
            bias += torch.from_numpy(sums)
        kernels.weight_gradient(images, outgoing, _array(weight))
        flat = rotated_of[place]
        if flat is not None:
            shape = (depth, *(n - 2 * stage.padding for n in images.shape[1:3]), images.shape[3])
            incoming, beyond = _images(shape), (height - 1 - stage.padding, width - 1 - stage.padding)
            nothing, unused = np.zeros(depth, np.float32), np.empty(shape, np.uint8)
            kernels.convolve(outgoing, flat, nothing, incoming, unused, (height, width), beyond, (1, 1), 0, False)
    if outer is not None:
        kernels.from_samples_last(incoming, outer, 0)


def _differentiable_gradient(
    stages: Sequence[Stage], x: Tensor, parameters: Sequence[Tensor | None], gradient: Tensor
) -> list[Tensor | None]:
    """The gradient by torch's own operations, which autograd can differentiate again."""
    y, wanted = x, [t for t in (x, *parameters) if t is not None and t.requires_grad]
    with torch.enable_grad():
        for stage, weight, bias in zip(stages, parameters[::2], parameters[1::2], strict=True):
            assert weight is not None
            y = stage.apply_plainly(y, weight, bias)
        found = iter(torch.autograd.grad(y, wanted, gradient, create_graph=True))
    return [next(found) if t is not None and t.requires_grad else None for t in (x, *parameters)]


def _images(shape: Sequence[int], border: int = 0) -> NDArray[Any]:
    """Memory for images (C, H, W, N) with a border of zeros. torch allocates it aligned to vectors."""
    channels, rows, columns, samples = shape
    make = torch.zeros if border else torch.empty
    return make((channels, rows + 2 * border, columns + 2 * border, samples), dtype=torch.float32, device="cpu").numpy()


def _pack(w: NDArray[Any], *, rotated: bool) -> NDArray[Any]:
    flat = np.empty(w.size, np.float32)
    _kernels().pack_kernels(w, flat, rotated)
    return flat


def _array(tensor: Tensor | None) -> NDArray[Any]:
    assert tensor is not None
    array: NDArray[Any] = tensor.detach().numpy()
    return array


@cache
def _kernels() -> ModuleType:
    from freshet.training.fast import layer_kernels

    return layer_kernels
