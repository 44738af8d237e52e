"""An accelerated network equals the original one."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from freshet.models.registry import build
from freshet.training.fast import accelerate, layers, sequences
from freshet.training.fast.layers import FusedPool, PairedConv


def trained(module: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimiser.step()
    return [p.detach() for p in module.parameters()]


def kinds(module: nn.Module) -> set[type[nn.Module]]:
    return {type(layer) for layer in module.modules()}


@pytest.mark.parametrize(("lanes", "enough"), [(0, math.inf), (16, math.inf), (0, 1)])
@pytest.mark.parametrize("name", ["lenet5", "digits", "vgg11", "alexnet"])
def test_networks_train_to_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, name: str, lanes: int, enough: float
) -> None:
    """The bits are the same except for paired outputs, fused runs of convolutions and matrix products, which add in
    another order (``test_conv_matmul``)."""
    monkeypatch.setattr(layers, "SIMD_FLOATS", lanes)
    monkeypatch.setattr(sequences, "MIN_PRODUCTS", enough)
    monkeypatch.setattr(sequences, "MIN_ENTRIES", 1)
    monkeypatch.setattr(layers, "MIN_CHANNELS", math.inf)
    monkeypatch.setattr(layers, "MIN_SAVED_PRODUCTS", 1)
    monkeypatch.setattr(layers, "MIN_POOL_ENTRIES", (1, 1))
    torch.manual_seed(0)
    x, y = torch.randn(6, 3, 32, 32).round(decimals=1).to(memory_format=torch.channels_last), torch.randint(10, (6,))
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(build(name, input_shape=(3, 32, 32), classes=10).eval().to(memory_format=torch.channels_last))
    accelerate(modules[1])
    names = [[key for key, _ in module.named_parameters()] for module in modules]
    assert names[0] == names[1]
    assert FusedPool in kinds(modules[1]) and nn.MaxPool2d not in kinds(modules[1])
    assert (PairedConv in kinds(modules[1])) == (name == "lenet5" and lanes == 16)
    assert ("ConvPoolFunctionBackward" in operations(modules[1], x)) == (enough == 1 and name in ("lenet5", "digits"))
    x = x.detach()
    for a, b in zip(trained(modules[0], x, y), trained(modules[1], x, y), strict=True):
        if PairedConv in kinds(modules[1]) or enough == 1:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(a, b)


def operations(network: nn.Module, x: Tensor) -> list[str]:
    """Names of the operations behind a network's output, the last one first."""
    open_, seen, names = [network(x.requires_grad_()).grad_fn], set(), []
    while open_:
        node = open_.pop(0)
        if node is not None and node.next_functions and node not in seen:
            seen.add(node)
            names.append(type(node).__name__)
            open_ += [before for before, _ in node.next_functions]
    return names


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    monkeypatch.setattr(layers, "MIN_POOL_ENTRIES", (1, 1))
    return torch.randn(2, 4, 12, 12).to(memory_format=torch.channels_last)


def test_a_pool_computes_the_relu_before_or_after_it(images: Tensor) -> None:
    for network in (nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), nn.Sequential(nn.MaxPool2d(2), nn.ReLU())):
        expected = network(images)
        assert operations(accelerate(network), images) == ["PoolFunctionBackward"]
        assert torch.equal(network(images), expected)


def test_a_relu_between_two_pools_is_computed_once(images: Tensor) -> None:
    network = nn.Sequential(nn.MaxPool2d(2), nn.ReLU(), nn.MaxPool2d(3))
    expected = network(images)
    assert operations(accelerate(network), images) == ["PoolFunctionBackward", "PoolFunctionBackward"]
    assert torch.equal(network(images), expected)


