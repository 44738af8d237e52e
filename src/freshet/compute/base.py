"""What a driver expects of an executor, and what an executor needs to know of a federation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from freshet.core.vectors import Vector
from freshet.training.batches import FederatedData, Samples
from freshet.training.flat import Factory
from freshet.training.local import Outcome, Score, Trainer, Work
from freshet.training.options import TrainingOptions

T_co = TypeVar("T_co", covariant=True)


class Future(Protocol[T_co]):
    """A result that may still be on its way."""

    def result(self) -> T_co: ...

    def done(self) -> bool: ...

    def cancel(self) -> object: ...


class Executor(Protocol):
    """Trains trips and scores models somewhere. ``due`` is the virtual time at which the result is needed."""

    def train(self, work: Work, due: float) -> Future[Outcome]: ...

    def evaluate(self, weights: Vector) -> Future[Score]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Setup:
    """A federation's fixed part: built once by every worker."""

    factory: Factory
    data: FederatedData
    training: TrainingOptions
    seed: int

    def trainer(self) -> Trainer:
        return Trainer(self.factory, self.data, self.training, self.seed)


@dataclass(frozen=True)
class StoredSetup:
    """A ``Setup`` whose arrays lie in files that all workers map into memory, so that each sample exists once."""

    factory: Factory
    folder: Path
    statistics: tuple[Any, ...]
    training: TrainingOptions
    seed: int

    @staticmethod
    def store(setup: Setup, folder: Path) -> "StoredSetup":
        """Write the arrays of a setup into a folder."""
        data = setup.data
        for name, samples in (("train", data.train), ("test", data.test)):
            np.save(folder / f"{name}_x.npy", samples.x.numpy())
            np.save(folder / f"{name}_y.npy", samples.y.numpy())
        np.save(folder / "shards.npy", np.concatenate(data.shards))
        np.save(folder / "ends.npy", np.cumsum([len(shard) for shard in data.shards]))
        statistics = tuple(None if t is None else t.numpy() for t in (data.train.mean, data.train.std))
        return StoredSetup(setup.factory, folder, statistics, setup.training, setup.seed)

    def load(self) -> Setup:
        """The setup, with its arrays mapped read-only."""
        mean, std = (None if array is None else torch.from_numpy(array) for array in self.statistics)
        train, test = (
            Samples(_mapped(self.folder / f"{name}_x.npy"), _mapped(self.folder / f"{name}_y.npy"), mean, std)
            for name in ("train", "test")
        )
        ends: NDArray[np.int64] = np.load(self.folder / "ends.npy", allow_pickle=False)
        flat: NDArray[np.int64] = np.load(self.folder / "shards.npy", allow_pickle=False)
        shards = np.split(flat, ends[:-1])
        return Setup(self.factory, FederatedData(train, test, shards), self.training, self.seed)


def _mapped(path: Path) -> torch.Tensor:
    # copy-on-write: torch wants a writable array, and nobody writes
    return torch.from_numpy(np.load(path, mmap_mode="c", allow_pickle=False))
