"""Replay a log against the formulas and name the first line that does not add up.

For every method the audit checks that line numbers have no gaps, time never goes back, versions grow by one per
aggregation, staleness follows from the versions, a trip is triggered before it requests, merges or uploads, a merge
comes later than its request (or, over an unlimited link, no sooner), and each verdict follows an upload. A learning
rate that follows time is recomputed, and so is the choice of the layers of a fresh model. Each method brings the
formulas for its weights.
"""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from freshet.core import defence, events
from freshet.core.compression import LAYERS_NOTE, audit_layers
from freshet.core.events import (
    Aggregated,
    DevicesEvaluated,
    Discarded,
    Evaluated,
    Event,
    Hurried,
    Lost,
    MalformedEvent,
    Merged,
    Noted,
    Pushed,
    Refused,
    Rejected,
    Requested,
    Triggered,
    Uploaded,
)
from freshet.core.method import Method, Mismatch, expect, overrides
from freshet.core.server import NO_TRIP
from freshet.errors import ConfigError, RunError
from freshet.methods import builtin_about, class_and_preset, method_options
from freshet.methods.loading import CUSTOM
from freshet.privacy import CLIP_NOTE, NOISE_NOTE, PrivacyOptions, SumAudit
from freshet.runs.reader import OnBytes, RunDirectory, ignore_bytes, same_class


@dataclass
class Audit:
    """The result of an audit: how much was checked, and the first problem, if any."""

    #: Why the weights were not checked: the method has no formulas, or is not imported. Empty if they were checked.
    unaudited: str = ""
    events: int = 0
    aggregations: int = 0
    merges: int = 0
    #: Number of skipped events by kind, for kinds that this version does not know.
    unknown: Counter[str] = field(default_factory=Counter)
    problem: str | None = None

    @property
    def audited(self) -> bool:
        """Whether the weights were checked."""
        return not self.unaudited

    @property
    def passed(self) -> bool:
        return self.problem is None


class FreshSent(NamedTuple):
    """A fresh model on its way to a device: when it was sent, and for which slot (None: pushed)."""

    time: float
    slot: int | None


@dataclass
class _Replay:
    """What the lines so far say about the run."""

    #: Devices to which a download takes no time.
    instant: frozenset[int] = frozenset()
    #: The learning rate of a trip by the second of its start; None if it does not follow time.
    learning_rate: Callable[[float], float] | None = None
    seq: int = 0
    time: float = 0.0
    version: int = 1
    trips: dict[int, Triggered] = field(default_factory=dict)
    #: Devices in flight that have asked or were sent a model unasked, and the models that they got, by version.
    requested: set[int] = field(default_factory=set)
    fresh_sent: dict[int, dict[int, FreshSent]] = field(default_factory=dict)
    diverged: set[tuple[int, int]] = field(default_factory=set)
    #: Uploads by device and base that have no verdict yet.
    uploads: Counter[tuple[int, int]] = field(default_factory=Counter)
    #: What the defence against poisoned updates measured of the last uploads.
    judged: defence.RecentUploads = field(default_factory=defence.RecentUploads)
    #: If fresh models are sent in layers: the budget of bytes in the configuration.
    budget: int | None = None
    #: The layers of the model, and the devices and fresh models whose layers are logged.
    sizes: list[int] | None = None
    layers_known: set[tuple[int, int]] = field(default_factory=set)
    #: Clipping and noise by the server; None if the run has none.
    sums: SumAudit | None = None
    #: The last logged upload, and the learning rate of its trip.
    arrived: tuple[Uploaded, float] | None = None


def audit(run: RunDirectory, method: str | None = None, on_bytes: OnBytes = ignore_bytes) -> Audit:
    """Check every line of a run's log. A method that is not built in is imported only if the user names it here."""
    replay = _Replay(_instant_devices(run), _rate_by_time(run), budget=_layers_budget(run), sums=_sum_audit(run))
    memory = dict[Any, Any]()
    found, formulas = _formulas(run, method)
    for number, line in enumerate(run.events(on_bytes), 1):
        try:
            event = _check_line(replay, line)
            if event is None:
                found.unknown[str(line["kind"])[:40]] += 1
                continue
            if not (isinstance(event, Merged) and event.numbers.get("diverged")):
                formulas(event, replay.time, memory)
        except Mismatch as problem:
            found.problem = f"events.jsonl, line {number} ({line.get('kind')}): {problem}"
            return found
        except (
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
            ZeroDivisionError,
            AttributeError,
            AssertionError,
        ) as error:
            what = str(error) if isinstance(error, MalformedEvent) else f"{type(error).__name__}: {error}"
            found.problem = f"events.jsonl, line {number} ({line.get('kind')}): malformed ({what})"
            return found
        found.events += 1
        found.aggregations += isinstance(event, Aggregated)
        found.merges += isinstance(event, Merged)
    found.problem = _check_summary(run, found) or _check_spent(run, replay.sums)
    return found


