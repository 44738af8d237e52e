"""Compression: errors, residuals, refused arrays, and what server and devices hold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from freshet.core.compression import (
    BLOCK,
    RESIDUAL,
    Codec,
    LAYERS_NOTE,
    LinkOptions,
    Links,
    decode,
    encode,
    encode_upload,
    encode_with_feedback,
    encoded_bytes,
    model_bytes,
    topk_count,
)
from freshet.core.layout import Layout
from freshet.core.messages import UNREAD, Assignment, Fresh, Packed, Upload

CODECS: list[Codec] = ["none", "int8", "topk"]
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = arrays(np.float32, st.integers(1, 3 * BLOCK + 7), elements=numbers)
shares = st.floats(0.001, 1.0)


def there_and_back(codec: Codec, v: np.ndarray, keep: float) -> np.ndarray:
    return decode(codec, encode(codec, v, keep), len(v), keep)


@settings(deadline=None)
@given(vectors)
def test_int8_is_off_by_at_most_half_a_step_of_its_block(v: np.ndarray) -> None:
    found = there_and_back("int8", v, 1.0).astype(np.float64)
    for start in range(0, len(v), BLOCK):
        block = v[start : start + BLOCK].astype(np.float64)
        half = np.abs(block).max() / 127 / 2
        # step and result are float32, so an entry may be off by a few roundings more
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
def test_no_codec_changes_nothing(v: np.ndarray) -> None:
    assert there_and_back("none", v, 0.5).tobytes() == v.tobytes()
    assert there_and_back("topk", v, 1.0).tobytes() == v.tobytes()


@settings(deadline=None)
@given(vectors, shares, st.sampled_from(CODECS))
def test_encoded_bytes_predicts_the_size_of_a_message(v: np.ndarray, keep: float, codec: Codec) -> None:
    assert sum(a.nbytes for a in encode(codec, v, keep).values()) == encoded_bytes(codec, len(v), keep)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(arrays(np.float32, 300, elements=st.floats(-100, 100, width=32)), min_size=1, max_size=12),
    st.floats(0.01, 0.5),
    st.sampled_from(["int8", "topk"]),
)
def test_error_feedback_loses_nothing_in_the_long_run(stream: list[np.ndarray], keep: float, codec: Codec) -> None:
    residual, arrived = None, np.zeros(300)
    for v in stream:
        sent = encode_with_feedback(codec, v, residual, keep)
        residual = sent.residual
        arrived += sent.decoded
    meant = np.sum([v.astype(np.float64) for v in stream], axis=0)
    assert np.abs(meant - (arrived + residual)).max() <= 1e-3 * len(stream), "only float32 roundings are lost"


def test_without_feedback_small_numbers_never_arrive() -> None:
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
def test_vectors_that_are_not_finite_are_not_sent(codec: Codec, bad: float) -> None:
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
def test_malformed_arrays_are_refused(case: str) -> None:
    codec, spoil = HOSTILE[case]
    assert len(decode(codec, good(codec), 600, 0.1)) == 600
    with pytest.raises(ValueError):
        decode(codec, spoil(good(codec)), 600, 0.1)


LAYOUT = Layout.build([("w", (1000,), "learnable"), ("mean", (3,), "buffer"), ("count", (), "counter")])
RNG = np.random.default_rng(0)


def model(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=LAYOUT.size).astype(np.float32)


def assignment(device: int, version: int, weights: np.ndarray) -> Assignment:
    return Assignment(device, 1, version, version, weights, 5, 0.1)


def test_the_next_message_includes_what_the_last_one_lacked() -> None:
    links, w = Links(LinkOptions(down="topk", keep=0.25), LAYOUT), model(1)
    links.encode_assignment(assignment(0, 1, model(0)))
    errors = [np.abs(links.encode_assignment(assignment(0, 2, w)).weights - w).max() for _ in range(4)]
    assert errors[0] > 0.5 and sorted(errors, reverse=True) == errors
    assert errors[-1] < 1e-6, "four quarters make the whole"


def test_int8_errors_shrink_with_the_differences() -> None:
    links, w = Links(LinkOptions(down="int8"), LAYOUT), model(1)
    first = np.abs(links.encode_assignment(assignment(0, 1, w)).weights - w).max()
    again = np.abs(links.encode_assignment(assignment(0, 1, w)).weights - w).max()
    assert 0 < first < 0.02
    assert again <= first / 100


def test_statistics_and_counters_are_sent_unchanged() -> None:
    for down in ("int8", "topk"):
        links, w = Links(LinkOptions(down=down), LAYOUT), model(2)
        links.encode_assignment(assignment(0, 1, model(3)))
        assert np.array_equal(links.encode_assignment(assignment(0, 2, w)).weights[1000:], w[1000:])
    sent = encode_upload(LinkOptions(up="int8"), LAYOUT, model(2), model(3), {}, 1)
    assert np.array_equal(sent.packed.arrays["rest"], model(2)[1000:])


def test_messages_count_the_bytes_sent() -> None:
    blocks = -(-1000 // BLOCK)
    assert model_bytes(LinkOptions(down="int8", up="topk", keep=0.05), LAYOUT) == (1000 + 4 * blocks + 16, 50 * 8 + 16)
    links = Links(LinkOptions(down="topk", keep=0.05), LAYOUT)
    assert links.encode_assignment(assignment(0, 1, model(0))).nbytes == 4 * LAYOUT.size, (
        "the first model is sent whole"
    )
    assert links.encode_assignment(assignment(0, 2, model(1))).nbytes == 50 * 8 + 16
    vectors = {"control": np.zeros(1000, np.float32)}
    assert links.encode_assignment(assignment(0, 3, model(2))._replace(vectors=vectors)).nbytes == 50 * 8 + 16 + 4000


def test_the_fresh_model_is_sent_as_a_difference_and_a_repeated_request_gets_the_same() -> None:
    links, w = Links(LinkOptions(down="topk", keep=0.1), LAYOUT), model(1)
    held = links.encode_assignment(assignment(0, 1, model(0))).weights
    fresh = links.encode_fresh(0, Fresh(2, 2, w))
    changed = np.flatnonzero(fresh.weights[:1000] != held[:1000])
    assert len(changed) == 100 and fresh.nbytes == 100 * 8 + 16
    again = links.encode_fresh(0, Fresh(2, 2, w))
    assert again.weights.tobytes() == fresh.weights.tobytes() and again.nbytes == fresh.nbytes


def test_a_device_gets_the_whole_model_after_a_lost_trip() -> None:
    links = Links(LinkOptions(down="topk", keep=0.1), LAYOUT)
    links.encode_assignment(assignment(0, 1, model(0)))
    links.forget(0)
    links.forget(5)
    assert np.array_equal(links.encode_assignment(assignment(0, 2, model(1))).weights, model(1))


def test_an_upload_is_its_base_plus_the_difference_and_the_residual_follows() -> None:
    options, base, memory, arrived = LinkOptions(up="topk", keep=0.1), model(0), {"own": 1}, np.zeros(1000)
    step = RNG.normal(size=LAYOUT.size).astype(np.float32)
    links = Links(options, LAYOUT)
    for _ in range(60):
        sent = encode_upload(options, LAYOUT, base + step, base, memory, 1)
        memory = sent.memory
        coded = Upload(0, 1, 1, UNREAD, 1, packed=sent.packed)
        assert coded.nbytes == 100 * 8 + 16
        upload = links.decode_upload(coded, lambda: base)
        arrived += upload.weights[:1000].astype(np.float64) - base[:1000]
    assert memory["own"] == 1
    meant = 60 * ((base + step).astype(np.float64) - base)[:1000]
    assert np.abs(arrived + memory[RESIDUAL] - meant).max() < 1e-3
    assert np.abs(memory[RESIDUAL]).max() < 20 * np.abs(step).max(), "the residual stays bounded"


def test_an_overflowing_difference_is_sent_whole_and_a_diverged_model_stays_diverged() -> None:
    links, huge = Links(LinkOptions(down="int8"), LAYOUT), np.full(LAYOUT.size, 3e38, np.float32)
    links.encode_assignment(assignment(0, 1, huge))
    arrived = links.encode_assignment(assignment(0, 2, -huge))
    assert np.array_equal(arrived.weights, -huge) and arrived.nbytes == 4 * LAYOUT.size
    for codec in ("int8", "topk"):
        options = LinkOptions(up=codec)
        sent = encode_upload(options, LAYOUT, huge, -huge, {"own": 1}, 1)
        assert sent.memory == {"own": 1} and sent.packed.nbytes == model_bytes(options, LAYOUT)[1]
        nan = encode_upload(options, LAYOUT, huge * np.float32(np.nan), huge, {}, 1)
        for packed in (sent.packed, nan.packed):
            with pytest.raises(ValueError, match="^model has entries that are not finite$"):
                Links(options, LAYOUT).decode_upload(Upload(0, 1, 1, UNREAD, 1, packed=packed), lambda: huge)


def test_device_copies_are_saved_and_must_have_the_right_size() -> None:
    options = LinkOptions(down="topk", keep=0.1)
    links, other = Links(options, LAYOUT), Links(options, LAYOUT)
    links.encode_assignment(assignment(7, 1, model(0)))
    other.restore(links.state())
    assert (
        other.encode_assignment(assignment(7, 2, model(1))).weights.tobytes()
        == links.encode_assignment(assignment(7, 2, model(1))).weights.tobytes()
    )
    small = Layout.build([("w", (10,), "learnable")])
    with pytest.raises(ValueError, match="10 entries"):
        Links(options, small).restore(links.state())
