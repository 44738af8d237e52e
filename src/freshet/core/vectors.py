"""Arithmetic on flat float32 vectors: every formula in float64, one rounding at the end, block by block.

Blocks keep the float64 temporaries inside the cache, so an operation costs the memory traffic of its float32 operands.
Sums run over the blocks in order, so a result never depends on the number of threads.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
#: A sum of models, each a scaled difference: ``sum_j c_j (a_j - b_j)``.
Differences = Sequence[tuple[float, Vector, Vector]]
#: Entries per block: the temporaries fit in the cache, and a dot product of this length stays on one thread.
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


def dot_differences(differences: Differences, b: Vector) -> float:
    """``<sum_j c_j (a_j - b_j), b>``: differences in float32 (exact for close models), the sum in float64."""
    total, scratch = 0.0, _Scratch(len(b))
    for block in _blocks(len(b)):
        difference = scratch.difference(differences, block)
        total += scratch.dot(difference, b[block])
    return total


def sum_differences(differences: Differences) -> Vector:
    """``sum_j c_j (a_j - b_j)`` as a vector of its own."""
    size = len(differences[0][1])
    total, scratch = np.empty(size, np.float32), _Scratch(size)
    for block in _blocks(size):
        total[block] = scratch.difference(differences, block)
    return total


def step_along(w: Vector, differences: Differences, alpha: float, new: Vector, step: Vector) -> float:
    """``step <- sum_j c_j (a_j - b_j)`` and ``new <- w + alpha step`` in one pass; returns ``|step|``.

    ``step`` may be an old vector that is not needed any more; ``new`` must not be one of the models.
    """
    total, scratch, factor = 0.0, _Scratch(len(w)), np.float32(alpha)
    for block in _blocks(len(w)):
        difference = scratch.difference(differences, block)
        step[block] = difference
        total += scratch.dot(difference, difference)
        difference *= factor
        np.add(w[block], difference, out=new[block])
    return math.sqrt(total)


class _Scratch:
    """Buffers for one pass over blocks, small enough for the cache."""

    def __init__(self, size: int) -> None:
        width = min(BLOCK, size)
        self._sum, self._part = np.empty(width, np.float32), np.empty(width, np.float32)
        self._left, self._right = np.empty(width), np.empty(width)

    def difference(self, differences: Differences, block: slice) -> Vector:
        """``sum_j c_j (a_j - b_j)`` of a block."""
        n = block.stop - block.start
        total, part = self._sum[:n], self._part[:n]
        coefficient, a, b = differences[0]
        np.subtract(a[block], b[block], out=total)
        if coefficient != 1.0:
            total *= np.float32(coefficient)
        for coefficient, a, b in differences[1:]:
            np.subtract(a[block], b[block], out=part)
            part *= np.float32(coefficient)
            total += part
        return total

    def dot(self, a: Vector, b: Vector) -> float:
        """An inner product of blocks in float64."""
        left = self._left[: len(a)]
        left[:] = a
        if a is b:
            return float(np.dot(left, left))
        right = self._right[: len(a)]
        right[:] = b
        return float(np.dot(left, right))


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
    if len(a) <= BLOCK:
        return bool(np.isfinite(a).all())
    return all(bool(np.isfinite(a[block]).all()) for block in _blocks(len(a)))
