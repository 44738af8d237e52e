"""Compiled loops of ``steps``: differences of close models in float32, their products in float64."""

import numpy as np
from numba import types

from freshet.core.compiling import compile_loop, inline
from freshet.core.kernels import IN, LANES, OUT, REAL, SAME_LENGTH, Sums, Vector

Single = np.float32
_pair = types.UniTuple(REAL, 2)  # type: ignore[no-untyped-call]


@inline
def _step_entry(
    i: int, lane: int, squares: Sums, step: Vector, u: Vector, start: Vector, fresh: Vector, base: Vector, beta: Single
) -> None:
    entry = (u[i] - start[i]) - beta * (fresh[i] - base[i])
    squares[lane] += np.float64(entry) * np.float64(entry)
    step[i] = entry


@compile_loop(REAL(OUT, IN, IN, IN, IN, REAL))
def write_step(step: Vector, u: Vector, start: Vector, fresh: Vector, base: Vector, beta: float) -> float:
    """``step <- (u - start) - beta (fresh - base)`` in float32 (exact for close models); returns ``|step|^2``."""
    if not step.size == u.size == start.size == fresh.size == base.size:
        raise ValueError(SAME_LENGTH)
    squares, whole, part = np.zeros(LANES), u.size - u.size % LANES, np.float32(beta)
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            _step_entry(i + lane, lane, squares, step, u, start, fresh, base, part)
    for i in range(whole, u.size):
        _step_entry(i, i - whole, squares, step, u, start, fresh, base, part)
    return float(squares.sum())


@inline
def _measure_entry(
    i: int, lane: int, sums: Sums, old: Vector, u: Vector, fresh: Vector, base: Vector, beta: Single
) -> None:
    sums[lane] += np.float64((u[i] - base[i]) - beta * (fresh[i] - base[i])) * np.float64(old[i])


@compile_loop(_pair(OUT, IN, IN, IN, IN, IN, REAL, REAL))
def next_step(
    step: Vector, old: Vector, u: Vector, start: Vector, fresh: Vector, base: Vector, beta: float, beta_measured: float
) -> tuple[float, float]:
    """``<(u - base) - beta_measured (fresh - base), old>``, and ``write_step``."""
    if not step.size == old.size == u.size == start.size == fresh.size == base.size:
        raise ValueError(SAME_LENGTH)
    sums, squares, whole = np.zeros(LANES), np.zeros(LANES), u.size - u.size % LANES
    part, measured = np.float32(beta), np.float32(beta_measured)
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            _measure_entry(i + lane, lane, sums, old, u, fresh, base, measured)
            _step_entry(i + lane, lane, squares, step, u, start, fresh, base, part)
    for i in range(whole, u.size):
        _measure_entry(i, i - whole, sums, old, u, fresh, base, measured)
        _step_entry(i, i - whole, squares, step, u, start, fresh, base, part)
    return float(sums.sum()), float(squares.sum())


@compile_loop(types.void(OUT, IN, IN, REAL))
def move_along(out: Vector, w: Vector, step: Vector, alpha: float) -> None:
    """``out <- w + alpha step``."""
    if not out.size == w.size == step.size:
        raise ValueError(SAME_LENGTH)
    for i in range(out.size):
        out[i] = w[i] + alpha * step[i]
