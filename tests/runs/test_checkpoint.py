"""Checkpoints: keys and tuples survive, values that cannot be stored are named, and an own method resumes exactly."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import freshet
from freshet.core.events import Contribution
from freshet.core.method import Aggregate, Wait
from freshet.core.vectors import mix
from freshet.errors import RunError
from freshet.runs.checkpoint import LazyArray, _read, copy_arrays, pack, unpack, write


def through_json(tree):
    plain, arrays = pack(tree)
    return unpack(json.loads(json.dumps(plain)), arrays)


def test_keys_and_tuples_survive_a_round_trip():
    memory = {"count": {1: 5, "1": 6, (2, "x"): (7, [8])}, 3: None, "$array": "a0", "n": {np.int64(4): np.float64(0.5)}}
    found = through_json({"memory": memory})["memory"]
    assert repr(found) == repr(memory | {"n": {4: 0.5}})


def test_arrays_in_tuples_are_copied_too():
    (kept,) = copy_arrays((np.broadcast_to(np.float32(1), 3),))
    assert kept.flags.writeable


@pytest.mark.parametrize("value", [torch.ones(2), {1}, b"x", object(), np.array([None])])
@pytest.mark.parametrize("tree", [lambda m: {"devices": {"memory": {"3": m}}}, lambda m: {"memory": m}])
def test_a_device_memory_that_cannot_be_stored_is_named(tree, value):
    elsewhere = LazyArray((1,), np.dtype(np.float32), lambda: np.ones(1, np.float32))
    with pytest.raises(RunError, match=r"^local.memory\['last'\]\[0\] is a .*; use numbers, strings, lists"):
        pack(tree({"far": elsewhere, "last": [value]}))


def test_a_state_that_cannot_be_stored_is_named():
    with pytest.raises(RunError, match=r"^the state\['a'\]\[1\] is a set; use numbers"):
        pack({"a": [0, {1}]})


@pytest.mark.parametrize("key", ["[1]", '{"a": 1}', '{"$array": "a0"}', '{"$tuple": [[1]]}'])
def test_an_invalid_key_is_refused(key):
    with pytest.raises(ValueError, match="is not a key"):
        unpack(json.loads(f'{{"$pairs": [[{key}, 1]]}}'), {"a0": np.ones(1)})


@pytest.mark.parametrize("plain", ['{"$pairs": [1]}', '{"$pairs": [[1]]}', '{"$pairs": 3}', '{"$tuple": 3}'])
def test_invalid_pairs_are_refused(plain):
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


def federation(method: type) -> freshet.Federation:
    data = {"train_samples": 160, "test_samples": 40}
    run = {"per_round": 3, "executor": "serial"}
    return freshet.Federation(method=method, run=run, fleet={"devices": 6, "fastest": 3}, data=data)


@dataclass
class Heard:
    times: dict = field(default_factory=dict)


class Counting(freshet.Method):
    about = freshet.About("counting", "async", "Counting", "x")

    def __init__(self, options, world):
        super().__init__(options, world)
        self.state: Any = Heard()

    def receive(self, server, upload, trip):
        n = self.state.times[upload.device] = self.state.times.get(upload.device, 0) + 1
        a = 0.5 / n
        part = Contribution(upload.device, trip.base, server.staleness(trip), a)
        return Aggregate(mix(server.weights, upload.weights, a), [part], {"n": n})


@dataclass(frozen=True)
class Slower(freshet.LocalRule):
    remembers = True

    def begin(self, local):
        local.memory["count"] = {1: local.memory.get("count", {}).get(1, 0) + 1}

    def adjust(self, local):
        local.gradient.mul_(1 / local.memory["count"][1])


class Remembering(Counting):
    about = freshet.About("remembering", "async", "Remembering", "x")

    @classmethod
    def rule(cls, options):
        return Slower()


@pytest.mark.parametrize("method", [Counting, Remembering])
def test_a_resumed_run_equals_an_uninterrupted_one(method, tmp_path):
    federation(method).run(until=20, out=tmp_path / "a")
    resumed = federation(method).resume(tmp_path / "a", until=40)
    whole = federation(method).run(until=40, out=tmp_path / "b")
    assert resumed.summary["uploads"] == whole.summary["uploads"] > 6
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]


@dataclass(frozen=True)
class Keeping(freshet.LocalRule):
    remembers = True

    def finish(self, local):
        local.memory["last"] = local.weights.clone()


class Tensors(Counting):
    about = freshet.About("tensors", "async", "Tensors", "x")

    @classmethod
    def rule(cls, options):
        return Keeping()


def test_a_memory_that_cannot_be_saved_is_named(tmp_path):
    with pytest.raises(RunError, match=r"local.memory\['last'\] is a torch.Tensor; use numbers, strings, lists"):
        federation(Tensors).run(until=15, out=tmp_path / "a")


@pytest.mark.parametrize("value", [torch.ones(1), {1}, {"a": b"x"}])
def test_a_state_that_cannot_be_saved_ends_the_run_with_its_first_upload(value, tmp_path):
    class Odd(Counting):
        def receive(self, server, upload, trip):
            self.state.times["odd"] = value
            return Wait()

    with pytest.raises(
        RunError, match=r"^method Odd: self.state.times\['odd'\].* is a .*; use numbers, strings, lists"
    ):
        federation(Odd).run(until=60, out=tmp_path / "a")
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["uploads"] <= 1


def test_a_state_that_is_not_a_dataclass_is_refused(tmp_path):
    class Plain(Counting):
        def receive(self, server, upload, trip):
            self.state = {"n": 1}
            return Wait()

    with pytest.raises(RunError, match=r"^method Plain: self.state is a dict; use one dataclass"):
        federation(Plain).run(until=60, out=tmp_path / "a")


@pytest.mark.parametrize("value", [torch.ones(1), np.ones(1), {1}, [object()]])
def test_numbers_that_cannot_be_logged_are_named(value, tmp_path):
    class Telling(Counting):
        def receive(self, server, upload, trip):
            return super().receive(server, upload, trip)._replace(numbers={"fine": [1, {"x": "y"}], "q": value})

    sentence = r"^method Telling returned an invalid Aggregate: numbers\['q'\].* is a .*; use numbers"
    with pytest.raises(RunError, match=sentence):
        federation(Telling).run(until=60, out=tmp_path / "a")


def test_weights_of_another_type_are_named(tmp_path):
    class Double(Counting):
        def receive(self, server, upload, trip):
            given = super().receive(server, upload, trip)
            return given._replace(weights=given.weights.astype(np.float64))

    with pytest.raises(RunError, match=r"expected \(\d+,\) of float32, not of float64"):
        federation(Double).run(until=60, out=tmp_path / "a")


def test_a_method_that_writes_to_the_global_model_gets_an_error(tmp_path):
    class Writing(Counting):
        def receive(self, server, upload, trip):
            weights = server.weights
            weights += 1
            return Wait()

    with pytest.raises(RunError, match=r"^method Writing wrote to server.weights; write to a copy of it"):
        federation(Writing).run(until=60, out=tmp_path / "a")
