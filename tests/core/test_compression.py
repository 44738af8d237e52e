"""Compression: errors, residuals, refused arrays, and what server and devices hold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from freshet.core.compression import (
    BLOCK,
    RESIDUAL,
    TAKEN_TRIP,
    Codec,
    LinkOptions,
    Links,
    NotHeld,
    audit_layers,
    choose_layers,
    decode,
    digest,
    encode,
    encode_upload,
    encode_with_feedback,
    encoded_bytes,
    layer_sizes,
    layers_bytes,
    model_bytes,
    receive,
    topk_count,
    unpack,
)
from freshet.core.layout import Layout
from freshet.core.messages import UNREAD, Assignment, Fresh, Merge, Packed, Upload
from freshet.core.method import Mismatch
from freshet.core.vectors import mix

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
            with pytest.raises(ValueError, match=r"^model has entries that are not finite$"):
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


# ---- layers

PARTS = {"a": 300, "b": 40, "c": 10, "d": 500, "a_bias": 5}
LAYERED = Layout.build(
    [
        *((name, (size,), "learnable") for name, size in PARTS.items()),
        ("mean", (3,), "buffer"),
        ("count", (), "counter"),
    ],
    [["a", "a_bias"], ["b"], ["c"], ["d"]],
)
SIZES = [305, 40, 10, 500]
REST_BYTES = 16


def layered(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=LAYERED.size).astype(np.float32)


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.integers(1, 5000)), min_size=1, max_size=12),
    st.integers(0, 60_000),
    st.integers(0, 500),
)
def test_layers_are_chosen_by_movement_per_number_within_the_budget(
    layers: list[tuple[float, int]], budget: int, rest: int
) -> None:
    moved, sizes = [m for m, _ in layers], [size for _, size in layers]
    chosen = choose_layers(moved, sizes, budget, rest)
    assert chosen == sorted(set(chosen)) and (not chosen or layers_bytes(chosen, sizes, rest) <= budget)
    density = [m * m / size for m, size in layers]
    for left in set(range(len(sizes))) - set(chosen):
        denser = [layer for layer in chosen if (-density[layer], layer) < (-density[left], left)]
        full = layers_bytes([*denser, left], sizes, rest) > budget
        assert moved[left] == 0.0 or full, "left out although it fitted beside those that moved more"


def test_only_layers_that_moved_most_are_sent_and_the_rest_stays() -> None:
    budget = REST_BYTES + (4 + 4 * 305) + (4 + 4 * 10)
    links = Links(LinkOptions(fresh="layers", budget=budget), LAYERED)
    w_o, w_g = layered(0), layered(1)
    w_g[:850] = w_o[:850]  # b has moved less per number than a; d most, but it does not fit
    for name, far in (("a", 0.3), ("b", 0.1), ("c", 1.0), ("d", 5.0), ("a_bias", 0.3)):
        entry = next(each for each in LAYERED.entries if each.name == name)
        w_g[entry.span] += np.float32(far)
    plain = links.encode_assignment(assignment(0, 1, w_o))
    assert plain.packed is None and plain.weights is w_o, "the model of an assignment is sent whole"
    fresh = links.encode_fresh(0, Fresh(2, 2, w_g))
    assert layer_sizes(LAYERED) == SIZES and fresh.packed is not None
    assert fresh.packed.arrays["layers"].tolist() == [0, 2] and fresh.nbytes == budget
    for entry in LAYERED.entries:
        source = w_o if entry.name in ("b", "d") else w_g
        np.testing.assert_allclose(fresh.weights[entry.span], source[entry.span], rtol=1e-6, atol=1e-7)
    again = links.encode_fresh(0, Fresh(2, 2, w_g))
    assert again.weights.tobytes() == fresh.weights.tobytes() and again.packed is fresh.packed
    note = links.layers_note(0, 1, 2)
    assert note is not None and note["layers"] == [0, 2] and note["bytes"] == budget
    audit_layers(note, budget)


def test_the_default_budget_is_a_quarter_and_a_trip_is_forgotten_at_its_end() -> None:
    links = Links(LinkOptions(fresh="layers"), LAYERED)
    links.encode_assignment(assignment(0, 1, layered(0)))
    fresh = links.encode_fresh(0, Fresh(2, 2, layered(1)))
    assert 0 < fresh.nbytes <= LAYERED.size
    links.end_trip(0)
    assert not links.copies.by_device, "versions that nobody needs are not kept alive"


@pytest.mark.parametrize("key", ["layers", "moved", "sizes", "budget", "bytes"])
def test_a_changed_note_about_layers_does_not_pass_the_audit(key: str) -> None:
    links = Links(LinkOptions(fresh="layers", budget=400), LAYERED)
    links.encode_assignment(assignment(0, 1, layered(0)))
    links.encode_fresh(0, Fresh(2, 2, layered(1)))
    note = links.layers_note(0, 1, 2)
    assert note is not None and note["layers"]
    audit_layers(note, 400)
    changed = {
        "layers": note["layers"][:-1],
        "moved": [0.0 for _ in note["moved"]],
        "sizes": [2 * size for size in note["sizes"]],
        "budget": 4000,
        "bytes": note["bytes"] + 1,
    }
    with pytest.raises(Mismatch):
        audit_layers(note | {key: changed[key]}, 400)


# ---- what devices hold and received

WAYS = {
    "int8": {"down": "int8"},
    "topk": {"down": "topk", "keep": 0.1},
    "layers": {"fresh": "layers", "budget": 1500},
    "layers over int8": {"down": "int8", "fresh": "layers", "budget": 1500},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_device_decodes_what_the_server_says_it_holds(way: str) -> None:
    """The device sees only the arrays. It is given new models, and fresh ones in two of its trips."""
    options = LinkOptions(**WAYS[way])
    links, held = Links(options, LAYERED), None
    for version in range(1, 10):
        if version % 3 == 1:
            sent = links.encode_assignment(assignment(0, version, layered(version)))
        else:
            sent = links.encode_fresh(0, Fresh(version, version, layered(version)))
        if sent.packed is None:
            weights = sent.weights
        else:
            weights = receive(sent.packed, held, LAYERED, options.keep)
            if sent.packed.base:
                with pytest.raises(NotHeld):
                    receive(sent.packed, layered(99)[:855], LAYERED, options.keep)
                with pytest.raises(NotHeld):
                    receive(sent.packed, None, LAYERED, options.keep)
        assert weights.tobytes() == sent.weights.tobytes()
        assert np.array_equal(weights[855:], layered(version)[855:]), "statistics are always those of the newest"
        held = weights[:855].copy()
        expected = links.held_weights(0)
        assert expected is not None and digest(expected) == digest(held)
    links.confirm(0, digest(held))
    assert links.held_weights(0) is not None
    links.confirm(0, digest(layered(99)[:855]))
    assert links.held_weights(0) is None, "the device holds something else"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rebase", [False, True], ids=["mix", "rebase"])
def test_the_server_finds_the_displacement_that_training_produced(way: str, rebase: bool) -> None:
    """E6 with compressed fresh models: a device trains d1, merges, trains d2, merges, trains d3."""
    links, n = Links(LinkOptions(**WAYS[way]), LAYERED), 855
    rng = np.random.default_rng(5)
    links.encode_assignment(assignment(0, 1, layered(0)))  # so that the next model is a difference
    w_o, versions = layered(1), {8: layered(2), 9: layered(3)}
    h_o = links.encode_assignment(assignment(0, 7, w_o)).weights[:n].astype(np.float64)
    d, u, anchor, betas = np.zeros(n), h_o.copy(), h_o.copy(), {8: 0.3, 9: 0.45}
    for version, beta in betas.items():
        step = rng.normal(size=n)
        d, u = d + step, u + step
        h_g = links.encode_fresh(0, Fresh(version, version, versions[version])).weights[:n].astype(np.float64)
        if rebase:
            u = u + beta * (h_g - anchor)
            anchor = (1 - beta) * anchor + beta * h_g
        else:
            u, d = (1 - beta) * u + beta * h_g, (1 - beta) * d
    step = rng.normal(size=n)
    d, u = d + step, u + step
    w_i = w_o.copy()
    w_i[:n] = w_o[:n] + (u - h_o)  # errors on the way down are not part of an update
    received = {version: links.received_model(0, w_o, weights, version) for version, weights in versions.items()}
    for version, weights in versions.items():
        assert np.array_equal(received[version][n:], weights[n:])
    upload = Upload(0, 2, 7, w_i, 9, merges=tuple(Merge(v, {"beta": beta}) for v, beta in betas.items()))
    found = w_i - upload.anchor(w_o, received)
    np.testing.assert_allclose(found[:n], d, atol=2e-5)
    wrong = w_i - upload.anchor(w_o, versions)
    assert np.abs(wrong[:n] - d).max() > 2e-4, "the versions themselves are not what the device received"


def test_without_compression_a_device_received_the_version_itself() -> None:
    links, w_g = Links(LinkOptions(up="int8"), LAYERED), layered(2)
    sent = links.encode_assignment(assignment(0, 1, layered(1)))
    assert sent.packed is None and links.encode_fresh(0, Fresh(2, 2, w_g)).weights is w_g
    assert links.received_model(0, layered(1), w_g, 2) is w_g
    assert mix(layered(1), w_g, 1.0).tobytes() == w_g.tobytes()


# ---- residuals of uploads that the server did not take


def test_an_upload_that_was_not_taken_leaves_no_trace_in_the_residual() -> None:
    """Every third upload is lost. What was meant in the others arrives, sooner or later, and nothing else."""
    options, base, memory, taken = LinkOptions(up="topk", keep=0.1), model(0), {}, 0
    arrived, meant = np.zeros(1000), np.zeros(1000)
    for trip in range(1, 31):
        huge = 1e4 if trip % 3 == 0 else 1.0  # the residual of a huge step would spoil all later uploads
        step = (huge * np.random.default_rng(trip).normal(size=LAYOUT.size)).astype(np.float32)
        sent = encode_upload(options, LAYOUT, base + step, base, memory, trip, {TAKEN_TRIP: taken})
        memory = sent.memory
        if trip % 3:
            taken = trip
            arrived += unpack(sent.packed, LAYOUT, 0.1)[0]
            meant += ((base + step) - base)[:1000].astype(np.float64)
    last = encode_upload(options, LAYOUT, base, base, memory, 31, {TAKEN_TRIP: taken})
    kept = unpack(last.packed, LAYOUT, 0.1)[0] + last.memory[RESIDUAL]
    assert np.abs(meant - arrived - kept).max() < 1e-3
    assert np.abs(kept).max() < 100


# ---- hostile arrays of layers

LAYERS_HARM = {
    "no layers": lambda a: {"values": a["values"]},
    "another type": lambda a: a | {"layers": a["layers"].astype(np.int64)},
    "a layer outside": lambda a: a | {"layers": a["layers"] + np.uint32(4)},
    "a layer twice": lambda a: a | {"layers": np.array([1, 1], np.uint32), "values": np.zeros(80, np.float32)},
    "layers that go back": lambda a: a | {"layers": np.array([2, 1], np.uint32), "values": np.zeros(50, np.float32)},
    "too few values": lambda a: a | {"values": a["values"][:-1]},
    "values that are NaN": lambda a: a | {"values": a["values"] * np.float32(np.nan)},
    "another shape": lambda a: a | {"values": a["values"][None]},
    "no statistics": lambda a: {name: array for name, array in a.items() if name != "rest"},
    "too many statistics": lambda a: a | {"rest": np.zeros(5, np.float32)},
}


@pytest.mark.parametrize("case", LAYERS_HARM)
def test_malformed_layers_are_refused(case: str) -> None:
    arrays = {"layers": np.array([1], np.uint32), "values": np.ones(40, np.float32), "rest": np.zeros(4, np.float32)}
    assert unpack(Packed("layers", "", arrays), LAYERED, 1.0)[0].sum() == 40
    with pytest.raises(ValueError):
        unpack(Packed("layers", "", LAYERS_HARM[case](arrays)), LAYERED, 1.0)