def _formulas(run: RunDirectory, named: str | None) -> tuple[Audit, Callable[[Event, float, dict[Any, Any]], None]]:
    """An audit about to begin, and the method's check of an event."""
    name = run.method()
    if builtin_about(name) is None and not (named and same_class(name, named)):
        return Audit(_why_unaudited(name, named)), lambda event, time, memory: None
    table = dict(run.trusted_config(named)["method"])
    name = table.pop("name")
    method, options = class_and_preset(name)[0], method_options(name, table)
    why = "" if overrides(method, Method, "audit") else "its method has no audit()"
    rule = method.rule(options)

    def check(event: Event, time: float, memory: dict[Any, Any]) -> None:
        if isinstance(event, Merged):
            rule.audit_merge(event)
        method.audit(options, event, time, memory)

    return Audit(why), check


def _instant_devices(run: RunDirectory) -> frozenset[int]:
    """Devices with no downlink limit and no downlink latency, according to world.json."""
    with suppress(RunError):  # a damaged world.json is not a fault of the log
        world = run.world()
        if world is not None and not world.down_latency:
            return frozenset(device for device, rate in enumerate(world.down_rate) if rate == math.inf)
    return frozenset()


def _rate_by_time(run: RunDirectory) -> Callable[[float], float] | None:
    """The learning rate by time; None if the schedule counts rounds or is a function from Python."""
    table = run.config().get("training", {})
    if table.get("schedule_by") != "time" or table.get("schedule") == CUSTOM:
        return None
    from pydantic import ValidationError

    from freshet.training.optimisers import make_schedule
    from freshet.training.options import TrainingOptions

    try:
        options = TrainingOptions(**table)
        schedule = make_schedule(options, None, options.schedule_rounds or 1)
    except (ConfigError, ValidationError):
        raise RunError(f"{run.directory} cannot be audited: [training] in its config.toml is not valid") from None
    return lambda time: schedule(time / options.schedule_seconds)


def _layers_budget(run: RunDirectory) -> int | None:
    """The budget of a fresh model's layers; None if fresh models are not sent in layers."""
    links = run.config().get("links", {})
    budget = links.get("budget", 0)
    if not isinstance(budget, int):
        raise RunError(f"{run.directory} cannot be audited: [links] in its config.toml is not valid")
    return budget if links.get("fresh") == "layers" else None


def _sum_audit(run: RunDirectory) -> SumAudit | None:
    """What checks the server's clipping and noise; None if it adds none."""
    from pydantic import ValidationError

    try:
        options = PrivacyOptions(**run.config().get("privacy", {}))
    except (TypeError, ValidationError):
        raise RunError(f"{run.directory} cannot be audited: [privacy] in its config.toml is not valid") from None
    return SumAudit(options) if options.on_server else None


def _check_spent(run: RunDirectory, sums: SumAudit | None) -> str | None:
    """Check that the summary of a finished run counts every noised sum of the log for every device."""
    if sums is None or not run.finished():
        return None
    stated = run.summary().get("privacy", {}).get("spent", {})
    found = {str(device): cost for device, cost in sums.spent.items()}
    wrong = [name for name in stated.keys() | found.keys() if not _is_close(stated.get(name), found.get(name))]
    return f"summary.json has another cost in privacy for device {min(wrong)} than the log" if wrong else None


def _is_close(stated: object, found: float | None) -> bool:
    return isinstance(stated, int | float) and found is not None and math.isclose(stated, found, rel_tol=1e-9)


def _why_unaudited(name: str, named: str | None) -> str:
    """Why a run of a method that is not built in is not audited: the user named no method, or another one."""
    if ":" not in name:
        return f"this version of Freshet has no method {name}; use one that has"
    if named is None:
        return f"{name} is not built in; name it with --method"
    module, _, kind = name.rpartition(":")
    wanted = f"MODULE:{kind}" if module == CUSTOM else name
    return f"its method is {name}, not the given --method {named}; give --method {wanted}"


def _check_summary(run: RunDirectory, found: Audit) -> str | None:
    """Check that the log of a finished run holds as much as its summary says."""
    if not run.finished():
        return None
    summary = run.summary()
    for key, count in (("aggregations", found.aggregations), ("merges", found.merges)):
        if summary.get(key, count) != count:
            return f"events.jsonl holds {count} {key}, summary.json says {summary[key]}"
    return None


