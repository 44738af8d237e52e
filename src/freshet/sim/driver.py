"""The virtual-time driver: delivers events to the core in causal order and writes the log.

A trip's timeline (every leg takes its link's latency plus bytes / bandwidth):

    trigger --model down--> train to the slot --request up--> server answers with the model of *that* moment
        --fresh model down--> merge, train on (perhaps to another slot) --model up--> upload

A method may have the server push its model instead. A pushed model is merged at the start of the first epoch after it
has arrived. One that arrives in the last epoch is wasted. A device gets no second one while the first is on its way or
waits for its epoch, or while its base is still being downloaded.

Times never depend on what training computes. A trip's training is therefore one piece of work. The executor gets it as
soon as its inputs are known (after the last answer; with pushes, at the start of the last epoch), and the driver awaits
the result only when the upload arrives. Checkpoints do not hold running training: it follows from its inputs and is
submitted again.

``EventHeap`` is the queue of virtual time. ``EvaluationSchedule`` says when the global model is evaluated on every
device; these evaluations do not influence the run.
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from freshet.compute.executor import DeferredFuture, Executor, Future
from freshet.core.coordinator import Coordinator, Effects, next_multiple
from freshet.core.events import DevicesEvaluated
from freshet.core.messages import CONTROL_BYTES, Assignment, Fresh, Packed, Request, Slot, Upload
from freshet.core.method import Memory
from freshet.core.saving import Tree
from freshet.core.server import Server
from freshet.core.streams import stream
from freshet.core.vectors import Vector
from freshet.runs.checkpoint import copy_arrays
from freshet.runs.writer import RunWriter
from freshet.sim.device_memory import DEFAULT_LIMIT_BYTES, DeviceStore
from freshet.sim.fleet import Fleet
from freshet.training.device_eval import DeviceEvaluation, DeviceScores, summarise_scores
from freshet.training.outgoing import Collusion
from freshet.training.task import Score
from freshet.training.trainer import TripInput
from freshet.training.trip import TripOutcome


class Rank(IntEnum):
    """Order of events at the same instant: arrivals, then answers, then new trips, then the test of the model."""

    UPLOAD = 0
    LOST = 1
    REQUEST = 2
    MERGE = 3
    TRIGGER = 4
    EVALUATE = 5
    #: With pushes: no further model can be merged, so the training is known.
    SUBMIT = 6


class Scheduled(NamedTuple):
    """An event to come: when, what, and to which trip of which device (-1: none)."""

    time: float
    rank: int
    device: int = -1
    trip: int = -1


class EventHeap:
    """A priority queue by (time, rank, device). Time never goes back."""

    def __init__(self, entries: Iterable[tuple[float, int, int, int]] = (), now: float = 0.0) -> None:
        self._heap = [Scheduled(*entry) for entry in entries]
        heapify(self._heap)
        self.now = now

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, scheduled: Scheduled) -> None:
        """Schedule an event, now or later."""
        if not scheduled.time >= self.now:  # NaN too
            raise ValueError(f"the event at {scheduled.time} lies before the clock, {self.now}")
        heappush(self._heap, scheduled)

    def has_event_before(self, end: tuple[float, int]) -> bool:
        """Return whether an event lies before this time and rank."""
        return bool(self._heap) and self._heap[0] < end

    def pop(self) -> Scheduled:
        """Return the next event and move the clock to it."""
        scheduled = heappop(self._heap)
        self.now = scheduled.time
        return scheduled

    def in_order(self) -> list[Scheduled]:
        """Return all events in order."""
        return sorted(self._heap)


class EvaluationResult(NamedTuple):
    """The scores of one version: on the test set, on every device and, if asked for, after local training."""

    score: Score
    plain: DeviceScores
    personal: DeviceScores | None

    def numbers(self) -> dict[str, Any]:
        """The scores on the test set, and statistics over the devices."""
        scores: dict[str, Any] = {**self.score.metrics, "loss": self.score.loss}
        scores |= {f"devices_{key}": value for key, value in summarise_scores(self.plain.accuracy).items()}
        if self.personal is not None:
            scores |= {f"personal_{key}": value for key, value in summarise_scores(self.personal.accuracy).items()}
        return scores

    def by_device(self) -> dict[str, Any]:
        """All scores, one entry per device."""
        scores: dict[str, Any] = {"accuracy": self.plain.accuracy.tolist(), "loss": self.plain.loss.tolist()}
        if self.personal is not None:
            scores["personal_accuracy"] = self.personal.accuracy.tolist()
            scores["personal_loss"] = self.personal.loss.tolist()
        return scores


class PendingEvaluation:
    """The pending results of one evaluation as one future."""

    def __init__(
        self, score: Future[Score], plain: Sequence[Future[DeviceScores]], personal: Sequence[Future[DeviceScores]]
    ) -> None:
        self._score, self._plain, self._personal = score, plain, personal

    def done(self) -> bool:
        return all(part.done() for part in (self._score, *self._plain, *self._personal))

    def result(self) -> EvaluationResult:
        personal = _join_scores(self._personal) if self._personal else None
        return EvaluationResult(self._score.result(), _join_scores(self._plain), personal)


def _join_scores(parts: Sequence[Future[DeviceScores]]) -> DeviceScores:
    return DeviceScores(*(np.concatenate(column) for column in zip(*(part.result() for part in parts), strict=True)))


class EvaluationSchedule:
    """Evaluates at every ``every``-th test (0: only at the last), also after ``steps`` of local training (0: not).

    A version is evaluated once per learning rate of the local training.
    """

    def __init__(self, every: int, steps: int) -> None:
        self.every, self.steps = every, steps
        self._last: tuple[tuple[int, float], list[Future[DeviceScores]], list[Future[DeviceScores]]] | None = None

    @staticmethod
    def from_options(evaluate_devices: str | int, personalise: int) -> "EvaluationSchedule | None":
        """Build the schedule from the options of a run. None means never."""
        if evaluate_devices == "never":
            return None
        return EvaluationSchedule(evaluate_devices if isinstance(evaluate_devices, int) else 0, personalise)

    def due(self, time: float, eval_every: float, last: bool) -> bool:
        """Return whether the test at ``time`` evaluates devices. It depends on time alone, so a resumed run agrees."""
        return last or (self.every > 0 and round(time / eval_every) % self.every == 0)

    def start(
        self,
        executor: Executor,
        server: Server,
        score: Future[Score],
        time: float,
        memory: Callable[[int], Memory] | None = None,
    ) -> PendingEvaluation:
        """Submit one evaluation of all devices, and one per device with local training.

        Where devices have models of their own, ``memory`` gives what each remembers: one evaluation per device.
        """
        version, lr = server.version, server.learning_rate(time) if self.steps else 0.0
        if self._last is None or self._last[0] != (version, lr) or memory is not None:
            weights, devices = server.method.evaluation_model(server), range(server.context.devices)
            plain = [DeviceEvaluation(weights, version, devices)]
            personal = [
                DeviceEvaluation(weights, version, [device], self.steps, lr) for device in devices if self.steps
            ]
            if memory is not None:
                plain = [DeviceEvaluation(weights, version, [device]) for device in devices]
                plain, personal = (
                    [each._replace(memories=[memory(each.devices[0])], rule=server.rule) for each in part]
                    for part in (plain, personal)
                )
            plain_scores, personal_scores = (
                [executor.evaluate_devices(each, time) for each in part] for part in (plain, personal)
            )
            self._last = (version, lr), plain_scores, personal_scores
        return PendingEvaluation(score, *self._last[1:])


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Run Python's garbage collector less often: with many devices in flight it takes long and finds little."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclass(slots=True)
class SimTrip:
    """A trip in virtual time: what the device received, and its training."""

    assignment: Assignment
    #: When the server triggered it.
    triggered: float = 0.0
    #: When training began.
    started: float = 0.0
    #: Where the device asks, in ascending order, and the answers so far. A pushed model adds to both.
    slots: list[Slot] = field(default_factory=list)
    fresh: list[Fresh | None] = field(default_factory=list)
    #: How many of the fresh models are merged, with their numbers as they become known.
    merged: int = 0
    merges: list[DeferredFuture[TripOutcome]] = field(default_factory=list)
    #: The training up to the last answer, if it was needed before the whole: the number of answers, and the result.
    to_last_answer: tuple[int, Future[TripOutcome]] | None = None
    #: The whole training, once its inputs are known.
    future: Future[TripOutcome] | None = None
    #: When the upload arrives.
    due: float | None = None
    #: With pushes: when the downlink is free again.
    link_free: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether every request is answered."""
        return len(self.fresh) == len(self.slots)


