"""Checkpoints: keys and tuples come back as they were, what cannot be stored is named, strangers' keys are refused."""

import hashlib
import json

import numpy as np
import pytest
import torch

from freshet.errors import RunError
from freshet.runs.arrays import LazyArray
from freshet.runs.checkpoint import _read, copy_arrays, pack, unpack, write


def through_json(tree):
    plain, arrays = pack(tree)
    return unpack(json.loads(json.dumps(plain)), arrays)


def test_keys_and_tuples_come_back_as_they_were():
    memory = {"count": {1: 5, "1": 6, (2, "x"): (7, [8])}, 3: None, "$array": "a0", "n": {np.int64(4): np.float64(0.5)}}
    found = through_json({"memory": memory})["memory"]
    assert repr(found) == repr(memory | {"n": {4: 0.5}})


def test_arrays_in_tuples_are_owned_too():
    (kept,) = copy_arrays((np.broadcast_to(np.float32(1), 3),))
    assert kept.flags.writeable


@pytest.mark.parametrize("value", [torch.ones(2), {1}, b"x", object(), np.array([None])])
@pytest.mark.parametrize("tree", [lambda m: {"devices": {"memory": {"3": m}}}, lambda m: {"memory": m}])
def test_what_a_device_cannot_remember_is_named(tree, value):
    elsewhere = LazyArray((1,), np.dtype(np.float32), lambda: np.ones(1, np.float32))
    with pytest.raises(RunError, match=r"^local.memory\['last'\]\[0\] is a .*; use numbers, strings, lists"):
        pack(tree({"far": elsewhere, "last": [value]}))


def test_what_else_cannot_be_stored_is_named():
    with pytest.raises(RunError, match=r"^the state\['a'\]\[1\] is a set; use numbers"):
        pack({"a": [0, {1}]})


@pytest.mark.parametrize("key", ["[1]", '{"a": 1}', '{"$array": "a0"}', '{"$tuple": [[1]]}'])
def test_a_key_that_no_dict_can_have_is_refused(key):
    with pytest.raises(ValueError, match="is not a key"):
        unpack(json.loads(f'{{"$pairs": [[{key}, 1]]}}'), {"a0": np.ones(1)})


@pytest.mark.parametrize("plain", ['{"$pairs": [1]}', '{"$pairs": [[1]]}', '{"$pairs": 3}', '{"$tuple": 3}'])
def test_pairs_that_are_none_are_refused(plain):
    with pytest.raises((TypeError, ValueError)):
        unpack(json.loads(plain), {})


@pytest.mark.parametrize(("number", "known"), [(1, True), (2, True), (3, False)])
def test_checkpoints_of_earlier_formats_are_read(tmp_path, number, known):
    path = write(tmp_path, {"now": 1.0})
    text = json.dumps(json.loads((path / "state.json").read_text()) | {"format": number}).encode()
    (path / "state.json").write_bytes(text)
    sums = json.loads((path / "checksums.json").read_text())
    (path / "checksums.json").write_text(json.dumps(sums | {"state.json": hashlib.sha256(text).hexdigest()}))
    if known:
        assert _read(path) == {"now": 1.0}
    else:
        with pytest.raises(ValueError, match="format 3 is not known"):
            _read(path)
