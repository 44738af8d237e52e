"""Local training against the textbook loop (DataLoader, optim.SGD), on one thread.

All train the same network from the same weights on the same batches. ``fast=false`` is Freshet with torch's own layers.
``faster`` compares Freshet with the textbook loop, in processor seconds. ``difference`` is the largest difference
between their resulting parameters, relative to the largest parameter. GPT-2 and ViT are transformers' own classes
(extra ``hf``), small and with random weights, trained on their own loss.

    python benchmarks/kernel.py [--repeat N] [--only NAME]
"""

import argparse
import copy
import importlib.util
from typing import Any

import numpy as np
import torch
from common import (
    BATCH,
    LR,
    Child,
    FixedOrder,
    as_in_tutorials,
    factory_of,
    normalise,
    race,
    serve,
    synthetic,
    textbook,
)
from torch import nn
from torch.utils.data import DataLoader

from freshet import Federation
from freshet.compute.host import keep_freed_memory
from freshet.core.messages import Assignment
from freshet.core.method import LocalRule
from freshet.core.streams import stream
from freshet.training.batches import FederatedData
from freshet.training.network import FlatModel
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Trainer, TripInput

#: Network, shape of an image, samples, epochs, samples per batch.
CELLS = {
    "LeNet5 / Fashion-MNIST": ("lenet5", (1, 28, 28), 600, 2, BATCH),
    "LeNet5 / CIFAR-10": ("lenet5", (3, 32, 32), 500, 2, BATCH),
    "CNN / CIFAR-10": ("cnn", (3, 32, 32), 200, 1, BATCH),
    "AlexNet / CIFAR-10": ("alexnet", (3, 32, 32), 200, 1, BATCH),
    "ResNet20 / CIFAR-10": ("resnet20", (3, 32, 32), 150, 1, BATCH),
    "VGG-11 / CIFAR-10": ("vgg11", (3, 32, 32), 50, 1, BATCH),
    "TextCNN / IMDb": ("textcnn", (256,), 100, 1, BATCH),
    "LeNet5 / Fashion-MNIST, 10": ("lenet5", (1, 28, 28), 200, 2, 10),
    "LeNet5 / CIFAR-10, 10": ("lenet5", (3, 32, 32), 200, 2, 10),
    "CNN / CIFAR-10, 10": ("cnn", (3, 32, 32), 100, 1, 10),
    "AlexNet / CIFAR-10, 10": ("alexnet", (3, 32, 32), 100, 1, 10),
    "ResNet20 / CIFAR-10, 10": ("resnet20", (3, 32, 32), 50, 1, 10),
    "DigitsCNN / digits, 10": ("digits", (1, 8, 8), 1000, 2, 10),
}
#: Models of transformers: the input's name, its shape, samples, epochs, samples per batch.
TRANSFORMERS = {
    "GPT-2, 2 x 128, 64 tokens": ("input_ids", (64,), 160, 1, 16),
    "ViT, 4 x 128, 32 x 32": ("pixel_values", (3, 32, 32), 160, 1, 16),
}
#: The textbook loop, Freshet with torch's layers, and Freshet.
CONTENDERS = ("textbook", "plain", "freshet")


def transformer(cell: str) -> nn.Module:
    """A small GPT-2 or ViT without dropout, which the two loops would draw differently."""
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(1)
    if cell.startswith("GPT"):
        sizes = {
            "vocab_size": 512,
            "n_positions": 64,
            "n_embd": 128,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        off = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        gpt: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off))
        return gpt
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    options = transformers.ViTConfig(image_size=32, patch_size=4, num_labels=10, **sizes)
    vit: nn.Module = transformers.ViTForImageClassification(options)
    return vit


def transformer_rows(cell: str) -> list[dict[str, np.ndarray]]:
    name, shape, samples, _, _ = TRANSFORMERS[cell]
    rng = np.random.default_rng(0)
    if name == "input_ids":
        return [{name: ids, "labels": ids} for ids in rng.integers(0, 512, (samples, *shape))]
    images, labels = rng.normal(size=(samples, *shape)).astype(np.float32), rng.integers(0, 10, samples)
    return [{name: x, "labels": y} for x, y in zip(images, labels, strict=True)]


