"""Registered devices that do harm: rejected uploads leave no trace, and the log neither floods nor has gaps."""

import threading
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet.core.messages import Slot
from freshet.core.server import RequestRefused
from freshet.flower import driver, wire
from freshet.flower.driver import MAX_REQUESTS, MAX_SAMPLES, TOO_MANY_REQUESTS
from freshet.runs import checkpoint, segments
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from tests.flower.fakes import TOKENS, FakeFederation


def token(federation: FakeFederation, device: int) -> tuple[int, int, str]:
    journey = federation.live.trips[device]
    trip = journey.assignment.trip
    return device, trip, TOKENS.make(100 + device, device, trip, journey.ticket)


def test_rejected_upload_does_not_change_the_samples(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path, method="fedavg")
    federation.step()
    before = federation.live.server.context.samples.copy()
    number = next(iter(federation.transport.sent))
    answer = federation.answer(number)
    assert answer.upload is not None
    upload = answer.upload._replace(weights=np.full_like(answer.upload.weights, np.nan))
    federation.transport.put(number, wire.answer_record(wire.Answer(answer.ticket, upload, samples=2**31 - 1)))
    federation.step()
    assert len(federation.events("rejected")) == 1
    assert np.array_equal(federation.live.server.context.samples, before)


def test_accepted_upload_sets_the_samples_unless_their_number_is_absurd(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path)
    federation.step()
    before = federation.live.server.context.samples.copy()
    for number, samples in zip(list(federation.transport.sent), (17, MAX_SAMPLES + 1, 0), strict=True):
        answer = federation.answer(number)
        federation.transport.put(number, wire.answer_record(wire.Answer(answer.ticket, answer.upload, samples=samples)))
    federation.step()
    assert not federation.events("rejected") and federation.live.server.context.samples.tolist() == [17, *before[1:]]
    assert federation.live.state()["samples"].tolist() == [17, *before[1:]]


@pytest.mark.parametrize("method", ["fedavg", "fednova", "port"])
def test_claimed_samples_give_no_device_all_the_weight(tmp_path: Path, method: str) -> None:
    """A device that claimed 2^31 - 1 samples got all the weight of its rounds."""
    federation = FakeFederation(tmp_path, method=method)
    said: list[str] = []
    federation.live.writer.say = said.append  # type: ignore[method-assign]
    for _ in range(4):
        federation.step()
        for number, (node, _) in list(federation.transport.sent.items()):
            answer, samples = federation.answer(number), 2**31 - 1 if node == 101 else 70
            record = wire.answer_record(wire.Answer(answer.ticket, answer.upload, samples=samples))
            federation.transport.put(number, record)
        federation.step()
    rows = federation.events("aggregate")
    shares = [max(event["samples"]) / sum(event["samples"]) for event in rows]
    assert len(shares) >= 3 and max(shares) <= 0.5
    if method == "fedavg":
        assert max(part["weight"] for event in rows for part in event["contributions"]) <= 0.5
    note = next(event for event in federation.events("note") if event["about"] == "samples")
    assert (note["device"], note["claimed"]) == (1, 2**31 - 1) and note["counted"] <= 140
    [told] = [line for line in said if "defence.max_share" in line]  # once per device
    assert told.startswith("device 1 reports 2147483647 samples")
    federation.live.writer.flush()
    assert audit(RunDirectory(tmp_path / "run")).passed


def test_claimed_samples_move_asofed_by_a_bounded_share(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path, method="asofed")
    federation.step()
    number = next(iter(federation.transport.sent))
    answer = federation.answer(number)
    federation.transport.put(number, wire.answer_record(wire.Answer(answer.ticket, answer.upload, samples=2**31 - 1)))
    federation.step()
    [event] = federation.events("aggregate")
    assert event["alpha"] == event["max_share"] == 0.5
    federation.live.writer.flush()
    assert audit(RunDirectory(tmp_path / "run")).passed


