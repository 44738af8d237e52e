"""A real device under [privacy]: noise that nobody can repeat, and nothing else that tells of its samples."""

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


def answered(tmp_path: Path, name: str, privacy: dict, ticket: str = "t", device: Device | None = None) -> wire.Answer:
    config = resolve(TABLES | {"privacy": privacy})
    weights = np.zeros(Assembly(config).layout.size, np.float32)
    order = wire.Order(Assignment(0, 1, 1, 1, weights, 1, 0.1), "session", ticket, wire.FreshChannel())
    return (device or Device()).handle(order, config, {"folder": str(tmp_path / name)}, 1)


def test_two_devices_with_the_same_seed_and_samples_do_not_have_the_same_noise(tmp_path: Path) -> None:
    one, two = (answered(tmp_path, name, {"clip": 1.0}) for name in "ab")
    assert one.upload is not None and two.upload is not None
    apart = (one.upload.weights - two.upload.weights).astype(np.float64)
    assert apart.std() == pytest.approx(np.sqrt(2), rel=0.1), "two independent noises of deviation 1"
    plain = [answered(tmp_path, name, {}).upload.weights for name in "cd"]
    assert np.array_equal(*plain)


def test_an_answer_that_is_given_again_has_the_same_noise(tmp_path: Path) -> None:
    once, again = (answered(tmp_path, "a", {"clip": 1.0}).upload for _ in range(2))
    assert np.array_equal(once.weights, again.weights)


def test_timings_and_the_texts_of_errors_stay_on_the_device(tmp_path: Path) -> None:
    def broken(node: object) -> object:
        raise ValueError("patient 4711 is missing")

    assert answered(tmp_path, "a", {"clip": 1.0}).timing == {}
    assert answered(tmp_path, "b", {}).timing != {}
    told = answered(tmp_path, "c", {"clip": 1.0}, device=Device(load=broken))
    assert told.upload is None and "4711" not in told.lost and told.lost
    with pytest.raises(ValueError, match="4711"):
        answered(tmp_path, "d", {}, device=Device(load=broken))


def test_a_weight_that_holds_the_exact_length_of_the_training_is_refused() -> None:
    """phi and beta go up as they are, and ``far = 2 a / (a + b)`` in them gives b, how far the device has gone."""
    still = {"name": "fedasmu", "apply": "progress", "slot": "h2", "eta_gamma": 0.0, "eta_upsilon": 0.0}
    resolve(TABLES | {"privacy": {"clip": 1.0}, "method": still})
    with pytest.raises(ConfigError, match=r"length of the training.*set method\.distance to false"):
        resolve(TABLES | {"privacy": {"clip": 1.0}, "method": still | {"distance": True}})
    assert "far" not in FreshModelRule.public
