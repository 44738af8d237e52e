"""Local training of any user's model against the textbook loop, on one thread, in one run.

Textbook: DataLoader over a TensorDataset, nn.Module, optim.SGD, batch 50. Both train the same network from the same
weights on the same batches; the largest difference of the resulting weights is printed beside the ratio.

    python benchmarks/kernel.py [--repeat N]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from freshet.compute.memory import keep_freed_memory
from freshet.core.method import LocalRule
from freshet.core.streams import stream
from freshet.core.trip import DeviceTrip
from freshet.data.dataset import DataSet
from freshet.models.registry import build
from freshet.training.batches import FederatedData
from freshet.training.local import Trainer, Work
from freshet.training.options import TrainingOptions

BATCH, LR = 50, 0.03


def synthetic(shape: tuple[int, ...], samples: int, classes: int) -> DataSet:
    """Images of the given shape as uint8; what they show does not matter for speed."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (samples, *shape), dtype=np.uint8)
    y = rng.integers(0, classes, samples)
    statistics_ = (0.5,) * shape[0]
    return DataSet("synthetic", x, y, x[:10], y[:10], classes, mean=statistics_, std=statistics_)


class Ordered(torch.utils.data.Sampler[int]):
    """The order that the other loop uses, so that both see the same batches."""

    def __init__(self, order: np.ndarray) -> None:
        self.order = order

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.order.tolist())

    def __len__(self) -> int:
        return len(self.order)


def textbook(factory: Callable[[], nn.Module], data: DataSet, epochs: int, seed: int) -> Callable[[], torch.Tensor]:
    x = (torch.from_numpy(data.x_train).float() / 255 - 0.5) / 0.5
    dataset = TensorDataset(x, torch.from_numpy(data.y_train))

    def train() -> torch.Tensor:
        torch.manual_seed(1)
        model = factory()
        model.train()
        optimiser = torch.optim.SGD(model.parameters(), lr=LR)
        rng = stream(seed, "batches", 0, 1)
        for _ in range(epochs):
            loader = DataLoader(dataset, batch_size=BATCH, sampler=Ordered(rng.permutation(len(dataset))))
            for inputs, labels in loader:
                optimiser.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), labels)
                loss.backward()
                optimiser.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    return train


def ours(factory: Callable[[], nn.Module], data: DataSet, epochs: int, seed: int) -> Callable[[], torch.Tensor]:
    options = TrainingOptions(epochs=epochs, batch_size=BATCH, lr=LR)
    trainer = Trainer(factory, FederatedData.of(data, [np.arange(len(data.y_train))]), options, seed)
    torch.manual_seed(1)
    trainer.flat.take(factory())
    weights = trainer.flat.dump()
    work = Work(DeviceTrip(0, 1, 1, 1, epochs, LR), weights, None, LocalRule(), {})

    def train() -> torch.Tensor:
        outcome = trainer.train(work)
        return trainer.flat.parameters_of(outcome.weights)

    return train


CELLS = {
    "LeNet5 / Fashion-MNIST": ("lenet5", (1, 28, 28), 600, 5),
    "LeNet5 / CIFAR-10": ("lenet5", (3, 32, 32), 500, 5),
    "CNN / CIFAR-10": ("cnn", (3, 32, 32), 300, 1),
    "ResNet20 / CIFAR-10": ("resnet20", (3, 32, 32), 200, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'network':24} {'textbook':>10} {'freshet':>10} {'ratio':>7} {'difference':>11}")
    for name, (network, shape, samples, epochs) in CELLS.items():
        if arguments.only and arguments.only not in name:
            continue
        data = synthetic(shape, samples, 10)

        def factory(network: str = network, shape: tuple[int, ...] = shape) -> nn.Module:
            return build(network, input_shape=shape, classes=10)

        slow, fast = textbook(factory, data, epochs, 0), ours(factory, data, epochs, 0)
        difference = float((slow() - fast()).abs().max())
        times: dict[str, list[float]] = {"slow": [], "fast": []}
        for _ in range(arguments.repeat):
            for key, run in (("slow", slow), ("fast", fast)):
                started = time.perf_counter()
                run()
                times[key].append(time.perf_counter() - started)
        a, b = (statistics.median(times[key]) for key in ("slow", "fast"))
        ratios = statistics.median(s / f for s, f in zip(times["slow"], times["fast"], strict=True))
        print(f"{name:24} {a:9.3f}s {b:9.3f}s {ratios:6.2f}x {difference:11.1e}", flush=True)


if __name__ == "__main__":
    import os

    if os.environ.get("KEEP") == "1":
        keep_freed_memory()
    main()
