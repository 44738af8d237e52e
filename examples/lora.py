"""LoRA: the base network is frozen; only its low-rank updates are trained and sent.

python examples/lora.py          (FRESHET_SHORT=1 for a few seconds)
"""

import copy
import os

import torch
from sklearn.datasets import load_digits
from torch import nn

import freshet

SHORT = bool(os.environ.get("FRESHET_SHORT"))


class LoRA(nn.Module):
    """``W x + B A x`` with W frozen. B starts at 0, so the output is unchanged at first."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + x @ self.a.T @ self.b.T


def pretrain(x: torch.Tensor, y: torch.Tensor) -> nn.Sequential:
    """Train the base network, here on the digits 0 to 4 only."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(x[y < 5]), y[y < 5]).backward()
        optimiser.step()
    return network


def with_lora(base: nn.Sequential, rank: int) -> nn.Sequential:
    """Copy the network and add a low-rank update to each linear layer."""
    network = copy.deepcopy(base)
    for name, layer in base.named_children():
        if isinstance(layer, nn.Linear):
            setattr(network, name, LoRA(getattr(network, name), rank))
    return network


x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
base = pretrain(x[:1400], y[:1400])
torch.manual_seed(1)

federation = freshet.Federation(
    model=with_lora(base, rank=4),
    train=(x[:1400], y[:1400]),
    test=(x[1400:], y[1400:]),
    devices=20,
    method="fedasmu",
    training={"lr": 0.1},
    run={"eval_every": 20},
)
result = federation.run(until="1m" if SHORT else "8m")
total = sum(p.numel() for p in base.parameters())
print(f"{federation.assembly.layout.size:,} parameters are sent instead of {total:,}")
print(f"accuracy {result.accuracy[0]:.2f} -> {result.accuracy[-1]:.2f}")
