"""Devices with different numbers of epochs: the meta model has slots for all, and offers a device only its own."""

from pathlib import Path

import numpy as np
import pytest

from freshet.core.events import Event, Rejected
from freshet.core.messages import Request, Slot, Upload
from freshet.core.method import MethodContext
from freshet.core.server import Server
from freshet.errors import Stop
from freshet.federation import Federation
from freshet.methods import class_and_preset, method_options
from freshet.methods.asmu.meta import MetaSelector, ShapedSelector
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.runs.writer import Observer
from freshet.training.optimisers import constant
from tests.methods.asmu_helpers import plain_layout
from tests.methods.conftest import SMALL

OWN, USUAL = [2, 8, 5, 3], 5


def selector(epochs: int = 8, **options: float) -> ShapedSelector:
    return ShapedSelector(epochs, **({"eta_rl": 0.1, "rho": 0.2, "seed": 1} | options))  # type: ignore[arg-type]


def server_of(own: list[int] | None, epochs: int = USUAL) -> Server:
    devices, layout = 4, plain_layout(6)
    given = None if own is None else np.array(own, np.int64)
    context = MethodContext(devices, np.full(devices, 10, np.int64), epochs, 4, layout, seed=3, own_epochs=given)
    method = class_and_preset("fedasmu")[0](method_options("fedasmu", {}), context)
    return Server(method, context, np.zeros(6, np.float32), constant(0.1))


def first_report(server: Server, device: int, slot: int) -> list[Event]:
    """Ask in this slot on the device's first trip, then upload with a reward."""
    (sent,) = server.trigger([device])
    server.request(Request(device, sent.trip, Slot(slot, "explore")))
    report = {"slot": slot, "first": 1, "reward": 0.5}
    return server.upload(Upload(device, sent.trip, sent.version, np.full(6, 0.1, np.float32), 3, report))


def federation(method: str) -> Federation:
    training = SMALL["training"] | {"local_epochs": [2, 9]}
    run = SMALL["run"] | {"until": 40.0}
    sections = SMALL | {"training": training, "run": run}
    return Federation(method={"name": method, "epsilon": 1.0}, **sections)


class StopAt(Observer):
    def __init__(self, count: int) -> None:
        self.left = count

    def on_event(self, record: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise Stop("enough")


@pytest.mark.parametrize("method", ["fedasmu", "fedssmu"])
def test_devices_with_more_epochs_explore_their_later_slots(method: str, tmp_path: Path) -> None:
    whole = federation(method).run(out=tmp_path / "whole")
    assert audit(RunDirectory(whole.directory)).problem is None
    slots = [event["slot"] for event in RunDirectory(whole.directory).events() if event["kind"] == "request"]
    assert max(slots) > SMALL["training"]["epochs"]
    federation(method).run(out=tmp_path / "cut", observers=[StopAt(60)])
    resumed = federation(method).resume(tmp_path / "cut")
    np.testing.assert_array_equal(resumed.weights, whole.weights)


def test_device_is_offered_the_best_of_its_own_slots() -> None:
    server = server_of(OWN)
    meta = server.method.state.meta
    for _ in range(40):
        meta.add_reward(1.0)
        meta.reinforce(7, 100.0)
        meta.add_reward(0.0)
    distribution = meta.distribution()
    assert len(distribution) == 8 and meta.best_slot() == 7
    for device, epochs in enumerate(OWN):
        assert server.method.instruct(server, device) == {"meta_slot": int(np.argmax(distribution[:epochs])) + 1}


def test_number_of_slots_defaults_to_the_common_epochs() -> None:
    assert len(server_of(None).method.state.meta.distribution()) == USUAL
    assert len(server_of([1, 2, 3, 4]).method.state.meta.distribution()) == USUAL, "a pre-trained model still fits"


def test_fewer_epochs_keep_relative_slot_probabilities() -> None:
    meta = selector()
    meta.add_reward(1.0)
    meta.reinforce(2, 2.0)
    whole = meta.distribution()
    for epochs in (1, 3, 8):
        np.testing.assert_allclose(meta.distribution(epochs), whole[:epochs] / whole[:epochs].sum(), rtol=1e-12)
    np.testing.assert_array_equal(meta.distribution(8), whole)


def test_importance_weight_covers_only_the_devices_slots() -> None:
    meta = selector(epsilon=0.6)
    probable = meta.distribution(3)
    assert meta.best_slot() == 5 and meta.best_slot(3) == 3
    assert meta.importance_weight(1, epochs=3) == pytest.approx(probable[0] / 0.2)
    assert meta.importance_weight(3, epochs=3) == pytest.approx(probable[2] / 0.6)


def test_server_learns_from_the_devices_slots() -> None:
    server, twin = server_of(OWN), MetaSelector(8, eta_rl=1e-3, rho=0.1, seed=3)
    first_report(server, 3, 2)
    twin.add_reward(0.5)
    twin.reinforce(2, 0.5, epochs=3)
    np.testing.assert_array_equal(server.method.state.meta.distribution(), twin.distribution())


def test_slot_beyond_the_meta_model_is_refused() -> None:
    server = server_of(None)
    server.method.epochs = lambda server, device: 9  # type: ignore[method-assign]  # as a method of one's own may
    (event, *_) = first_report(server, 0, 7)
    assert isinstance(event, Rejected) and event.reason == "reports slot 7, but the meta model has 5"
    (event, *_) = first_report(server, 1, 5)
    assert not isinstance(event, Rejected)
