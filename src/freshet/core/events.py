"""What happens in a run, one class per kind of event. The keys of events.jsonl are spelled only here.

``record`` turns an event into the dict that is logged. ``parse`` turns a logged dict into an event and checks it, since
a log is not trusted. In a log, the ``numbers`` that a method or test adds stand among the other keys. A key with the
default None is left out if it is None.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

Record = dict[str, Any]
Numbers = Mapping[str, Any]
NO_NUMBERS: Numbers = MappingProxyType({})


class MalformedEvent(ValueError):
    """A logged event lacks a key or has a wrong value. The text says which."""


class Contribution(NamedTuple):
    """One device's part in an aggregation: the version it started from, its staleness, its weight in the new model."""

    device: int
    base: int
    staleness: int
    weight: float


class Triggered(NamedTuple):
    """The server has sent its model to a device."""

    device: int
    trip: int
    version: int
    epochs: int
    lr: float
    round: int | None = None


class Requested(NamedTuple):
    """A device in mid-training has asked. ``fresh`` is the version that it gets, None if there is no newer one."""

    device: int
    trip: int
    base: int
    version: int
    slot: int
    slot_by: str
    fresh: int | None


class Pushed(NamedTuple):
    """The server has sent its model, ``fresh``, to a device in mid-training that did not ask."""

    device: int
    trip: int
    base: int
    fresh: int


class Merged(NamedTuple):
    """A device has merged the fresh model, which is ``k`` versions newer than its base (synchronous methods)."""

    device: int
    trip: int
    base: int
    fresh: int
    slot: int
    round: int | None = None
    k: int | None = None
    numbers: Numbers = NO_NUMBERS


class Hurried(NamedTuple):
    """The server has asked this device to upload at the end of its epoch."""

    device: int
    trip: int


class Uploaded(NamedTuple):
    """A trained model has arrived. ``numbers`` holds the metrics of the device's own training loop, if it has one."""

    device: int
    trip: int
    base: int
    version: int
    bytes: int
    numbers: Numbers = NO_NUMBERS


class Aggregated(NamedTuple):
    """The global model has changed. ``version`` is the previous one. Without a device, a round or buffer was due."""

    version: int
    update_norm: float
    contributions: tuple[Contribution, ...]
    device: int | None = None
    trip: int | None = None
    round: int | None = None
    numbers: Numbers = NO_NUMBERS


class Discarded(NamedTuple):
    """The method's rule has dropped an upload."""

    device: int
    trip: int
    reason: str
    version: int
    base: int
    staleness: int


class Rejected(NamedTuple):
    """Something failed the checks or would have ruined the model. ``numbers`` holds the numbers behind it, if any."""

    reason: str
    device: int | None = None
    trip: int | None = None
    numbers: Numbers = NO_NUMBERS


class Refused(NamedTuple):
    """A request for the fresh model was not answered: wrong token, no such trip, too often, or without a slot."""

    reason: str


class Lost(NamedTuple):
    """A device in flight will not upload."""

    device: int
    trip: int
    reason: str


class Evaluated(NamedTuple):
    """The global model was tested."""

    version: int
    numbers: Numbers = NO_NUMBERS


class DevicesEvaluated(NamedTuple):
    """The global model was tested on every device. The numbers are lists with one entry per device."""

    version: int
    numbers: Numbers = NO_NUMBERS


class Noted(NamedTuple):
    """A remark of the method or of a defence."""

    about: str
    numbers: Numbers = NO_NUMBERS


Event: TypeAlias = (
    Triggered
    | Requested
    | Pushed
    | Merged
    | Hurried
    | Uploaded
    | Aggregated
    | Discarded
    | Rejected
    | Refused
    | Lost
    | Evaluated
    | DevicesEvaluated
    | Noted
)
KINDS: dict[str, type[Event]] = {
    "trigger": Triggered,
    "request": Requested,
    "push": Pushed,
    "merge": Merged,
    "hurry": Hurried,
    "upload": Uploaded,
    "aggregate": Aggregated,
    "discard": Discarded,
    "rejected": Rejected,
    "refused": Refused,
    "lost": Lost,
    "evaluate": Evaluated,
    "devices": DevicesEvaluated,
    "note": Noted,
}
KIND_OF: dict[type[Event], str] = {kind: name for name, kind in KINDS.items()}


