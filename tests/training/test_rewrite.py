"""Rewritten networks are equal to what the user gave, bit for bit."""

import pytest
import torch
from torch import nn

from freshet.models.registry import build
from freshet.training.rewrite import pool_before_relu


def trained(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(3):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimiser.step()
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("name", ["lenet5", "digits", "vgg11", "alexnet"])
def test_pooling_first_gives_the_same_bits(name: str) -> None:
    x, y = torch.randn(6, 3, 32, 32).round(decimals=1), torch.randint(10, (6,))
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(build(name, input_shape=(3, 32, 32), classes=10).eval())
    kinds = [type(layer) for layer in modules[0].modules()]
    pool_before_relu(modules[1])
    names = [[key for key, _ in module.named_parameters()] for module in modules]
    assert names[0] == names[1]
    for a, b in zip(trained(modules[0], x, y), trained(modules[1], x, y), strict=True):
        assert torch.equal(a, b)
    if name == "lenet5":
        assert kinds != [type(layer) for layer in modules[1].modules()], "there was something to swap"


def test_layers_with_hooks_and_other_orders_are_left_alone() -> None:
    hooked = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    hooked[0].register_forward_hook(lambda *_: None)
    other = nn.Sequential(nn.MaxPool2d(2), nn.ReLU(), nn.AvgPool2d(2))
    for network, first in ((hooked, nn.ReLU), (other, nn.MaxPool2d)):
        assert type(pool_before_relu(network)[0]) is first
