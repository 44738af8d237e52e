"""Converts the core's messages to Flower records and back: a model (its weights, or the arrays of a compressed one),
named vectors, a few scalars, nothing else.

Also converts trees of plain values and arrays to bytes: safetensors with a JSON header entry. Everything that is read
came over a network and is checked. Arrays are checked before any of their bytes is interpreted.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet._version import __version__
from freshet.core.messages import NO_VECTORS, UNREAD, Assignment, Fresh, Merge, Number, Packed, Slot, Upload
from freshet.core.vectors import Vector
from freshet.errors import RunError
from freshet.flower import NEEDS_FLOWER
from freshet.runs.checkpoint import StoredArray, Tree, contents, copy_arrays, pack, serialise, unpack

_NOTE = "tree"


class MalformedMessage(ValueError):
    """Bytes or records that cannot be read. The text says why."""


def to_bytes(tree: Tree) -> bytes:
    """Serialise a tree."""
    plain, arrays = pack(tree)
    return b"".join(bytes(piece) for piece in serialise(arrays, {_NOTE: json.dumps(plain)}))


def from_bytes(data: bytes) -> Tree:
    """The inverse of ``to_bytes``. Raises ``MalformedMessage``."""
    try:
        found, notes = contents(BytesIO(data))
        tree: Any = copy_arrays(unpack(json.loads(notes[_NOTE]), _views(data, found)))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MalformedMessage(f"not a tree of values and arrays ({type(error).__name__}: {error})") from None
    if not isinstance(tree, dict):
        raise MalformedMessage("not a tree of values and arrays")
    return tree


def _views(data: bytes, found: dict[str, StoredArray]) -> dict[str, NDArray[Any]]:
    whole = np.frombuffer(data, np.uint8)
    return {name: whole[a.start : a.end].view(a.dtype).reshape(a.shape) for name, a in found.items()}


#: A Flower type. Flower is imported when the first message is read or written.
RecordDict = Any

#: Maximum characters of a text from outside.
MAX_TEXT = 200
#: The most merges that a trip may report.
MAX_MERGES = 1000
#: The header that numpy writes before a flat array of numbers, and its maximum length.
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<|][fiu][14])', 'fortran_order': (?:False|True), "
    rb"'shape': \((\d{1,15}),\), \} *\n",
    re.DOTALL,
)
#: The types of numbers in a compressed model, and how many arrays it has at most.
_PACKED_TYPES, _PACKED_ARRAYS = ("<f4", "|i1", "<u4"), 3
_MAX_HEADER_BYTES = 256


@dataclass(frozen=True)
class FreshChannel:
    """How a device gets the fresh model: ``side`` (from the service), ``messages`` (a second message) or ``none``."""

    kind: str = "none"
    address: str = ""
    certificate: str = ""
    token: str = ""
    #: Whether the device polls the service for the server's request to hurry.
    hurries: bool = False


@dataclass(frozen=True)
class Order:
    """Server to device: train this assignment, and get the fresh model through this channel."""

    assignment: Assignment
    session: str
    ticket: str
    channel: FreshChannel
    #: Mean seconds of the device's completed trips, for rules that use it.
    seconds: float | None = None


@dataclass(frozen=True)
class FreshDelivery:
    """Server to device, the second message of a trip: the fresh model, or None if there is nothing newer."""

    session: str
    ticket: str
    #: The slot whose request it answers.
    slot: int
    fresh: Fresh | None


@dataclass(frozen=True)
class RunOver:
    """Server to device: the run is over, and no further trip will come."""

    session: str
    ticket: str = ""


@dataclass(frozen=True)
class Answer:
    """Device to server: an upload, a request for the fresh model, or the reason why the trip is lost."""

    ticket: str
    upload: Upload | None = None
    slot: Slot | None = None
    lost: str = ""
    samples: int = 0
    #: Why the device got no fresh model although it requested one. Empty if nothing went wrong.
    unreached: str = ""
    #: Seconds by phase.
    timing: Mapping[str, float] = field(default_factory=dict)
    #: Freshet's version on the device.
    software: str = __version__
    #: With compressed models: the digest of the model that the device now holds.
    holds: str = ""


# ---- server to device


def order_record(order: Order) -> RecordDict:
    a, channel = order.assignment, order.channel
    scalars = {
        "device": a.device,
        "trip": a.trip,
        "version": a.version,
        "age": a.age,
        "epochs": a.epochs,
        "lr": float(a.lr),
        "session": order.session,
        "ticket": order.ticket,
        "way": channel.kind,
        "address": channel.address,
        "certificate": channel.certificate,
        "token": channel.token,
        "hurries": channel.hurries,
        "seconds": -1.0 if order.seconds is None else float(order.seconds),
    }
    return _records("train", scalars, a, {"instruction": a.instruction})


def delivery_record(delivery: FreshDelivery) -> RecordDict:
    fresh = delivery.fresh
    scalars: dict[str, Any] = {"session": delivery.session, "ticket": delivery.ticket, "slot": delivery.slot}
    if fresh is None:
        return _records("onward", scalars, None, {})
    return _records("onward", scalars | {"version": fresh.version, "age": fresh.age}, fresh, {})


def over_record(over: RunOver) -> RecordDict:
    return _records("over", {"session": over.session}, None, {})


def read_order(content: RecordDict) -> Order | FreshDelivery | RunOver:
    """Read a message of the server. Raises ``MalformedMessage``."""
    if "over" in content:
        return RunOver(short_text(_scalars(content, "over"), "session"))
    if "onward" in content:
        got = _scalars(content, "onward")
        fresh = None
        if "model" in content:
            fresh = Fresh(integer(got, "version"), integer(got, "age"), *_model(content, got))
        return FreshDelivery(short_text(got, "session"), short_text(got, "ticket"), integer(got, "slot"), fresh)
    got = _scalars(content, "train")
    weights, vectors, packed = _model(content, got)
    device, trip, version, age = (integer(got, key) for key in ("device", "trip", "version", "age"))
    instruction = _numbers(content, "instruction")
    epochs, lr = integer(got, "epochs"), finite_float(got, "lr")
    assignment = Assignment(device, trip, version, age, weights, epochs, lr, instruction, vectors, packed)
    kind, certificate = short_text(got, "way"), got.get("certificate")
    if kind not in ("side", "messages", "none") or not isinstance(certificate, str):
        raise MalformedMessage("way or certificate is invalid")
    channel = FreshChannel(
        kind, short_text(got, "address"), certificate, short_text(got, "token"), got.get("hurries") is True
    )
    seconds = finite_float(got, "seconds")
    return Order(
        assignment, short_text(got, "session"), short_text(got, "ticket"), channel, None if seconds < 0 else seconds
    )


# ---- device to server


def answer_record(answer: Answer) -> RecordDict:
    scalars: dict[str, Any] = {
        "ticket": answer.ticket,
        "samples": answer.samples,
        "unreached": answer.unreached[:MAX_TEXT],
        "software": answer.software[:MAX_TEXT],
        "holds": answer.holds,
    }
    numbers: dict[str, Mapping[str, Number]] = {"timing": answer.timing}
    if answer.upload is None:
        if answer.slot is not None:
            scalars |= {"epoch": answer.slot.epoch, "by": answer.slot.by, "action": answer.slot.action}
        return _records("answer", scalars | {"lost": answer.lost[:MAX_TEXT]}, None, numbers)
    up = answer.upload
    scalars |= {"device": up.device, "trip": up.trip, "base": up.base, "steps": up.steps}
    scalars["merges"] = [merge.version for merge in up.merges]
    numbers |= {f"merge{place}": merge.numbers for place, merge in enumerate(up.merges)}
    return _records("answer", scalars, up, numbers | {"report": up.report})


def read_answer(content: RecordDict) -> Answer:
    """Read a device's answer. Raises ``MalformedMessage``. The core's gates judge its numbers."""
    got = _scalars(content, "answer")
    ticket, samples, unreached = short_text(got, "ticket"), integer(got, "samples"), short_text(got, "unreached")
    timing = {name: float(value) for name, value in _numbers(content, "timing").items()}
    software = short_text(got, "software") if "software" in got else ""  # older devices do not say
    holds = short_text(got, "holds") if "holds" in got else ""
    common: dict[str, Any] = {"samples": samples, "unreached": unreached, "timing": timing, "software": software}
    common["holds"] = holds
    if "model" in content:
        weights, vectors, packed = _model(content, got)
        device, trip, base = (integer(got, key) for key in ("device", "trip", "base"))
        steps, report, merges = integer(got, "steps"), _numbers(content, "report"), _merges(got, content)
        return Answer(ticket, Upload(device, trip, base, weights, steps, report, merges, vectors, packed), **common)
    if "epoch" in got:
        return Answer(ticket, slot=Slot(integer(got, "epoch"), short_text(got, "by"), integer(got, "action")), **common)
    return Answer(ticket, lost=short_text(got, "lost") or "the device gave no reason", **common)


def _merges(got: Mapping[str, Any], content: RecordDict) -> tuple[Merge, ...]:
    versions = got.get("merges")
    if not isinstance(versions, list) or len(versions) > MAX_MERGES or any(type(each) is not int for each in versions):
        raise MalformedMessage("merges is not a list of versions")
    return tuple(Merge(version, _numbers(content, f"merge{place}")) for place, version in enumerate(versions))


# ---- reading and writing records


def _flower() -> Any:
    try:
        import flwr.app
    except ModuleNotFoundError:
        raise RunError(NEEDS_FLOWER) from None
    return flwr.app


def _records(
    name: str,
    scalars: Mapping[str, Any],
    message: Assignment | Fresh | Upload | None,
    numbers: Mapping[str, Mapping[str, Number]],
) -> RecordDict:
    """``message`` holds the model and the vectors."""
    app = _flower()
    packed, vectors = (None, NO_VECTORS) if message is None else (message.packed, message.vectors)
    named = {} if packed is None else {"codec": packed.codec, "difference_to": packed.base}
    records: dict[str, Any] = {name: app.ConfigRecord({**scalars, **named})}
    if message is not None:
        model = {"weights": message.weights} if packed is None else packed.arrays
        records["model"] = app.ArrayRecord({key: app.Array(np.asarray(array)) for key, array in model.items()})
    if vectors:
        records["vectors"] = app.ArrayRecord({key: app.Array(np.asarray(vector)) for key, vector in vectors.items()})
    for key, values in numbers.items():
        if values:
            records[key] = app.ConfigRecord({each: _plain(value) for each, value in values.items()})
    return app.RecordDict(records)


def _plain(value: Number) -> Number:
    return value.item() if isinstance(value, np.generic) else value


def _scalars(content: RecordDict, name: str) -> dict[str, Any]:
    found: Any = content.get(name)
    if not isinstance(found, _flower().ConfigRecord):
        raise MalformedMessage(f"has no {name}")
    return dict(found)


def _numbers(content: RecordDict, name: str) -> dict[str, Number]:
    if name not in content:
        return {}
    found = _scalars(content, name)
    if len(found) > 100 or any(
        isinstance(value, bool) or not isinstance(value, int | float) for value in found.values()
    ):
        raise MalformedMessage(f"{name} contains a value that is not a number")
    return found


def _model(content: RecordDict, got: Mapping[str, Any]) -> tuple[Vector, dict[str, Vector], Packed | None]:
    """The weights of a model, the vectors with it, and the model's arrays if it is compressed."""
    kind, model, others = _flower().ArrayRecord, content.get("model"), content.get("vectors")
    if not isinstance(model, kind):
        raise MalformedMessage("model is not a record of arrays")
    if others is not None and not isinstance(others, kind):
        raise MalformedMessage("vectors are not arrays")
    vectors = {name: vector(name, each) for name, each in (others or {}).items()}
    if "codec" in got:
        arrays = {
            name: flat_array(name, each, _PACKED_TYPES) for name, each in list(model.items())[: _PACKED_ARRAYS + 1]
        }
        packed = Packed(short_text(got, "codec"), short_text(got, "difference_to"), arrays)
        return UNREAD, vectors, check_packed(packed)
    if set(model) != {"weights"}:
        raise MalformedMessage("model is not a single array of weights")
    return vector("model", model["weights"]), vectors, None


