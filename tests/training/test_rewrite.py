"""Rewritten networks are equal to what the user gave."""

import pytest
import torch
from torch import Tensor, nn

from freshet.models.registry import build
from freshet.training import layers
from freshet.training.layers import FusedPool, PairedConv
from freshet.training.rewrite import faster


def trained(module: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimiser.step()
    return [p.detach() for p in module.parameters()]


def kinds(module: nn.Module) -> set[type[nn.Module]]:
    return {type(layer) for layer in module.modules()}


@pytest.mark.parametrize("lanes", [0, 16])
@pytest.mark.parametrize("name", ["lenet5", "digits", "vgg11", "alexnet"])
def test_networks_train_to_the_same_weights(monkeypatch: pytest.MonkeyPatch, name: str, lanes: int) -> None:
    """To the same bits without pairs of outputs, which add up in another order."""
    monkeypatch.setattr(layers, "LANES", lanes)
    monkeypatch.setattr(layers, "WORTH", 1)
    monkeypatch.setattr(layers, "ENTRIES", (1, 1))
    torch.manual_seed(0)
    x, y = torch.randn(6, 3, 32, 32).round(decimals=1).to(memory_format=torch.channels_last), torch.randint(10, (6,))
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(build(name, input_shape=(3, 32, 32), classes=10).eval().to(memory_format=torch.channels_last))
    faster(modules[1])
    names = [[key for key, _ in module.named_parameters()] for module in modules]
    assert names[0] == names[1]
    assert FusedPool in kinds(modules[1]) and nn.MaxPool2d not in kinds(modules[1])
    assert (PairedConv in kinds(modules[1])) == (name == "lenet5" and lanes == 16)
    for a, b in zip(trained(modules[0], x, y), trained(modules[1], x, y), strict=True):
        if PairedConv in kinds(modules[1]):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(a, b)


def test_a_relu_on_either_side_is_taken_along() -> None:
    for network in (nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), nn.Sequential(nn.MaxPool2d(2), nn.ReLU())):
        assert kinds(faster(network)) == {nn.Sequential, FusedPool, nn.Identity}
        assert [layer.rectify for layer in network if isinstance(layer, FusedPool)] == [True]


def test_a_relu_between_two_pools_is_taken_once() -> None:
    network = faster(nn.Sequential(nn.MaxPool2d(2), nn.ReLU(), nn.MaxPool2d(3)))
    assert [getattr(layer, "rectify", None) for layer in network] == [True, None, False]


def test_layers_with_hooks_subclasses_and_other_pools_are_left_alone() -> None:
    class Mine(nn.MaxPool2d):
        pass

    hooked = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    hooked[1].register_forward_hook(lambda *_: None)
    for network in (hooked, nn.Sequential(nn.ReLU(), Mine(2)), nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 2))):
        before = list(network)
        assert all(a is b for a, b in zip(faster(network), before, strict=True))
    half = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    half[0].register_forward_hook(lambda *_: None)
    assert type(faster(half)[0]) is nn.ReLU
    assert isinstance(half[1], FusedPool) and not half[1].rectify


def test_layers_used_in_several_places_and_outside_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "LANES", 16)

    class Tutorial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.conv = nn.MaxPool2d(2), nn.Conv2d(3, 4, 3)
            self.again, self.same = self.pool, self.conv

    network, hooked = Tutorial(), []
    network.conv.register_forward_hook(lambda *_: hooked.append(True))
    faster(network)
    assert type(network.pool) is type(network.again) is FusedPool
    assert network.conv is network.same and type(network.conv) is PairedConv
    network.conv(torch.randn(2, 3, 8, 8))
    assert hooked == [True]
