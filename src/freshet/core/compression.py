"""Compressed models: differences of flat vectors in fewer bytes, with error feedback.

Codecs are pure functions from a vector to the arrays that are sent, and back:

    int8   blocks of ``BLOCK`` numbers, each an integer multiple from -127 to 127 of the block's step max|v| / 127.
           No number is off by more than half a step.
    topk   the given share of the numbers, the largest in size, with their positions. All others arrive as 0.

Down: the server knows what each device holds, h_k, because it sent it. It sends a model w as ``q = Q(w - h_k)``, and
the device then holds ``h_k + q``. The next difference includes what this one lacked: error feedback without another
vector. The fresh model in mid-training is sent the same way. A new device, or one with a lost trip, holds nothing that
is known. It gets the whole model (int8: ``Q(w)``).

Up: a device that trained ``h_k`` to u sends ``q = Q(u - h_k + r_k)`` and keeps the rest as r_k. The server takes
``w_o + q`` as its model, with w_o the version that the device was given. So errors on the way down are not part of an
update. After any number of messages, the sum of what was meant equals the sum of what arrived plus what is kept.

Only learnable weights are encoded. Running statistics and counters are sent unchanged (an error could make a variance
negative), and so are named vectors.

Encoders refuse vectors that are not finite. Decoders refuse arrays of another form (``ValueError``), since the bytes
are not trusted.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from freshet.core import saving
from freshet.core.layout import Layout
from freshet.core.messages import Assignment, Fresh, Upload
from freshet.core.method import Memory, Options
from freshet.core.vectors import Vector, combine, is_finite

Codec = Literal["none", "int8", "topk"]
Arrays = dict[str, NDArray[Any]]
#: Numbers per block.
BLOCK = 256
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
        raise ValueError("values are not finite")
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
    if not (np.isfinite(steps).all() and (steps >= 0).all() and (numbers != -128).all()):
        raise ValueError("steps must be finite and at least 0, numbers from -127 to 127")
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
        raise ValueError(f"places must ascend and be below {size}")
    out = np.zeros(size, np.float32)
    out[places] = values
    return out


#: The key of a device's memory for the residual of its last upload.
RESIDUAL = "links.residual"


class LinkOptions(Options):
    """Compression of models on the network: none, or differences in fewer bytes with error feedback."""

    down: Codec = Field("none", description="models to devices: none (float32), int8, topk (the largest differences)")
    up: Codec = Field("none", description="models from devices: none (float32), int8, topk (the largest differences)")
    keep: float = Field(0.1, gt=0, le=1, description="topk: share of the numbers that is sent")

    @property
    def plain(self) -> bool:
        """Whether nothing is compressed."""
        return self.down == self.up == "none"


@dataclass
class DeviceCopy:
    """What a device was last sent: the learnable weights as decoded there, their version, and the message's bytes."""

    weights: Vector
    version: int
    size: int


@dataclass
class DeviceCopies:
    """What each device holds."""

    by_device: dict[int, DeviceCopy] = field(default_factory=dict)


class Links:
    """The server's side of compression."""

    def __init__(self, options: LinkOptions, layout: Layout) -> None:
        self.options, self.layout = options, layout
        self.copies = DeviceCopies()

    def encode_assignment(self, assignment: Assignment) -> Assignment:
        """The assignment as the device decodes it, with its bytes."""
        if self.options.down == "none":
            return assignment
        weights, size = self._send(assignment.device, assignment.version, assignment.weights)
        return assignment._replace(weights=weights, packed=size)

    def encode_fresh(self, device: int, fresh: Fresh) -> Fresh:
        """The fresh model as the device decodes it. A repeated request gets the same answer."""
        if self.options.down == "none":
            return fresh
        held = self.copies.by_device.get(device)
        if held is not None and held.version == fresh.version:
            weights = fresh.weights.copy()
            weights[: self.layout.learnable] = held.weights
            return fresh._replace(weights=weights, packed=held.size)
        weights, size = self._send(device, fresh.version, fresh.weights)
        return fresh._replace(weights=weights, packed=size)

    def _send(self, device: int, version: int, weights: Vector) -> tuple[Vector, int]:
        n, held = self.layout.learnable, self.copies.by_device.get(device)
        codec = "none" if held is None and self.options.down == "topk" else self.options.down
        base = np.zeros(n, np.float32) if held is None else held.weights
        difference = _difference(weights[:n], base)
        if not is_finite(difference):  # the difference overflows float32
            codec, base, difference = "none", np.zeros(n, np.float32), weights[:n]
        arrays = encode(codec, difference, self.options.keep)
        arrived = weights.copy()
        combine([(1.0, base), (1.0, decode(codec, arrays, n, self.options.keep))], out=arrived[:n])
        size = sum(array.nbytes for array in arrays.values()) + self._rest
        self.copies.by_device[device] = DeviceCopy(arrived[:n].copy(), version, size)
        return arrived, size

    def forget(self, device: int) -> None:
        """Forget what this device holds, since it is no longer known."""
        self.copies.by_device.pop(device, None)

    def decode_upload(self, upload: Upload, base: Vector) -> Upload:
        """Turn an uploaded difference into a model: ``w_o + q``."""
        if self.options.up == "none":
            return upload
        n, weights = self.layout.learnable, upload.weights.copy()
        with np.errstate(over="ignore", invalid="ignore"):  # a model that is not finite fails the checks
            combine([(1.0, base[:n]), (1.0, weights[:n])], out=weights[:n])
        return upload._replace(weights=weights)

    @property
    def _rest(self) -> int:
        """Bytes of the entries that are not learnable."""
        return 4 * (self.layout.size - self.layout.learnable)

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
        saving.restore(self.copies, tree)
        n = self.layout.learnable
        if not all(h.weights.shape == (n,) and h.weights.dtype == np.float32 for h in self.copies.by_device.values()):
            raise ValueError(f"the models that devices hold do not have {n} entries")


def model_bytes(options: LinkOptions, layout: Layout) -> tuple[int, int]:
    """Bytes of a model down and up."""
    rest = 4 * (layout.size - layout.learnable)
    down, up = (rest + encoded_bytes(codec, layout.learnable, options.keep) for codec in (options.down, options.up))
    return down, up


class EncodedUpload(NamedTuple):
    """What a device sends instead of its model: the decoded difference, its bytes, and the device's new memory."""

    weights: Vector
    size: int
    memory: Memory


def encode_upload(options: LinkOptions, layout: Layout, weights: Vector, base: Vector, memory: Memory) -> EncodedUpload:
    """The device's side: encode the difference to the model that it was given, with error feedback."""
    n, size, out = layout.learnable, model_bytes(options, layout)[1], weights.copy()
    out[:n] = _difference(weights[:n], base[:n])
    if not is_finite(out[:n]):  # it has diverged and will be rejected
        return EncodedUpload(out, size, memory)
    sent = encode_with_feedback(options.up, out[:n], memory.get(RESIDUAL), options.keep)
    out[:n] = sent.decoded
    return EncodedUpload(out, size, memory | {RESIDUAL: sent.residual})


def _difference(a: Vector, b: Vector) -> Vector:
    with np.errstate(over="ignore", invalid="ignore"):
        return combine([(1.0, a), (-1.0, b)])
