"""The virtual-time driver: brings events to the core in causal order and writes the log.

A trip's timeline (every leg takes its link's latency plus bytes / bandwidth):

    trigger --model down--> train to the slot --request up--> server answers with the model of *that* moment
        --fresh model down--> merge, train on --model up--> upload

Times never depend on what training computes, so a trip's training is one piece of work that is handed to the executor
as soon as its inputs are known, and its result is awaited only when the upload arrives.

Python's garbage collector while a run goes.

A trip in virtual time, and how it is saved: its training follows from its inputs and is not saved with it.
"""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from freshet.compute.executor import Executor, Future, DeferredFuture
from freshet.core.coordinator import Coordinator, Effects, next_multiple
from freshet.core.events import DevicesEvaluated
from freshet.core.messages import CONTROL_BYTES, Assignment, Fresh, Request, Slot, Upload
from freshet.core.saving import Tree
from freshet.core.server import Server
from freshet.core.streams import stream
from freshet.runs.checkpoint import copy_arrays
from freshet.runs.writer import RunWriter
from freshet.sim.device_memory import DEFAULT_LIMIT_BYTES, DeviceStore
from freshet.sim.device_evaluations import EvaluationSchedule, EvaluationResult
from freshet.sim.fleet import Fleet
from freshet.sim.heap import NO_TRIP, Entry, EventHeap, Rank
from freshet.training.task import Score
from freshet.training.trainer import Work
from freshet.training.trip import Outcome


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Let Python look for garbage less often: with many devices in flight each look is long, and there is little."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclass(slots=True)
class SimTrip:
    """A trip in virtual time: what the device was given, and the training that belongs to it."""

    assignment: Assignment
    triggered: float = 0.0
    #: When training began.
    started: float = 0.0
    slot: Slot | None = None
    fresh: Fresh | None = None
    future: Future[Outcome] | None = None
    merge: Future[Outcome] | None = None
    merged: bool = False
    due: float | None = None


def trip_state(journey: SimTrip) -> Tree:
    """What it takes to go on with it, beside what the server remembers."""
    return {
        "epochs": journey.assignment.epochs,
        "instruction": dict(journey.assignment.instruction),
        "vectors": dict(journey.assignment.vectors),
        "fresh_vectors": {} if journey.fresh is None else dict(journey.fresh.vectors),
        "packed": [_compressed_copy(journey.assignment), _compressed_copy(journey.fresh)],
        "slot": None if journey.slot is None else list(journey.slot),
        "merged": journey.merged,
        "triggered": journey.triggered,
        "started": journey.started,
        "due": journey.due,
    }


def _compressed_copy(message: Assignment | Fresh | None) -> list[Any]:
    """Bytes and content of a model that came in fewer bytes; nothing of one that the server has, too."""
    return [message.packed, message.weights] if message is not None and message.packed else []


def restore_trip(server: Server, device: int, saved: Tree) -> SimTrip:
    """A journey as it was: versions come from the server, which holds those that are needed."""
    active, store = server.active_trips[device], server.store
    given, got = saved["packed"]  # a model that came in fewer bytes is not quite a version of the server's
    weights = np.array(given[1]) if given else store.get(active.base)
    where = (device, active.trip, active.base, active.age, weights, saved["epochs"], active.lr)
    assignment = Assignment(*where, saved["instruction"], copy_arrays(saved["vectors"]), given[0] if given else 0)
    fresh = None
    if active.fresh is not None:
        weights = np.array(got[1]) if got else store.get(active.fresh)
        vectors = copy_arrays(saved["fresh_vectors"])
        fresh = Fresh(active.fresh, active.fresh_age, weights, vectors, got[0] if got else 0)
    slot = None if saved["slot"] is None else Slot(*saved["slot"])
    triggered = saved["triggered" if "triggered" in saved else "started"]  # earlier versions did not save it
    return SimTrip(assignment, triggered, saved["started"], slot, fresh, merged=saved["merged"])


