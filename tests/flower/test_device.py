"""A device with its own network and samples, and the folder that keeps its memory."""

import io
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from freshet import Device, Federation
from freshet.config import Config, resolve
from freshet.core.messages import Assignment
from freshet.errors import ConfigError, DataError
from freshet.flower import wire
from freshet.flower.device import KEPT_SESSIONS, DeviceFolder, DeviceRecord


class Net(nn.Module):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x)


def samples(count: int, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    return rng.normal(size=(count, 6)).astype(np.float32), rng.integers(0, classes, count)


def federation_of(method: str = "fedavg") -> Federation:
    training = {"epochs": 2, "batch_size": 10}
    return Federation(Net, samples(60), samples(30), devices=4, method=method, training=training)


def order(federation: Federation, device: int) -> wire.Order:
    weights = np.zeros(21, np.float32)
    return wire.Order(Assignment(device, 1, 1, 1, weights, 2, 0.1), "session", "ticket", wire.FreshChannel("none"))


def handle(device: Device, config: Config, folder: Path, **node: object) -> wire.Answer:
    return device.handle(order(federation_of(), 2), config, {"folder": str(folder), "partition-id": 2} | node, 7)


def test_device_trains_its_own_network_on_its_own_samples(tmp_path: Path) -> None:
    config = federation_of().config
    assert config.data.name == config.model.name == "custom"
    answer = handle(Device(load=lambda node: samples(25, classes=2), model=Net), config, tmp_path)
    assert answer.upload is not None and answer.samples == 25
    assert answer.upload.steps == 2 * 3 and answer.upload.weights.shape == (21,) and answer.upload.weights.any()
    assert set(answer.timing) == {"began", "start", "import", "load", "train", "cpu"}


def test_network_and_samples_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = "tests.flower.test_device"
    monkeypatch.setattr(f"{here}.loaded", lambda node: samples(11), raising=False)
    answer = handle(Device(), federation_of().config, tmp_path, data=f"{here}:loaded", model=f"{here}:Net")
    assert answer.upload is not None and answer.samples == 11


def test_prepared_device_loads_once_and_trains_the_same_bits(tmp_path: Path) -> None:
    """A warm device loads its data before its trips. Nothing else differs."""
    calls = list[object]()

    def load(node: object) -> tuple[np.ndarray, np.ndarray]:
        calls.append(node)
        return samples(25, classes=2)

    config, node = federation_of().config, {"partition-id": 2}
    cold = handle(Device(load=load, model=Net), config, tmp_path / "cold").upload
    warm, calls[:] = Device(load=load, model=Net), []
    warm.prepare(config, node | {"folder": str(tmp_path / "0")})
    warm.prepare(config, node | {"folder": str(tmp_path / "0")})
    for trip in range(2):
        again = handle(warm, config, tmp_path / str(trip)).upload
        assert cold is not None and again is not None and again.weights.tobytes() == cold.weights.tobytes()
        assert len(calls) == 1 + trip, "a node config that was not prepared is loaded in the trip"


def test_devices_of_one_data_set_share_it(tmp_path: Path) -> None:
    tables = {"method": {"name": "fedavg"}, "fleet": {"devices": 3}, "data": {"train_samples": 90, "test_samples": 30}}
    config, device = resolve(tables), Device()
    for place in range(3):
        device.prepare(config, {"partition-id": place, "folder": str(tmp_path / str(place))})
    assert len(device._prepared) == 1
    setups = [device.setup(config, {"partition-id": place, "folder": "x"}, place) for place in range(3)]
    cold = Device().setup(config, {"partition-id": 1}, 1)
    assert np.array_equal(setups[1].data.shards[1], cold.data.shards[1]) and len(cold.data.shards[1])
    assert len({int(sample) for place in range(3) for sample in setups[place].data.shards[place]}) == 90


def test_a_device_may_have_all_parts_of_the_federation_and_trains_on_its_own_samples(tmp_path: Path) -> None:
    made = federation_of()
    answer = handle(Device(overrides=lambda: made.assembly.overrides), made.config, tmp_path)
    assert answer.upload is not None and answer.samples == len(made.assembly.shards[2])
    x, y = samples(60)
    mine = made.assembly.shards[2]
    twin = handle(Device(load=lambda node: (x[mine], y[mine]), model=Net), made.config, tmp_path / "twin")
    assert np.array_equal(answer.upload.weights, twin.upload.weights)


@pytest.mark.parametrize("name", ["nothing", "no.such:module", "tests.flower.test_device:nobody", ":x"])
def test_unknown_name_is_one_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--model"):
        handle(Device(load=lambda node: samples(9)), federation_of().config, tmp_path, model=name)


def test_device_must_bring_what_only_the_server_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.name"):
        handle(Device(model=Net), federation_of().config, tmp_path)
    with pytest.raises(ConfigError, match=r"model\.name"):
        handle(Device(load=lambda node: samples(9)), federation_of().config, tmp_path)


def test_uint8_images_are_refused(tmp_path: Path) -> None:
    images = np.zeros((9, 1, 2, 3), np.uint8), np.arange(9) % 3
    with pytest.raises(ConfigError, match="uint8"):
        handle(Device(load=lambda node: images, model=Net), federation_of().config, tmp_path)


def test_samples_come_from_a_file(tmp_path: Path) -> None:
    x, y = samples(13)
    np.savez(tmp_path / "own.npz", x=x, y=y)
    assert handle(Device(model=Net), federation_of().config, tmp_path, data=str(tmp_path / "own.npz")).samples == 13


@pytest.mark.parametrize("damage", ["cut", "empty", "one array", "flipped", "no y", "pickled", "a folder", "absent"])
def test_unreadable_file_is_one_sentence(tmp_path: Path, damage: str) -> None:
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
        handle(Device(model=Net), federation_of().config, tmp_path, data=str(path))
    assert "\n" not in str(caught.value)


# ---- the folder

MEMORY = {"q": np.arange(4.0), "last": 3, "name": "x"}


def test_memory_survives_a_restart(tmp_path: Path) -> None:
    DeviceFolder(tmp_path / "d", "s").write(DeviceRecord(dict(MEMORY), "t", {"w": np.ones(3, np.float32)}))
    kept = DeviceFolder(tmp_path / "d", "s").read()
    assert np.array_equal(kept.memory["q"], MEMORY["q"]) and kept.memory["last"] == 3
    assert kept.ticket == "t"
    assert kept.answer is not None and np.array_equal(kept.answer["w"], np.ones(3, np.float32))


def test_new_session_starts_empty(tmp_path: Path) -> None:
    DeviceFolder(tmp_path, "one").write(DeviceRecord(dict(MEMORY), "t"))
    DeviceFolder(tmp_path, "one").write_paused("t", {"epoch": 1})
    other = DeviceFolder(tmp_path, "two")
    assert other.read() == DeviceRecord({}) and other.read_paused("t") is None


def test_paused_trip_is_found_by_its_ticket_only(tmp_path: Path) -> None:
    folder = DeviceFolder(tmp_path, "s")
    assert folder.read_paused("t") is None
    folder.write_paused("t", {"epoch": 1, "weights": np.ones(2)})
    found = folder.read_paused("t")
    assert found is not None and found["epoch"] == 1 and folder.read_paused("other") is None


def test_damaged_file_is_ignored(tmp_path: Path) -> None:
    folder = DeviceFolder(tmp_path, "s")
    folder.write(DeviceRecord(dict(MEMORY)))
    (file,) = tmp_path.glob("memory.*")
    for damaged in (b"", file.read_bytes()[:-5], b"\x80\x04\x95 a pickle", b"{}"):
        file.write_bytes(damaged)
        assert folder.read() == DeviceRecord({})


def test_no_temporary_files_remain(tmp_path: Path) -> None:
    folder = DeviceFolder(tmp_path, "s")
    for number in range(3):
        folder.write(DeviceRecord({"n": number}))
    (file,) = tmp_path.iterdir()
    assert re.fullmatch(r"memory\.[0-9a-f]{16}\.safetensors", file.name)


def test_memory_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    made = tmp_path / "memory" / "node_0"
    (made / "flwr").mkdir(parents=True)  # as Flower makes it before the first trip
    before = os.umask(0o022)
    try:
        folder = DeviceFolder(made, "s")
        folder.write(DeviceRecord(dict(MEMORY)))
        folder.write_paused("t", {"epoch": 1})
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in made.glob("*.safetensors")] == [0o600] * 2


