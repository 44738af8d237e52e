"""The real-time driver: passes what arrives over the network to the core, and carries out the core's decisions.

One thread drives: it starts trips, handles answers and tests the model. The fresh-model service calls in from its own
threads. Code that touches the core or the log holds the lock; nothing is sent under it. Only the driving thread
changes the model, so testing the model needs no lock.

Everything that happens to the core goes through ``_happen``, which also adds it to the journal. A killed server
restores its checkpoint and lets the entries of the journal happen again, at the same times.
"""

import contextlib
import math
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from freshet.core.coordinator import Coordinator, Effects, next_multiple
from freshet.core.defence import SAMPLES_NOTE
from freshet.core.events import Noted, Refused
from freshet.core.messages import UNREAD, Assignment, Fresh, Packed, Request, Slot, Upload
from freshet.core.saving import Tree, dump, rebuild
from freshet.core.server import NO_TRIP, RequestRefused
from freshet.core.stopping import KnownLoss
from freshet.core.vectors import Vector
from freshet.flower import wire
from freshet.flower.journal import Journal
from freshet.flower.security import Tokens, new_ticket, trip_ticket
from freshet.flower.status import WRITE_SECONDS, DeviceState
from freshet.flower.status import write as write_status
from freshet.flower.wire import MalformedMessage
from freshet.runs.checkpoint import copy_arrays
from freshet.runs.reader import CHECKPOINTS
from freshet.runs.writer import RunWriter
from freshet.training.task import Score

#: The phases of a device's time: process start, imports, loading data and model, training, waiting for the fresh model.
PHASES = ("start", "import", "load", "train", "fresh")
#: Requests that are answered per slot of a trip. A device retries three times, and may restart its trip.
MAX_REQUESTS = 20
#: The largest number of samples that a device may report. A larger one is ignored.
MAX_SAMPLES = 2**31 - 1
WRONG_TOKEN = "requests the fresh model with a token of another trip"  # noqa: S105
TOO_MANY_REQUESTS = "requests the fresh model too often"
#: Refused requests that are logged. Further ones are only counted.
LOGGED_REFUSALS = 100
#: Latest trips of each device that the medians are computed over.
TIMED_TRIPS = 1000
#: Bytes of journal after which a checkpoint is due.
JOURNAL_BYTES = 1 << 30


class Reply(NamedTuple):
    """An answer to a message: its records, or an error."""

    message: str
    content: Any = None
    error: str = ""


class Transport(Protocol):
    """Carries messages to nodes. Every call may raise ``ConnectionError``."""

    def nodes(self) -> set[int]:
        """Return the nodes that are online."""

    def send(self, node: int, content: Any, seconds: float) -> str:
        """Send a message that expires after ``seconds``. Returns its id."""

    def receive(self, messages: list[str]) -> list[Reply]:
        """Return the answers to these messages that have arrived, each once."""


@dataclass(frozen=True)
class NetworkSettings:
    """How the server exchanges messages with devices."""

    fresh: str = "side"
    address: str = ""
    certificate: str = ""
    #: Seconds that a trip may take.
    ttl: float = 600.0
    #: Seconds between two polls for answers.
    poll: float = 0.2
    #: Seconds that a node may be offline before its trip is lost.
    patience: float = 120.0
    #: Devices that must be online before the first trip of a run.
    wait_for: int = 1
    #: Seconds between two polls for online nodes.
    node_poll: float = 2.0
    #: File for the status of server and devices (empty: none).
    status: str = ""
    #: Seconds at the end of the run to tell the devices that it is over (0: they are not told).
    farewell: float = 0.0