class Simulation:
    """One run in virtual time."""

    def __init__(
        self,
        coordinator: Coordinator,
        fleet: Fleet,
        executor: Executor,
        writer: RunWriter,
        *,
        eval_every: float,
        stop_diverged: bool = True,
        device_memory: int = DEFAULT_LIMIT_BYTES,
        exams: EvaluationSchedule | None = None,
    ) -> None:
        self.coordinator, self.server, self.fleet = coordinator, coordinator.server, fleet
        self.executor, self.writer = executor, writer
        self.eval_every, self._stop_diverged, self._device_evaluations = eval_every, stop_diverged, exams
        self.rule, self.links = self.server.rule, self.server.links
        self._epochs, self._upload_bytes = self.server.context.epochs, self.server.upload_bytes
        self._always_available = fleet.always_available
        self._remembers = self.rule.remembers or (self.links is not None and self.links.remembers)
        self.heap = EventHeap()
        self.trips: dict[int, SimTrip] = {}
        self.devices = DeviceStore(writer.directory / "devices", device_memory)
        self.last_test = self.last_device_evaluation = -1.0
        self.until = 0.0
        self.started = self.over = False
        self._latest_score: tuple[int, Future[Score]] | None = None

    @property
    def now(self) -> float:
        """Seconds of virtual time since the start."""
        return self.heap.now

    def facts(self) -> dict[str, Any]:
        """The course of the run, for its summary."""
        return self.coordinator.facts(self.now)

    def run(self, until: float, between: Callable[[], bool] = lambda: False) -> bool:
        """Process all events up to ``until`` (seconds), the last round, or a test that shows that the one before it had
        diverged; False when ``between``, called between two events, says to stop. The test at the very end is left to
        ``conclude``, and stays to be made by a run with a later end."""
        self.until = until
        if not self.started:
            self.started = True
            self.coordinator.wake(0.0)
            self._wake(0.0)
            self.heap.push((0.0, Rank.EVALUATE, *NO_TRIP))
        heap, end, handlers, progress = self.heap, (until, Rank.EVALUATE), self._handlers(), self.writer.progress
        watched = bool(self.writer.observers)
        with relaxed_gc():
            while not self.over and heap.has_event_before(end):
                if between():
                    return False
                entry = heap.pop()
                handlers[entry[1]](entry)
                if watched:
                    progress(entry[0])
        for journey in self.trips.values():  # trips that go on beyond the end, but whose merges are in the log
            if journey.merged and isinstance(journey.merge, DeferredFuture):
                journey.merge.start()
        if not self.over:
            heap.now = until
            progress(until)
        return True

    def _handlers(self) -> dict[int, Callable[[Entry], None]]:
        """Not kept: an object that refers to itself, with all its models, waits for the garbage collector."""
        return {
            Rank.UPLOAD: self._on_upload,
            Rank.LOST: self._on_lost,
            Rank.REQUEST: self._on_request,
            Rank.MERGE: self._on_merge,
            Rank.TRIGGER: self._on_trigger,
            Rank.EVALUATE: self._on_evaluate,
        }

    def conclude(self) -> None:
        """Test the model that is left, unless that was done at this very time (on the devices, too, if they are to be
        tested), and look at the result."""
        if self.last_test < self.now or (self._device_evaluations is not None and self.last_device_evaluation < self.now):
            self._test(self.now, last=True)
        self.writer.drain(wait=True)
        self.coordinator.divergence_monitor.check_latest()

    def close(self) -> None:
        """The run is over, or has failed: nothing of it stays behind but its files."""
        self.devices.close()
        self.trips.clear()  # what would be trained on demand refers to this object

    def _carry_out(self, now: float, effects: Effects) -> None:
        """Log what happened, and do what the core asks for."""
        events, assignments, _, hurry, wake_at, look_at, given_up = effects
        self.writer.events(now, events)
        for assignment in assignments:
            self._start(now, assignment)
        for device in given_up:
            self._drop_trip(self.trips.pop(device), finished=False)
        for device in hurry:
            self._hurry(now, device)
        if wake_at is not None:
            self._wake(wake_at)
        if look_at is not None:
            self._wake(look_at)
        if self.coordinator.over:
            self.over = True

    def _wake(self, at: float) -> None:
        self.heap.push((at, Rank.TRIGGER, *NO_TRIP))

    # ---- starting trips

    def _on_trigger(self, entry: Entry) -> None:
        now = entry[0]
        self._carry_out(now, self.coordinator.tick(now, _everybody if self._always_available else self._is_available_at(now)))

    def _is_available_at(self, now: float) -> Callable[[int], bool]:
        """Which devices are reachable at this time."""
        return lambda device: self.fleet.available(device, now)

    def _start(self, now: float, assignment: Assignment) -> None:
        device, number, fleet = assignment.device, assignment.trip, self.fleet
        start = now + self._seconds_before_training(device, assignment, now)
        journey = self.trips[device] = SimTrip(assignment, now, start)
        if self.rule.asks:
            journey.slot = self.rule.plan(
                self.devices.get(device), assignment, stream(self.server.context.seed, "slot", device, number)
            )
        if journey.slot is None:
            self._finish(start, journey, assignment.epochs)
        else:
            asked = start + (journey.slot.epoch - 1) * fleet.epoch_seconds(device, self._epochs, start)
            heard = asked + fleet.upload_seconds(device, CONTROL_BYTES, asked)
            self.heap.push((heard, Rank.REQUEST, device, number))
        if not self._always_available:
            leaves = fleet.leave_time(device, now)
            if leaves < math.inf:
                self.heap.push((leaves, Rank.LOST, device, number))

    def _seconds_before_training(self, device: int, assignment: Assignment, time: float) -> float:
        """Seconds between a trigger and the first step of training."""
        return self.fleet.download_seconds(device, assignment.nbytes, time) + self.fleet.start_seconds.item(device)

    def _finish(self, resume: float, journey: SimTrip, epochs: int) -> None:
        """Training goes on at ``resume`` for so many epochs, then the model goes up."""
        assignment, fleet = journey.assignment, self.fleet
        device, number = assignment.device, assignment.trip
        done = resume + epochs * fleet.epoch_seconds(device, self._epochs, resume)
        arrival = done + fleet.upload_seconds(device, self._upload_bytes, done)
        self._submit(journey, arrival)
        rank = Rank.LOST if fleet.loss and fleet.is_lost(device, number) else Rank.UPLOAD
        self.heap.push((arrival, rank, device, number))

    def _submit(self, journey: SimTrip, due: float) -> None:
        """Give a trip's training to the executor; what arrives after the end of the run is only computed on demand."""
        work = self._work(journey)
        journey.due = due
        if due <= self.until:
            journey.future = journey.merge = self.executor.train(work, due)
        else:
            journey.future = self._on_demand(work, due)
            journey.merge = self._on_demand(work._replace(merge_only=True), due)

    def _work(self, journey: SimTrip) -> Work:
        """The whole training of a trip."""
        assignment, rule, devices = journey.assignment, self.rule, self.devices
        device = assignment.device
        seconds = devices.mean_seconds(device) if rule.timed else None
        return Work(assignment, journey.slot, journey.fresh, rule, devices.get(device), seconds)

    def _on_demand(self, work: Work, due: float) -> DeferredFuture[Outcome]:
        return DeferredFuture(lambda: self.executor.train(work, due))

    # ---- a trip under way

    def _current_trip(self, device: int, trip: int) -> SimTrip | None:
        """The trip an event belongs to, unless it has ended in the meantime: then its device is told so."""
        journey = self.trips.get(device)
        if journey is not None and journey.assignment.trip == trip:
            return journey
        self.server.mark_heard(device, trip)
        return None

    def _on_request(self, entry: Entry) -> None:
        now, _, device, trip = entry
        journey = self._current_trip(device, trip)
        if journey is None:
            return
        assert journey.slot is not None
        effects = self.coordinator.request(Request(device, trip, journey.slot))
        self._carry_out(now, effects)
        journey.fresh = fresh = effects.fresh
        size = CONTROL_BYTES if fresh is None else fresh.nbytes
        resume = now + self.fleet.download_seconds(device, size, now)
        if fresh is not None:
            self.heap.push((resume, Rank.MERGE, device, trip))
        self._finish(resume, journey, journey.assignment.epochs - (journey.slot.epoch - 1))

    def _on_merge(self, entry: Entry) -> None:
        now, _, device, trip = entry
        journey = self._current_trip(device, trip)
        if journey is None:
            return
        journey.merged = True
        event = self.coordinator.fresh_merged(device, trip)
        assert event is not None
        self.writer.event(now, event, journey.merge, _merge_numbers)

    def _hurry(self, now: float, device: int) -> None:
        """The server wants this device's model soon: it uploads at the end of the epoch in which it hears so."""
        journey = self.trips[device]
        heard = now + self.fleet.download_seconds(device, CONTROL_BYTES, now)
        epochs = 1 + int(max(0.0, heard - journey.started) / self.fleet.epoch_seconds(device, self._epochs, journey.started))
        if journey.slot is None and epochs < journey.assignment.epochs and journey.future is not None:
            journey.future.cancel()
            journey.assignment = journey.assignment._replace(epochs=epochs)
            self._finish(journey.started, journey, epochs)  # arrives before the entry it replaces, which is then void

    def _on_upload(self, entry: Entry) -> None:
        now, _, device, trip = entry
        journey = self._current_trip(device, trip)
        if journey is None:
            return
        del self.trips[device]
        if self.rule.timed:
            before = self._seconds_before_training(device, journey.assignment, journey.triggered)
            self.devices.record_trip(device, before + (now - journey.started))
        effects = self.coordinator.upload_arrived(now, device, trip, partial(self._receive, journey))
        if journey.future is not None:  # nobody has looked at it
            self._drop_trip(journey, finished=True)
        self._carry_out(now, effects)

    def _receive(self, journey: SimTrip) -> Upload:
        """The upload of a journey, once; its device remembers what it has learned."""
        assert journey.future is not None
        outcome, journey.future = journey.future.result(), None
        if outcome.memory:
            self.devices.put(journey.assignment.device, outcome.memory)
        upload = outcome.upload(journey.assignment)
        return upload if self.links is None else self.links.decode_upload(upload, self.server.store.get(upload.base))

    def _on_lost(self, entry: Entry) -> None:
        now, _, device, trip = entry
        journey = self._current_trip(device, trip)
        if journey is None:
            return
        del self.trips[device]
        finished = self.fleet.available(device, now)
        self._drop_trip(journey, finished)
        reason, sent = ("upload lost", self._upload_bytes) if finished else ("device left", 0)
        self._carry_out(now, self.coordinator.trip_lost(now, device, trip, reason, sent))

    def _drop_trip(self, journey: SimTrip, finished: bool) -> None:
        """Nobody needs this model; but the device may have learned something on the way: from the whole trip, or, if it
        did not finish, from its merge."""
        future, device = journey.future, journey.assignment.device
        if future is None:
            return
        if self._remembers and finished:
            self.devices.defer(device, future)
        elif self._remembers and journey.merged:
            self.devices.defer(device, self._on_demand(self._work(journey)._replace(merge_only=True), self.now))
        elif not journey.merged:
            future.cancel()

    # ---- testing the model

    def _on_evaluate(self, entry: Entry) -> None:
        self._test(entry[0])
        self.heap.push((next_multiple(entry[0], self.eval_every), Rank.EVALUATE, *NO_TRIP))
        self.over |= self._has_diverged()

    def _has_diverged(self) -> bool:
        """Whether a test has shown that the run should stop."""
        return self._stop_diverged and self.coordinator.divergence_monitor.diverged is not None

    def _test(self, time: float, last: bool = False) -> None:
        """Test the newest model; a version that was tested before is not computed again."""
        self.last_test = time
        version = self.server.version
        if self._latest_score is None or self._latest_score[0] != version:
            self._latest_score = (version, self.executor.evaluate(self.server.method.evaluation_model(self.server)))
        score = self._latest_score[1]
        self.coordinator.divergence_monitor.test(time, score)
        event, row = self.coordinator.test()
        if self._device_evaluations is None or not self._device_evaluations.due(time, self.eval_every, last or self._has_diverged()):
            self.writer.event(time, event, score, _scores, row)
            return
        self.last_device_evaluation = time
        found = self._device_evaluations.start(self.executor, self.server, score, time)
        self.writer.event(time, event, found, EvaluationResult.numbers, row)
        self.writer.event(time, DevicesEvaluated(version), found, EvaluationResult.by_device)

    # ---- checkpoint: training that is under way is not saved, it follows from its inputs and is handed out again

    def state(self) -> Tree:
        """Everything that decides how the run goes on (all pending results are awaited first)."""
        self.writer.drain(wait=True)
        return {
            "coordinator": self.coordinator.state(),
            "devices": self.devices.state(),
            "heap": [list(entry) for entry in self.heap.entries()],
            "now": self.heap.now,
            "last_test": self.last_test,
            "last_exam": self.last_device_evaluation,
            "journeys": {str(device): trip_state(journey) for device, journey in self.trips.items()},
            "log": self.writer.position(),
        }

    def restore(self, tree: Tree, until: float) -> None:
        """Go on from a saved state, with every device in flight."""
        self.coordinator.restore(tree["coordinator"])
        self.devices.restore(tree["devices"])
        self.heap = EventHeap(tree["heap"], tree["now"])
        self.last_test, self.last_device_evaluation = tree["last_test"], tree.get("last_exam", -1.0)
        self.until, self.started = until, True
        self.over = self.coordinator.over or self._has_diverged()
        for device, saved in sorted(tree["journeys"].items(), key=lambda item: int(item[0])):
            journey = self.trips[int(device)] = restore_trip(self.server, int(device), saved)
            if saved["due"] is not None:
                self._submit(journey, saved["due"])


