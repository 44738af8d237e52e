"""Convolutions in a row, each with a ReLU after it, as one operation for autograd: for those with many channels, which
torch's library convolves best.

What is between them is large, and a pass over it costs a good part of a convolution. As nobody else sees it, the ReLU
and its gradient are taken in place, and a row's end in one vector per sample (``nn.Flatten``) is one pass with the last
ReLU: the images lie channels last, the vector does not. Same bits as torch's layers.
"""

from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import conv2d, relu

Sides = tuple[int, int]


class Setting(NamedTuple):
    """How a convolution moves over its images."""

    stride: Sides
    padding: Sides
    dilation: Sides
    groups: int

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return conv2d(x, weight, bias, *self).contiguous(memory_format=torch.channels_last)

    def gradients(self, given: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, of_x: bool) -> Any:
        """Those of images (None unless wanted), weight and bias, for the one of the result."""
        stride, padding, dilation, groups = self
        sizes, wanted = None if bias is None else [len(bias)], [of_x, True, bias is not None]
        return torch.ops.aten.convolution_backward.default(
            given, x, weight, sizes, stride, padding, dilation, False, (0, 0), groups, wanted
        )


class Rectified(torch.autograd.Function):
    """Channels-last images through convolutions with these settings, each with a ReLU; flattened if ``flat``. Weights
    and biases (or None) of all of them follow in turn."""

    @staticmethod
    def forward(ctx: Any, settings: tuple[Setting, ...], flat: bool, x: Tensor, *parameters: Tensor | None) -> Tensor:
        ctx.settings, ctx.flat, ctx.between, ctx.images = settings, flat, [], x.shape
        y = x
        for setting, weight, bias in zip(settings, parameters[::2], parameters[1::2], strict=True):
            assert weight is not None
            last = len(ctx.between) == len(settings) - 1
            y = setting(y, weight, bias)
            ctx.images = y.shape
            if last and flat:
                y = _flattened(y)
            else:
                y.relu_()
            if not last:
                ctx.between.append(y)
        ctx.save_for_backward(x, y, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (x, y, *parameters) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself
            return None, None, *_differentiable(ctx.settings, ctx.flat, x, parameters, gradient)
        if ctx.flat:
            given = _unflattened(gradient, y, ctx.images)
        else:
            given = _through_relu(gradient, y)
        found: list[Tensor | None] = []
        inputs = [x, *ctx.between]
        for place in reversed(range(len(inputs))):
            weight, bias = parameters[2 * place : 2 * place + 2]
            of_x = place > 0 or ctx.needs_input_grad[2]
            given, *own = ctx.settings[place].gradients(given, inputs[place], weight, bias, of_x=of_x)
            found = [*own, *found]
            if place > 0:
                given = _through_relu(given, inputs[place], into=given)
        return None, None, given, *found


def _through_relu(gradient: Tensor, y: Tensor, into: Tensor | None = None) -> Tensor:
    """The gradient before a ReLU whose result is ``y``; written over ``into`` if that is given."""
    if into is None:
        return torch.ops.aten.threshold_backward.default(gradient, y, 0)  # type: ignore[no-any-return]
    return torch.ops.aten.threshold_backward.grad_input(gradient, y, 0, grad_input=into)  # type: ignore[no-any-return]


def _flattened(images: Tensor) -> Tensor:
    """The ReLU of channels-last images, in torch's order: ``relu(images).flatten(1)``."""
    samples, channels, rows, columns = images.shape
    y = torch.empty((samples, channels * rows * columns), dtype=torch.float32, device="cpu")
    stored = _as_stored(images)
    _kernels().masked_transposition(stored, stored, y.numpy().reshape(samples, channels, rows * columns))
    return y


def _unflattened(gradient: Tensor, y: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of ``_flattened``."""
    out = torch.empty(shape, dtype=torch.float32, device="cpu", memory_format=torch.channels_last)
    both = (tensor.detach().contiguous().numpy().reshape(*shape[:2], -1) for tensor in (gradient, y))
    _kernels().masked_transposition(*both, _as_stored(out))
    return out


def _as_stored(images: Tensor) -> NDArray[Any]:
    """Channels-last images (N, C, H, W) as the array (N, H W, C) that they are in memory."""
    array: NDArray[Any] = images.detach().permute(0, 2, 3, 1).flatten(1, 2).numpy()
    return array


def _differentiable(
    settings: tuple[Setting, ...], flat: bool, x: Tensor, parameters: list[Tensor | None], gradient: Tensor
) -> list[Tensor | None]:
    """The gradient in operations that autograd knows."""
    y, wanted = x, [t for t in (x, *parameters) if t is not None and t.requires_grad]
    with torch.enable_grad():
        for setting, weight, bias in zip(settings, parameters[::2], parameters[1::2], strict=True):
            assert weight is not None
            y = relu(setting(y, weight, bias))
        y = y.flatten(1) if flat else y
        found = iter(torch.autograd.grad(y, wanted, gradient, create_graph=True))
    return [next(found) if t is not None and t.requires_grad else None for t in (x, *parameters)]


@cache
def _kernels() -> ModuleType:
    from freshet.training import rectifying_kernels

    return rectifying_kernels
