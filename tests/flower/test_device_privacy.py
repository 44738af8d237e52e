"""A device under [privacy]: nobody can repeat its noise, and nothing else reveals its samples."""

from pathlib import Path

import numpy as np
import pytest

from freshet.assembly import Assembly
from freshet.config import resolve
from freshet.core.messages import Assignment
from freshet.errors import ConfigError
from freshet.flower import wire
from freshet.flower.device import Device
from freshet.methods.asmu.rule import FreshModelRule

TABLES = {
    "method": {"name": "fedavg"},
    "fleet": {"devices": 3},
    "training": {"epochs": 1, "batch_size": 32},
    "data": {"train_samples": 200, "test_samples": 100},
}


def answer_of(tmp_path: Path, name: str, privacy: dict, ticket: str = "t", device: Device | None = None) -> wire.Answer:
    config = resolve(TABLES | {"privacy": privacy})
    weights = np.zeros(Assembly(config).layout.size, np.float32)
    order = wire.Order(Assignment(0, 1, 1, 1, weights, 1, 0.1), "session", ticket, wire.FreshChannel())
    return (device or Device()).handle(order, config, {"folder": str(tmp_path / name)}, 1)


def test_devices_with_the_same_seed_and_samples_draw_different_noise(tmp_path: Path) -> None:
    one, two = (answer_of(tmp_path, name, {"clip": 1.0}) for name in "ab")
    assert one.upload is not None and two.upload is not None
    apart = (one.upload.weights - two.upload.weights).astype(np.float64)
    assert apart.std() == pytest.approx(np.sqrt(2), rel=0.1), "two independent noises of deviation 1"
    plain = [answer_of(tmp_path, name, {}).upload.weights for name in "cd"]
    assert np.array_equal(*plain)


def test_repeated_answer_has_the_same_noise(tmp_path: Path) -> None:
    once, again = (answer_of(tmp_path, "a", {"clip": 1.0}).upload for _ in range(2))
    assert np.array_equal(once.weights, again.weights)


def test_timings_and_error_texts_stay_on_the_device(tmp_path: Path) -> None:
    def broken(node: object) -> object:
        raise ValueError("patient 4711 is missing")

    assert answer_of(tmp_path, "a", {"clip": 1.0}).timing == {}
    assert answer_of(tmp_path, "b", {}).timing != {}
    answer = answer_of(tmp_path, "c", {"clip": 1.0}, device=Device(load=broken))
    assert answer.upload is None and "4711" not in answer.lost and answer.lost
    with pytest.raises(ValueError, match="4711"):
        answer_of(tmp_path, "d", {}, device=Device(load=broken))


def test_weight_that_reveals_the_exact_training_distance_is_refused() -> None:
    """phi and beta are uploaded without noise. ``far = 2 a / (a + b)`` in them reveals b, the exact distance."""
    still = {"name": "fedasmu", "apply": "progress", "slot": "h2", "eta_gamma": 0.0, "eta_upsilon": 0.0}
    resolve(TABLES | {"privacy": {"clip": 1.0}, "method": still})
    with pytest.raises(ConfigError, match=r"length of the training.*set method\.distance to false"):
        resolve(TABLES | {"privacy": {"clip": 1.0}, "method": still | {"distance": True}})
    assert "far" not in FreshModelRule.public
