"""Ray with two nodes of one worker each against Freshet's own two worker processes, the same runs in turns.

- by size: FedAvg with one step per trip, so that transport dominates
- realistic: LeNet5, 600 samples, 5 epochs, batch 50; aim: Ray takes at most 1.1 times as long

Both pools have been started and have run once. Both Ray nodes are on this machine (ray.cluster_utils), so no network is
included. Objects are copied between the nodes as between machines.

    python benchmarks/scale_out.py [--trips N] [--repeat N]
"""

import argparse
import importlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import BATCH, LR, factory_of, synthetic

from freshet import Federation
from freshet.compute.pool import Pool
from freshet.compute.processes import WorkerPool
from freshet.compute.ray import RayPool, make_private_folder
from freshet.models.registry import count_parameters

DEVICES, PER_ROUND, FLOAT = 24, 8, 4
STORE = 400_000_000  # bytes of each node's object store; the default is a third of the machine's memory


@dataclass(frozen=True)
class Case:
    """The training of every device."""

    title: str
    network: str
    shape: tuple[int, ...]
    samples: int
    epochs: int

    def federation(self, rounds: int) -> Federation:
        data = synthetic(self.shape, DEVICES * self.samples)
        return Federation(
            model=factory_of(self.network, self.shape),
            train=(data.x_train, data.y_train),
            test=(data.x_test[:50], data.y_test[:50]),
            method="fedavg",
            devices=DEVICES,
            training={"epochs": self.epochs, "batch_size": min(BATCH, self.samples), "lr": LR},
            shards=[np.arange(d * self.samples, (d + 1) * self.samples) for d in range(DEVICES)],
            run={"rounds": rounds, "per_round": PER_ROUND, "eval_every": 1e6, "checkpoint_minutes": 0.0},
        )


GREY, COLOUR = (1, 28, 28), (3, 32, 32)
BY_SIZE = (
    Case("LeNet5", "lenet5", GREY, 10, 1),
    Case("ResNet20", "resnet20", COLOUR, 10, 1),
    Case("VGG-11", "vgg11", COLOUR, 10, 1),
)
REALISTIC = Case("LeNet5, 600 samples x 5 epochs", "lenet5", GREY, 600, 5)


@contextmanager
def two_nodes() -> Iterator[str]:
    """The address of a Ray cluster of two nodes with one CPU each, on the loopback interface."""
    folder = make_private_folder()  # keeps the address file of another Ray on this machine
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    fair = {"RAY_worker_niceness": "0"}  # Ray's default niceness of 15 starves workers on a busy machine
    os.environ |= quiet | fair | {"RAY_TMPDIR": str(folder)}  # read by the import and by the nodes
    ray, cluster_utils = (importlib.import_module(name) for name in ("ray", "ray.cluster_utils"))
    node: dict[str, Any] = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": STORE}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        cluster.add_node(**node)
        yield str(cluster.address)
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def seconds_per_trip(case: Case, rounds: int, pool: Pool[Any]) -> float:
    """Seconds of a whole run per upload, without building the federation."""
    fed = case.federation(rounds)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        result = fed.run(out=Path(folder) / "run", pool=pool)
        taken = time.perf_counter() - started
    uploads: int = result.summary["uploads"]
    assert uploads == rounds * PER_ROUND, "both must do the same work"
    return taken / uploads


def compare(case: Case, rounds: int, repeat: int, local: Pool[Any], ray: Pool[Any]) -> tuple[float, float, float]:
    """Median seconds per trip of both, and the median ratio of neighbouring turns."""
    for pool in (local, ray):
        seconds_per_trip(case, 1, pool)
    turns = [(seconds_per_trip(case, rounds, local), seconds_per_trip(case, rounds, ray)) for _ in range(repeat)]
    ours, theirs = zip(*turns, strict=True)
    return statistics.median(ours), statistics.median(theirs), statistics.median(b / a for a, b in turns)


def line(case: Case, local: float, ray: float, ratio: float) -> str:
    size = FLOAT * count_parameters(factory_of(case.network, case.shape)())
    return f"| {case.title} | {size:,} | {local:.4f} | {ray:.4f} | {1000 * (ray - local):.1f} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trips", type=int, default=24, help=f"per run, in rounds of {PER_ROUND}")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    rounds = max(1, arguments.trips // PER_ROUND)
    with two_nodes() as address:
        local, ray = WorkerPool(2), RayPool(2, address)
        try:
            print("| model | bytes | s per trip, 2 processes | Ray, 2 x 1 | difference, ms | ratio |")
            print("|---|---|---|---|---|---|", flush=True)
            for case in (*BY_SIZE, REALISTIC):
                print(line(case, *compare(case, rounds, arguments.repeat, local, ray)), flush=True)
        finally:
            local.close()
            ray.close()


if __name__ == "__main__":
    main()
