"""Shared by the benchmarks: synthetic data, the textbook loop, and contenders that take turns.

Each contender runs in its own process with one thread, so that neither its memory allocator nor its caches help the
other. The contenders take turns. The figure is the median of the ratios of neighbouring turns.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from freshet.core.streams import stream
from freshet.data.dataset import DataSet
from freshet.models.registry import build
from freshet.models.textcnn import TextCNN

BATCH, LR, VOCABULARY = 50, 0.03, 20_000


def synthetic(shape: tuple[int, ...], samples: int, classes: int = 10) -> DataSet:
    """Random images of the given shape as uint8, or random texts of the given length."""
    rng = np.random.default_rng(0)
    if len(shape) == 1:
        x = rng.integers(1, VOCABULARY, (samples, *shape), dtype=np.int32)
        y = rng.integers(0, classes, samples)
        return DataSet("synthetic", x, y, x[:50], y[:50], classes, pad_id=0, vocabulary=VOCABULARY)
    x = rng.integers(0, 256, (samples, *shape), dtype=np.uint8)
    y = rng.integers(0, classes, samples)
    half = (0.5,) * shape[0]
    return DataSet("synthetic", x, y, x[:500], y[:500], classes, mean=half, std=half)


def factory_of(network: str, shape: tuple[int, ...]) -> Callable[[], nn.Module]:
    settings: dict[str, Any] = {"vocabulary": VOCABULARY} if len(shape) == 1 else {}
    if network in ("textcnn", "vgg11"):
        settings["dropout"] = 0.0  # both loops must compute the same

    def factory() -> nn.Module:
        torch.manual_seed(1)
        return build(network, input_shape=shape, classes=10, **settings)

    return factory


def as_in_tutorials(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The network as a tutorial would write it: TextCNN from plain layers."""

    def plain() -> nn.Module:
        model = factory()
        if isinstance(model, TextCNN):
            model.encode = lambda x: _encode_plainly(model, x)  # type: ignore[method-assign]
        return model

    return plain


def _encode_plainly(model: TextCNN, x: Tensor) -> Tensor:
    words = model.embedding(x).transpose(1, 2)
    pad = nn.functional.pad
    convolutions = [conv for conv in model.convolutions if isinstance(conv, nn.Conv1d)]
    return torch.cat([conv(pad(words, (0, conv.kernel_size[0] - 1))).relu().amax(2) for conv in convolutions], 1)


class FixedOrder(Sampler[int]):
    """A fixed order, so that both loops see the same batches."""

    def __init__(self, order: np.ndarray) -> None:
        self.order = order.tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


def textbook(
    factory: Callable[[], nn.Module], dataset: TensorDataset, epochs: int, device: int, trip: int, batch: int = BATCH
) -> nn.Module:
    """The loop of a tutorial: DataLoader, nn.Module, optim.SGD."""
    model = factory()
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=LR)
    rng = stream(0, "batches", device, trip)
    for _ in range(epochs):
        for x, y in DataLoader(dataset, batch_size=batch, sampler=FixedOrder(rng.permutation(len(dataset)))):
            optimiser.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
            optimiser.step()
    return model


def normalise(data: DataSet) -> TensorDataset:
    if data.vocabulary:
        return TensorDataset(torch.from_numpy(data.x_train).long(), torch.from_numpy(data.y_train))
    x: Tensor = (torch.from_numpy(data.x_train).float() / 255 - 0.5) / 0.5
    return TensorDataset(x, torch.from_numpy(data.y_train))


class Child:
    """A contender in its own process. Each ``turn`` runs its work once and returns its processor seconds."""

    def __init__(self, script: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, script, "--child", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        )

    def turn(self) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve(work: Callable[[], object]) -> None:
    """Run the work at every line of standard input, as the child of ``Child``. Answers its processor seconds."""
    for _ in sys.stdin:
        started = time.process_time()
        work()
        print(time.process_time() - started, flush=True)


def race(contenders: list[Child], repeat: int) -> tuple[list[float], list[float]]:
    """Median seconds of each contender, and the median ratio of the first one's time to each one's."""
    for contender in contenders:
        contender.turn()
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(repeat):
        for contender, taken in zip(contenders, times, strict=True):
            taken.append(contender.turn())
    ratios = [statistics.median(a / b for a, b in zip(times[0], taken, strict=True)) for taken in times]
    return [statistics.median(taken) for taken in times], ratios