#: How an event is logged: its kind, its fields, the fields left out if None, and whether it has ``numbers``.
_SHAPES: dict[type[Event], tuple[str, tuple[str, ...], tuple[str, ...], bool]] = {
    event: (kind, event._fields, tuple(set(event._field_defaults) - {"numbers"}), "numbers" in event._fields)
    for kind, event in KINDS.items()
}
#: Keys that the log adds to every event.
_STAMP = ("seq", "time", "kind")
#: Reserved keys of each kind, which ``numbers`` may not use. The version is reserved in all.
OWN_KEYS: dict[type[Event], frozenset[str]] = {
    kind: frozenset((*_STAMP, "version", *kind._fields)) - {"numbers"} for kind in KIND_OF
}


def record(event: Event, **out: Any) -> Record:
    """The logged form of an event, with the keys that the log adds."""
    kind, fields, optional, numbered = _SHAPES[type(event)]
    out["kind"] = kind
    out.update(zip(fields, event, strict=True))
    for name in optional:
        if out[name] is None:
            del out[name]
    if numbered:
        out.update(out.pop("numbers"))
    if kind == "aggregate":
        out["contributions"] = [dict(zip(Contribution._fields, part, strict=True)) for part in out["contributions"]]
    return out


def parse(logged: Mapping[str, Any]) -> Event | None:
    """The event in a logged dict, None for an unknown kind. Raises ``MalformedEvent``."""
    kind = logged.get("kind")
    if not isinstance(kind, str):
        raise MalformedEvent("it has no kind")
    found = KINDS.get(kind)
    if found is None:
        return None
    fields, own, numbered = _PARSING[found]
    values = []
    for name, check, otherwise in fields:
        value = logged.get(name, _ABSENT)
        if value is not _ABSENT:
            value = check(name, value)
        elif otherwise is _ABSENT:
            raise MalformedEvent(f"{name} is missing")
        else:
            value = otherwise
        values.append(value)
    if numbered:
        values.append({key: value for key, value in logged.items() if key not in own})
    return found(*values)


def _integer(name: str, value: Any) -> Any:
    if type(value) is not int:
        raise MalformedEvent(f"{name} is {value!r:.80}, not an integer")
    return value


def _number(name: str, value: Any) -> Any:
    if type(value) not in (int, float):
        raise MalformedEvent(f"{name} is {value!r:.80}, not a number")
    return value


def _string(name: str, value: Any) -> Any:
    if type(value) is not str:
        raise MalformedEvent(f"{name} is {value!r:.80}, not a string")
    return value


def _optional_integer(name: str, value: Any) -> Any:
    return None if value is None else _integer(name, value)


def _contributions(name: str, value: Any) -> Any:
    if not isinstance(value, list) or not all(isinstance(part, Mapping) for part in value):
        raise MalformedEvent(f"{name} is not a list of dicts")
    checks = _checks_of(Contribution)
    try:
        return tuple(Contribution(**{key: checks[key](key, part[key]) for key in checks}) for part in value)
    except KeyError as missing:
        raise MalformedEvent(f"{name}: {missing.args[0]} is missing") from None


_BY_TYPE: dict[Any, Callable[[str, Any], Any]] = {
    int: _integer,
    float: _number,
    str: _string,
    int | None: _optional_integer,
    tuple[Contribution, ...]: _contributions,
}


def _checks_of(kind: Any) -> dict[str, Callable[[str, Any], Any]]:
    return {name: _BY_TYPE[hint] for name, hint in kind.__annotations__.items() if name != "numbers"}


_ABSENT = object()


def _parsing(kind: type[Event]) -> tuple[list[tuple[str, Callable[[str, Any], Any], Any]], frozenset[str], bool]:
    """How to parse a kind: its fields in order with check and default, its own keys, and whether it has numbers."""
    fields = [(name, check, kind._field_defaults.get(name, _ABSENT)) for name, check in _checks_of(kind).items()]
    names = [name for name, _, _ in fields]
    numbered = "numbers" in kind._fields
    assert list(kind._fields) == names + ["numbers"] * numbered
    return fields, frozenset((*_STAMP, *names)), numbered


_PARSING = {kind: _parsing(kind) for kind in KIND_OF}
