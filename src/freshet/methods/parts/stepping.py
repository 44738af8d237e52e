"""Arithmetic on FedASMU's steps: differences of close models in float32, their products and lengths in float64."""

import math
from functools import cache
from types import ModuleType

from freshet.core.vectors import Vector


@cache
def _kernels() -> ModuleType:
    from freshet.methods.parts import step_kernels

    return step_kernels


def write_step(step: Vector, u: Vector, start: Vector, fresh: Vector, base: Vector, beta: float) -> float:
    """``step <- (u - start) - beta (fresh - base)``; returns ``|step|``."""
    return math.sqrt(_kernels().write_step(step, u, start, fresh, base, beta))


def next_step(
    step: Vector, old: Vector, u: Vector, start: Vector, fresh: Vector, base: Vector, beta: float, beta_measured: float
) -> tuple[float, float]:
    """``<(u - base) - beta_measured (fresh - base), old>``, and ``write_step``, in one pass."""
    product, square = _kernels().next_step(step, old, u, start, fresh, base, beta, beta_measured)
    return product, math.sqrt(square)


def move_along(w: Vector, step: Vector, alpha: float, out: Vector) -> None:
    """``out <- w + alpha step``; ``out`` may be the step itself."""
    _kernels().move_along(out, w, step, alpha)
