"""Consecutive convolutions, each followed by a ReLU, as one operation for autograd.

This is for convolutions with many channels, where torch's library is fastest. The images between the layers are large,
and a pass over them costs a good part of a convolution. Nobody else sees them, so the ReLU and its gradient work in
place. A final ``nn.Flatten`` joins the last ReLU in one pass, which also converts from channels-last order. The bits
are those of torch's layers.
"""

from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import conv2d, relu

Sides = tuple[int, int]


class ConvSettings(NamedTuple):
    """The settings of a convolution."""

    stride: Sides
    padding: Sides
    dilation: Sides
    groups: int

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return conv2d(x, weight, bias, *self).contiguous(memory_format=torch.channels_last)

    def gradients(self, outer: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, of_x: bool) -> Any:
        """The gradients of images (None unless ``of_x``), weight and bias, given that of the result."""
        stride, padding, dilation, groups = self
        sizes, wanted = None if bias is None else [len(bias)], [of_x, True, bias is not None]
        return torch.ops.aten.convolution_backward.default(
            outer, x, weight, sizes, stride, padding, dilation, False, (0, 0), groups, wanted
        )


class ConvReluFunction(torch.autograd.Function):
    """Apply convolutions with a ReLU after each to channels-last images, and flatten the result if ``flat``.

    ``parameters`` holds weight and bias (or None) of each convolution in turn.
    """

    @staticmethod
    def forward(
        ctx: Any, settings: tuple[ConvSettings, ...], flat: bool, x: Tensor, *parameters: Tensor | None
    ) -> Tensor:
        ctx.settings, ctx.flat, ctx.between, ctx.images = settings, flat, [], x.shape
        y = x
        for setting, weight, bias in zip(settings, parameters[::2], parameters[1::2], strict=True):
            assert weight is not None
            last = len(ctx.between) == len(settings) - 1
            y = setting(y, weight, bias)
            ctx.images = y.shape
            if last and flat:
                y = _relu_flatten(y)
            else:
                y.relu_()
            if not last:
                ctx.between.append(y)
        ctx.save_for_backward(x, y, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (x, y, *parameters) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient itself will be differentiated
            return None, None, *_differentiable_gradient(ctx.settings, ctx.flat, x, parameters, gradient)
        if ctx.flat:
            outer = _relu_flatten_gradient(gradient, y, ctx.images)
        else:
            outer = _relu_gradient(gradient, y)
        found: list[Tensor | None] = []
        inputs = [x, *ctx.between]
        for place in reversed(range(len(inputs))):
            weight, bias = parameters[2 * place : 2 * place + 2]
            of_x = place > 0 or ctx.needs_input_grad[2]
            outer, *own = ctx.settings[place].gradients(outer, inputs[place], weight, bias, of_x=of_x)
            found = [*own, *found]
            if place > 0:
                outer = _relu_gradient(outer, inputs[place], into=outer)
        return None, None, outer, *found


def _relu_gradient(gradient: Tensor, y: Tensor, into: Tensor | None = None) -> Tensor:
    """The gradient of the input of a ReLU with the result ``y``, written into ``into`` if given."""
    if into is None:
        return torch.ops.aten.threshold_backward.default(gradient, y, 0)  # type: ignore[no-any-return]
    return torch.ops.aten.threshold_backward.grad_input(gradient, y, 0, grad_input=into)  # type: ignore[no-any-return]


def _relu_flatten(images: Tensor) -> Tensor:
    """``relu(images).flatten(1)`` of channels-last images."""
    samples, channels, rows, columns = images.shape
    y = torch.empty((samples, channels * rows * columns), dtype=torch.float32, device="cpu")
    stored = _as_stored(images)
    _kernels().masked_transpose(stored, stored, y.numpy().reshape(samples, channels, rows * columns))
    return y


def _relu_flatten_gradient(gradient: Tensor, y: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of ``_relu_flatten``."""
    out = torch.empty(shape, dtype=torch.float32, device="cpu", memory_format=torch.channels_last)
    both = (tensor.detach().contiguous().numpy().reshape(*shape[:2], -1) for tensor in (gradient, y))
    _kernels().masked_transpose(*both, _as_stored(out))
    return out


def _as_stored(images: Tensor) -> NDArray[Any]:
    """A view of channels-last images (N, C, H, W) as an array (N, H W, C)."""
    array: NDArray[Any] = images.detach().permute(0, 2, 3, 1).flatten(1, 2).numpy()
    return array


def _differentiable_gradient(
    settings: tuple[ConvSettings, ...], flat: bool, x: Tensor, parameters: list[Tensor | None], gradient: Tensor
) -> list[Tensor | None]:
    """The gradient by torch's own operations, which autograd can differentiate again."""
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
    from freshet.training.fast import layer_kernels

    return layer_kernels
