"""Compressed models in a deployment: the bits and bytes of the simulator, restarts, retries, and hostile payloads."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet.core.compression import RESIDUAL, RESIDUAL_BEFORE, SENT_TRIP, TAKEN_TRIP, digest
from freshet.core.messages import CONTROL_BYTES, Assignment, Fresh, Packed, Slot
from freshet.core.method import Memory
from freshet.core.saving import dump
from freshet.flower import device as device_module
from freshet.flower import wire
from freshet.flower.device import DeviceFolder
from freshet.flower.fresh import NoFreshAnswer, _fresh_tree, _read_fresh
from freshet.runs import checkpoint
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.training.trainer import TripInput
from tests.flower.fakes import TOKENS, FakeFederation

INT8 = {"down": "int8", "up": "int8"}
TOPK = {"down": "topk", "up": "topk", "keep": 0.1}
LAYERS = {"fresh": "layers", "budget": 8000, "up": "topk"}
BOTH = {"down": "int8", "fresh": "layers", "up": "int8"}
MIX = {"name": "fedasmu", "slot": 2, "refresh": 2}
REBASE = {"name": "fedasmu-course", "merge": "rebase", "beta": 1.0, "slot": 2, "refresh": 2}


def federation(folder: Path, links: dict[str, Any], method: str | dict[str, Any] = "fedasync") -> FakeFederation:
    return FakeFederation(folder, method, fresh="messages", training={"epochs": 3}, links=links)


def message_of(fed: FakeFederation, node: int) -> tuple[str, Any]:
    return next((number, content) for number, (place, content) in fed.transport.sent.items() if place == node)


def answer(fed: FakeFederation, node: int) -> wire.Answer:
    """Let the device of a node answer its message."""
    number, _ = message_of(fed, node)
    found = fed.answer(number)
    fed.transport.put(number, wire.answer_record(found))
    for _ in range(3):
        fed.step()
    return found


def finish(fed: FakeFederation, node: int) -> wire.Answer:
    while (found := answer(fed, node)).upload is None and not found.lost:
        pass
    return found


def folder_of(fed: FakeFederation, node: int) -> DeviceFolder:
    return DeviceFolder(fed.folder / f"memory{node}", fed.live.session)


def restart(fed: FakeFederation) -> None:
    """Kill the server after its last checkpoint and start it again."""
    fed.restart()
    fed.step()
    fed.step()


def passes_audit(fed: FakeFederation) -> bool:
    fed.live.writer.flush()
    found = audit(RunDirectory(fed.folder / "run"))
    assert found.problem is None, found.problem
    return True


def bits(packed: Packed | None) -> dict[str, bytes]:
    assert packed is not None
    return {name: array.tobytes() for name, array in packed.arrays.items()} | {"codec": packed.codec.encode()}


# ---- the simulator's bits and bytes


class Twin:
    """Trains every trip again as the simulator does: in one go, with the models that the server says it has sent."""

    def __init__(self, fed: FakeFederation) -> None:
        self.fed, self.trainer = fed, fed.assembly.setup().trainer()
        self.memory: dict[int, Memory] = {}
        self.fresh: list[Fresh | None] = []

    def finish(self, node: int) -> wire.Answer:
        """Let a device finish its trip. Compare its upload with the simulated one."""
        fed, device, slots, fresh = self.fed, node - 100, list[Slot](), list[Fresh | None]()
        trip = fed.live.trips[device]
        assignment = trip.assignment
        while (found := answer(fed, node)).slot is not None:
            slots.append(found.slot)
            fresh.append(fed.live.trips[device].fresh)
        rule, memory = fed.live.server.rule, self.memory.get(device, {})
        work = TripInput(assignment, tuple(slots), tuple(fresh), rule, memory)
        outcome = self.trainer.train(work)
        assert found.upload is not None and bits(found.upload.packed) == bits(outcome.packed)
        assert [m.version for m in found.upload.merges] == [m.version for m in outcome.merges]
        self.memory[device], self.fresh = outcome.memory, self.fresh + fresh
        return found


@pytest.mark.parametrize("links", [INT8, TOPK, LAYERS, BOTH], ids=["int8", "topk", "layers", "layers over int8"])
@pytest.mark.parametrize("method", [MIX, REBASE], ids=["mix", "rebase"])
def test_deployed_upload_has_the_bits_of_the_simulated_one(
    tmp_path: Path, links: dict[str, Any], method: dict[str, Any]
) -> None:
    fed = federation(tmp_path, links, method)
    twin = Twin(fed)
    fed.step()
    for node in (101, 102, 101, 100, 102, 100):
        twin.finish(node)
    assert sum(each is not None for each in twin.fresh) >= 3 and not fed.events("rejected")
    assert passes_audit(fed)


@pytest.mark.parametrize("links", [INT8, TOPK, LAYERS], ids=["int8", "topk", "layers"])
def test_the_arrays_on_the_network_are_the_bytes_that_are_counted(tmp_path: Path, links: dict[str, Any]) -> None:
    fed = federation(tmp_path, links, MIX)
    fed.step()
    for node in (101, 102, 101, 100):
        finish(fed, node)
    sent = {"train": 0, "onward": 0, "answer": 0}
    for content in fed.transport.everything:
        kind = next(name for name in sent if name in content)
        if "model" in content:
            sent[kind] += sum(array.numpy().nbytes for array in content["model"].values())
        elif kind == "onward":
            sent[kind] += CONTROL_BYTES
    counts = fed.live.coordinator.counts
    assert counts.bytes_down == sent["train"] + sent["onward"]
    assert counts.bytes_up == sent["answer"] + CONTROL_BYTES * counts.requests
    whole = 4 * fed.assembly.layout.size
    assert sum(event["bytes"] for event in fed.events("upload")) == sent["answer"] < 4 * whole


def test_the_answer_of_the_service_carries_the_same_arrays() -> None:
    packed = Packed("topk", "ab", {"places": np.array([1, 5], np.uint32), "values": np.ones(2, np.float32)})
    fresh = Fresh(4, 4, np.zeros(9, np.float32), {}, packed)
    found = _read_fresh(wire.from_bytes(wire.to_bytes(_fresh_tree(fresh))), 3, 9)
    assert found is not None and bits(found.packed) == bits(packed) and found.packed is not None
    assert found.packed.base == "ab" and not len(found.weights)


# ---- what a device holds


class Service:
    """The fresh-model service without a network. Some answers are lost on their way."""

    def __init__(self, fed: FakeFederation, device: int, lost: bool) -> None:
        self._fed, self._device, self._lost = fed, device, lost

    def ask(self, slot: Slot, held: int, size: int) -> Fresh | None:
        live, trip = self._fed.live, self._fed.live.trips[self._device]
        token = TOKENS.make(100 + self._device, self._device, trip.assignment.trip, trip.ticket)
        fresh = live.answer(self._device, trip.assignment.trip, token, slot)
        again = live.answer(self._device, trip.assignment.trip, token, slot)
        assert fresh is not None and again is not None and bits(fresh.packed) == bits(again.packed), "a retry"
        if self._lost:
            raise NoFreshAnswer("deadline_exceeded")
        return fresh._replace(weights=np.empty(0, np.float32))  # only the arrays travel

    def close(self) -> None:
        pass


@pytest.mark.parametrize("lost", [False, True], ids=["arrived", "lost"])
def test_a_lost_answer_makes_the_next_model_whole(tmp_path: Path, lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = FakeFederation(tmp_path, {"name": "fedasmu", "slot": 2}, training={"epochs": 3}, links=TOPK)
    fed.step()
    answer(fed, 101)
    number, content = message_of(fed, 100)
    monkeypatch.setattr(device_module, "_client", lambda channel, assignment: Service(fed, 0, lost))
    order, node = wire.read_order(content), {"folder": str(tmp_path / "memory100")}
    assert isinstance(order, wire.Order)
    found = fed.device.handle(order, fed.config, node, 100)
    assert found.upload is not None and len(found.upload.merges) == (0 if lost else 1)
    held = fed.live.server.links.held_weights(0)  # type: ignore[union-attr]
    assert held is not None and (found.holds == digest(held)) is not lost
    fed.transport.put(number, wire.answer_record(found))
    for _ in range(3):
        fed.step()
    packed = fed.live.trips[0].assignment.packed
    assert packed is not None and packed.codec == ("none" if lost else "topk")
    assert finish(fed, 100).upload is not None and passes_audit(fed)


def test_a_device_without_its_folder_says_so_and_gets_the_whole_model(tmp_path: Path) -> None:
    fed = federation(tmp_path, TOPK)
    fed.step()
    answer(fed, 100)
    shutil.rmtree(tmp_path / "memory100")
    assert "does not hold the model" in answer(fed, 100).lost
    assert "does not hold the model" in fed.events("lost")[0]["reason"]
    packed = fed.live.trips[0].assignment.packed
    assert packed is not None and packed.codec == "none" and packed.base == ""
    assert answer(fed, 100).upload is not None and passes_audit(fed)


def sent_models(fed: FakeFederation) -> dict[int, dict[str, bytes]]:
    """The bits of the models in the messages that wait for an answer."""
    found = {}
    for node, content in fed.transport.sent.values():
        order = wire.read_order(content)
        message = order.assignment if isinstance(order, wire.Order) else order.fresh  # type: ignore[union-attr]
        found[node] = {} if message is None else bits(message.packed)
    return found


def test_a_restarted_server_sends_the_same_difference_and_a_finished_device_repeats_its_answer(tmp_path: Path) -> None:
    fed = federation(tmp_path, TOPK, MIX)
    fed.step()
    for node in (100, 101, 100, 102):
        finish(fed, node)
    assert answer(fed, 100).slot is not None  # waits for the fresh model
    checkpoint.write(tmp_path / "run", fed.live.state() | {"wall_seconds": 0.0})
    finish(fed, 101)  # only in the journal, and so are two requests
    assert answer(fed, 102).slot is not None and answer(fed, 102).slot is not None
    sent = sent_models(fed)
    done, memory = fed.answer(message_of(fed, 102)[0]), folder_of(fed, 102).read().memory
    restart(fed)
    assert sent_models(fed) == sent and sent[100] and sent[101]
    again = answer(fed, 102)
    assert again.upload is not None and done.upload is not None and again.holds == done.holds
    assert bits(again.upload.packed) == bits(done.upload.packed)
    after = folder_of(fed, 102).read().memory
    assert np.array_equal(after[RESIDUAL], memory[RESIDUAL]) and after[SENT_TRIP] == memory[SENT_TRIP]
    finished = finish(fed, 100)
    assert finished.upload is not None and finished.upload.merges
    for node in (100, 101, 102):
        assert finish(fed, node).upload is not None
    assert not fed.events("rejected") and not fed.events("lost") and passes_audit(fed)


def test_a_restarted_server_knows_what_its_devices_hold(tmp_path: Path) -> None:
    fed = federation(tmp_path, BOTH, MIX)
    fed.step()
    for node in (100, 101, 100):
        finish(fed, node)
    checkpoint.write(tmp_path / "run", fed.live.state() | {"wall_seconds": 0.0})
    for node in (102, 101):
        finish(fed, node)
    before = dump(fed.live.server.links.copies)  # type: ignore[union-attr]
    restart(fed)
    after = dump(fed.live.server.links.copies)  # type: ignore[union-attr]
    assert wire.to_bytes({"links": before}) == wire.to_bytes({"links": after})


# ---- error feedback


def put_upload(fed: FakeFederation, node: int, change: Callable[[wire.Answer], wire.Answer]) -> wire.Answer:
    number, _ = message_of(fed, node)
    found = fed.answer(number)
    fed.transport.put(number, wire.answer_record(change(found)))
    for _ in range(3):
        fed.step()
    return found


def test_the_residual_of_a_rejected_or_lost_upload_does_not_count(tmp_path: Path) -> None:
    fed = federation(tmp_path, TOPK)
    fed.step()
    answer(fed, 100)
    kept = folder_of(fed, 100).read().memory[RESIDUAL]
    number, _ = message_of(fed, 100)
    fed.answer(number)  # trained and remembered, then lost
    fed.transport.put(number, error="the node is gone")
    for _ in range(3):
        fed.step()
    lost = folder_of(fed, 100).read().memory
    assert np.array_equal(lost[RESIDUAL_BEFORE], kept) and not np.array_equal(lost[RESIDUAL], kept)
    assert fed.live.trips[0].assignment.instruction[TAKEN_TRIP] == 1
    put_upload(fed, 100, lambda found: replace(found, upload=found.upload._replace(steps=0)))  # type: ignore[union-attr]
    assert len(fed.events("rejected")) == len(fed.events("lost")) == 1
    rejected = folder_of(fed, 100).read().memory
    assert np.array_equal(rejected[RESIDUAL_BEFORE], kept), "it continued with what was left before the lost one"
    assert fed.live.trips[0].assignment.instruction[TAKEN_TRIP] == 1
    answer(fed, 100)
    assert np.array_equal(folder_of(fed, 100).read().memory[RESIDUAL_BEFORE], kept)
    assert fed.live.trips[0].assignment.instruction[TAKEN_TRIP] == 4
    now = folder_of(fed, 100).read().memory[RESIDUAL]
    answer(fed, 100)
    assert np.array_equal(folder_of(fed, 100).read().memory[RESIDUAL_BEFORE], now)


def test_a_repeated_order_neither_trains_nor_counts_twice(tmp_path: Path) -> None:
    fed = federation(tmp_path, TOPK)
    fed.step()
    number, _ = message_of(fed, 100)
    first, memory = fed.answer(number), folder_of(fed, 100).read().memory
    again = fed.answer(number)
    assert first.upload is not None and again.upload is not None
    assert bits(first.upload.packed) == bits(again.upload.packed)
    assert np.array_equal(folder_of(fed, 100).read().memory[RESIDUAL], memory[RESIDUAL])


# ---- hostile payloads


def with_arrays(**arrays: Any) -> Callable[[Packed], Packed]:
    return lambda packed: packed._replace(arrays=packed.arrays | arrays)


N = 13_706
STEPS, COUNT = -(-N // 256), -(-N // 10)
INT8_HARM = {
    "no arrays": lambda packed: packed._replace(arrays={}),
    "too few numbers": with_arrays(numbers=np.zeros(N - 1, np.int8)),
    "too many numbers": with_arrays(numbers=np.zeros(N + 1, np.int8)),
    "too few steps": with_arrays(steps=np.zeros(STEPS - 1, np.float32)),
    "steps that are NaN": with_arrays(steps=np.full(STEPS, np.nan, np.float32)),
    "steps that are infinite": with_arrays(steps=np.full(STEPS, np.inf, np.float32)),
    "steps below 0": with_arrays(steps=np.full(STEPS, -1.0, np.float32)),
    "-128": with_arrays(numbers=np.full(N, -128, np.int8)),
    "another type": with_arrays(numbers=np.zeros(N, np.float32)),
    "one array too many": with_arrays(more=np.zeros(3, np.float32)),
    "statistics that are not there": with_arrays(rest=np.zeros(3, np.float32)),
    "another codec": lambda packed: packed._replace(codec="topk"),
    "layers": lambda packed: Packed(
        "layers", "", {"layers": np.zeros(1, np.uint32), "values": np.zeros(160, np.float32)}
    ),
    "an unknown codec": lambda packed: packed._replace(codec="zip"),
    "a huge step": with_arrays(steps=np.full(STEPS, 3e38, np.float32), numbers=np.full(N, 127, np.int8)),
}
TOPK_HARM = {
    "a place outside": with_arrays(places=np.arange(N - COUNT + 1, N + 1, dtype=np.uint32)),
    "a place far outside": with_arrays(places=np.full(COUNT, 2**32 - 1, np.uint32)),
    "a place twice": with_arrays(places=np.repeat(np.arange(COUNT // 2 + 1, dtype=np.uint32), 2)[:COUNT]),
    "places that go back": with_arrays(places=np.arange(COUNT, dtype=np.uint32)[::-1].copy()),
    "more than keep": with_arrays(places=np.arange(COUNT + 1, dtype=np.uint32), values=np.ones(COUNT + 1, np.float32)),
    "fewer values than places": with_arrays(values=np.ones(COUNT - 1, np.float32)),
    "values that are NaN": with_arrays(values=np.full(COUNT, np.nan, np.float32)),
}
HARM = {f"int8: {name}": (INT8, harm) for name, harm in INT8_HARM.items()}
HARM |= {f"topk: {name}": (TOPK, harm) for name, harm in TOPK_HARM.items()}


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_malformed_payload_is_rejected_with_a_reason_and_changes_nothing(tmp_path: Path, codec: str) -> None:
    """One device sends every malformed payload, one after the other. Then its honest upload is taken."""
    cases = {name: harm for name, (_, harm) in HARM.items() if name.startswith(codec)}
    fed = federation(tmp_path, {"int8": INT8, "topk": TOPK}[codec])
    fed.step()
    assert fed.assembly.layout.size == N
    server, weights = fed.live.server, fed.live.server.weights.copy()
    for count, (name, harm) in enumerate(cases.items(), 1):
        samples = server.context.samples.copy()

        def hostile(found: wire.Answer, harm: Callable[[Packed], Packed] = harm) -> wire.Answer:
            assert found.upload is not None and found.upload.packed is not None
            return replace(found, upload=found.upload._replace(packed=harm(found.upload.packed)), samples=10**6)

        put_upload(fed, 100, hostile)
        refused = fed.events("rejected") + fed.events("lost")
        assert len(refused) == count, name
        assert refused[-1]["reason"] and "\n" not in refused[-1]["reason"], name
        assert server.version == 1 and np.array_equal(server.weights, weights), name
        assert np.array_equal(server.context.samples, samples), name
        assert fed.live.trips[0].assignment.instruction[TAKEN_TRIP] == 0, name
        assert not server.links.copies.taken, name  # type: ignore[union-attr]
    answer(fed, 100)
    assert server.version == 2 and passes_audit(fed)


def test_a_plain_model_is_rejected_where_a_compressed_one_is_due_and_the_reverse(tmp_path: Path) -> None:
    for links in (INT8, {}):
        fed = federation(tmp_path / str(len(links)), links)
        other = federation(tmp_path / f"other{len(links)}", {} if links else INT8)
        fed.step()
        other.step()
        model = other.answer(message_of(other, 100)[0]).upload
        assert model is not None
        put_upload(fed, 100, lambda found, model=model: replace(found, upload=model))  # type: ignore[misc]
        [event] = fed.events("rejected")
        assert ("links.up is int8" if links else "shape (0,)") in event["reason"]
        assert fed.live.server.version == 1 and passes_audit(fed)


@pytest.mark.parametrize("damage", ["array", "list", "codec", "many"])
def test_unreadable_fresh_answer_is_refused(damage: str) -> None:
    packed: list[Any] = ["topk", "", {"values": np.ones(3, np.float32)}]
    bad = {
        "array": ["topk", "", {"values": "x"}],
        "list": packed[:2],
        "codec": [3, "", packed[2]],
        "many": ["topk", "", {str(place): np.ones(1, np.float32) for place in range(9)}],
    }[damage]
    with pytest.raises(wire.MalformedMessage):
        _read_fresh({"newer": True, "version": 2, "age": 2, "vectors": {}, "packed": bad}, 1, 3)
    assert _read_fresh({"newer": True, "version": 2, "age": 2, "vectors": {}, "packed": packed}, 1, 3) is not None


def test_assignments_survive_the_wire() -> None:
    packed = Packed("int8", "digest", {"steps": np.ones(1, np.float32), "numbers": np.arange(5, dtype=np.int8)})
    order = wire.Order(
        Assignment(0, 1, 2, 3, np.ones(5, np.float32), 4, 0.5, packed=packed), "s", "t", wire.FreshChannel()
    )
    found = wire.read_order(wire.order_record(order))
    assert isinstance(found, wire.Order) and found.assignment.packed is not None
    assert bits(found.assignment.packed) == bits(packed) and found.assignment.packed.base == "digest"