def trip_state(trip: SimTrip) -> Tree:
    """Return what is needed to resume a trip, beside what the server saves."""
    return {
        "epochs": trip.assignment.epochs,
        "instruction": dict(trip.assignment.instruction),
        "vectors": dict(trip.assignment.vectors),
        "packed": _packed_state(trip.assignment),
        "slots": [list(slot) for slot in trip.slots],
        "fresh": [None if each is None else _fresh_state(each) for each in trip.fresh],
        "merged": trip.merged,
        "triggered": trip.triggered,
        "started": trip.started,
        "due": trip.due,
        "link_free": trip.link_free,
        "submitted": trip.future is not None,
    }


def _fresh_state(fresh: Fresh) -> Tree:
    saved = {"version": fresh.version, "age": fresh.age, "vectors": dict(fresh.vectors)}
    return saved | {"packed": _packed_state(fresh)}


def _packed_state(message: Assignment | Fresh) -> list[Any]:
    """A compressed model and its weights. Empty for one that equals a version of the server."""
    return [] if message.packed is None else [*message.packed, message.weights]


def _packed_from(saved: list[Any]) -> Packed | None:
    return Packed(saved[0], saved[1], copy_arrays(saved[2])) if saved else None


def restore_trip(server: Server, device: int, saved: Tree) -> SimTrip:
    """Rebuild a saved trip. Its versions come from the server."""
    active, store, packed = server.active_trips[device], server.store, saved["packed"]
    assignment = Assignment(
        device=device,
        trip=active.trip,
        version=active.base,
        age=active.age,
        weights=np.array(packed[3]) if packed else store.get(active.base),  # compressed: not the server's version
        epochs=saved["epochs"],
        lr=active.lr,
        instruction=saved["instruction"],
        vectors=copy_arrays(saved["vectors"]),
        packed=_packed_from(packed),
    )
    return SimTrip(
        assignment,
        saved["triggered"],
        saved["started"],
        [Slot(*slot) for slot in saved["slots"]],
        [None if each is None else _restore_fresh(server, each) for each in saved["fresh"]],
        merged=saved["merged"],
        due=saved["due"],
        link_free=saved["link_free"],
    )


