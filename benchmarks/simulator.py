"""A whole simulated run against plain loops of the same SGD steps, in one run of this script.

- overhead: the run with one worker over its training alone
- scaling: the run with one worker over the run with two
- machine: seconds per trip with two workers over those of two processes that run the textbook loop (one thread each)
- start: seconds from the call of run() to the first training (workers started, data sent, initial model tested)

    python benchmarks/simulator.py [--trips N] [--method fedavg fedasmu] [--cell lenet-cifar10] [--only-machine]
"""

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from common import LR, factory_of, normalise, synthetic, textbook

from freshet import Federation
from freshet.compute.executor import SerialExecutor
from freshet.compute.processes import WorkerPool
from freshet.training.trainer import Setup, TripInput
from freshet.training.trip import TripOutcome

DEVICES, EPOCHS = 100, 5


class Cell(NamedTuple):
    """Network, image shape, samples per device."""

    network: str
    shape: tuple[int, ...]
    each: int


CELLS = {
    "lenet-fmnist": Cell("lenet5", (1, 28, 28), 600),
    "lenet-cifar10": Cell("lenet5", (3, 32, 32), 500),
    "cnn-cifar10": Cell("cnn", (3, 32, 32), 500),
}


def federation(cell: Cell, method: str, executor: str, workers: int) -> Federation:
    data, each = synthetic(cell.shape, DEVICES * cell.each), cell.each
    return Federation(
        model=factory_of(cell.network, cell.shape),
        train=(data.x_train, data.y_train),
        test=(data.x_test, data.y_test),
        method=method,
        devices=DEVICES,
        training={"epochs": EPOCHS, "batch_size": 50, "lr": LR},
        shards=[np.arange(d * each, (d + 1) * each) for d in range(DEVICES)],
        run={"executor": executor, "workers": workers, "eval_every": 1e6, "checkpoint_minutes": 0.0},
    )


class TimingExecutor(SerialExecutor):
    """A serial executor that adds up the seconds of training."""

    seconds = 0.0

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        inner = self._trainer.train

        def train(work: TripInput) -> TripOutcome:
            started = time.perf_counter()
            outcome = inner(work)
            TimingExecutor.seconds += time.perf_counter() - started
            return outcome

        self._trainer.train = train  # type: ignore[method-assign]


def run(
    cell: Cell, method: str, executor: str, workers: int, until: float, pool: WorkerPool | None = None
) -> tuple[float, int]:
    """Seconds and uploads of a run, without building the federation."""
    fed = federation(cell, method, executor, workers)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        result = fed.run(until, out=Path(folder) / "run", pool=pool)
        return time.perf_counter() - started, result.summary["uploads"]


def overhead(cell: Cell, method: str, until: float) -> float:
    """Time of a one-worker run over the time of its training, measured in the same run."""
    from freshet.compute import choice

    before = vars(choice)["SerialExecutor"]
    choice.__dict__["SerialExecutor"] = TimingExecutor
    TimingExecutor.seconds = 0.0
    taken, _ = run(cell, method, "serial", 1, until)
    choice.__dict__["SerialExecutor"] = before
    return taken / TimingExecutor.seconds


def plain_seconds(cell: str, trips: int) -> float:
    """Seconds of two processes with one thread each for ``trips`` textbook trips."""
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--cell", cell, "--child", str(trips // 2)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    return max(float(child.communicate()[0]) for child in children)


def textbook_trips(cell: Cell, trips: int) -> None:
    torch.set_num_threads(1)
    factory, data = factory_of(cell.network, cell.shape), normalise(synthetic(cell.shape, cell.each))
    textbook(factory, data, 1, 0, 1)
    started = time.perf_counter()
    for trip in range(trips):
        textbook(factory, data, EPOCHS, 0, trip)
    print(time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trips", type=int, default=200)
    parser.add_argument("--method", nargs="+", default=["fedavg", "fedasmu"])
    parser.add_argument("--cell", choices=CELLS, default="lenet-fmnist")
    parser.add_argument("--only-machine", action="store_true", help="only two workers against two textbook loops")
    parser.add_argument("--child", type=int)
    arguments = parser.parse_args()
    cell = CELLS[arguments.cell]
    if arguments.child is not None:
        textbook_trips(cell, arguments.child)
        return
    if not arguments.only_machine:
        seconds, trips = run(cell, "fedavg", "processes", 2, 1.0)  # no device is back after one virtual second
        print(f"start-up to the first trip: {seconds:.1f} s ({trips} trips ended)", flush=True)
    for method in arguments.method:
        until = arguments.trips * (5.0 if method == "fedavg" else 1.0) + 30.0
        if not arguments.only_machine:
            print(f"{method}: run / its training alone = {overhead(cell, method, until):.3f}", flush=True)
            with closing(WorkerPool(1)) as pool:
                run(cell, method, "processes", 1, 60.0, pool)
                one, _ = run(cell, method, "processes", 1, until, pool)
        with closing(WorkerPool(2)) as pool:
            run(cell, method, "processes", 2, 60.0, pool)
            two, uploads = run(cell, method, "processes", 2, until, pool)
        if not arguments.only_machine:
            print(f"{method}: 1 worker / 2 workers = {one / two:.2f} ({uploads} trips)")
        ratio = two / plain_seconds(arguments.cell, uploads)
        print(f"{method}: 2 workers / two-process textbook loop = {ratio:.2f} per trip ({uploads} trips)", flush=True)


if __name__ == "__main__":
    main()
