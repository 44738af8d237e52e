"""Convolution, ReLU and max pooling as one operation, compared with torch's layers in float64."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradgradcheck

from freshet.training.fast.fused_conv_pool import MAX_CHUNK, ConvPoolFunction, Stage

LAST = torch.channels_last
LENET = (Stage(2, (2, 2), True), Stage(0, (2, 2), True))
ODD = (Stage(1, (1, 1), True), Stage(1, (3, 2), False), Stage(0, (1, 1), False))
#: Largest error of gradients, relative to the largest entry (torch's layers in float32: 6e-6).
CLOSE = 2e-6


def network(channels: int, filters: tuple[int, ...], kernels: tuple[tuple[int, int], ...]) -> list[Tensor]:
    """Weights and biases in turn, scaled as in a network."""
    found = []
    for outputs, kernel in zip(filters, kernels, strict=True):
        weight = torch.randn(outputs, channels, *kernel) / (channels * kernel[0] * kernel[1]) ** 0.5
        found += [weight.to(memory_format=LAST), torch.randn(outputs)]
        channels = outputs
    return found


def apply_plainly(stages: tuple[Stage, ...], x: Tensor, *parameters: Tensor | None) -> Tensor:
    for stage, weight, bias in zip(stages, parameters[::2], parameters[1::2], strict=True):
        assert weight is not None
        x = stage.apply_plainly(x, weight, bias)
    return x


def compare(stages: tuple[Stage, ...], x: Tensor, parameters: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Outputs and all gradients: ours, and torch's in float64."""
    ours = [tensor.clone(memory_format=torch.preserve_format).requires_grad_() for tensor in (x, *parameters)]
    theirs = [tensor.double().requires_grad_() for tensor in (x, *parameters)]
    y, expected = ConvPoolFunction.apply(stages, *ours), apply_plainly(stages, *theirs)
    along = torch.randn_like(y).round()
    found = torch.autograd.grad(y, ours, along), torch.autograd.grad(expected, theirs, along.double())
    return [(y.detach(), expected.detach()), *zip(*found, strict=True)]


@pytest.mark.parametrize("samples", [1, 10, 25, 50, MAX_CHUNK, MAX_CHUNK + 1])
@pytest.mark.parametrize(
    ("shape", "stages", "filters", "kernels"),
    [
        ((1, 28, 28), LENET, (6, 16), ((5, 5), (5, 5))),
        ((3, 32, 32), (Stage(0, (2, 2), True),) * 2, (6, 16), ((5, 5), (5, 5))),
        ((3, 11, 13), ODD, (5, 7, 9), ((3, 3), (3, 3), (2, 2))),
        ((2, 9, 8), (Stage(3, (2, 2), True), Stage(0, (1, 2), True)), (1, 2), ((4, 7), (1, 1))),
        ((4, 7, 7), (Stage(0, (7, 7), True),), (3,), ((1, 1),)),
    ],
)
def test_values_and_gradients_equal_torchs(samples, shape, stages, filters, kernels):
    torch.manual_seed(samples)
    x = torch.randn(samples, *shape).to(memory_format=LAST)
    for ours, theirs in compare(stages, x, network(shape[0], filters, kernels)):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= CLOSE * theirs.abs().max()


@pytest.mark.parametrize("samples", [8, 16, 24, 32, 40, 56, 64])
@pytest.mark.parametrize("filters", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 16])
def test_whole_numbers_have_the_bits_of_torch_with_every_tile(samples, filters):
    """Sums of small whole numbers are exact, so even ties between entries of a window are the same."""
    torch.manual_seed(filters)
    x = torch.randint(-3, 4, (samples, 3, 9, 9)).float()
    kernels = (torch.randint(-2, 3, (filters, 3, 3, 3)).float(), torch.randint(-2, 3, (filters,)).float())
    again = (torch.randint(-2, 3, (2, filters, 2, 2)).float(), torch.randint(-2, 3, (2,)).float())
    for ours, theirs in compare((Stage(1, (2, 2), True), Stage(0, (1, 1), True)), x, [*kernels, *again]):
        assert torch.equal(ours, theirs.float())


