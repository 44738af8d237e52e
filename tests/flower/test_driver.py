"""The driver over a network without processes: every answer is handled once, and every fault is logged."""

import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord

from freshet.core.messages import Assignment, Slot
from freshet.core.server import NO_TRIP, RequestRefused
from freshet.flower import OVER_FILE, wire
from freshet.flower.driver import WRONG_TOKEN, LiveTrip, check_state
from freshet.flower.security import Tokens
from freshet.runs import checkpoint
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.runs.writer import RunWriter
from tests.flower.fakes import TOKENS, FakeFederation


def passes_audit(federation: FakeFederation) -> bool:
    federation.live.writer.flush()
    found = audit(RunDirectory(federation.folder / "run"))
    assert found.passed, found.problem
    return True


def test_upload_is_aggregated_on_arrival_and_its_device_triggered_again(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path)
    federation.step()
    assert len(federation.transport.sent) == 3
    first = next(iter(federation.transport.sent))
    federation.transport.put(first, wire.answer_record(federation.answer(first)))
    federation.step()
    assert federation.live.server.version == 2 and len(federation.events("aggregate")) == 1
    federation.step()
    assert len(federation.transport.sent) == 3  # the two that still train, and the one that was triggered again
    federation.train()
    federation.step()
    assert federation.live.server.version == 5 and passes_audit(federation)


def test_synchronous_method_runs_in_rounds(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path, "fedavg", per_round=2)
    for _ in range(3):
        federation.step()
        federation.train()
        federation.step()
    assert [event["round"] for event in federation.events("aggregate")] == [1, 2, 3] and passes_audit(federation)


def test_rounds_begin_when_a_device_is_online(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path, "fedavg", per_round=2, rounds=2, period=0.001)
    devices, federation.transport.there = federation.transport.there, set()
    for _ in range(4):
        federation.step()
        time.sleep(0.01)
    assert not federation.live.over and federation.live.server.round == 0, "no round was counted"
    federation.transport.there = devices
    federation.step()
    assert len(federation.transport.sent) == 2
    federation.train()
    federation.step()
    assert [event["round"] for event in federation.events("aggregate")] == [1] and passes_audit(federation)


@pytest.mark.parametrize("method", ["fedasmu", "fedavg"])
def test_run_waits_once_for_enough_devices(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now, sleep=lambda _: None)
    monkeypatch.setattr("freshet.flower.driver.time", clock)
    federation = FakeFederation(tmp_path, method, wait_for=2)
    devices, federation.transport.there = federation.transport.there, {100}
    for _ in range(4):
        clock.now += 400.0
        federation.step()
    assert not federation.transport.sent and not federation.events("trigger") and federation.live.now == 0.0, (
        "the clock stands still"
    )
    federation.transport.there = devices
    federation.step()
    assert len(federation.transport.sent) == 3
    federation.train()
    federation.transport.there = {100}
    for _ in range(3):
        clock.now += 2.0
        federation.step()
    assert [node for node, _ in federation.transport.sent.values()] == [100], (
        "afterwards the run continues with the devices that are online"
    )
    assert passes_audit(federation)


def test_fresh_model_by_message_takes_two_messages_and_is_merged(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path, fresh="messages")
    federation.step()
    for place in (-1, -1, 0, -1):  # the last device requests and uploads, then the first one does
        number = list(federation.transport.sent)[place]
        federation.transport.put(number, wire.answer_record(federation.answer(number)))
        federation.step()
        federation.step()
    [merge] = federation.events("merge")
    assert (merge["base"], merge["fresh"]) == (1, 2) and "beta" in merge
    assert [event["fresh"] for event in federation.events("request")] == [None, 2] and passes_audit(federation)


def test_device_reports_a_trip_lost_between_two_messages(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path, devices=1, fresh="messages")
    federation.step()
    while not any("onward" in content for _, content in federation.transport.sent.values()):
        federation.train()
        federation.step()
    (paused,) = (tmp_path / "memory100").glob("paused.*.safetensors")
    paused.unlink()
    federation.train()
    federation.step()
    assert [event["reason"] for event in federation.events("lost")] == ["the device no longer has this trip"]
    assert passes_audit(federation)


