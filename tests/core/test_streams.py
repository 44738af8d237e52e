"""Random streams are keyed by purpose and numbers, never by the order of calls."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.core.streams import stream, torch_seed

keys = st.tuples(st.sampled_from(["batches", "slot", "select"]), st.lists(st.integers(0, 2**32 - 1), max_size=3))


def draw(seed, purpose, *numbers):
    return tuple(stream(seed, purpose, *numbers).integers(2**62, size=4))


def test_the_numbers_of_a_stream_never_change():
    """Older runs are resumed and audited with these streams."""
    assert stream(0, "batches", 1, 2).integers(2**62) == 175927143291243752
    assert stream(7, "slot", 3).integers(2**62) == 4085643760229989054


def test_a_stream_does_not_depend_on_other_draws():
    alone = draw(7, "batches", 3, 1)
    stream(7, "batches", 3, 0).random(1000)
    np.random.default_rng(0).random(10)
    other = stream(7, "slot", 3, 1)
    mine = stream(7, "batches", 3, 1)
    other.random(5)
    assert tuple(mine.integers(2**62, size=4)) == alone


@settings(deadline=None, max_examples=60)
@given(keys, keys, st.integers(0, 1000))
def test_equal_keys_agree_and_different_keys_differ(one, two, seed):
    a, b = draw(seed, one[0], *one[1]), draw(seed, two[0], *two[1])
    assert (a == b) == (one == two)


def test_trailing_zeros_are_part_of_the_key():
    drawn = [draw(0, "x"), draw(0, "x", 0), draw(0, "x", 0, 0), draw(0, "x", 0, 0, 0)]
    assert all(a != b for a, b in itertools.combinations(drawn, 2))


def test_the_order_of_the_numbers_matters():
    assert draw(0, "x", 1, 2) != draw(0, "x", 2, 1)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63])
def test_torch_seeds_follow_the_same_keys(seed):
    assert torch_seed(seed, "torch", 1, 2) == torch_seed(seed, "torch", 1, 2)
    assert torch_seed(seed, "torch", 1, 2) != torch_seed(seed, "torch", 2, 1)
    assert 0 <= torch_seed(seed, "torch") < 2**63
