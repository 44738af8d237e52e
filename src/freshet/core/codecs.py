"""Vectors in fewer bytes: pure functions from a flat vector to the arrays that travel, and back.

    int8   blocks of ``BLOCK`` numbers, each as a whole number of steps from -127 to 127; a step is max|v| / 127 of its
           block, so no number is off by more than half a step
    topk   the share of numbers that are largest in size, with their places; all others arrive as 0

What is left out is not lost with error feedback: it is kept and added to what is sent next, so that after any number of
messages ``sum of what was meant = sum of what arrived + what is kept``.

Encoders refuse what is not finite, decoders what is not exactly of the form (``ValueError``): bytes come from anybody.
"""

import math
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freshet.core.vectors import Vector, combine, is_finite

Codec = Literal["none", "int8", "topk"]
Arrays = dict[str, NDArray[Any]]
#: Numbers that share a step.
BLOCK = 256
_LARGEST = float(np.finfo(np.float32).max)


def encode(codec: Codec, vector: Vector, keep: float) -> Arrays:
    """The arrays that travel; ``keep`` is the share of numbers that top-k sends."""
    if not is_finite(vector):
        raise ValueError("a vector that is not finite cannot be sent")
    if codec == "int8":
        return _to_int8(vector)
    return _largest(vector, kept(len(vector), keep)) if codec == "topk" else {"values": vector}


def decode(codec: Codec, arrays: Arrays, size: int, keep: float) -> Vector:
    """The vector of ``size`` numbers behind arrays of unknown origin; raises ``ValueError``."""
    expected = _form(codec, size, keep)
    found = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    if found != expected:
        raise ValueError(f"expected arrays {expected}, but found {found}"[:300])
    if codec == "int8":
        return _from_int8(arrays["steps"], arrays["numbers"])
    values: Vector = arrays["values"]
    if not is_finite(np.ascontiguousarray(values)):
        raise ValueError("values are not finite")
    return values.copy() if codec == "none" else _placed(arrays["places"], values, size)


def coded_bytes(codec: Codec, size: int, keep: float) -> int:
    """What a vector of so many numbers weighs when it is encoded."""
    return sum(np.dtype(kind).itemsize * math.prod(shape) for kind, shape in _form(codec, size, keep).values())


class Sent(NamedTuple):
    """What travels, what the other side makes of it, and what is kept for the next time."""

    arrays: Arrays
    decoded: Vector
    residual: Vector


def with_feedback(codec: Codec, vector: Vector, residual: Vector | None, keep: float) -> Sent:
    """Encode ``v + r``; what its decoding lacks is the new r."""
    meant = vector if residual is None else combine([(1.0, vector), (1.0, residual)])
    arrays = encode(codec, meant, keep)
    decoded = decode(codec, arrays, len(meant), keep)
    return Sent(arrays, decoded, combine([(1.0, meant), (-1.0, decoded)]))


def kept(size: int, keep: float) -> int:
    """How many numbers top-k sends: at least one."""
    return min(size, max(1, math.ceil(keep * size)))


def _form(codec: Codec, size: int, keep: float) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Kind and shape of every array of an encoded vector."""
    if codec == "int8":
        return {"steps": ("<f4", (-(-size // BLOCK),)), "numbers": ("|i1", (size,))}
    if codec == "topk":
        count = kept(size, keep)
        return {"places": ("<u4", (count,)), "values": ("<f4", (count,))}
    return {"values": ("<f4", (size,))}


def _to_int8(vector: Vector) -> Arrays:
    blocks = -(-len(vector) // BLOCK)
    padded = np.zeros(blocks * BLOCK)
    padded[: len(vector)] = vector
    grid = padded.reshape(blocks, BLOCK)
    steps = (np.abs(grid).max(axis=1) / 127.0).astype(np.float32)
    fine = np.where(steps > 0, steps, np.float32(1.0)).astype(np.float64)  # a step that vanishes makes its block 0
    numbers = np.where(steps[:, None] > 0, np.rint(grid / fine[:, None]), 0.0)
    whole = np.clip(numbers, -127, 127).astype(np.int8).reshape(-1)
    return {"steps": steps, "numbers": whole[: len(vector)].copy()}


def _from_int8(steps: Vector, numbers: NDArray[np.int8]) -> Vector:
    if not (np.isfinite(steps).all() and (steps >= 0).all() and (numbers != -128).all()):
        raise ValueError("steps are not finite and from 0, or numbers not from -127 to 127")
    values = numbers * np.repeat(steps.astype(np.float64), BLOCK)[: len(numbers)]
    decoded: Vector = np.clip(values, -_LARGEST, _LARGEST).astype(np.float32)
    return decoded


def _largest(vector: Vector, count: int) -> Arrays:
    """The ``count`` largest in size, the first of equals; places ascend."""
    size = np.abs(vector)
    least = np.partition(size, len(size) - count)[len(size) - count]
    above, equal = np.flatnonzero(size > least), np.flatnonzero(size == least)
    places = np.sort(np.concatenate([above, equal[: count - len(above)]])).astype(np.uint32)
    return {"places": places, "values": vector[places]}


def _placed(places: NDArray[np.uint32], values: Vector, size: int) -> Vector:
    if not ((places[1:] > places[:-1]).all() and places[-1] < size):
        raise ValueError(f"places do not ascend within {size}")
    out = np.zeros(size, np.float32)
    out[places] = values
    return out