def check_state(tree: Tree, size: int) -> None:
    """Raise ``ValueError`` unless a saved state has all its parts, with models of this size."""
    parts = {"coordinator", "devices", "heap", "now", "last_test", "journeys", "log", "wall_seconds"}
    missing = parts - tree.keys()
    if missing:
        raise ValueError(f"it has no {', '.join(sorted(missing))}")
    times = [tree["now"], tree["wall_seconds"], *(entry[0] for entry in tree["heap"])]
    if not all(isinstance(time, int | float) and 0 <= time < math.inf for time in times):
        raise ValueError("its times are no times")
    if tree["heap"] and min(entry[0] for entry in tree["heap"]) < tree["now"]:
        raise ValueError("it has events before its own time")
    models = [weights for _, weights, _ in tree["coordinator"]["server"]["store"]]
    if not all(isinstance(w, np.ndarray) and w.shape == (size,) and w.dtype == np.float32 for w in models):
        raise ValueError(f"its models are not of {size} numbers")


def _everybody(_: int) -> bool:
    return True


def _merge_numbers(outcome: Outcome) -> dict[str, Any]:
    return outcome.merged | ({"diverged": True} if outcome.lost_at_merge else {})


def _scores(score: Score) -> dict[str, Any]:
    return {**score.metrics, "loss": score.loss}
