"""Tiny Shakespeare: speeches, windows, speakers, and the settings that follow from the data set."""

from pathlib import Path

import numpy as np
import pytest

from freshet import Federation
from freshet.config import resolve
from freshet.data import load
from freshet.data.shakespeare import ALPHABET, encode, lines_by_speaker, windows
from freshet.errors import ConfigError, DataError
from tests.data import builders as build


def test_speeches_of_one_speaker_are_joined_in_order() -> None:
    text = "A:\none\ntwo\n\nB:\nx: y\n\n\nA:\nthree\n\nC:\n"
    assert lines_by_speaker(text) == {"A": "one\ntwo\nthree", "B": "x: y"}


def test_targets_are_the_windows_one_character_later() -> None:
    x, y = windows(np.arange(10), 4)
    assert x.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert y.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [len(windows(np.arange(n), 4)[0]) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_ids_are_places_in_the_alphabet() -> None:
    assert len(ALPHABET) == len(set(ALPHABET)) == 65
    assert "".join(ALPHABET[i] for i in encode("To be, or not?")) == "To be, or not?"


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("packed", [False, True])
def test_a_speaker_is_a_client_and_says_the_test_last(tmp_path: Path, packed: bool) -> None:
    build.write_shakespeare(tmp_path / "shakespeare", packed)
    data = load("shakespeare", tmp_path, download=False, any_size=True, length=50)
    assert data.groups is not None and data.test_groups is not None
    assert set(data.groups) == set(data.test_groups) == {"First Citizen", "ROMEO"}  # PAGE says too little
    said = lines_by_speaker(build.shakespeare_text())["ROMEO"]
    mine = data.x_train[data.groups == "ROMEO"]
    assert "".join(ALPHABET[i] for i in mine.ravel()) == said[: mine.size]
    tests = data.y_test[data.test_groups == "ROMEO"]
    start = len(said) * 4 // 5 + 1
    assert "".join(ALPHABET[i] for i in tests.ravel()) == said[start : start + tests.size]
    assert (data.vocabulary, data.classes, data.has_classes) == (65, 65, False)


@pytest.mark.usefixtures("nowhere")
def test_another_text_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "shakespeare"
    build.write_shakespeare(folder)
    with pytest.raises(DataError, match="not the published file"):
        load("shakespeare", tmp_path, download=False)
    (folder / "input.txt").write_text("A:\n" + "#" * 3000)
    assert "holds '#'" in build.refusal("shakespeare", tmp_path)
    (folder / "input.txt").write_text("A:\nshort")
    assert "no speaker with 2,000" in build.refusal("shakespeare", tmp_path)
    (folder / "input.txt").write_bytes("A:\né".encode())
    assert "damaged" in build.refusal("shakespeare", tmp_path)


@pytest.mark.usefixtures("nowhere")
def test_windows_longer_than_a_speaker_are_refused(tmp_path: Path) -> None:
    build.write_shakespeare(tmp_path / "shakespeare")
    with pytest.raises(ConfigError, match=r"data\.length: 5000"):
        load("shakespeare", tmp_path, download=False, any_size=True, length=5000)


def test_the_data_set_suggests_task_network_length_partition_and_devices() -> None:
    config = resolve({"data": {"name": "shakespeare"}})
    assert (config.training.task, config.model.name, config.data.length) == ("tokens", "charlstm", 80)
    assert (config.data.partition, config.fleet.devices, config.run.per_round) == ("natural", 99, 10)
    config = resolve({"data": {"name": "shakespeare", "partition": "iid", "length": 40}, "fleet": {"ratio": 2}})
    assert (config.data.partition, config.data.length, config.fleet.devices) == ("iid", 40, 40)
    config = resolve({"data": {"name": "shakespeare"}, "fleet": {"devices": 20}})
    assert config.fleet.devices == 20


def test_other_data_sets_keep_their_defaults() -> None:
    for name in ("digits", "imdb", "cifar10"):
        config = resolve({"data": {"name": name}})
        assert (config.training.task, config.data.partition, config.data.length) == ("classification", "dirichlet", 256)
        assert config.fleet.devices == 40


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("method", ["fedasmu", "moon"])
def test_a_run_by_speaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    build.write_shakespeare(tmp_path / "shakespeare")
    monkeypatch.setattr("freshet.data.sources._check_files", lambda *_: None)
    federation = Federation(
        {"name": "charlstm", "units": 8, "embedding_dim": 4},
        data={"name": "shakespeare", "dir": str(tmp_path)},
        devices=2,
        method=method,
        training={"lr": 1.0, "epochs": 2},
        run={"until": 60, "executor": "serial", "eval_every": 60},
    )
    assert [len(set(federation.dataset.groups[shard])) for shard in federation.shards] == [1, 1]
    summary = federation.run(out=tmp_path / "run").summary
    assert summary["status"] == "finished" and summary["uploads"] > 2
