"""Convolutions of tiny images as matrix products, compared with torch's in float64."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import conv2d, cross_entropy

from freshet.models.registry import build
from freshet.training.fast import accelerate, layers
from freshet.training.fast.conv_matmul import ConvMatmulFunction
from freshet.training.fast.layers import MatmulConv

LAST = torch.channels_last
CASES = [
    ((2, 2), (3, 3), (1, 1)),
    ((1, 1), (3, 3), (1, 1)),
    ((2, 2), (3, 2), (1, 0)),
    ((1, 4), (3, 5), (1, 2)),
    ((2, 2), (2, 2), (0, 0)),
    ((2, 2), (3, 3), (2, 2)),
    ((4, 4), (5, 5), (2, 2)),
]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MIN_CHANNELS", 3)
    monkeypatch.setattr(layers, "SIMD_FLOATS", 4)


def given(image: tuple[int, int], kernel: tuple[int, int], samples: int = 5) -> list[Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(samples, 6, *image), torch.randn(7, 6, *kernel)
    return [x.to(memory_format=LAST), weight.to(memory_format=LAST), torch.randn(7)]


@pytest.mark.parametrize("samples", [1, 5, 50])
@pytest.mark.parametrize(("image", "kernel", "padding"), CASES)
def test_values_and_gradients_equal_torchs(image, kernel, padding, samples):
    tensors = given(image, kernel, samples)
    ours = [tensor.clone(memory_format=torch.preserve_format).requires_grad_() for tensor in tensors]
    theirs = [tensor.double().requires_grad_() for tensor in tensors]
    y, expected = ConvMatmulFunction.apply(padding, *ours), conv2d(*theirs, padding=padding)
    assert y.is_contiguous(memory_format=LAST)
    along = torch.randn_like(y)
    found = torch.autograd.grad(y, ours, along), torch.autograd.grad(expected, theirs, along.double())
    for one, other in [(y, expected), *zip(*found, strict=True)]:
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 2e-6 * other.abs().max()


def test_without_bias_and_without_the_gradient_of_images():
    x, weight, _ = given((2, 2), (3, 3))
    weight.requires_grad_()
    (found,) = torch.autograd.grad(ConvMatmulFunction.apply((1, 1), x, weight, None).sum(), weight)
    (expected,) = torch.autograd.grad(conv2d(x, weight, padding=1).sum(), weight)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_second_derivative_equals_torchs():
    tensors = [tensor.requires_grad_() for tensor in given((2, 2), (3, 3), 2)]

    def twice(y: Tensor) -> Tensor:
        (inner,) = torch.autograd.grad(y.square().sum(), tensors[1], create_graph=True)
        return torch.autograd.grad(inner.square().sum(), tensors[1])[0]

    ours, theirs = twice(ConvMatmulFunction.apply((1, 1), *tensors)), twice(conv2d(*tensors, padding=1))
    assert (ours - theirs).abs().max() <= 2e-6 * theirs.abs().max()


def test_layers_with_many_channels_take_tiny_images_and_leave_others_to_torch(few: None) -> None:
    layer = accelerate(nn.Conv2d(4, 4, 3, padding=1).to(memory_format=LAST))
    assert type(layer) is MatmulConv
    cases = [((2, 2), "ConvMatmulFunctionBackward"), ((3, 3), "ConvolutionBackward0")]
    for image, name in cases:
        x = torch.randn(2, 4, *image)
        y = layer(x)
        assert type(y.grad_fn).__name__ == name
        torch.testing.assert_close(y, conv2d(x, layer.weight, layer.bias, padding=1))
    for odd in (torch.randn(4, 2, 2), torch.empty(0, 4, 2, 2)):
        assert layer(odd).shape == odd.shape
    with pytest.raises(RuntimeError):
        layer(torch.randn(2, 5, 2, 2))
    assert type(accelerate(nn.Conv2d(2, 4, 3))) is nn.Conv2d
    assert type(accelerate(nn.Conv2d(4, 4, 3, stride=2))) is nn.Conv2d


def test_weights_in_another_layout_and_transforms_are_left_to_torch(few: None) -> None:
    layer, x = MatmulConv(4, 4, 3, padding=1), torch.randn(3, 4, 2, 2)
    assert type(layer(x).grad_fn).__name__ == "ConvolutionBackward0"
    layer.to(memory_format=LAST)
    state = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(state: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(layer, state, (sample[None],)).square().sum()

    assert vmap(grad(loss), in_dims=(None, 0))(state, x)["weight"].shape == (3, 4, 4, 3, 3)


@pytest.mark.parametrize("name", ["vgg11", "alexnet"])
def test_gradients_of_networks_are_as_close_to_those_in_float64_as_torchs(name: str) -> None:
    torch.manual_seed(0)
    plain = build(name, input_shape=(3, 32, 32), classes=10).eval().to(memory_format=LAST)
    x, y = torch.randn(20, 3, 32, 32).to(memory_format=LAST), torch.randint(10, (20,))

    def gradients(network: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(cross_entropy(network(x), y), list(network.parameters()))

    theirs, exact = gradients(plain, x), gradients(copy.deepcopy(plain).double(), x.double())
    ours = accelerate(copy.deepcopy(plain))
    assert sum(type(layer) is MatmulConv for layer in ours.modules()) >= 3
    for a, b, true in zip(gradients(ours, x), theirs, exact, strict=True):
        assert (a - true).abs().max() <= max(2 * (b - true).abs().max(), 1e-6 * true.abs().max())
