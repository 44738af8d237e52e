"""``training.fast`` switches the fast layers off. Runs from before the setting keep their hash and can be resumed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from freshet import Federation, RunError
from freshet.config import resolve
from freshet.core.messages import Assignment
from freshet.core.method import LocalRule
from freshet.data import from_arrays
from freshet.experiments.grid import run_key
from freshet.models.registry import build
from freshet.runs.writer import Observer
from freshet.training.batches import FederatedData
from freshet.training.fast.sequences import FusedSequential
from freshet.training.network import initial_weights
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Trainer, TripInput


def lenet() -> nn.Module:
    return build("lenet5", input_shape=(1, 28, 28), classes=3)


def trainer(**options: bool) -> Trainer:
    rng = np.random.default_rng(0)
    images = rng.standard_normal((20, 1, 28, 28)).astype(np.float32), rng.integers(0, 3, 20)
    data = FederatedData.of(from_arrays("toy", images, images, classes=3), [np.arange(20)])
    return Trainer(lenet, data, TrainingOptions(epochs=1, **options), 0)


def train(one: Trainer) -> np.ndarray:
    assignment = Assignment(0, 1, 1, 1, initial_weights(lenet, 0), 1, 0.1)
    return one.train(TripInput(assignment, (), (), LocalRule(), {})).weights


def test_without_fast_layers_a_trainer_uses_those_of_torch() -> None:
    fast, plain = trainer(), trainer(fast=False)
    assert any(type(layer) is FusedSequential for layer in fast.flat.module.modules())
    assert {type(layer) for layer in plain.flat.module.modules()} == {type(layer) for layer in lenet().modules()}
    ours, theirs = train(fast), train(plain)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert ours.tobytes() != theirs.tobytes(), "the last bits differ, so the setting is part of a run's identity"


@pytest.mark.parametrize(
    ("value", "given", "expected"), [("0", {}, False), ("1", {}, True), ("0", {"fast": True}, True)]
)
def test_the_environment_sets_the_default_and_the_configuration_wins(
    monkeypatch: pytest.MonkeyPatch, value: str, given: dict[str, bool], expected: bool
) -> None:
    monkeypatch.setenv("FRESHET_FAST", value)
    assert TrainingOptions(**given).fast is expected
    assert resolve({"training": given}).tables()["training"]["fast"] is expected


def test_the_setting_changes_hashes_only_when_it_is_off() -> None:
    plain, on, off = (
        resolve({"method": {"name": "fedavg"}, "training": given}) for given in ({}, {"fast": True}, {"fast": False})
    )
    assert plain.sha256() == on.sha256() != off.sha256()
    assert run_key(plain) == run_key(on) != run_key(off)
    # the hashes before the setting existed; if they change, older runs can no longer be resumed
    assert plain.sha256() == "e5bc72bca8c9d966e8c6238a339eecf892a4c3f25bf1039e4789b27cd2f3175f"
    assert run_key(plain) == "fedavg-seed0-7e879a702916"


class Stop(Exception):
    """Ends a run as a kill would."""


class Stopper(Observer):
    def on_progress(self, time: float) -> None:
        if time >= 20.0:
            raise Stop


def test_a_run_from_before_the_setting_is_resumed(
    federate: Callable[..., Federation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = federate("fedavg").run(40, out=tmp_path / "whole")
    with pytest.raises(Stop):
        federate("fedavg", run={"checkpoint_every": 5.0}).run(40, out=tmp_path / "run", observers=[Stopper()])
    path = tmp_path / "run" / "config.toml"
    old = path.read_text().replace("fast = true\n", "")
    assert old != path.read_text()
    path.write_text(old)
    with pytest.raises(RunError, match=r"another configuration \(training\.fast\)"):
        federate("fedavg", training={"fast": False}).resume(tmp_path / "run")
    with monkeypatch.context() as patched:  # the environment is for new runs
        patched.setenv("FRESHET_FAST", "0")
        with pytest.raises(RunError, match=r"another configuration \(training\.fast\)"):
            federate("fedavg").resume(tmp_path / "run")
        resumed = federate("fedavg", training={"fast": True}).resume(tmp_path / "run")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