@pytest.mark.parametrize(
    "method",
    [
        *("feddyn", "moon", "port", "asofed", "fedbuff", "fedsa", "fedlws", "fedssmu"),
        *("ace", "asyncfeded", "fedcompass", "masfl", "pisces", "fedexp", "fedacg", "mifa"),
        {"name": "fedat", "G": 2, "K": 1},
        {"name": "fedac", "K": 2},
        {"name": "safa", "C": 1.0},
    ],
    ids=str,
)
def test_other_methods_train(tmp_path: Path, method: str | dict[str, Any]) -> None:
    federation = FakeFederation(tmp_path, method)
    federation.step()
    for _ in range(4):
        federation.train()
        federation.step()
        federation.step()
    assert len(federation.events("upload")) >= 6 and not federation.events("rejected") and passes_audit(federation)


def test_method_is_called_at_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of SAFA ends at its deadline, though two devices still train."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now, time=time.time, sleep=lambda _: None)
    monkeypatch.setattr("freshet.flower.driver.time", clock)
    federation = FakeFederation(tmp_path, {"name": "safa", "C": 1.0, "deadline": 30.0})
    federation.step()
    first = next(iter(federation.transport.sent))
    clock.now += 10.0
    federation.transport.put(first, wire.answer_record(federation.answer(first)))
    federation.step()
    assert federation.live.server.version == 1
    clock.now += 21.0
    federation.step()
    assert federation.live.server.version == 2 and len(federation.events("aggregate")) == 1
    assert passes_audit(federation)


def test_cancelled_device_is_asked_to_stop_and_starts_again_when_it_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now, time=time.time, sleep=lambda _: None)
    monkeypatch.setattr("freshet.flower.driver.time", clock)
    federation = FakeFederation(tmp_path, {"name": "safa", "C": 0.3}, devices=3)
    federation.step()
    slow, *others = federation.transport.sent
    late = federation.answer(slow)
    for _ in range(2):  # one model each makes a round
        for number in others:
            federation.transport.put(number, wire.answer_record(federation.answer(number)))
            federation.step()
            federation.step()
        others = [number for number in federation.transport.sent if number != slow]
    (lost,) = [event for event in federation.events("lost") if event["reason"] == "cancelled by the method"][:1]
    device = lost["device"]
    assert federation.live.trips[device].urgent and device in federation.live.server.away
    federation.transport.put(slow, wire.answer_record(late))
    federation.step()
    assert federation.events("rejected")[-1]["reason"] == NO_TRIP
    clock.now += 1.0  # the next look for idle devices
    federation.step()
    assert federation.live.trips[device].assignment.trip == 2
    assert passes_audit(federation)


def test_devices_report_losses_when_the_selection_asks(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path, "fedavg", per_round=2, selection="oort")
    for _ in range(3):
        federation.step()
        federation.train()
        federation.step()
    reports = federation.live.server.selector.state.last
    assert reports and all(report.loss > 0.0 and report.seconds >= 0.0 for report in reports.values())


def test_messages_contain_only_weights_vectors_and_protocol_scalars(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path, fresh="messages")
    federation.step()
    for _ in range(4):
        federation.train()
        federation.step()
    sizes = {federation.assembly.layout.size, federation.assembly.layout.learnable}
    for content in federation.transport.everything:
        assert set(content) <= {
            "train",
            "onward",
            "answer",
            "model",
            "vectors",
            "instruction",
            "report",
            "merge0",
            "timing",
        }
        for record in content.values():
            if isinstance(record, ArrayRecord):
                assert all(len(array.numpy()) in sizes for array in record.values())
            else:
                assert isinstance(record, ConfigRecord)
                assert all(type(version) is int for version in record.get("merges", []))
                assert all(isinstance(value, str | int | float) for key, value in record.items() if key != "merges")
                assert all(len(value) <= 4096 for value in record.values() if isinstance(value, str))