def check_packed(packed: Packed) -> Packed:
    """A compressed model of few arrays with short names. What they hold is checked where it is decoded."""
    if len(packed.arrays) > _PACKED_ARRAYS or any(len(name) > MAX_TEXT for name in packed.arrays):
        raise MalformedMessage("the compressed model has too many arrays")
    return packed


def vector(name: str, array: Any) -> Vector:
    """Read a flat float32 array."""
    found: Vector = flat_array(name, array, ("<f4",))
    return found


def flat_array(name: str, array: Any, types: tuple[str, ...]) -> NDArray[Any]:
    """Read a flat array. Its header is checked first: no pickle, no archive, no size that does not match.

    The header is compared, not parsed: numpy's own reader passes it to Python's tokenizer.
    """
    data = array.data
    start = 10 + int.from_bytes(data[8:10], "little")
    found = _HEADER.fullmatch(data[:start]) if array.stype == "numpy.ndarray" and start <= _MAX_HEADER_BYTES else None
    kind = "" if found is None else found[1].decode()
    if found is None or kind not in types:
        names = " or ".join(np.dtype(each).name for each in types)
        raise MalformedMessage(f"{name:.40} is not a flat array of {names}")
    if len(data) - start != np.dtype(kind).itemsize * int(found[2]):
        raise MalformedMessage(f"{name:.40} has {len(data) - start} bytes for {int(found[2])} numbers")
    return np.frombuffer(data, kind, offset=start).copy()


def integer(got: Mapping[str, Any], key: str) -> int:
    value = got.get(key)
    if type(value) is not int:
        raise MalformedMessage(f"{key} is not an integer")
    return value


def finite_float(got: Mapping[str, Any], key: str) -> float:
    value = got.get(key)
    if not isinstance(value, float) or not math.isfinite(value):
        raise MalformedMessage(f"{key} is not a finite float")
    return value


def short_text(got: Mapping[str, Any], key: str) -> str:
    value = got.get(key)
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise MalformedMessage(f"{key} is not a short string")
    return value
