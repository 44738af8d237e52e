"""The rules of a run that do not depend on the clock. A driver reports what happens and carries out the answers.

    tick            time to look for idle devices        -> assignments to send, and when to call again
    request         a device in mid-training asks        -> the fresh model, or nothing newer
    push            a device in flight is far behind     -> the current model, sent unasked
    fresh_merged    a device has merged it (if the driver sees this; otherwise the upload tells)
    upload_arrived  an upload has arrived                -> what became of it, and which devices should hurry
    trip_lost       a device in flight will not upload

Every answer holds the events for the log, in order. All counts are kept here.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from freshet.core import saving
from freshet.core.admission import NOT_FINITE
from freshet.core.compression import LAYERS_NOTE
from freshet.core.events import (
    Aggregated,
    Discarded,
    Evaluated,
    Event,
    Hurried,
    Lost,
    Merged,
    Noted,
    Pushed,
    Refused,
    Rejected,
    Requested,
    Triggered,
    Uploaded,
)
from freshet.core.messages import CONTROL_BYTES, METRIC_PREFIX, Assignment, Fresh, Number, Request, Upload
from freshet.core.scheduling import Trigger
from freshet.core.server import ActiveTrip, RequestRefused, SentFresh, Server
from freshet.core.stopping import Deadline, DivergenceMonitor, RoundLimit, StallDetector
from freshet.errors import RunError

#: Counts in every row of metrics.jsonl.
METRICS = ("trips", "uploads", "aggregations", "discards", "bytes_up", "bytes_down")


@dataclass(slots=True)
class Counts:
    """Running totals for metrics and summary."""

    trips: int = 0
    requests: int = 0
    merges: int = 0
    pushes: int = 0
    uploads: int = 0
    aggregations: int = 0
    discards: int = 0
    rejected: int = 0
    #: Rejected uploads that are not finite or exceed the norm gate: a sign of divergence.
    wild: int = 0
    #: Requests for the fresh model that were not answered.
    refused: int = 0
    lost: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    staleness_sum: int = 0
    staleness_count: int = 0


class Effects(NamedTuple):
    """What a driver has to do: log events, send messages, tell devices to hurry, call ``tick`` at ``wake_at``, (when
    trips may be overdue) ``look_at`` and (for the method) ``timer_at``, forget trips that were given up, and interrupt
    those that were cancelled."""

    events: Sequence[Event] = ()
    assignments: Iterable[Assignment] = ()
    fresh: Fresh | None = None
    hurry: Iterable[int] = ()
    wake_at: float | None = None
    look_at: float | None = None
    given_up: Iterable[int] = ()
    timer_at: float | None = None
    cancelled: Iterable[int] = ()


class Coordinator:
    """Server and trigger, as a driver sees them.

    The run ends after ``rounds`` rounds (0: no limit). A trip is given up after ``deadline`` seconds (0: never).
    """

    def __init__(
        self, server: Server, trigger: Trigger, rounds: int = 0, endless: bool = False, deadline: float = 0.0
    ) -> None:
        self.server, self.trigger = server, trigger
        self.counts, self.divergence_monitor, self.rounds = Counts(), DivergenceMonitor(), RoundLimit(rounds)
        #: Whether the run has no time limit, so that only ``rounds`` ends it.
        self.endless = endless
        #: True when the last round is over.
        self.over = False
        self._wakes: set[float] = set()
        #: When ticks are scheduled for the method.
        self._timers: set[float] = set()
        self.deadline, self.stall_detector = Deadline(deadline), StallDetector()

    # ---- starting trips

    def wake(self, at: float) -> float | None:
        """Schedule a ``tick`` at this time. Returns None if one is already scheduled, also one for overdue trips."""
        if at in self._wakes:
            return None
        self._wakes.add(at)
        return None if at == self.deadline.next_check else at

    def postpone(self, at: float, now: float) -> float | None:
        """Move the ``tick`` of this time to the trigger's first one after ``now``."""
        self._wakes.discard(at)
        return self.wake(next_multiple(now, self.trigger.period))

    def tick(self, now: float, available: Callable[[int], bool], clock: float | None = None) -> Effects:
        """Start as many trips on idle, available devices as the trigger wants. Give up overdue trips.

        ``now`` is the time that was scheduled. In real time the tick is a little later, at ``clock``.
        """
        clock = now if clock is None else clock
        self.server.now = clock
        if self.deadline.seconds or self.server.timed:
            return self._tick_with_timers(now, available, clock)
        self._wakes.discard(now)
        return self._start(now, available, clock)

    def _tick_with_timers(self, now: float, available: Callable[[int], bool], clock: float) -> Effects:
        """The periodic trigger follows only its own clock, not that of the deadline or the method.

        A run that ends here continues from this time if it is extended.
        """
        server, scheduled = self.server, now in self._wakes
        self._wakes.discard(now)
        self._timers.discard(now)
        late, events = self.deadline.overdue(now, server.active_trips), list[Event]()
        for device, trip in late:
            events += self._count(server.give_up(device, trip))
        events += self._run_timers()
        hurry, cancelled = self._hurry(events), server.take_cancelled()
        self.over |= bool(late) and self.rounds.trip_ended(server, self.endless)
        started = Effects()
        if scheduled or self.trigger.on_arrival:
            started = Effects(wake_at=self.wake(now)) if self.over else self._start(now, available, clock)
        events += started.events
        look_at = self.deadline.schedule_check()
        return started._replace(
            events=events,
            hurry=hurry,
            look_at=None if look_at in self._wakes else look_at,
            given_up=[device for device, _ in late],
            timer_at=self._schedule_timer(),
            cancelled=cancelled,
        )

    def _run_timers(self) -> list[Event]:
        """Call the method as long as its time has come. Several things may be due at once, but not endlessly many."""
        server, events, calls = self.server, list[Event](), 0
        while server.timed and (at := server.method.timer(server)) is not None and at <= server.now:
            events += self._count(server.run_timer())
            calls += 1
            if calls > server.context.devices + 1 and server.method.timer(server) == at:
                raise RunError(f"method {type(server.method).__name__}: timer() still names {at:g} after on_timer()")
        return events

    def _schedule_timer(self) -> float | None:
        """The method's next time; None if there is none, or a tick is already scheduled for it."""
        at = self.server.timer
        if at is None or at in self._timers:
            return None
        self._timers.add(at)
        return at

    def _start(self, now: float, available: Callable[[int], bool], clock: float) -> Effects:
        server, counts, deadline = self.server, self.counts, self.deadline
        events: list[Event] = []
        wanted = self.trigger.devices_to_start(server)
        chosen = server.select(wanted, available) if wanted else []
        assignments = server.trigger(chosen, clock) if chosen else []
        round_ = server.round if server.synchronous else None
        counts.trips += len(assignments)
        for assignment in assignments:
            counts.bytes_down += assignment.nbytes
            device, trip = assignment.device, assignment.trip
            events.append(Triggered(device, trip, assignment.version, assignment.epochs, assignment.lr, round_))
            if deadline.seconds:
                deadline.trip_started(now, device, trip)
        if wanted and not chosen and server.synchronous:
            events += self._count(server.empty_round())
            self.over |= self.rounds.over(server)
        too_few = len(chosen) < wanted and not self._wakes
        again = not self.trigger.on_arrival or too_few
        wake_at = self.wake(next_multiple(now, self.trigger.period)) if again else None
        return Effects(events, assignments, wake_at=wake_at)

    # ---- during a trip

    def request(self, request: Request) -> Effects:
        """Answer with the current model."""
        if not isinstance(request, Request):
            return self.refuse("is not a request")
        self.counts.bytes_up += request.nbytes
        active = self.server.active_trip(request.device, request.trip)
        had = set[int]() if active is None else {sent.version for sent in active.sent}
        try:
            fresh = self.server.request(request)
        except RequestRefused as refusal:
            return self.refuse(str(refusal))
        if self.server.rule.push_after:
            return self._answer_fetch(request.device, request.trip, fresh, had)
        base, version = self.server.active_trips[request.device].base, None if fresh is None else fresh.version
        self.counts.requests += 1
        self.counts.bytes_down += CONTROL_BYTES if fresh is None else fresh.nbytes
        slot = request.slot
        event = Requested(request.device, request.trip, base, self.server.version, slot.epoch, slot.by, version)
        return Effects([event, *self._layers(request.device, request.trip, fresh, had)], fresh=fresh)

    def _layers(self, device: int, trip: int, fresh: Fresh | None, had: Collection[int] = ()) -> list[Event]:
        """For the log: which layers of a fresh model were sent, if only some were. A repetition says nothing new."""
        links = self.server.links
        if links is None or fresh is None or fresh.version in had:
            return []
        numbers = links.layers_note(device, trip, fresh.version)
        return [] if numbers is None else [Noted(LAYERS_NOTE, numbers)]

    def push(self, device: int, trip: int) -> Effects:
        """Send the current model to a device in flight if it is due."""
        if not self.server.push_due(device, trip):
            return Effects()
        base, fresh = self.server.active_trips[device].base, self.server.push(device, trip)
        self.counts.pushes += 1
        self.counts.bytes_down += fresh.nbytes
        return Effects([Pushed(device, trip, base, fresh.version), *self._layers(device, trip, fresh)], fresh=fresh)

    def _answer_fetch(self, device: int, trip: int, fresh: Fresh | None, had: set[int]) -> Effects:
        """A deployed device fetches what the server pushes, at the start of its epochs. A repetition is not logged."""
        self.counts.bytes_down += CONTROL_BYTES if fresh is None else fresh.nbytes
        if fresh is None or fresh.version in had:
            return Effects(fresh=fresh)
        self.counts.pushes += 1
        pushed = Pushed(device, trip, self.server.active_trips[device].base, fresh.version)
        return Effects([pushed, *self._layers(device, trip, fresh)], fresh=fresh)

    def refuse(self, reason: str) -> Effects:
        """Count and log a request that is not answered."""
        return Effects(self._count([Refused(reason)]))

    def fresh_merged(self, device: int, trip: int, epoch: int = 0) -> Merged | None:
        """A device has just merged the next fresh model that it was sent. The numbers follow when they are known."""
        active = self.server.active_trip(device, trip)
        sent = None if active is None else active.next_merge()
        return None if active is None or sent is None else self._merge(device, active, sent, epoch)

    def _merge(self, device: int, active: ActiveTrip, sent: SentFresh, epoch: int = 0) -> Merged:
        """``epoch`` is that of a pushed model's merge."""
        sent.merged = True
        self.counts.merges += 1
        base, fresh = active.base, sent.version
        round_, k = (sent.age, fresh - base) if self.server.synchronous else (None, None)
        return Merged(device, active.trip, base, fresh, sent.slot or epoch, round_, k)

    # ---- the end of a trip

    def upload_arrived(
        self, now: float, device: int, trip: int, open_upload: Callable[[], Upload], samples: int | None = None
    ) -> Effects:
        """An upload has arrived. ``open_upload`` opens it, and is called only if the decision needs it.

        ``samples`` is the number of samples that a deployed device reports with it.
        """
        server, counts = self.server, self.counts
        server.now = now
        active, version = server.active_trip(device, trip), server.version
        if active is None:
            return Effects(self._count([server.reject_unknown(device, trip)]))
        decided, upload = server.process_upload(device, active, open_upload, samples)
        size = server.upload_bytes if upload is None else _size(upload, server.upload_bytes)
        counts.uploads += 1
        counts.bytes_up += size
        arrived = Uploaded(device, trip, active.base, version, size)
        events: list[Event] = [arrived]
        if upload is not None and not _is_rejected(decided):
            events[0] = arrived._replace(numbers=_metrics(upload))
            events[:0] = self._reported_merges(device, active, upload)
        events += self._count(decided)
        return self._after(now, events)

    def _reported_merges(self, device: int, active: ActiveTrip, upload: Upload) -> list[Event]:
        """The merges that an accepted upload reports and that the driver has not seen."""
        unseen = {sent.version: sent for sent in active.sent if not sent.merged}
        return [
            self._merge(device, active, unseen[merge.version])._replace(numbers=dict(merge.numbers))
            for merge in upload.merges
            if merge.version in unseen
        ]

    def trip_lost(self, now: float, device: int, trip: int, reason: str, sent: int = 0) -> Effects:
        """A device will not upload. ``sent`` bytes were already on the network."""
        self.counts.bytes_up += sent
        self.server.now = now
        return self._after(now, self._count(self.server.drop_trip(device, trip, reason)))

    def _after(self, now: float, events: list[Event]) -> Effects:
        """After the end of a trip: which devices should hurry, can new trips start, is the run over?"""
        server, wake_at = self.server, None
        hurry = self._hurry(events)
        self.stall_detector.record(now, server.consumed)
        if self.trigger.on_arrival and self.trigger.devices_to_start(server):
            wake_at = self.wake(now)
        self.over |= self.rounds.trip_ended(server, self.endless)
        timer_at, cancelled = self._schedule_timer(), server.take_cancelled()
        return Effects(events, hurry=hurry, wake_at=wake_at, timer_at=timer_at, cancelled=cancelled)

    def _hurry(self, events: list[Event]) -> list[int]:
        """The devices that should hurry. They are logged."""
        hurry = self.server.take_urgent()
        for device in hurry:
            self.counts.bytes_down += CONTROL_BYTES
            events.append(Hurried(device, self.server.active_trips[device].trip))
        return hurry

    def _count(self, events: list[Event]) -> list[Event]:
        counts = self.counts
        for event in events:
            if isinstance(event, Aggregated):
                parts = event.contributions
                counts.aggregations += 1
                for part in parts:
                    counts.staleness_sum += part.staleness
                counts.staleness_count += len(parts)
            elif isinstance(event, Discarded):
                counts.discards += 1
            elif isinstance(event, Rejected):
                counts.rejected += 1
                counts.wild += "limit" in event.numbers or event.reason.endswith(NOT_FINITE)
            elif isinstance(event, Refused):
                counts.refused += 1
            elif isinstance(event, Lost):
                counts.lost += 1
        return events

    # ---- tests, summary, checkpoint

    def test(self) -> tuple[Evaluated, dict[str, Any]]:
        """The event of a test of the newest model, and the row of metrics without the scores."""
        row = {name: getattr(self.counts, name) for name in METRICS} | {"rounds": self.server.rounds}
        return Evaluated(self.server.version), row

    def facts(self, now: float) -> dict[str, Any]:
        """Entries of the summary about the course of the run."""
        counts = self.counts
        return {
            "virtual_time": now,
            "rounds": self.server.rounds,
            "diverged": self.divergence_monitor.diverged,
            "stalled": self.stall_detector.stalled_since(now, len(self.server.active_trips)),
            "versions": self.server.version,
            "trips": counts.trips,
            "requests": counts.requests,
            "merges": counts.merges,
            **({"pushes": counts.pushes} if self.server.rule.push_after else {}),
            "aggregations": counts.aggregations,
            "uploads": counts.uploads,
            "discards": counts.discards,
            "rejected": counts.rejected,
            "wild": counts.wild,
            **({"refused": counts.refused} if counts.refused else {}),
            "lost": counts.lost,
            "mean_staleness": counts.staleness_sum / counts.staleness_count if counts.staleness_count else None,
            "bytes_up": counts.bytes_up,
            "bytes_down": counts.bytes_down,
        }

    def state(self) -> saving.Tree:
        """Everything that a resumed run needs."""
        return {
            "server": self.server.state(),
            "counts": saving.dump(self.counts),
            "watch": self.divergence_monitor.state(),
            "rounds": self.rounds.state(),
            "wakes": sorted(self._wakes),
            "timers": sorted(self._timers),
            "deadline": self.deadline.state(),
            "pulse": saving.dump(self.stall_detector),
        }

    def restore(self, tree: saving.Tree) -> None:
        """The inverse of ``state``."""
        self.server.restore(tree["server"])
        saving.restore(self.counts, saving.dump(Counts()) | tree["counts"])  # older versions count less
        self.divergence_monitor.restore(tree["watch"])
        self.rounds.restore(tree["rounds"])
        self.over = self.rounds.over(self.server)
        self._wakes, self._timers = set(tree["wakes"]), set(tree.get("timers", ()))
        self.deadline.restore(tree["deadline"])
        saving.restore(self.stall_detector, tree["pulse"])


def _size(upload: object, otherwise: int) -> int:
    """The bytes of an upload if they can be determined. The upload may be any object."""
    try:
        size = upload.nbytes if isinstance(upload, Upload) else otherwise
        return size if size >= 0 else otherwise
    except (AttributeError, TypeError):
        return otherwise


def _metrics(upload: Upload) -> dict[str, Number]:
    """What the device's own training loop reports, for the log."""
    return {name: value for name, value in upload.report.items() if name.startswith(METRIC_PREFIX)}


def _is_rejected(decided: list[Event]) -> bool:
    return any(isinstance(event, Rejected) for event in decided[:1])


def next_multiple(time: float, period: float) -> float:
    """The first multiple of ``period`` strictly after ``time``, tolerant of rounding. It does not drift."""
    nearest = round(time / period)
    passed = nearest if math.isclose(time, nearest * period, rel_tol=1e-12) else math.floor(time / period)
    return (passed + 1) * period