@dataclass(slots=True)
class LiveTrip:
    """A trip in flight."""

    assignment: Assignment
    ticket: str
    started: float
    #: Id of the message that awaits an answer (empty: not sent yet), and when it was sent.
    message: str = ""
    sent: float = 0.0
    fresh: Fresh | None = None
    #: Whether the trip's message delivers a fresh model, and for which slot.
    second_message: bool = False
    slot: int = 0
    urgent: bool = False
    #: Start by this machine's clock. None after a restart of the server, when durations mean nothing.
    wall_start: float | None = field(default_factory=time.time)
    #: Seconds by phase of the messages before the last.
    first_timing: Mapping[str, float] = field(default_factory=dict)
    #: How often the device has asked for the fresh model.
    requests: int = 0

    def exceeds_requests(self, slots: int) -> bool:
        """Count a request. Returns whether there are more than lost answers can explain."""
        self.requests += 1
        return self.requests > MAX_REQUESTS * slots

    def add_timing(self, timing: Mapping[str, float]) -> None:
        """Add the seconds by phase of a message that is not the last one. The start is that of the first."""
        before = self.first_timing
        summed = {phase: before.get(phase, 0.0) + value for phase, value in timing.items()}
        self.first_timing = summed | {phase: before[phase] for phase in ("began",) if phase in before}

    def durations(self, whole: float, timing: Mapping[str, float]) -> dict[str, float]:
        """Split a trip's time into phases. ``timing`` is what the device reports with its last message.

        Time that the device does not account for is message time: down until its process began (as far as the two
        clocks agree), up for the rest.
        """
        both = {phase: self.first_timing.get(phase, 0.0) + timing.get(phase, math.nan) for phase in (*PHASES, "cpu")}
        found = {phase: value for phase, value in both.items() if 0 <= value < 1e6}
        messages = max(0.0, whole - sum(found[phase] for phase in PHASES if phase in found))
        began = self.first_timing.get("began", timing.get("began", 0.0))
        down = min(max(0.0, began - (self.wall_start or began)), messages)
        return found | {"down": down, "up": messages - down, "messages": messages, "whole": whole}


@dataclass(slots=True)
class TripTotals:
    """Completed trips of a device, and their total seconds from trigger to upload."""

    trips: int = 0
    seconds: float = 0.0


def medians(seconds: Iterable[Mapping[str, Iterable[float]]]) -> dict[str, float]:
    """Median seconds of each phase over all devices."""
    phases: dict[str, list[float]] = defaultdict(list)
    for by_phase in seconds:
        for phase, values in by_phase.items():
            phases[phase] += values
    return {phase: round(statistics.median(values), 3) for phase, values in sorted(phases.items())}


def check_state(tree: Tree) -> None:
    """Raise ``ValueError`` unless this is the saved state of a run in real time."""
    missing = {"coordinator", "samples", "now", "wakes", "session", "devices", "journeys", "log"} - tree.keys()
    if missing:
        raise ValueError(f"it has no {', '.join(sorted(missing))}")


def trip_state(trip: LiveTrip) -> Tree:
    """Return what a checkpoint keeps of a trip."""
    return {
        "ticket": trip.ticket,
        "started": trip.started,
        "onward": trip.second_message,
        "instruction": dict(trip.assignment.instruction),
        "vectors": dict(trip.assignment.vectors),
        "packed": dump(trip.assignment.packed),
        "slot": trip.slot,
        "fresh": None if trip.fresh is None else trip.fresh.version,
        "fresh_vectors": {} if trip.fresh is None else dict(trip.fresh.vectors),
        "fresh_packed": dump(None if trip.fresh is None else trip.fresh.packed),
    }


def _rebuild_packed(saved: Any) -> Packed | None:
    return rebuild(Packed, saved) if saved else None


