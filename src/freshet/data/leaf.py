"""LEAF's JSON files with their natural users: ``data.name = "leaf:DIR"``.

S. Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018. ``DIR`` holds the folders ``train`` and ``test`` (or
a folder ``data`` with them) of files ``{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}``.

Samples are rows of numbers or strings. 784 numbers are an image of 28 x 28 (FEMNIST), other rows are vectors. Strings
of one length are characters, with the next one as the label (Shakespeare): ids are places in LEAF's alphabet, and all
characters outside it share one more id.
"""

from __future__ import annotations

import json
import os
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from freshet.data import cache
from freshet.data.adapters import as_inputs, as_labels
from freshet.data.archives import as_data_errors, read_bounded
from freshet.data.catalogue import Spec
from freshet.data.dataset import Array, DataSet
from freshet.errors import ConfigError, DataError

PREFIX = "leaf:"
#: LEAF's characters; the id after the last stands for all others.
ALPHABET = "\n !\"&'(),-." + string.digits + ":;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"
_FILE_LIMIT = 1 << 31  # bytes; a file of 100 writers of FEMNIST has about 300 MB


def is_leaf(name: object) -> TypeGuard[str]:
    """Whether a name of a data set stands for a folder of LEAF's files."""
    return isinstance(name, str) and name.startswith(PREFIX)


def read_leaf(name: str, data_dir: str | os.PathLike[str] | None = None, *, use_cache: bool = True) -> DataSet:
    """Read the folder that ``leaf:DIR`` names. The decoded arrays are cached, since JSON is slow to read."""
    folder = _folder(name, data_dir)
    files = {side: tuple(sorted((folder / side).glob("*.json"))) for side in ("train", "test")}
    key = cache.fingerprint((*files["train"], *files["test"]), PREFIX)
    arrays = cache.fetch("leaf", key) if use_cache else None
    if arrays is None:
        arrays = {}
        for side, paths in files.items():
            arrays |= _side(side, [part for path in paths for part in _users(path)], folder)
        if use_cache:
            cache.store("leaf", key, arrays)
    characters = arrays["x_train"].dtype == np.int32
    classes = len(ALPHABET) + 1 if characters else _classes(arrays["y_train"], arrays["y_test"])
    return DataSet(
        name,
        arrays["x_train"],
        arrays["y_train"],
        arrays["x_test"],
        arrays["y_test"],
        classes,
        vocabulary=classes if characters else None,
        groups=arrays["groups_train"],
        test_groups=arrays["groups_test"],
    )


def leaf_spec(name: str, data_dir: str | os.PathLike[str] | None = None) -> Spec:
    """What the catalogue would say about this folder: its clients, and the network that suits its samples."""
    data = read_leaf(name, data_dir)
    assert data.groups is not None
    kind = "characters" if data.vocabulary else "images"
    model = "charlstm" if data.vocabulary else "lenet5" if len(data.sample_shape) == 3 else "mlp"
    counts = (len(data.y_train), len(data.y_test))
    task = "classification" if data.has_classes else "regression"
    return Spec(
        name, "LEAF", kind, data.classes, (counts,), (), model, clients=len(np.unique(data.groups)), task=task,
        options={"last_only": True} if kind == "characters" else {},
    )  # fmt: skip


def _folder(name: str, data_dir: str | os.PathLike[str] | None) -> Path:
    """The folder with ``train`` and ``test``: as named, or inside the folder of data sets."""
    given = Path(name.removeprefix(PREFIX)).expanduser()
    roots = [Path(root).expanduser() for root in (data_dir, os.environ.get("FRESHET_DATA")) if root]
    places = [place / inner for place in (given, *(root / given for root in roots)) for inner in ("", "data")]
    for place in places:
        if all(any((place / side).glob("*.json")) for side in ("train", "test")):
            return place
    raise ConfigError("data.name", f"{given} has no folders train and test with LEAF's *.json files")


def _users(path: Path) -> Iterator[tuple[str, Array, Array]]:
    """Name, inputs and labels of each user of a file."""
    with as_data_errors(path):
        content = json.loads(read_bounded(path, _FILE_LIMIT))
        users, data = content["users"], content["user_data"]
        for user in users:
            rows = data[user]
            if len(rows["x"]) != len(rows["y"]):
                raise DataError(f"{path}: {user} has {len(rows['x'])} samples but {len(rows['y'])} labels")
            if rows["x"]:
                yield str(user), _inputs(path, rows["x"]), _labels(path, rows["y"])


def _inputs(path: Path, rows: list[Any]) -> Array:
    if isinstance(rows[0], str):
        if len({len(row) for row in rows}) > 1:
            raise DataError(f"{path} holds texts of different lengths; only LEAF's Shakespeare has texts that are read")
        return _ids("".join(rows)).reshape(len(rows), -1).astype(np.int32)
    x = as_inputs(str(path), np.asarray(rows, dtype=np.float32))
    return x.reshape(-1, 1, 28, 28) if x.shape[1:] == (784,) else x


def _labels(path: Path, rows: list[Any]) -> Array:
    if isinstance(rows[0], str):
        if any(len(row) != 1 for row in rows):
            raise DataError(
                f"{path} has a label that is not one character; only LEAF's Shakespeare has texts as labels"
            )
        return _ids("".join(rows))
    y = np.asarray(rows)
    return as_labels(str(path), y.astype(np.int64) if y.dtype.kind == "f" and (y == np.floor(y)).all() else y)


def _ids(text: str) -> Array:
    place = {character: i for i, character in enumerate(ALPHABET)}
    return np.array([place.get(character, len(ALPHABET)) for character in text], np.int64)


def _side(side: str, users: list[tuple[str, Array, Array]], folder: Path) -> dict[str, Array]:
    if len({x.shape[1:] for _, x, _ in users}) != 1 or len({y.dtype for _, _, y in users}) != 1:
        raise DataError(f"{folder / side} holds no samples, or samples of different shapes or types")
    group = np.repeat([name for name, _, _ in users], [len(y) for _, _, y in users])
    x, y = (np.concatenate([user[part] for user in users]) for part in (1, 2))
    return {f"x_{side}": x, f"y_{side}": y, f"groups_{side}": group}


def _classes(*labels: Array) -> int:
    return 1 + max(int(y.max()) for y in labels) if labels[0].dtype == np.int64 else 1
