"""The driver over a network without processes: every answer is taken up once, and whatever goes wrong is on record."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord

from freshet.core.messages import Slot
from freshet.core.server import NO_TRIP, Refused
from freshet.flower import wire
from freshet.flower.driver import WRONG_TOKEN, check_state
from freshet.flower.security import Tokens
from freshet.runs import checkpoint
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.runs.writer import RunWriter
from tests.flower.fakes import TOKENS, Town


def passes_audit(town: Town) -> bool:
    town.live.writer.flush()
    found = audit(RunDirectory(town.folder / "run"))
    assert found.passed, found.problem
    return True


def test_each_upload_is_aggregated_when_it_arrives_and_its_device_starts_again(tmp_path: Path) -> None:
    town = Town(tmp_path)
    town.step()
    assert len(town.post.sent) == 3
    first = next(iter(town.post.sent))
    town.post.put(first, wire.answer_record(town.answer(first)))
    town.step()
    assert town.live.server.version == 2 and len(town.events("aggregate")) == 1
    town.step()
    assert len(town.post.sent) == 3  # the two that train on, and the one that came back
    town.train()
    town.step()
    assert town.live.server.version == 5 and passes_audit(town)


def test_a_synchronous_method_goes_by_rounds(tmp_path: Path) -> None:
    town = Town(tmp_path, "fedavg", per_round=2)
    for _ in range(3):
        town.step()
        town.train()
        town.step()
    assert [event["round"] for event in town.events("aggregate")] == [1, 2, 3] and passes_audit(town)


def test_rounds_begin_when_somebody_is_there(tmp_path: Path) -> None:
    town = Town(tmp_path, "fedavg", per_round=2, rounds=2, period=0.001)
    devices, town.post.there = town.post.there, set()
    for _ in range(4):
        town.step()
        time.sleep(0.01)
    assert not town.live.over and town.live.server.round == 0, "no round was counted"
    town.post.there = devices
    town.step()
    assert len(town.post.sent) == 2
    town.train()
    town.step()
    assert [event["round"] for event in town.events("aggregate")] == [1] and passes_audit(town)


@pytest.mark.parametrize("method", ["fedasmu", "fedavg"])
def test_a_run_can_wait_until_enough_devices_are_there_and_waits_only_once(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now, sleep=lambda _: None)
    monkeypatch.setattr("freshet.flower.driver.time", clock)
    town = Town(tmp_path, method, wait_for=2)
    devices, town.post.there = town.post.there, {100}
    for _ in range(4):
        clock.now += 400.0
        town.step()
    assert not town.post.sent and not town.events("trigger") and town.live.now == 0.0, "its clock stands still"
    town.post.there = devices
    town.step()
    assert len(town.post.sent) == 3
    town.train()
    town.post.there = {100}
    for _ in range(3):
        clock.now += 2.0
        town.step()
    assert [node for node, _ in town.post.sent.values()] == [100], "afterwards it goes on with whoever is there"
    assert passes_audit(town)


def test_by_messages_a_trip_takes_two_and_merges_the_model_of_that_moment(tmp_path: Path) -> None:
    town = Town(tmp_path, fresh="messages")
    town.step()
    for place in (-1, -1, 0, -1):  # the last device asks and uploads, then the first one asks
        number = list(town.post.sent)[place]
        town.post.put(number, wire.answer_record(town.answer(number)))
        town.step()
        town.step()
    [merge] = town.events("merge")
    assert (merge["base"], merge["fresh"]) == (1, 2) and "beta" in merge
    assert [event["fresh"] for event in town.events("request")] == [None, 2] and passes_audit(town)


def test_a_device_that_lost_its_trip_between_two_messages_says_so(tmp_path: Path) -> None:
    town = Town(tmp_path, devices=1, fresh="messages")
    town.step()
    while not any("onward" in content for _, content in town.post.sent.values()):
        town.train()
        town.step()
    (paused,) = (tmp_path / "memory100").glob("paused.*.safetensors")
    paused.unlink()
    town.train()
    town.step()
    assert [event["reason"] for event in town.events("lost")] == ["the device no longer has this trip"]
    assert passes_audit(town)


@pytest.mark.parametrize("method", ["feddyn", "moon", "port", "asofed", "fedbuff", "fedsa", "fedlws", "fedssmu"])
def test_other_methods_train_too(tmp_path: Path, method: str) -> None:
    town = Town(tmp_path, method)
    town.step()
    for _ in range(4):
        town.train()
        town.step()
        town.step()
    assert len(town.events("upload")) >= 6 and not town.events("rejected") and passes_audit(town)


def test_messages_hold_weights_vectors_and_the_scalars_of_the_protocol_only(tmp_path: Path) -> None:
    town = Town(tmp_path, fresh="messages")
    town.step()
    for _ in range(4):
        town.train()
        town.step()
    sizes = {town.assembly.layout.size, town.assembly.layout.learnable}
    for content in town.post.everything:
        assert set(content) <= {
            "train",
            "onward",
            "answer",
            "model",
            "vectors",
            "instruction",
            "report",
            "merged",
            "timing",
        }
        for record in content.values():
            if isinstance(record, ArrayRecord):
                assert all(len(array.numpy()) in sizes for array in record.values())
            else:
                assert isinstance(record, ConfigRecord)
                assert all(isinstance(value, str | int | float) for value in record.values())
                assert all(len(value) <= 4096 for value in record.values() if isinstance(value, str))


@pytest.mark.parametrize("damage", ["nan", "short", "steps", "records", "ticket"])
def test_a_bad_upload_is_refused_with_a_reason_and_the_run_goes_on(tmp_path: Path, damage: str) -> None:
    town = Town(tmp_path)
    town.step()
    number = next(iter(town.post.sent))
    answer = town.answer(number)
    assert answer.upload is not None
    weights = np.array(answer.upload.weights)
    weights[3] = np.nan
    upload = {
        "nan": answer.upload._replace(weights=weights),
        "short": answer.upload._replace(weights=weights[:10].copy()),
        "steps": answer.upload._replace(steps=0),
    }.get(damage, answer.upload)
    record = wire.answer_record(wire.Answer("x" if damage == "ticket" else answer.ticket, upload, samples=5))
    if damage == "records":
        record["model"] = ConfigRecord({"weights": "/etc/passwd"})
    town.post.put(number, record)
    town.step()
    refused = town.events("rejected") + town.events("lost")
    assert len(refused) == 1 and refused[0]["reason"] and town.live.server.version == 1
    town.train()
    town.step()
    assert town.live.server.version == 3 and passes_audit(town)


def test_a_device_that_is_gone_has_lost_its_trip_and_is_triggered_when_it_is_back(tmp_path: Path) -> None:
    town = Town(tmp_path)
    town.step()
    number = next(number for number, (node, _) in town.post.sent.items() if node == 101)
    town.post.there.remove(101)
    town.post.put(number, error="the device is gone")
    town.step()
    assert [(event["device"], event["reason"]) for event in town.events("lost")] == [(1, "the device is gone")]
    town.step()
    assert 101 not in [node for node, _ in town.post.sent.values()]
    town.post.there.add(101)
    town.live.coordinator.wake(0.0)
    town.live._wake(0.0)
    town.step()
    assert 101 in [node for node, _ in town.post.sent.values()]
    assert [event["trip"] for event in town.events("trigger") if event["device"] == 1] == [1, 2]


def test_a_device_that_was_reported_gone_waits_for_the_next_roll_call(tmp_path: Path) -> None:
    town = Town(tmp_path)
    town.step()
    town.live.network = replace(town.live.network, roll_call=1e9)
    number = next(number for number, (node, _) in town.post.sent.items() if node == 101)
    town.post.put(number, error="the device is gone")
    for _ in range(3):
        town.step()
    assert [event["trip"] for event in town.events("trigger") if event["device"] == 1] == [1]
    town.live.network = replace(town.live.network, roll_call=0.0)
    town.live._wake(0.0)
    town.step()
    assert [event["trip"] for event in town.events("trigger") if event["device"] == 1] == [1, 2]


def test_messages_are_counted_one_per_trip(tmp_path: Path) -> None:
    for fresh, each in (("side", 1), ("messages", 2)):
        town = Town(tmp_path / fresh, devices=1, fresh=fresh)
        while len(town.events("upload")) < 2:
            town.train()
            town.step()
        assert town.live.messages == town.live.facts()["messages"] == 2 * each


def test_only_the_token_of_the_trip_gets_the_fresh_model(tmp_path: Path) -> None:
    town = Town(tmp_path)
    town.step()
    live, tickets = town.live, {device: journey.ticket for device, journey in town.live.trips.items()}
    good = TOKENS.make(100, 0, 1, tickets[0])
    assert live.answer(0, 1, good, Slot(2, "q")) is None  # nothing newer yet
    number = next(number for number, (node, _) in town.post.sent.items() if node == 101)
    town.post.put(number, wire.answer_record(town.answer(number)))
    town.step()
    fresh = live.answer(0, 1, good, Slot(2, "q"))
    assert fresh is not None and fresh.version == 2
    again = live.answer(0, 1, good, Slot(2, "q"))
    assert again is not None and again.version == 2
    wrong = [TOKENS.make(102, 2, 1, tickets[2]), "", Tokens(b"y" * 32).make(100, 0, 1, tickets[0])]
    for token in wrong:
        with pytest.raises(Refused, match="token"):
            live.answer(0, 1, token, Slot(2, "q"))
    with pytest.raises(Refused, match=NO_TRIP):
        live.answer(0, 9, good, Slot(2, "q"))
    reasons = [event["reason"] for event in town.events("rejected")]
    assert reasons == [WRONG_TOKEN] * 3 + [NO_TRIP] and passes_audit(town)


def test_a_token_is_of_no_use_after_the_upload(tmp_path: Path) -> None:
    town = Town(tmp_path, devices=1)
    town.step()
    token = TOKENS.make(100, 0, 1, town.live.trips[0].ticket)
    town.train()
    town.step()
    with pytest.raises(Refused):
        town.live.answer(0, 1, token, Slot(2, "q"))


def test_a_device_that_did_not_reach_the_service_is_on_record(tmp_path: Path) -> None:
    town = Town(tmp_path, devices=1)
    town.step()
    [(number, (node, content))] = town.post.sent.items()
    order = wire.read_order(content)  # with an address where nobody listens
    answer = town.device.handle(order, town.config, {"folder": str(tmp_path / "memory")}, node)
    assert answer.upload is not None and not answer.upload.merged and "reward" not in answer.upload.report
    town.post.put(number, wire.answer_record(answer))
    town.step()
    note = town.events("note")[-1]
    assert note["about"] == "trained on without the fresh model" and "unavailable" in note["reason"]
    assert town.live.server.version == 2 and passes_audit(town)


def test_a_killed_server_goes_on_and_takes_the_uploads_that_were_under_way(tmp_path: Path) -> None:
    town = Town(tmp_path)
    town.step()
    town.train()
    town.step()
    town.step()
    assert town.live.server.version == 4 and len(town.post.sent) == 3
    checkpoint.write(tmp_path / "run", town.live.state() | {"wall_seconds": 0.0})
    before = {device: journey.ticket for device, journey in town.live.trips.items()}
    answers = {node: town.answer(number) for number, (node, _) in town.post.sent.items()}  # trained, never delivered
    town.post.sent.clear()
    town.live.writer.lock.release()  # as when its process is killed
    tree = checkpoint.read(tmp_path / "run").tree
    check_state(tree)
    town.live = town.build(RunWriter(tmp_path / "run", resume=tree["log"]))
    town.live.restore(tree, 1e6)
    town.step()
    assert {device: journey.ticket for device, journey in town.live.trips.items()} == before
    for number, (node, _) in list(town.post.sent.items()):
        again = town.answer(number)
        assert again.upload is not None and answers[node].upload is not None
        assert np.array_equal(again.upload.weights, answers[node].upload.weights)  # given again, not trained again
        town.post.put(number, wire.answer_record(again))
    town.step()
    assert town.live.server.version == 7 and passes_audit(town)


def test_a_node_that_is_not_on_the_list_is_left_alone(tmp_path: Path) -> None:
    town = Town(tmp_path)
    town.post.there.add(999)
    town.step()
    assert 999 not in [node for node, _ in town.post.sent.values()]
