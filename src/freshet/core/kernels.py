"""The compiled loops behind ``vectors``: one pass over the models, with sums and mixtures in float64.

A sum runs in ``LANES`` partial sums, entry i in lane i mod LANES, which are added in order at the end. So its bits are
the same on every processor and with any number of threads, and the compiler can still vectorise over the lanes.
"""

import numpy as np
from numba import types
from numpy.typing import NDArray

from freshet.core.compiling import compile_loop, inline

Vector = NDArray[np.float32]
Sums = NDArray[np.float64]
LANES = 16
SAME_LENGTH = "vectors must have the same length"

REAL = types.float64
IN = types.Array(types.float32, 1, "C", readonly=True)
OUT = types.Array(types.float32, 1, "C")
WIDE = types.Array(types.float64, 1, "C")


@compile_loop(REAL(IN, IN))
def dot(a: Vector, b: Vector) -> float:
    """``<a, b>``."""
    if a.size != b.size:
        raise ValueError(SAME_LENGTH)
    sums, whole = np.zeros(LANES), a.size - a.size % LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            sums[lane] += np.float64(a[i + lane]) * np.float64(b[i + lane])
    for i in range(whole, a.size):
        sums[i - whole] += np.float64(a[i]) * np.float64(b[i])
    return float(sums.sum())


@inline
def _difference_entry(i: int, lane: int, sums: Sums, a: Vector, b: Vector, h: Vector) -> None:
    sums[lane] += (np.float64(a[i]) - np.float64(b[i])) * np.float64(h[i])


@compile_loop(REAL(IN, IN, IN))
def dot_difference(a: Vector, b: Vector, h: Vector) -> float:
    """``<a - b, h>``."""
    if not a.size == b.size == h.size:
        raise ValueError(SAME_LENGTH)
    sums, whole = np.zeros(LANES), a.size - a.size % LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            _difference_entry(i + lane, lane, sums, a, b, h)
    for i in range(whole, a.size):
        _difference_entry(i, i - whole, sums, a, b, h)
    return float(sums.sum())


@inline
def _differences_entry(i: int, lane: int, sums: Sums, a: Vector, b: Vector, c: Vector, d: Vector) -> None:
    sums[lane] += (np.float64(a[i]) - np.float64(b[i])) * (np.float64(c[i]) - np.float64(d[i]))


@compile_loop(REAL(IN, IN, IN, IN))
def dot_differences(a: Vector, b: Vector, c: Vector, d: Vector) -> float:
    """``<a - b, c - d>``."""
    if not a.size == b.size == c.size == d.size:
        raise ValueError(SAME_LENGTH)
    sums, whole = np.zeros(LANES), a.size - a.size % LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            _differences_entry(i + lane, lane, sums, a, b, c, d)
    for i in range(whole, a.size):
        _differences_entry(i, i - whole, sums, a, b, c, d)
    return float(sums.sum())


@inline
def _square_entry(i: int, lane: int, sums: Sums, a: Vector, b: Vector) -> None:
    off = np.float64(a[i]) - np.float64(b[i])
    sums[lane] += off * off


@compile_loop(REAL(IN, IN))
def square_distance(a: Vector, b: Vector) -> float:
    """``|a - b|^2``."""
    if a.size != b.size:
        raise ValueError(SAME_LENGTH)
    sums, whole = np.zeros(LANES), a.size - a.size % LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            _square_entry(i + lane, lane, sums, a, b)
    for i in range(whole, a.size):
        _square_entry(i, i - whole, sums, a, b)
    return float(sums.sum())


@inline
def _line_entry(i: int, lane: int, sums: Sums, u: Vector, a: Vector, b: Vector) -> None:
    off, along = np.float64(u[i]) - np.float64(a[i]), np.float64(b[i]) - np.float64(a[i])
    sums[lane] += off * off
    sums[LANES + lane] += off * along
    sums[2 * LANES + lane] += along * along


@compile_loop(types.UniTuple(REAL, 3)(IN, IN, IN))  # type: ignore[no-untyped-call]
def line_products(u: Vector, a: Vector, b: Vector) -> tuple[float, float, float]:
    """``|u - a|^2``, ``<u - a, b - a>`` and ``|b - a|^2``."""
    if not u.size == a.size == b.size:
        raise ValueError(SAME_LENGTH)
    sums, whole = np.zeros(3 * LANES), u.size - u.size % LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            _line_entry(i + lane, lane, sums, u, a, b)
    for i in range(whole, u.size):
        _line_entry(i, i - whole, sums, u, a, b)
    return float(sums[:LANES].sum()), float(sums[LANES : 2 * LANES].sum()), float(sums[2 * LANES :].sum())


@compile_loop(types.boolean(IN))
def is_finite(a: Vector) -> bool:
    """No entry is NaN or infinite: 0 times each of them is 0."""
    sums, whole = np.zeros(LANES, np.float32), a.size - a.size % LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            sums[lane] += np.float32(0.0) * a[i + lane]
    for i in range(whole, a.size):
        sums[i - whole] += np.float32(0.0) * a[i]
    return bool(sums.sum() == 0.0)


@compile_loop(types.void(OUT, IN, IN, REAL))
def mix(out: Vector, w: Vector, u: Vector, alpha: float) -> None:
    """``out <- (1 - alpha) w + alpha u``."""
    if not out.size == w.size == u.size:
        raise ValueError(SAME_LENGTH)
    for i in range(out.size):
        out[i] = (1.0 - alpha) * w[i] + alpha * u[i]


@compile_loop(REAL(OUT, IN, IN, REAL, types.int64))
def mix_measured(out: Vector, w: Vector, u: Vector, alpha: float, n: int) -> float:
    """``mix``, and ``|out - w|^2`` over the first n entries."""
    mix(out, w, u, alpha)
    return square_distance(out[:n], w[:n])


@compile_loop(types.void(WIDE, IN, REAL))
def scale(total: Sums, vector: Vector, factor: float) -> None:
    """``total <- factor vector``."""
    if total.size != vector.size:
        raise ValueError(SAME_LENGTH)
    for i in range(total.size):
        total[i] = factor * vector[i]


@compile_loop(types.void(WIDE, IN, REAL))
def add_scaled(total: Sums, vector: Vector, factor: float) -> None:
    """``total <- total + factor vector``."""
    if total.size != vector.size:
        raise ValueError(SAME_LENGTH)
    for i in range(total.size):
        total[i] += factor * vector[i]
