"""The compiled loops of the fast layers. Each is compiled at its first call, or loaded from numba's cache.

numba caches machine code per source file, so everything that ends up in it is here: the vector code, too.

The convolution loops keep images as (C, H, W, N), with the sample innermost. A vector then holds one pixel of ``LANES``
samples and is always full, however few channels there are. N is a multiple of ``LANES``; samples beyond the batch are
zeros. Padded images have their border in memory, so only the loop for the input's gradient checks bounds.

A *tile* is a few vectors of sums that stay in registers while its loops run. Its shape depends on how many fit (12 of
16 registers). Tiles are numba intrinsics: compiled loops call them with one tuple of addresses and strides. Strides
count floats.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from freshet.core.compiling import compile_loop, inline

LANES = 8
FLOAT_BYTES = 4
Images = NDArray[np.float32]
Winners = NDArray[np.uint8]
Builder = Any
Value = Any

_IR_FLOAT, _IR_INT, _IR_LANE = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_IR_VECTOR = ir.VectorType(_IR_FLOAT, LANES)
_IR_ZERO = ir.Constant(_IR_VECTOR, [0.0] * LANES)

_IN, _OUT = types.Array(types.float32, 4, "C", readonly=True), types.Array(types.float32, 4, "C")
_ANY_IN, _ANY = types.Array(types.float32, 4, "A", readonly=True), types.Array(types.float32, 4, "A")
_WINNERS_IN, _WINNERS = types.Array(types.uint8, 4, "C", readonly=True), types.Array(types.uint8, 4, "C")
_ROWS_IN, _ROWS = types.Array(types.float32, 3, "C", readonly=True), types.Array(types.float32, 3, "C")
_FLAT_IN, _FLAT = types.Array(types.float32, 1, "C", readonly=True), types.Array(types.float32, 1, "C")
_INT = types.int64


# ---- tiles: code for one group of registers


def convolution_tile(channels: int, vectors: int) -> Any:
    """Code for ``out[c, v] = bias[c] + sum over i, j, k of w[i, j, k, c] x[i, j, k, v]``, with c below ``channels`` and
    v below ``vectors``. ``x`` and ``w`` have one stride per loop. The channels of ``w`` are contiguous."""

    def body(builder: Builder, given: Sequence[Value]) -> None:
        x, w, bias, out, out_channel, *loops = given
        steps = [loops[0:3], loops[3:6], loops[6:9]]
        sums = _allocate_registers(builder, channels, vectors)
        for c, row in enumerate(sums):
            _fill(builder, row, _broadcast_float(builder, _at(builder, _floats(builder, bias), c)))

        def step(x: Value, w: Value) -> None:
            entries = [_load(builder, _at(builder, x, v * LANES)) for v in range(vectors)]
            for c in range(channels):
                weight = _broadcast_float(builder, _at(builder, w, c))
                for v in range(vectors):
                    _add_product(builder, sums[c][v], entries[v], weight)

        _loops(builder, steps, (_floats(builder, x), _floats(builder, w)), step)
        for c in range(channels):
            place = _at(builder, _floats(builder, out), builder.mul(out_channel, ir.Constant(_IR_INT, c)))
            for v in range(vectors):
                _store(builder, builder.load(sums[c][v]), _at(builder, place, v * LANES))

    return _intrinsic(body)


def product_tile(channels: int, taps: int) -> Any:
    """Code for ``out[c, k] = sum over rows, columns, samples of g[c] x[k]``, with c below ``channels`` and k below
    ``taps``. The entries ``x[k]`` are ``x_step`` apart. Summing row by row keeps rounding errors small."""

    def body(builder: Builder, given: Sequence[Value]) -> None:
        x, g, out, rows, columns, vectors, x_row, x_step, g_channel, g_row, g_step = given
        sums, totals = _allocate_registers(builder, channels, taps), _allocate_registers(builder, channels, taps)
        for row in totals:
            _fill(builder, row, _IR_ZERO)
        lanes = ir.Constant(_IR_INT, LANES)

        def step(x: Value, g: Value) -> None:
            entries = [
                _load(builder, _at(builder, g, builder.mul(g_channel, ir.Constant(_IR_INT, c))))
                for c in range(channels)
            ]
            for k in range(taps):
                entry = _load(builder, _at(builder, x, builder.mul(x_step, ir.Constant(_IR_INT, k))))
                for c in range(channels):
                    _add_product(builder, sums[c][k], entry, entries[c])

        def row_of(x: Value, g: Value) -> None:
            for row in sums:
                _fill(builder, row, _IR_ZERO)
            _loops(builder, ((columns, x_step, g_step), (vectors, lanes, lanes)), (x, g), step)
            for total, part in zip(chain(*totals), chain(*sums), strict=True):
                builder.store(builder.fadd(builder.load(total), builder.load(part)), total)

        _loops(builder, ((rows, x_row, g_row),), (_floats(builder, x), _floats(builder, g)), row_of)
        for place, total in enumerate(chain(*totals)):
            builder.store(_sum_lanes(builder, builder.load(total)), _at(builder, _floats(builder, out), place))

    return _intrinsic(body)


def contest_tile() -> Any:
    """Code for the maximum, lane by lane, of ``count`` vectors that are ``step`` apart, and the index of the winner as
    a byte. The first of equal entries wins, or the last NaN. If ``rectify`` is not 0, a maximum that is not positive
    becomes 0 and its index ``count``."""

    def body(builder: Builder, given: Sequence[Value]) -> None:
        entries, out, winners, count, step, rectify = given
        numbers = ir.VectorType(_IR_LANE, LANES)
        best, best_of = cgutils.alloca_once(builder, _IR_VECTOR), cgutils.alloca_once(builder, numbers)
        builder.store(_load(builder, _floats(builder, entries)), best)
        builder.store(ir.Constant(numbers, [0] * LANES), best_of)
        with cgutils.for_range(builder, builder.sub(count, ir.Constant(_IR_INT, 1)), intp=_IR_INT) as loop:
            number = builder.add(loop.index, ir.Constant(_IR_INT, 1))
            entry = _load(builder, _at(builder, _floats(builder, entries), builder.mul(number, step)))
            larger = builder.fcmp_ordered(">", entry, builder.load(best))
            wins = builder.or_(larger, builder.fcmp_unordered("uno", entry, entry))
            builder.store(builder.select(wins, entry, builder.load(best)), best)
            builder.store(builder.select(wins, _broadcast_int(builder, number), builder.load(best_of)), best_of)
        with builder.if_then(builder.icmp_signed("!=", rectify, ir.Constant(_IR_INT, 0))):
            off = builder.fcmp_ordered("<=", builder.load(best), _IR_ZERO)
            builder.store(builder.select(off, _IR_ZERO, builder.load(best)), best)
            builder.store(builder.select(off, _broadcast_int(builder, count), builder.load(best_of)), best_of)
        _store(builder, builder.load(best), _floats(builder, out))
        narrow = ir.VectorType(ir.IntType(8), LANES)
        place = builder.inttoptr(winners, narrow.as_pointer())
        builder.store(builder.trunc(builder.load(best_of), narrow), place, align=1)

    return _intrinsic(body)


def transpose_tile() -> Any:
    """Code for ``out[k, r] = x[r, k]``, or 0 where ``mask[r, k] <= 0``, for ``LANES`` rows and columns. Pairs of rows
    exchange single lanes, then groups of 2, then of 4."""

    def body(builder: Builder, given: Sequence[Value]) -> None:
        x, mask, out, x_row, out_row = given
        rows = []
        for r in range(LANES):
            offset = builder.mul(x_row, ir.Constant(_IR_INT, r))
            entry, sign = (_load(builder, _at(builder, _floats(builder, place), offset)) for place in (x, mask))
            rows.append(builder.select(builder.fcmp_ordered("<=", sign, _IR_ZERO), _IR_ZERO, entry))
        step = 1
        while step < LANES:
            low = [LANES + lane - step if lane & step else lane for lane in range(LANES)]
            high = [LANES + lane if lane & step else lane + step for lane in range(LANES)]
            for r in (r for r in range(LANES) if not r & step):
                pair = rows[r], rows[r + step]
                rows[r], rows[r + step] = (builder.shuffle_vector(*pair, _lane_indices(half)) for half in (low, high))
            step *= 2
        for r, row in enumerate(rows):
            _store(builder, row, _at(builder, _floats(builder, out), builder.mul(out_row, ir.Constant(_IR_INT, r))))

    return _intrinsic(body)


# ---- helpers that emit LLVM code


def _lane_indices(lanes: Sequence[int]) -> Value:
    return ir.Constant(ir.VectorType(_IR_LANE, len(lanes)), list(lanes))


def _intrinsic(body: Callable[[Builder, Sequence[Value]], None]) -> Any:
    """Make ``body`` a function that compiled code calls with one tuple of integers."""

    @intrinsic
    def tile(_: Any, given: Any) -> tuple[Any, Any]:
        def generate(context: Any, builder: Builder, signature: Any, arguments: Sequence[Value]) -> Value:
            entries = zip(cgutils.unpack_tuple(builder, arguments[0]), signature.args[0], strict=True)
            body(builder, [context.cast(builder, entry, kind, types.int64) for entry, kind in entries])
            return context.get_dummy_value()

        return types.void(given), generate

    return tile


def _loops(
    builder: Builder,
    steps: Sequence[Sequence[Value]],
    places: tuple[Value, Value],
    body: Callable[[Value, Value], None],
) -> None:
    """Nested loops that advance two pointers. ``steps`` holds (iterations, stride of the first, of the second)."""
    if not steps:
        body(*places)
        return
    (times, *strides), rest = steps[0], steps[1:]
    moving = [cgutils.alloca_once(builder, place.type) for place in places]
    for variable, place in zip(moving, places, strict=True):
        builder.store(place, variable)
    with cgutils.for_range(builder, times, intp=_IR_INT):
        _loops(builder, rest, (builder.load(moving[0]), builder.load(moving[1])), body)
        for variable, stride in zip(moving, strides, strict=True):
            builder.store(_at(builder, builder.load(variable), stride), variable)


def _allocate_registers(builder: Builder, rows: int, columns: int) -> list[list[Value]]:
    """Variables of one vector each. The compiler keeps them in registers while there are enough."""
    return [[cgutils.alloca_once(builder, _IR_VECTOR) for _ in range(columns)] for _ in range(rows)]


def _fill(builder: Builder, registers: Sequence[Value], value: Value) -> None:
    for register in registers:
        builder.store(value, register)


def _add_product(builder: Builder, register: Value, a: Value, b: Value) -> None:
    """``register += a b``, rounded once."""
    kind = ir.FunctionType(_IR_VECTOR, [_IR_VECTOR] * 3)
    fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    builder.store(builder.call(fused, [a, b, builder.load(register)]), register)


def _floats(builder: Builder, address: Value) -> Value:
    return builder.inttoptr(address, _IR_FLOAT.as_pointer())


def _at(builder: Builder, place: Value, offset: Value) -> Value:
    return builder.gep(place, [ir.Constant(_IR_INT, offset) if isinstance(offset, int) else offset])


def _load(builder: Builder, place: Value) -> Value:
    vector = builder.load(builder.bitcast(place, _IR_VECTOR.as_pointer()))
    vector.align = 4
    return vector


def _store(builder: Builder, vector: Value, place: Value) -> None:
    builder.store(vector, builder.bitcast(place, _IR_VECTOR.as_pointer()), align=4)


def _broadcast_float(builder: Builder, place: Value) -> Value:
    """A vector with the float at ``place`` in every lane."""
    nothing, first = ir.Constant(_IR_VECTOR, ir.Undefined), ir.Constant(_IR_LANE, 0)
    one = builder.insert_element(nothing, builder.load(place), first)
    return builder.shuffle_vector(one, nothing, _lane_indices([0] * LANES))


def _broadcast_int(builder: Builder, number: Value) -> Value:
    """A vector with an integer in every lane."""
    kind = ir.VectorType(_IR_LANE, LANES)
    nothing = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(nothing, builder.trunc(number, _IR_LANE), ir.Constant(_IR_LANE, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(kind, [0] * LANES))


def _sum_lanes(builder: Builder, vector: Value) -> Value:
    """The sum of a vector's lanes, in order."""
    lanes = [builder.extract_element(vector, ir.Constant(_IR_LANE, lane)) for lane in range(LANES)]
    total = lanes[0]
    for lane in lanes[1:]:
        total = builder.fadd(total, lane)
    return total