class LiveDriver:
    """Drives one run in real time."""

    def __init__(
        self,
        coordinator: Coordinator,
        transport: Transport,
        writer: RunWriter,
        evaluate: Callable[[Vector], Score],
        tokens: Tokens,
        network: NetworkSettings,
        *,
        nodes: Mapping[int, int],
        eval_every: float,
        stop_diverged: bool = True,
    ) -> None:
        self.coordinator, self.server, self.transport, self.writer = coordinator, coordinator.server, transport, writer
        self.network, self.eval_every, self._stop_diverged = network, eval_every, stop_diverged
        self._evaluate, self._tokens = evaluate, tokens
        self.server.can_interrupt = False
        #: ``{node: device}``. Without a given list, devices are numbered in the order in which nodes appear.
        self.devices: dict[int, int] = dict(nodes)
        self._listed = bool(nodes)
        self.session = new_ticket()
        self.trips: dict[int, LiveTrip] = {}
        self.over = self._concluded = False
        #: Whether requests are answered: not before a resumed run has restored its trips.
        self.ready = False
        self._lock = threading.RLock()
        self._journal = Journal(writer.directory / CHECKPOINTS)
        self._happenings: dict[str, Callable[..., Any]] = {
            "tick": self._on_tick,
            "node": self._on_node,
            "request": self._on_request,
            "message request": self._on_message_request,
            "upload": self._on_upload,
            "loss": self._on_loss,
            "test": self._on_test,
            "resumed": self._on_resumed,
        }
        self._online: set[int] = set()
        #: What is known about each device, for people.
        self.states = {device: DeviceState(device) for device in range(self.server.context.devices)}
        self._until, self._last_status = math.inf, -1e9
        self._bounded: set[int] = set()
        self._last_poll, self._last_present, self._refusals = -1e9, -1, 0
        self._start, self._earlier_seconds = time.monotonic(), 0.0
        self._wakes: list[float] = []
        self._next_test, self._last_test = 0.0, -1.0
        self._tested: tuple[int, Score] | None = None
        #: The model of the test that happens now, if it is a new version.
        self._tested_model: Vector | None = None
        self._started = False
        self.totals: dict[int, TripTotals] = defaultdict(TripTotals)
        #: Messages sent: one per trip, or two if the fresh model comes by message.
        self.messages = 0
        latest = partial(deque[float], maxlen=TIMED_TRIPS)
        #: Seconds by device and phase of the latest trips.
        self.seconds: dict[int, dict[str, deque[float]]] = defaultdict(lambda: defaultdict(latest))

    # ---- Driver

    @property
    def checkpoint_due(self) -> bool:
        """Whether the journal is so long that a checkpoint should replace it."""
        return self._journal.nbytes > JOURNAL_BYTES

    @property
    def now(self) -> float:
        """Seconds since the start, including those before a resumed run's checkpoint."""
        return self._earlier_seconds + time.monotonic() - self._start

    def run(self, until: float, between: Callable[[], bool] = lambda: False) -> bool:
        """Run until the time or the rounds are over, or until a test shows that the previous one had diverged."""
        if not self._started:
            self._started = True
            self.wake(self.coordinator.wake(0.0))
        while not self.over and self.now < until:
            if between():
                return False
            self.ready = True
            self._poll_nodes()
            if not (waits := self._waits_for_devices()):
                self._tick()
                self._send()
                self._receive()
            if not waits and self.now >= self._next_test:
                self._test()
                self._next_test = next_multiple(self.now, self.eval_every)
                self.over |= self._stop_diverged and self.coordinator.divergence_monitor.diverged is not None
            self.writer.progress(self.now)
            self._write_status(until)
            time.sleep(self.network.poll)
        return True

    def conclude(self) -> None:
        """Test the final model, unless it was just tested, and check the result for divergence."""
        with self._lock:
            self._concluded = True  # later requests get no answer and no log line
        if self._tested is None or self._tested[0] != self.server.version or self.now - self._last_test > 1.0:
            self._test()
        self.coordinator.divergence_monitor.check_latest()
        self._write_status(self._until, ended=True)
        self._tell_over()

    def _tell_over(self) -> None:
        """Tell every device that is online that the run is over, and wait until they know."""
        end, waiting = time.monotonic() + self.network.farewell, set[str]()
        content = wire.over_record(wire.RunOver(self.session))
        with contextlib.suppress(ConnectionError):
            for node in self._online if self.network.farewell else ():
                if self.devices.get(node, -1) >= 0:
                    waiting.add(self.transport.send(node, content, self.network.farewell))
            while waiting and time.monotonic() < end:
                waiting -= {reply.message for reply in self.transport.receive(sorted(waiting))}
                time.sleep(self.network.poll)

    def facts(self) -> dict[str, Any]:
        """Facts for the summary: the coordinator's, and median seconds by phase over the latest trips."""
        facts = {"real_time": True, "trip_seconds": medians(self.seconds.values()), "messages": self.messages}
        return self.coordinator.facts(self.now) | facts

    # ---- what happens to the core, now or again from the journal

    def _happen(self, kind: str, now: float, **what: Any) -> Any:
        """Let something happen to the core, and add it to the journal."""
        result = self._happenings[kind](now, **what)
        self._journal.append({"kind": kind, "now": now, "what": what})
        return result

    def _replay(self, entry: Tree) -> None:
        """Let an entry of the journal happen again."""
        self._happenings[entry["kind"]](entry["now"], **entry["what"])
        self._earlier_seconds = max(self._earlier_seconds, entry["now"])

    def _on_tick(self, now: float, at: float, present: list[int]) -> None:
        self._wakes.remove(at)
        if self.server.synchronous and not self.trips and not present:  # do not count a round without devices
            self.wake(self.coordinator.postpone(at, now))
        else:
            self._carry_out(self.coordinator.tick(at, set(present).__contains__, now), now)

    def _on_node(self, now: float, node: int, device: int) -> None:
        self.devices = self.devices | {node: device}  # a new dict: other threads may read the old one

    def _on_request(self, now: float, device: int, trip: int, slot: list[Any]) -> Fresh | None:
        """A device asks the service. A refused request is not in the journal."""
        effects = self.coordinator.request(Request(device, trip, Slot(*slot)))
        if any(isinstance(event, Refused) for event in effects.events):
            self._refuse(effects)
        self._carry_out(effects, now)
        self.trips[device].fresh = effects.fresh
        return effects.fresh

    def _on_message_request(self, now: float, device: int, slot: list[Any], timing: Mapping[str, float]) -> None:
        """A device asks by message. The second message of its trip delivers the fresh model."""
        trip, asked = self.trips[device], Slot(*slot)
        effects = self.coordinator.request(Request(device, trip.assignment.trip, asked))
        self._carry_out(effects, now)
        trip.fresh, trip.second_message, trip.slot, trip.message = effects.fresh, True, asked.epoch, ""
        trip.add_timing(timing)

    def _on_upload(
        self,
        now: float,
        device: int,
        upload: Any,
        samples: int | None,
        unreached: str,
        seconds: Mapping[str, float],
        started: float,
        holds: str = "",
    ) -> None:
        """A trained model has come. In a replay, a trip that was given up before the checkpoint is not there."""
        self.trips.pop(device, None)
        totals, given = self.totals[device], rebuild(Upload, upload)
        number = given.trip
        for phase, value in seconds.items():
            self.seconds[device][phase].append(value)
        self.states[device].record_upload(self.now - now)
        totals.trips, totals.seconds = totals.trips + 1, totals.seconds + now - started
        self._carry_out(self.coordinator.upload_arrived(now, device, number, lambda: given, samples), now)
        if self.server.links is not None:
            self.server.links.confirm(device, holds)
        if unreached:
            note = {"device": device, "trip": number, "reason": unreached}
            self.writer.event(now, Noted("trained on without the fresh model", note))

    def _on_loss(self, now: float, device: int, trip: int, reason: str) -> None:
        self.trips.pop(device, None)
        state = self.states[device]
        state.lost, state.last_loss = state.lost + 1, reason
        self._carry_out(self.coordinator.trip_lost(now, device, trip, reason), now)

    def _on_test(self, now: float, loss: float, metrics: Mapping[str, float], version: int) -> None:
        model = self._tested_model
        if model is None and version == self.server.version:  # replayed: the model of then
            model = self.server.method.evaluation_model(self.server)
        self._last_test = now
        self.coordinator.divergence_monitor.test(now, KnownLoss(loss))
        event, row = self.coordinator.test()
        self.writer.event(now, event._replace(numbers={**metrics, "loss": loss}), row=row, model=model)

    def _on_resumed(self, now: float) -> None:
        """The server has restarted. It sends every trip again, and waits for no message of an abandoned one."""
        self.server.away.clear()
        self.trips = dict(self._in_flight())
        for trip in self.trips.values():
            trip.message, trip.sent, trip.wall_start = "", now, None

    # ---- starting trips

    def wake(self, at: float | None) -> None:
        """Schedule a tick of the coordinator."""
        if at is not None:
            self._wakes.append(at)

    def _tick(self) -> None:
        present = sorted(self._present())
        for at in [at for at in self._wakes if at <= self.now]:
            with self._lock:
                self._happen("tick", self.now, at=at, present=present)

    def _present(self) -> set[int]:
        return {self.devices.get(node, -1) for node in self._online} - {-1}

    def _waits_for_devices(self) -> bool:
        """Whether the run still waits for devices before its first trip. Its clock stands still meanwhile."""
        present, required = len(self._present()), self.network.wait_for
        if self.messages or self.trips or present >= required:
            return False
        if present != self._last_present:
            self.writer.say(f"waiting for {required} device{'s' * (required > 1)}; {present} online")
        self._start, self._last_present = time.monotonic(), present
        return True

    def _poll_nodes(self) -> None:
        """Update the online nodes. Without a list of nodes, a new node gets the next free device number."""
        if time.monotonic() - self._last_poll < self.network.node_poll:
            return
        self._last_poll = time.monotonic()
        try:
            found = self.transport.nodes()
        except ConnectionError as problem:
            self.writer.say(f"the SuperLink does not answer ({problem}); retrying")
            return
        for node in sorted(found - self.devices.keys()):
            free = sorted(set(range(self.server.context.devices)) - set(self.devices.values()))
            if self._listed or not free:
                self.writer.say(f"node {node} is not one of this federation's devices and is ignored")
            with self._lock:
                self._happen("node", self.now, node=node, device=-1 if self._listed or not free else free[0])
        self._online = found

    def _node(self, device: int) -> int | None:
        return next((node for node, number in self.devices.items() if number == device), None)

    def _carry_out(self, effects: Effects, now: float) -> None:
        """Log the events and carry out what the core decided. Messages are sent later, without the lock."""
        for event in effects.events:
            self.writer.event(now, event)
            if isinstance(event, Noted) and event.about == SAMPLES_NOTE:
                self._tell_bounded(**event.numbers)
        for assignment in effects.assignments:
            ticket = trip_ticket(self.session, *assignment[:3])
            self.trips[assignment.device] = LiveTrip(assignment, ticket, now)
        for device in (*effects.hurry, *effects.cancelled):
            self.trips[device].urgent = True
        self.wake(effects.wake_at)
        self.wake(effects.look_at)
        self.wake(effects.timer_at)
        self.over |= self.coordinator.over

    def _tell_bounded(self, device: int, claimed: int, counted: int) -> None:
        """Tell once per device that its samples do not all count."""
        if device not in self._bounded:
            self._bounded.add(device)
            problem = (
                f"device {device} reports {claimed} samples; {counted} count, so that no device outweighs the rest"
            )
            self.writer.say(f"{problem} (defence.max_share)")

    def _send(self) -> None:
        """Send due messages to online nodes. A node that stays offline loses its trip."""
        due = [each for each in self.trips.items() if not each[1].message]
        if due:
            self._journal.sync()
        for device, trip in due:
            node = self._node(device)
            if node in self._online and node is not None:
                content = self._content(node, trip)
                try:
                    trip.message, trip.sent = self.transport.send(node, content, self.network.ttl), self.now
                    self.messages += 1
                except ConnectionError as problem:
                    self.writer.say(f"cannot send device {device} its model ({problem}); retrying")
            elif self.now - max(trip.started, trip.sent) > self.network.patience:
                self._lose(device, "the device is offline")

    def _content(self, node: int, trip: LiveTrip) -> Any:
        if trip.second_message:
            return wire.delivery_record(wire.FreshDelivery(self.session, trip.ticket, trip.slot, trip.fresh))
        a, rule, net = trip.assignment, self.server.rule, self.network
        kind, side = net.fresh if rule.asks else "none", net.fresh == "side"
        token = self._tokens.make(node, a.device, a.trip, trip.ticket) if side else ""
        hurries = side and not rule.asks and not self.server.synchronous
        channel = wire.FreshChannel(kind, net.address if side else "", net.certificate if side else "", token, hurries)
        totals = self.totals[a.device]
        seconds = totals.seconds / totals.trips if rule.timed and totals.trips else None
        return wire.order_record(wire.Order(a, self.session, trip.ticket, channel, seconds))

    # ---- answers

    def _receive(self) -> None:
        waiting = {trip.message: device for device, trip in self.trips.items() if trip.message}
        if not waiting:
            return
        try:
            replies = self.transport.receive(list(waiting))
        except ConnectionError as problem:
            self.writer.say(f"the SuperLink does not answer ({problem}); retrying")
            return
        for reply in replies:
            device = waiting.pop(reply.message, None)
            if device is not None:
                self._handle_reply(device, reply)
        for device in waiting.values():
            if self.now - self.trips[device].sent > self.network.ttl + self.network.patience:
                self._lose(device, f"no answer within {self.network.ttl:g} s")

    def _handle_reply(self, device: int, reply: Reply) -> None:
        """Handle the answer to a trip's message."""
        trip = self.trips[device]
        if reply.error:
            self._online = self._online - {self._node(device)}  # until the next poll finds it
            self._lose(device, reply.error)
            return
        try:
            answer = wire.read_answer(reply.content)
            if answer.ticket != trip.ticket:
                raise MalformedMessage("belongs to another trip")
            if answer.upload is not None and (answer.upload.device, answer.upload.trip) != trip.assignment[:2]:
                raise MalformedMessage("names another trip")
        except MalformedMessage as problem:
            self._lose(device, f"unusable answer: {problem}")
            return
        if answer.upload is not None:
            self._upload(device, trip, answer)
        elif answer.slot is not None and self._may_ask(trip, answer.slot):
            with self._lock:
                what = {"device": device, "slot": list(answer.slot), "timing": dict(answer.timing)}
                self._happen("message request", self.now, **what)
        else:
            self._lose(device, answer.lost or "requests the fresh model too often")

    def _may_ask(self, trip: LiveTrip, slot: Slot) -> bool:
        """Whether a device may ask by message in this slot: the next one, or the same again after a restart."""
        if self.network.fresh != "messages" or (trip.second_message and slot.epoch < trip.slot):
            return False
        later = self.server.rule.later_slots(Slot(max(1, trip.slot), ""), trip.assignment.epochs)
        return not trip.second_message or slot.epoch in (trip.slot, *(each.epoch for each in later))

    def _upload(self, device: int, trip: LiveTrip, answer: wire.Answer) -> None:
        assert answer.upload is not None
        self.states[device].software = answer.software
        samples = answer.samples if 0 < answer.samples <= MAX_SAMPLES else None
        with self._lock:
            now = self.now
            timed = answer.timing and trip.wall_start is not None  # a repeated answer has no timing
            self._happen(
                "upload",
                now,
                device=device,
                upload=dump(answer.upload),
                samples=samples,
                unreached=answer.unreached,
                seconds=trip.durations(now - trip.started, answer.timing) if timed else {},
                started=trip.started,
                holds=answer.holds,
            )

    def _lose(self, device: int, reason: str) -> None:
        with self._lock:
            self._happen("loss", self.now, device=device, trip=self.trips[device].assignment.trip, reason=reason)

    # ---- called by the fresh-model service, from its threads

    def answer(self, device: int, trip: int, token: str, slot: Slot) -> Fresh | None:
        """The current model for a device in mid-training, None if there is nothing newer. Raises ``RequestRefused``.

        The answer is in the journal before it leaves: the device's upload will name the model that it was sent.
        """
        with self._lock:
            live = self._authorised_trip(device, trip, token)
            if live.exceeds_requests(self.server.slots_allowed(live.assignment.epochs)):
                self._refuse(self.coordinator.refuse(TOO_MANY_REQUESTS))
            fresh: Fresh | None = self._happen("request", self.now, device=device, trip=trip, slot=list(slot))
            self._journal.sync()
            return fresh

    def is_urgent(self, device: int, trip: int, token: str) -> bool:
        """Whether the method wants this trip's model soon."""
        with self._lock:
            return self._authorised_trip(device, trip, token).urgent

    def _authorised_trip(self, device: int, trip: int, token: str) -> LiveTrip:
        """Return the trip that a token belongs to. A stranger does not learn which trips there are."""
        if not self.ready:
            raise ConnectionError("the server is starting")
        if self._concluded:
            raise RequestRefused("the run is over")
        live, node = self.trips.get(device), self._node(device)
        if live is None or node is None or live.assignment.trip != trip:
            return self._refuse(self.coordinator.refuse(NO_TRIP))
        if not self._tokens.fits(token, node, device, trip, live.ticket):
            return self._refuse(self.coordinator.refuse(WRONG_TOKEN))
        return live

    def _refuse(self, effects: Effects) -> NoReturn:
        """Log a refused request, up to a limit, so that refusals cannot fill the disk. Its sender gets no reason."""
        self._refusals += 1
        if self._refusals <= LOGGED_REFUSALS:
            self._carry_out(effects, self.now)
        raise RequestRefused("the request is not allowed")

    # ---- status for people

    def status(self) -> dict[str, Any]:
        """The state of the run, in numbers. The states of the devices are in ``states``."""
        counts, rows = self.coordinator.counts, self.writer.metrics
        name = str(rows[-1].get("metric", "accuracy")) if rows else ""
        score = rows[-1].get(name) if rows else None
        return {
            "seconds": self.now,
            "until": None if self._until == math.inf else self._until,
            "version": self.server.version,
            "uploads": counts.uploads,
            "rejected": counts.rejected,
            "lost": counts.lost,
            "score": [name, score] if isinstance(score, int | float) else None,
            "waiting_for": self.network.wait_for if not (self.messages or self.trips) else 0,
        }

    def _write_status(self, until: float, ended: bool = False) -> None:
        """Write the status file if it is time."""
        self._until = until
        if not self.network.status or not (ended or time.monotonic() - self._last_status >= WRITE_SECONDS):
            return
        self._last_status = time.monotonic()
        with self._lock:
            self._update_states()
            write_status(Path(self.network.status), self.status() | {"ended": ended}, list(self.states.values()))

    def _update_states(self) -> None:
        for node, device in self.devices.items():
            if device >= 0:
                state = self.states[device]
                state.node, state.trips = node, self.totals[device].trips
                trip = self.trips.get(device)
                if node in self._online:
                    state.enter("training" if trip is not None and trip.message else "online")
                elif state.state != "never":
                    state.enter("offline")

    # ---- testing the model

    def _test(self) -> None:
        version, model = self.server.version, None
        if self._tested is None or self._tested[0] != version:
            model = self.server.method.evaluation_model(self.server)
            self._tested = (version, self._evaluate(model))
        score = self._tested[1]
        with self._lock:
            if self.now > self._last_test:
                self._tested_model = model
                what = {"loss": score.loss, "metrics": dict(score.metrics), "version": version}
                self._happen("test", self.now, **what)
                self._tested_model = None

    # ---- checkpoint: trips in flight are sent again; a device that has finished one repeats its answer

    def state(self) -> Tree:
        """Everything that decides how the run continues."""
        with self._lock:
            self.writer.drain(wait=True)
            return {
                "coordinator": self.coordinator.state(),
                "samples": self.server.context.samples.copy(),
                "now": self.now,
                "wakes": list(self._wakes),
                "session": self.session,
                "devices": {str(node): device for node, device in self.devices.items() if device >= 0},
                "journeys": {str(device): trip_state(trip) for device, trip in self._in_flight()},
                "messages": self.messages,
                "done": {str(device): [each.trips, each.seconds] for device, each in self.totals.items()},
                "seconds": {str(device): {k: list(v) for k, v in by.items()} for device, by in self.seconds.items()},
                "log": self.writer.position(),
                "journal": self._journal.mark_checkpoint(),
            }

    def restore(self, tree: Tree, until: float) -> None:
        """Continue from a saved state and the journal. Every trip in flight is sent again with its ticket."""
        self.coordinator.restore(tree["coordinator"])
        for device, samples in enumerate(tree["samples"]):
            self.server.set_samples(device, int(samples))
        self._earlier_seconds, self._start = tree["now"], time.monotonic()
        self._wakes, self.session, self._started = list(tree["wakes"]), tree["session"], True
        if not self._listed:
            self.devices = {int(node): device for node, device in tree["devices"].items()}
        for device, saved in tree["journeys"].items():
            self.trips[int(device)] = self._restore_trip(int(device), saved)
        self.messages = tree["messages"]
        for device, (trips, seconds) in tree["done"].items():
            self.totals[int(device)] = TripTotals(trips, seconds)
        for device, by in tree["seconds"].items():
            for phase, values in by.items():
                self.seconds[int(device)][phase].extend(values)
        if "journal" in tree:  # runs of older versions have none
            for entry in self._journal.read(tree["journal"]):
                self._replay(entry)
        self._journal.begin_file()
        self._start = time.monotonic()
        self._happen("resumed", self.now)
        self._next_test = next_multiple(self._earlier_seconds, self.eval_every)

    def _in_flight(self) -> list[tuple[int, LiveTrip]]:
        """Trips that were not given up. (The answer to an abandoned trip still shows that its device is free.)"""
        return [(device, trip) for device, trip in self.trips.items() if self.server.active_trip(*trip.assignment[:2])]

    def _restore_trip(self, device: int, tree: Tree) -> LiveTrip:
        active, store = self.server.active_trips[device], self.server.store
        packed, fresh_packed = _rebuild_packed(tree.get("packed")), _rebuild_packed(tree.get("fresh_packed"))
        weights = store.get(active.base) if packed is None else UNREAD
        where = (device, active.trip, active.base, active.age, weights, active.epochs, active.lr)
        assignment = Assignment(*where, tree["instruction"], copy_arrays(tree["vectors"]), packed)
        trip = LiveTrip(assignment, tree["ticket"], tree["started"], second_message=tree["onward"])
        trip.slot = tree["slot"]
        sent = next((each for each in active.sent if each.version == tree["fresh"]), None)
        if sent is not None:
            fresh = store.get(sent.version) if fresh_packed is None else UNREAD
            trip.fresh = Fresh(sent.version, sent.age, fresh, copy_arrays(tree["fresh_vectors"]), fresh_packed)
        return trip
