"""The real-time driver: brings what arrives over a network to the core, and carries out its answers.

One thread drives: it starts trips, takes up answers as they arrive and tests the model. The fresh-model service asks
from threads of its own; whatever touches the core or the log holds the lock, and nothing is sent under it. Only the
driving thread changes the model, so that a test needs no lock.

What the real-time driver works with: messages and who carries them, how they travel, trips under way.
"""

import math
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from freshet.core.coordinator import Coordinator, Effects, next_multiple
from freshet.core.events import Noted, Rejected
from freshet.core.messages import Assignment, Fresh, Request, Slot
from freshet.core.saving import Tree
from freshet.core.server import NO_TRIP, Refused
from freshet.core.stopping import Known
from freshet.core.vectors import Vector
from freshet.flower import wire
from freshet.flower.security import Tokens, new_ticket
from freshet.flower.wire import MalformedMessage
from freshet.runs.checkpoint import owned
from freshet.runs.writer import RunWriter
from freshet.training.task import Score

#: What a device spends its time on: process and Flower's part of it, loading our code and torch, data and model,
#: training, waiting for the fresh model.
PHASES = ("start", "import", "load", "train", "fresh")
#: Questions of one trip that are answered: a device that gets no answer tries three times, and may begin anew.
MAX_REQUESTS = 20


class Reply(NamedTuple):
    """An answer to a message: records, or what went wrong."""

    message: str
    content: Any = None
    error: str = ""


class Transport(Protocol):
    """Carries messages to nodes; every call may fail with ``ConnectionError``."""

    def nodes(self) -> set[int]:
        """Nodes that are there now."""

    def send(self, node: int, content: Any, seconds: float) -> str:
        """Send a message that is of no use after so many seconds; its number."""

    def receive(self, messages: list[str]) -> list[Reply]:
        """Those answers to these messages that have arrived; each is handed out once."""


@dataclass(frozen=True)
class NetworkSettings:
    """How messages travel."""

    fresh: str = "side"
    address: str = ""
    certificate: str = ""
    #: Seconds that a trip may take, between two looks for answers, and that a node may be away before its trip is lost.
    ttl: float = 600.0
    poll: float = 0.2
    patience: float = 120.0
    #: Devices that have to be there before the first trip of a run.
    wait_for: int = 1
    #: Seconds between two looks for nodes that have come or gone.
    node_poll: float = 2.0


@dataclass(slots=True)
class LiveTrip:
    """A trip under way."""

    assignment: Assignment
    ticket: str
    started: float
    #: The message that is to be answered (empty: still to be sent), and when it was sent.
    message: str = ""
    sent: float = 0.0
    slot: Slot | None = None
    fresh: Fresh | None = None
    #: Whether the second message of the trip is due (or sent).
    second_message: bool = False
    urgent: bool = False
    #: When it was begun by this machine's clock; None after a restart of the server, when its time tells nothing.
    wall_start: float | None = field(default_factory=time.time)
    #: Seconds by phase of its first message, where it takes two.
    first_timing: Mapping[str, float] = field(default_factory=dict)
    #: How often the device has asked for the fresh model.
    requests: int = 0

    def exceeds_requests(self) -> bool:
        """Count a question; whether these are more than lost answers explain."""
        self.requests += 1
        return self.requests > MAX_REQUESTS

    def durations(self, whole: float, timing: Mapping[str, float]) -> dict[str, float]:
        """Where a trip's time went, ``timing`` being what the device says of its last message.

        What the device does not account for are messages: down until its process began (as far as the two clocks
        agree), up for the rest.
        """
        both = {phase: self.first_timing.get(phase, 0.0) + timing.get(phase, math.nan) for phase in (*PHASES, "cpu")}
        found = {phase: value for phase, value in both.items() if 0 <= value < 1e6}
        messages = max(0.0, whole - sum(found[phase] for phase in PHASES if phase in found))
        began = self.first_timing.get("began", timing.get("began", 0.0))
        down = min(max(0.0, began - (self.wall_start or began)), messages)
        return found | {"down": down, "up": messages - down, "messages": messages, "whole": whole}


@dataclass(slots=True)
class TripTotals:
    """How many trips a device has completed, and how long they took from trigger to upload."""

    trips: int = 0
    seconds: float = 0.0


