"""A second driver for tests: real time on one machine, a simulated network with real delays, a trainer per device.

It needs nothing from ``freshet.sim``. It shows what a network driver costs: tasks and clocks.
"""

import asyncio
import time
from pathlib import Path

import numpy as np

from freshet.config import Config
from freshet.core.coordinator import Coordinator, Effects
from freshet.core.messages import CONTROL_BYTES, Assignment, Fresh, Request
from freshet.core.method import Memory, MethodContext
from freshet.core.server import Server
from freshet.core.streams import stream
from freshet.runs.writer import RunWriter
from freshet.training.batches import FederatedData
from freshet.training.network import Factory, build_module, initial_weights, layout_of
from freshet.training.optimisers import exponential
from freshet.training.trainer import Trainer
from freshet.training.trip import LocalTrip, Phase

LATENCY, BYTES_PER_SECOND = 0.002, 2e6


class Node:
    """One device: trainer, memory, speed."""

    def __init__(self, trainer: Trainer, seconds_per_trip: float) -> None:
        self.trainer, self.seconds = trainer, seconds_per_trip
        self.memory: Memory = {}
        self.trip: LocalTrip | None = None

    async def train(self, live: "Live", assignment: Assignment) -> None:
        """One trip, from the received model to the upload."""
        await travel(assignment.nbytes)
        rule, seed, device = live.server.rule, live.server.context.seed, assignment.device
        rng = stream(seed, "slot", device, assignment.trip)
        first = rule.plan(self.memory, assignment, rng) if rule.asks else None
        slots = () if first is None else (first, *rule.later_slots(first, assignment.epochs))
        self.trip = trip = LocalTrip(self.trainer, assignment, slots, rule, self.memory)
        await asyncio.sleep(self.seconds / 2)
        while device % 2 and live.server.version == assignment.version and live.evens_train():
            await asyncio.sleep(0.005)  # lets other devices upload before some ask, on any machine
        while trip.phase is not Phase.FINISHING and trip.to_slot():
            trip.merge(await live.ask(Request(device, assignment.trip, trip.asks_at)))
        await asyncio.sleep(self.seconds / 2)
        outcome = trip.finish()
        self.memory, self.trip = outcome.memory, None
        upload = outcome.upload(assignment)
        await travel(upload.nbytes)
        live.carry_out(live.coordinator.upload_arrived(live.now, upload.device, upload.trip, lambda: upload))


class Live:
    """The driver: reports what happens to the coordinator and carries out its answers."""

    def __init__(self, config: Config, factory: Factory, data: FederatedData, directory: Path) -> None:
        run, training = config.run, config.training
        samples, layout = np.array([len(shard) for shard in data.shards]), layout_of(build_module(factory))
        context = MethodContext(len(samples), samples, training.epochs, run.per_round, layout, run.seed)
        method = config.method_class(config.method, context)
        self.server = Server(
            method, context, initial_weights(factory, run.seed), exponential(training.lr, training.lr_decay)
        )
        self.coordinator = Coordinator(self.server, config.trigger())
        self.writer = RunWriter.create(directory, config.tables())
        trainers = (Trainer(factory, data, training, run.seed) for _ in samples)
        self.nodes = [Node(trainer, 0.02 + 0.02 * device) for device, trainer in enumerate(trainers)]
        self._tasks: set[asyncio.Task[None]] = set()
        self._start = time.monotonic()

    @property
    def now(self) -> float:
        return time.monotonic() - self._start

    def evens_train(self) -> bool:
        return any(device % 2 == 0 for device in self.server.active_trips)

    async def run(self, aggregations: int) -> None:
        """Run until this many aggregations. Devices still in flight are abandoned."""
        self.wake(self.coordinator.wake(self.now))
        while self.coordinator.counts.aggregations < aggregations:
            for task in [task for task in self._tasks if task.done()]:
                self._tasks.remove(task)
                task.result()
            await asyncio.sleep(0.005)
        for task in self._tasks:
            task.cancel()
        facts = self.coordinator.facts(self.now) | {"status": "finished"}
        self.writer.close(facts, self.server.context.layout, self.server.weights)

    async def ask(self, request: Request) -> Fresh | None:
        await travel(request.nbytes)
        effects = self.coordinator.request(request)
        self.carry_out(effects)
        await travel(CONTROL_BYTES if effects.fresh is None else effects.fresh.nbytes)
        return effects.fresh

    def tick(self, at: float) -> None:
        self.carry_out(self.coordinator.tick(at, lambda device: True))

    def wake(self, at: float | None) -> None:
        if at is not None:
            asyncio.get_running_loop().call_later(max(0.0, at - self.now), self.tick, at)

    def carry_out(self, effects: Effects) -> None:
        now = self.now
        for event in effects.events:
            self.writer.event(now, event)
        for assignment in effects.assignments:
            trip = self.nodes[assignment.device].train(self, assignment)
            self._tasks.add(asyncio.get_running_loop().create_task(trip))
        for device in effects.hurry:
            trip = self.nodes[device].trip
            if trip is not None:
                trip.hurry()
        self.wake(effects.wake_at)
        self.wake(effects.look_at)
        self.wake(effects.timer_at)


async def travel(size: int) -> None:
    """A network link: latency, then bytes."""
    await asyncio.sleep(LATENCY + size / BYTES_PER_SECOND)
