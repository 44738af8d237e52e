"""Trips per second of the event loop alone: a trainer that does nothing, a tiny model, up to a million devices.

On a shared machine, read the last column: trips per second of this process's CPU time.

    python benchmarks/events.py [--method fedavg fedasync fedasmu] [--trips 100000]
"""

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from idle import NoTraining

from freshet.core.coordinator import Coordinator
from freshet.core.events import Event
from freshet.core.layout import Layout
from freshet.core.method import MethodContext
from freshet.core.scheduling import Trigger, TriggerKind
from freshet.core.server import Server
from freshet.core.vectors import load_kernels
from freshet.methods import class_and_preset, method_options
from freshet.runs.writer import RunWriter
from freshet.sim.driver import Simulation
from freshet.sim.fleet import Fleet, FleetOptions
from freshet.training.optimisers import constant


class NoLog(RunWriter):
    """A log that only counts, to measure the event loop without the disk."""

    def event(self, *_: Any) -> None:
        self.seq += 1

    def events(self, time: float, happened: Sequence[Event]) -> None:
        self.seq += len(happened)


def simulate(method: str, devices: int, trips: int, logged: bool, at_once: int = 2000) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and trips of a run with this many devices."""
    layout = Layout.build([("w", (8,), "learnable")])
    fleet = Fleet.draw(FleetOptions(devices=devices), 0)
    context = MethodContext(devices, np.ones(devices, np.int64), 5, 10, layout, 0)
    rule = class_and_preset(method)[0](method_options(method, {}), context)
    server = Server(rule, context, np.zeros(8, np.float32), constant(0.1))
    kind: TriggerKind = "rounds" if rule.about.kind == "sync" else "concurrency"
    with tempfile.TemporaryDirectory() as folder:
        writer = (RunWriter if logged else NoLog)(Path(folder))
        trigger = Trigger(kind, at_once, 10.0, at_once)
        coordinator = Coordinator(server, trigger)
        simulation = Simulation(coordinator, fleet, NoTraining(0.001), writer, eval_every=1e9)
        started, busy = time.perf_counter(), time.process_time()
        simulation.run(trips / at_once * (50.3 if kind == "rounds" else 30.3))
        return time.perf_counter() - started, time.process_time() - busy, coordinator.counts.uploads


def bytes_per_idle_device() -> float:
    """Memory per device of a million devices that were never triggered."""
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kept = (Fleet.draw(FleetOptions(devices=1_000_000), 0), np.ones(1_000_000, np.int64))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) * unit / len(kept[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", nargs="+", default=["fedavg", "fedasync", "fedasmu"])
    parser.add_argument("--trips", type=int, default=100_000)
    arguments = parser.parse_args()
    load_kernels(print)  # about a second that is not part of the event loop
    print(f"bytes per device never triggered, at most: {bytes_per_idle_device():.0f}")
    print(f"{'events':10} {'devices':>10} {'log':>4} {'trips':>9} {'seconds':>8} {'trips/s':>9} {'per CPU s':>9}")
    for method in arguments.method:
        for devices, trips, logged in (
            (10_000, arguments.trips, False),
            (1_000_000, arguments.trips, False),
            (1_000_000, 2 * arguments.trips, False),
            (1_000_000, arguments.trips, True),
        ):
            taken, busy, done = simulate(method, devices, trips, logged)
            log, rates = "yes" if logged else "no", f"{done / taken:9,.0f} {done / busy:9,.0f}"
            print(f"{method:10} {devices:10,} {log:>4} {done:9,} {taken:8.2f} {rates}", flush=True)


if __name__ == "__main__":
    main()
