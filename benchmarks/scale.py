"""Uploads per second of one server process, and a day of a million devices that come and go.

    python benchmarks/scale.py server                       # uploads and bytes per second by model size
    python benchmarks/scale.py million [--method NAME ...]  # real training, 1,000,000 devices, a synthetic trace

The trace: every device is available for 2 to 6 hours of its day, at its own hour. A whole local training takes it 5 to
100 minutes. Every device holds ten handwritten digits of two classes, drawn from the same 1,438.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from idle import resident
from numpy.typing import NDArray

from freshet import Observer
from freshet.compute.executor import SerialExecutor
from freshet.compute.host import keep_freed_memory
from freshet.core.coordinator import Coordinator
from freshet.core.layout import Layout
from freshet.core.messages import Upload
from freshet.core.method import MethodContext
from freshet.core.scheduling import Trigger
from freshet.core.server import Server
from freshet.core.streams import stream
from freshet.data import load
from freshet.methods import class_and_preset, method_options
from freshet.models.registry import build
from freshet.runs.writer import RunWriter
from freshet.sim.driver import Simulation
from freshet.sim.fleet import Fleet
from freshet.sim.traces import History, Row, Trace
from freshet.training.batches import FederatedData
from freshet.training.network import FlatModel, initial_weights
from freshet.training.optimisers import constant
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Setup

HOUR = 3600.0
SIZES = {"LeNet5": 61_706, "ResNet20": 269_722, "AlexNet": 2_472_266, "VGG-11": 9_750_922}


# ---- one server process


def server_of(method: str, size: int, devices: int, **given: Any) -> Server:
    layout = Layout.build([("w", (size,), "learnable")])
    context = MethodContext(devices, np.ones(devices, np.int64), 5, 10, layout, 0)
    rule = class_and_preset(method)[0](method_options(method, given), context)
    return Server(rule, context, np.zeros(size, np.float32), constant(0.1))


def uploads_per_second(method: str, size: int, seconds: float, in_flight: int = 10) -> float:
    """Uploads per second through gates, rule and bookkeeping, with ten devices that were heard before."""
    server, rng = server_of(method, size, in_flight), np.random.default_rng(0)
    models = [rng.standard_normal(size, dtype=np.float32) for _ in range(2)]
    for device in range(in_flight):
        server.trigger([device])

    def turn(number: int) -> None:
        device = number % in_flight
        active = server.active_trips[device]
        server.upload(Upload(device, active.trip, active.base, models[number % 2], 5))
        server.trigger([device])

    for number in range(in_flight):  # warm-up
        turn(number)
    done, started = 0, time.perf_counter()
    while done < in_flight or time.perf_counter() - started < seconds:
        turn(done)
        done += 1
    return done / (time.perf_counter() - started)


def bytes_in_flight(devices: int = 200_000) -> float:
    """Bytes that the server keeps per device in flight, beside the model versions."""
    server = server_of("fedasmu", 8, devices)
    before = resident()
    server.trigger(range(devices))
    return (resident() - before) / devices


def server_part(seconds: float) -> None:
    keep_freed_memory()
    print(f"bytes per device in flight, beside the model's versions: {bytes_in_flight():.0f}", flush=True)
    print(f"{'method':10} {'model':10} {'MB':>7} {'uploads/s':>10} {'MB/s up':>9}")
    for method in ("fedasync", "fedbuff", "fedasmu"):
        for name, size in SIZES.items():
            rate, mega = uploads_per_second(method, size, seconds), 4 * size / 1e6
            print(f"{method:10} {name:10} {mega:7.2f} {rate:10,.1f} {rate * mega:9,.0f}", flush=True)


# ---- a million devices


class Shards(Sequence[NDArray[np.int64]]):
    """Ten samples of two classes for every device, computed on access."""

    def __init__(self, labels: NDArray[Any], devices: int) -> None:
        self._of_class = [np.flatnonzero(labels == label) for label in range(10)]
        self._devices = devices

    def __len__(self) -> int:
        return self._devices

    def __getitem__(self, device: Any) -> Any:
        rng = stream(0, "shard", device)
        pool = np.concatenate([self._of_class[label] for label in rng.choice(10, 2, replace=False)])
        return np.sort(rng.choice(pool, 10, replace=False))


def coming_and_going(devices: int, patterns: int = 5000) -> Fleet:
    """A fleet of devices that share some thousand daily patterns, assigned at random."""
    rng = np.random.default_rng(0)
    histories = []
    for _ in range(patterns):
        length = rng.uniform(2, 6) * HOUR
        comes = rng.uniform(0, 24) * HOUR
        goes = (comes + length) % (24 * HOUR)
        figures = (float(np.clip(rng.lognormal(np.log(18), 0.8), 6, 120)), 5.0, 20.0)  # seconds per sample; Mbit/s
        rows = (Row(0.0, *figures, goes < comes), *sorted([Row(comes, *figures, True), Row(goes, *figures, False)]))
        histories.append(History(rows, 24 * HOUR))
    kinds = rng.integers(0, patterns, devices).tolist()
    trace = Trace(tuple(map(str, range(devices))), tuple(histories[kind] for kind in kinds))
    seconds = np.array([history.rows[0].seconds_per_sample for history in histories])[kinds] * 50  # 5 x 10 samples
    return Fleet(seconds, np.full(devices, 5e6 / 8), np.full(devices, 20e6 / 8), 0.05, 0.05, trace=trace)


class Collector(Observer):
    """Collects staleness and accuracy."""

    def __init__(self) -> None:
        self.stale: list[int] = []
        self.accuracy: list[float] = []

    def on_event(self, event: dict[str, Any]) -> None:
        self.stale += [part["staleness"] for part in event.get("contributions", ())]

    def on_metrics(self, row: dict[str, Any]) -> None:
        self.accuracy.append(row["accuracy"])


def million(method: str, given: dict[str, Any], devices: int, hours: float, in_flight: int) -> str:
    data = load("digits")

    def factory() -> Any:
        return build("digits", input_shape=(1, 8, 8), classes=10)

    layout = FlatModel(factory()).layout
    context = MethodContext(devices, np.full(devices, 10, np.int64), 5, in_flight, layout, 0, in_flight=in_flight)
    kind = class_and_preset(method)[0]
    rule = kind(method_options(method, given).with_derived(context), context)
    server = Server(rule, context, initial_weights(factory, 0), constant(0.1))
    federated = FederatedData.of(data, Shards(data.y_train, devices))
    executor = SerialExecutor(Setup(factory, federated, TrainingOptions(epochs=5, batch_size=10), 0))
    trigger = Trigger("rounds" if kind.about.kind == "sync" else "concurrency", in_flight, 60.0, in_flight)
    coordinator, collector, fleet = Coordinator(server, trigger), Collector(), coming_and_going(devices)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        writer = RunWriter(Path(folder), [collector])
        Simulation(coordinator, fleet, executor, writer, eval_every=HOUR).run(hours * HOUR)
        writer.drain(wait=True)
    taken, count = time.perf_counter() - started, coordinator.counts
    executor.close()
    stale = sorted(collector.stale) or [0]
    tail = stale[int(0.9 * (len(stale) - 1))]
    adapted = getattr(rule.state, "adaptations", "")
    return (
        f"{label(method, given):28} {count.uploads:8,} {count.lost:8,} {count.discards:9,} "
        f"{statistics.median(stale):7,.0f} {tail:7,} {stale[-1]:7,} {adapted:>8} "
        f"{statistics.mean(collector.accuracy[-3:]):9.3f} {taken:8.0f} {resident() / 2**20:7,.0f}"
    )


def label(method: str, given: dict[str, Any]) -> str:
    return method + "".join(f" {key}={value}" for key, value in given.items())


def parse(line: str) -> tuple[str, dict[str, Any]]:
    """Split ``fedasmu@tau_max=5000`` into a name and options."""
    name, _, options = line.partition("@")
    pairs = (pair.split("=") for pair in options.split(",") if pair)
    return name, {key: float(value) if "." in value else int(value) for key, value in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["server", "million"])
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement of the server")
    lines = ["fedasmu", "fedasmu@tau_max=5000", "fedbuff@K=100", "fedavg"]
    parser.add_argument("--method", nargs="+", default=lines, help="NAME or NAME@option=value,option=value")
    parser.add_argument("--devices", type=int, default=1_000_000)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--in-flight", type=int, default=500)
    arguments = parser.parse_args()
    if arguments.part == "server":
        server_part(arguments.seconds)
        return
    print(f"{arguments.devices:,} devices, {arguments.hours:g} h, {arguments.in_flight} in flight (or per round)")
    heads = [("uploads", 8), ("lost", 8), ("discarded", 9), ("stale", 7), ("p90", 7), ("most", 7)]
    heads += [("adapted", 8), ("accuracy", 9), ("seconds", 8), ("MiB", 7)]
    print(f"{'method':28} " + " ".join(f"{head:>{width}}" for head, width in heads), flush=True)
    for line in arguments.method:
        print(million(*parse(line), arguments.devices, arguments.hours, arguments.in_flight), flush=True)


if __name__ == "__main__":
    main()
