"""Several fresh models per trip in a deployment: by messages, from the service, and pushed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet.assembly import Overrides
from freshet.core.messages import Fresh, Slot
from freshet.errors import ConfigError
from freshet.flower import device as device_module
from freshet.flower import wire
from freshet.runs import checkpoint
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.runs.writer import RunWriter
from tests.flower.fakes import TOKENS, FakeFederation

EPOCHS = {"epochs": 4}


def federation(folder: Path, fresh: str, **options: Any) -> FakeFederation:
    return FakeFederation(folder, {"name": "fedasmu", **options}, fresh=fresh, training=EPOCHS)


def answer(fed: FakeFederation, node: int) -> wire.Answer:
    """Let the device of a node answer its message."""
    number = next(number for number, (place, _) in fed.transport.sent.items() if place == node)
    found = fed.answer(number)
    fed.transport.put(number, wire.answer_record(found))
    for _ in range(3):
        fed.step()
    return found


def finish(fed: FakeFederation, node: int) -> None:
    while answer(fed, node).upload is None:
        pass


def passes_audit(fed: FakeFederation) -> bool:
    fed.live.writer.flush()
    return audit(RunDirectory(fed.folder / "run")).problem is None


def test_device_asks_by_message_as_often_as_it_may(tmp_path: Path) -> None:
    fed = federation(tmp_path, "messages", slot=2, refresh=2)
    fed.step()
    assert answer(fed, 100).slot == Slot(2, "fixed")
    finish(fed, 101)  # version 2; the answer for slot 2 had nothing newer
    assert answer(fed, 100).slot == Slot(3, "again")
    found = answer(fed, 100)
    assert found.upload is not None and [merge.version for merge in found.upload.merges] == [2]
    [merge] = [event for event in fed.events("merge") if event["device"] == 0]
    assert (merge["slot"], merge["fresh"]) == (3, 2) and passes_audit(fed)


def test_two_merges_by_message_are_logged_and_aggregated(tmp_path: Path) -> None:
    fed = federation(tmp_path, "messages", slot=2, refresh="every")
    fed.step()
    finish(fed, 101)
    assert answer(fed, 100).slot == Slot(2, "fixed")
    finish(fed, 102)
    assert answer(fed, 100).slot == Slot(3, "again")
    assert answer(fed, 100).slot == Slot(4, "again")
    upload = answer(fed, 100).upload
    assert upload is not None and [merge.version for merge in upload.merges] == [2, 3]
    rows = [event for event in fed.events("aggregate") if event["device"] == 0]
    assert rows[-1]["n1"] == [merge.numbers["n1"] for merge in upload.merges] and passes_audit(fed)


def test_restarted_server_repeats_an_answer_and_the_device_its_next_request(tmp_path: Path) -> None:
    """The server forgets the second request: it delivers the first answer again, and the device asks again."""
    fed = federation(tmp_path, "messages", slot=2, refresh=2)
    fed.step()
    finish(fed, 101)
    assert answer(fed, 100).slot == Slot(2, "fixed")
    checkpoint.write(tmp_path / "run", fed.live.state() | {"wall_seconds": 0.0})
    number = next(number for number, (place, _) in fed.transport.sent.items() if place == 100)
    delivered = fed.answer(number)
    assert delivered.slot == Slot(3, "again"), "the device has merged version 2 and asks again"
    fed.live.writer.lock.release()  # as when its process is killed
    fed.transport.sent.clear()
    tree = checkpoint.read(tmp_path / "run").tree
    fed.live = fed.build(RunWriter(tmp_path / "run", resume=tree["log"]))
    fed.live.restore(tree, 1e6)
    fed.step()
    fed.step()
    assert answer(fed, 100).slot == Slot(3, "again")
    upload = answer(fed, 100).upload
    assert upload is not None and [merge.version for merge in upload.merges] == [2]
    assert passes_audit(fed)


def test_device_that_asks_too_often_loses_its_trip(tmp_path: Path) -> None:
    fed = federation(tmp_path, "messages", slot=2, refresh=1)
    fed.step()
    first = answer(fed, 100)
    assert first.slot == Slot(2, "fixed")
    number = next(number for number, (place, _) in fed.transport.sent.items() if place == 100)
    fed.transport.put(number, wire.answer_record(wire.Answer(first.ticket, slot=Slot(3, "again"))))
    fed.step()
    assert fed.events("lost")[0]["reason"] == "requests the fresh model too often"


class Service:
    """The fresh-model service without a network: devices reach the driver directly."""

    def __init__(self, fed: FakeFederation, device: int, trip: int) -> None:
        self._fed, self._device, self._trip = fed, device, trip

    def ask(self, slot: Slot, held: int, size: int) -> Fresh | None:
        live = self._fed.live
        token = TOKENS.make(100 + self._device, self._device, self._trip, live.trips[self._device].ticket)
        if slot.epoch == 3 and self._device == 0 and self._trip == 1:
            finish(self._fed, 101)  # meanwhile another device uploads
        fresh = live.answer(self._device, self._trip, token, slot)
        again = live.answer(self._device, self._trip, token, slot)  # a lost answer is repeated
        assert (fresh is None) == (again is None) and (fresh is None or again is None or fresh.version == again.version)
        return fresh

    def close(self) -> None:
        pass


def answer_with_service(fed: FakeFederation, node: int, monkeypatch: pytest.MonkeyPatch) -> wire.Answer:
    number, content = next((n, c) for n, (place, c) in fed.transport.sent.items() if place == node)
    order = wire.read_order(content)
    assert isinstance(order, wire.Order)
    device, trip = order.assignment.device, order.assignment.trip
    monkeypatch.setattr(device_module, "_client", lambda channel, assignment: Service(fed, device, trip))
    found = fed.device.handle(order, fed.config, {"folder": str(fed.folder / f"memory{node}")}, node)
    fed.transport.put(number, wire.answer_record(found))
    fed.step()
    return found


@pytest.mark.parametrize(
    "options", [{"slot": 2, "refresh": "every"}, {"slot": "never", "push_after": 1}], ids=["asked", "pushed"]
)
def test_service_gives_newer_models_during_a_trip(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = federation(tmp_path, "side", **options)
    fed.step()
    finish(fed, 102)
    found = answer_with_service(fed, 100, monkeypatch)
    assert found.upload is not None and [merge.version for merge in found.upload.merges] == [2, 3]
    merges = [event for event in fed.events("merge") if event["device"] == 0]
    assert [(event["slot"], event["fresh"]) for event in merges] == [(2, 2), (3, 3)]
    pushes, requests = fed.events("push"), fed.events("request")
    assert [event["fresh"] for event in pushes] == ([2, 3] if "push_after" in options else [])
    assert bool(requests) == ("refresh" in options) and passes_audit(fed)
    assert np.isfinite(fed.live.server.weights).all()


def test_pushed_models_wait_until_the_server_is_far_enough_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = federation(tmp_path, "side", slot="never", push_after=2)
    fed.step()
    finish(fed, 102)
    found = answer_with_service(fed, 100, monkeypatch)
    assert found.upload is not None and [merge.version for merge in found.upload.merges] == [3]
    assert [event["fresh"] for event in fed.events("push")] == [3] and passes_audit(fed)


def test_pushing_needs_the_service(tmp_path: Path) -> None:
    from freshet.flower.server_app import ServerSettings, serve

    fed = federation(tmp_path, "side", slot="never", push_after=2)
    settings = ServerSettings(fresh="messages", out=str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"method\.push_after: devices fetch pushed models from the service"):
        serve(fed.config, settings, fed.transport, Overrides())  # type: ignore[arg-type]
