"""A Vision Transformer of transformers on the handwritten digits, with its own loss.

python examples/vit.py       needs: pip install 'freshet-fl[hf]'       (FRESHET_SHORT=1 for a few seconds)

Arrays go in as they are: the images are the model's main input, the classes its labels.
"""

import os

from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification

import freshet


def federation(method="fedasmu"):
    digits = load_digits()
    images, labels = (digits.images[:, None] / 8 - 1).astype("float32"), digits.target
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    options = ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=10, **sizes)
    return freshet.Federation(
        model=lambda: ViTForImageClassification(options),
        train=(images[:800], labels[:800]),
        test=(images[1500:], labels[1500:]),
        devices=10,
        method=method,
        task="huggingface",
        training={"optimiser": "adam", "lr": 0.01},
        run={"eval_every": 20},
    )


if __name__ == "__main__":
    until = 100 if os.environ.get("FRESHET_SHORT") else 300
    for method in ("fedasmu", "fedbuff", "fedavg"):
        result = federation(method).run(until=until)
        print(f"{method}: accuracy {result.accuracy[0]:.2f} -> {result.accuracy[-1]:.2f}")
