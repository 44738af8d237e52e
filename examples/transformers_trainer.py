"""The Trainer of Hugging Face transformers on every device, with its own optimiser and loss.

python examples/transformers_trainer.py          needs: pip install 'freshet-fl[hf]'
"""

import os

from torch import nn

import freshet
from freshet.integrations.hf_trainer import TransformersTrainer


class Net(nn.Module):
    """Any module that the Trainer takes: with labels it gives a loss, without them the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, pixels, labels=None):
        logits = self.layers(pixels)
        if labels is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def federation(method="fedasmu"):
    trainer = TransformersTrainer(per_device_train_batch_size=16, weight_decay=0.01)
    training = {"lr": 0.003, "optimiser": "adamw"}
    return freshet.Federation(Net, data="digits", devices=5, method=method, trainer=trainer, training=training)


if __name__ == "__main__":
    until = 80 if os.environ.get("FRESHET_SHORT") else 600
    for method in ("fedasmu", "fedbuff", "fedavg"):
        accuracy = federation(method).run(until=until).accuracy
        print(f"{method}: accuracy {accuracy[0]:.2f} -> {accuracy[-1]:.2f}")
