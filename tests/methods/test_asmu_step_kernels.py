"""FedASMU's steps: float32 differences, float64 products and lengths, one rounding of the new model."""

import numpy as np
import pytest

from freshet.core.kernels import LANES
from freshet.core.vectors import BLOCK
from freshet.methods.asmu.steps import move_along, next_step, write_step


def long_vector(seed: int, size: int = 2 * BLOCK + 17) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def bits(vector: np.ndarray) -> bytes:
    return vector.astype("<f4").tobytes()


@pytest.mark.parametrize("size", [1, LANES, 2 * BLOCK + 17])
def test_step_is_float32_and_its_length_float64(size):
    u, start, fresh, base = (long_vector(seed, size) for seed in (1, 2, 3, 4))
    step = np.empty_like(u)
    length = write_step(step, u, start, fresh, base, 0.3)
    np.testing.assert_array_equal(step, (u - start) - np.float32(0.3) * (fresh - base))
    exact = (u.astype(np.float64) - start) - 0.3 * (fresh.astype(np.float64) - base)
    np.testing.assert_allclose(step, exact, rtol=1e-5, atol=1e-6)
    assert length == pytest.approx(np.linalg.norm(step.astype(np.float64)), rel=1e-12)


@pytest.mark.parametrize("size", [1, LANES, 2 * BLOCK + 17])
def test_next_step_is_measured_along_the_unchanged_old_one(size):
    u, start, fresh, base, old = (long_vector(seed, size) for seed in (1, 2, 3, 4, 5))
    step, expected, before = np.empty_like(old), np.empty_like(old), old.copy()
    product, length = next_step(step, old, u, start, fresh, base, 0.3, 0.7)
    measured = ((u - base) - np.float32(0.7) * (fresh - base)).astype(np.float64)
    assert product == pytest.approx(np.dot(measured, old), rel=1e-12)
    exact = (u.astype(np.float64) - base) - 0.7 * (fresh.astype(np.float64) - base)
    assert product == pytest.approx(np.dot(exact, old), abs=1e-7 * np.linalg.norm(exact) * np.linalg.norm(old))
    assert length == write_step(expected, u, start, fresh, base, 0.3)
    np.testing.assert_array_equal(step, expected)
    np.testing.assert_array_equal(old, before)


def test_move_along_rounds_once_and_may_overwrite_the_step():
    w, step = long_vector(1), long_vector(2)
    new = np.empty_like(w)
    move_along(w, step, 0.3, new)
    np.testing.assert_array_equal(new, (w.astype(np.float64) + 0.3 * step.astype(np.float64)).astype(np.float32))
    move_along(w, step, 0.3, step)
    np.testing.assert_array_equal(step, new)


def test_zero_step_changes_no_bit():
    w, u = long_vector(1), long_vector(2)
    step, new = np.empty_like(w), np.empty_like(w)
    assert write_step(step, u, u, w, w, 0.5) == 0.0
    move_along(w, step, 0.3, new)
    assert bits(new) == bits(w)


@pytest.mark.parametrize(
    "operation",
    [
        lambda a, b: write_step(a, a, a, b, a, 0.5),
        lambda a, b: next_step(a, a, a, b, a, a, 0.5, 0.5),
        lambda a, b: move_along(a, a, 0.5, b),
    ],
)
def test_vectors_of_different_lengths_are_refused(operation):
    with pytest.raises(ValueError, match="must have the same length"):
        operation(long_vector(1, 40), long_vector(2, 3))
