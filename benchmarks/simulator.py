"""A whole simulated run against bare loops of the same SGD steps, in one run of this script.

- overhead: the run with one worker over the same trips trained one after the other by the same kernel
- scaling: the run with one worker over the run with two
- machine: seconds per trip with two workers over those of two processes that run the textbook loop (one thread each)
- start: seconds from the call of run() to the moment when a worker would train the first trip (workers started, data
  handed over, initial model tested by a worker)

    python benchmarks/simulator.py [--trips N] [--method fedavg fedasmu]
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from common import LR, factory_of, normalised, synthetic, textbook

from freshet import Federation
from freshet.compute.base import Setup
from freshet.compute.processes import WorkerPool
from freshet.compute.serial import SerialExecutor
from freshet.training.outcome import Outcome
from freshet.training.trainer import Work

SHAPE, DEVICES, EACH, EPOCHS = (1, 28, 28), 100, 600, 5


def federation(method: str, executor: str, workers: int) -> Federation:
    data = synthetic(SHAPE, DEVICES * EACH)
    return Federation(
        model=factory_of("lenet5", SHAPE),
        train=(data.x_train, data.y_train),
        test=(data.x_test, data.y_test),
        method=method,
        devices=DEVICES,
        training={"epochs": EPOCHS, "batch_size": 50, "lr": LR},
        shards=[np.arange(d * EACH, (d + 1) * EACH) for d in range(DEVICES)],
        run={"executor": executor, "workers": workers, "eval_every": 1e6, "checkpoint_minutes": 0.0},
    )


class Recording(SerialExecutor):
    """Trains as usual and adds up how long the training itself took."""

    seconds = 0.0

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        inner = self._trainer.train

        def train(work: Work) -> Outcome:
            started = time.perf_counter()
            outcome = inner(work)
            Recording.seconds += time.perf_counter() - started
            return outcome

        self._trainer.train = train  # type: ignore[method-assign]


def run(method: str, executor: str, workers: int, until: float, pool: WorkerPool | None = None) -> tuple[float, int]:
    """Seconds and uploads of a run (building the federation is not counted)."""
    fed = federation(method, executor, workers)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        result = fed.run(until, out=Path(folder) / "run", pool=pool)
        return time.perf_counter() - started, result.summary["uploads"]


def overhead(method: str, until: float) -> float:
    """Time of a one-worker run over the time that its training alone takes (measured inside the same run)."""
    import freshet.compute.choice as room

    room.SerialExecutor, before = Recording, room.SerialExecutor  # type: ignore[misc]
    Recording.seconds = 0.0
    taken, _ = run(method, "serial", 1, until)
    room.SerialExecutor = before  # type: ignore[misc]
    return taken / Recording.seconds


def bare(trips: int) -> float:
    """Seconds that two processes with one thread each need for so many textbook trips."""
    children = [
        subprocess.Popen([sys.executable, __file__, "--child", str(trips // 2)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    return max(float(child.communicate()[0]) for child in children)


def textbook_trips(trips: int) -> None:
    torch.set_num_threads(1)
    factory, data = factory_of("lenet5", SHAPE), normalised(synthetic(SHAPE, EACH))
    textbook(factory, data, 1, 0, 1)
    started = time.perf_counter()
    for trip in range(trips):
        textbook(factory, data, EPOCHS, 0, trip)
    print(time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trips", type=int, default=200)
    parser.add_argument("--method", nargs="+", default=["fedavg", "fedasmu"])
    parser.add_argument("--child", type=int)
    arguments = parser.parse_args()
    if arguments.child is not None:
        textbook_trips(arguments.child)
        return
    seconds, trips = run("fedavg", "processes", 2, 1.0)  # nobody is back after one virtual second
    print(f"start-up to the first trip: {seconds:.1f} s ({trips} trips ended)", flush=True)
    for method in arguments.method:
        until = arguments.trips * (5.0 if method == "fedavg" else 1.0) + 30.0
        print(f"{method}: run / its training alone = {overhead(method, until):.3f}", flush=True)
        pools = {workers: WorkerPool(workers) for workers in (1, 2)}
        for workers, pool in pools.items():
            run(method, "processes", workers, 60.0, pool)
        one, _ = run(method, "processes", 1, until, pools[1])
        two, uploads = run(method, "processes", 2, until, pools[2])
        loop = bare(uploads)
        for pool in pools.values():
            pool.close()
        print(f"{method}: 1 worker / 2 workers = {one / two:.2f} ({uploads} trips)")
        print(f"{method}: 2 workers / two-process textbook loop = {two / loop:.2f} per trip", flush=True)


if __name__ == "__main__":
    main()
