"""Arithmetic on flat float32 vectors. Every formula runs in float64 and is rounded once.

The loops are compiled (``kernels``). Each makes one pass over its operands, and its bits depend on nothing else. They
are loaded when the first vector is touched, since loading takes a moment.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
#: Entries per block of a sum of several vectors. The float64 sums of a block fit in the cache.
BLOCK = 1 << 13


@cache
def _kernels() -> ModuleType:
    from freshet.core import kernels

    return kernels


def load_kernels(say: Callable[[str], None]) -> None:
    """Get the loops ready: each is loaded or compiled when it is first called. Compiling takes a while; ``say`` so."""
    from freshet.core.compiling import tell_of_compiling

    tell_of_compiling(say)
    _kernels()


def tell_nobody_of_compiling() -> None:
    """End what ``load_kernels`` began: the run that wanted to know is over."""
    if "freshet.core.compiling" in sys.modules:
        from freshet.core.compiling import tell_of_compiling

        tell_of_compiling(None)


def combine(terms: Sequence[tuple[float, Vector]], out: Vector | None = None) -> Vector:
    """``sum_j c_j v_j``, added in the order given. ``out`` may be one of the inputs."""
    kernels, (first, vector) = _kernels(), terms[0]
    result = np.empty_like(vector) if out is None else out
    if any(len(other) != len(result) for _, other in terms):
        raise ValueError("vectors must have the same length")
    total = np.empty(min(BLOCK, len(vector)))
    for start in range(0, len(vector), BLOCK):
        stop = min(start + BLOCK, len(vector))
        sums = total[: stop - start]
        kernels.scale(sums, vector[start:stop], first)
        for coefficient, other in terms[1:]:
            kernels.add_scaled(sums, other[start:stop], coefficient)
        result[start:stop] = sums
    return result


def mix(w: Vector, u: Vector, alpha: float, out: Vector | None = None) -> Vector:
    """``(1 - alpha) w + alpha u``; exactly ``u`` for alpha = 1 and exactly ``w`` where both agree."""
    result = np.empty_like(w) if out is None else out
    _kernels().mix(result, w, u, alpha)
    return result


def mix_measured(w: Vector, u: Vector, alpha: float, n: int) -> tuple[Vector, float]:
    """``mix``, and the distance of its first n entries from those of w."""
    result = np.empty_like(w)
    return result, math.sqrt(_kernels().mix_measured(result, w, u, alpha, n))


def dot(a: Vector, b: Vector) -> float:
    """``<a, b>``."""
    result: float = _kernels().dot(a, b)
    return result


def dot_difference(a: Vector, b: Vector, h: Vector) -> float:
    """``<a - b, h>``."""
    result: float = _kernels().dot_difference(a, b, h)
    return result


def dot_differences(a: Vector, b: Vector, c: Vector, d: Vector) -> float:
    """``<a - b, c - d>``."""
    result: float = _kernels().dot_differences(a, b, c, d)
    return result


def norm(a: Vector) -> float:
    """``|a|``."""
    return math.sqrt(dot(a, a))


def distance(a: Vector, b: Vector) -> float:
    """``|a - b|``. It is finite exactly if all entries are, since no square of a float32 overflows a float64."""
    return math.sqrt(_kernels().square_distance(a, b))


def distance_from_line(u: Vector, a: Vector, b: Vector) -> float:
    """``min |u - a - x (b - a)|`` over 0 <= x <= 1: the distance of u from the line between a and b.

    It is not finite if u or a is not.
    """
    square, product, length = _kernels().line_products(u, a, b)
    if not square < math.inf:
        return math.inf
    x = min(1.0, max(0.0, product / length)) if length > 0.0 else 0.0
    return math.sqrt(max(0.0, square - x * (2.0 * product - x * length)))


def is_finite(a: Vector) -> bool:
    """True when no entry is NaN or infinite."""
    result: bool = _kernels().is_finite(a)
    return result
