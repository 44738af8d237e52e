"""Server arithmetic: float64 inside, one rounding to float32 at the end (baselines C3)."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from freshet.core.vectors import BLOCK, combine, distance, dot, dot_differences, is_finite, mix, norm, step_along

modest = settings(deadline=None, max_examples=60)
floats = st.floats(-1e6, 1e6, width=32)
vectors = hnp.arrays(np.float32, st.integers(1, 40), elements=floats)
pairs = st.integers(1, 40).flatmap(
    lambda n: st.tuples(hnp.arrays(np.float32, n, elements=floats), hnp.arrays(np.float32, n, elements=floats))
)
shares = st.floats(0, 1)


def long_vector(seed: int, size: int = 2 * BLOCK + 17) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def bits(vector: np.ndarray) -> bytes:
    return vector.astype("<f4").tobytes()


@modest
@given(pairs, shares)
def test_mix_is_the_float64_formula_rounded_once(pair, alpha):
    w, u = pair
    expected = ((1.0 - alpha) * w.astype(np.float64) + alpha * u.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(mix(w, u, alpha), expected)


@modest
@given(pairs)
def test_alpha_one_takes_the_upload_and_alpha_zero_keeps_the_model_exactly(pair):
    w, u = pair
    np.testing.assert_array_equal(mix(w, u, 1.0), u)
    np.testing.assert_array_equal(mix(w, u, 0.0), w)


@modest
@given(vectors, shares)
def test_mixing_a_model_with_itself_changes_no_bit(w, alpha):
    assert bits(mix(w, w.copy(), alpha)) == bits(w)


def test_blocks_leave_no_seam():
    w, u = long_vector(1), long_vector(2)
    expected = (0.7 * w.astype(np.float64) + (1 - 0.7) * u.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(combine([(0.7, w), (1 - 0.7, u)]), expected)


def test_combine_adds_in_the_order_given():
    terms = [(1.0, np.array([1e16], np.float32)), (1.0, np.ones(1, np.float32)), (-1.0, np.array([1e16], np.float32))]
    assert combine(terms)[0] == 0.0
    assert combine([terms[0], terms[2], terms[1]])[0] == 1.0


def test_combine_may_write_into_one_of_its_inputs():
    w, u = long_vector(1), long_vector(2)
    expected = mix(w, u, 0.25)
    assert mix(w, u, 0.25, out=w) is w
    np.testing.assert_array_equal(w, expected)


def test_inputs_are_left_as_they_are():
    w, u = long_vector(1), long_vector(2)
    before = bits(w), bits(u)
    mix(w, u, 0.3), dot(w, u), dot_differences([(2.0, w, u)], u), norm(w), distance(w, u)
    assert (bits(w), bits(u)) == before


@modest
@given(pairs)
def test_dot_norm_and_distance_agree_with_exact_sums(pair):
    a, b = (v.astype(np.float64) for v in pair)
    terms = [float(x) * float(y) for x, y in zip(a, b, strict=True)]
    slack = 1e-14 * (1.0 + math.fsum(abs(t) for t in terms))
    assert abs(dot(*pair) - math.fsum(terms)) <= slack
    assert norm(pair[0]) == pytest.approx(math.sqrt(math.fsum(float(x) ** 2 for x in a)), rel=1e-13)
    exact = math.sqrt(math.fsum(float(x - y) ** 2 for x, y in zip(a, b, strict=True)))
    assert distance(*pair) == pytest.approx(exact, rel=1e-13)


def test_a_cancelling_inner_product_keeps_what_float32_would_lose():
    a = np.array([3e7, 1.0, -3e7], np.float32)
    b = np.ones(3, np.float32)
    assert dot(a, b) == 1.0
    assert dot_differences([(1.0, a, np.zeros(3, np.float32))], b) == 1.0


def test_dot_differences_equals_the_dot_of_the_float64_sum():
    u, v, w, b = (long_vector(seed) for seed in (1, 2, 3, 4))
    difference = 0.3 * (u.astype(np.float64) - v) - 1.7 * (w.astype(np.float64) - v)
    scale = np.linalg.norm(difference) * np.linalg.norm(b)
    assert dot_differences([(0.3, u, v), (-1.7, w, v)], b) == pytest.approx(np.dot(difference, b), abs=1e-7 * scale)


def test_a_step_along_differences_moves_the_model_and_keeps_the_step():
    w, u, v = (long_vector(seed) for seed in (1, 2, 3))
    new, step = np.empty_like(w), np.empty_like(w)
    length = step_along(w, [(1.0, u, v), (-0.5, w, v)], 0.3, new, step)
    exact = (u.astype(np.float64) - v) - 0.5 * (w.astype(np.float64) - v)
    np.testing.assert_allclose(step, exact, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new, w + 0.3 * exact, rtol=1e-5, atol=1e-6)
    assert length == pytest.approx(np.linalg.norm(exact), rel=1e-6)


def test_a_step_of_no_length_changes_no_bit():
    w, u = long_vector(1), long_vector(2)
    new = np.empty_like(w)
    assert step_along(w, [(1.0, u, u)], 0.3, new, np.empty_like(w)) == 0.0
    np.testing.assert_array_equal(new, w)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, BLOCK, -1])
def test_one_bad_entry_anywhere_is_found(bad, place):
    vector = long_vector(1)
    assert is_finite(vector)
    vector[place] = bad
    assert not is_finite(vector)