def _check_line(replay: _Replay, line: dict[str, Any]) -> Event | None:
    """The event of a line, checked against those before it; None if its kind is not known."""
    replay.seq += 1
    if line["seq"] != replay.seq:
        raise Mismatch(f"seq is {line['seq']}, expected {replay.seq}")
    if not line["time"] >= replay.time:
        raise Mismatch(f"time goes back from {replay.time} to {line['time']}")
    replay.time = line["time"]
    event = events.parse(line)
    if event is not None:
        _CHECKS_BY_EVENT[type(event)](replay, event)
    return event


def _check_trigger(replay: _Replay, event: Triggered) -> None:
    if event.version != replay.version:
        raise Mismatch(f"version is {event.version}, expected {replay.version}")
    if event.device in replay.trips:
        raise Mismatch(f"device {event.device} is triggered while it is training")
    if replay.learning_rate is not None:
        expect("lr", event.lr, replay.learning_rate(replay.time))
    replay.trips[event.device] = event


def _check_request(replay: _Replay, event: Requested) -> None:
    trip, sent = _trip_in_flight(replay, event), replay.fresh_sent.setdefault(event.device, {})
    held = max(sent, default=trip.version)
    newer = replay.version if replay.version > held else None
    before: list[int | None] = [version for version, each in sent.items() if each.slot == event.slot]
    allowed = before or [newer, *([held] if sent else [])]  # a repeated request, or one too many, gets the same answer
    if event.fresh not in allowed:
        raise Mismatch(f"fresh is {event.fresh}, not the newest model")
    replay.requested.add(event.device)
    if event.fresh is not None:
        sent.setdefault(event.fresh, FreshSent(replay.time, event.slot))


def _check_push(replay: _Replay, event: Pushed) -> None:
    trip, sent = _trip_in_flight(replay, event), replay.fresh_sent.setdefault(event.device, {})
    if event.fresh != replay.version or event.fresh <= max(sent, default=trip.version):
        raise Mismatch(f"fresh is {event.fresh}, not the newest model")
    replay.requested.add(event.device)
    sent[event.fresh] = FreshSent(replay.time, None)


def _check_merge(replay: _Replay, event: Merged) -> None:
    _trip_in_flight(replay, event)
    if event.device not in replay.requested:
        raise Mismatch("merge without a request")
    sent = replay.fresh_sent[event.device].get(event.fresh)
    if sent is None:
        got = ", ".join(map(str, replay.fresh_sent[event.device])) or "None"
        raise Mismatch(f"merged version {event.fresh}, but got {got}")
    if not (replay.time > sent.time or event.device in replay.instant):
        raise Mismatch("merged at the time of the request: a download takes time")
    if replay.budget is not None and (event.device, event.fresh) not in replay.layers_known:
        raise Mismatch(f"no line says which layers of version {event.fresh} were sent")
    if event.numbers.get("diverged"):
        replay.diverged.add((event.device, event.trip))


def _check_upload(replay: _Replay, event: Uploaded) -> None:
    trip = _trip_in_flight(replay, event)
    if event.base != trip.version:
        raise Mismatch(f"base is {event.base}, but {trip.version} was sent")
    replay.arrived = (event, trip.lr)
    replay.uploads[event.device, event.base] += 1
    _end_trip(replay, event.device)


def _check_lost(replay: _Replay, event: Lost) -> None:
    _trip_in_flight(replay, event)
    _end_trip(replay, event.device)


def _end_trip(replay: _Replay, device: int) -> None:
    del replay.trips[device]
    replay.requested.discard(device)
    versions = replay.fresh_sent.pop(device, {})
    replay.layers_known -= {(device, version) for version in versions}


def _check_aggregate(replay: _Replay, event: Aggregated) -> None:
    if event.version != replay.version:
        raise Mismatch(f"version is {event.version}, expected {replay.version}")
    if event.device is not None and event.trip is not None:
        lr = _check_decides_arrival(replay, event)
        if (event.device, event.trip) in replay.diverged:
            raise Mismatch("a trip that diverged was aggregated")
        logged = event.numbers.get("lr", lr)
        if logged != lr:
            raise Mismatch(f"lr is {logged}, the device had {lr}")
    for part in event.contributions:
        expected = replay.version - part.base + 1
        if part.staleness != expected:
            raise Mismatch(f"staleness is {part.staleness}, expected {expected}")
        _consume_upload(replay, part.device, part.base)
    if replay.sums is not None:
        replay.sums.expect_note(event.version, event.contributions)
    replay.version += 1