@pytest.mark.parametrize("damage", ["nan", "short", "steps", "records", "ticket"])
def test_bad_upload_is_rejected_with_a_reason_and_the_run_continues(tmp_path: Path, damage: str) -> None:
    federation = FakeFederation(tmp_path)
    federation.step()
    number = next(iter(federation.transport.sent))
    answer = federation.answer(number)
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
    federation.transport.put(number, record)
    federation.step()
    refused = federation.events("rejected") + federation.events("lost")
    assert len(refused) == 1 and refused[0]["reason"] and federation.live.server.version == 1
    federation.train()
    federation.step()
    assert federation.live.server.version == 3 and passes_audit(federation)


def test_lost_device_is_triggered_when_it_returns(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path)
    federation.step()
    number = next(number for number, (node, _) in federation.transport.sent.items() if node == 101)
    federation.transport.there.remove(101)
    federation.transport.put(number, error="the device is gone")
    federation.step()
    assert [(event["device"], event["reason"]) for event in federation.events("lost")] == [(1, "the device is gone")]
    federation.step()
    assert 101 not in [node for node, _ in federation.transport.sent.values()]
    federation.transport.there.add(101)
    federation.live.coordinator.wake(0.0)
    federation.live.wake(0.0)
    federation.step()
    assert 101 in [node for node, _ in federation.transport.sent.values()]
    assert [event["trip"] for event in federation.events("trigger") if event["device"] == 1] == [1, 2]


def test_device_reported_gone_waits_for_the_next_node_poll(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path)
    federation.step()
    federation.live.network = replace(federation.live.network, node_poll=1e9)
    number = next(number for number, (node, _) in federation.transport.sent.items() if node == 101)
    federation.transport.put(number, error="the device is gone")
    for _ in range(3):
        federation.step()
    assert [event["trip"] for event in federation.events("trigger") if event["device"] == 1] == [1]
    federation.live.network = replace(federation.live.network, node_poll=0.0)
    federation.live.wake(0.0)
    federation.step()
    assert [event["trip"] for event in federation.events("trigger") if event["device"] == 1] == [1, 2]


def test_messages_per_trip_are_counted(tmp_path: Path) -> None:
    for fresh, each in (("side", 1), ("messages", 2)):
        federation = FakeFederation(tmp_path / fresh, devices=1, fresh=fresh)
        while len(federation.events("upload")) < 2:
            federation.train()
            federation.step()
        assert federation.live.messages == federation.live.facts()["messages"] == 2 * each


def test_only_the_trip_token_gets_the_fresh_model(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path)
    federation.step()
    live, tickets = federation.live, {device: trip.ticket for device, trip in federation.live.trips.items()}
    good = TOKENS.make(100, 0, 1, tickets[0])
    assert live.answer(0, 1, good, Slot(2, "q")) is None  # nothing newer yet
    number = next(number for number, (node, _) in federation.transport.sent.items() if node == 101)
    federation.transport.put(number, wire.answer_record(federation.answer(number)))
    federation.step()
    fresh = live.answer(0, 1, good, Slot(2, "q"))
    assert fresh is not None and fresh.version == 2
    again = live.answer(0, 1, good, Slot(2, "q"))
    assert again is not None and again.version == 2
    wrong = [TOKENS.make(102, 2, 1, tickets[2]), "", Tokens(b"y" * 32).make(100, 0, 1, tickets[0])]
    for token in wrong:
        with pytest.raises(RequestRefused, match=r"^the request is not allowed$"):
            live.answer(0, 1, token, Slot(2, "q"))
    with pytest.raises(RequestRefused, match=r"^the request is not allowed$"):  # a stranger learns nothing about trips
        live.answer(0, 9, good, Slot(2, "q"))
    reasons = [event["reason"] for event in federation.events("refused")]
    assert reasons == [WRONG_TOKEN] * 3 + [NO_TRIP] and passes_audit(federation)


