"""The catalogue: a data set is one entry and one reader."""

import inspect
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from freshet import Federation
from freshet.cli.data import data_app
from freshet.data import available, load, verify
from freshet.data.catalogue import CATALOGUE, Format, ReadOptions, Spec
from freshet.data.sources import find_reader
from freshet.models import names
from tests.data import builders as build


def read_points(paths: tuple[Path, ...], options: ReadOptions) -> dict[str, np.ndarray]:
    """The reader of the registered data set: one .npy file with the class in the last column."""
    rows = np.load(paths[0], allow_pickle=False)
    x, y = rows[:, :-1].astype(np.float32).reshape(-1, 1, 4, 4), rows[:, -1].astype(np.int64) % options.classes
    return {"x_train": x[:-8], "y_train": y[:-8], "x_test": x[-8:], "y_test": y[-8:]}


POINTS = Spec(
    name="points",
    title="Points",
    kind="images",
    classes=2,
    counts=((40, 8),),
    formats=(Format("one file", ("points.npy",), f"{__name__}:read_points"),),
    model="digits",  # the default for unknown data is mlp
    shape=(1, 4, 4),
    dtype="float32",
    folders=("my-points",),
    class_names=("left", "right"),
)


@pytest.mark.usefixtures("nowhere")
def test_one_entry_and_one_reader_register_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE, "points", POINTS)
    rows = np.random.default_rng(0).normal(size=(48, 17))
    rows[:, -1] = np.arange(48) % 2
    (tmp_path / "my-points").mkdir()
    np.save(tmp_path / "my-points" / "points.npy", rows)
    data = load("points", tmp_path)
    assert (data.x_train.shape, data.class_names) == ((40, 1, 4, 4), ("left", "right"))
    assert data.full_counts == (40, 8)
    assert all(row.ok for row in verify("points", tmp_path))
    (row,) = (row for row in available(tmp_path) if row.name == "points")
    assert row.found is not None and row.found.format.title == "one file"
    listed = CliRunner().invoke(data_app, ["list", "--data-dir", str(tmp_path)], env={"COLUMNS": "200"}).stdout
    assert "points" in listed and "(one file)" in listed
    federation = Federation(data={"name": "points", "dir": str(tmp_path)}, devices=4, run={"per_round": 2})
    assert federation.config.model.name == "digits"
    assert len(federation.shards) == 4
    assert federation.run(1, out=tmp_path / "run").summary["status"] == "finished"


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_entry_names_existing_readers_and_an_existing_network(name: str) -> None:
    spec = CATALOGUE[name]
    assert spec.name == name and spec.formats
    assert spec.model in names()
    assert bool(spec.shape) is (spec.kind == "images")
    for form in spec.formats:
        assert len(inspect.signature(find_reader(form)).parameters) == 2
        assert set(form.checksums) >= set(form.needs) or not form.checksums


def test_every_official_address_has_a_checksum() -> None:
    for spec in CATALOGUE.values():
        assert spec.built_in or spec.remotes
        for item in spec.remotes:
            algorithm, _, digest = item.checksum.partition(":")
            assert len(digest) == {"md5": 32, "sha256": 64}[algorithm]
            assert all(url.startswith("http") and url.endswith(item.filename) for url in item.urls)


def test_shape_and_type_are_those_of_the_samples(tmp_path: Path) -> None:
    build.write_fashion(tmp_path / "fashion-mnist")
    build.unpacked(tmp_path, build.cifar_binary(10) | build.cifar_binary(100) | build.imdb_files())
    build.write_tiny_compact(tmp_path / "tiny_imagenet")
    build.write_shakespeare(tmp_path / "shakespeare")
    for spec in CATALOGUE.values():
        data = load(spec.name, tmp_path, download=False, any_size=True, vocabulary=6, length=8)
        assert (data.sample_shape, data.x_train.dtype) == (spec.shape or (8,), np.dtype(spec.dtype)), spec.name