def transformer_trip(cell: str, *, fast: bool = True):  # type: ignore[no-untyped-def]
    _, _, samples, epochs, batch = TRANSFORMERS[cell]
    rows = transformer_rows(cell)
    training = {"epochs": epochs, "batch_size": batch, "lr": LR, "fast": fast, "device": "cpu"}
    assembly = Federation(
        transformer(cell),
        rows,
        rows[:2],
        shards=[np.arange(samples)],
        task="huggingface",
        fleet={"devices": 1},
        run={"per_round": 1, "in_flight": 1},
        training=training,
    ).assembly
    trainer, weights = assembly.setup().trainer(), assembly.initial.weights
    trip = TripInput(Assignment(0, 1, 1, 1, weights, epochs, LR), (), (), LocalRule(), {})
    return lambda: trainer.train(trip)


def transformer_loop(cell: str):  # type: ignore[no-untyped-def]
    """The loop of transformers' own course: ``DataLoader``, ``model(**batch).loss.backward()``."""
    _, _, samples, epochs, batch = TRANSFORMERS[cell]
    rows: Any = [{name: torch.as_tensor(value) for name, value in row.items()} for row in transformer_rows(cell)]
    start = transformer(cell)

    def loop() -> nn.Module:
        model = copy.deepcopy(start).train()
        optimiser, rng = torch.optim.SGD(model.parameters(), lr=LR), stream(0, "batches", 0, 1)
        for _ in range(epochs):
            for given in DataLoader(rows, batch_size=batch, sampler=FixedOrder(rng.permutation(samples))):
                optimiser.zero_grad()
                model(**given).loss.backward()
                optimiser.step()
        return model

    return loop


def freshet_trip(cell: str, *, fast: bool = True):  # type: ignore[no-untyped-def]
    if cell in TRANSFORMERS:
        return transformer_trip(cell, fast=fast)
    network, shape, samples, epochs, batch = CELLS[cell]
    factory, data = factory_of(network, shape), synthetic(shape, samples)
    options = TrainingOptions(epochs=epochs, batch_size=batch, lr=LR, fast=fast)
    trainer = Trainer(factory, FederatedData.of(data, [np.arange(samples)]), options, seed=0)
    assignment = Assignment(0, 1, 1, 1, FlatModel(factory()).dump(), epochs, LR)
    trip = TripInput(assignment, (), (), LocalRule(), {})
    return lambda: trainer.train(trip)


def textbook_loop(cell: str):  # type: ignore[no-untyped-def]
    if cell in TRANSFORMERS:
        return transformer_loop(cell)
    network, shape, samples, epochs, batch = CELLS[cell]
    factory, dataset = as_in_tutorials(factory_of(network, shape)), normalise(synthetic(shape, samples))
    return lambda: textbook(factory, dataset, epochs, 0, 1, batch)


def difference(cell: str) -> float:
    flat = FlatModel(textbook_loop(cell)())
    a, b = flat.dump(), freshet_trip(cell)().weights
    n = flat.layout.learnable
    return float(np.abs(a[:n] - b[:n]).max() / np.abs(a[:n]).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=11)
    parser.add_argument("--only", default="")
    parser.add_argument("--child", nargs=2, metavar=("WHO", "CELL"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.child:
        who, cell = arguments.child
        if who == "textbook":
            serve(textbook_loop(cell))
        else:
            keep_freed_memory()
            serve(freshet_trip(cell, fast=who == "freshet"))
        return
    print(f"{'kernel':26} {'textbook':>10} {'fast=false':>10} {'freshet':>10} {'faster':>7} {'difference':>11}")
    if importlib.util.find_spec("transformers") is None:
        TRANSFORMERS.clear()
    for cell in (*CELLS, *TRANSFORMERS):
        if arguments.only and arguments.only not in cell:
            continue
        children = [Child(__file__, who, cell) for who in CONTENDERS]
        (slow, plain, fast), (_, _, ratio) = race(children, arguments.repeat)
        for child in children:
            child.close()
        times = f"{slow:9.3f}s {plain:9.3f}s {fast:9.3f}s"
        print(f"{cell:26} {times} {ratio:6.2f}x {difference(cell):11.1e}", flush=True)


if __name__ == "__main__":
    main()
