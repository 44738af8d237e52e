"""A GPT-like language model with LoRA: the base is frozen, and only the adapter is trained and sent.

python examples/gpt_lora.py       needs: pip install 'freshet-fl[hf]'       (FRESHET_SHORT=1 for a few seconds)

The base is tiny and random, so that nothing is downloaded. For a real one, use AutoModelForCausalLM
.from_pretrained(NAME) and leave out modules_to_save: its embeddings know the words.
"""

import os

import datasets
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import freshet


def counting(count: int, seed: int) -> datasets.Dataset:
    """Lines that count upwards, of 4 to 12 tokens."""
    rng = np.random.default_rng(seed)
    rows = [list(range(a, a + n)) for a, n in zip(rng.integers(3, 40, count), rng.integers(4, 13, count), strict=True)]
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})


def federation(method="fedasmu"):
    torch.manual_seed(0)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    base = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=32, n_embd=32, n_layer=2, n_head=2, **special))
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], modules_to_save=["wte"])
    return freshet.Federation(
        model=get_peft_model(base, lora),
        train=counting(400, seed=0),
        test=counting(80, seed=1),
        devices=10,
        method=method,
        task="huggingface",
        data={"partition": "iid"},
        training={"optimiser": "adam", "lr": 0.03, "epochs": 2},
        run={"eval_every": 20},
    )


if __name__ == "__main__":
    until = 40 if os.environ.get("FRESHET_SHORT") else 300
    for method in ("fedasmu", "fedbuff", "fedavg"):
        result = federation(method).run(until=until)
        perplexity = result.frame()["perplexity"]
        print(f"{method}: {len(result.weights):,} numbers are sent, perplexity {perplexity.iloc[-1]:.1f}")
