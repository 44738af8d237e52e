"""The inside of a convolution, in the processor's own vectors: what a compiler does not find by itself.

Images lie with the sample innermost, (C, H, W, N), so that a vector holds one pixel of ``LANES`` samples: every
processor can fill it, however few channels there are. A *tile* is a few vectors of sums that stay in registers while
its loops run; how many of them fit (12 of 16) decides its form. Tiles are intrinsics for numba: called from compiled
loops with a tuple of addresses and strides, in numbers of floats. numba keeps compiled loops by the file that they are
in: who changes a tile also has to touch ``convolving_kernels.py`` and ``rectifying_kernels.py``.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
_FLOAT, _INT, _LANE = ir.FloatType(), ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)
Builder = Any
Value = Any


def convolution_tile(channels: int, vectors: int) -> Any:
    """Code for ``out[c, v] = bias[c] + sum over i, j, k of w[i, j, k, c] x[i, j, k, v]``, for so many channels and
    vectors of samples. ``x`` and ``w`` have a stride for each of the three loops; channels of ``w`` are neighbours."""

    def body(builder: Builder, given: Sequence[Value]) -> None:
        x, w, bias, out, out_channel, *loops = given
        steps = [loops[0:3], loops[3:6], loops[6:9]]
        sums = _registers(builder, channels, vectors)
        for c, row in enumerate(sums):
            _fill(builder, row, _spread(builder, _at(builder, _floats(builder, bias), c)))

        def step(x: Value, w: Value) -> None:
            entries = [_load(builder, _at(builder, x, v * LANES)) for v in range(vectors)]
            for c in range(channels):
                weight = _spread(builder, _at(builder, w, c))
                for v in range(vectors):
                    _add_product(builder, sums[c][v], entries[v], weight)

        _loops(builder, steps, (_floats(builder, x), _floats(builder, w)), step)
        for c in range(channels):
            place = _at(builder, _floats(builder, out), builder.mul(out_channel, ir.Constant(_INT, c)))
            for v in range(vectors):
                _store(builder, builder.load(sums[c][v]), _at(builder, place, v * LANES))

    return _intrinsic(body)


def product_tile(channels: int, taps: int) -> Any:
    """Code for ``out[c, k] = sum over rows, columns, samples of g[c] x[k]``, for so many channels of ``g`` and places
    ``k`` of ``x``, ``x_step`` apart. Each row's sum is added to the total, which keeps rounding errors small."""

    def body(builder: Builder, given: Sequence[Value]) -> None:
        x, g, out, rows, columns, vectors, x_row, x_step, g_channel, g_row, g_step = given
        sums, totals = _registers(builder, channels, taps), _registers(builder, channels, taps)
        for row in totals:
            _fill(builder, row, _ZERO)
        lanes = ir.Constant(_INT, LANES)

        def step(x: Value, g: Value) -> None:
            entries = [
                _load(builder, _at(builder, g, builder.mul(g_channel, ir.Constant(_INT, c)))) for c in range(channels)
            ]
            for k in range(taps):
                entry = _load(builder, _at(builder, x, builder.mul(x_step, ir.Constant(_INT, k))))
                for c in range(channels):
                    _add_product(builder, sums[c][k], entry, entries[c])

        def row_of(x: Value, g: Value) -> None:
            for row in sums:
                _fill(builder, row, _ZERO)
            _loops(builder, ((columns, x_step, g_step), (vectors, lanes, lanes)), (x, g), step)
            for total, part in zip(chain(*totals), chain(*sums), strict=True):
                builder.store(builder.fadd(builder.load(total), builder.load(part)), total)

        _loops(builder, ((rows, x_row, g_row),), (_floats(builder, x), _floats(builder, g)), row_of)
        for place, total in enumerate(chain(*totals)):
            builder.store(_lanes_added(builder, builder.load(total)), _at(builder, _floats(builder, out), place))

    return _intrinsic(body)


def contest_tile() -> Any:
    """Code for the largest of ``count`` vectors that lie ``step`` apart, and its number in bytes: the first of equal
    ones, the last NaN. Where ``rectify`` is not 0, what is not positive becomes 0 and has the number ``count``."""

    def body(builder: Builder, given: Sequence[Value]) -> None:
        entries, out, winners, count, step, rectify = given
        numbers = ir.VectorType(_LANE, LANES)
        best, best_of = cgutils.alloca_once(builder, _VECTOR), cgutils.alloca_once(builder, numbers)
        builder.store(_load(builder, _floats(builder, entries)), best)
        builder.store(ir.Constant(numbers, [0] * LANES), best_of)
        with cgutils.for_range(builder, builder.sub(count, ir.Constant(_INT, 1)), intp=_INT) as loop:
            number = builder.add(loop.index, ir.Constant(_INT, 1))
            entry = _load(builder, _at(builder, _floats(builder, entries), builder.mul(number, step)))
            larger = builder.fcmp_ordered(">", entry, builder.load(best))
            wins = builder.or_(larger, builder.fcmp_unordered("uno", entry, entry))
            builder.store(builder.select(wins, entry, builder.load(best)), best)
            builder.store(builder.select(wins, _everywhere(builder, number), builder.load(best_of)), best_of)
        with builder.if_then(builder.icmp_signed("!=", rectify, ir.Constant(_INT, 0))):
            off = builder.fcmp_ordered("<=", builder.load(best), _ZERO)
            builder.store(builder.select(off, _ZERO, builder.load(best)), best)
            builder.store(builder.select(off, _everywhere(builder, count), builder.load(best_of)), best_of)
        _store(builder, builder.load(best), _floats(builder, out))
        narrow = ir.VectorType(ir.IntType(8), LANES)
        place = builder.inttoptr(winners, narrow.as_pointer())
        builder.store(builder.trunc(builder.load(best_of), narrow), place, align=1)

    return _intrinsic(body)


