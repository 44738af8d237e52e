"""The IDX format of MNIST and Fashion-MNIST, plain or gzipped."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from freshet.data.archives import read_bounded
from freshet.data.dataset import Array
from freshet.errors import DataError

_LIMIT = 1 << 28  # bytes; 60,000 images of 28 x 28 are 47 MB


def read_idx(path: Path, dimensions: int) -> Array:
    """The uint8 array in an IDX file with the given number of dimensions (3: images, 1: labels)."""
    data = read_bounded(path, _LIMIT)
    head = 4 + 4 * dimensions
    if len(data) < head or data[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(f"{path} is not an IDX file of bytes with {dimensions} dimension(s)")
    shape = struct.unpack(f">{dimensions}I", data[4:head])
    expected = int(np.prod(shape, dtype=object))
    if len(data) - head != expected:
        raise DataError(f"{path} promises {expected:,} bytes {shape} but holds {len(data) - head:,}; get it again")
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape).copy()


def read_fashion(paths: tuple[Path, ...]) -> dict[str, Array]:
    """Fashion-MNIST from its four files: training images and labels, test images and labels."""
    x_train, x_test = (read_idx(p, 3)[:, None] for p in (paths[0], paths[2]))
    y_train, y_test = (read_idx(p, 1).astype(np.int64) for p in (paths[1], paths[3]))
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