# ---- loops of ``fused_conv_pool``

_c4v3, _c4v2, _c4v1 = (convolution_tile(4, v) for v in (3, 2, 1))
_c3v4, _c3v3, _c3v2, _c3v1 = (convolution_tile(3, v) for v in (4, 3, 2, 1))
_c1v4, _c1v3, _c1v2, _c1v1 = (convolution_tile(1, v) for v in (4, 3, 2, 1))
_contest_tile = contest_tile()
_p2k5, _p4k3, _p4k2, _p4k1 = product_tile(2, 5), product_tile(4, 3), product_tile(4, 2), product_tile(4, 1)
_p1k5, _p1k3, _p1k2, _p1k1 = (product_tile(1, taps) for taps in (5, 3, 2, 1))


@inline
def _channels_of_tile(left: int) -> int:
    """Number of remaining channels that the next tile takes: 4, or 3 if that divides them evenly, else 1."""
    if left % 3 == 0 and left <= 9:
        return 3
    return 4 if left >= 4 else 1


@inline
def _vectors_of_tile(left: int, channels: int) -> int:
    """Number of remaining vectors that the next tile takes: what fits in registers, and 1 only if it must."""
    if channels == 4:
        return 3 if left == 3 or left > 4 else min(left, 2)
    return min(left, 4)


