"""Local training against the textbook loop (DataLoader, optim.SGD), on one thread.

All train the same network from the same weights on the same batches. ``fast=false`` is Freshet with torch's own layers.
``faster`` compares Freshet with the textbook loop. ``difference`` is the largest difference between their resulting
parameters, relative to the largest parameter.

    python benchmarks/kernel.py [--repeat N] [--only NAME]
"""

import argparse

import numpy as np
import torch
from common import BATCH, LR, Child, as_in_tutorials, factory_of, normalise, race, serve, synthetic, textbook

from freshet.compute.host import keep_freed_memory
from freshet.core.messages import Assignment
from freshet.core.method import LocalRule
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
#: The textbook loop, Freshet with torch's layers, and Freshet.
CONTENDERS = ("textbook", "plain", "freshet")


def freshet_trip(cell: str, *, fast: bool = True):  # type: ignore[no-untyped-def]
    network, shape, samples, epochs, batch = CELLS[cell]
    factory, data = factory_of(network, shape), synthetic(shape, samples)
    options = TrainingOptions(epochs=epochs, batch_size=batch, lr=LR, fast=fast)
    trainer = Trainer(factory, FederatedData.of(data, [np.arange(samples)]), options, seed=0)
    assignment = Assignment(0, 1, 1, 1, FlatModel(factory()).dump(), epochs, LR)
    trip = TripInput(assignment, (), (), LocalRule(), {})
    return lambda: trainer.train(trip)


def textbook_loop(cell: str):  # type: ignore[no-untyped-def]
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
    for cell in CELLS:
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