def test_refused_requests_are_not_rejected_uploads(tmp_path: Path) -> None:
    """They used to count as rejected: a stranger could make a run say that its uploads were rejected."""
    federation = FakeFederation(tmp_path)
    federation.step()
    for _ in range(5):
        with pytest.raises(RequestRefused):
            federation.live.answer(0, 1, "wrong", Slot(2, "q"))
    federation.train()
    federation.step()
    facts = federation.live.facts()
    assert (facts["uploads"], facts["rejected"], facts["refused"]) == (3, 0, 5) and not federation.events("rejected")


def test_token_is_refused_after_the_upload(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path, devices=1)
    federation.step()
    token = TOKENS.make(100, 0, 1, federation.live.trips[0].ticket)
    federation.train()
    federation.step()
    with pytest.raises(RequestRefused):
        federation.live.answer(0, 1, token, Slot(2, "q"))


def test_unreachable_service_is_logged(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path, devices=1)
    federation.step()
    [(number, (node, content))] = federation.transport.sent.items()
    order = wire.read_order(content)  # its address has no listener
    answer = federation.device.handle(order, federation.config, {"folder": str(tmp_path / "memory")}, node)
    assert answer.upload is not None and not answer.upload.merges and "reward" not in answer.upload.report
    federation.transport.put(number, wire.answer_record(answer))
    federation.step()
    note = federation.events("note")[-1]
    assert note["about"] == "trained on without the fresh model" and "unavailable" in note["reason"]
    assert federation.live.server.version == 2 and passes_audit(federation)


def test_killed_server_resumes_and_accepts_uploads_in_flight(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path)
    federation.step()
    federation.train()
    federation.step()
    federation.step()
    assert federation.live.server.version == 4 and len(federation.transport.sent) == 3
    checkpoint.write(tmp_path / "run", federation.live.state() | {"wall_seconds": 0.0})
    before = {device: trip.ticket for device, trip in federation.live.trips.items()}
    answers = {
        node: federation.answer(number) for number, (node, _) in federation.transport.sent.items()
    }  # trained but not delivered
    federation.transport.sent.clear()
    federation.live.writer.lock.release()  # as when its process is killed
    tree = checkpoint.read(tmp_path / "run").tree
    check_state(tree)
    federation.live = federation.build(RunWriter(tmp_path / "run", resume=tree["log"]))
    federation.live.restore(tree, 1e6)
    federation.step()
    assert {device: trip.ticket for device, trip in federation.live.trips.items()} == before
    for number, (node, _) in list(federation.transport.sent.items()):
        again = federation.answer(number)
        assert again.upload is not None and answers[node].upload is not None
        assert np.array_equal(again.upload.weights, answers[node].upload.weights)  # repeated, not trained again
        federation.transport.put(number, wire.answer_record(again))
    federation.step()
    assert federation.live.server.version == 7 and passes_audit(federation)


@pytest.mark.parametrize("method", ["fedasync", "fedavg"])
def test_learning_rate_follows_the_clock_which_goes_on_after_a_restart(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now, sleep=lambda _: None, time=lambda: clock.now)
    monkeypatch.setattr("freshet.flower.driver.time", clock)
    schedule = {"lr": 0.1, "lr_decay": 0.5, "schedule_by": "time", "schedule_seconds": 100.0}
    federation = FakeFederation(tmp_path, method, training=schedule, per_round=3)

    def turn(seconds: float) -> None:
        clock.now += seconds
        federation.step()
        federation.train()
        federation.step()

    for seconds in (0.0, 50.0, 200.0):
        turn(seconds)
    checkpoint.write(tmp_path / "run", federation.live.state() | {"wall_seconds": 0.0})
    federation.live.writer.lock.release()  # as when its process is killed
    clock.now += 5000.0
    tree = checkpoint.read(tmp_path / "run").tree
    federation.live = federation.build(RunWriter(tmp_path / "run", resume=tree["log"]))
    federation.live.restore(tree, 1e6)
    for seconds in (0.0, 30.0):
        turn(seconds)
    rates = {event["time"]: event["lr"] for event in federation.events("trigger")}
    assert len(rates) >= 4 and max(rates) == 280.0, "the pause does not count"
    assert rates == {at: pytest.approx(0.1 * 0.5 ** (at / 100.0)) for at in rates}
    assert passes_audit(federation)