def test_endless_requests_do_not_fill_the_log(tmp_path: Path) -> None:
    federation = FakeFederation(tmp_path)
    federation.step()
    who = token(federation, 0)
    for _ in range(MAX_REQUESTS):
        federation.live.answer(*who, Slot(2, "q"))
    for _ in range(500):
        with pytest.raises(RequestRefused, match="the request is not allowed"):
            federation.live.answer(*who, Slot(2, "q"))
    with pytest.raises(RequestRefused):
        federation.live.answer(*token(federation, 1), Slot(99, "q"))
    reasons = [event["reason"] for event in federation.events("refused")]
    assert reasons == [TOO_MANY_REQUESTS] * driver.LOGGED_REFUSALS and len(federation.events("request")) == MAX_REQUESTS
    assert federation.live.answer(*token(federation, 1), Slot(2, "q")) is None, "others still get answers"
    assert audit(RunDirectory(tmp_path / "run")).passed


def test_only_the_latest_trips_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "TIMED_TRIPS", 3)
    federation = FakeFederation(tmp_path, devices=1)
    while federation.live.server.version < 6:
        federation.step()
        federation.train()
    assert {len(values) for by_phase in federation.live.seconds.values() for values in by_phase.values()} == {3}


@pytest.mark.timeout(300)
def test_log_rotates_while_the_service_answers_from_its_threads(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    federation = FakeFederation(tmp_path)
    live, ended = federation.live, threading.Event()
    live.writer.configure(rotate_bytes=600)

    def ask(device: int) -> None:
        for turn in count():
            if ended.is_set():
                return
            try:
                who = token(federation, device)
                live.answer(*(who if turn % 3 else (device, who[1], "wrong")), Slot(2, "q"))
            except (RequestRefused, KeyError):
                ended.wait(0.002)

    threads = [threading.Thread(target=ask, args=(place % 3,)) for place in range(6)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(40):
            federation.step()
            federation.train()
            tree = live.state()
            checkpoint.write(tmp_path / "run", tree | {"wall_seconds": 0.0})
            live.writer.record_checkpoint(tree["log"]["events"])
        live.conclude()
        end = live.writer.seq
        with pytest.raises(RequestRefused, match="the run is over"):
            live.answer(0, 1, "any", Slot(2, "q"))
        assert live.writer.seq == end
        live.writer.close(
            {"status": "finished"}, live.server.context.layout, live.server.weights, committed=live.writer.log_end
        )
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert len(list((tmp_path / "run").glob("events-*.jsonl.zst"))) > 10
    numbers = [event["seq"] for event in RunDirectory(tmp_path / "run").events()]
    assert numbers == list(range(1, end + 1)) and segments.size(tmp_path / "run" / segments.LIVE) > 6000
    assert audit(RunDirectory(tmp_path / "run")).passed


@pytest.mark.parametrize(
    "method",
    [
        {"name": "safa", "C": 1.0},
        {"name": "fedat", "G": 1, "K": 6},
        {"name": "pisces", "first_latency": 1000.0},
        {"name": "fedstale"},
    ],
    ids=lambda method: method["name"],
)
def test_claimed_samples_do_not_take_over_a_method_that_weighs_by_them(method: dict[str, Any], tmp_path: Path) -> None:
    fed = FakeFederation(tmp_path, method, devices=6, in_flight=6, per_round=6)
    fed.step()
    for _ in range(2):
        fed.step()
        for number in list(fed.transport.sent):
            answer = fed.answer(number)
            if fed.transport.sent[number][0] == 100:
                answer = replace(answer, samples=2**31 - 1)
            fed.transport.put(number, wire.answer_record(answer))
        fed.step()
        fed.step()
    parts = [event["contributions"] for event in fed.events("aggregate") if len(event["contributions"]) > 1]
    weights = [[part["weight"] for part in each] for each in parts]
    assert weights and all(max(each) <= 0.51 * sum(each) for each in weights), "half at most"
    assert all(min(each) > 1e-3 for each in weights), "the others still count"
