"""The IDX format of MNIST and Fashion-MNIST, plain or gzipped."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

from freshet.data.archives import open_decoded
from freshet.data.catalogue import ReadOptions
from freshet.data.dataset import Array
from freshet.errors import DataError

_LIMIT = 1 << 28  # bytes; 60,000 images of 28 x 28 are 47 MB


def read_idx(path: Path, dimensions: int) -> Array:
    """Read the uint8 array in an IDX file with the given number of dimensions (3: images, 1: labels)."""
    with open_decoded(path) as file:
        head = file.read(4 + 4 * dimensions)
        if len(head) < 4 + 4 * dimensions or head[:4] != bytes([0, 0, 8, dimensions]):
            raise DataError(f"{path} is not an IDX file of bytes with {dimensions} dimension(s)")
        shape = struct.unpack(f">{dimensions}I", head[4:])
        expected = int(np.prod(shape, dtype=object))
        if expected > _LIMIT:
            raise DataError(f"{path} declares {expected:,} bytes {shape}, more than {_LIMIT:,}; it is refused")
        data = np.empty(expected, np.uint8)
        found, rest = _fill(data, file), file.read(1)
    if found < expected or rest:
        holds = "more" if rest else f"{found:,}"
        raise DataError(f"{path} declares {expected:,} bytes {shape} but holds {holds}; get it again")
    return data.reshape(shape)


def _fill(data: Array, file: BinaryIO) -> int:
    """Read into the array, which saves a copy, and return the number of bytes read."""
    view, found = memoryview(data.data), 0
    while found < len(view) and (count := file.readinto(view[found:])):  # type: ignore[attr-defined]
        found += count
    return found


def read_splits(paths: tuple[Path, ...], _: ReadOptions) -> dict[str, Array]:
    """Read four files: training images and labels, test images and labels."""
    x_train, x_test = (read_idx(p, 3)[:, None] for p in (paths[0], paths[2]))
    y_train, y_test = (read_idx(p, 1).astype(np.int64) for p in (paths[1], paths[3]))
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
