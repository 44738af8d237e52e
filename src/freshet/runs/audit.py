"""Replaying a log against the formulas: the first line that does not add up is named.

For every method: line numbers without gaps, time that never goes back, versions that grow by one per aggregation,
staleness that follows from the versions, trips that are triggered before they ask, merge or upload, merges that come
later than their request, and verdicts that follow an upload. For the weights, each method brings its own formulas.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from freshet.core.audit import Mismatch
from freshet.errors import RunError
from freshet.methods import find, options_for
from freshet.runs.facts import contributors
from freshet.runs.reader import Run

Event = dict[str, Any]


@dataclass
class Audit:
    """What an audit found: how much was checked, and the first problem, if any."""

    events: int = 0
    aggregations: int = 0
    merges: int = 0
    problem: str | None = None

    @property
    def passed(self) -> bool:
        return self.problem is None


@dataclass
class _Replay:
    seq: int = 0
    time: float = 0.0
    version: int = 1
    trips: dict[int, Event] = field(default_factory=dict)
    requests: dict[int, Event] = field(default_factory=dict)
    diverged: set[tuple[int, int]] = field(default_factory=set)
    arrived: Event | None = None


def audit(run: Run) -> Audit:
    """Check every line of a run's log."""
    method_table = dict(run.config().get("method", {}))
    name = method_table.pop("name", None)
    if not isinstance(name, str):
        raise RunError(f"{run.directory}/config.toml does not name a method")
    method, _ = find(name)
    options = options_for(name, method_table)
    found, replay, memory = Audit(), _Replay(), dict[Any, Any]()
    for number, event in enumerate(run.events(), 1):
        try:
            _check(replay, event)
            if not (event["kind"] == "merge" and event.get("diverged")):
                method.audit(options, event, memory)
        except Mismatch as problem:
            found.problem = f"events.jsonl, line {number} ({event.get('kind')}): {problem}"
            return found
        except (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError, AttributeError) as error:
            kind = event.get("kind")
            found.problem = f"events.jsonl, line {number} ({kind}): malformed ({type(error).__name__}: {error})"
            return found
        found.events += 1
        found.aggregations += event["kind"] == "aggregate"
        found.merges += event["kind"] == "merge"
    found.problem = _against_summary(run, found)
    return found


def _against_summary(run: Run, found: Audit) -> str | None:
    """A finished run's log holds as much as its summary says: nothing is missing at the end."""
    if not run.finished():
        return None
    summary = run.summary()
    for key, count in (("aggregations", found.aggregations), ("merges", found.merges)):
        if summary.get(key, count) != count:
            return f"events.jsonl holds {count} {key}, summary.json says {summary[key]}"
    return None


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise Mismatch(problem)


def _check(replay: _Replay, event: Event) -> None:
    replay.seq += 1
    _require(event["seq"] == replay.seq, f"seq is {event['seq']}, expected {replay.seq}")
    _require(event["time"] >= replay.time, f"time goes back from {replay.time} to {event['time']}")
    replay.time = event["time"]
    _require(event["kind"] in _CHECKS, f"{event['kind']!r} is not a known kind")
    _CHECKS[event["kind"]](replay, event)


def _trigger(replay: _Replay, event: Event) -> None:
    _require(event["version"] == replay.version, f"version is {event['version']}, expected {replay.version}")
    _require(event["device"] not in replay.trips, f"device {event['device']} is triggered while it is training")
    replay.trips[event["device"]] = event


def _request(replay: _Replay, event: Event) -> None:
    trip = _trip(replay, event)
    newer = replay.version > trip["version"]
    _require(event["fresh"] == (replay.version if newer else None), f"fresh is {event['fresh']}, not the newest model")
    replay.requests[event["device"]] = event


def _merge(replay: _Replay, event: Event) -> None:
    _trip(replay, event)
    request = replay.requests.get(event["device"])
    _require(request is not None and request["trip"] == event["trip"], "merge without a request")
    assert request is not None
    _require(event["fresh"] == request["fresh"], f"merged version {event['fresh']}, but got {request['fresh']}")
    _require(event["time"] > request["time"], "merged at the time of the request: a download takes time")
    if event.get("diverged"):
        replay.diverged.add((event["device"], event["trip"]))


def _upload(replay: _Replay, event: Event) -> None:
    trip = _trip(replay, event)
    _require(event["base"] == trip["version"], f"base is {event['base']}, but {trip['version']} was sent")
    replay.arrived = event | {"lr": trip["lr"]}
    del replay.trips[event["device"]]
    replay.requests.pop(event["device"], None)


def _lost(replay: _Replay, event: Event) -> None:
    _trip(replay, event)
    del replay.trips[event["device"]]
    replay.requests.pop(event["device"], None)


def _aggregate(replay: _Replay, event: Event) -> None:
    _require(event["version"] == replay.version, f"version is {event['version']}, expected {replay.version}")
    if "device" in event:
        _decided(replay, event)
        _require((event["device"], event["trip"]) not in replay.diverged, "a trip that diverged was aggregated")
        if "lr" in event and replay.arrived is not None:
            _require(event["lr"] == replay.arrived["lr"], f"lr is {event['lr']}, the device had {replay.arrived['lr']}")
    pairs = [(each.base, each.staleness) for each in contributors(event)]
    for base, staleness in [*pairs, (event["base"], event["staleness"])]:
        expected = None if base is None else replay.version - base + 1
        _require(expected is not None and staleness == expected, f"staleness is {staleness}, expected {expected}")
    replay.version += 1


def _decided(replay: _Replay, event: Event) -> None:
    """The verdict on an upload comes right after it arrived."""
    arrived = replay.arrived
    same = arrived is not None and (arrived["device"], arrived["trip"]) == (event["device"], event["trip"])
    _require(same, "there is no upload that this decides about")


def _urgent(replay: _Replay, event: Event) -> None:
    _trip(replay, event)


def _evaluate(replay: _Replay, event: Event) -> None:
    _require(event["version"] == replay.version, f"version is {event['version']}, expected {replay.version}")


def _slots(replay: _Replay, event: Event) -> None:
    shares = event["probabilities"]
    _require(min(shares) >= 0 and abs(sum(shares) - 1) < 1e-9, "probabilities do not add up to 1")


def _trip(replay: _Replay, event: Event) -> Event:
    trip = replay.trips.get(event["device"])
    _require(trip is not None and trip["trip"] == event["trip"], "the device has no such trip in flight")
    assert trip is not None
    return trip


_CHECKS: dict[str, Callable[[_Replay, Event], None]] = {
    "trigger": _trigger,
    "request": _request,
    "merge": _merge,
    "upload": _upload,
    "lost": _lost,
    "aggregate": _aggregate,
    "evaluate": _evaluate,
    "discard": _decided,
    "rejected": _decided,
    "urgent": _urgent,
    "slots": _slots,
}
