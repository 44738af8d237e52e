"""Thin links, the server's side and the device's: what each holds, and what it weighs."""

import numpy as np
import pytest

from freshet.core.compression import BLOCK, RESIDUAL, LinkOptions, Links, encode_upload, model_bytes
from freshet.core.layout import Layout
from freshet.core.messages import Assignment, Fresh, Upload

LAYOUT = Layout.build([("w", (1000,), "learnable"), ("mean", (3,), "buffer"), ("count", (), "counter")])
RNG = np.random.default_rng(0)


def model(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=LAYOUT.size).astype(np.float32)


def given(device: int, version: int, weights: np.ndarray) -> Assignment:
    return Assignment(device, 1, version, version, weights, 5, 0.1)


def test_what_lacks_in_one_message_is_in_the_next() -> None:
    links, w = Links(LinkOptions(down="topk", keep=0.25), LAYOUT), model(1)
    links.encode_assignment(given(0, 1, model(0)))
    errors = [np.abs(links.encode_assignment(given(0, 2, w)).weights - w).max() for _ in range(4)]
    assert errors[0] > 0.5 and sorted(errors, reverse=True) == errors
    assert errors[-1] < 1e-6, "four quarters are the whole"


def test_int8_differences_shrink_and_so_do_their_errors() -> None:
    links, w = Links(LinkOptions(down="int8"), LAYOUT), model(1)
    first = np.abs(links.encode_assignment(given(0, 1, w)).weights - w).max()
    again = np.abs(links.encode_assignment(given(0, 1, w)).weights - w).max()
    assert 0 < first < 0.02
    assert again <= first / 100


def test_statistics_and_counters_travel_as_they_are() -> None:
    for down in ("int8", "topk"):
        links, w = Links(LinkOptions(down=down), LAYOUT), model(2)
        links.encode_assignment(given(0, 1, model(3)))
        assert np.array_equal(links.encode_assignment(given(0, 2, w)).weights[1000:], w[1000:])
    sent = encode_upload(LinkOptions(up="int8"), LAYOUT, model(2), model(3), {})
    assert np.array_equal(sent.weights[1000:], model(2)[1000:])


def test_messages_weigh_what_travels() -> None:
    blocks = -(-1000 // BLOCK)
    assert model_bytes(LinkOptions(down="int8", up="topk", keep=0.05), LAYOUT) == (1000 + 4 * blocks + 16, 50 * 8 + 16)
    links = Links(LinkOptions(down="topk", keep=0.05), LAYOUT)
    assert links.encode_assignment(given(0, 1, model(0))).nbytes == 4 * LAYOUT.size, "the first model goes down whole"
    assert links.encode_assignment(given(0, 2, model(1))).nbytes == 50 * 8 + 16
    vectors = {"control": np.zeros(1000, np.float32)}
    assert links.encode_assignment(given(0, 3, model(2))._replace(vectors=vectors)).nbytes == 50 * 8 + 16 + 4000


def test_the_fresh_model_is_a_difference_to_what_the_device_holds_and_can_be_asked_for_twice() -> None:
    links, w = Links(LinkOptions(down="topk", keep=0.1), LAYOUT), model(1)
    held = links.encode_assignment(given(0, 1, model(0))).weights
    fresh = links.encode_fresh(0, Fresh(2, 2, w))
    changed = np.flatnonzero(fresh.weights[:1000] != held[:1000])
    assert len(changed) == 100 and fresh.nbytes == 100 * 8 + 16
    again = links.encode_fresh(0, Fresh(2, 2, w))
    assert again.weights.tobytes() == fresh.weights.tobytes() and again.nbytes == fresh.nbytes


def test_a_device_whose_trip_was_lost_gets_the_whole_model() -> None:
    links = Links(LinkOptions(down="topk", keep=0.1), LAYOUT)
    links.encode_assignment(given(0, 1, model(0)))
    links.forget(0)
    links.forget(5)
    assert np.array_equal(links.encode_assignment(given(0, 2, model(1))).weights, model(1))


def test_an_upload_is_the_version_it_was_given_plus_what_arrived_and_the_rest_comes_later() -> None:
    options, base, memory, arrived = LinkOptions(up="topk", keep=0.1), model(0), {"own": 1}, np.zeros(1000)
    step = RNG.normal(size=LAYOUT.size).astype(np.float32)
    links = Links(options, LAYOUT)
    for _ in range(60):
        sent = encode_upload(options, LAYOUT, base + step, base, memory)
        memory = sent.memory
        upload = links.decode_upload(Upload(0, 1, 1, sent.weights, 1, packed=sent.size), base)
        assert upload.nbytes == 100 * 8 + 16
        arrived += upload.weights[:1000].astype(np.float64) - base[:1000]
    assert memory["own"] == 1
    meant = 60 * ((base + step).astype(np.float64) - base)[:1000]
    assert np.abs(arrived + memory[RESIDUAL] - meant).max() < 1e-3
    assert np.abs(memory[RESIDUAL]).max() < 20 * np.abs(step).max(), "what is kept does not grow without end"


def test_models_that_are_too_far_apart_go_whole_and_a_diverged_one_stays_so() -> None:
    links, huge = Links(LinkOptions(down="int8"), LAYOUT), np.full(LAYOUT.size, 3e38, np.float32)
    links.encode_assignment(given(0, 1, huge))
    arrived = links.encode_assignment(given(0, 2, -huge))
    assert np.array_equal(arrived.weights, -huge) and arrived.nbytes == 4 * LAYOUT.size
    sent = encode_upload(LinkOptions(up="int8"), LAYOUT, huge, -huge, {"own": 1})
    assert not np.isfinite(sent.weights).all() and sent.memory == {"own": 1}
    nan = encode_upload(LinkOptions(up="int8"), LAYOUT, huge * np.float32(np.nan), huge, {})
    assert np.isnan(
        Links(LinkOptions(up="int8"), LAYOUT).decode_upload(Upload(0, 1, 1, nan.weights, 1), huge).weights[0]
    )


def test_what_devices_hold_is_saved_and_of_another_size_refused() -> None:
    options = LinkOptions(down="topk", keep=0.1)
    links, other = Links(options, LAYOUT), Links(options, LAYOUT)
    links.encode_assignment(given(7, 1, model(0)))
    other.restore(links.state())
    assert (
        other.encode_assignment(given(7, 2, model(1))).weights.tobytes()
        == links.encode_assignment(given(7, 2, model(1))).weights.tobytes()
    )
    small = Layout.build([("w", (10,), "learnable")])
    with pytest.raises(ValueError, match="10 entries"):
        Links(options, small).restore(links.state())