def test_two_sessions_keep_separate_memory(tmp_path: Path) -> None:
    one, two = DeviceFolder(tmp_path / "d", "one"), DeviceFolder(tmp_path / "d", "../two")
    for trip in range(3):
        for folder, name in ((one, "one"), (two, "two")):
            assert folder.read().memory.get("trips", 0) == trip
            folder.write(DeviceRecord({"trips": trip + 1}, name))
            folder.write_paused(name, {"epoch": trip})
    assert (one.read().ticket, two.read().ticket) == ("one", "two")
    assert one.read_paused("one") == two.read_paused("two") == {"epoch": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_memory_of_old_sessions_is_removed(tmp_path: Path) -> None:
    for number in range(3 * KEPT_SESSIONS):
        folder = DeviceFolder(tmp_path, str(number))
        folder.write(DeviceRecord({"n": number}))
        folder.write_paused("t", {"n": number})
        for path in tmp_path.iterdir():  # make all files a minute older before the next session
            os.utime(path, (path.stat().st_atime - 60, path.stat().st_mtime - 60))
    assert len(list(tmp_path.iterdir())) == 2 * KEPT_SESSIONS
    kept = [DeviceFolder(tmp_path, str(number)).read().memory.get("n") for number in range(3 * KEPT_SESSIONS)]
    assert kept == [None] * 2 * KEPT_SESSIONS + list(range(2 * KEPT_SESSIONS, 3 * KEPT_SESSIONS))


# ---- samples of any form


class Bag(nn.Module):
    """The mean embedding of a sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(7, 3, padding_idx=0)

    def forward(self, ids):
        return self.words(ids)


def sentences(count: int) -> list[dict[str, object]]:
    return [{"ids": [1 + k % 6] * (1 + k % 4), "label": k % 3} for k in range(count)]


def pad(batch: list[dict[str, object]]) -> tuple[object, object]:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = pad_sequence([torch.tensor(sample["ids"]) for sample in batch], batch_first=True)
    return ids, torch.tensor([sample["label"] for sample in batch])


@pytest.mark.parametrize("form", ["dicts", "loader", "loader of pairs"])
def test_device_trains_on_samples_of_any_form(tmp_path: Path, form: str) -> None:
    from torch.utils.data import DataLoader

    training = {"epochs": 2, "batch_size": 10}
    config = Federation(Bag, sentences(60), sentences(30), devices=4, method="fedavg", training=training).config

    def load(node: object) -> object:
        if form == "dicts":
            return sentences(25)
        if form == "loader":
            return DataLoader(sentences(25), batch_size=4, collate_fn=pad)
        pairs = [(sample["ids"], sample["label"]) for sample in sentences(25)]
        return DataLoader(pairs, collate_fn=lambda batch: pad([{"ids": ids, "label": y} for ids, y in batch]))

    answer = handle(Device(load=load, model=Bag), config, tmp_path)
    assert answer.upload is not None and answer.samples == 25 and answer.upload.steps == 2 * 3
    twin = handle(Device(load=lambda node: sentences(25), model=Bag), config, tmp_path / "twin")
    assert twin.upload is not None and np.array_equal(answer.upload.weights, twin.upload.weights)
