"""The replaced layers give torch's values and gradients."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from freshet.training.fast import layers
from freshet.training.fast.layers import FusedPool, PairedConv
from freshet.training.fast.sequences import FusedSequential

LAST = torch.channels_last


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the fast layers on any CPU and for a few images."""
    monkeypatch.setattr(layers, "SIMD_FLOATS", 16)
    monkeypatch.setattr(layers, "MIN_SAVED_PRODUCTS", 1)
    monkeypatch.setattr(layers, "MIN_POOL_ENTRIES", (1, 1))


def both_ways(layer: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor, str]:
    """Outputs, gradient of the input, and the name of the operation."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x)
    weights = torch.arange(y.numel(), dtype=y.dtype).view(y.shape)
    (gradient,) = torch.autograd.grad((y * weights).sum(), x)
    return y.detach(), gradient, type(y.grad_fn).__name__


def awkward(shape: tuple[int, ...]) -> Tensor:
    """Images with many equal entries, zeros of both signs, infinities and NaN."""
    x = torch.randn(shape).round(decimals=1)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])
    places = torch.rand(shape)
    x = torch.where(places < 0.2, special[torch.randint(5, shape)], x)
    x[:, :, :2, :2] = -float("inf")
    return x.to(memory_format=LAST)


@pytest.mark.parametrize("rectify", [False, True])
@pytest.mark.parametrize("window", [2, 3, (2, 3), (1, 4)])
@pytest.mark.parametrize("shape", [(5, 6, 12, 12), (3, 1, 7, 9), (2, 17, 11, 13), (4, 32, 6, 5)])
def test_pooling_has_the_bits_of_torch(
    always: None, shape: tuple[int, ...], window: int | tuple[int, int], rectify: bool
) -> None:
    torch.manual_seed(0)
    plain = nn.MaxPool2d(window)
    assert FusedPool.covers(plain)
    reference = nn.Sequential(plain, nn.ReLU()) if rectify else plain
    for x in (awkward(shape), awkward(shape).contiguous()):
        y, gradient, name = both_ways(partial(FusedPool(window).pool, rectify=rectify), x)
        expected, expected_gradient, _ = both_ways(reference, x)
        assert (name == "PoolFunctionBackward") == x.is_contiguous(memory_format=LAST)
        torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=0)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_the_output_may_be_changed_in_place(always: None, default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    try:
        for after in (nn.ReLU(inplace=True), nn.LeakyReLU(inplace=True), nn.Hardtanh(inplace=True)):
            x = torch.randn(2, 6, 8, 8, dtype=torch.float32).to(memory_format=LAST)
            ours = both_ways(nn.Sequential(FusedPool(2), after), x)
            plain = both_ways(nn.Sequential(nn.MaxPool2d(2), after), x)
            assert torch.equal(ours[0], plain[0]) and torch.equal(ours[1], plain[1])
    finally:
        torch.set_default_dtype(torch.float32)


def test_forward_mode_differentiation_is_left_to_torch(always: None) -> None:
    x, direction = (torch.randn(2, 6, 8, 8).to(memory_format=LAST) for _ in range(2))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        ours, plain = (
            torch.autograd.forward_ad.unpack_dual(pool(dual)).tangent for pool in (FusedPool(2), nn.MaxPool2d(2))
        )
        assert torch.equal(ours, plain)


def test_other_inputs_are_pooled_by_torch(always: None) -> None:
    pool = FusedSequential(FusedPool(2), nn.ReLU())
    assert both_ways(pool, torch.randn(3, 6, 6))[0].shape == (3, 3, 3)
    assert (
        both_ways(pool, torch.randn(2, 3, 6, 6, dtype=torch.float64).to(memory_format=LAST))[0].dtype == torch.float64
    )
    assert pool(torch.empty(0, 3, 6, 6)).shape == (0, 3, 3, 3)
    with pytest.raises(RuntimeError, match="too small"):
        pool(torch.randn(2, 3, 1, 6).to(memory_format=LAST))


@pytest.mark.parametrize(("channels", "rows", "ours"), [(3, 4, True), (3, 3, False), (17, 4, False), (17, 7, True)])
def test_small_images_are_pooled_by_torch(
    always: None, monkeypatch: pytest.MonkeyPatch, channels: int, rows: int, ours: bool
) -> None:
    monkeypatch.setattr(layers, "MIN_POOL_ENTRIES", (17 * 7 * 4, 3 * 4 * 4))
    name = both_ways(FusedPool(2), torch.randn(1, channels, rows, 4).to(memory_format=LAST))[2]
    assert (name == "PoolFunctionBackward") == ours


@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool2d(3, stride=2),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, return_indices=True),
        nn.MaxPool2d(16),
        nn.MaxPool2d((2,)),  # type: ignore[arg-type]
        nn.MaxPool2d(2, stride=()),  # type: ignore[arg-type]
    ],
)
def test_pools_that_are_not_replaced(layer: nn.MaxPool2d) -> None:
    assert not FusedPool.covers(layer)


def paired(conv: nn.Conv2d) -> PairedConv:
    assert PairedConv.covers(conv)
    twin = PairedConv(
        conv.in_channels, conv.out_channels, conv.kernel_size, padding=conv.padding, bias=conv.bias is not None
    )
    twin.load_state_dict(conv.state_dict())
    return twin


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("padding", [0, 2, (1, 0)])
@pytest.mark.parametrize(("channels", "kernel"), [(3, 5), (1, (3, 4)), (4, (1, 2))])
def test_paired_outputs_equal_the_plain_convolution(
    always: None, channels: int, kernel: int, padding: int, bias: bool
) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, 6, kernel, padding=padding, bias=bias)
    twin = paired(conv)
    pairs = 0
    for width in (12, 13):
        x = torch.randn(4, channels, 10, width).to(memory_format=LAST)
        y, expected = twin(x), conv(x)
        pairs += y.shape[3] % 2 == 0 and type(y.grad_fn).__name__ == "PermuteBackward0"
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
        assert y.is_contiguous(memory_format=LAST)
        weights = torch.randn_like(expected)
        ours = torch.autograd.grad((y * weights).sum(), list(twin.parameters()))
        theirs = torch.autograd.grad((expected * weights).sum(), list(conv.parameters()))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6 * float(b.abs().max()))
    assert pairs == 1, "one of the two widths gives pairs"


def test_later_convolutions_and_other_layouts_are_left_to_torch(always: None) -> None:
    conv = nn.Conv2d(3, 6, 5)
    twin, x = paired(conv), torch.randn(4, 3, 12, 12)
    for given in (x, x.to(memory_format=LAST).requires_grad_()):
        assert torch.equal(twin(given), conv(given))
        assert type(twin(given).grad_fn).__name__ == "ConvolutionBackward0"


def test_a_few_images_are_left_to_torch(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MIN_SAVED_PRODUCTS", 4 * 8 * 8 // 2 * 3 * 5 * 4)
    twin, x = paired(nn.Conv2d(3, 6, 5)), torch.randn(4, 3, 12, 12).to(memory_format=LAST)
    assert type(twin(x).grad_fn).__name__ == "PermuteBackward0"
    assert type(twin(x[:3]).grad_fn).__name__ == "ConvolutionBackward0"


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 9, 5),
        nn.Conv2d(3, 6, 5, stride=2),
        nn.Conv2d(3, 6, 5, dilation=2),
        nn.Conv2d(4, 6, 5, groups=2),
        nn.Conv2d(3, 6, 5, padding="same"),
        nn.Conv2d(3, 6, 5, padding=1, padding_mode="circular"),
    ],
)
def test_convolutions_that_are_not_replaced(always: None, conv: nn.Conv2d) -> None:
    assert not PairedConv.covers(conv)


def small_networks() -> list[nn.Sequential]:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 6, 3)
    head = nn.Sequential(nn.Conv2d(6, 4, 2), nn.Tanh(), nn.Flatten(1), nn.Linear(4 * 16, 2))
    pool = nn.MaxPool2d(2)
    return [
        FusedSequential(paired(conv), FusedPool(2), nn.ReLU(), head),
        nn.Sequential(conv, pool, nn.ReLU(), head),
    ]


def test_gradients_can_be_differentiated(always: None) -> None:
    """Rules may have a gradient in their loss."""
    x, found = torch.randn(4, 3, 13, 13).to(memory_format=LAST), []
    for network in small_networks():
        first = network[0].weight
        (gradient,) = torch.autograd.grad(network(x).square().sum(), first, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), first)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    assert float(found[1].abs().max()) > 0.1


def test_per_sample_gradients_by_torch_func(always: None) -> None:
    """Rules may clip each sample's gradient."""
    x, found = torch.randn(4, 3, 12, 12).to(memory_format=LAST), []
    for network in small_networks():

        def loss(state: dict[str, Tensor], sample: Tensor, network: nn.Module = network) -> Tensor:
            return functional_call(network, state, (sample[None],)).square().sum()

        state = {name: p.detach() for name, p in network.named_parameters()}
        found.append(vmap(grad(loss), in_dims=(None, 0))(state, x)["0.weight"])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    assert found[0].shape == (4, 6, 3, 3, 3)