def transposition_tile() -> Any:
    """Code for ``out[k, r] = x[r, k]`` where ``mask[r, k]`` is not <= 0, and 0 elsewhere; ``LANES`` rows and columns.
    Neighbours exchange halves of their rows, then quarters and so on."""

    def body(builder: Builder, given: Sequence[Value]) -> None:
        x, mask, out, x_row, out_row = given
        rows = []
        for r in range(LANES):
            offset = builder.mul(x_row, ir.Constant(_INT, r))
            entry, sign = (_load(builder, _at(builder, _floats(builder, place), offset)) for place in (x, mask))
            rows.append(builder.select(builder.fcmp_ordered("<=", sign, _ZERO), _ZERO, entry))
        step = 1
        while step < LANES:
            low = [LANES + lane - step if lane & step else lane for lane in range(LANES)]
            high = [LANES + lane if lane & step else lane + step for lane in range(LANES)]
            for r in (r for r in range(LANES) if not r & step):
                pair = rows[r], rows[r + step]
                rows[r], rows[r + step] = (builder.shuffle_vector(*pair, _lane_numbers(half)) for half in (low, high))
            step *= 2
        for r, row in enumerate(rows):
            _store(builder, row, _at(builder, _floats(builder, out), builder.mul(out_row, ir.Constant(_INT, r))))

    return _intrinsic(body)


# ---- in terms of which they are written


def _lane_numbers(lanes: Sequence[int]) -> Value:
    return ir.Constant(ir.VectorType(_LANE, len(lanes)), list(lanes))


def _intrinsic(body: Callable[[Builder, Sequence[Value]], None]) -> Any:
    """A function for compiled code, to be called with one tuple of integers, which is this body."""

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
    """Nested loops that move two pointers along: (how often, by how much the first, by how much the second)."""
    if not steps:
        body(*places)
        return
    (times, *strides), rest = steps[0], steps[1:]
    moving = [cgutils.alloca_once(builder, place.type) for place in places]
    for variable, place in zip(moving, places, strict=True):
        builder.store(place, variable)
    with cgutils.for_range(builder, times, intp=_INT):
        _loops(builder, rest, (builder.load(moving[0]), builder.load(moving[1])), body)
        for variable, stride in zip(moving, strides, strict=True):
            builder.store(_at(builder, builder.load(variable), stride), variable)


def _registers(builder: Builder, rows: int, columns: int) -> list[list[Value]]:
    """Variables of one vector each; the compiler keeps them in registers as long as there are enough."""
    return [[cgutils.alloca_once(builder, _VECTOR) for _ in range(columns)] for _ in range(rows)]


def _fill(builder: Builder, registers: Sequence[Value], value: Value) -> None:
    for register in registers:
        builder.store(value, register)


def _add_product(builder: Builder, register: Value, a: Value, b: Value) -> None:
    """``register += a b``, rounded once."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    fused = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    builder.store(builder.call(fused, [a, b, builder.load(register)]), register)


def _floats(builder: Builder, address: Value) -> Value:
    return builder.inttoptr(address, _FLOAT.as_pointer())


def _at(builder: Builder, place: Value, offset: Value) -> Value:
    return builder.gep(place, [ir.Constant(_INT, offset) if isinstance(offset, int) else offset])


def _load(builder: Builder, place: Value) -> Value:
    vector = builder.load(builder.bitcast(place, _VECTOR.as_pointer()))
    vector.align = 4
    return vector


def _store(builder: Builder, vector: Value, place: Value) -> None:
    builder.store(vector, builder.bitcast(place, _VECTOR.as_pointer()), align=4)


def _spread(builder: Builder, place: Value) -> Value:
    """The number at this place in every lane."""
    nothing, first = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_LANE, 0)
    one = builder.insert_element(nothing, builder.load(place), first)
    return builder.shuffle_vector(one, nothing, _lane_numbers([0] * LANES))


def _everywhere(builder: Builder, number: Value) -> Value:
    """An integer in every lane."""
    kind = ir.VectorType(_LANE, LANES)
    nothing = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(nothing, builder.trunc(number, _LANE), ir.Constant(_LANE, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(kind, [0] * LANES))


def _lanes_added(builder: Builder, vector: Value) -> Value:
    """The sum of a vector's lanes, in order."""
    lanes = [builder.extract_element(vector, ir.Constant(_LANE, lane)) for lane in range(LANES)]
    total = lanes[0]
    for lane in lanes[1:]:
        total = builder.fadd(total, lane)
    return total
