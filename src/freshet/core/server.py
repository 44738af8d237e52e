"""The server: answers triggers, requests and uploads. It does no I/O, owns no clock and starts no process.

Every answer holds the events that a driver stamps with a time and writes to the log. ``VersionStore`` keeps
the models that are still needed: the current one and those that trips in flight started from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass

import numpy as np
from numpy.typing import NDArray

from freshet.core import admission, saving
from freshet.core.admission import GATE_FACTOR, Admission, SumNoise
from freshet.core.compression import Links
from freshet.core.defence import Defence
from freshet.core.events import Aggregated, Contribution, Discarded, Event, Lost, Noted, Rejected
from freshet.core.messages import LOSS_DECAY, Assignment, Fresh, FreshModels, Request, Slot, Upload
from freshet.core.method import Aggregate, Discard, Method, MethodContext, Reject, Verdict, Wait, overrides
from freshet.core.scheduling import LastReport, PowerOfChoice, Selection, View, selector
from freshet.core.stopping import CANCELLED, GIVEN_UP
from freshet.core.vectors import Vector, distance
from freshet.errors import RunError


@dataclass(slots=True)
class StoredVersion:
    """One stored version and the number of trips that hold it."""

    weights: Vector
    holders: int = 0


class VersionStore:
    """Models by version number with reference counts. An old version is dropped when its last holder releases it.

    The first model has version 1. Every aggregation adds 1. A stored vector never changes.
    """

    def __init__(self, weights: Vector, version: int = 1) -> None:
        self.current = version
        #: The current global model.
        self.weights = weights
        self._stored = {version: StoredVersion(weights)}

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, version: int) -> bool:
        return version in self._stored

    def get(self, version: int) -> Vector:
        """The weights of a version that is current or held."""
        return self._stored[version].weights

    def hold(self, version: int, times: int = 1) -> Vector:
        """Keep a version until ``release`` is called ``times`` times."""
        stored = self._stored[version]
        stored.holders += times
        return stored.weights

    def release(self, version: int) -> None:
        """Release one hold. An old model is dropped with its last hold."""
        stored = self._stored[version]
        if stored.holders == 0:
            raise ValueError(f"version {version} is released more often than it was held")
        stored.holders -= 1
        if stored.holders == 0 and version != self.current:
            del self._stored[version]

    def advance(self, weights: Vector) -> int:
        """Make ``weights`` the current model. Returns its version number."""
        old = self.current
        self.current, self.weights = old + 1, weights
        self._stored[old + 1] = StoredVersion(weights)
        if self._stored[old].holders == 0:
            del self._stored[old]
        return old + 1

    def items(self) -> list[tuple[int, Vector, int]]:
        """(version, weights, holders) of all stored models, for a checkpoint."""
        return [(version, stored.weights, stored.holders) for version, stored in sorted(self._stored.items())]

    @staticmethod
    def restore(items: list[tuple[int, Vector, int]], current: int) -> "VersionStore":
        """The inverse of ``items``."""
        stored = {version: StoredVersion(weights, holders) for version, weights, holders in items}
        store = VersionStore(stored[current].weights, current)
        store._stored = stored
        return store


#: Why an upload that passed the checks was rejected after all.
NOT_FINITE = "the aggregated model would not be finite"
NO_TRIP = "no such trip in flight"

#: ``schedule(rounds)`` is the learning rate of a trip that starts after that many rounds, which may be a fraction.
Schedule = Callable[[float], float]


@dataclass(slots=True)
class SentFresh:
    """A fresh model that a device in flight was sent: for which slot (0: pushed), and whether its merge is logged."""

    slot: int
    version: int
    age: int
    merged: bool = False


@dataclass(slots=True)
class ActiveTrip:
    """What the server remembers about a trip in flight."""

    trip: int
    base: int
    age: int
    epochs: int
    lr: float
    #: The epoch at the start of which the device first asked for a fresh model.
    slot: int | None = None
    #: The fresh models that it was sent, in their order.
    sent: list[SentFresh] = field(default_factory=list)
    #: When it started, in seconds since the start of the run.
    started: float = 0.0

    @property
    def newest(self) -> int:
        """The newest version that the device was sent."""
        return self.sent[-1].version if self.sent else self.base

    def next_merge(self) -> SentFresh | None:
        """The first fresh model whose merge is not in the log."""
        return next((sent for sent in self.sent if not sent.merged), None)


class RequestRefused(Exception):
    """The server does not answer a request. The text is the reason."""


class Server:
    """Holds the global model and its versions, checks uploads, and lets the method decide."""

    def __init__(
        self,
        method: Method,
        context: MethodContext,
        weights: Vector,
        schedule: Schedule,
        selection: Selection = "uniform",
        gate: float | None = GATE_FACTOR,
        links: Links | None = None,
        defence: Defence | None = None,
        round_seconds: float | None = None,
        noise: SumNoise | None = None,
    ) -> None:
        self.method = method
        self.synchronous = method.about.kind == "sync"
        self.context = context
        self.store = VersionStore(weights)
        self.schedule = schedule
        #: Seconds that the schedule counts as one round; None if it counts finished rounds.
        self.round_seconds = round_seconds
        self.active_trips: dict[int, ActiveTrip] = {}
        self.waiting: set[int] = set()
        #: Devices with an abandoned trip that have been silent since, with the trip's number.
        self.away: dict[int, int] = {}
        self.trips: dict[int, int] = {}
        self.round = 0
        self.consumed = 0
        #: Whether a device in mid-training can be interrupted. If not, a cancelled one is away until it is heard.
        self.can_interrupt = True
        #: Seconds since the start of the run, of the event that is being handled. The coordinator sets it.
        self.now = 0.0
        selects = overrides(type(method), Method, "select")
        self.selector = selector(method.select if selects else selection, context.seed, context.samples, selects)
        #: Whether the method wants to be called at times of its own.
        self.timed = overrides(type(method), Method, "timer")
        self.rule = method.rule(method.options)
        numbers = context.layout.size + len(self.rule.sends) * context.layout.learnable
        #: Bytes of an upload: the model, and the vectors that the device rule sends with it.
        self.upload_bytes = admission.FLOAT32.itemsize * numbers
        #: Clips uploads and adds noise to their sums, if the server is to protect the devices.
        self.noise = noise
        self.admission = Admission(method, self.rule, gate, defence, links, noise)
        #: Compression of models on the network, if any.
        self.links = links
        if links is not None:
            self.upload_bytes += links.model_bytes()[1] - admission.FLOAT32.itemsize * context.layout.size
        self._buffers = method.about.replaces == "aggregation"
        self._first_upload = True
        self.urgent: list[int] = []
        self.cancelled: list[int] = []

    # ---- current values

    @property
    def version(self) -> int:
        return self.store.current

    @property
    def weights(self) -> Vector:
        return self.store.weights

    @property
    def age(self) -> int:
        """The t of the formulas: the round of a synchronous method, the version otherwise."""
        return self.round if self.synchronous else self.store.current

    @property
    def busy(self) -> int:
        """Number of devices that are training or waiting for a buffered aggregation."""
        return len(self.active_trips) + len(self.waiting)

    def staleness(self, trip: ActiveTrip) -> int:
        """``s = t - o + 1``: a fresh upload has staleness 1. Staleness is counted nowhere else."""
        return self.store.current - trip.base + 1

    @property
    def rounds(self) -> int:
        """Finished rounds. For an asynchronous method, consumed uploads divided by ``per_round``."""
        return self.round - bool(self.active_trips) if self.synchronous else self.consumed // self.context.per_round

    def learning_rate(self, now: float) -> float:
        """The learning rate of a trip that starts ``now``, in seconds since the start of the run."""
        return self.schedule(self.rounds if self.round_seconds is None else now / self.round_seconds)

    # ---- events

    def select(self, count: int, available: Callable[[int], bool]) -> list[int]:
        """Select up to ``count`` idle and available devices with data, in ascending order or in that of the method."""
        active, waiting, away = self.active_trips, self.waiting, self.away

        def free(device: int) -> bool:
            return device not in active and device not in waiting and device not in away and available(device)

        return self.selector.select(count, free, self._view)

    def _view(self, rng: np.random.Generator) -> View:
        return View(self.version, self.rounds, self.context.samples, self.trips, rng, self.now)

    @property
    def draws(self) -> int:
        """The selector's place in its random sequence."""
        return self.selector.draws

    @draws.setter
    def draws(self, place: int) -> None:
        self.selector.draws = place

    def trigger(self, devices: Sequence[int], now: float = 0.0) -> list[Assignment]:
        """Send the current model to these devices. With a synchronous method this opens a round."""
        lr = self.learning_rate(now)
        if self.synchronous:
            if self.active_trips:
                raise ValueError("a round is still open")
            self.round += 1
        version, age, assignments = self.store.current, self.age, list[Assignment]()
        weights = self.store.hold(version, len(devices))
        for device in devices:
            trip = self.trips[device] = self.trips.get(device, 0) + 1
            epochs = self.method.epochs(self, device)
            self.active_trips[device] = ActiveTrip(trip, version, age, epochs, lr, started=now)
            instruction = self.method.instruct(self, device)
            if self.selector.loss_decay is not None:
                instruction = {LOSS_DECAY: self.selector.loss_decay, **instruction}
            if self.links is not None:
                instruction = {**instruction, **self.links.instruction(device)}
            assignment = Assignment(
                device=device,
                trip=trip,
                version=version,
                age=age,
                weights=weights,
                epochs=epochs,
                lr=lr,
                instruction=instruction,
                vectors=self.method.vectors(self, device),
            )
            assignments.append(assignment if self.links is None else self.links.encode_assignment(assignment))
        return assignments

    def empty_round(self) -> list[Event]:
        """No device could be selected: the round counts and the model stays (baselines C7)."""
        self.round += 1
        return self._finish_round_if_empty()

    def active_trip(self, device: int, trip: int) -> ActiveTrip | None:
        """This trip if it is in flight, else None. The arguments may come from anybody."""
        active = self.active_trips.get(device) if type(device) is int else None
        return active if active is not None and active.trip == trip else None

    def request(self, request: Request) -> Fresh | None:
        """The fresh model for a device in mid-training, or None if there is no newer one. Repeatable."""
        active = self.active_trip(request.device, request.trip)
        if active is None:
            raise RequestRefused(NO_TRIP)
        slot = request.slot
        if not (isinstance(slot, Slot) and type(slot.by) is str and len(slot.by) <= admission.MAX_NAME_LENGTH):
            raise RequestRefused("asks without a slot")
        if type(slot.epoch) is not int or not 1 <= slot.epoch <= active.epochs:
            raise RequestRefused(f"asks at epoch {slot.epoch!r:.40} of {active.epochs}")
        active.slot = slot.epoch if active.slot is None else active.slot
        sent = self._answer(active, slot)
        return None if sent is None else self._fresh(request.device, sent)

    def _answer(self, active: ActiveTrip, slot: Slot) -> SentFresh | None:
        """The fresh model for a slot. A repeated request, or one too many, gets the answer that it had before."""
        for sent in active.sent:
            if sent.slot == slot.epoch:
                return sent
        if len(active.sent) >= self.slots_allowed(active.epochs):
            return active.sent[-1]
        is_due = self.store.current - active.newest >= max(1, self.rule.push_after)
        return self._send_current(active, slot.epoch) if is_due else None

    def slots_allowed(self, epochs: int) -> int:
        """How many fresh models a trip of ``epochs`` epochs may get."""
        return epochs if self.rule.push_after else 1 + len(self.rule.later_slots(Slot(1, ""), epochs))

    def _send_current(self, active: ActiveTrip, slot: int) -> SentFresh:
        self.store.hold(self.store.current)
        active.sent.append(SentFresh(slot, self.store.current, self.age))
        return active.sent[-1]

    def _fresh(self, device: int, sent: SentFresh) -> Fresh:
        vectors = self.method.vectors(self, device)
        fresh = Fresh(sent.version, sent.age, self.store.get(sent.version), vectors)
        return fresh if self.links is None else self.links.encode_fresh(device, fresh)

    def start_of(self, upload: Upload) -> Vector:
        """Where the step of an upload starts: at its base or, if the device rule is anchored, at its anchor.

        ``w_i - start`` is what training produced.
        """
        base = self.store.get(upload.base)
        if not self.rule.anchored:
            return base
        return upload.anchor(base, self.merged_models(upload))

    def merged_models(self, upload: Upload) -> FreshModels:
        """The fresh models that the device merged, as it received them (``core/compression.py``)."""
        versions = (merge.version for merge in upload.merges)
        return {version: self._received_model(upload.device, upload.base, version) for version in versions}

    def _received_model(self, device: int, base: int, version: int) -> Vector:
        store, links = self.store, self.links
        fresh = store.get(version)
        return fresh if links is None else links.received_model(device, store.get(base), fresh, version)

    def release(self, total: NDArray[np.float64], parts: Sequence[Contribution]) -> NDArray[np.float64]:
        """The sum of an aggregation as the model may depend on it: with noise under ``[privacy] where = "server"``.

        ``total`` is the sum of ``part.weight (u - start_of(u))`` over the learnable weights, up to its sign.
        """
        return total if self.noise is None else self.noise.release(total, parts, self.store.current)

    def push_due(self, device: int, trip: int) -> bool:
        """Whether to send the current model to a device in flight: it is far enough behind, and nothing is pending."""
        active, ahead = self.active_trip(device, trip), self.rule.push_after
        if active is None or not ahead or active.next_merge() is not None:
            return False
        return self.store.current - active.newest >= ahead

    def push(self, device: int, trip: int) -> Fresh:
        """The current model for a device in flight, which did not ask for it."""
        active = self.active_trip(device, trip)
        assert active is not None
        return self._fresh(device, self._send_current(active, 0))

    def upload(self, upload: Upload) -> list[Event]:
        """A trained model arrives."""
        active = self.active_trip(upload.device, upload.trip)
        if active is None:
            return [self.reject_unknown(upload.device, upload.trip)]
        return self.process_upload(upload.device, active, lambda: upload)[0]

    def reject_unknown(self, device: int, trip: int) -> Rejected:
        """Reject an upload of a trip that is not in flight. The arguments may be anything."""
        self.mark_heard(device, trip)
        known = type(device) is int and type(trip) is int
        return Rejected(NO_TRIP, device, trip) if known else Rejected(NO_TRIP)

    def process_upload(
        self, device: int, active: ActiveTrip, open_upload: Callable[[], Upload], samples: int | None = None
    ) -> tuple[list[Event], Upload | None]:
        """Decide on an upload. Returns the events, and the upload if it was opened.

        ``samples`` is the number of samples that a deployed device reports. A rejected upload leaves it unchanged.
        """
        if samples is None:
            return self._decide(device, active, open_upload)
        before = self.set_samples(device, samples)
        events, upload = self._decide(device, active, open_upload)
        if any(isinstance(event, Rejected) and event.device == device for event in events):
            self.set_samples(device, before)
        return events, upload

    def set_samples(self, device: int, samples: int) -> int:
        """Set a device's number of samples for method, selection and checks. Returns the previous number."""
        before = int(self.context.samples[device])
        self.context.samples[device] = samples
        return before

    def _decide(
        self, device: int, active: ActiveTrip, open_upload: Callable[[], Upload]
    ) -> tuple[list[Event], Upload | None]:
        """Discard the upload unseen, or check it and let the method decide."""
        discard = self.method.discard_early(self, active)
        if discard is not None:
            events = self._apply(discard, device, active)
            self._end_trip(device)
            return events + self._finish_round_if_empty(), None
        upload = open_upload()
        fresh = {sent.version: self._received_model(device, active.base, sent.version) for sent in active.sent}
        admitted = self.admission.admit(upload, device, active, self.store.get(active.base), fresh)
        if admitted.rejection is None:
            self._record_report(upload, active)
            events = [] if admitted.upload is None else self._receive(admitted.upload, active)
            if self.links is not None and not _is_refused(events, device):
                self.links.take(device, active.trip)
            self._end_trip(device)
        else:
            self._end_trip(device)
            events = [admitted.rejection, *self._forget(device)]
        return [*events, *admitted.notes, *self._finish_round_if_empty()], upload

    def _record_report(self, upload: Upload, active: ActiveTrip) -> None:
        """Tell a selector by losses what an accepted upload reports. A loss that cannot be is left out."""
        loss = upload.report.get("loss", -1.0)
        if isinstance(self.selector, PowerOfChoice) and loss >= 0.0:
            report = LastReport(float(loss), self.rounds + 1, self.now - active.started)
            self.selector.record(upload.device, report)

    def _receive(self, upload: Upload, active: ActiveTrip) -> list[Event]:
        """Apply the method's rule to an admitted upload."""
        if self._first_upload:
            verdict = self._first_verdict(upload, active)
        else:
            verdict = self.method.receive(self, upload, active)
        if isinstance(verdict, Wait):
            if self._buffers:
                self.waiting.add(upload.device)
            self.urgent += verdict.urgent or ()
            self.consumed += 1
            return []
        events = self._apply(verdict, upload.device, active)
        self.consumed += isinstance(events[0], Aggregated)
        return events

    def _first_verdict(self, upload: Upload, active: ActiveTrip) -> Verdict:
        """The first verdict, with checks of what a third-party method may get wrong: better now than at the end."""
        self._first_upload, weights = False, self.store.weights
        before = weights.tobytes()
        verdict = self.method.receive(self, upload, active)
        if weights.tobytes() != before:
            raise RunError(f"{self._name} wrote to server.weights; write to a copy of it")
        self._method_state()
        return verdict

    @property
    def timer(self) -> float | None:
        """When the method wants to be called next, not before the present."""
        at = self.method.timer(self) if self.timed else None
        return None if at is None else max(at, self.now)

    def run_timer(self) -> list[Event]:
        """The method's time has come."""
        verdict = self.method.on_timer(self)
        return [] if verdict is None else self._apply(verdict, None, None)

    def take_urgent(self) -> list[int]:
        """Devices in flight that the method wants to hear from soon. Each is returned once."""
        urgent, self.urgent = self.urgent, []
        return [device for device in urgent if device in self.active_trips]

    def take_cancelled(self) -> list[int]:
        """Devices whose trips the method has cancelled. Each is returned once."""
        cancelled, self.cancelled = self.cancelled, []
        return cancelled

    def _cancel(self, device: int) -> list[Event]:
        """End a trip in flight because the method wants no upload of it."""
        active = self.active_trips.get(device)
        if active is None:
            return []
        if not self.can_interrupt:
            self.away[device] = active.trip
        self._end_trip(device)
        if self.links is not None:
            self.links.forget(device)
        self.cancelled.append(device)
        return [Lost(device, active.trip, CANCELLED)]

    def drop_trip(self, device: int, trip: int, reason: str) -> list[Event]:
        """A device in flight will not upload."""
        if self.active_trip(device, trip) is None:
            self.mark_heard(device, trip)
            return []
        self._end_trip(device)
        if self.links is not None:
            self.links.forget(device)
        events: list[Event] = [Lost(device, trip, reason)]
        return events + self._forget(device) + self._finish_round_if_empty()

    def give_up(self, device: int, trip: int) -> list[Event]:
        """Stop waiting for this trip. Its device is not triggered until it is heard from."""
        self.away[device] = trip
        return self.drop_trip(device, trip, GIVEN_UP)

    def mark_heard(self, device: int, trip: int) -> None:
        """A trip has ended. If it had been given up, its device may be triggered again."""
        if type(device) is int and type(trip) is int and self.away.get(device) == trip:
            del self.away[device]

    # ---- checkpoint

    def state(self) -> saving.Tree:
        """Everything that a resumed run needs, including the method's state."""
        return {
            "store": [list(item) for item in self.store.items()],
            "current": self.store.current,
            "flights": {str(device): saving.dump(active) for device, active in self.active_trips.items()},
            "waiting": sorted(self.waiting),
            "away": {str(device): trip for device, trip in self.away.items()},
            "trips": {str(device): count for device, count in self.trips.items()},
            "round": self.round,
            "consumed": self.consumed,
            "draws": self.draws,
            "selector": saving.dump(self.selector.state),
            "entrance": self.admission.state(),
            "method": self._method_state(),
            "links": {} if self.links is None else self.links.state(),
            "noise": {} if self.noise is None else self.noise.state(),
        }

    def restore(self, tree: saving.Tree) -> None:
        """The inverse of ``state``. Raises ``ValueError`` for models of another size."""
        held = [(version, np.array(weights), holders) for version, weights, holders in tree["store"]]
        if not all(w.shape == (self.context.layout.size,) and w.dtype == admission.FLOAT32 for _, w, _ in held):
            raise ValueError(f"its models do not have {self.context.layout.size} entries")
        self.store = VersionStore.restore(held, tree["current"])
        flights = tree["flights"].items()
        self.active_trips = {int(device): saving.rebuild(ActiveTrip, saved) for device, saved in flights}
        self.waiting = set(tree["waiting"])
        self.away = {int(device): trip for device, trip in tree["away"].items()}
        self.trips = {int(device): count for device, count in tree["trips"].items()}
        self.round, self.consumed, self.draws = tree["round"], tree["consumed"], tree["draws"]
        saving.restore(self.selector.state, tree.get("selector", {}))
        self.admission.restore(tree["entrance"])
        saving.restore(self.method.state, tree["method"])
        if self.links is not None:
            self.links.restore(tree["links"])
        if self.noise is not None:
            self.noise.restore(tree["noise"])

    # ---- inside

    def _apply(self, verdict: Verdict, device: int | None, active: ActiveTrip | None) -> list[Event]:
        """Carry out the method's decision on an upload, or (without a device) on a round or buffer."""
        trip = None if active is None else active.trip
        if not isinstance(verdict, Aggregate):
            if isinstance(verdict, Wait):
                self.urgent += verdict.urgent or ()
                return []
            if isinstance(verdict, Discard) and device is not None and active is not None:
                staleness = self.staleness(active)
                return [Discarded(device, active.trip, verdict.reason, self.version, active.base, staleness)]
            if isinstance(verdict, Reject):
                self.waiting.clear()  # the aggregation that they waited for will not happen
                return [Rejected(verdict.reason, device, trip), *self._noise_notes()]
            answer = " ".join(repr(verdict).split())[:80]
            raise RunError(f"{self._name} returned {answer}; expected Aggregate, Discard, Reject or Wait")
        problem = admission.aggregate_problem(verdict, self.context.layout.size)
        if problem is not None:
            raise RunError(f"{self._name} returned an invalid Aggregate: {problem}")
        n, length = self.context.layout.learnable, verdict.length
        if length is None:
            new, old = verdict.weights, self.store.weights
            length = distance(new, old) if n == len(new) else distance(new[:n], old[:n])
        if not verdict.contributions and (device is not None or length):
            raise RunError(f"{self._name} returned an Aggregate without contributions")
        noised = self._noise_notes()
        if self.noise is not None and verdict.contributions and not noised:
            raise RunError(f"{self._name} aggregated without server.release(), so its sum has no noise ([privacy])")
        if admission.overflows(verdict.weights, length):
            self.waiting.clear()
            return [Rejected(NOT_FINITE, device, trip), *noised]
        round_ = self.round if self.synchronous else None
        parts = tuple(verdict.contributions)
        event = Aggregated(self.store.current, length, parts, device, trip, round_, verdict.numbers)
        self.store.advance(verdict.weights)
        self.waiting.clear()
        lost = [each for device in verdict.cancel for each in self._cancel(device)]
        return [event, *noised, *verdict.notes, *lost]

    def _noise_notes(self) -> list[Noted]:
        """What the log must know about the sum that was just released, if noise was added to one."""
        note = None if self.noise is None else self.noise.take_note()
        return [] if note is None else [note]

    def _method_state(self) -> saving.Tree:
        state, place = self.method.state, f"{self._name}: self.state"
        if state is not None and not is_dataclass(state):
            raise RunError(f"{place} is a {type(state).__name__}; use one dataclass, which can be saved")
        tree: saving.Tree = saving.dump(state, place)
        return tree

    @property
    def _name(self) -> str:
        return f"method {type(self.method).__name__}"

    def _forget(self, device: int) -> list[Event]:
        verdict = self.method.forget(self, device)
        return [] if verdict is None else self._apply(verdict, None, None)

    def _end_trip(self, device: int) -> None:
        active = self.active_trips.pop(device)
        self.store.release(active.base)
        for sent in active.sent:
            self.store.release(sent.version)
        if self.links is not None:
            self.links.end_trip(device)

    def _finish_round_if_empty(self) -> list[Event]:
        if not self.synchronous or self.active_trips:
            return []
        events: list[Event] = []
        kept, notes = self.admission.release()
        for upload, active in kept:
            events += self._receive(upload, active)
        events += notes
        verdict = self.method.finish_round(self)
        return events if verdict is None else events + self._apply(verdict, None, None)


def _is_refused(events: list[Event], device: int) -> bool:
    """Whether the method did not take this device's upload."""
    return any(isinstance(event, Rejected | Discarded) and event.device == device for event in events)
