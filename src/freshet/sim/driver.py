"""The virtual-time driver: brings events to the core in causal order and writes the log.

A trip's timeline (every leg takes its link's latency plus bytes / bandwidth):

    trigger --model down--> train to the slot --request up--> server answers with the model of *that* moment
        --fresh model down--> merge, train on --model up--> upload

Times never depend on what training computes, so a trip's training is one piece of work that is handed to the executor
as soon as its inputs are known, and its result is awaited only when the upload arrives.
"""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from freshet.compute.base import Executor, Future, OnDemand
from freshet.core.messages import CONTROL_BYTES, Assignment, Fresh, Upload
from freshet.core.method import LocalRule
from freshet.core.server import Event, Server
from freshet.core.streams import stream
from freshet.core.trigger import Trigger
from freshet.core.trip import DeviceTrip
from freshet.runs.writer import RunWriter
from freshet.sim.devices import DEFAULT_LIMIT, DeviceStore
from freshet.sim.ending import Rounds, Watch
from freshet.sim.fleet import Fleet
from freshet.sim.heap import Entry, EventHeap, Rank
from freshet.training.local import Outcome, Score, Work


@dataclass(slots=True)
class Journey:
    """A trip in virtual time: the device's state machine and the training that belongs to it."""

    trip: DeviceTrip
    assignment: Assignment
    future: Future[Outcome] | None = None
    merge: Future[Outcome] | None = None
    fresh: Fresh | None = None
    merged: bool = False
    started: float = 0.0
    due: float | None = None


@dataclass(slots=True)
class Counts:
    """Running totals for metrics and summary."""

    trips: int = 0
    requests: int = 0
    merges: int = 0
    uploads: int = 0
    aggregations: int = 0
    discards: int = 0
    rejected: int = 0
    lost: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    staleness_sum: int = 0
    staleness_count: int = 0