def _check_decides_arrival(replay: _Replay, event: Aggregated | Discarded | Rejected) -> float:
    """Check that the verdict is on the upload that just arrived; returns the learning rate of its trip."""
    arrived, lr = replay.arrived or (None, 0.0)
    same = arrived is not None and (arrived.device, arrived.trip) == (event.device, event.trip)
    if not same:
        raise Mismatch("it does not follow the upload that it decides about")
    assert arrived is not None
    if not isinstance(event, Aggregated):
        _consume_upload(replay, arrived.device, arrived.base)
    return lr


def _consume_upload(replay: _Replay, device: int, base: int) -> None:
    """Check that an upload is aggregated, discarded or rejected only once."""
    left = replay.uploads.pop((device, base), 0) - 1
    if left < 0:
        raise Mismatch(f"device {device} has not uploaded a model trained from version {base}")
    if left:
        replay.uploads[device, base] = left


def _check_discard(replay: _Replay, event: Discarded) -> None:
    _check_decides_arrival(replay, event)
    expected = replay.version - event.base + 1
    if event.staleness != expected:
        raise Mismatch(f"staleness is {event.staleness}, expected {expected}")


def _check_rejected(replay: _Replay, event: Rejected) -> None:
    """Check a verdict on an upload. Anybody may send one that belongs to no trip, so that is accepted."""
    if event.device is None or (event.reason == NO_TRIP and not _in_flight(replay, event)):
        return
    _check_decides_arrival(replay, event)
    length, limit = event.numbers.get("length"), event.numbers.get("limit")
    if length is not None and limit is not None and not length > limit:
        raise Mismatch(f"its length {length} is within the limit {limit}")


def _check_refused(replay: _Replay, event: Refused) -> None:
    """Anybody may ask, and a refused request changes nothing."""


def _in_flight(replay: _Replay, event: Rejected) -> bool:
    trip = None if event.device is None else replay.trips.get(event.device)
    return trip is not None and trip.trip == event.trip


def _check_hurry(replay: _Replay, event: Hurried) -> None:
    _trip_in_flight(replay, event)


def _check_evaluate(replay: _Replay, event: Evaluated) -> None:
    if event.version != replay.version:
        raise Mismatch(f"version is {event.version}, expected {replay.version}")


def _check_devices(replay: _Replay, event: DevicesEvaluated) -> None:
    if event.version != replay.version:
        raise Mismatch(f"version is {event.version}, expected {replay.version}")
    lengths = {len(scores) for scores in event.numbers.values()}
    if len(lengths) != 1:
        raise Mismatch("its lists differ in length; each needs one entry per device")


def _check_note(replay: _Replay, event: Noted) -> None:
    if event.about == "slots":
        shares = event.numbers["probabilities"]
        if not (min(shares) >= 0 and abs(sum(shares) - 1) < 1e-9):
            raise Mismatch("probabilities do not add up to 1")
    elif event.about == defence.NOTE_ABOUT:
        defence.audit_note(event, replay.judged)
    elif event.about == LAYERS_NOTE:
        _check_layers(replay, event)
    elif replay.sums is not None and event.about == CLIP_NOTE:
        replay.sums.check_clip(event.numbers)
    elif replay.sums is not None and event.about == NOISE_NOTE:
        replay.sums.check_noise(event.numbers)


def _check_layers(replay: _Replay, event: Noted) -> None:
    device, fresh, sizes = event.numbers["device"], event.numbers["fresh"], event.numbers["sizes"]
    if replay.budget is None:
        raise Mismatch("layers are sent, but links.fresh does not say so")
    if fresh not in replay.fresh_sent.get(device, {}):
        raise Mismatch(f"device {device} was not sent version {fresh}")
    replay.sizes = replay.sizes or sizes
    if sizes != replay.sizes:
        raise Mismatch(f"the layers have {sizes} entries, before they had {replay.sizes}")
    audit_layers(event.numbers, replay.budget)
    replay.layers_known.add((device, fresh))


def _trip_in_flight(replay: _Replay, event: Requested | Pushed | Merged | Uploaded | Lost | Hurried) -> Triggered:
    trip = replay.trips.get(event.device)
    if trip is None or trip.trip != event.trip:
        raise Mismatch("the device has no such trip in flight")
    return trip


_CHECKS_BY_EVENT: dict[type[Event], Callable[[_Replay, Any], None]] = {
    Triggered: _check_trigger,
    Requested: _check_request,
    Merged: _check_merge,
    Uploaded: _check_upload,
    Lost: _check_lost,
    Aggregated: _check_aggregate,
    Evaluated: _check_evaluate,
    DevicesEvaluated: _check_devices,
    Discarded: _check_discard,
    Rejected: _check_rejected,
    Refused: _check_refused,
    Hurried: _check_hurry,
    Pushed: _check_push,
    Noted: _check_note,
}