def test_unlisted_node_is_ignored(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path)
    federation.transport.there.add(999)
    federation.step()
    assert 999 not in [node for node, _ in federation.transport.sent.values()]


# ---- where the time of a trip goes

TIMING = {"start": 1.0, "import": 2.0, "load": 0.5, "train": 4.0, "fresh": 0.25, "began": 103.0, "cpu": 3.0}


def live_trip(**given: object) -> LiveTrip:
    assignment = Assignment(0, 1, 1, 1, np.zeros(1, np.float32), 5, 0.1)
    made = LiveTrip(assignment, "ticket", 0.0)
    made.wall_start = 100.0
    for name, value in given.items():
        setattr(made, name, value)
    return made


def test_unaccounted_time_is_message_time() -> None:
    found = live_trip().durations(12.0, TIMING)
    assert found["messages"] == pytest.approx(12.0 - 7.75)
    assert (found["down"], found["up"]) == (3.0, pytest.approx(1.25))  # its process started 3 s after the trip
    phases = ("down", "start", "import", "load", "train", "fresh", "up")
    assert sum(found[phase] for phase in phases) == pytest.approx(found["whole"]) and found["cpu"] == 3.0


def test_timings_of_both_messages_are_added() -> None:
    first = {"start": 1.0, "import": 2.0, "load": 0.5, "train": 1.0, "began": 101.0}
    found = live_trip(first_timing=first).durations(20.0, TIMING | {"began": 111.0})
    assert (found["start"], found["import"], found["train"], found["down"]) == (2.0, 4.0, 5.0, 1.0)


@pytest.mark.parametrize(("began", "down"), [(50.0, 0.0), (1e12, 4.25), (math.nan, 0.0), (math.inf, 4.25)])
def test_clock_differences_change_only_the_split_of_message_time(began: float, down: float) -> None:
    found = live_trip().durations(12.0, TIMING | {"began": began})
    assert found["down"] == pytest.approx(down) and found["down"] + found["up"] == pytest.approx(4.25)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 1e9])
def test_implausible_phase_is_left_out(value: float) -> None:
    found = live_trip().durations(12.0, TIMING | {"train": value})
    assert "train" not in found and found["messages"] == pytest.approx(12.0 - 3.75)


# ---- the end of a run


@pytest.mark.timeout(60)
def test_devices_are_told_that_the_run_is_over(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path, devices=2)
    federation.live.network = replace(federation.live.network, farewell=20.0)
    federation.step()
    federation.train()
    federation.step()
    federation.transport.sent.clear()
    answers = threading.Thread(target=answer_all, args=(federation, 2))
    answers.start()
    began = time.monotonic()
    federation.live.conclude()
    answers.join()
    assert time.monotonic() - began < 15.0, "it waits no longer than it must"
    for node in (100, 101):
        assert (tmp_path / f"memory{node}" / OVER_FILE).read_text() == federation.live.session


def answer_all(federation: FakeFederation, count: int) -> None:
    """Answer this many messages as they come."""
    while count:
        for number, (node, content) in list(federation.transport.sent.items()):
            order, place = wire.read_order(content), {"folder": str(federation.folder / f"memory{node}")}
            answer = federation.device.handle(order, federation.config, place, node)
            federation.transport.put(number, wire.answer_record(answer))
            count -= 1
        time.sleep(0.01)


def test_server_does_not_wait_for_devices_that_do_not_answer(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path, devices=1)
    federation.live.network = replace(federation.live.network, farewell=0.3)
    federation.step()
    began = time.monotonic()
    federation.live.conclude()
    assert 0.2 < time.monotonic() - began < 10.0
