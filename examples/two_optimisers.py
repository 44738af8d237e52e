"""A step with two optimisers, as in a GAN: an encoder hides from a critic which half of an image is dark.

python examples/two_optimisers.py          (FRESHET_SHORT=1 for a few seconds)
"""

import os

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import freshet


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU())
        self.classifier, self.critic = nn.Linear(32, 10), nn.Linear(32, 1)

    def forward(self, x):
        return self.classifier(self.encoder(x))


def my_train(model, data, trip):
    critic = torch.optim.Adam(model.critic.parameters(), lr=trip.lr)
    others = torch.optim.Adam([*model.encoder.parameters(), *model.classifier.parameters()], lr=trip.lr)
    for _ in range(trip.epochs):
        for x, y in data.batches(16):
            z, dark = model.encoder(x), (x[:, :, :4].sum((1, 2, 3)) < x[:, :, 4:].sum((1, 2, 3))).float()
            critic.zero_grad()
            binary_cross_entropy_with_logits(model.critic(z.detach())[:, 0], dark).backward()
            critic.step()
            others.zero_grad()
            hidden = binary_cross_entropy_with_logits(model.critic(z)[:, 0], dark)
            (cross_entropy(model.classifier(z), y) - 0.1 * hidden).backward()
            others.step()
            trip.step()


def federation(method="fedasmu"):
    training = {"lr": 0.003, "optimiser": "adam"}
    return freshet.Federation(Pair, data="digits", devices=10, method=method, trainer=my_train, training=training)


if __name__ == "__main__":
    until = 200 if os.environ.get("FRESHET_SHORT") else 600
    for method in ("fedasmu", "fedbuff", "fedavg"):
        accuracy = federation(method).run(until=until).accuracy
        print(f"{method}: accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}")
