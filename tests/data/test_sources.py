"""Tiny generated files in every format, read through ``load``."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from freshet.data import DataSet, available, load, locate
from freshet.data.imdb import build_vocabulary, encode, tokenise
from freshet.errors import ConfigError, DataError
from tests.data import builders as build

pytestmark = pytest.mark.usefixtures("nowhere")


def tiny(name: str, folder: Path, **options: int) -> DataSet:
    return load(name, folder, download=False, any_size=True, **options)  # type: ignore[arg-type]


def assert_same(data: DataSet, expected: dict[str, np.ndarray]) -> None:
    for part, array in expected.items():
        assert np.array_equal(getattr(data, part), array), part
    assert data.x_train.flags.c_contiguous
    assert data.y_train.dtype == np.int64


@pytest.mark.parametrize("folder", ["", "fashion-mnist", "FashionMNIST/raw"])
@pytest.mark.parametrize("zipped", [True, False])
def test_fashion_mnist(tmp_path: Path, folder: str, zipped: bool) -> None:
    expected = build.write_fashion(tmp_path / folder, zipped=zipped)
    data = tiny("fashion-mnist", tmp_path)
    assert_same(data, expected)
    assert data.x_train.shape == (20, 1, 28, 28)
    assert data.class_names[9] == "Ankle boot"


def expected_cifar(classes: int) -> dict[str, np.ndarray]:
    *train, test = build.cifar_parts(classes).values()
    return build.joined(train, test)


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("release", ["binary", "python"])
@pytest.mark.parametrize("form", ["archive", "folder", "inner folder"])
def test_cifar_official(tmp_path: Path, classes: int, release: str, form: str) -> None:
    files = build.cifar_binary(classes) if release == "binary" else build.cifar_python(classes)
    root = tmp_path
    if form == "archive":
        build.tar_gz(tmp_path / f"cifar-{classes}-{release}.tar.gz", files)
    else:
        build.unpacked(tmp_path, files)
        root = tmp_path / next(iter(files)).split("/")[0] if form == "inner folder" else tmp_path
    data = tiny(f"cifar{classes}", root)
    assert_same(data, expected_cifar(classes))
    assert len(data.class_names) == classes


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_compact_is_cached_once_decoded(tmp_path: Path, classes: int) -> None:
    expected = build.cifar_strips(tmp_path / f"cifar{classes}", classes)
    assert_same(tiny(f"cifar{classes}", tmp_path), expected)
    assert len(list((tmp_path / "cache" / "decoded").iterdir())) == 1
    assert_same(tiny(f"cifar{classes}", tmp_path), expected)
    other = 110 - classes
    with pytest.raises(DataError, match="holds another data set"):
        tiny(f"cifar{other}", tmp_path / f"cifar{classes}")


@pytest.mark.parametrize("form", ["archive", "folder", "compact"])
def test_imdb(tmp_path: Path, form: str) -> None:
    if form == "compact":
        build.write_imdb_compact(tmp_path / "imdb")
    elif form == "archive":
        build.tar_gz(tmp_path / "aclImdb_v1.tar.gz", build.imdb_files())
    else:
        build.unpacked(tmp_path, build.imdb_files())
    data = tiny("imdb", tmp_path, vocabulary=6, length=8)
    # training words by frequency, then alphabet, ids from 2: film and wonderful 3 times, a and bad twice
    film, wonderful, a, bad = 2, 3, 4, 5
    assert data.x_train.tolist() == [
        [bad, bad, film, 1, 1, 1, 1, 0],
        [a, 1, film, 0, 0, 0, 0, 0],
        [a, wonderful, film, 0, 0, 0, 0, 0],
        [1, 1, 1, wonderful, wonderful, 0, 0, 0],
    ]
    assert data.x_test[:, 0].tolist() == [bad, 1, wonderful, 1]  # a review without a word is one unknown word
    assert data.y_train.tolist() == data.y_test.tolist() == [0, 0, 1, 1]
    assert (data.pad_id, data.vocabulary, data.x_train.dtype) == (0, 6, np.int32)


def test_tokeniser_and_vocabulary() -> None:
    assert tokenise("It's GREAT!<br />Don't miss 'it', 10/10<BR>") == [
        "it's",
        "great",
        "don't",
        "miss",
        "it",
        "10",
        "10",
    ]
    words = build_vocabulary([["b", "a", "c"], ["c"]], 4)
    assert words == {"c": 2, "a": 3}
    assert encode([["c", "x", "a"]], words, 2).tolist() == [[2, 1]]
    with pytest.raises(ConfigError, match=r"data\.vocabulary"):
        build_vocabulary([["a"]], 2)
    with pytest.raises(ConfigError, match=r"data\.length"):
        encode([["a"]], words, 0)


@pytest.mark.parametrize("form", ["archive", "folder"])
def test_tiny_imagenet_official(tmp_path: Path, form: str) -> None:
    files = build.tiny_files()
    if form == "archive":
        build.zipped(tmp_path / "tiny-imagenet-200.zip", files)
    else:
        build.unpacked(tmp_path, files)
    data = tiny("tiny-imagenet", tmp_path)
    assert data.y_train.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.y_test.tolist() == [0, 0, 1, 1]
    jpeg = files["tiny-imagenet-200/train/n00000001/images/n00000001_1.JPEG"]
    assert np.array_equal(data.x_train[1], np.asarray(Image.open(io.BytesIO(jpeg))).transpose(2, 0, 1))
    assert np.array_equal(data.x_train[0, 0], data.x_train[0, 2])  # the grey one


def test_tiny_imagenet_compact(tmp_path: Path) -> None:
    jpegs = build.write_tiny_compact(tmp_path / "tiny_imagenet")
    data = tiny("tiny-imagenet", tmp_path)
    assert data.x_train.shape == (200, 3, 64, 64)
    assert data.class_names[7] == "name 7, other"
    for i in (0, 7):
        assert np.array_equal(
            data.x_train[i], np.asarray(Image.open(io.BytesIO(jpegs[i])).convert("RGB")).transpose(2, 0, 1)
        )


def test_digits_are_built_in_and_always_the_same() -> None:
    one, two = load("digits"), load("digits")
    assert one.x_train.shape == (1438, 1, 8, 8)
    assert one.x_train.dtype == np.float32
    assert (one.x_train.min(), one.x_train.max()) == (0.0, 1.0)
    assert np.bincount(one.y_test).min() >= 35
    assert np.array_equal(one.x_test, two.x_test)


def test_moved_digits_are_27_versions_of_each_training_digit() -> None:
    digits, moved = load("digits"), load("digits-moved")
    x, versions = digits.x_train, moved.x_train.reshape(27, *digits.x_train.shape)
    assert np.array_equal(versions[4], x), "not moved, full contrast"
    assert np.array_equal(versions[0][:, :, 1:, 1:], x[:, :, :-1, :-1]) and not versions[0][:, :, 0].any()
    assert np.array_equal(versions[5][:, :, :, :-1], x[:, :, :, 1:]) and not versions[5][..., -1].any()
    assert np.array_equal(versions[13], np.float32(0.8) * x) and np.array_equal(versions[22], np.float32(0.6) * x)
    assert np.array_equal(moved.y_train.reshape(27, -1)[26], digits.y_train)
    assert np.array_equal(moved.x_test, digits.x_test) and np.array_equal(moved.y_test, digits.y_test)


def test_sources_are_tried_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {name: tmp_path / name for name in ("given", "env", "cache", "system")}
    for i, place in enumerate(places.values()):
        build.write_fashion(place / "fashion-mnist", count=10 + 10 * i)
    monkeypatch.setattr("freshet.data.sources.SYSTEM_ROOTS", (places["system"],))
    sizes = [len(tiny("fashion-mnist", places["given"]).y_train)]
    monkeypatch.setenv("FRESHET_DATA", str(places["env"]))
    for name in ("env", "cache", "system"):
        sizes.append(len(load("fashion-mnist", download=False, any_size=True).y_train))
        (places[name] / "fashion-mnist").rename(places[name] / "gone")
    assert sizes == [10, 20, 30, 40]
    assert locate("fashion-mnist") is None
    assert {row.name for row in available() if row.found} == set()


def test_missing_incomplete_and_short_copies_give_different_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"freshet data get cifar10.*FRESHET_DATA"):
        load("cifar10", tmp_path, download=False)
    with pytest.raises(DataError, match="does not exist"):
        load("cifar10", tmp_path / "none", download=False)
    build.write_fashion(tmp_path)
    with pytest.raises(DataError, match=r"holds 20 \+ 20 samples; Fashion-MNIST has 60000 \+ 10000"):
        load("fashion-mnist", tmp_path, download=False)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="lacks t10k-labels-idx1-ubyte"):
        load("fashion-mnist", tmp_path, download=False)
    with pytest.raises(ConfigError, match="did you mean cifar100"):
        load("cifar1000")