class Simulation:
    """One run in virtual time."""

    def __init__(
        self,
        server: Server,
        trigger: Trigger,
        fleet: Fleet,
        executor: Executor,
        writer: RunWriter,
        *,
        eval_every: float,
        rounds: int = 0,
        stop_diverged: bool = True,
        device_memory: int = DEFAULT_LIMIT,
        stop: Callable[[], bool] = lambda: False,
        pause: "Callable[[Simulation], None]" = lambda _: None,
    ) -> None:
        self.server, self.trigger, self.fleet = server, trigger, fleet
        self.executor, self.writer = executor, writer
        self.eval_every, self._stop, self._pause = eval_every, stop, pause
        self.rule = server.method.rule()
        self._plans = type(self.rule).plan is not LocalRule.plan
        self.heap = EventHeap()
        self.journeys: dict[int, Journey] = {}
        self.devices = DeviceStore(limit_bytes=device_memory)
        self.counts = Counts()
        self.model_bytes = 4 * server.world.layout.size
        self.triggers: set[float] = set()
        self.last_test = -1.0
        self.until = 0.0
        self.started = self.over = False
        self.rounds, self.watch, self._stop_diverged = Rounds(rounds), Watch(), stop_diverged
        self._tested: tuple[int, Future[Score]] | None = None
        self._handlers: dict[int, Callable[[Entry], None]] = {
            Rank.UPLOAD: self._on_upload,
            Rank.LOST: self._on_lost,
            Rank.REQUEST: self._on_request,
            Rank.MERGE: self._on_merge,
            Rank.TRIGGER: self._on_trigger,
            Rank.EVALUATE: self._on_evaluate,
        }

    def run(self, until: float) -> bool:
        """Process all events up to ``until`` (seconds), the last round, or a test that shows that the one before it had
        diverged; False when it was asked to stop before."""
        self.until = until
        if not self.started:
            self.started = True
            self._trigger_at(0.0)
            self.heap.push(Entry(0.0, Rank.EVALUATE))
        with patient_collector():
            heap, handlers, observers = self.heap, self._handlers, self.writer.observers
            while not self.over and heap.peek() <= until:
                if self._stop():
                    return False
                self._pause(self)
                entry = heap.pop()
                handlers[entry.rank](entry)
                for observer in observers:
                    observer.on_progress(entry.time)
        for journey in self.journeys.values():  # trips that go on beyond the end, but whose merges are in the log
            if journey.merged and isinstance(journey.merge, OnDemand):
                journey.merge.start()
        if not self.over:
            heap.now = until
        if self.last_test < heap.now:
            self._test(heap.now)
        return True

    # ---- starting trips

    def _on_trigger(self, entry: Entry) -> None:
        now = entry.time
        self.triggers.discard(now)
        wanted = self.trigger.wanted(self.server)
        chosen = self.server.select(wanted, lambda device: self.fleet.available(device, now)) if wanted else []
        if chosen:
            for assignment in self.server.trigger(chosen):
                self._start(now, assignment)
        elif wanted and self.server.synchronous:
            self._write(now, self.server.empty_round())
            self.over |= self.rounds.over(self.server)
        nobody_there = len(chosen) < wanted and not self.triggers
        if not self.trigger.on_arrival or nobody_there:
            self._trigger_at(_next(now, self.trigger.period))

    def _trigger_at(self, time: float) -> None:
        if time not in self.triggers:
            self.triggers.add(time)
            self.heap.push(Entry(time, Rank.TRIGGER))

    def _start(self, now: float, assignment: Assignment) -> None:
        device, number = assignment.device, assignment.trip
        slot = None
        if self._plans:
            rng = stream(self.server.world.seed, "slot", device, number)
            slot = self.rule.plan(self.devices.get(device), assignment, rng)
        trip = DeviceTrip(device, number, assignment.version, assignment.age, assignment.epochs, assignment.lr, slot)
        journey = self.journeys[device] = Journey(trip, assignment)
        record: Event = {
            "kind": "trigger",
            "device": device,
            "trip": number,
            "version": assignment.version,
            "epochs": assignment.epochs,
            "lr": assignment.lr,
        }
        if slot is not None:
            record |= {"slot": slot.epoch, "slot_by": slot.by}
        if self.server.synchronous:
            record["round"] = self.server.round
        self.writer.event(now, record)
        self.counts.trips += 1
        self.counts.bytes_down += self.model_bytes
        start = journey.started = now + self.fleet.down(device, self.model_bytes, now)
        if slot is None:
            self._finish(start, journey, trip.epochs)
        else:
            asked = start + trip.epochs_to_slot * self._epoch(device, start)
            self.heap.push(Entry(asked + self.fleet.up(device, CONTROL_BYTES, asked), Rank.REQUEST, device, number))
        leaves = self.fleet.leaves(device, now)
        if leaves < math.inf:
            self.heap.push(Entry(leaves, Rank.LOST, device, number))

    def _epoch(self, device: int, time: float) -> float:
        return self.fleet.epoch(device, self.server.world.epochs, time)

    def _finish(self, resume: float, journey: Journey, epochs: int) -> None:
        """Training goes on at ``resume`` for so many epochs, then the model goes up."""
        trip = journey.trip
        device, number = trip.device, trip.trip
        done = resume + epochs * self._epoch(device, resume)
        arrival = done + self.fleet.up(device, self.model_bytes, done)
        self.hand_out(journey, arrival)
        rank = Rank.LOST if self.fleet.is_lost(device, number) else Rank.UPLOAD
        self.heap.push(Entry(arrival, rank, device, number))

    def hand_out(self, journey: Journey, due: float) -> None:
        """Give a trip's training to the executor; what arrives after the end of the run is only computed on demand."""
        trip, assignment = journey.trip, journey.assignment
        memory = self.devices.get(trip.device)
        seconds = self.devices.mean_seconds(trip.device) if self.rule.timed else None
        work = Work(trip, assignment.weights, journey.fresh, self.rule, memory, assignment.instruction, seconds)
        journey.due = due
        if due <= self.until:
            journey.future = journey.merge = self.executor.train(work, due)
        else:
            journey.future = OnDemand(lambda: self.executor.train(work, due))
            merge_only = work._replace(merge_only=True)
            journey.merge = OnDemand(lambda: self.executor.train(merge_only, due))

    # ---- a trip under way

    def _journey(self, entry: Entry) -> Journey | None:
        """The trip an event belongs to, unless it has ended in the meantime."""
        journey = self.journeys.get(entry.device)
        return journey if journey is not None and journey.trip.trip == entry.trip else None

    def _on_request(self, entry: Entry) -> None:
        journey = self._journey(entry)
        if journey is None:
            return
        trip = journey.trip
        trip.ask()
        journey.fresh = fresh = self.server.request(trip.device, trip.trip)
        trip.answer(*((fresh.version, fresh.age) if fresh else (None, None)))
        assert trip.slot is not None
        record: Event = {"kind": "request", "device": trip.device, "trip": trip.trip, "base": trip.base}
        record |= {"version": self.server.version, "slot": trip.slot.epoch, "fresh": fresh.version if fresh else None}
        self.writer.event(entry.time, record)
        size = self.model_bytes if fresh else CONTROL_BYTES
        self.counts.requests += 1
        self.counts.bytes_up += CONTROL_BYTES
        self.counts.bytes_down += size
        resume = entry.time + self.fleet.down(trip.device, size, entry.time)
        if fresh:
            self.heap.push(Entry(resume, Rank.MERGE, trip.device, trip.trip))
        self._finish(resume, journey, trip.epochs_after_slot)

    def _on_merge(self, entry: Entry) -> None:
        journey = self._journey(entry)
        if journey is None:
            return
        journey.merged = True
        self.counts.merges += 1
        trip = journey.trip
        assert trip.slot is not None and trip.fresh is not None
        record: Event = {"kind": "merge", "device": trip.device, "trip": trip.trip, "base": trip.base}
        record |= {"fresh": trip.fresh, "slot": trip.slot.epoch, "slot_by": trip.slot.by}
        if self.server.synchronous:
            record |= {"round": trip.fresh_age, "k": trip.fresh - trip.base}
        self.writer.event(entry.time, record, journey.merge, _merge_numbers)

    def _hurry(self, now: float, device: int) -> None:
        """The server wants this device's model soon: it uploads at the end of the epoch in which it hears so."""
        journey = self.journeys[device]
        trip, heard = journey.trip, now + self.fleet.down(device, CONTROL_BYTES, now)
        epochs = 1 + int(max(0.0, heard - journey.started) / self._epoch(device, journey.started))
        self.counts.bytes_down += CONTROL_BYTES
        record = {"kind": "urgent", "device": device, "trip": trip.trip, "epochs": min(epochs, trip.epochs)}
        self.writer.event(now, record)
        if trip.slot is None and epochs < trip.epochs and journey.future is not None:
            journey.future.cancel()
            journey.trip = replace(trip, epochs=epochs)  # the old one may be in a worker's hands
            self._finish(journey.started, journey, epochs)  # arrives before the entry it replaces, which is then void

    def _on_upload(self, entry: Entry) -> None:
        journey = self._journey(entry)
        if journey is None:
            return
        assert journey.future is not None
        trip, future = journey.trip, journey.future
        trip.finish()
        del self.journeys[trip.device]
        if self.rule.timed:
            download = self.fleet.down(trip.device, self.model_bytes, journey.started)
            self.devices.completed(trip.device, download + (entry.time - journey.started))
        self.counts.uploads += 1
        self.counts.bytes_up += self.model_bytes
        record: Event = {
            "kind": "upload",
            "device": trip.device,
            "trip": trip.trip,
            "base": trip.base,
            "version": self.server.version,
            "bytes": self.model_bytes,
        }
        self.writer.event(entry.time, record)
        events = self.server.discard_unseen(trip.device, trip.trip)
        if events is None:
            outcome = future.result()
            self.devices.put(trip.device, outcome.memory)
            upload = Upload(trip.device, trip.trip, trip.base, outcome.weights, outcome.steps, outcome.report)
            events = self.server.upload(upload)
        else:
            self._set_aside(journey, finished=True)
        self._log(entry.time, events)

    def _on_lost(self, entry: Entry) -> None:
        journey = self._journey(entry)
        if journey is None:
            return
        trip = journey.trip
        del self.journeys[trip.device]
        finished = self.fleet.available(trip.device, entry.time)
        self.counts.bytes_up += self.model_bytes * finished
        self._set_aside(journey, finished)
        self._log(entry.time, self.server.lost(trip.device, trip.trip, "upload lost" if finished else "device left"))

    def _set_aside(self, journey: Journey, finished: bool) -> None:
        """Nobody needs this model; but the device may have learned something on the way."""
        future = journey.future
        if future is None:
            return
        if self.rule.remembers and (finished or journey.merged):
            self.devices.defer(journey.trip.device, future)
        elif not journey.merged:
            future.cancel()

    def _log(self, time: float, events: list[Event]) -> None:
        """Write what the server decided, and act on it."""
        if events:
            self._write(time, events)
        if self.server.urgent:
            for device in self.server.take_urgent():
                self._hurry(time, device)
        if self.trigger.on_arrival and self.trigger.wanted(self.server):
            self._trigger_at(time)
        self.over |= self.rounds.ended(self.server, endless=self.until == math.inf)

    def _write(self, time: float, events: list[Event]) -> None:
        counts = self.counts
        for event in events:
            self.writer.event(time, event)
            kind = event["kind"]
            if kind == "aggregate":
                stale = event.get("stalenesses") or [event["staleness"]] * len(event.get("devices", (None,)))
                counts.aggregations += 1
                counts.staleness_sum += sum(stale)
                counts.staleness_count += len(stale)
            elif kind == "discard":
                counts.discards += 1
            elif kind == "rejected":
                counts.rejected += 1
            elif kind == "lost":
                counts.lost += 1

    # ---- testing the model

    def _on_evaluate(self, entry: Entry) -> None:
        self._test(entry.time)
        self.heap.push(Entry(_next(entry.time, self.eval_every), Rank.EVALUATE))
        self.over |= self._stop_diverged and self.watch.diverged is not None

    def _test(self, time: float) -> None:
        """Test the newest model; a version that was tested before is not computed again."""
        self.last_test = time
        version = self.server.version
        if self._tested is None or self._tested[0] != version:
            self._tested = (version, self.executor.evaluate(self.server.method.evaluated(self.server)))
        self.watch.test(time, self._tested[1])
        row: dict[str, Any] = {name: getattr(self.counts, name) for name in METRICS} | {"rounds": self.server.rounds}
        record = {"kind": "evaluate", "version": version, "metrics": row}
        self.writer.event(time, record, self._tested[1], lambda score: {"accuracy": score.accuracy, "loss": score.loss})


@contextmanager
def patient_collector() -> Iterator[None]:
    """Let Python look for garbage less often: with many devices in flight each look is long, and there is little."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


METRICS = ("trips", "uploads", "aggregations", "discards", "bytes_up", "bytes_down")


def _next(time: float, period: float) -> float:
    """The next multiple of a period (multiplied, not added up: no drift)."""
    return (round(time / period) + 1) * period


def _merge_numbers(outcome: Outcome) -> dict[str, Any]:
    numbers = {name: value for name, value in outcome.report.items() if name not in ("slot", "first")}
    return numbers | ({"diverged": True} if outcome.diverged else {})