def _restore_fresh(server: Server, saved: Tree) -> Fresh:
    packed = saved["packed"]
    return Fresh(
        version=saved["version"],
        age=saved["age"],
        weights=np.array(packed[3]) if packed else server.store.get(saved["version"]),
        vectors=copy_arrays(saved["vectors"]),
        packed=_packed_from(packed),
    )


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
        device_evaluations: EvaluationSchedule | None = None,
        own_parts: bool = False,
        collusion: Collusion | None = None,
    ) -> None:
        self._collusion = collusion
        self.coordinator, self.server, self.fleet = coordinator, coordinator.server, fleet
        self.executor, self.writer = executor, writer
        self.eval_every, self._stop_diverged = eval_every, stop_diverged
        self._device_evaluations = device_evaluations
        self.rule, self.links = self.server.rule, self.server.links
        self._epochs, self._upload_bytes = self.server.context.epochs, self.server.upload_bytes
        self._remembers = self.rule.remembers or own_parts or (self.links is not None and self.links.remembers)
        self._personal = own_parts or self.rule.personalises
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

    @property
    def checkpoint_due(self) -> bool:
        """Never: the time of checkpoints is a setting."""
        return False

    def facts(self) -> dict[str, Any]:
        """Figures of the run for its summary."""
        return self.coordinator.facts(self.now)

    def run(self, until: float, between: Callable[[], bool] = lambda: False) -> bool:
        """Process all events until ``until`` (seconds), the last round, or a test that shows divergence.

        Returns False if ``between``, called between two events, asks to stop. ``conclude`` makes the test at the very
        end. An extended run makes it instead.
        """
        self.until = until
        if not self.started:
            self.started = True
            self.coordinator.wake(0.0)
            self._wake(0.0)
            self.heap.push(Scheduled(0.0, Rank.EVALUATE))
        heap, end, handlers, progress = self.heap, (until, Rank.EVALUATE), self._handlers(), self.writer.progress
        observed = bool(self.writer.observers)
        with relaxed_gc():
            while not self.over and heap.has_event_before(end):
                if between():
                    return False
                scheduled = heap.pop()
                handlers[scheduled.rank](scheduled)
                if observed:
                    progress(scheduled.time)
        for trip in self.trips.values():  # trips that end later, with a merge in the log
            self._start_merges(trip)
        if not self.over:
            heap.now = until
            progress(until)
        return True

    def _handlers(self) -> dict[int, Callable[[Scheduled], None]]:
        """Event handlers by rank. Not an attribute, as a reference cycle would keep all models in memory."""
        return {
            Rank.UPLOAD: self._on_upload,
            Rank.LOST: self._on_lost,
            Rank.REQUEST: self._on_request,
            Rank.MERGE: self._on_merge,
            Rank.TRIGGER: self._on_trigger,
            Rank.EVALUATE: self._on_evaluate,
            Rank.SUBMIT: self._on_submit,
        }

    def conclude(self) -> None:
        """Test the final model, unless it was tested at this time, and check the result for divergence."""
        tests_devices = self._device_evaluations is not None and self.last_device_evaluation < self.now
        if self.last_test < self.now or tests_devices:
            self._test(self.now, last=True)
        self.writer.drain(wait=True)
        self.coordinator.divergence_monitor.check_latest()

    def close(self) -> None:
        """Release everything but the run's files, after its end or failure."""
        self.devices.close()
        self.trips.clear()  # deferred futures refer to this object

    def _carry_out(self, now: float, effects: Effects) -> None:
        """Log the events and carry out what the core asks for."""
        events, assignments, _, hurry, wake_at, look_at, given_up, timer_at, cancelled = effects
        self.writer.events(now, events)
        for device in (*given_up, *cancelled):
            self._drop_trip(self.trips.pop(device), finished=False)
        for assignment in assignments:
            self._start(now, assignment)
        for device in hurry:
            self._hurry(now, device)
        if wake_at is not None:
            self._wake(wake_at)
        if look_at is not None:
            self._wake(look_at)
        if timer_at is not None:
            self._wake(timer_at)
        if self.coordinator.over:
            self.over = True

    def _wake(self, at: float) -> None:
        self.heap.push(Scheduled(at, Rank.TRIGGER))

    # ---- starting trips

    def _on_trigger(self, scheduled: Scheduled) -> None:
        now = scheduled.time
        self._carry_out(now, self.coordinator.tick(now, lambda device: self.fleet.available(device, now)))

    def _start(self, now: float, assignment: Assignment) -> None:
        device, number, fleet, rule = assignment.device, assignment.trip, self.fleet, self.rule
        start = now + self._seconds_before_training(device, assignment, now)
        trip = self.trips[device] = SimTrip(assignment, now, start)
        if rule.asks:
            rng = stream(self.server.context.seed, "slot", device, number)
            first = rule.plan(self.devices.get(device), assignment, rng)
            trip.slots = [] if first is None else [first, *rule.later_slots(first, assignment.epochs)]
        if trip.slots:
            self._ask(start, trip, trip.slots[0].epoch - 1)
        else:
            self._finish(start, trip, assignment.epochs)
        leaves = fleet.leave_time(device, now)
        if leaves < math.inf:
            self.heap.push(Scheduled(leaves, Rank.LOST, device, number))

    def _seconds_before_training(self, device: int, assignment: Assignment, time: float) -> float:
        """Seconds from the trigger to the first step of training."""
        return self.fleet.download_seconds(device, assignment.nbytes, time) + self.fleet.start_seconds.item(device)

    def _ask(self, resume: float, trip: SimTrip, epochs: int) -> None:
        """Schedule the next request: ``epochs`` epochs of training from ``resume`` on, then the link."""
        device, number, fleet = trip.assignment.device, trip.assignment.trip, self.fleet
        asks_at = resume + epochs * fleet.epoch_seconds(device, self._epochs, resume)
        arrives_at = asks_at + fleet.upload_seconds(device, CONTROL_BYTES, asks_at)
        self.heap.push(Scheduled(arrives_at, Rank.REQUEST, device, number))

    def _finish(self, resume: float, trip: SimTrip, epochs: int) -> None:
        """Schedule the upload: ``epochs`` epochs of training from ``resume`` on, then the link."""
        assignment, fleet = trip.assignment, self.fleet
        device, number = assignment.device, assignment.trip
        epoch_seconds = fleet.epoch_seconds(device, self._epochs, resume)
        done = resume + epochs * epoch_seconds
        trip.due = done + fleet.upload_seconds(device, self._upload_bytes, done)
        if self.rule.push_after:
            trip.link_free = trip.triggered + fleet.download_seconds(device, assignment.nbytes, trip.triggered)
            self.heap.push(Scheduled(resume + (epochs - 1) * epoch_seconds, Rank.SUBMIT, device, number))
        else:
            self._submit(trip)
        rank = Rank.LOST if fleet.is_lost(device, number) else Rank.UPLOAD
        self.heap.push(Scheduled(trip.due, rank, device, number))

    def _on_submit(self, scheduled: Scheduled) -> None:
        trip = self.trips.get(scheduled.device)
        if trip is not None and trip.assignment.trip == scheduled.trip:
            self._submit(trip)

    def _submit(self, trip: SimTrip) -> None:
        """Submit a trip's training. What arrives after the end of the run is computed on demand only."""
        work, due = self._work(trip), trip.due
        assert due is not None
        if due > self.until:
            trip.future = self._on_demand(work, due)
            return
        trip.future = self.executor.train(work, due)
        self._start_merges(trip)

    def _work(self, trip: SimTrip) -> TripInput:
        """The training of a trip, with all answers so far."""
        assignment, rule, devices = trip.assignment, self.rule, self.devices
        device = assignment.device
        seconds = devices.mean_seconds(device) if rule.timed else None
        return TripInput(assignment, tuple(trip.slots), tuple(trip.fresh), rule, devices.get(device), seconds)

    def _work_to_last_merge(self, trip: SimTrip) -> TripInput:
        """The training up to the last merge that has happened. An answer may still have been on its way."""
        places = [place for place, fresh in enumerate(trip.fresh) if fresh is not None]
        answers = tuple(trip.fresh[: places[trip.merged - 1] + 1])
        return self._work(trip)._replace(fresh=answers, merge_only=True)

    def _on_demand(self, work: TripInput, due: float) -> DeferredFuture[TripOutcome]:
        return DeferredFuture(lambda: self.executor.train(work, due))

    def _training_to_merge(self, trip: SimTrip) -> Future[TripOutcome]:
        """The whole training if it runs already, else that up to the last answer."""
        if trip.future is not None and not isinstance(trip.future, DeferredFuture):
            return trip.future
        if trip.to_last_answer is None or trip.to_last_answer[0] != len(trip.fresh):
            work = self._work(trip)._replace(merge_only=True)
            trip.to_last_answer = len(trip.fresh), self.executor.train(work, self.now)
        return trip.to_last_answer[1]

    def _start_merges(self, trip: SimTrip) -> None:
        """Compute the numbers of a trip's merges now. They depend on the device's memory, which its end changes."""
        for merge in trip.merges:
            merge.start()

    # ---- during a trip

    def _current_trip(self, device: int, number: int) -> SimTrip | None:
        """Return the trip of an event, or None if it has ended. Then the server learns that its device is back."""
        trip = self.trips.get(device)
        if trip is not None and trip.assignment.trip == number:
            return trip
        self.server.mark_heard(device, number)
        return None

    def _on_request(self, scheduled: Scheduled) -> None:
        now, _, device, number = scheduled
        trip = self._current_trip(device, number)
        if trip is None:
            return
        slot = trip.slots[len(trip.fresh)]
        effects = self.coordinator.request(Request(device, number, slot))
        self._carry_out(now, effects)
        fresh = effects.fresh
        trip.fresh.append(fresh)
        size = CONTROL_BYTES if fresh is None else fresh.nbytes
        resume = now + self.fleet.download_seconds(device, size, now)
        if fresh is not None:
            self.heap.push(Scheduled(resume, Rank.MERGE, device, number))
        if trip.is_known:
            self._finish(resume, trip, trip.assignment.epochs - (slot.epoch - 1))
        else:
            self._ask(resume, trip, trip.slots[len(trip.fresh)].epoch - slot.epoch)

    def _push(self, now: float) -> None:
        """Send the current model to the devices in flight that are far behind and have a free downlink."""
        for device in sorted(self.trips):  # the same order after a resume
            trip, number = self.trips[device], self.trips[device].assignment.trip
            if trip.link_free > now or not self.server.push_due(device, number):
                continue
            effects = self.coordinator.push(device, number)
            self._carry_out(now, effects)
            fresh = effects.fresh
            assert fresh is not None
            trip.link_free = now + self.fleet.download_seconds(device, fresh.nbytes, now)
            epoch_seconds = self.fleet.epoch_seconds(device, self._epochs, trip.started)
            epoch = max(1, math.ceil((trip.link_free - trip.started) / epoch_seconds) + 1)
            if epoch <= trip.assignment.epochs and trip.future is None:
                trip.slots.append(Slot(epoch, "push"))
                trip.fresh.append(fresh)
                at = max(trip.link_free, trip.started + (epoch - 1) * epoch_seconds)
                self.heap.push(Scheduled(at, Rank.MERGE, device, number))

    def _on_merge(self, scheduled: Scheduled) -> None:
        now, _, device, number = scheduled
        trip = self._current_trip(device, number)
        if trip is None:
            return
        trip.merged, place = trip.merged + 1, trip.merged
        slot = [slot for slot, fresh in zip(trip.slots, trip.fresh, strict=False) if fresh is not None][place]
        event = self.coordinator.fresh_merged(device, number, slot.epoch)
        assert event is not None
        merge = DeferredFuture(partial(self._training_to_merge, trip))
        trip.merges.append(merge)
        if trip.future is not None and not isinstance(trip.future, DeferredFuture):
            merge.start()
        self.writer.event(now, event, merge, partial(_merge_numbers, place=place))

    def _hurry(self, now: float, device: int) -> None:
        """Ask a device for its model. It uploads at the end of the epoch in which the request arrives."""
        trip = self.trips[device]
        arrives_at = now + self.fleet.download_seconds(device, CONTROL_BYTES, now)
        epoch_seconds = self.fleet.epoch_seconds(device, self._epochs, trip.started)
        epochs = 1 + int(max(0.0, arrives_at - trip.started) / epoch_seconds)
        if not trip.slots and epochs < trip.assignment.epochs and trip.future is not None:
            trip.future.cancel()
            trip.assignment = trip.assignment._replace(epochs=epochs)
            self._finish(trip.started, trip, epochs)  # arrives first, which makes the old entry void

    def _on_upload(self, scheduled: Scheduled) -> None:
        now, _, device, number = scheduled
        trip = self._current_trip(device, number)
        if trip is None:
            return
        del self.trips[device]
        if self.rule.timed:
            before = self._seconds_before_training(device, trip.assignment, trip.triggered)
            self.devices.record_trip(device, before + (now - trip.started))
        effects = self.coordinator.upload_arrived(now, device, number, partial(self._receive, trip))
        if trip.future is not None:  # the server did not open the upload
            self._drop_trip(trip, finished=True)
        self._carry_out(now, effects)
        if self.rule.push_after:
            self._push(now)

    def _receive(self, trip: SimTrip) -> Upload:
        """Return the upload of a trip, once, and store the device's memory."""
        assert trip.future is not None
        if isinstance(trip.future, DeferredFuture):
            trip.future = trip.future.start()
        self._start_merges(trip)
        outcome, trip.future = trip.future.result(), None
        if outcome.memory:
            self.devices.put(trip.assignment.device, outcome.memory)
        upload = outcome.upload(trip.assignment)
        return upload if self._collusion is None else self._collusion.forge(upload, self._anchor(upload))

    def _anchor(self, upload: Upload) -> Vector:
        """The model that the upload's training starts from, with its merges."""
        return upload.anchor(self.server.store.get(upload.base), self.server.merged_models(upload))

    def _on_lost(self, scheduled: Scheduled) -> None:
        now, _, device, number = scheduled
        trip = self._current_trip(device, number)
        if trip is None:
            return
        del self.trips[device]
        finished = self.fleet.available(device, now)
        self._drop_trip(trip, finished)
        reason, sent = ("upload lost", self._upload_bytes) if finished else ("device left", 0)
        self._carry_out(now, self.coordinator.trip_lost(now, device, number, reason, sent))

    def _drop_trip(self, trip: SimTrip, finished: bool) -> None:
        """Drop a trip's model. The device keeps the memory of the whole trip or, if unfinished, of its merge."""
        future, device = trip.future, trip.assignment.device
        self._start_merges(trip)
        if self._remembers and finished and future is not None:
            self.devices.defer(device, future)
        elif self._remembers and trip.merged:
            self.devices.defer(device, self._on_demand(self._work_to_last_merge(trip), self.now))
        elif future is not None and not trip.merged:
            future.cancel()

    # ---- testing the model

    def _on_evaluate(self, scheduled: Scheduled) -> None:
        self._test(scheduled.time)
        self.heap.push(Scheduled(next_multiple(scheduled.time, self.eval_every), Rank.EVALUATE))
        self.over |= self._has_diverged()

    def _has_diverged(self) -> bool:
        """Return whether a test has shown that the run should stop."""
        return self._stop_diverged and self.coordinator.divergence_monitor.diverged is not None

    def _test(self, time: float, last: bool = False) -> None:
        """Test the newest model. A version that was tested before is not computed again."""
        self.last_test = time
        version, model = self.server.version, None
        if self._latest_score is None or self._latest_score[0] != version:
            model = self.server.method.evaluation_model(self.server)
            self._latest_score = (version, self.executor.evaluate(model))
        score = self._latest_score[1]
        self.coordinator.divergence_monitor.test(time, score)
        event, row = self.coordinator.test()
        schedule, last = self._device_evaluations, last or self._has_diverged()
        if schedule is None or not schedule.due(time, self.eval_every, last):
            self.writer.event(time, event, score, _scores, row, model)
            return
        self.last_device_evaluation = time
        memory = self.devices.get if self._personal else None
        result = schedule.start(self.executor, self.server, score, time, memory)
        self.writer.event(time, event, result, EvaluationResult.numbers, row, model)
        self.writer.event(time, DevicesEvaluated(version), result, EvaluationResult.by_device)

    # ---- checkpoint

    def state(self) -> Tree:
        """Everything that decides the rest of the run. Waits for all pending results."""
        self.writer.drain(wait=True)
        return {
            "coordinator": self.coordinator.state(),
            "devices": self.devices.state(),
            "heap": [list(scheduled) for scheduled in self.heap.in_order()],
            "now": self.heap.now,
            "last_test": self.last_test,
            "last_exam": self.last_device_evaluation,
            "journeys": {str(device): trip_state(trip) for device, trip in self.trips.items()},
            "log": self.writer.position(),
            "collusion": {} if self._collusion is None else self._collusion.state(),
        }

    def restore(self, tree: Tree, until: float) -> None:
        """Resume from a saved state, with every device in flight."""
        self.coordinator.restore(tree["coordinator"])
        if self._collusion is not None:
            self._collusion.restore(tree["collusion"])
        self.devices.restore(tree["devices"])
        self.heap = EventHeap(tree["heap"], tree["now"])
        self.last_test, self.last_device_evaluation = tree["last_test"], tree.get("last_exam", -1.0)
        self.until, self.started = until, True
        self.over = self.coordinator.over or self._has_diverged()
        for device, saved in sorted(tree["journeys"].items(), key=lambda item: int(item[0])):
            trip = self.trips[int(device)] = restore_trip(self.server, int(device), saved)
            if saved["submitted"]:
                self._submit(trip)


