"""A Flower NumPyClient as it is, with asynchronous methods and a simulator with a virtual clock.

python examples/flower_client.py          needs: pip install 'freshet-fl[flower]'

``fit`` is one piece, so no fresh model can be merged in mid-training: FedASMU runs without its device part.
"""

import os

import torch
from flwr.client import NumPyClient
from torch import nn

import freshet
from freshet.integrations.flower_client import FlowerClient


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


class Client(NumPyClient):
    def __init__(self, model, data):
        self.model, self.data = model, data

    def fit(self, parameters, config):
        names = self.model.state_dict()
        self.model.load_state_dict({k: torch.tensor(v) for k, v in zip(names, parameters, strict=True)})
        optimiser = torch.optim.Adam(self.model.parameters(), lr=config["lr"])
        for _ in range(config["epochs"]):
            for x, y in self.data.batches(16):
                optimiser.zero_grad()
                nn.functional.cross_entropy(self.model(x), y).backward()
                optimiser.step()
        return [value.numpy() for value in self.model.state_dict().values()], len(self.data), {}


def federation(method="fedbuff"):
    training, trainer = {"lr": 0.003, "optimiser": "adam"}, FlowerClient(Client)
    return freshet.Federation(net, data="digits", devices=10, method=method, trainer=trainer, training=training)


if __name__ == "__main__":
    until = 200 if os.environ.get("FRESHET_SHORT") else 600
    for method in ({"name": "fedasmu", "adaptive_device": False}, "fedbuff", "fedavg"):
        accuracy = federation(method).run(until=until).accuracy
        print(
            f"{method if isinstance(method, str) else method['name']}: accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}"
        )
