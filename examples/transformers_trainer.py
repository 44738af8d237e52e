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


until = 80 if os.environ.get("FRESHET_SHORT") else 600
for method in ("fedasmu", "fedbuff", "fedavg"):
    training = {"lr": 0.003, "optimiser": "adamw"}
    trainer = TransformersTrainer(per_device_train_batch_size=16, weight_decay=0.01)
    federation = freshet.Federation(Net, data="digits", devices=5, method=method, trainer=trainer, training=training)
    result = federation.run(until=until)
    print(f"{federation.config.method_name}: accuracy {result.accuracy[0]:.2f} -> {result.accuracy[-1]:.2f}")
