"""The real data sets, if they are on this machine: counts per class and published checksums."""

import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from freshet import Federation
from freshet.data import digest, load, locate, verify
from freshet.data.catalogue import CATALOGUE, ReadOptions
from freshet.data.dataset import channel_statistics
from freshet.data.imdb import Reviews, as_arrays, compact_reviews
from freshet.data.shakespeare import ALPHABET
from freshet.data.tiny_imagenet import read_npz

CIFAR10_MD5 = [  # data_batch_1..5.bin, test_batch.bin of the official binary release
    "5dd7e06a14cb22eb9f671a540d1b7c25",
    "5ea93a67294ea407fff1d09f752e9692",
    "942cd6a4bcdd0dd3c604fbe906cb4421",
    "ae636b3ba5c66a11e91e8cb52e771fcb",
    "53f37980c15c3d472c316c40844f3f0d",
    "803d5f7f4d78ea53de84dbe85f74fb6d",
]
CIFAR100_MD5 = ["6172c7755cfe09b2fe270c85cebc1b15", "4499cfba6c016c1be1438163640a0898"]  # train.bin, test.bin


def md5_of_records(*columns: np.ndarray) -> str:
    rows = [c.reshape(len(c), -1).astype(np.uint8) for c in columns]
    return hashlib.md5(np.concatenate(rows, axis=1).tobytes()).hexdigest()


def test_fashion_mnist() -> None:
    if locate("fashion-mnist") is None:
        pytest.skip("Fashion-MNIST is not on this machine (package dataset-fashion-mnist or FRESHET_DATA)")
    data = load("fashion-mnist", download=False)
    assert (np.bincount(data.y_train) == 6000).all()
    assert (np.bincount(data.y_test) == 1000).all()
    assert digest(data) == CATALOGUE["fashion-mnist"].digest
    assert_statistics(data.x_train, "fashion-mnist")


def test_cifar10(real_data: Path) -> None:
    if locate("cifar10", real_data) is None:
        pytest.skip("no CIFAR-10 in FRESHET_DATA")
    data = load("cifar10", real_data, download=False, use_cache=False)
    assert (np.bincount(data.y_train) == 5000).all()
    assert (np.bincount(data.y_test) == 1000).all()
    batches = [slice(i, i + 10_000) for i in range(0, 50_000, 10_000)]
    found = [md5_of_records(data.y_train[b], data.x_train[b]) for b in batches]
    assert [*found, md5_of_records(data.y_test, data.x_test)] == CIFAR10_MD5
    assert digest(data) == CATALOGUE["cifar10"].digest
    assert_statistics(data.x_train, "cifar10")


def test_cifar100(real_data: Path) -> None:
    if locate("cifar100", real_data) is None:
        pytest.skip("no CIFAR-100 in FRESHET_DATA")
    data = load("cifar100", real_data, download=False, use_cache=False)
    assert (np.bincount(data.y_train) == 500).all()
    assert (np.bincount(data.y_test) == 100).all()
    assert digest(data) == CATALOGUE["cifar100"].digest
    assert_statistics(data.x_train, "cifar100")
    found = locate("cifar100", real_data)
    assert found is not None
    if found.format.title == "compact WebP strips":
        coarse = [_coarse(path) for path in found.paths]
        train = md5_of_records(np.concatenate(coarse[:-1]), data.y_train, data.x_train)
        assert [train, md5_of_records(coarse[-1], data.y_test, data.x_test)] == CIFAR100_MD5


def _coarse(path: Path) -> np.ndarray:
    with zipfile.ZipFile(path) as archive:
        return np.load(io.BytesIO(archive.read("coarse_labels.npy")), allow_pickle=False)


def test_imdb_texts_and_a_small_vocabulary(real_data: Path) -> None:
    found = locate("imdb", real_data)
    if found is None or found.format.title != "compact text":
        pytest.skip("no compact IMDb in FRESHET_DATA")
    reviews = compact_reviews(found.paths)
    assert np.bincount(reviews.y_train).tolist() == np.bincount(reviews.y_test).tolist() == [12_500, 12_500]
    text = "\n".join([*reviews.train, *reviews.test]).encode()
    assert hashlib.sha256(text).hexdigest() == "2ffe0adbb409ccf1046083cdad3f89bb0d4a42b12c64c7999ae7d5089bd88345"
    few = Reviews(reviews.train[::25], reviews.y_train[::25], reviews.test[::25], reviews.y_test[::25])
    ids = as_arrays(few, ReadOptions(2, vocabulary=2000, length=64))
    assert ids["x_train"].shape == (1000, 64)
    assert ids["x_train"].max() == 1999
    assert 0.6 < (ids["x_test"] > 1).sum() / (ids["x_test"] > 0).sum() < 1


def test_tiny_imagenet(real_data: Path) -> None:
    found = locate("tiny-imagenet", real_data)
    if found is None or len(found.paths) != 3:
        pytest.skip("no compact Tiny-ImageNet in FRESHET_DATA")
    x, y = read_npz(found.paths[1])  # the training part takes many seconds; its labels are enough here
    assert x.shape == (4000, 3, 64, 64)
    assert (np.bincount(y) == 20).all()
    with np.load(found.paths[0], allow_pickle=False) as content:
        assert (np.bincount(content["labels"]) == 100).all()
    mean, _ = channel_statistics(x)
    np.testing.assert_allclose(mean, CATALOGUE["tiny-imagenet"].mean, atol=0.01)


def test_shakespeare_and_its_speakers(real_data: Path) -> None:
    if locate("shakespeare", real_data) is None:
        pytest.skip("no Shakespeare in FRESHET_DATA")
    data = load("shakespeare", real_data, download=False)
    assert digest(data) == CATALOGUE["shakespeare"].digest
    assert data.groups is not None and data.test_groups is not None
    speakers, windows = np.unique(data.groups, return_counts=True)
    assert len(speakers) == CATALOGUE["shakespeare"].clients == len(np.unique(data.test_groups))
    assert (windows.min(), dict(zip(speakers, windows, strict=True))["GLOUCESTER"]) == (20, 376)
    first = "".join(ALPHABET[i] for i in data.x_train[np.argmax(data.groups == "First Citizen")])
    assert first.startswith("Before we proceed any further, hear me speak.")


def test_a_character_model_learns_the_real_text(real_data: Path, tmp_path: Path) -> None:
    if locate("shakespeare", real_data) is None:
        pytest.skip("no Shakespeare in FRESHET_DATA")
    federation = Federation(
        data={"name": "shakespeare", "dir": str(real_data), "test_samples": 200},
        training={"lr": 1.0, "epochs": 1},
        run={"rounds": 3, "per_round": 3, "executor": "serial"},
    )
    assert (len(federation.shards), federation.config.model.name) == (99, "charlstm")
    accuracy = federation.run(out=tmp_path / "run").accuracy
    assert accuracy[0] < 0.05 < 0.12 < accuracy[-1]


def test_verify_reports_rows() -> None:
    rows = verify("digits")
    assert all(row.ok for row in rows)
    assert {row.item for row in rows} >= {"training samples", "contents (sha256)"}


def assert_statistics(images: np.ndarray, name: str) -> None:
    mean, std = channel_statistics(images)
    np.testing.assert_allclose(mean, CATALOGUE[name].mean, atol=1e-5)
    np.testing.assert_allclose(std, CATALOGUE[name].std, atol=1e-5)
