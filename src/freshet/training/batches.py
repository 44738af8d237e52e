"""The federation's data in memory, once: who holds which samples, and mini-batches of them as float tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freshet.data.dataset import DataSet

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """Inputs and labels as stored; images of uint8 are normalised when a batch is taken."""

    x: Tensor
    y: Tensor
    mean: Tensor | None
    std: Tensor | None

    @staticmethod
    def of(dataset: DataSet, *, test: bool) -> "Samples":
        x, y = (dataset.x_test, dataset.y_test) if test else (dataset.x_train, dataset.y_train)
        mean = std = None
        if dataset.mean is not None and dataset.std is not None:
            shape = (1, -1, *(1,) * (x.ndim - 2))
            scale = 255.0 if x.dtype == np.uint8 else 1.0
            mean = torch.tensor(dataset.mean, dtype=torch.float32).reshape(shape) * scale
            std = torch.tensor(dataset.std, dtype=torch.float32).reshape(shape) * scale
        return Samples(torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y.astype(np.int64)), mean, std)

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """These samples as a batch that a model accepts."""
        return self.prepare(self.x[index]), self.y[index]

    def prepare(self, x: Tensor) -> Tensor:
        if self.mean is not None and self.std is not None:
            return x.float().sub_(self.mean).div_(self.std)
        return x.float() if x.dtype in (torch.uint8, torch.float64) else x

    def chunks(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples in order, in batches."""
        for start in range(0, len(self.y), size):
            yield self.prepare(self.x[start : start + size]), self.y[start : start + size]


@dataclass(frozen=True)
class FederatedData:
    """Training samples with their shards, and test samples."""

    train: Samples
    test: Samples
    shards: Sequence[Indices]

    @staticmethod
    def of(dataset: DataSet, shards: Sequence[Indices]) -> "FederatedData":
        return FederatedData(Samples.of(dataset, test=False), Samples.of(dataset, test=True), shards)
