"""The loop under ``rectifying``, compiled."""

import numpy as np
from numba import types
from numpy.typing import NDArray

from freshet.core.compiling import compiled
from freshet.training.tiles import LANES, transposition_tile

_IN, _OUT = types.Array(types.float32, 3, "C", readonly=True), types.Array(types.float32, 3, "C")
FLOAT = 4

_tile = transposition_tile()


@compiled(types.void(_IN, _IN, _OUT))
def masked_transposition(x: NDArray[np.float32], mask: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """``out[n, j, i] = x[n, i, j]``, but 0 where ``mask[n, i, j] <= 0``."""
    samples, rows, columns = x.shape
    whole_rows, whole_columns = rows // LANES * LANES, columns // LANES * LANES
    for n in range(samples):
        x_at, mask_at, out_at = x[n].ctypes.data, mask[n].ctypes.data, out[n].ctypes.data
        across = rows // LANES if rows < columns else columns // LANES  # the short side inside: whole cache lines
        for tile in range(whole_rows // LANES * (whole_columns // LANES)):
            a, b = tile // across * LANES, tile % across * LANES
            i, j = (b, a) if rows < columns else (a, b)
            place = FLOAT * (i * columns + j)
            _tile((x_at + place, mask_at + place, out_at + FLOAT * (j * rows + i), columns, rows))
        for i in range(rows):
            for j in range(whole_columns if i < whole_rows else 0, columns):
                out[n, j, i] = np.float32(0.0) if mask[n, i, j] <= 0 else x[n, i, j]
