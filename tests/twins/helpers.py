"""The only code that the twins share: casts, an exact inner product, and the parts of a flat model vector."""

from __future__ import annotations

import math

import numpy as np


def f64(v) -> np.ndarray:
    """A fresh float64 copy."""
    return np.array(v, dtype=np.float64)


def f32(v) -> np.ndarray:
    """A fresh float32 copy: how a model vector is stored."""
    return np.array(v, dtype=np.float32)


def dot(a, b) -> float:
    """Inner product in float64, summed exactly."""
    return math.fsum(f64(a) * f64(b))


def norm(a) -> float:
    return math.sqrt(dot(a, a))


def cut(size: int, learnable: int | None, counters: int) -> tuple[int, int]:
    """A model vector is [learnable | float buffers | integer counters]: where the 2nd and the 3rd part begin."""
    end_of_learnable = size - counters if learnable is None else learnable
    end_of_buffers = size - counters
    assert 0 <= end_of_learnable <= end_of_buffers <= size
    return end_of_learnable, end_of_buffers


def counter_max(models: list, start: int) -> np.ndarray:
    """C4 (b): the integer counters take the largest value among the given models."""
    return np.max(np.stack([f64(m)[start:] for m in models]), axis=0)
