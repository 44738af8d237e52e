"""Compressed models: differences of flat vectors in fewer bytes, with error feedback.

Codecs turn a vector into the arrays that are sent, and back:

    int8    blocks of ``BLOCK`` numbers, each an integer multiple from -127 to 127 of the block's step max|v| / 127.
            No number is off by more than half a step.
    topk    the given share of the numbers, the largest in size, with their positions. All others arrive as 0.
    layers  whole layers, those that have moved most per number, as many as a budget of bytes holds. All others arrive
            as 0. It is for the fresh model in mid-training only.

**Down.** The server knows what each device holds, h, because it sent it. It sends a model w as ``q = Q(w - h)``, and
the device then holds ``h + q``. The next difference includes what this one lacked: error feedback without another
vector. A new device, or one with a lost trip, holds nothing that is known. It gets the whole model (int8: ``Q(w)``).
A difference names what it refers to by a digest. A device that holds something else says so and gets the whole model.

**The fresh model.** A device in mid-training holds ``h_o``, which stands for version o, and gets ``q = Q(w_g - h_o)``.
What it merges is ``h_g = h_o + q``, not ``w_g``: a number, or a layer, that was not sent has its value at the start of
the trip. With any rule that merges by ``h_g - h_o`` (a mix with weight beta, a rebase), training then gives ::

    u = h_o + beta q + d        d = (1 - beta) d1 + d2 (mix)  or  d1 + d2 (rebase)

So the server, which knows q, takes ``e_g = w_o + q`` for the model that the device received (``received_model``). The
anchor, E6, the line of the norm gate and the defences see e_g in place of w_g, and all their formulas hold as they are:
what ``u - h_o - beta (h_g - h_o)`` was on the device is ``w_i - w_o - beta (e_g - w_o)`` on the server. A layer that
was not sent has ``e_g = w_o``: nothing is subtracted there. A rebase leaves it as the device trained it. A mix takes it
back towards its start by beta, like every other layer, so that (1 - beta) n1 + n2 steps count in all layers. Several
fresh models of a trip add up: ``e_g2 = w_o + q_1 + q_2``.

**Which layers.** Without layer l, ``|w_g - h_g|^2`` is larger by ``|w_g - h_o|_l^2``. To make it small within the
budget, take layers by this square per number, the largest first, and leave out those that no longer fit.

**Up.** A device that trained from s (``h_o``, or its anchor) to u sends ``q = Q(u - s + r)`` and keeps the rest as r.
The server takes the same start in its own terms plus q. So errors on the way down are not part of an update. The sum of
what was meant equals the sum of what arrived plus what is kept. An upload that the server did not take (lost, rejected,
discarded) must not count as arrived, and what it left over must not spoil the next one. So every assignment names the
device's last upload that was taken. If that is not the last one sent, the device continues with the r from before it.

Only learnable weights are encoded. Running statistics and counters are sent unchanged (an error could make a variance
negative), and so are named vectors.

Encoders refuse vectors that are not finite. Decoders refuse arrays of another form (``ValueError``), since the bytes
are not trusted.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from freshet.core import saving
from freshet.core.layout import Layout
from freshet.core.messages import NOTHING, Assignment, Fresh, Number, Packed, Upload
from freshet.core.method import ADDED, Memory, Mismatch, Options, expect
from freshet.core.vectors import Vector, combine, distance, is_finite

Codec = Literal["none", "int8", "topk"]
Arrays = dict[str, NDArray[Any]]
#: Numbers per block.
BLOCK = 256
#: Of a vector that has diverged.
NOT_FINITE = "has entries that are not finite"
_LARGEST = float(np.finfo(np.float32).max)


def encode(codec: Codec, vector: Vector, keep: float) -> Arrays:
    """The arrays to send. ``keep`` is the share of numbers that top-k sends."""
    if not is_finite(vector):
        raise ValueError("a vector that is not finite cannot be sent")
    if codec == "int8":
        return _to_int8(vector)
    return _to_topk(vector, topk_count(len(vector), keep)) if codec == "topk" else {"values": vector}


def decode(codec: Codec, arrays: Arrays, size: int, keep: float) -> Vector:
    """The vector of ``size`` numbers in untrusted arrays. Raises ``ValueError``."""
    expected = _array_forms(codec, size, keep)
    found = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    if found != expected:
        raise ValueError(f"expected arrays {expected}, but found {found}"[:300])
    if codec == "int8":
        return _from_int8(arrays["steps"], arrays["numbers"])
    values: Vector = arrays["values"]
    if not is_finite(np.ascontiguousarray(values)):
        raise ValueError(NOT_FINITE)
    return values.copy() if codec == "none" else _from_topk(arrays["places"], values, size)


def encoded_bytes(codec: Codec, size: int, keep: float) -> int:
    """Bytes of an encoded vector of ``size`` numbers."""
    return sum(np.dtype(kind).itemsize * math.prod(shape) for kind, shape in _array_forms(codec, size, keep).values())


class Encoded(NamedTuple):
    """The arrays to send, what they decode to, and the residual to add to the next message."""

    arrays: Arrays
    decoded: Vector
    residual: Vector


def encode_with_feedback(codec: Codec, vector: Vector, residual: Vector | None, keep: float) -> Encoded:
    """Encode ``v + r``. The new r is the difference to the decoded vector."""
    meant = vector if residual is None else combine([(1.0, vector), (1.0, residual)])
    arrays = encode(codec, meant, keep)
    decoded = decode(codec, arrays, len(meant), keep)
    return Encoded(arrays, decoded, combine([(1.0, meant), (-1.0, decoded)]))


def topk_count(size: int, keep: float) -> int:
    """The number of entries that top-k sends: at least one."""
    return min(size, max(1, math.ceil(keep * size)))


def _array_forms(codec: Codec, size: int, keep: float) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Data type and shape of every array of an encoded vector."""
    if codec == "int8":
        return {"steps": ("<f4", (-(-size // BLOCK),)), "numbers": ("|i1", (size,))}
    if codec == "topk":
        count = topk_count(size, keep)
        return {"places": ("<u4", (count,)), "values": ("<f4", (count,))}
    return {"values": ("<f4", (size,))}


def _to_int8(vector: Vector) -> Arrays:
    blocks = -(-len(vector) // BLOCK)
    padded = np.zeros(blocks * BLOCK)
    padded[: len(vector)] = vector
    grid = padded.reshape(blocks, BLOCK)
    steps = (np.abs(grid).max(axis=1) / 127.0).astype(np.float32)
    fine = np.where(steps > 0, steps, np.float32(1.0)).astype(np.float64)  # a block with a step of 0 becomes 0
    numbers = np.where(steps[:, None] > 0, np.rint(grid / fine[:, None]), 0.0)
    whole = np.clip(numbers, -127, 127).astype(np.int8).reshape(-1)
    return {"steps": steps, "numbers": whole[: len(vector)].copy()}


def _from_int8(steps: Vector, numbers: NDArray[np.int8]) -> Vector:
    if not np.isfinite(steps).all():
        raise ValueError(NOT_FINITE)
    if not ((steps >= 0).all() and (numbers != -128).all()):
        raise ValueError("its steps must be at least 0, and its numbers from -127 to 127")
    values = numbers * np.repeat(steps.astype(np.float64), BLOCK)[: len(numbers)]
    decoded: Vector = np.clip(values, -_LARGEST, _LARGEST).astype(np.float32)
    return decoded


def _to_topk(vector: Vector, count: int) -> Arrays:
    """The ``count`` largest in size (the first of equals), in ascending order of position."""
    size = np.abs(vector)
    least = np.partition(size, len(size) - count)[len(size) - count]
    above, equal = np.flatnonzero(size > least), np.flatnonzero(size == least)
    places = np.sort(np.concatenate([above, equal[: count - len(above)]])).astype(np.uint32)
    return {"places": places, "values": vector[places]}


def _from_topk(places: NDArray[np.uint32], values: Vector, size: int) -> Vector:
    if not ((places[1:] > places[:-1]).all() and places[-1] < size):
        raise ValueError(f"its places must ascend and be below {size}")
    out = np.zeros(size, np.float32)
    out[places] = values
    return out


#: The keys of a device's memory for its uploads: the residual after the last one and before it, and its trip.
RESIDUAL, RESIDUAL_BEFORE, SENT_TRIP = "links.residual", "links.residual_before", "links.trip"
#: An instruction: the trip of the device's last upload that the server has taken (0: none).
TAKEN_TRIP = "links.taken"
#: What the log says about the layers of a fresh model.
LAYERS_NOTE = "fresh layers"
#: The array of entries that are not learnable.
REST = "rest"


class LinkOptions(Options):
    """Compression of models on the network: none, or differences in fewer bytes with error feedback."""

    down: Codec = Field("none", description="models to devices: none (float32), int8, topk (the largest differences)")
    up: Codec = Field("none", description="models from devices: none (float32), int8, topk (the largest differences)")
    keep: float = Field(0.1, gt=0, le=1, description="topk: share of the numbers that is sent")
    fresh: Literal["down", "layers"] = Field(
        "down",
        description="fresh model in mid-training: down (as above), layers (only those that have moved most)",
        json_schema_extra=ADDED,
    )
    budget: int = Field(
        0,
        ge=0,
        description="layers: most bytes of a fresh model (0: a quarter of the whole model)",
        json_schema_extra=ADDED,
    )

    @property
    def plain(self) -> bool:
        """Whether nothing is compressed."""
        return self.down == self.up == "none" and self.fresh == "down"

    @property
    def lasting(self) -> bool:
        """Whether devices keep what they hold from trip to trip, since the next model is a difference to it."""
        return self.down != "none"

    @property
    def tracks(self) -> bool:
        """Whether a model is sent as a difference to what a device holds, at least in mid-training."""
        return self.lasting or self.fresh == "layers"


# ---- layers


def layer_sizes(layout: Layout) -> list[int]:
    """The number of learnable entries of each layer."""
    return [sum(end - start for start, end in spans) for spans in layout.groups]


def layers_budget(options: LinkOptions, sizes: Sequence[int], rest: int) -> int:
    """The most bytes of a fresh model. ``rest`` counts the bytes that are not learnable."""
    return options.budget or (4 * sum(sizes) + rest) // 4


def layers_bytes(chosen: Iterable[int], sizes: Sequence[int], rest: int) -> int:
    """Bytes of a message with these layers: for each, its number and its entries."""
    return rest + sum(4 + 4 * sizes[layer] for layer in chosen)


def choose_layers(moved: Sequence[float], sizes: Sequence[int], budget: int, rest: int) -> list[int]:
    """The layers to send, in ascending order. ``moved`` has the length of each layer's difference.

    The order of choice is by ``moved^2 / size``, the first of equals first. A layer that has not moved is not sent.
    """
    chosen, left = list[int](), budget - rest
    for layer in sorted(range(len(sizes)), key=lambda place: (-(moved[place] ** 2) / sizes[place], place)):
        size = layers_bytes([layer], sizes, 0)
        if moved[layer] > 0.0 and size <= left:
            chosen.append(layer)
            left -= size
    return sorted(chosen)


def smallest_budget(layout: Layout) -> int:
    """Bytes of a fresh model with the smallest layer only."""
    return layers_bytes([0], [min(layer_sizes(layout))], _rest_bytes(layout))


def _layer_parts(vector: Vector, layout: Layout, layer: int) -> list[Vector]:
    return [vector[start:end] for start, end in layout.groups[layer]]


def _to_layers(vector: Vector, chosen: Sequence[int], layout: Layout) -> Arrays:
    parts = [part for layer in chosen for part in _layer_parts(vector, layout, layer)]
    values = np.concatenate(parts) if parts else np.empty(0, np.float32)
    return {"layers": np.array(chosen, np.uint32), "values": values}


def _from_layers(arrays: Arrays, layout: Layout) -> Vector:
    layers, values = arrays["layers"], arrays["values"]
    if not ((layers[1:] > layers[:-1]).all() and (layers[-1:] < len(layout.groups)).all()):
        raise ValueError(f"its layers must ascend and be below {len(layout.groups)}")
    sizes = layer_sizes(layout)
    if len(values) != sum(sizes[layer] for layer in layers):
        raise ValueError(f"it has {len(values)} numbers, which is not what its layers hold")
    if not is_finite(values):
        raise ValueError(NOT_FINITE)
    out, place = np.zeros(layout.learnable, np.float32), 0
    for layer in layers.tolist():
        for part in _layer_parts(out, layout, layer):
            part[:] = values[place : place + len(part)]
            place += len(part)
    return out


# ---- packed models


def digest(weights: Vector) -> str:
    """A short digest of the learnable weights that somebody holds."""
    return hashlib.sha256(weights.tobytes()).hexdigest()[:32]


def unpack(packed: Packed, layout: Layout, keep: float) -> tuple[Vector, Vector]:
    """The decoded difference and the entries that are not learnable. Raises ``ValueError``: nothing is trusted."""
    arrays = dict(packed.arrays)
    rest, size = arrays.pop(REST, np.empty(0, np.float32)), layout.size - layout.learnable
    if (rest.dtype.str, rest.shape) != ("<f4", (size,)):
        raise ValueError(f"expected {size} entries that are not learnable, but found {rest.shape} of {rest.dtype}")
    if packed.codec == "layers":
        forms = {name: (array.dtype.str, array.ndim) for name, array in arrays.items()}
        if forms != {"layers": ("<u4", 1), "values": ("<f4", 1)}:
            raise ValueError(f"expected layers and values, but found {forms}"[:300])
        return _from_layers(arrays, layout), rest
    if packed.codec not in ("none", "int8", "topk"):
        raise ValueError(f"{packed.codec!r:.40} is not a codec")
    return decode(packed.codec, arrays, layout.learnable, keep), rest  # type: ignore[arg-type]


class NotHeld(ValueError):
    """A difference refers to a model that the device does not hold."""


def receive(packed: Packed, held: Vector | None, layout: Layout, keep: float) -> Vector:
    """The device's side: the model that a message from the server makes of what the device holds.

    Raises ``NotHeld`` or another ``ValueError``.
    """
    if packed.base and (held is None or digest(held) != packed.base):
        raise NotHeld("the device does not hold the model that this difference refers to")
    difference, rest = unpack(packed, layout, keep)
    return np.concatenate([_add(packed, difference, held), rest])


def _add(packed: Packed, difference: Vector, held: Vector | None) -> Vector:
    """What somebody with ``held`` has after a message. One without a base is the model itself."""
    return combine([(1.0, held), (1.0, difference)]) if packed.base and held is not None else difference


# ---- the server's side


class FreshMessage(NamedTuple):
    """A fresh model as it was sent and, if only some layers were, how far each layer had moved."""

    packed: Packed
    moved: list[float]


@dataclass
class DeviceCopy:
    """What a device was last sent: the learnable weights at the start of its trip, and the fresh models since."""

    weights: Vector
    version: int
    fresh: dict[int, FreshMessage] = field(default_factory=dict)


@dataclass
class LinkState:
    """What each device holds, and the trip of its last upload that was taken."""

    by_device: dict[int, DeviceCopy] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)


class Links:
    """The server's side of compression."""

    def __init__(self, options: LinkOptions, layout: Layout) -> None:
        self.options, self.layout = options, layout
        self.copies = LinkState()
        self._sizes = layer_sizes(layout)
        if options.fresh == "layers" and sum(self._sizes) != layout.learnable:
            raise ValueError("the layers of the model do not hold all of its learnable entries")

    # ---- down

    def encode_assignment(self, assignment: Assignment) -> Assignment:
        """The assignment as the device decodes it, with what is sent."""
        device, n, weights = assignment.device, self.layout.learnable, assignment.weights
        packed = None
        if self.options.lasting:
            packed, weights = self._pack(self.options.down, weights, self.held_weights(device))
        if self.options.tracks:
            self.copies.by_device[device] = DeviceCopy(weights[:n], assignment.version)
        return assignment._replace(weights=weights, packed=packed)

    def encode_fresh(self, device: int, fresh: Fresh) -> Fresh:
        """The fresh model as the device decodes it. A repeated request gets the same answer."""
        by_layer, copy = self.options.fresh == "layers", self.copies.by_device.get(device)
        if copy is None:
            return fresh  # the downlink is not compressed
        if fresh.version not in copy.fresh:
            held = self.held_weights(device)
            assert held is not None
            moved = self._layer_moves(fresh.weights, held) if by_layer else []
            packed, _ = self._pack("layers" if by_layer else self.options.down, fresh.weights, held, moved)
            copy.fresh[fresh.version] = FreshMessage(packed, moved)
        sent = copy.fresh[fresh.version]
        weights = np.concatenate(
            [self._after(copy.weights, copy, fresh.version), fresh.weights[self.layout.learnable :]]
        )
        return fresh._replace(weights=weights, packed=sent.packed)

    def _pack(
        self, codec: str, weights: Vector, held: Vector | None, moved: Sequence[float] = ()
    ) -> tuple[Packed, Vector]:
        """The message that brings a device from ``held`` to ``weights``, and what the device then has."""
        n, keep = self.layout.learnable, self.options.keep
        rest = {REST: weights[n:]} if n < self.layout.size else {}
        difference = weights[:n] if held is None else _difference(weights[:n], held)
        if (held is None and codec != "int8") or not is_finite(difference):  # or the difference overflows float32
            packed = Packed("none", "", encode("none", weights[:n], keep) | rest)
        elif codec == "layers":
            budget = layers_budget(self.options, self._sizes, _rest_bytes(self.layout))
            chosen = choose_layers(moved, self._sizes, budget, _rest_bytes(self.layout))
            packed = Packed(codec, digest(held), _to_layers(difference, chosen, self.layout) | rest)  # type: ignore[arg-type]
        else:
            base = "" if held is None else digest(held)
            packed = Packed(codec, base, encode(codec, difference, keep) | rest)  # type: ignore[arg-type]
        return packed, receive(packed, held, self.layout, keep)

    def _layer_moves(self, weights: Vector, held: Vector) -> list[float]:
        """How far each layer is from what the device holds."""
        layers = range(len(self.layout.groups))
        parts = (zip(*(_layer_parts(v, self.layout, layer) for v in (weights, held)), strict=True) for layer in layers)
        return [math.hypot(*(distance(a, b) for a, b in pairs)) for pairs in parts]

    def _after(self, start: Vector, copy: DeviceCopy, last: int | None = None) -> Vector:
        """A model after the fresh models up to version ``last`` (None: all)."""
        for version, sent in copy.fresh.items():
            start = _add(sent.packed, unpack(sent.packed, self.layout, self.options.keep)[0], start)
            if version == last:
                break
        return start

    def held_weights(self, device: int) -> Vector | None:
        """The learnable weights that a device holds; None if that is not known."""
        copy = self.copies.by_device.get(device)
        return None if copy is None else self._after(copy.weights, copy)

    def received_model(self, device: int, base: Vector, fresh: Vector, version: int) -> Vector:
        """The fresh model that a device in flight received, in the server's terms: ``e_g = w_o + q``."""
        copy = self.copies.by_device.get(device)
        if copy is None or version not in copy.fresh:
            return fresh
        n = self.layout.learnable
        return np.concatenate([self._after(base[:n], copy, version), fresh[n:]])

    def layers_note(self, device: int, trip: int, version: int) -> dict[str, Any] | None:
        """Which layers of a fresh model a device was sent, with the numbers that decided it; None if all."""
        copy = self.copies.by_device.get(device)
        sent = None if copy is None else copy.fresh.get(version)
        if sent is None or sent.packed.codec != "layers":
            return None
        rest = _rest_bytes(self.layout)
        return {
            "device": device,
            "trip": trip,
            "fresh": version,
            "layers": sent.packed.arrays["layers"].tolist(),
            "moved": sent.moved,
            "sizes": self._sizes,
            "rest": rest,
            "budget": layers_budget(self.options, self._sizes, rest),
            "bytes": sent.packed.nbytes,
        }

    def confirm(self, device: int, holds: str) -> None:
        """A device says what it holds, by its digest. If it is something else, its next model comes whole."""
        held = self.held_weights(device)
        if held is not None and digest(held) != holds:
            self.forget(device)

    def forget(self, device: int) -> None:
        """Forget what this device holds, since it is no longer known."""
        self.copies.by_device.pop(device, None)

    def end_trip(self, device: int) -> None:
        """No formula asks any more what the device received. Keep what it holds, if the next model refers to it."""
        held, copy = self.held_weights(device), self.copies.by_device.get(device)
        if not self.options.lasting:
            self.forget(device)
        elif copy is not None and held is not None:
            self.copies.by_device[device] = DeviceCopy(held, copy.version)

    # ---- up

    def instruction(self, device: int) -> dict[str, Number]:
        """What an assignment tells the device about its earlier uploads."""
        return {TAKEN_TRIP: self.copies.taken.get(device, 0)} if self.remembers else {}

    def take(self, device: int, trip: int) -> None:
        """The upload of this trip counts."""
        if self.remembers:
            self.copies.taken[device] = trip

    def decode_upload(self, upload: Upload, start: Callable[[], Vector]) -> Upload:
        """Turn an uploaded difference into a model. Raises ``ValueError`` if it is not one of this run's codec.

        ``start`` is where its step starts, in the server's terms.
        """
        packed, codec = upload.packed, self.options.up
        if codec == "none" and packed is None:
            return upload
        if packed is None or packed.codec != codec:
            sent = "none" if packed is None else packed.codec
            raise ValueError(f"model comes with the codec {sent!r:.40}, but links.up is {codec}")
        try:
            difference, rest = unpack(packed, self.layout, self.options.keep)
        except ValueError as problem:
            said = str(problem)
            raise ValueError(
                f"model {said}" if said == NOT_FINITE else f"compressed model is malformed: {said}"
            ) from None
        with np.errstate(over="ignore", invalid="ignore"):  # a model that is not finite fails the checks
            learnable = combine([(1.0, start()[: self.layout.learnable]), (1.0, difference)])
        return upload._replace(weights=np.concatenate([learnable, rest]), packed=None)

    @property
    def remembers(self) -> bool:
        """Whether devices keep a residual of what they sent."""
        return self.options.up != "none"

    def model_bytes(self) -> tuple[int, int]:
        """Bytes of a model down (to a device that already holds one) and up."""
        return model_bytes(self.options, self.layout)

    def state(self) -> saving.Tree:
        """Everything that a resumed run needs."""
        tree: saving.Tree = saving.dump(self.copies)
        return tree

    def restore(self, tree: saving.Tree) -> None:
        """The inverse of ``state``. Raises ``ValueError`` for models of another size."""
        if "taken" not in tree:
            raise ValueError("an older version of Freshet wrote it, which compressed models in another way")
        saving.restore(self.copies, tree)
        n = self.layout.learnable
        if not all(h.weights.shape == (n,) and h.weights.dtype == np.float32 for h in self.copies.by_device.values()):
            raise ValueError(f"the models that devices hold do not have {n} entries")


def _rest_bytes(layout: Layout) -> int:
    """Bytes of the entries that are not learnable."""
    return 4 * (layout.size - layout.learnable)


def model_bytes(options: LinkOptions, layout: Layout) -> tuple[int, int]:
    """Bytes of a model down and up."""
    codecs, rest = (options.down, options.up), _rest_bytes(layout)
    down, up = (rest + encoded_bytes(codec, layout.learnable, options.keep) for codec in codecs)
    return down, up


def audit_layers(numbers: Mapping[str, Any], budget: int) -> None:
    """Check a logged choice of layers against the formulas. ``budget`` is that of the configuration."""
    sizes, rest = numbers["sizes"], numbers["rest"]
    expect("budget", numbers["budget"], layers_budget(LinkOptions(fresh="layers", budget=budget), sizes, rest))
    chosen = choose_layers(numbers["moved"], sizes, numbers["budget"], rest)
    if chosen != numbers["layers"]:
        raise Mismatch(f"layers are {numbers['layers']}, but {chosen} have moved most within the budget")
    expect("bytes", numbers["bytes"], layers_bytes(chosen, sizes, rest))


# ---- the device's side of an upload


class EncodedUpload(NamedTuple):
    """What a device sends instead of its model, and its new memory."""

    packed: Packed
    memory: Memory


def encode_upload(
    options: LinkOptions,
    layout: Layout,
    weights: Vector,
    start: Vector,
    memory: Memory,
    trip: int,
    instruction: Mapping[str, Number] = NOTHING,
) -> EncodedUpload:
    """Encode the difference to where the step starts, with error feedback."""
    n, codec = layout.learnable, options.up
    rest = {REST: weights[n:].copy()} if n < layout.size else {}
    difference = _difference(weights[:n], start[:n])
    if not is_finite(difference):  # it has diverged and will be rejected
        return EncodedUpload(Packed(codec, "", _diverged_arrays(codec, n, options.keep) | rest), memory)
    last = memory.get(SENT_TRIP, 0)
    taken = instruction.get(TAKEN_TRIP, last) == last
    before = memory.get(RESIDUAL if taken else RESIDUAL_BEFORE)
    sent = encode_with_feedback(codec, difference, before, options.keep)
    kept = {key: value for key, value in memory.items() if key != RESIDUAL_BEFORE}
    kept |= {RESIDUAL: sent.residual, SENT_TRIP: trip} | ({} if before is None else {RESIDUAL_BEFORE: before})
    return EncodedUpload(Packed(codec, "", sent.arrays | rest), kept)


def _diverged_arrays(codec: Codec, size: int, keep: float) -> Arrays:
    """Arrays of the right form that say that the model is not finite."""
    forms = _array_forms(codec, size, keep).items()
    return {name: np.full(shape, np.nan if kind == "<f4" else 0, kind) for name, (kind, shape) in forms}


def _difference(a: Vector, b: Vector) -> Vector:
    with np.errstate(over="ignore", invalid="ignore"):
        return combine([(1.0, a), (-1.0, b)])
