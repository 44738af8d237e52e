"""A Hugging Face classifier as people type it: a BERT-like model, a tokenised data set, the model's own loss.

python examples/classifier.py       needs: pip install 'freshet-fl[hf]'       (FRESHET_SHORT=1 for a few seconds)

The model is tiny and random, so that nothing is downloaded. For a real one, use from_pretrained(NAME, num_labels=3) and
the tokenizer of the same name.
"""

import os

import datasets
import numpy as np
from transformers import AutoModelForSequenceClassification, BertConfig

import freshet


def sentences(count: int, seed: int) -> datasets.Dataset:
    """Invent tokenised sentences of 4 to 20 tokens. Every second token is one of the six of the class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, count)
    ids = [rng.integers(30, 200, rng.integers(4, 21)) for _ in labels]
    for row, label in zip(ids, labels, strict=True):
        row[::2] = rng.integers(10 + 6 * label, 16 + 6 * label, len(row[::2]))
    return datasets.Dataset.from_dict({"input_ids": [row.tolist() for row in ids], "label": labels.tolist()})


def federation(method="fedasmu"):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return freshet.Federation(
        model=lambda: AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=200, num_labels=3, **sizes)),
        train=sentences(500, seed=0),
        test=sentences(100, seed=1),
        devices=10,
        method=method,
        task="huggingface",
        training={"optimiser": "adam", "lr": 0.003, "epochs": 3},
        run={"eval_every": 20},
    )


if __name__ == "__main__":
    until = 100 if os.environ.get("FRESHET_SHORT") else 300
    for method in ("fedasmu", "fedbuff", "fedavg"):
        result = federation(method).run(until=until)
        print(f"{method}: accuracy {result.accuracy[0]:.2f} -> {result.accuracy[-1]:.2f}")
