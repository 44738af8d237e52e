"""Server arithmetic: float64 inside, one rounding to float32 at the end (baselines C3)."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from freshet.core.kernels import LANES
from freshet.core.vectors import (
    BLOCK,
    combine,
    distance,
    distance_from_line,
    dot,
    dot_difference,
    dot_differences,
    is_finite,
    mix,
    mix_measured,
    norm,
)

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


def test_blocks_do_not_change_the_result():
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
    again = long_vector(1)
    assert combine([(0.75, again), (0.25, u)], out=again) is again
    np.testing.assert_array_equal(again, expected)


def test_inputs_do_not_change():
    w, u = long_vector(1), long_vector(2)
    before = bits(w), bits(u)
    mix(w, u, 0.3), dot(w, u), dot_difference(w, u, u), dot_differences(w, u, u, w), norm(w), distance(w, u)
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
    assert dot_difference(a, np.zeros(3, np.float32), b) == 1.0


@modest
@given(st.integers(0, 5 * LANES + 3))
def test_a_sum_has_fixed_lanes(size):
    a, b = long_vector(1, size), long_vector(2, size)
    lanes = [0.0] * LANES
    for i in range(size):
        lanes[i % LANES] += float(a[i]) * float(b[i])
    total = 0.0
    for lane in lanes:
        total += lane
    assert dot(a, b) == total


def test_inner_products_of_differences_are_those_of_float64():
    a, b, c, d = (long_vector(seed) for seed in (1, 2, 3, 4))
    wide = [v.astype(np.float64) for v in (a, b, c, d)]
    assert dot_difference(a, b, c) == pytest.approx(np.dot(wide[0] - wide[1], wide[2]), rel=1e-12)
    assert dot_differences(a, b, c, d) == pytest.approx(np.dot(wide[0] - wide[1], wide[2] - wide[3]), rel=1e-12)


def test_read_only_vectors_can_be_read():
    w, u = long_vector(1), long_vector(2)
    expected = dot(w, u)
    w.flags.writeable = False
    assert dot(w, u) == expected
    assert bits(mix(w, u, 0.0)) == bits(w)


def test_the_largest_numbers_are_finite():
    assert is_finite(np.full(2 * LANES + 1, np.finfo(np.float32).max, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, BLOCK, -1])
def test_one_bad_entry_anywhere_is_found(bad, place):
    vector = long_vector(1)
    assert is_finite(vector)
    vector[place] = bad
    assert not is_finite(vector)


@pytest.mark.parametrize(
    "operation",
    [
        lambda a, b: dot(a, b),
        lambda a, b: dot_difference(a, a, b),
        lambda a, b: dot_differences(a, a, b, a),
        lambda a, b: distance(b, a),
        lambda a, b: mix(a, b, 0.5),
        lambda a, b: combine([(1.0, a), (1.0, b)]),
        lambda a, b: combine([(1.0, b), (1.0, a)]),
        lambda a, b: combine([(1.0, a), (1.0, a)], out=b),
    ],
)
def test_vectors_of_different_lengths_are_refused(operation):
    with pytest.raises(ValueError, match="must have the same length"):
        operation(long_vector(1, 40), long_vector(2, 3))


@modest
@given(pairs, shares, st.integers(0, 40))
def test_a_measured_mixture_has_the_bits_of_the_mixture_and_of_its_distance(pair, alpha, n):
    w, u = pair
    new, length = mix_measured(w, u, alpha, n)
    assert bits(new) == bits(mix(w, u, alpha))
    assert length == math.sqrt(dot_differences(new[:n], w[:n], new[:n], w[:n])) == distance(new[:n], w[:n])


@modest
@given(pairs, st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_distances_are_finite_exactly_if_the_vectors_are(pair, wild, data):
    w, u = pair
    largest = np.full(len(w), np.finfo(np.float32).max, np.float32)
    assert math.isfinite(distance(largest, -largest)) and math.isfinite(distance_from_line(largest, -largest, largest))
    u[data.draw(st.integers(0, len(u) - 1))] = wild
    assert not math.isfinite(distance(u, w))
    assert not math.isfinite(distance_from_line(u, w, w)) and not math.isfinite(distance_from_line(u, w, largest))
