"""PEFT: a Hugging Face classifier whose base is frozen. Only the LoRA adapter and the head are trained and sent.

python examples/adapter.py       needs: pip install 'freshet-fl[hf]'       (FRESHET_SHORT=1 for a few seconds)

The base is tiny and random, so that nothing is downloaded. For a real one, use AutoModelForSequenceClassification
.from_pretrained(NAME, num_labels=3) and the tokenizer of the same name.
"""

import os

import datasets
import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

import freshet

SHORT = bool(os.environ.get("FRESHET_SHORT"))


def sentences(count: int, seed: int) -> datasets.Dataset:
    """Invent tokenised sentences of 4 to 20 tokens. Every second token is one of the six of the class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, count)
    ids = [rng.integers(30, 200, rng.integers(4, 21)) for _ in labels]
    for row, label in zip(ids, labels, strict=True):
        row[::2] = rng.integers(10 + 6 * label, 16 + 6 * label, len(row[::2]))
    return datasets.Dataset.from_dict({"input_ids": [row.tolist() for row in ids], "label": labels.tolist()})


def base() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=200, num_labels=3, initializer_range=0.2, **sizes))


model = get_peft_model(base(), LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"]))
federation = freshet.Federation(
    model=model,
    train=sentences(800, seed=0),
    test=sentences(200, seed=1),
    devices=10,
    method="fedasmu",
    task="huggingface",
    data={"partition": "iid"},
    training={"optimiser": "adam", "lr": 0.01},
    run={"eval_every": 20},
)
result = federation.run(until="40s" if SHORT else "4m")
total = sum(parameter.numel() for parameter in model.parameters())
print(f"{len(result.weights):,} of {total:,} parameters are sent")
print(f"accuracy {result.accuracy[0]:.2f} -> {result.accuracy[-1]:.2f}")

result.save_pretrained("adapter")  # the adapter alone; the base stays where it came from
trained = PeftModel.from_pretrained(base(), "adapter").eval()
ids = torch.tensor([[15, 150, 11, 90, 12]])
print("a sentence of class 0 is classified as", int(trained(input_ids=ids).logits.argmax()))