def medians(seconds: Iterable[Mapping[str, Iterable[float]]]) -> dict[str, float]:
    """Of the seconds by phase of several devices."""
    phases: dict[str, list[float]] = defaultdict(list)
    for by_phase in seconds:
        for phase, values in by_phase.items():
            phases[phase] += values
    return {phase: round(statistics.median(values), 3) for phase, values in sorted(phases.items())}


def check_state(tree: Tree) -> None:
    """Raise ``ValueError`` unless a saved state is one of a run in real time."""
    missing = {"coordinator", "samples", "now", "wakes", "session", "devices", "journeys", "log"} - tree.keys()
    if missing:
        raise ValueError(f"it has no {', '.join(sorted(missing))}")


def trip_state(journey: LiveTrip) -> Tree:
    return {
        "ticket": journey.ticket,
        "started": journey.started,
        "onward": journey.second_message,
        "instruction": dict(journey.assignment.instruction),
        "vectors": dict(journey.assignment.vectors),
        "fresh_vectors": {} if journey.fresh is None else dict(journey.fresh.vectors),
    }


WRONG_TOKEN = "asks for the fresh model with a token that is not of its trip"  # noqa: S105
TOO_MANY_REQUESTS = "asks for the fresh model again and again"
#: Refused questions that are logged, each with a line; more are only counted.
LOGGED_REFUSALS = 100
#: Trips of each device whose seconds are remembered, for the medians.
TIMED_TRIPS = 1000


