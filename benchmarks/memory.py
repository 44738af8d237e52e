"""Memory of idle devices, of a CIFAR-10-sized run with two workers, of a large frozen base with one worker and with
four, and of FedASMU's server with 100,000 devices.

The figure of the run is the proportional set size of all processes (shared pages counted once) beyond that of the same
processes with only the libraries loaded, over the bytes of data and models in flight. Linux only.

    python benchmarks/memory.py [--only idle|run|base|server]
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from common import factory_of, synthetic
from idle import resident
from torch import Tensor, nn

from freshet import Federation
from freshet.compute.host import keep_freed_memory
from freshet.compute.processes import WorkerPool
from freshet.core import saving
from freshet.core.layout import Layout
from freshet.core.messages import Upload
from freshet.core.method import MethodContext
from freshet.core.server import Server
from freshet.methods import class_and_preset, method_options
from freshet.runs import checkpoint
from freshet.sim.fleet import Fleet, FleetOptions
from freshet.training.optimisers import constant

SHAPE, SAMPLES, PARAMETERS = (3, 32, 32), 50_000, 62_006


def tree() -> list[Path]:
    """This process and its descendants."""
    folders, queue = [], ["self"]
    while queue:
        folder = Path("/proc") / queue.pop()
        folders.append(folder)
        for task in (folder / "task").iterdir():
            queue += (task / "children").read_text().split()
    return folders


def proportional(*, workers_only: bool = False) -> int:
    """Bytes of the whole process tree, or of all but this process, shared pages divided among their users."""
    total = 0
    for process in tree()[workers_only:]:
        try:
            line = next(line for line in (process / "smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
        except (FileNotFoundError, ProcessLookupError, StopIteration):
            continue
        total += 1024 * int(line.split()[1])
    return total


class Peak:
    """Samples the memory of the process tree, or of all but this process, in a thread."""

    def __init__(self, *, workers_only: bool = False) -> None:
        self._workers_only = workers_only

    def __enter__(self) -> "Peak":
        self.bytes, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            self.bytes = max(self.bytes, proportional(workers_only=self._workers_only))

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def federation(samples: int, devices: int = 100) -> Federation:
    data = synthetic(SHAPE, samples)
    return Federation(
        model=factory_of("lenet5", SHAPE),
        train=(data.x_train, data.y_train),
        test=(data.x_test, data.y_test),
        devices=devices,
        training={"epochs": 1, "batch_size": 50},
        data={"partition": "iid"},
        run={"eval_every": 1e6, "checkpoint_minutes": 0.0},
    )


def idle_device_memory(devices: int = 1_000_000) -> None:
    """Print the memory of devices that have never been triggered."""
    before = resident()
    kept = (Fleet.draw(FleetOptions(devices=devices), 0), np.ones(devices, np.int64))
    print(f"bytes per device never triggered: {(resident() - before) / len(kept[1]):.0f}", flush=True)


def run_memory() -> None:
    pool = WorkerPool(2)
    with tempfile.TemporaryDirectory() as folder:
        federation(2_000, devices=40).run(20.0, out=Path(folder) / "small", pool=pool)
        libraries = proportional()
        large = federation(SAMPLES)
        with Peak() as peak:
            large.run(100.0, out=Path(folder) / "large", pool=pool)
    pool.close()
    needed = SAMPLES * (3 * 32 * 32 + 8) + 60 * 4 * PARAMETERS
    beyond = peak.bytes - libraries
    print(f"libraries alone: {libraries / 1e6:.0f} MB; data and models: {needed / 1e6:.0f} MB")
    print(f"peak beyond the libraries: {beyond / 1e6:.0f} MB, ratio {beyond / needed:.2f}", flush=True)


class Adapted(nn.Module):
    """A frozen base of ``width`` squared numbers, and a head that trains."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.base(x.expand(-1, self.base.in_features)))
        return scores


def base_memory(workers: int, width: int = 6000) -> None:
    """Print what a frozen base takes in all workers together. They share one copy."""
    x, y = np.linspace(-1, 1, 160, dtype=np.float32)[:, None], np.arange(160) % 2
    pool = WorkerPool(workers)

    def run(size: int, folder: str) -> int:
        made = Federation(
            Adapted(size),
            (x, y),
            (x[:2], y[:2]),
            devices=8,
            method="fedavg",
            training={"epochs": 1, "lr": 1e-6},
            data={"partition": "iid"},
            run={"eval_every": 1e6, "checkpoint_minutes": 0.0},
        )
        with Peak(workers_only=True) as peak:
            made.run(60.0, out=Path(folder) / str(size), pool=pool)
        return peak.bytes

    with tempfile.TemporaryDirectory() as folder:
        beyond = -run(10, folder) + run(width, folder)
    pool.close()
    print(
        f"a frozen base of {4 * width**2 / 1e6:.0f} MB, {workers} workers: {beyond / (4 * width**2):.2f} times the base"
    )


def server_memory(kind: str, devices: int = 100_000) -> None:
    layout = Layout.build([("w", (PARAMETERS,), "learnable")])
    context = MethodContext(devices, np.ones(devices, np.int64), 1, 10, layout, 0)
    method = class_and_preset("fedasmu")[0](method_options("fedasmu", {"control_memory": kind}), context)
    server = Server(method, context, np.zeros(PARAMETERS, np.float32), constant(0.1))
    keep_freed_memory()  # also frees what the first part left
    before, model, started = proportional(), np.ones(PARAMETERS, np.float32), time.perf_counter()
    for device in range(devices):
        server.trigger([device])
        server.upload(Upload(device, 1, server.active_trips[device].base, model, 1))
    taken = time.perf_counter() - started
    now = proportional() - before
    with Peak() as peak, tempfile.TemporaryDirectory() as folder:
        checkpoint.write(Path(folder), {"method": saving.dump(method.state)})
    print(
        f"{devices:,} devices, control_memory {kind}: {now / 2**30:.2f} GiB after {taken:.0f} s, "
        f"{(max(peak.bytes, proportional()) - before) / 2**30:.2f} GiB while a checkpoint is written",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("idle", "run", "base", "server"))
    only = parser.parse_args().only
    if only in (None, "idle"):
        idle_device_memory()
    if only in (None, "run"):
        run_memory()
    if only in (None, "base"):
        for workers in (1, 4):
            base_memory(workers)
    if only in (None, "server"):
        for kind in ("budget", "sketch"):
            server_memory(kind)