def check_state(tree: Tree, size: int) -> None:
    """Raise ``ValueError`` unless a saved state is complete and its models have ``size`` numbers."""
    required = {"coordinator", "devices", "heap", "now", "last_test", "journeys", "log", "wall_seconds"}
    missing = required - tree.keys()
    if missing:
        raise ValueError(f"it has no {', '.join(sorted(missing))}")
    times = [tree["now"], tree["wall_seconds"], *(entry[0] for entry in tree["heap"])]
    if not all(isinstance(time, int | float) and 0 <= time < math.inf for time in times):
        raise ValueError("its times are not numbers from 0")
    if tree["heap"] and min(entry[0] for entry in tree["heap"]) < tree["now"]:
        raise ValueError("it has events before its current time")
    models = [weights for _, weights, _ in tree["coordinator"]["server"]["store"]]
    if not all(isinstance(w, np.ndarray) and w.shape == (size,) and w.dtype == np.float32 for w in models):
        raise ValueError(f"its models do not have {size} numbers")


def _merge_numbers(outcome: TripOutcome, place: int) -> dict[str, Any]:
    merge = outcome.merges[place]
    return {**merge.numbers, **({"diverged": True} if merge.diverged else {})}


def _scores(score: Score) -> dict[str, Any]:
    return {**score.metrics, "loss": score.loss}