class LiveDriver:
    """One run in real time."""

    def __init__(
        self,
        coordinator: Coordinator,
        post: Transport,
        writer: RunWriter,
        evaluate: Callable[[Vector], Score],
        tokens: Tokens,
        network: NetworkSettings,
        *,
        nodes: Mapping[int, int],
        eval_every: float,
        stop_diverged: bool = True,
        session: str | None = None,
    ) -> None:
        self.coordinator, self.server, self.transport, self.writer = coordinator, coordinator.server, post, writer
        self.network, self.eval_every, self._stop_diverged = network, eval_every, stop_diverged
        self._evaluate, self._tokens = evaluate, tokens
        #: Nodes and the devices that they are; without a list, devices are numbered as nodes come.
        self.devices: dict[int, int] = dict(nodes)
        self._listed = bool(nodes)
        self.session = session or new_ticket()
        self.trips: dict[int, LiveTrip] = {}
        self.over = self._concluded = False
        self._lock = threading.RLock()
        self._online: set[int] = set()
        self._called, self._came, self._refusals = -1e9, -1, 0
        self._start, self._before = time.monotonic(), 0.0
        self._wakes: list[float] = []
        self._next_test, self._last_test = 0.0, -1.0
        self._tested: tuple[int, Score] | None = None
        self._started = False
        self.totals: dict[int, TripTotals] = defaultdict(TripTotals)
        #: Messages that were sent: one per trip, two where the fresh model comes by message.
        self.messages = 0
        #: Seconds by device and phase, one for each of the last trips.
        latest = partial(deque[float], maxlen=TIMED_TRIPS)
        self.seconds: dict[int, dict[str, deque[float]]] = defaultdict(lambda: defaultdict(latest))

    # ---- Driver

    @property
    def now(self) -> float:
        """Seconds since the start, those before a resumed run's checkpoint included."""
        return self._before + time.monotonic() - self._start

    def run(self, until: float, between: Callable[[], bool] = lambda: False) -> bool:
        """Go on until the end of time, of the rounds, or a test that shows that the one before it had diverged."""
        if not self._started:
            self._started = True
            self._wake(self.coordinator.wake(0.0))
        while not self.over and self.now < until:
            if between():
                return False
            self._poll_nodes()
            if not (waits := self._waits_for_devices()):
                self._tick()
                self._send()
                self._receive()
            if not waits and self.now >= self._next_test:
                self._test()
                self._next_test = next_multiple(self.now, self.eval_every)
                self.over |= self._stop_diverged and self.coordinator.watch.diverged is not None
            self.writer.progress(self.now)
            time.sleep(self.network.poll)
        return True

    def conclude(self) -> None:
        """Test the model that is left, unless that was just done, and look at the result."""
        with self._lock:
            self._concluded = True  # who asks from now on gets no answer, and the log no line of it
        if self._tested is None or self._tested[0] != self.server.version or self.now - self._last_test > 1.0:
            self._test()
        self.coordinator.watch.check_latest()

    def facts(self) -> dict[str, Any]:
        """The course of the run, and the seconds of its trips by phase, as medians over the last trips."""
        facts = {"real_time": True, "trip_seconds": medians(self.seconds.values()), "messages": self.messages}
        return self.coordinator.facts(self.now) | facts

    # ---- starting trips

    def _wake(self, at: float | None) -> None:
        if at is not None:
            self._wakes.append(at)

    def _tick(self) -> None:
        due = [at for at in self._wakes if at <= self.now]
        self._wakes = [at for at in self._wakes if at not in due]
        there = self._present()
        for at in due:
            with self._lock:
                if self.server.synchronous and not self.trips and not there:  # a round without anybody is none
                    self._wake(self.coordinator.put_off(at, self.now))
                else:
                    self._carry_out(self.coordinator.tick(at, there.__contains__))

    def _present(self) -> set[int]:
        return {self.devices.get(node, -1) for node in self._online} - {-1}

    def _waits_for_devices(self) -> bool:
        """Before its first trip a run waits for its devices, and its clock stands still."""
        there, wanted, before = len(self._present()), self.network.wait_for, self._came
        if self.messages or self.trips or there >= wanted:
            return False
        if there != before:
            self.writer.say(f"waiting for {wanted} device{'s' * (wanted > 1)}; {there} there")
        self._start, self._came = time.monotonic(), there
        return True

    def _poll_nodes(self) -> None:
        """Who is there; a node that is not on the list gets the next free device number, where there is no list."""
        if time.monotonic() - self._called < self.network.node_poll:
            return
        self._called = time.monotonic()
        try:
            found = self.transport.nodes()
        except ConnectionError as problem:
            self.writer.say(f"the SuperLink does not answer ({problem}); trying again")
            return
        for node in sorted(found - self.devices.keys()):
            free = sorted(set(range(self.server.context.devices)) - set(self.devices.values()))
            if self._listed or not free:
                self.writer.say(f"node {node} is not one of this federation's devices and is left alone")
            number = -1 if self._listed or not free else free[0]
            self.devices = self.devices | {node: number}  # a new dict: the service's threads read the old one
        self._online = found

    def _node(self, device: int) -> int | None:
        return next((node for node, number in self.devices.items() if number == device), None)

    def _carry_out(self, effects: Effects, now: float | None = None) -> None:
        """Log what happened, and do what the core asks for (messages go out when the lock is free)."""
        now = self.now if now is None else now
        for event in effects.events:
            self.writer.event(now, event)
        for assignment in effects.assignments:
            self.trips[assignment.device] = LiveTrip(assignment, new_ticket(), now)
        for device in effects.hurry:
            self.trips[device].urgent = True
        self._wake(effects.wake_at)
        self._wake(effects.look_at)
        self.over |= self.coordinator.over

    def _send(self) -> None:
        """Send what is due to nodes that are there; a node that stays away has lost its trip."""
        for device, journey in [(d, j) for d, j in self.trips.items() if not j.message]:
            node = self._node(device)
            if node in self._online and node is not None:
                content = self._content(node, journey)
                try:
                    journey.message, journey.sent = self.transport.send(node, content, self.network.ttl), self.now
                    self.messages += 1
                except ConnectionError as problem:
                    self.writer.say(f"device {device} cannot be sent its model now ({problem}); trying again")
            elif self.now - max(journey.started, journey.sent) > self.network.patience:
                self._lose(device, "the device is away")

    def _content(self, node: int, journey: LiveTrip) -> Any:
        if journey.second_message:
            return wire.delivery_record(wire.FreshDelivery(self.session, journey.ticket, journey.fresh))
        a, rule, net = journey.assignment, self.server.rule, self.network
        kind, side = net.fresh if rule.asks else "none", net.fresh == "side"
        token = self._tokens.make(node, a.device, a.trip, journey.ticket) if side else ""
        hurries = side and not rule.asks and not self.server.synchronous
        way = wire.FreshChannel(kind, net.address if side else "", net.certificate if side else "", token, hurries)
        done = self.totals[a.device]
        seconds = done.seconds / done.trips if rule.timed and done.trips else None
        return wire.order_record(wire.Order(a, self.session, journey.ticket, way, seconds))

    # ---- answers

    def _receive(self) -> None:
        waiting = {journey.message: device for device, journey in self.trips.items() if journey.message}
        if not waiting:
            return
        try:
            replies = self.transport.receive(list(waiting))
        except ConnectionError as problem:
            self.writer.say(f"the SuperLink does not answer ({problem}); trying again")
            return
        for reply in replies:
            device = waiting.pop(reply.message, None)
            if device is not None:
                self._handle_reply(device, reply)
        for device in waiting.values():
            if self.now - self.trips[device].sent > self.network.ttl + self.network.patience:
                self._lose(device, f"no answer within {self.network.ttl:g} s")

    def _handle_reply(self, device: int, reply: Reply) -> None:
        """An answer to a trip's message is there."""
        journey = self.trips[device]
        if reply.error:
            self._online = self._online - {self._node(device)}  # until the next roll call says otherwise
            self._lose(device, reply.error)
            return
        try:
            answer = wire.read_answer(reply.content)
            if answer.ticket != journey.ticket:
                raise MalformedMessage("belongs to another trip")
            if answer.upload is not None and (answer.upload.device, answer.upload.trip) != journey.assignment[:2]:
                raise MalformedMessage("names another trip")
        except MalformedMessage as problem:
            self._lose(device, f"its answer cannot be used: {problem}")
            return
        if answer.upload is not None:
            self._upload(device, journey, answer)
        elif answer.slot is not None and not journey.second_message and self.network.fresh == "messages":
            self._send_fresh(device, journey, answer.slot, answer.timing)
        else:
            self._lose(device, answer.lost or "asks a second time")

    def _upload(self, device: int, journey: LiveTrip, answer: wire.Answer) -> None:
        upload, trip = answer.upload, journey.assignment.trip
        assert upload is not None
        self._record_timing(device, journey, answer)
        with self._lock:
            now, done = self.now, self.totals[device]
            del self.trips[device]
            done.trips, done.seconds = done.trips + 1, done.seconds + now - journey.started
            samples, before = self.server.context.samples, int(self.server.context.samples[device])
            if 0 < answer.samples < 2**31:
                samples[device] = answer.samples
            effects = self.coordinator.arrived(now, device, trip, lambda: upload)
            if any(isinstance(event, Rejected) and event.device == device for event in effects.events):
                samples[device] = before  # what is refused leaves no trace
            self._carry_out(effects, now)
            if answer.unreached:
                note = {"device": device, "trip": trip, "reason": answer.unreached}
                self.writer.event(self.now, Noted("trained on without the fresh model", note))

    def _send_fresh(self, device: int, journey: LiveTrip, slot: Slot, timing: Mapping[str, float]) -> None:
        """The device asks by message: the second message of its trip brings the model of this moment."""
        with self._lock:
            effects = self.coordinator.request(Request(device, journey.assignment.trip, slot))
            self._carry_out(effects)
            journey.slot, journey.fresh, journey.second_message, journey.message = slot, effects.fresh, True, ""
            journey.first_timing = dict(timing)

    def _lose(self, device: int, reason: str) -> None:
        with self._lock:
            journey = self.trips.pop(device)
            self._carry_out(self.coordinator.lost(self.now, device, journey.assignment.trip, reason))

    def _record_timing(self, device: int, journey: LiveTrip, answer: wire.Answer) -> None:
        """Write down what a trip's time went to; an answer that is given again has none."""
        if answer.timing and journey.wall_start is not None:
            parts = journey.durations(self.now - journey.started, answer.timing)
            for phase, value in parts.items():
                self.seconds[device][phase].append(value)

    # ---- the fresh-model service asks (from its threads)

    def answer(self, device: int, trip: int, token: str, slot: Slot) -> Fresh | None:
        """The model of this moment for a device in mid-training; raises ``Refused``."""
        with self._lock:
            journey = self._authorised_trip(device, trip, token)
            asked, often = Request(device, trip, slot), journey.exceeds_requests()
            effects = self.coordinator.refused(TOO_MANY_REQUESTS) if often else self.coordinator.request(asked)
            if any(isinstance(event, Rejected) for event in effects.events):
                self._note_refusal(effects)
                raise Refused("this cannot be asked")
            self._carry_out(effects)
            journey.slot, journey.fresh = slot, effects.fresh
            return effects.fresh

    def is_urgent(self, device: int, trip: int, token: str) -> bool:
        """Whether the method wants this trip's model soon."""
        with self._lock:
            return self._authorised_trip(device, trip, token).urgent

    def _authorised_trip(self, device: int, trip: int, token: str) -> LiveTrip:
        """The trip that a token belongs to; a question without one is logged and refused."""
        if self._concluded:
            raise Refused("the run is over")
        journey, node = self.trips.get(device), self._node(device)
        if journey is None or node is None or journey.assignment.trip != trip:
            reason = NO_TRIP
        elif self._tokens.fits(token, node, device, trip, journey.ticket):
            return journey
        else:
            reason = WRONG_TOKEN
        self._note_refusal(self.coordinator.refused(reason))
        raise Refused(reason)

    def _note_refusal(self, effects: Effects) -> None:
        """Log a refused question, unless there were so many that somebody wants to fill the disk."""
        self._refusals += 1
        if self._refusals <= LOGGED_REFUSALS:
            self._carry_out(effects)

    # ---- testing the model

    def _test(self) -> None:
        version = self.server.version
        if self._tested is None or self._tested[0] != version:
            self._tested = (version, self._evaluate(self.server.method.evaluated(self.server)))
        score = self._tested[1]
        with self._lock:
            at = self.now
            if at <= self._last_test:
                return
            self._last_test = at
            self.coordinator.watch.test(at, Known(score.loss))
            event, row = self.coordinator.test()
            self.writer.event(at, event._replace(numbers={**score.metrics, "loss": score.loss}), row=row)

    # ---- checkpoint: trips under way are sent again, and a device that is done with one gives its answer again

    def state(self) -> Tree:
        """Everything that decides how the run goes on."""
        with self._lock:
            self.writer.drain(wait=True)
            return {
                "coordinator": self.coordinator.state(),
                "samples": self.server.context.samples.copy(),
                "now": self.now,
                "wakes": list(self._wakes),
                "session": self.session,
                "devices": {str(node): device for node, device in self.devices.items() if device >= 0},
                "journeys": {str(device): trip_state(journey) for device, journey in self._in_flight()},
                "messages": self.messages,
                "done": {str(device): [done.trips, done.seconds] for device, done in self.totals.items()},
                "seconds": {str(device): {k: list(v) for k, v in by.items()} for device, by in self.seconds.items()},
                "log": self.writer.position(),
            }

    def restore(self, tree: Tree, until: float) -> None:
        """Go on from a saved state; every trip that was under way is asked for again, with its ticket."""
        self.coordinator.restore(tree["coordinator"])
        self.server.away.clear()  # their messages are not waited for any more
        self.server.context.samples[:] = tree["samples"]
        self._before, self._start = tree["now"], time.monotonic()
        self._wakes, self.session, self._started = list(tree["wakes"]), tree["session"], True
        self._next_test = next_multiple(self._before, self.eval_every)
        if not self._listed:
            self.devices = {int(node): device for node, device in tree["devices"].items()}
        for device, journey in tree["journeys"].items():
            self.trips[int(device)] = self._restore_trip(int(device), journey)
        self.messages = tree["messages"]
        for device, (trips, seconds) in tree["done"].items():
            self.totals[int(device)] = TripTotals(trips, seconds)
        for device, by in tree["seconds"].items():
            for phase, values in by.items():
                self.seconds[int(device)][phase].extend(values)

    def _in_flight(self) -> list[tuple[int, LiveTrip]]:
        """Trips that were not given up (an answer to one that was is still waited for, to know that its device is
        free)."""
        return [(device, j) for device, j in self.trips.items() if self.server.active_trip(device, j.assignment.trip)]

    def _restore_trip(self, device: int, tree: Tree) -> LiveTrip:
        active, store = self.server.active_trips[device], self.server.store
        where = (device, active.trip, active.base, active.age, store.get(active.base), active.epochs, active.lr)
        assignment = Assignment(*where, tree["instruction"], owned(tree["vectors"]))
        journey = LiveTrip(assignment, tree["ticket"], tree["started"], sent=self.now, second_message=tree["onward"])
        journey.wall_start = None
        if active.fresh is not None:
            fresh = (active.fresh, active.fresh_age, store.get(active.fresh))
            journey.fresh = Fresh(*fresh, owned(tree["fresh_vectors"]))
        return journey
