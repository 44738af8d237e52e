"""A deployment with noise on the server: a key of its own, the same noise after a kill, an audited log."""

from pathlib import Path

import numpy as np
import pytest

from freshet.flower import wire
from freshet.privacy import NoisedSum
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from tests.flower.fakes import FakeFederation

SERVER = {"where": "server", "clip": 0.5, "noise": 1.0}


def noise_of(fed: FakeFederation) -> NoisedSum:
    noise = fed.live.server.noise
    assert isinstance(noise, NoisedSum)
    return noise


def restart(fed: FakeFederation) -> None:
    """Kill the server and start another one on its folder."""
    fed.live.writer.flush()
    key, another = noise_of(fed).account.key, fed.assembly.begin().server.noise
    assert isinstance(another, NoisedSum) and another.account.key != key, "a new server draws a new key"
    fed.restart()
    assert noise_of(fed).account.key == key


@pytest.mark.parametrize("method", ["fedbuff", "fedavg"])
def test_killed_server_repeats_its_noise_from_the_journal(method: str, tmp_path: Path) -> None:
    """Other noise on the same sum, or the same noise on another sum, would reveal more than was accounted for."""
    fed = FakeFederation(tmp_path, method, privacy=SERVER)
    fed.live.run(1e6, lambda: fed.save() is None)  # a run begins with a checkpoint
    for _ in range(3):
        fed.step()
        fed.train()
        fed.step()
    weights, version, account = fed.live.server.weights.copy(), fed.live.server.version, noise_of(fed).account
    assert version > 1 and account.sums == version - 1
    restart(fed)
    assert fed.live.server.version == version and np.array_equal(fed.live.server.weights, weights)
    assert noise_of(fed).account == account and noise_of(fed).account is not account
    for _ in range(3):
        fed.step()
        fed.train()
        fed.step()
    assert fed.live.server.version > version and not fed.events("rejected")
    fed.live.writer.flush()
    found = audit(RunDirectory(tmp_path / "run"))
    assert found.passed, found.problem


def test_devices_get_neither_the_key_nor_noise_of_their_own(tmp_path: Path) -> None:
    fed = FakeFederation(tmp_path, "fedbuff", privacy=SERVER)
    fed.step()
    key = noise_of(fed).account.key
    for number, (_, content) in list(fed.transport.sent.items()):
        assert key not in repr(content)
        order = wire.read_order(content)
        assert isinstance(order, wire.Order)
        answer = fed.answer(number)
        assert answer.upload is not None
        again = fed.answer(number)
        assert again.upload is not None and np.array_equal(answer.upload.weights, again.upload.weights)
    assert key not in repr(fed.config.tables())
