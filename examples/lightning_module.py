"""A LightningModule as it is. Lightning's Trainer runs on every device.

python examples/lightning_module.py          needs: pip install 'freshet-fl[lightning]'
"""

import os

import lightning
import torch
from torch import nn

import freshet
from freshet.integrations.lightning import LightningTrainer


class Net(lightning.LightningModule):
    def __init__(self, lr: float = 0.003) -> None:
        super().__init__()
        self.lr = lr  # each trip's learning rate is put here
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def federation(method="fedasmu"):
    training, trainer = {"lr": 0.003, "optimiser": "adam"}, LightningTrainer(batch_size=16, gradient_clip_val=1.0)
    return freshet.Federation(Net, data="digits", devices=10, method=method, trainer=trainer, training=training)


if __name__ == "__main__":
    until = 200 if os.environ.get("FRESHET_SHORT") else 600
    for method in ("fedasmu", "fedbuff", "fedavg"):
        accuracy = federation(method).run(until=until).accuracy
        print(f"{method}: accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}")
