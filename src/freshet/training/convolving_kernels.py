"""The loops under ``convolving``, compiled: around tiles, over images that lie as (C, H, W, N).

N is a multiple of ``LANES``; samples beyond the batch are zeros. Images that a convolution pads have their border in
memory, so that no loop asks where it is, save that of the input's gradient.
"""

import numpy as np
from numba import types
from numpy.typing import NDArray

from freshet.core.compiling import compiled, inlined
from freshet.training.tiles import LANES, contest_tile, convolution_tile, product_tile

Images = NDArray[np.float32]
Winners = NDArray[np.uint8]

_IN, _OUT = types.Array(types.float32, 4, "C", readonly=True), types.Array(types.float32, 4, "C")
_WINNERS_IN, _WINNERS = types.Array(types.uint8, 4, "C", readonly=True), types.Array(types.uint8, 4, "C")
_ANY_IN, _ANY = types.Array(types.float32, 4, "A", readonly=True), types.Array(types.float32, 4, "A")
_ROW_IN, _ROW = types.Array(types.float32, 1, "C", readonly=True), types.Array(types.float32, 1, "C")
_INT = types.int64
FLOAT = 4

_c4v3, _c4v2, _c4v1 = (convolution_tile(4, v) for v in (3, 2, 1))
_c3v4, _c3v3, _c3v2, _c3v1 = (convolution_tile(3, v) for v in (4, 3, 2, 1))
_c1v4, _c1v3, _c1v2, _c1v1 = (convolution_tile(1, v) for v in (4, 3, 2, 1))
_contest = contest_tile()
_p2k5, _p4k3, _p4k2, _p4k1 = product_tile(2, 5), product_tile(4, 3), product_tile(4, 2), product_tile(4, 1)
_p1k5, _p1k3, _p1k2, _p1k1 = (product_tile(1, taps) for taps in (5, 3, 2, 1))


@inlined
def _channels_of_tile(left: int) -> int:
    """How many of so many channels the next tile takes: fours, threes where they come out even, single ones."""
    if left % 3 == 0 and left <= 9:
        return 3
    return 4 if left >= 4 else 1


@inlined
def _vectors_of_tile(left: int, channels: int) -> int:
    """How many of so many vectors tiles of up to so many channels take: as many as registers hold, one only if it must
    be."""
    if channels == 4:
        return 3 if left == 3 or left > 4 else min(left, 2)
    return min(left, 4)


@inlined
def _tile(channels: int, vectors: int, given: tuple[int, ...]) -> None:
    if channels == 4:
        if vectors == 3:
            _c4v3(given)
        elif vectors == 2:
            _c4v2(given)
        else:
            _c4v1(given)
    elif channels == 3:
        if vectors == 4:
            _c3v4(given)
        elif vectors == 3:
            _c3v3(given)
        elif vectors == 2:
            _c3v2(given)
        else:
            _c3v1(given)
    elif vectors == 4:
        _c1v4(given)
    elif vectors == 3:
        _c1v3(given)
    elif vectors == 2:
        _c1v2(given)
    else:
        _c1v1(given)


