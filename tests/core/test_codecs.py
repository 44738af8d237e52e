"""Vectors in fewer bytes: how far off, what is kept, what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from freshet.core.compression import BLOCK, Codec, decode, encode, encode_with_feedback, encoded_bytes, topk_count

CODECS: list[Codec] = ["none", "int8", "topk"]
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = arrays(np.float32, st.integers(1, 3 * BLOCK + 7), elements=numbers)
shares = st.floats(0.001, 1.0)


def there_and_back(codec: Codec, v: np.ndarray, keep: float) -> np.ndarray:
    return decode(codec, encode(codec, v, keep), len(v), keep)


@settings(deadline=None)
@given(vectors)
def test_int8_is_off_by_half_a_step_of_its_block_at_most(v: np.ndarray) -> None:
    found = there_and_back("int8", v, 1.0).astype(np.float64)
    for start in range(0, len(v), BLOCK):
        block = v[start : start + BLOCK].astype(np.float64)
        half = np.abs(block).max() / 127 / 2
        # the step itself is a float32, and so is the result: an entry may be off by a few roundings of it more
        slack = 127 * half * 2**-22 + 1e-43
        assert np.abs(found[start : start + BLOCK] - block).max() <= half + slack


@settings(deadline=None)
@given(vectors, shares)
def test_topk_keeps_the_largest_and_nothing_else(v: np.ndarray, keep: float) -> None:
    found, count = there_and_back("topk", v, keep), topk_count(len(v), keep)
    naive = np.zeros_like(v)
    for place in sorted(range(len(v)), key=lambda i: (-abs(float(v[i])), i))[:count]:
        naive[place] = v[place]
    assert np.array_equal(found, naive)
    assert np.count_nonzero(found) <= count


@settings(deadline=None)
@given(vectors)
def test_as_it_is_is_as_it_is(v: np.ndarray) -> None:
    assert there_and_back("none", v, 0.5).tobytes() == v.tobytes()
    assert there_and_back("topk", v, 1.0).tobytes() == v.tobytes()


@settings(deadline=None)
@given(vectors, shares, st.sampled_from(CODECS))
def test_a_message_weighs_what_it_was_said_to_weigh(v: np.ndarray, keep: float, codec: Codec) -> None:
    assert sum(a.nbytes for a in encode(codec, v, keep).values()) == encoded_bytes(codec, len(v), keep)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(arrays(np.float32, 300, elements=st.floats(-100, 100, width=32)), min_size=1, max_size=12),
    st.floats(0.01, 0.5),
    st.sampled_from(["int8", "topk"]),
)
def test_with_feedback_nothing_is_lost_in_the_long_run(stream: list[np.ndarray], keep: float, codec: Codec) -> None:
    residual, arrived = None, np.zeros(300)
    for v in stream:
        sent = encode_with_feedback(codec, v, residual, keep)
        residual = sent.residual
        arrived += sent.decoded
    meant = np.sum([v.astype(np.float64) for v in stream], axis=0)
    assert np.abs(meant - (arrived + residual)).max() <= 1e-3 * len(stream), "only roundings to float32 are gone"


def test_without_feedback_small_numbers_would_never_arrive() -> None:
    v = np.array([1.0, 0.3], np.float32)
    residual, with_it, without = None, np.zeros(2), np.zeros(2)
    for _ in range(20):
        sent = encode_with_feedback("topk", v, residual, 0.5)
        residual = sent.residual
        with_it += sent.decoded
        without += there_and_back("topk", v, 0.5)
    assert without[1] == 0
    assert abs(with_it[1] - 20 * 0.3) <= 1.3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_finite_is_not_sent(codec: Codec, bad: float) -> None:
    v = np.ones(10, np.float32)
    v[3] = bad
    with pytest.raises(ValueError, match="not finite"):
        encode(codec, v, 0.5)


def good(codec: Codec) -> dict[str, np.ndarray]:
    return encode(codec, np.linspace(-1, 1, 600, dtype=np.float32), 0.1)


HOSTILE = {
    "no arrays": ("int8", lambda a: {}),
    "one too many": ("int8", lambda a: a | {"more": a["steps"]}),
    "too long": ("int8", lambda a: a | {"numbers": np.zeros(10**6, np.int8)}),
    "too short": ("int8", lambda a: a | {"numbers": a["numbers"][:-1]}),
    "another type": ("int8", lambda a: a | {"steps": a["steps"].astype(np.float64)}),
    "another shape": ("int8", lambda a: a | {"numbers": a["numbers"].reshape(2, -1)}),
    "steps are not finite": ("int8", lambda a: a | {"steps": a["steps"] * np.float32(np.inf)}),
    "steps below 0": ("int8", lambda a: a | {"steps": -a["steps"]}),
    "-128": ("int8", lambda a: a | {"numbers": np.full(600, -128, np.int8)}),
    "values are not finite": ("topk", lambda a: a | {"values": np.full(60, np.nan, np.float32)}),
    "a place outside": ("topk", lambda a: a | {"places": a["places"] + np.uint32(2**31)}),
    "places twice": ("topk", lambda a: a | {"places": np.zeros(60, np.uint32)}),
    "places that go back": ("topk", lambda a: a | {"places": a["places"][::-1].copy()}),
    "more values than asked for": ("topk", lambda a: encode("topk", np.ones(600, np.float32), 0.5)),
    "float16": ("none", lambda a: {"values": a["values"].astype(np.float16)}),
    "infinite": ("none", lambda a: {"values": np.full(600, np.inf, np.float32)}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_not_of_the_form_is_refused(case: str) -> None:
    codec, spoil = HOSTILE[case]
    assert len(decode(codec, good(codec), 600, 0.1)) == 600
    with pytest.raises(ValueError):
        decode(codec, spoil(good(codec)), 600, 0.1)
