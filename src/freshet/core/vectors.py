"""Arithmetic on flat float32 vectors: every formula in float64, one rounding at the end, block by block.

Blocks keep the float64 temporaries inside the cache, so an operation costs the memory traffic of its float32 operands.
Sums run over the blocks in order, so a result never depends on the number of threads.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
BLOCK = 1 << 13


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))


def combine(terms: Sequence[tuple[float, Vector]], out: Vector | None = None) -> Vector:
    """``sum_j c_j v_j``, added in the order given. ``out`` may be one of the inputs."""
    size = len(terms[0][1])
    result = np.empty(size, np.float32) if out is None else out
    if size <= BLOCK:
        total = np.multiply(terms[0][1], terms[0][0], dtype=np.float64)
        for coefficient, vector in terms[1:]:
            total += np.multiply(vector, coefficient, dtype=np.float64)
        result[:] = total
        return result
    total, part = np.empty(BLOCK), np.empty(BLOCK)
    for block in _blocks(size):
        n = block.stop - block.start
        sum_, term = total[:n], part[:n]
        coefficient, vector = terms[0]
        np.multiply(vector[block], coefficient, out=sum_, dtype=np.float64)
        for coefficient, vector in terms[1:]:
            np.multiply(vector[block], coefficient, out=term, dtype=np.float64)
            sum_ += term
        result[block] = sum_
    return result


def mix(w: Vector, u: Vector, alpha: float, out: Vector | None = None) -> Vector:
    """``(1 - alpha) w + alpha u``; exactly ``u`` for alpha = 1 and exactly ``w`` where both agree."""
    return combine([(1.0 - alpha, w), (alpha, u)], out)


def dot(a: Vector, b: Vector) -> float:
    """Inner product, accumulated in float64."""
    total = 0.0
    for block in _blocks(len(a)):
        total += float(np.dot(a[block].astype(np.float64), b[block].astype(np.float64)))
    return total


def dot_combined(terms: Sequence[tuple[float, Vector]], b: Vector) -> float:
    """``<sum_j c_j v_j, b>`` in float64, without forming the sum at full size."""
    total = 0.0
    for block in _blocks(len(b)):
        sum_ = np.zeros(block.stop - block.start)
        for coefficient, vector in terms:
            sum_ += coefficient * vector[block].astype(np.float64)
        total += float(np.dot(sum_, b[block].astype(np.float64)))
    return total


def norm(a: Vector) -> float:
    """Euclidean norm, accumulated in float64."""
    return math.sqrt(dot(a, a))


def distance(a: Vector, b: Vector) -> float:
    """``|a - b|``, without a temporary of full size."""
    if len(a) <= BLOCK:
        difference = a.astype(np.float64)
        difference -= b
        return math.sqrt(float(np.dot(difference, difference)))
    total = 0.0
    for block in _blocks(len(a)):
        difference = a[block].astype(np.float64)
        difference -= b[block]
        total += float(np.dot(difference, difference))
    return math.sqrt(total)


def is_finite(a: Vector) -> bool:
    """True when no entry is NaN or infinite (one pass, no temporary of full size)."""
    return all(bool(np.isfinite(a[block]).all()) for block in _blocks(len(a)))
