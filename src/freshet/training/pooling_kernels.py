"""The loops under ``pooling``, compiled."""

import numpy as np
from numba import types
from numpy.typing import NDArray

from freshet.core.compiling import compiled

_rows_in, _rows = types.Array(types.float32, 3, "C", readonly=True), types.Array(types.float32, 3, "C")
_windows_in, _windows = types.Array(types.float32, 4, "C", readonly=True), types.Array(types.float32, 4, "C")
_winners_in, _winners = types.Array(types.uint8, 4, "C", readonly=True), types.Array(types.uint8, 4, "C")


@compiled(types.void(_rows_in, _windows, _winners, types.int64, types.int64, types.boolean))
def pool(
    x: NDArray[np.float32],
    y: NDArray[np.float32],
    winners: NDArray[np.uint8],
    height: int,
    width: int,
    rectify: bool,
) -> None:
    """Images (N, H, W C) into their windows' maxima (N, H', W', C), each with the number of its entry in the window.

    With ``rectify`` a maximum that is not positive becomes 0 and its winner ``height * width``, that is none.
    """
    samples, rows, columns, channels = y.shape
    size = columns * channels
    entries, best_of = np.empty(size, np.float32), np.empty(size, np.int32)
    for n in range(samples):
        for i in range(rows):
            best = y[n, i].reshape(-1)
            best[:] = -np.inf
            best_of[:] = 0
            for a in range(height):
                for b in range(width):
                    row = x[n, i * height + a]  # fetched one loop further out, it keeps the compiler from vectors
                    for j in range(columns):
                        for c in range(channels):
                            entries[j * channels + c] = row[(j * width + b) * channels + c]
                    for p in range(size):
                        entry = entries[p]
                        wins = (entry > best[p]) | (entry != entry)
                        best[p] = entry if wins else best[p]
                        best_of[p] = a * width + b if wins else best_of[p]
            if rectify:
                for p in range(size):
                    off = best[p] <= 0
                    best[p] = np.float32(0.0) if off else best[p]
                    best_of[p] = height * width if off else best_of[p]
            out = winners[n, i].reshape(-1)
            for p in range(size):
                out[p] = best_of[p]


@compiled(types.void(_windows_in, _winners_in, _rows, types.int64, types.int64))
def unpool(
    gradient: NDArray[np.float32], winners: NDArray[np.uint8], out: NDArray[np.float32], height: int, width: int
) -> None:
    """The gradient of ``pool``: each window's to its winner, 0 to all others."""
    samples, rows, columns, channels = gradient.shape
    places = np.zeros(height * width + 1, np.int64)  # of a window's entries; without a winner, 0 goes to the first
    for k in range(height * width):
        places[k] = k // width * out.shape[2] + k % width * channels
    for n in range(samples):
        for i in range(rows):
            block = out[n, i * height : (i + 1) * height].reshape(-1)
            block[:] = 0.0
            for j in range(columns):
                for c in range(channels):
                    k = winners[n, i, j, c]
                    value = gradient[n, i, j, c] if k < height * width else np.float32(0.0)
                    block[j * width * channels + c + places[k]] = value
        out[n, rows * height :] = 0.0