@inlined
def _convolve_pixel(
    filters: int,
    samples: int,
    places: tuple[int, int, int, int, int],
    kernel: int,
    met: tuple[int, int, int],
    x_steps: tuple[int, int, int],
    w_steps: tuple[int, int, int],
) -> None:
    """One pixel of all filters and samples. ``places`` are the addresses of images, packed kernels, bias and result,
    and which entry of the kernels (of so many) is the first; ``met`` says how many of their channels, rows and columns
    are gone through, ``w_steps`` how far apart these are, in entries of one filter."""
    x_at, w_at, bias_at, out_at, entry = places
    (depth, rows, taps), (x_depth, x_row, x_tap), (w_depth, w_row, w_tap) = met, x_steps, w_steps
    v = 0
    while v < samples // LANES:
        vectors, first = _vectors_of_tile(samples // LANES - v, _channels_of_tile(filters)), 0
        while first < filters:
            c = _channels_of_tile(filters - first)
            x, out = x_at + FLOAT * v * LANES, out_at + FLOAT * (first * samples + v * LANES)
            w, bias = w_at + FLOAT * (first * kernel + entry * c), bias_at + FLOAT * first
            if depth > 2 * taps:  # the longest loop inside
                loops = (rows, x_row, w_row * c, taps, x_tap, w_tap * c, depth, x_depth, w_depth * c)
            else:
                loops = (depth, x_depth, w_depth * c, rows, x_row, w_row * c, taps, x_tap, w_tap * c)
            _tile(c, vectors, (x, w, bias, out, samples, *loops))
            first += c
        v += vectors


@compiled(types.void(_ANY_IN, _ROW, types.boolean))
def pack(w: Images, out: NDArray[np.float32], turned: bool) -> None:
    """Kernels (O, I, h, w) in the order in which tiles read them: (tile, I, h, w, channels of the tile).

    ``turned``, the roles of O and I are exchanged and the kernels turned by half a circle, as the input's gradient
    needs them.
    """
    outer, inner, height, width = (w.shape[1], w.shape[0], *w.shape[2:]) if turned else w.shape
    place, first = 0, 0
    while first < outer:
        channels = _channels_of_tile(outer - first)
        for d in range(inner):
            for a in range(height):
                for b in range(width):
                    for c in range(first, first + channels):
                        out[place] = w[d, c, height - 1 - a, width - 1 - b] if turned else w[c, d, a, b]
                        place += 1
        first += channels


@compiled(types.void(_ANY_IN, _OUT, _INT))
def innermost(x: Images, out: Images, border: int) -> None:
    """Images (N, C, H, W) as (C, H, W, N) inside a border of zeros."""
    samples, channels, rows, columns = x.shape
    if x.strides[1] < x.strides[3]:  # channels last
        for i in range(rows):
            for n in range(samples):
                for j in range(columns):
                    for c in range(channels):
                        out[c, i + border, j + border, n] = x[n, c, i, j]
    else:
        for c in range(channels):
            for i in range(rows):
                for n in range(samples):
                    for j in range(columns):
                        out[c, i + border, j + border, n] = x[n, c, i, j]
    if samples < out.shape[3]:
        out[:, :, :, samples:] = 0.0


@compiled(types.void(_IN, _ANY, _INT))
def outermost(x: Images, out: Images, border: int) -> None:
    """The inverse of ``innermost``."""
    samples, channels, rows, columns = out.shape
    for c in range(channels):
        for i in range(rows):
            for j in range(columns):
                row = x[c, i + border, j + border]
                for n in range(samples):
                    out[n, c, i, j] = row[n]


@compiled(
    types.void(_IN, _ROW_IN, _ROW_IN, _OUT, _WINNERS, *[types.UniTuple(_INT, 2)] * 3, _INT, types.boolean),
)
def convolve(
    x: Images,
    w: NDArray[np.float32],
    bias: NDArray[np.float32],
    out: Images,
    winners: Winners,
    kernel: tuple[int, int],
    beyond: tuple[int, int],
    pool: tuple[int, int],
    border: int,
    rectify: bool,
) -> None:
    """Convolution, max pooling and ReLU into ``out``, which has a border. ``winners`` says which entry of a window was
    the largest (the first of equal ones, the last NaN), and the size of the window where ReLU made it 0.

    Kernels reach ``beyond`` the images by so many rows and columns; only what meets them is gone through.
    """
    depth, rows, columns, samples = x.shape
    (height, width), window, filters = kernel, pool[0] * pool[1], len(bias)
    size = filters * samples
    conv = np.empty((window, size), np.float32)
    x_at, w_at, bias_at, conv_at = x.ctypes.data, w.ctypes.data, bias.ctypes.data, conv.ctypes.data
    out_first, winners_first = out.ctypes.data, winners.ctypes.data
    x_steps = (rows * columns * samples, columns * samples, samples)
    w_steps = (height * width, width, 1)
    for i in range(winners.shape[1]):
        for j in range(winners.shape[2]):
            for k in range(window):
                top, left = i * pool[0] + k // pool[1] - beyond[0], j * pool[1] + k % pool[1] - beyond[1]
                a, b = max(0, -top), max(0, -left)
                met = (depth, min(height, rows - top) - a, min(width, columns - left) - b)
                corner = ((top + a) * columns + left + b) * samples
                places = (x_at + FLOAT * corner, w_at, bias_at, conv_at + FLOAT * k * size, a * width + b)
                _convolve_pixel(filters, samples, places, depth * height * width, met, x_steps, w_steps)
            for c in range(filters):
                out_at = out_first + FLOAT * ((c * out.shape[1] + i + border) * out.shape[2] + j + border) * samples
                winners_at = winners_first + ((c * winners.shape[1] + i) * winners.shape[2] + j) * samples
                for n in range(0, samples, LANES):
                    entries = conv_at + FLOAT * (c * samples + n)
                    _contest((entries, out_at + FLOAT * n, winners_at + n, window, size, rectify))


@compiled(types.void(_IN, _WINNERS_IN, _OUT, _ROW, _INT, _INT))
def spread(
    gradient: Images, winners: Winners, out: Images, bias: NDArray[np.float32], pool_height: int, pool_width: int
) -> None:
    """The gradient of pooling and ReLU: each window's to its winner, 0 to all others; and that of the bias."""
    filters, rows, columns, samples = gradient.shape
    sums, part = np.empty(samples), np.empty(samples, np.float32)
    for c in range(filters):
        sums[:] = 0.0
        out[c, rows * pool_height :] = 0.0
        for i in range(rows):
            out[c, i * pool_height : (i + 1) * pool_height, columns * pool_width :] = 0.0
            for j in range(columns):
                row, wins = gradient[c, i, j], winners[c, i, j]
                for k in range(pool_height * pool_width):
                    place = out[c, i * pool_height + k // pool_width, j * pool_width + k % pool_width]
                    for n in range(samples):
                        place[n] = row[n] if wins[n] == k else np.float32(0.0)
                for n in range(samples):
                    part[n] = row[n] if wins[n] < pool_height * pool_width else np.float32(0.0)
                for n in range(samples):
                    sums[n] += part[n]
        bias[c] = sums.sum()


@inlined
def _taps_of_tile(left: int) -> int:
    return 5 if left >= 5 else min(left, 3) if left != 4 else 2


@inlined
def _product(block: int, taps: int, given: tuple[int, ...]) -> None:
    if block == 1:
        if taps == 5:
            _p1k5(given)
        elif taps == 3:
            _p1k3(given)
        elif taps == 2:
            _p1k2(given)
        else:
            _p1k1(given)
    elif taps == 5:
        _p2k5(given)
    elif taps == 3:
        _p4k3(given)
    elif taps == 2:
        _p4k2(given)
    else:
        _p4k1(given)


@compiled(types.void(_IN, _IN, _ANY))
def weight_gradient(x: Images, gradient: Images, out: Images) -> None:
    """``out[o, d, a, b] += sum over i, j, n of gradient[o, i, j, n] x[d, i + a, j + b, n]``."""
    depth, x_rows, x_columns, samples = x.shape
    filters, rows, columns, _ = gradient.shape
    height, width = out.shape[2:]
    found = np.empty(12, np.float32)
    x_at, gradient_at, found_at = x.ctypes.data, gradient.ctypes.data, found.ctypes.data
    x_row, channel, row = x_columns * samples, rows * columns * samples, columns * samples
    for d in range(depth):
        for a in range(height):
            b = 0
            while b < width:
                taps = _taps_of_tile(width - b)
                corner, o = ((d * x_rows + a) * x_columns + b) * samples, 0
                while o < filters:
                    block = 2 if taps == 5 else 4
                    block = block if filters - o >= block else 1
                    given = (
                        x_at + FLOAT * corner,
                        gradient_at + FLOAT * o * channel,
                        found_at,
                        *(rows, columns, samples // LANES, x_row, samples, channel, row, samples),
                    )
                    _product(block, taps, given)
                    for c in range(block):
                        for k in range(taps):
                            out[o + c, d, a, b + k] += found[c * taps + k]
                    o += block
                b += taps
