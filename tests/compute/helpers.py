"""A tiny federation for executors, and device rules that fail on purpose."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from freshet.core.messages import Assignment
from freshet.core.method import LocalRule
from freshet.errors import ConfigError
from freshet.federation import Federation
from freshet.result import Result
from freshet.training.batches import FederatedData, Samples
from freshet.training.network import initial_weights
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Setup, TripInput
from freshet.training.trip import TripOutcome

#: Seconds of virtual time.
UNTIL = 60.0
#: Seconds to wait for an event before the test fails; long, as the machine may be busy.
TIMEOUT_SECONDS = 240.0
#: Methods that must give the same bits on every executor.
METHODS = ("fedasmu", "fedssmu", "fedavg", "fedbuff", "port", "moon", "feddyn", "scaffold", "ca2fl")


def linear() -> nn.Module:
    return nn.Linear(8, 3)


class Big(nn.Module):
    """A model with 40 MB of parameters, most of them unused."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(8, 3)
        self.ballast = nn.Parameter(torch.zeros(10_000_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(x) + 0.0 * self.ballast[:3]


def make_setup(factory: Any = linear, seed: int = 0) -> Setup:
    """Two devices with ten samples each."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(20, 8)).astype(np.float32))
    samples = Samples(x, torch.from_numpy(rng.integers(0, 3, 20)), None, None)
    shards = [np.arange(10), np.arange(10, 20)]
    return Setup(factory, FederatedData(samples, samples, shards), TrainingOptions(epochs=2, lr=0.1), seed)


def make_work(setup: Setup, trip: int = 0, rule: LocalRule | None = None) -> TripInput:
    weights = initial_weights(setup.factory, setup.seed)
    return TripInput(Assignment(trip % 2, trip, 1, 1, weights, 2, 0.1), (), (), rule or LocalRule(), {})


def same(a: TripOutcome, b: TripOutcome) -> bool:
    return a.weights.tobytes() == b.weights.tobytes() and a.steps == b.steps


@dataclass(frozen=True)
class Deadly(LocalRule):
    """Kills its process the first ``times`` times; counts in a file."""

    counter: Path
    times: int

    def begin(self, local: Any) -> None:
        with self.counter.open("a") as file:
            file.write("x")
        if self.counter.stat().st_size <= self.times:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Patient(LocalRule):
    """Writes its process id into a folder and waits there for a file named ``go``."""

    folder: Path

    def begin(self, local: Any) -> None:
        (self.folder / str(os.getpid())).touch()
        while not (self.folder / "go").exists():
            time.sleep(0.01)


@dataclass(frozen=True)
class Failing(LocalRule):
    """Raises the given error."""

    error: BaseException

    def begin(self, local: Any) -> None:
        raise self.error


class Refusing(LocalRule):
    """Raises a ``ConfigError`` at every trip."""

    def begin(self, local: Any) -> None:
        raise ConfigError("model.name", "no features")


def wait_for_pids(folder: Path, count: int = 1) -> list[int]:
    """Wait for ``count`` ``Patient`` trainings in a folder and return their process ids."""
    wait_until(lambda: len(list(folder.iterdir())) >= count)
    return [int(path.name) for path in folder.iterdir()]


def wait_until(condition: Any, seconds: float = TIMEOUT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def children(pid: int) -> set[int]:
    """Process ids of the children of a process."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread has just ended
            found.update(map(int, (task / "children").read_text().split()))
    return found


def has_ended(pid: int) -> bool:
    """Return whether a process has ended. A zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def federation(method: str) -> Federation:
    """Eight devices with 240 digits and the small convolutional network; one upload in ten is lost."""
    return Federation(
        method=method,
        data={"train_samples": 240, "test_samples": 120},
        model="digits",
        training={"epochs": 3},
        fleet={"devices": 8, "fastest": 3.0, "ratio": 4.0, "loss": 0.1},
        run={"per_round": 3, "period": 4.0, "in_flight": 6, "eval_every": 15.0, "executor": "serial"},
    )


def assert_same_run(one: Result, other: Result) -> None:
    """The same log, byte for byte, and the same final weights, of runs with aggregations."""
    assert (one.directory / "events.jsonl").read_bytes() == (other.directory / "events.jsonl").read_bytes()
    assert one.summary["weights_sha256"] == other.summary["weights_sha256"]
    assert one.summary["aggregations"] >= 2
    assert one.summary["status"] == "finished"
