"""LEAF's JSON: users, images, characters, their device tests, and one sentence for what is not in its form."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet import Federation
from freshet.config import resolve
from freshet.data import load
from freshet.data.leaf import ALPHABET
from freshet.errors import ConfigError, DataError, FreshetError

Users = dict[str, tuple[list[Any], list[Any]]]


def write(folder: Path, side: str, users: Users, name: str = "all_data_0.json") -> None:
    (folder / side).mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    (folder / side / name).write_text(json.dumps(content))


def images(count: int, seed: int) -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(seed)
    return rng.random((count, 784)).round(3).tolist(), rng.integers(0, 5, count).tolist()


def femnist(folder: Path) -> Path:
    """Three writers in two files."""
    write(folder, "train", {"f01_b": images(12, 0), "f00_a": images(8, 1)})
    write(folder, "train", {"f02_c": images(10, 2)}, "all_data_1.json")
    write(folder, "test", {"f01_b": images(4, 3), "f02_c": images(3, 4), "f00_a": images(2, 5)})
    return folder


TEXT = "To be, or not to be: that is the question. "


def shakespeare(folder: Path, length: int = 10) -> Path:
    def windows(text: str) -> tuple[list[str], list[str]]:
        starts = range(len(text) - length)
        return [text[i : i + length] for i in starts], [text[i + length] for i in starts]

    for side in ("train", "test"):
        write(folder, side, {"HAMLET": windows(TEXT * 2), "OPHELIA": windows("é" + TEXT)})
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESHET_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FRESHET_DATA", raising=False)


def test_writers_and_their_images(tmp_path: Path) -> None:
    folder = femnist(tmp_path / "femnist")
    first, again = load(f"leaf:{folder}"), load(f"leaf:{folder}")  # the second time from the cache
    for data in (first, again):
        assert data.x_train.shape == (30, 1, 28, 28) and data.x_train.dtype == np.float32
        assert data.groups is not None and data.test_groups is not None
        mine = data.groups == "f02_c"
        np.testing.assert_array_equal(data.x_train[mine].reshape(10, 784), np.float32(images(10, 2)[0]))
        assert data.y_train[mine].tolist() == images(10, 2)[1]
        assert (data.classes, data.test_groups.tolist().count("f01_b")) == (5, 4)


def test_ids_of_characters_and_one_id_for_the_others(tmp_path: Path) -> None:
    data = load(f"leaf:{shakespeare(tmp_path)}")
    assert len(ALPHABET) == len(set(ALPHABET)) == 80
    assert (data.classes, data.vocabulary, data.has_classes) == (81, 81, True)
    assert data.groups is not None
    mine = data.x_train[data.groups == "HAMLET"][0]
    assert "".join(ALPHABET[i] for i in mine) == TEXT[:10]
    assert ALPHABET[data.y_train[data.groups == "HAMLET"][0]] == TEXT[10]
    assert data.x_train[data.groups == "OPHELIA"][0, 0] == 80


def test_the_settings_follow_from_the_files(tmp_path: Path) -> None:
    config = resolve({"data": {"name": f"leaf:{femnist(tmp_path / 'a')}"}})
    assert (config.data.partition, config.fleet.devices, config.model.name) == ("natural", 3, "lenet5")
    config = resolve({"data": {"name": f"leaf:{shakespeare(tmp_path / 'b')}"}})
    assert (config.fleet.devices, config.model.name, config.model.last_only) == (2, "charlstm", True)
    assert config.training.task == "classification"
    other = resolve({"data": {"name": f"leaf:{tmp_path / 'b'}", "partition": "iid"}, "model": {"name": "textcnn"}})
    assert (other.fleet.devices, other.model.last_only) == (40, None)


def test_a_finished_run_can_be_read_without_the_files(tmp_path: Path) -> None:
    folder = femnist(tmp_path / "a")
    tables = resolve({"data": {"name": f"leaf:{folder}"}}).tables()
    for file in folder.rglob("*.json"):
        file.unlink()
    assert resolve(tables).tables() == tables


def test_a_folder_inside_the_folder_of_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    femnist(tmp_path / "sets" / "femnist" / "data")
    assert len(load("leaf:femnist", tmp_path / "sets").y_train) == 30
    monkeypatch.setenv("FRESHET_DATA", str(tmp_path / "sets"))
    assert len(load("leaf:femnist").y_train) == 30


@pytest.mark.parametrize("make", [femnist, shakespeare])
def test_every_user_is_a_device_with_its_own_tests(tmp_path: Path, make: Any) -> None:
    federation = Federation(
        data=f"leaf:{make(tmp_path / 'set')}",
        method="fedavg",
        training={"epochs": 1, "lr": 0.05},
        run={"rounds": 2, "per_round": 2, "evaluate_devices": "end", "executor": "serial"},
    )
    data, tests = federation.dataset, federation.assembly.tests
    assert tests is not None and data.groups is not None and data.test_groups is not None
    for shard, own in zip(federation.shards, tests.shards, strict=True):
        assert set(data.groups[shard]) == set(data.test_groups[own]) and len(set(data.groups[shard])) == 1
    assert sum(map(len, tests.shards)) == len(data.y_test)
    assert federation.run(out=tmp_path / "run").summary["status"] == "finished"


def test_a_user_without_test_samples_has_no_score(tmp_path: Path) -> None:
    write(tmp_path, "train", {"a": images(8, 0), "b": images(8, 1)})
    write(tmp_path, "test", {"b": images(6, 2), "c": images(3, 3)})
    run = {"rounds": 1, "evaluate_devices": "end", "executor": "serial"}
    federation = Federation(data=f"leaf:{tmp_path}", method="fedavg", training={"epochs": 1}, run=run)
    assert federation.assembly.tests is not None
    assert [len(shard) for shard in federation.assembly.tests.shards] == [0, 6]
    assert federation.run(out=tmp_path / "run").summary["status"] == "finished"


BAD: dict[str, tuple[Users, str]] = {
    "lengths differ": ({"a": ([[0.0], [1.0]], [1])}, "2 samples but 1 labels"),
    "ragged rows": ({"a": ([[0.0], [1.0, 2.0]], [1, 0])}, "damaged"),
    "texts of other lengths": ({"a": (["abc", "de"], ["f", "g"])}, "different lengths"),
    "a word as a label": ({"a": (["abc"], ["no"])}, "not one character"),
    "users of other shapes": ({"a": ([[0.0]], [1]), "b": ([[1.0, 2.0]], [0])}, "different shapes"),
    "nobody": ({}, "no samples"),
    "a name of a file": ({"a": (["1.jpg"], [0]), "b": (["12.jpg"], [1])}, "different shapes"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_in_the_form_is_one_sentence(tmp_path: Path, case: str) -> None:
    users, words = BAD[case]
    write(tmp_path, "train", users)
    write(tmp_path, "test", users)
    with pytest.raises(DataError) as caught:
        load(f"leaf:{tmp_path}")
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["[1]", "{", '{"users": ["a"]}', "[" * 5000, '{"users": ["a"], "user_data": {}}'])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: str) -> None:
    femnist(tmp_path)
    (tmp_path / "train" / "all_data_1.json").write_text(content)
    with pytest.raises(FreshetError, match=r"all_data_1\.json is damaged"):
        load(f"leaf:{tmp_path}")


def test_an_empty_folder_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.name: .* no folders train and test"):
        Federation(data=f"leaf:{tmp_path}")
