"""Fused convolutions with ReLU equal torch's layers bit for bit, and searches are remembered."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from freshet.models.registry import build
from freshet.training.fast import accelerate, sequences
from freshet.training.fast.sequences import FusedSequential

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse even a few images."""
    monkeypatch.setattr(sequences, "MIN_ENTRIES", 1)


def networks() -> list[nn.Sequential]:
    """One or several convolutions, flattened or not, with all kinds of settings. Channel counts are below and above the
    length of a vector."""
    conv, relu = nn.Conv2d, nn.ReLU
    return [
        nn.Sequential(conv(3, 17, 2), relu(), conv(17, 9, 2), relu(), nn.Flatten(1)),
        nn.Sequential(conv(3, 64, 2), relu(), conv(64, 32, 2, bias=False), relu(), nn.Flatten()),
        nn.Sequential(conv(3, 16, 3, stride=2, padding=1), relu(), conv(16, 20, 3, dilation=2, groups=2), relu()),
        nn.Sequential(conv(3, 12, 3, padding=(1, 0)), relu(inplace=True)),
        nn.Sequential(conv(3, 16, 3), relu(), nn.BatchNorm2d(16), conv(16, 12, 3), relu(), nn.Flatten(1)),
    ]


def both(network: nn.Module, x: Tensor) -> tuple[list[Tensor], str]:
    """Outputs and gradients of input and parameters, and the name of the last operation."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = network(x)
    along = torch.linspace(-1, 1, y.numel()).view(y.shape)
    gradients = torch.autograd.grad((y * along).sum(), [x, *network.parameters()])
    return [y.detach(), *gradients], type(y.grad_fn).__name__


@pytest.mark.parametrize("place", range(len(networks())))
@pytest.mark.parametrize("samples", [1, 10])
def test_values_and_gradients_have_the_bits_of_torch(place: int, samples: int) -> None:
    torch.manual_seed(place)
    plain = networks()[place].to(memory_format=LAST)
    ours = accelerate(copy.deepcopy(plain))
    x = torch.randn(samples, 3, 13, 11).to(memory_format=LAST)
    x[0, 0, 5, 5] = float("nan")
    (expected, _), (found, name) = both(plain, x), both(ours, x)
    assert name == "ConvReluFunctionBackward"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_other_layouts_and_small_images_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    network = accelerate(networks()[0])
    assert both(network, torch.randn(2, 3, 9, 9))[1] != "ConvReluFunctionBackward"
    monkeypatch.setattr(sequences, "MIN_ENTRIES", 2 * (17 * 8 * 8 + 9 * 7 * 7))
    x = torch.randn(2, 3, 9, 9).to(memory_format=LAST)
    assert both(network, x)[1] == "ConvReluFunctionBackward"
    assert both(network, x[:1])[1] != "ConvReluFunctionBackward"
    with pytest.raises(RuntimeError, match="greater than actual input size"):
        network(torch.randn(2, 3, 2, 2).to(memory_format=LAST))


def test_a_new_hook_sees_its_layer() -> None:
    network, x, seen = accelerate(networks()[0]), torch.randn(2, 3, 9, 9).to(memory_format=LAST), list[Tensor]()
    expected = network(x)
    handle = network[1].register_forward_hook(lambda layer, given, result: seen.append(result))
    torch.testing.assert_close(network(x), expected)
    assert len(seen) == 1 and bool((seen[0] >= 0).all())
    handle.remove()
    assert type(network(x).grad_fn).__name__ == "ConvReluFunctionBackward"
    network[2] = nn.Conv2d(17, 9, 2)
    assert not torch.equal(network(x), expected)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Fills with the shape of the images at every search."""
    shapes, find_run = [], sequences.find_run

    def counting(layers: list[nn.Module], x: Tensor) -> sequences.FusedRun | None:
        shapes.append(tuple(x.shape))
        return find_run(layers, x)

    monkeypatch.setattr(sequences, "find_run", counting)
    return shapes


@pytest.mark.parametrize(("name", "shape"), [("digits", (1, 8, 8)), ("lenet5", (1, 28, 28)), ("resnet20", (3, 32, 32))])
def test_layers_are_searched_once_per_kind_of_input_whether_or_not_a_run_is_found(
    monkeypatch: pytest.MonkeyPatch, searches: list[tuple[int, ...]], name: str, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(sequences, "MIN_ENTRIES", 250_000)
    network = accelerate(build(name, input_shape=shape, classes=10).to(memory_format=LAST))
    convs = [
        layer
        for sequence in network.modules()
        if isinstance(sequence, FusedSequential)
        for layer in sequence
        if isinstance(layer, nn.Conv2d)
    ]
    for samples in (4, 3):
        x = torch.randn(samples, *shape).to(memory_format=LAST)
        network(x)
        searched = len(searches)
        assert 0 < searched <= len(convs)
        for _ in range(3):
            network(x)
        assert len(searches) == searched
        searches.clear()


def test_a_hook_or_another_layer_starts_a_new_search(searches: list[tuple[int, ...]]) -> None:
    network, x = accelerate(networks()[0]), torch.randn(2, 3, 9, 9).to(memory_format=LAST)
    network(x)
    assert len(searches) == 1
    handle = network[1].register_forward_hook(lambda layer, given, result: None)
    network(x)
    assert len(searches) == 3, "the first convolution with and the second without the layers around the hook"
    handle.remove()
    searches.clear()
    network(x)
    assert not searches
    network[4] = nn.Flatten(2)
    assert network(x).shape == (2, 9, 49)
    assert len(searches) == 1


def test_remembered_searches_do_not_pile_up_and_a_copy_uses_its_own_layers(
    monkeypatch: pytest.MonkeyPatch, searches: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr(sequences, "MAX_REMEMBERED", 3)
    network = accelerate(networks()[0])
    inputs = [torch.randn(2, 3, side, side).to(memory_format=LAST) for side in range(5, 12)]
    for x in inputs:
        network(x)
    searches.clear()
    for x in reversed(inputs):
        network(x)
    assert len(searches) >= len(inputs) - 3
    twin = copy.deepcopy(network)
    with torch.no_grad():
        twin[0].weight.zero_()
    x = inputs[-1]
    assert not torch.equal(twin(x), network(x))


def test_gradients_can_be_differentiated_and_taken_per_sample() -> None:
    torch.manual_seed(0)
    x, found = torch.randn(2, 3, 6, 6).to(memory_format=LAST), []
    plain = networks()[0]
    for network in (plain, accelerate(copy.deepcopy(plain))):
        first = network[0].weight
        (gradient,) = torch.autograd.grad(network(x).square().sum(), first, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), first)[0])

        def loss(state: dict[str, Tensor], sample: Tensor, network: nn.Module = network) -> Tensor:
            return functional_call(network, state, (sample[None],)).square().sum()

        state = {name: p.detach() for name, p in network.named_parameters()}
        found.append(vmap(grad(loss), in_dims=(None, 0))(state, x)["0.weight"])
    torch.testing.assert_close(found[0], found[2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], found[3], rtol=1e-4, atol=1e-4)


def test_changing_outputs_or_weights_before_the_backward_pass_raises() -> None:
    network = accelerate(networks()[0])
    for change in ("output", "weight"):
        y = network(torch.randn(2, 3, 9, 9).to(memory_format=LAST))
        with torch.no_grad():
            (y if change == "output" else network[2].weight).add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
