"""Trips per second of the event loop alone: a trainer that does nothing, a tiny model, up to a million devices.

python benchmarks/events.py [--method fedasync] [--trips 200000]
"""

import argparse
import os
import time
import tracemalloc
from pathlib import Path

import numpy as np

from freshet.compute.serial import Lazy
from freshet.core.layout import Layout
from freshet.core.method import World
from freshet.core.server import Server
from freshet.core.trigger import Trigger
from freshet.core.vectors import Vector
from freshet.methods import find, options_for
from freshet.runs.writer import RunWriter
from freshet.sim.driver import Simulation
from freshet.sim.fleet import FleetOptions
from freshet.training.local import Outcome, Score, Work


class NoTraining:
    """An executor whose trips come back as they were."""

    def train(self, work: Work, due: float) -> "Lazy[Outcome]":
        return Done(Outcome(work.weights, 1, {}, {}))  # type: ignore[return-value]

    def evaluate(self, weights: Vector) -> "Lazy[Score]":
        return Done(Score(0.0, 0.0))  # type: ignore[return-value]

    def close(self) -> None:
        pass


class Done:
    """A result that is there."""

    def __init__(self, value: object) -> None:
        self._value = value

    def result(self) -> object:
        return self._value

    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        pass


def simulate(method: str, devices: int, trips: int, in_flight: int = 1000) -> tuple[float, int]:
    """Seconds and trips of a run with this many devices."""
    layout = Layout.build([("w", (8,), "learnable")])
    fleet = FleetOptions(devices=devices).draw(0)
    world = World(devices, np.ones(devices, np.int64), 5, 10, layout, 0)
    rule = find(method)[0](options_for(method, {}), world)
    server = Server(rule, world, np.zeros(8, np.float32), 0.1, 1.0)
    writer = RunWriter(Path(os.devnull).parent, sink=True) if False else _NoWriter()
    simulation = Simulation(
        server, Trigger("concurrency", 10, 10.0, in_flight), fleet, NoTraining(), writer, eval_every=1e9
    )
    started = time.perf_counter()
    simulation.run(trips * 30.0 / in_flight)
    return time.perf_counter() - started, simulation.counts.uploads


class _NoWriter:
    """Counts what would be written."""

    def __init__(self) -> None:
        self.observers: list[object] = []
        self.seq = 0

    def event(self, time: float, record: dict, pending: object = None, fill: object = None) -> None:
        self.seq += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="fedasync")
    parser.add_argument("--trips", type=int, default=100_000)
    arguments = parser.parse_args()
    simulate(arguments.method, 1000, 5_000)
    print(f"{'devices':>10} {'trips':>9} {'seconds':>8} {'trips/s':>9}")
    for devices in (10_000, 100_000, 1_000_000):
        for trips in (arguments.trips, 2 * arguments.trips):
            taken, done = simulate(arguments.method, devices, trips)
            print(f"{devices:10,} {done:9,} {taken:8.2f} {done / taken:9,.0f}", flush=True)
    tracemalloc.start()
    fleet = FleetOptions(devices=1_000_000).draw(0)
    samples = np.ones(1_000_000, np.int64)
    print(f"bytes per device never triggered: {tracemalloc.get_traced_memory()[0] / 1e6:.0f}", len(fleet), len(samples))


if __name__ == "__main__":
    main()