def test_subclasses_other_pools_and_layers_with_a_forward_attribute_stay_unchanged() -> None:
    class Mine(nn.MaxPool2d):
        pass

    patched = nn.MaxPool2d(2)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    for layer in (Mine(2), nn.MaxPool2d(3, 2), patched):
        kind = type(layer)
        accelerate(nn.Sequential(nn.ReLU(), layer))
        assert type(layer) is kind


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("hook", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_see_the_same_tensors(images: Tensor, hook: str, place: int) -> None:
    seen: list[list[Tensor]] = []
    for accelerated in (False, True):
        network, shown = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), []
        getattr(network[place], f"register_{hook}")(
            lambda _, *what, shown=shown: shown.extend(t for (t,) in map(tuple_of, what))
        )
        if accelerated:
            accelerate(network)
        network(images.clone(memory_format=torch.preserve_format).requires_grad_()).sum().backward()
        seen.append(shown)
    assert len(seen[0]) == len(seen[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def tuple_of(what: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return what if isinstance(what, tuple) else (what,)


def test_layers_called_one_by_one_give_the_same(images: Tensor) -> None:
    class Own(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return sum(layer(x).mean() for layer in self)  # type: ignore[return-value]

    own, tapped = Own(nn.ReLU(), nn.MaxPool2d(2)), nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
    expected, taps = own(images), [tapped[:2](images), tapped[1](images)]
    assert torch.equal(accelerate(own)(images), expected)
    accelerate(tapped)
    assert all(torch.equal(a, b) for a, b in zip([tapped[:2](images), tapped[1](images)], taps, strict=True))


def test_an_in_place_relu_still_changes_the_callers_tensor(images: Tensor) -> None:
    results = []
    for accelerated in (False, True):
        x, network = (
            images.clone(memory_format=torch.preserve_format),
            nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        )
        y = (accelerate(network) if accelerated else network)(x)
        results.append((x, y))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_layers_used_in_several_places_and_outside_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "SIMD_FLOATS", 16)

    class Tutorial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.conv = nn.MaxPool2d(2), nn.Conv2d(3, 4, 3)
            self.again, self.same = self.pool, self.conv

    network, hooked = Tutorial(), []
    network.conv.register_forward_hook(lambda *_: hooked.append(True))
    accelerate(network)
    assert type(network.pool) is type(network.again) is FusedPool
    assert network.conv is network.same and type(network.conv) is PairedConv
    network.conv(torch.randn(2, 3, 8, 8))
    assert hooked == [True]


def lenet() -> tuple[nn.Module, Tensor]:
    return build("lenet5", input_shape=(1, 28, 28), classes=10), torch.randn(3, 1, 28, 28)


def test_all_convolutions_of_lenet_become_one_operation() -> None:
    network, x = lenet()
    expected = operations(network, x.clone())
    found = operations(accelerate(network), x.clone())
    assert sum("Convolution" in name for name in expected) == 2
    assert found.count("ConvPoolFunctionBackward") == 1 and not any("Convolution" in name for name in found)


def test_the_small_network_for_digits_is_left_to_torch() -> None:
    network = accelerate(build("digits", input_shape=(1, 8, 8), classes=10))
    assert "ConvPoolFunctionBackward" not in operations(network, torch.randn(3, 1, 8, 8))


@pytest.mark.parametrize("place", [0, 1, 2, 4])
def test_a_hook_leaves_only_its_own_convolution_to_torch(place: int) -> None:
    network, x = lenet()
    plain, _ = lenet()
    plain.load_state_dict(network.state_dict())
    seen: list[Tensor] = []
    for one in (accelerate(network), plain):
        one.encoder[place].register_forward_hook(lambda _, __, output: seen.append(output.detach()))  # type: ignore
    names = operations(network, x.clone())
    assert names.count("ConvPoolFunctionBackward") == sum("Convolution" in name for name in names) == 1
    plain(x)
    torch.testing.assert_close(*seen, rtol=1e-5, atol=1e-6)


def test_transforms_and_forward_mode_are_left_to_torch() -> None:
    network, x = lenet()
    plain = network(x)
    accelerate(network)
    torch.testing.assert_close(vmap(network)(x.unsqueeze(1))[:, 0], plain, rtol=1e-5, atol=1e-6)
    with torch.autograd.forward_ad.dual_level():
        dual = network(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        assert torch.autograd.forward_ad.unpack_dual(dual).tangent is not None


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(1, 6, 5, stride=2),
        nn.Conv2d(1, 6, 5, dilation=2),
        nn.Conv2d(2, 6, 5, groups=2),
        nn.Conv2d(1, 6, 5, padding="same"),
        nn.Conv2d(1, 6, 5, padding=(1, 2)),
        nn.Conv2d(1, 6, 5, padding=1, padding_mode="reflect"),
        nn.Conv2d(1, 17, 5),
        nn.Conv2d(17, 6, 5),
        nn.Conv2d(1, 6, 2),
    ],
    ids=str,
)
def test_convolutions_of_other_kinds_are_left_to_torch(monkeypatch: pytest.MonkeyPatch, conv: nn.Conv2d) -> None:
    monkeypatch.setattr(sequences, "MIN_PRODUCTS", 1)
    network, x = nn.Sequential(conv, nn.ReLU(), nn.MaxPool2d(2)), torch.randn(2, conv.in_channels, 28, 28)
    expected = network(x)
    assert "ConvPoolFunctionBackward" not in operations(accelerate(network), x.clone())
    torch.testing.assert_close(network(x), expected, rtol=1e-5, atol=1e-6)


def test_torch_raises_for_images_of_the_wrong_shape() -> None:
    network, _ = lenet()
    accelerate(network)
    with pytest.raises(RuntimeError, match="expected input"):
        network(torch.randn(2, 3, 28, 28))
    with pytest.raises(RuntimeError):
        network(torch.randn(2, 1, 6, 6))