def test_nan_and_infinity_spread_as_in_torch():
    torch.manual_seed(0)
    x, parameters = torch.randn(9, 1, 28, 28), network(1, (6, 16), ((5, 5), (5, 5)))
    x[4, 0, 13, 13], x[7, 0, 3, 3] = float("nan"), float("inf")
    ours, theirs = ConvPoolFunction.apply(LENET, x, *parameters), apply_plainly(LENET, x, *parameters)
    assert torch.equal(ours.isnan(), theirs.isnan()) and ours[4].isnan().any() and not ours[:4].isnan().any()
    assert torch.equal(ours.isfinite(), theirs.isfinite())


def test_a_sample_has_the_same_bits_alone_and_in_a_batch():
    torch.manual_seed(0)
    x, parameters = torch.randn(70, 1, 28, 28), network(1, (6, 16), ((5, 5), (5, 5)))
    together = ConvPoolFunction.apply(LENET, x, *parameters)
    for samples in (slice(0, 1), slice(3, 16), slice(63, 66), slice(20, 70)):
        assert torch.equal(ConvPoolFunction.apply(LENET, x[samples], *parameters), together[samples])


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
def test_images_and_gradients_may_have_any_memory_layout(layout):
    torch.manual_seed(0)
    wide = torch.randn(10, 3, 12, 24).to(memory_format=layout)
    parameters = [p.requires_grad_() for p in network(3, (6,), ((5, 5),))]
    for x in (wide[:, :, :, ::2], wide[..., :12], wide[::2]):
        y = ConvPoolFunction.apply((Stage(0, (2, 2), True),), x, *parameters)
        along = torch.randn_like(y).transpose(2, 3).contiguous().transpose(2, 3)[...]
        tight = ConvPoolFunction.apply((Stage(0, (2, 2), True),), x.contiguous(), *parameters)
        assert torch.equal(y, tight)
        strided = torch.autograd.grad(y, parameters, along)
        for a, b in zip(strided, torch.autograd.grad(tight, parameters, along.contiguous()), strict=True):
            assert torch.equal(a, b)


def test_without_bias_and_without_the_gradient_of_images():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 1, 9, 9), torch.randn(4, 1, 3, 3, requires_grad=True)
    stages = (Stage(1, (2, 2), True),)
    y = ConvPoolFunction.apply(stages, x, weight, None)
    torch.testing.assert_close(y, apply_plainly(stages, x, weight, None))
    (found,) = torch.autograd.grad(y.sum(), weight)
    (expected,) = torch.autograd.grad(apply_plainly(stages, x, weight, None).sum(), weight)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_second_derivative_equals_torchs():
    torch.manual_seed(0)
    x, parameters = torch.randn(2, 1, 6, 6), network(1, (2,), ((3, 3),))
    given = [tensor.requires_grad_() for tensor in (x, *parameters)]
    stages = (Stage(1, (2, 2), True),)

    def twice(operation: object) -> Tensor:
        (inner,) = torch.autograd.grad(operation(stages, *given).square().sum(), given[1], create_graph=True)
        (outer,) = torch.autograd.grad(inner.square().sum(), given[1])
        return outer

    torch.testing.assert_close(twice(ConvPoolFunction.apply), twice(apply_plainly), rtol=1e-4, atol=1e-4)
    doubles = [tensor.detach().double().requires_grad_() for tensor in given]
    assert gradgradcheck(lambda *tensors: apply_plainly(stages, *tensors), doubles), "torch's are smooth here"


def test_changing_weights_before_the_backward_pass_raises():
    x, (weight, bias) = torch.randn(3, 1, 9, 9), network(1, (4,), ((3, 3),))
    weight.requires_grad_()
    y = ConvPoolFunction.apply((Stage(1, (2, 2), True),), x, weight, bias)
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), weight)
