"""The timeline of the fleet: what each device did when, from the events of a run.

    trigger --download--> train --request--> fresh model down --merge--> train on --upload--> verdict

A trip may ask several times. A server that pushes sends fresh models unasked: the device trains meanwhile, and merges
them at the start of a later epoch, or never.

The log has the times of trigger, request, push, merge and upload. The start of training and of sending, and the arrival
of a pushed model, follow from the fleet in world.json. They are used only if they explain the times in the log, which
they may not on a real network. Otherwise these times stay unknown.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from freshet.core.messages import CONTROL_BYTES
from freshet.report.reading import Record, RunData
from freshet.runs.records import contributors, integer, number
from freshet.runs.world import RunWorld

#: How a trip ended. "waiting": uploaded, not yet aggregated; "flying": still in flight at the end.
OUTCOMES = ("aggregated", "waiting", "discarded", "lost", "rejected", "flying")
#: A timeline shows at most this many trips, the last ones. One that asks or is pushed to k times counts k times.
MAX_TRIPS = 20_000
_TRIPS_CHECKED = 50
#: For larger fleets the page does not list the training time of each device.
_MAX_DEVICES = 10_000


@dataclass(slots=True)
class FreshRecord:
    """A request and its answer, or a push. An unknown time is None."""

    #: When the server answered or pushed, and with which version (None: there was no newer one).
    sent: float
    version: int | None
    pushed: bool = False
    #: The epoch before which the device asks; for a push, before which it merges.
    slot: int | None = None
    slot_by: str | None = None
    asked: float | None = None
    arrived: float | None = None
    #: A merge that the device reports with its upload counts from ``sent`` on.
    merged: float | None = None
    beta: float | None = None


@dataclass(slots=True)
class TripRecord:
    """One local training of one device, as the log shows it. An unknown time is None."""

    device: int
    number: int
    start: float
    base: int | None
    epochs: int | None
    train: float | None = None
    #: In the order in which the server sent them.
    fresh: list[FreshRecord] = field(default_factory=list)
    sent: float | None = None
    end: float | None = None
    outcome: str = "flying"
    reason: str | None = None
    alpha: float | None = None
    staleness: int | None = None
    urgent: float | None = None


@dataclass
class _TripLog:
    """The trips so far: all, those in flight by device, and those that wait for a verdict by device."""

    trips: list[TripRecord] = field(default_factory=list)
    open: dict[int, TripRecord] = field(default_factory=dict)
    waiting: dict[int, deque[TripRecord]] = field(default_factory=dict)


def trips_of(run: RunData) -> list[TripRecord]:
    """All trips, in the order in which they began."""
    log = _TripLog()
    for event in run.events.of(*_HANDLERS):
        handler = _HANDLERS.get(str(event.get("kind")))
        if handler is not None:
            handler(log, event)
    if run.world is not None and _explains(run.world, log.trips, run):
        for trip in log.trips[-MAX_TRIPS:]:
            _add_legs(trip, run.world)
    return log.trips


# ---- events


def _on_trigger(log: _TripLog, event: Record) -> None:
    device = integer(event.get("device"))
    if device is None or device < 0:
        return
    log.trips.append(
        TripRecord(
            device,
            integer(event.get("trip")) or 0,
            float(event["time"]),
            integer(event.get("version")),
            integer(event.get("epochs")),
        )
    )
    log.open[device] = log.trips[-1]


def _on_request(log: _TripLog, event: Record) -> None:
    trip = _open_trip(log, event)
    if trip is not None:
        slot, slot_by = integer(event.get("slot")), _text(event.get("slot_by"))
        version = integer(event.get("fresh"))
        trip.fresh.append(FreshRecord(float(event["time"]), version, slot=slot, slot_by=slot_by))


def _on_push(log: _TripLog, event: Record) -> None:
    trip, version = _open_trip(log, event), integer(event.get("fresh"))
    if trip is not None and version is not None:
        trip.fresh.append(FreshRecord(float(event["time"]), version, pushed=True))


def _on_merge(log: _TripLog, event: Record) -> None:
    """Merge the model that was sent as this version."""
    trip, version = _open_trip(log, event), integer(event.get("fresh"))
    if trip is None or version is None:
        return
    for fresh in trip.fresh:
        if fresh.version == version and fresh.merged is None:
            fresh.merged, fresh.beta = float(event["time"]), number(event.get("beta"))
            if fresh.pushed:
                fresh.slot = integer(event.get("slot"))
            return


def _on_hurry(log: _TripLog, event: Record) -> None:
    trip = _open_trip(log, event)
    if trip is not None:
        trip.urgent = float(event["time"])


def _on_upload(log: _TripLog, event: Record) -> None:
    trip = _open_trip(log, event)
    if trip is not None:
        trip.end, trip.outcome = float(event["time"]), "waiting"
        for fresh in trip.fresh:
            if fresh.merged == trip.end:  # reported with the upload, on a real network
                fresh.merged = fresh.sent
        del log.open[trip.device]
        log.waiting.setdefault(trip.device, deque()).append(trip)


def _on_lost(log: _TripLog, event: Record) -> None:
    trip = _open_trip(log, event)
    if trip is not None:
        trip.end, trip.outcome, trip.reason = float(event["time"]), "lost", _text(event.get("reason"))
        del log.open[trip.device]


def _on_refused(log: _TripLog, event: Record) -> None:
    """Discard or reject the last upload of this device."""
    queue = log.waiting.get(integer(event.get("device")) or 0)
    if not queue:
        return
    trip = queue.pop()
    trip.outcome = "discarded" if event["kind"] == "discard" else "rejected"
    trip.reason, trip.staleness = _text(event.get("reason")), integer(event.get("staleness"))


def _on_aggregate(log: _TripLog, event: Record) -> None:
    for each in contributors(event):
        queue = None if each.device is None else log.waiting.get(each.device)
        if queue:
            trip = queue.popleft()
            trip.outcome, trip.staleness, trip.alpha = "aggregated", each.staleness, each.weight


_HANDLERS = {
    "trigger": _on_trigger,
    "request": _on_request,
    "push": _on_push,
    "merge": _on_merge,
    "hurry": _on_hurry,
    "upload": _on_upload,
    "lost": _on_lost,
    "discard": _on_refused,
    "rejected": _on_refused,
    "aggregate": _on_aggregate,
}


def _open_trip(log: _TripLog, event: Record) -> TripRecord | None:
    """The trip in flight that an event belongs to."""
    device = integer(event.get("device"))
    trip = log.open.get(device) if device is not None else None
    named = integer(event.get("trip"))
    return trip if trip is not None and named in (None, trip.number) else None


def _text(value: Any) -> str | None:
    return value[:200] if isinstance(value, str) else None


# ---- legs that follow from the fleet


def _explains(world: RunWorld, trips: list[TripRecord], run: RunData) -> bool:
    """Whether the fleet in world.json explains the times in the log, checked on the first complete trips."""
    complete = [trip for trip in trips if trip.outcome not in ("lost", "flying") and trip.urgent is None]
    epochs = integer(run.config.get("training", {}).get("epochs"))
    if epochs is None or epochs < 1:
        return False
    for trip in complete[:_TRIPS_CHECKED]:
        if trip.device >= len(world) or trip.end is None or trip.epochs is None:
            return False
        expected = world.seconds_to_first_step(trip.device) + world.up(trip.device, world.model_bytes)
        expected += trip.epochs * world.train_seconds[trip.device] / epochs
        for fresh in trip.fresh:
            if not fresh.pushed:  # the device does not train while it waits for what it asked for
                expected += world.up(trip.device, CONTROL_BYTES) + world.down(trip.device, _reply_bytes(fresh, world))
        if abs(trip.end - trip.start - expected) > 1e-3 * expected + 1e-6:
            return False
    return bool(complete)


def _reply_bytes(fresh: FreshRecord, world: RunWorld) -> int:
    return CONTROL_BYTES if fresh.version is None else world.model_bytes


def _add_legs(trip: TripRecord, world: RunWorld) -> None:
    if trip.device >= len(world):
        return
    trip.train = trip.start + world.seconds_to_first_step(trip.device)
    for fresh in trip.fresh:
        fresh.arrived = fresh.sent + world.down(trip.device, _reply_bytes(fresh, world))
        if not fresh.pushed:
            fresh.asked = max(trip.train, fresh.sent - world.up(trip.device, CONTROL_BYTES))
    if trip.end is not None and not (trip.outcome == "lost" and trip.reason != "upload lost"):
        trip.sent = trip.end - world.up(trip.device, world.model_bytes)
    if trip.end is not None and trip.train > trip.end:
        trip.train = None


# ---- for the page


def count_entries(trips: Sequence[TripRecord]) -> int:
    """What trips take up on a page: one entry each, or one for each request and push."""
    return sum(max(1, len(trip.fresh)) for trip in trips)


def _newest(trips: list[TripRecord], limit: int) -> list[TripRecord]:
    """The last trips, with at most ``limit`` entries; at least one trip."""
    first, left = len(trips), limit
    while first and (left := left - max(1, len(trips[first - 1].fresh))) >= 0:
        first -= 1
    return trips[min(first, len(trips) - 1) :]


def timeline(run: RunData, trips: list[TripRecord], limit: int = MAX_TRIPS) -> Record:
    """The last trips as columns for the page, rounded, with reasons as indices."""
    shown = _newest(trips, limit)
    reasons = sorted({trip.reason for trip in shown if trip.reason})
    world = run.world
    known = world is not None and run.devices <= len(world) <= _MAX_DEVICES
    seconds = [round(value, 2) for value in world.train_seconds] if world is not None and known else None
    columns = _columns(shown, ("start", "train", "sent", "end", "urgent"), ("device", "number", "base", "staleness"))
    columns["alpha"] = [_significant(trip.alpha) for trip in shown]
    columns["outcome"] = [OUTCOMES.index(trip.outcome) for trip in shown]
    columns["reason"] = [reasons.index(trip.reason) if trip.reason else None for trip in shown]
    return {
        "devices": run.devices,
        "end": _round(run.end),
        "first": _round(shown[0].start) if len(shown) < len(trips) else 0,
        "left_out": len(trips) - len(shown),
        "legs": any(trip.train is not None for trip in shown),
        "seconds": seconds,
        "outcomes": list(OUTCOMES),
        "reasons": reasons,
        "trips": columns,
        "fresh": _fresh_columns(shown),
    }


def _fresh_columns(shown: Sequence[TripRecord]) -> Record:
    """The requests and pushes of all trips, each with the place of its trip."""
    entries = [(place, fresh) for place, trip in enumerate(shown) for fresh in trip.fresh]
    found = [fresh for _, fresh in entries]
    columns = _columns(found, ("asked", "sent", "arrived", "merged"), ("version", "slot", "pushed"))
    columns["beta"] = [_significant(fresh.beta) for fresh in found]
    return columns | {"trip": [place for place, _ in entries]}


def _columns(rows: Sequence[Any], times: Sequence[str], values: Sequence[str]) -> Record:
    columns: Record = {key: [_round(getattr(row, key)) for row in rows] for key in times}
    return columns | {key: [getattr(row, key) for row in rows] for key in values}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _significant(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