@inline
def _run_tile(channels: int, vectors: int, given: tuple[int, ...]) -> None:
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


@inline
def _convolve_pixel(
    filters: int,
    samples: int,
    places: tuple[int, int, int, int, int],
    kernel: int,
    met: tuple[int, int, int],
    x_steps: tuple[int, int, int],
    w_steps: tuple[int, int, int],
) -> None:
    """One output pixel of all filters and samples.

    ``places`` holds the addresses of images, packed kernels, bias and result, and the index of the first kernel entry
    to use. ``kernel`` counts the entries of one filter. ``met`` counts the channels, rows and columns to go through.
    ``w_steps`` are their strides in entries of one filter.
    """
    x_at, w_at, bias_at, out_at, entry = places
    (depth, rows, taps), (x_depth, x_row, x_tap), (w_depth, w_row, w_tap) = met, x_steps, w_steps
    v = 0
    while v < samples // LANES:
        vectors, first = _vectors_of_tile(samples // LANES - v, _channels_of_tile(filters)), 0
        while first < filters:
            c = _channels_of_tile(filters - first)
            x, out = x_at + FLOAT_BYTES * v * LANES, out_at + FLOAT_BYTES * (first * samples + v * LANES)
            w, bias = w_at + FLOAT_BYTES * (first * kernel + entry * c), bias_at + FLOAT_BYTES * first
            if depth > 2 * taps:  # the longest loop goes inside
                loops = (rows, x_row, w_row * c, taps, x_tap, w_tap * c, depth, x_depth, w_depth * c)
            else:
                loops = (depth, x_depth, w_depth * c, rows, x_row, w_row * c, taps, x_tap, w_tap * c)
            _run_tile(c, vectors, (x, w, bias, out, samples, *loops))
            first += c
        v += vectors


@compile_loop(types.void(_ANY_IN, _FLAT, types.boolean))
def pack_kernels(w: Images, out: NDArray[np.float32], rotated: bool) -> None:
    """Reorder kernels (O, I, h, w) the way tiles read them: (tile, I, h, w, channels of the tile).

    With ``rotated``, swap O and I and rotate the kernels by 180 degrees, as the input's gradient needs them.
    """
    outer, inner, height, width = (w.shape[1], w.shape[0], *w.shape[2:]) if rotated else w.shape
    place, first = 0, 0
    while first < outer:
        channels = _channels_of_tile(outer - first)
        for d in range(inner):
            for a in range(height):
                for b in range(width):
                    for c in range(first, first + channels):
                        out[place] = w[d, c, height - 1 - a, width - 1 - b] if rotated else w[c, d, a, b]
                        place += 1
        first += channels


@compile_loop(types.void(_ANY_IN, _OUT, _INT))
def to_samples_last(x: Images, out: Images, border: int) -> None:
    """Copy images (N, C, H, W) into (C, H, W, N) with a border of zeros."""
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


@compile_loop(types.void(_IN, _ANY, _INT))
def from_samples_last(x: Images, out: Images, border: int) -> None:
    """The inverse of ``to_samples_last``."""
    samples, channels, rows, columns = out.shape
    for c in range(channels):
        for i in range(rows):
            for j in range(columns):
                row = x[c, i + border, j + border]
                for n in range(samples):
                    out[n, c, i, j] = row[n]


@compile_loop(
    types.void(_IN, _FLAT_IN, _FLAT_IN, _OUT, _WINNERS, *[types.UniTuple(_INT, 2)] * 3, _INT, types.boolean),
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
    """Convolution, max pooling and ReLU into ``out``, which has a border.

    ``winners`` gets the index of each window's largest entry (the first of equal ones, or the last NaN), or the size of
    the window where ReLU gave 0. Kernels extend ``beyond`` the images by that many rows and columns; entries outside
    are skipped.
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
                places = (x_at + FLOAT_BYTES * corner, w_at, bias_at, conv_at + FLOAT_BYTES * k * size, a * width + b)
                _convolve_pixel(filters, samples, places, depth * height * width, met, x_steps, w_steps)
            for c in range(filters):
                pixel = (c * out.shape[1] + i + border) * out.shape[2] + j + border
                out_at = out_first + FLOAT_BYTES * pixel * samples
                winners_at = winners_first + ((c * winners.shape[1] + i) * winners.shape[2] + j) * samples
                for n in range(0, samples, LANES):
                    entries = conv_at + FLOAT_BYTES * (c * samples + n)
                    _contest_tile((entries, out_at + FLOAT_BYTES * n, winners_at + n, window, size, rectify))


@compile_loop(types.void(_IN, _WINNERS_IN, _OUT, _FLAT, _INT, _INT))
def scatter_to_winners(
    gradient: Images, winners: Winners, out: Images, bias: NDArray[np.float32], pool_height: int, pool_width: int
) -> None:
    """The gradient of pooling and ReLU, and that of the bias. A window's winner gets its gradient, all others 0."""
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


@inline
def _taps_of_tile(left: int) -> int:
    return 5 if left >= 5 else min(left, 3) if left != 4 else 2


@inline
def _run_product_tile(block: int, taps: int, given: tuple[int, ...]) -> None:
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


@compile_loop(types.void(_IN, _IN, _ANY))
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
                        x_at + FLOAT_BYTES * corner,
                        gradient_at + FLOAT_BYTES * o * channel,
                        found_at,
                        *(rows, columns, samples // LANES, x_row, samples, channel, row, samples),
                    )
                    _run_product_tile(block, taps, given)
                    for c in range(block):
                        for k in range(taps):
                            out[o + c, d, a, b + k] += found[c * taps + k]
                    o += block
                b += taps


# ---- the loop of ``fused_conv_relu``

_transpose_tile = transpose_tile()


@compile_loop(types.void(_ROWS_IN, _ROWS_IN, _ROWS))
def masked_transpose(x: NDArray[np.float32], mask: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """``out[n, j, i] = x[n, i, j]``, but 0 where ``mask[n, i, j] <= 0``."""
    samples, rows, columns = x.shape
    whole_rows, whole_columns = rows // LANES * LANES, columns // LANES * LANES
    for n in range(samples):
        x_at, mask_at, out_at = x[n].ctypes.data, mask[n].ctypes.data, out[n].ctypes.data
        # the short side goes into the inner loop, which then fills whole cache lines
        across = rows // LANES if rows < columns else columns // LANES
        for tile in range(whole_rows // LANES * (whole_columns // LANES)):
            a, b = tile // across * LANES, tile % across * LANES
            i, j = (b, a) if rows < columns else (a, b)
            place = FLOAT_BYTES * (i * columns + j)
            _transpose_tile((x_at + place, mask_at + place, out_at + FLOAT_BYTES * (j * rows + i), columns, rows))
        for i in range(rows):
            for j in range(whole_columns if i < whole_rows else 0, columns):
                out[n, j, i] = np.float32(0.0) if mask[n, i, j] <= 0 else x[n, i, j]


# ---- loops of ``pooling``


@compile_loop(types.void(_ROWS_IN, _OUT, _WINNERS, _INT, _INT, types.boolean))
def pool(
    x: NDArray[np.float32],
    y: NDArray[np.float32],
    winners: NDArray[np.uint8],
    height: int,
    width: int,
    rectify: bool,
) -> None:
    """Maxima (N, H', W', C) of the windows of images (N, H, W C), and the index of each winner in its window.

    With ``rectify``, a maximum that is not positive becomes 0 and its winner ``height * width``, which means none.
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
                    row = x[n, i * height + a]  # one loop further out, this line stops vectorisation
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


@compile_loop(types.void(_IN, _WINNERS_IN, _ROWS, _INT, _INT))
def unpool(
    gradient: NDArray[np.float32], winners: NDArray[np.uint8], out: NDArray[np.float32], height: int, width: int
) -> None:
    """The gradient of ``pool``: a window's winner gets its gradient, all others 0."""
    samples, rows, columns, channels = gradient.shape
    places = np.zeros(height * width + 1, np.int64)  # of a window's entries; without a winner, the first gets 0
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
