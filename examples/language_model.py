"""A causal language model: GPT-2 on the lines of several speakers. Every speaker is a device.

python examples/language_model.py       needs: pip install 'freshet-fl[hf]'       (FRESHET_SHORT=1 for a few seconds)

The model is tiny and starts at random, and the tokens are characters, so that nothing is downloaded.
"""

import os
import random

import datasets
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import freshet

SHORT = bool(os.environ.get("FRESHET_SHORT"))
SPEAKERS = {"ann": "rain", "bob": "sun", "cem": "snow", "dia": "wind", "eve": "fog", "fay": "hail"}


def lines(each: int, seed: int) -> datasets.Dataset:
    """Every speaker talks about one kind of weather. Token 0 fills up shorter lines, 1 begins and 2 ends a line."""
    rng, rows = random.Random(seed), []
    for speaker, weather in SPEAKERS.items():
        for _ in range(each):
            text = (
                f"the {weather} {rng.choice(['came', 'went', 'stayed'])} {rng.choice(['early', 'late', 'all night'])}"
            )
            ids = [1, *(ord(letter) - 29 for letter in text), 2]
            rows.append({"speaker": speaker, "text": text, "input_ids": ids, "labels": ids})
    return datasets.Dataset.from_list(rows)


torch.manual_seed(0)
special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
federation = freshet.Federation(
    model=GPT2LMHeadModel(GPT2Config(vocab_size=98, n_positions=64, n_embd=32, n_layer=2, n_head=2, **special)),
    train=lines(30, seed=0),
    test=lines(5, seed=1),
    groups="speaker",
    method="fedasmu",
    task="huggingface",
    training={"optimiser": "adam", "lr": 0.01, "epochs": 3},
    run={"eval_every": 20},
)
result = federation.run(until="40s" if SHORT else "4m")
perplexity = result.frame()["perplexity"]
print(f"perplexity {perplexity.iloc[0]:.1f} -> {perplexity.iloc[-1]:.1f}, accuracy {result.accuracy[-1]:.2f}")

start = torch.tensor([[1, *(ord(letter) - 29 for letter in "the ")]])
written = result.module().generate(start, max_new_tokens=20, do_sample=False)[0].tolist()
print("".join(chr(token + 29) for token in written if token > 2))
