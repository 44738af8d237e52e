"""A device with a network and samples of its own; data and model that only it has never leave it."""

import io
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from freshet import Device, Federation
from freshet.config import Config
from freshet.core.messages import Assignment
from freshet.errors import ConfigError, DataError
from freshet.flower import wire


class Net(nn.Module):
    """Made for these tests."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x)


def samples(count: int, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    return rng.normal(size=(count, 6)).astype(np.float32), rng.integers(0, classes, count)


def served(method: str = "fedavg") -> Federation:
    training = {"epochs": 2, "batch_size": 10}
    return Federation(Net, samples(60), samples(30), devices=4, method=method, training=training)


def order(federation: Federation, device: int) -> wire.Order:
    weights = np.zeros(21, np.float32)
    return wire.Order(Assignment(device, 1, 1, 1, weights, 2, 0.1), "session", "ticket", wire.FreshChannel("none"))


def handled(device: Device, config: Config, folder: Path, **node: object) -> wire.Answer:
    return device.handle(order(served(), 2), config, {"folder": str(folder), "partition-id": 2} | node, 7)


def test_it_trains_its_own_network_on_its_own_samples(tmp_path: Path) -> None:
    config = served().config
    assert config.data.name == config.model.name == "custom"
    answer = handled(Device(load=lambda node: samples(25, classes=2), model=Net), config, tmp_path)
    assert answer.upload is not None and answer.samples == 25
    assert answer.upload.steps == 2 * 3 and answer.upload.weights.shape == (21,) and answer.upload.weights.any()
    assert set(answer.timing) == {"began", "start", "import", "load", "train", "cpu"}


def test_both_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = "tests.flower.test_device"
    monkeypatch.setattr(f"{here}.loaded", lambda node: samples(11), raising=False)
    answer = handled(Device(), served().config, tmp_path, data=f"{here}:loaded", model=f"{here}:Net")
    assert answer.upload is not None and answer.samples == 11


@pytest.mark.parametrize("name", ["nothing", "no.such:module", "tests.flower.test_device:nobody", ":x"])
def test_a_name_that_leads_nowhere_is_one_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--model"):
        handled(Device(load=lambda node: samples(9)), served().config, tmp_path, model=name)


def test_what_only_the_server_has_must_be_brought(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.name"):
        handled(Device(model=Net), served().config, tmp_path)
    with pytest.raises(ConfigError, match=r"model\.name"):
        handled(Device(load=lambda node: samples(9)), served().config, tmp_path)


def test_images_that_each_device_would_scale_by_its_own_figures_are_refused(tmp_path: Path) -> None:
    images = np.zeros((9, 1, 2, 3), np.uint8), np.arange(9) % 3
    with pytest.raises(ConfigError, match="uint8"):
        handled(Device(load=lambda node: images, model=Net), served().config, tmp_path)


def test_samples_come_from_a_file(tmp_path: Path) -> None:
    x, y = samples(13)
    np.savez(tmp_path / "own.npz", x=x, y=y)
    assert handled(Device(model=Net), served().config, tmp_path, data=str(tmp_path / "own.npz")).samples == 13


@pytest.mark.parametrize("damage", ["cut", "empty", "one array", "flipped", "no y", "pickled", "a folder", "absent"])
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path, damage: str) -> None:
    path, file = tmp_path / "own.npz", io.BytesIO()
    if damage == "one array":
        np.save(file, np.zeros(3))
    else:
        arrays = {"x": np.arange(500.0), "y": np.array([{}] if damage == "pickled" else [0])}
        np.savez_compressed(file, **{name: arrays[name] for name in ("xy" if damage != "no y" else "x")})
    whole = file.getvalue()
    middle = len(whole) // 3
    content = {"cut": whole[:middle], "empty": b"", "flipped": whole[:middle] + b"\xff" * 9 + whole[middle + 9 :]}
    if damage == "a folder":
        path.mkdir()
    elif damage != "absent":
        path.write_bytes(content.get(damage, whole))
    with pytest.raises(DataError, match=r"own\.npz") as caught:
        handled(Device(model=Net), served().config, tmp_path, data=str(path))
    assert "\n" not in str(caught.value)
