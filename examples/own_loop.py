"""Your own training loop on every device: Adam, label smoothing, gradient clipping, whatever you write.

python examples/own_loop.py          (FRESHET_SHORT=1 for a few seconds)
"""

import os

import torch
from torch import nn

import freshet


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def my_train(model, data, trip):
    optimiser = torch.optim.Adam(model.parameters(), lr=trip.lr)
    for _ in range(trip.epochs):
        for x, y in data.batches(16):
            loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            trip.step()  # here the fresh model is merged, if it is time
    return {"loss": loss.item()}


def federation(method="fedasmu"):
    training = {"lr": 0.003, "optimiser": "adam"}  # the server should know which optimiser you use
    return freshet.Federation(net, data="digits", devices=10, method=method, trainer=my_train, training=training)


if __name__ == "__main__":
    until = 200 if os.environ.get("FRESHET_SHORT") else 600
    for method in ("fedasmu", "fedbuff", "fedavg"):
        accuracy = federation(method).run(until=until).accuracy
        print(f"{method}: accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}")
