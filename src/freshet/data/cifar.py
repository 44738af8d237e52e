"""CIFAR-10 and CIFAR-100 from the official binary and python releases, or from compact zips of lossless WebP strips.

All formats give the same arrays in the official order: uint8 (N, 3, 32, 32) and the (fine) labels.
"""

from __future__ import annotations

import io
from pathlib import Path, PurePosixPath

import numpy as np

from freshet.data.archives import as_data_errors, members
from freshet.data.catalogue import ReadOptions
from freshet.data.dataset import Array
from freshet.data.plain_pickle import load_plain
from freshet.errors import DataError

PIXELS = 3 * 32 * 32
_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
_FILES = {  # classes -> (training members, test member) without the .bin of the binary release
    10: (_BATCHES, "test_batch"),
    100: (("train",), "test"),
}
_STRIP_LIMIT = 1 << 25  # bytes per WebP strip or label file
_STRIP_HEIGHT = 1 << 14  # pixels: WebP's own limit

Split = tuple[Array, Array]


def read_binary(paths: tuple[Path, ...], options: ReadOptions) -> dict[str, Array]:
    """Read the official binary release, archive or folder: label byte(s), then the red, green and blue planes."""
    return _read_release(paths[0], options.classes, ".bin")


def read_python(paths: tuple[Path, ...], options: ReadOptions) -> dict[str, Array]:
    """Read the official python release, archive or folder, as plain data. Pickled code is never run."""
    return _read_release(paths[0], options.classes, "")


def _read_release(path: Path, classes: int, suffix: str) -> dict[str, Array]:
    train, test = _FILES[classes]
    names = {f"{name}{suffix}" for name in (*train, test)}
    found: dict[str, Split] = {}
    for member, data in members(path, lambda name: PurePosixPath(name).name in names):
        name = PurePosixPath(member).name
        where = f"{path}: {member}"
        found[name] = _binary(where, data, classes) if suffix else _python(where, data, classes)
    missing = sorted(names - set(found))
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}; get it again")
    return _join([found[f"{name}{suffix}"] for name in train], found[f"{test}{suffix}"])


def _binary(where: str, data: bytes, classes: int) -> Split:
    labels = 1 if classes == 10 else 2  # CIFAR-100 puts the coarse label first
    if len(data) == 0 or len(data) % (labels + PIXELS):
        raise DataError(f"{where} has {len(data):,} bytes, not a whole number of {labels + PIXELS}-byte records")
    rows = np.frombuffer(data, np.uint8).reshape(-1, labels + PIXELS)
    return rows[:, labels:].reshape(-1, 3, 32, 32), rows[:, labels - 1].astype(np.int64)


def _python(where: str, data: bytes, classes: int) -> Split:
    try:
        content = load_plain(data)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{where} holds a {type(content).__name__}; a CIFAR batch is a dict")
    content = {k.decode("latin-1") if isinstance(k, bytes) else k: v for k, v in content.items()}
    x, y = content.get("data"), content.get("labels" if classes == 10 else "fine_labels")
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != PIXELS:
        raise DataError(f"{where} has no uint8 array 'data' of {PIXELS} columns")
    if not isinstance(y, list) or len(y) != len(x) or not all(isinstance(v, int) and 0 <= v < classes for v in y):
        raise DataError(f"{where} has no list of {len(x)} labels from 0 to {classes - 1}")
    return x.reshape(-1, 3, 32, 32), np.array(y, np.int64)


def read_strips(paths: tuple[Path, ...], options: ReadOptions) -> dict[str, Array]:
    """Read compact zips, the test part last. Each holds WebP strips of stacked images and labels.npy."""
    parts = [_strips(path, options.classes) for path in paths]
    return _join(parts[:-1], parts[-1])


def _strips(path: Path, classes: int) -> Split:
    from PIL import Image

    images: list[Array] = []
    labels: dict[str, Array] = {}
    names = sorted(members(path, lambda name: name.endswith((".webp", ".npy")), _STRIP_LIMIT))
    with as_data_errors(path):
        for name, data in names:
            if name.endswith(".npy"):
                labels[name] = np.load(io.BytesIO(data), allow_pickle=False)
                continue
            with Image.open(io.BytesIO(data), formats=("WEBP",)) as image:
                if image.width != 32 or image.height % 32 or image.height > _STRIP_HEIGHT:
                    raise DataError(f"{path}: {name} is {image.width} x {image.height}; strips are 32 wide")
                images.append(np.asarray(image.convert("RGB")).reshape(-1, 32, 32, 3))
        if (classes == 100) != ("coarse_labels.npy" in labels):
            raise DataError(f"{path} holds another data set, not CIFAR-{classes}")
        x, y = np.concatenate(images), labels["labels.npy"]
        if y.shape != (len(x),) or y.dtype != np.uint8:
            raise DataError(f"{path} has {len(x)} images but labels of shape {y.shape} and type {y.dtype}")
    return x.transpose(0, 3, 1, 2), y.astype(np.int64)


def _join(train: list[Split], test: Split) -> dict[str, Array]:
    return {
        "x_train": np.ascontiguousarray(np.concatenate([x for x, _ in train])),
        "y_train": np.concatenate([y for _, y in train]),
        "x_test": np.ascontiguousarray(test[0]),
        "y_test": test[1],
    }
