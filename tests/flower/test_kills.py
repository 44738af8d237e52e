"""A server that is killed at any moment forgets no question that it has answered and no upload that it has taken."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet.core.coordinator import Coordinator
from freshet.core.messages import Fresh, Slot
from freshet.flower import device as device_module
from freshet.flower import wire
from freshet.flower.fresh import NoFreshAnswer
from freshet.flower.journal import Journal
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.runs.writer import RunWriter
from tests.flower.fakes import TOKENS, FakeFederation, FakeTransport


class Killed(BaseException):
    """The process of the server ends here."""


class Service:
    """The fresh-model service without a network. A server that dies before it has answered gives no answer."""

    def __init__(self, kills: "KilledFederation", device: int, trip: int) -> None:
        self._kills, self._device, self._trip = kills, device, trip

    def ask(self, slot: Slot, held: int, size: int) -> Fresh | None:
        live = self._kills.fed.live
        token = TOKENS.make(100 + self._device, self._device, self._trip, live.trips[self._device].ticket)
        try:
            return live.answer(self._device, self._trip, token, slot)
        except Killed:
            self._kills.dead = True
            raise NoFreshAnswer("unavailable") from None

    def close(self) -> None:
        pass


class KilledFederation:
    """A federation whose server can be killed between any two things that it does."""

    def __init__(self, folder: Path, fresh: str, monkeypatch: pytest.MonkeyPatch) -> None:
        method = {"name": "fedasmu", "slot": 2}
        self.fed = FakeFederation(folder, method, fresh=fresh, training={"epochs": 2, "batch_size": 64})
        self.dead, self.fuse, self.kills = False, -1, 0
        #: Every upload that a device has made, by device and trip.
        self.made: dict[tuple[int, int], Any] = {}
        for owner, name in (
            (Journal, "append"),
            (Journal, "sync"),
            (Coordinator, "tick"),
            (Coordinator, "request"),
            (Coordinator, "upload_arrived"),
            (RunWriter, "event"),
            (FakeTransport, "send"),
            (FakeTransport, "receive"),
        ):
            monkeypatch.setattr(owner, name, self._mortal(getattr(owner, name)))
        monkeypatch.setattr(device_module, "_client", lambda _, given: Service(self, given.device, given.trip))
        self.fed.live.run(1e6, lambda: self.fed.save() is None)  # a run begins with a checkpoint

    def _mortal(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, before and after which the server may be killed."""

        def call(*arguments: Any, **options: Any) -> Any:
            self._burn()
            result = function(*arguments, **options)
            self._burn()
            return result

        return call

    def _burn(self) -> None:
        self.fuse -= 1
        if self.fuse == 0:
            raise Killed

    def turn(self) -> None:
        """One turn of the server, which starts again if it was killed."""
        try:
            self.fed.step()
        except Killed:
            self.dead = True
        if self.dead:
            self.restart()

    def restart(self) -> None:
        """What a kill leaves: the files as far as they were written. All messages and the log's buffer are gone."""
        fed, self.fuse = self.fed, -1
        with Path(os.devnull).open("wb") as nowhere:
            for file in (fed.live.writer._events, fed.live.writer._metrics):
                os.dup2(nowhere.fileno(), file.fileno())
        fed.restart()
        self.dead, self.kills = False, self.kills + 1
        self.fed.save()

    def device_turn(self, rng: np.random.Generator) -> None:
        """Let one device answer its message. It may be killed, too, before it has saved its answer."""
        waiting = sorted(self.fed.transport.sent)
        if not waiting:
            return
        number = waiting[rng.integers(len(waiting))]
        node, content = self.fed.transport.sent[number]
        order = wire.read_order(content)
        place = {"folder": str(self.fed.folder / f"memory{node}")}
        found = self.fed.device.handle(order, self.fed.config, place, node)
        if found.upload is not None:
            key = (found.upload.device, found.upload.trip)
            before = self.made.setdefault(key, found.upload)
            assert np.array_equal(before.weights, found.upload.weights), "it repeats its answer"
        if number in self.fed.transport.sent and not self.dead:
            self.fed.transport.put(number, wire.answer_record(found))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fresh", ["side", "messages"])
def test_server_killed_at_random_moments_loses_nothing(
    tmp_path: Path, fresh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(31)
    kills = KilledFederation(tmp_path, fresh, monkeypatch)
    while kills.kills < 25:
        if kills.fuse < 0:
            kills.fuse = int(rng.integers(1, 200))
        kills.turn()
        counts = kills.fed.live.coordinator.counts
        assert counts.rejected == counts.lost == 0
        if rng.random() < 0.7:
            kills.device_turn(rng)
        if kills.fuse > 0 and rng.random() < 0.02:
            kills.fuse, fuse = -1, kills.fuse  # a checkpoint is written as a whole
            kills.fed.save()
            kills.fuse = fuse
    kills.fuse = -1
    for _ in range(20):
        kills.turn()
        kills.device_turn(rng)
    fed = kills.fed
    assert not fed.events("rejected") and not fed.events("lost") and len(fed.events("merge")) > 25
    logged = [(event["device"], event["trip"]) for event in fed.events("upload")]
    assert len(logged) == len(set(logged)), "no upload counts twice"
    flying = {(device, trip.assignment.trip) for device, trip in fed.live.trips.items()}
    assert set(kills.made) - flying <= set(logged), "every upload counts"
    fed.live.writer.flush()
    found = audit(RunDirectory(tmp_path / "run"))
    assert found.passed, found.problem


def test_server_killed_after_it_has_answered_accepts_the_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload was rejected: "reports a merge, but was sent no fresh model"."""
    kills = KilledFederation(tmp_path, "side", monkeypatch)
    fed = kills.fed
    fed.step()
    kills.fed.save()
    rng = np.random.default_rng(0)
    kills.device_turn(rng)
    fed.step()  # version 2
    while not any(upload.merges for upload in kills.made.values()):
        kills.device_turn(rng)
    kills.restart()
    for _ in range(4):
        kills.turn()
        kills.device_turn(rng)
    assert fed.events("merge") and not fed.events("rejected") and fed.live.server.version > 2
    fed.live.writer.flush()
    assert audit(RunDirectory(tmp_path / "run")).passed


def answered(fed: FakeFederation, number: str) -> None:
    fed.transport.put(number, wire.answer_record(fed.answer(number)))
    fed.step()


@pytest.mark.parametrize("kind", ["given up", "cancelled"])
def test_answer_to_a_trip_that_was_abandoned_before_the_checkpoint_is_replayed(kind: str, tmp_path: Path) -> None:
    """The checkpoint has no such trip, and the journal has its late answer."""
    method = {"name": "fedasync"} if kind == "given up" else {"name": "safa", "C": 0.3, "lag_tol": 1}
    fed = FakeFederation(tmp_path, method, in_flight=3)
    fed.live.run(1e6, lambda: fed.save() is None)
    fed.step()
    late = list(fed.transport.sent)[-1]
    if kind == "given up":
        device = wire.read_order(fed.transport.sent[late][1]).assignment.device
        fed.live.server.give_up(device, fed.live.trips[device].assignment.trip)
    for _ in range(6):
        others = [number for number in fed.transport.sent if number != late]
        if kind == "given up" or fed.events("lost") or not others:
            break
        answered(fed, others[0])
        fed.step()
    assert fed.live.server.away, "the device is silent"
    fed.save()
    answered(fed, late)
    counts = fed.live.coordinator.counts
    fed.live.writer.flush()
    fed.restart()
    assert fed.live.coordinator.counts == counts and not fed.live.server.away
