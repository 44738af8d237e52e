"""Ditto: a device's own model against a twin in float64, the limits of lambda, and runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet import Federation
from freshet.core.method import LocalRule
from freshet.core.streams import stream
from freshet.methods.ditto import PERSONAL, PersonalRule
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from tests.methods.helpers import BATCH, SAMPLES, Device, close, regression_weights, same
from tests.twins import local as twins


def personal_twin(w: np.ndarray, v: np.ndarray, device: Device, pull: float, epochs: int) -> np.ndarray:
    """``v <- v - eta (grad f(v; B) + lambda (v - w))``, with the batches that follow those of the trip."""
    rng = stream(4, "batches", 0, 1)
    for _ in range(device.epochs):
        rng.permutation(SAMPLES)
    own = np.float64(v)
    for _ in range(epochs):
        order = rng.permutation(SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            index = order[start : start + BATCH]
            own = own - device.lr * (twins.gradient(own, device.x[index], device.y[index]) + pull * (own - w))
    return own


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("pull", [0.0, 0.1, 1.5])
def test_the_own_model_matches_the_twin(pull: float, epochs: int) -> None:
    device, w, v = Device(), regression_weights(1), regression_weights(2)
    found = device.train(PersonalRule(pull, epochs), w, memory={PERSONAL: v})
    close(found.memory[PERSONAL], personal_twin(w, v, device, pull, epochs), 3e-6)
    first = device.train(PersonalRule(pull, epochs), w)  # without one it starts as the global model
    close(first.memory[PERSONAL], personal_twin(w, w, device, pull, epochs), 3e-6)


def test_an_own_epoch_is_a_whole_pass_though_the_trip_ended_within_one() -> None:
    """Two steps of 10 samples leave 3 of 23 in the first pass. The own model still sees all 23."""
    device, w = Device(epochs=1, steps=2), regression_weights(1)
    found = device.train(PersonalRule(0.1, 1), w)
    close(found.memory[PERSONAL], personal_twin(w, w, device, 0.1, 1), 3e-6)


@pytest.mark.parametrize("training", [{}, {"momentum": 0.6, "weight_decay": 0.01}])
def test_the_server_gets_what_fedavg_would_send(training: dict[str, float]) -> None:
    device, w = Device(**training), regression_weights(1)
    same(device.train(PersonalRule(0.1, 2), w).weights, device.train(LocalRule(), w).weights)


def test_a_stronger_pull_stays_closer_to_the_global_model() -> None:
    device, w = Device(), regression_weights(1)
    far = [np.linalg.norm(device.train(PersonalRule(p, 5), w).memory[PERSONAL] - w) for p in (0.0, 0.5, 2.0)]
    assert far == sorted(far, reverse=True)


def runs(tmp_path: Path, method: str, **options: Any) -> Any:
    settings: dict[str, Any] = {"data": {"partition": "by_label"}, "devices": 6, "training": {"epochs": 2, "lr": 0.1}}
    run = {"rounds": 4, "per_round": 3, "evaluate_devices": "end", "executor": "serial", "gate": "off"}
    return Federation(method={"name": method, **options}, run=run, **settings).run(out=tmp_path / method)


def test_a_run_has_fedavgs_global_model_and_better_devices(tmp_path: Path) -> None:
    plain, own = runs(tmp_path, "fedavg"), runs(tmp_path, "ditto", personal_epochs=3)
    same(plain.weights, own.weights)
    assert own.rows[-1]["devices_median"] > plain.rows[-1]["devices_median"]
    report = audit(RunDirectory(own.directory))
    assert report.passed and report.audited
