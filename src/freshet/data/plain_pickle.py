"""Read a pickle of plain data (dicts, lists, numbers, strings, numeric numpy arrays) without executing it.

The CIFAR python archives are pickles, and unpickling runs code from the file. This small interpreter walks the
opcodes with ``pickletools`` and builds values only from a fixed list. It never imports, looks up or calls anything
that a file names. It never hashes, compares or prints nested values, which a few bytes can make endless. The size of
the file bounds what it builds.
"""

from __future__ import annotations

import pickletools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from freshet.errors import DataError

_MARK = object()
_CODE = re.compile(r"[<>=|]?[biuf][1248]")
_SYMBOLS = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
    **{(f"numpy.{core}.multiarray", "_reconstruct"): "reconstruct" for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): "frombuffer" for core in ("core", "_core")},
}
_LITERALS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_INTEGERS = {"BININT", "BININT1", "BININT2", "LONG1", "INT"}
_BYTES = {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
_PY2_STRINGS = {"BINSTRING", "SHORT_BINSTRING"}  # Python 2's str: bytes, which pickletools shows as latin-1
_TEXTS = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_FIXED_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_SCALARS = (str, bytes, int, float, type(None))
#: Deepest nesting of containers. The files in use have four levels.
MAX_DEPTH = 10
#: The most instructions. The largest file in use, CIFAR-100's, has about 300,000.
MAX_STEPS = 1_000_000
#: Bytes of an empty container or a tuple, and the bytes that even a small file may use.
_CONTAINER_BYTES, _FREE_BYTES = 64, 1 << 20


@dataclass(frozen=True)
class _Symbol:
    kind: str


@dataclass
class _DType:
    code: str
    order: str = "|"

    def numpy(self) -> np.dtype[Any]:
        return np.dtype(self.code if self.code[0] in "<>=|" else self.order.replace("|", "=") + self.code)


@dataclass
class _Array:
    value: np.ndarray[Any, Any] | None = None


def load_plain(data: bytes) -> Any:
    """Return the value in the pickle. Raise DataError if the file asks for anything but plain data."""
    try:
        machine = _Machine(len(data))
        value = machine.run(data)
        _check_nesting(value, machine.steps)
        return _resolve(value)
    except DataError:
        raise
    except Exception as error:  # untrusted bytes break the parser in many ways; all mean the same to the user
        problem = f"{type(error).__name__}: {str(error)[:160]}"
        raise DataError(f"the pickle is damaged or not plain data ({problem})") from error


class _Machine:
    """A pickle stack machine that knows data and nothing else."""

    def __init__(self, size: int) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.steps = 0
        self.budget = 4 * size  # bytes that conversions may create, so that a tiny file cannot fill the memory
        self.containers = 16 * size + _FREE_BYTES  # the same for containers

    def run(self, data: bytes) -> Any:
        for opcode, arg, _ in pickletools.genops(data):
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise DataError(f"the pickle has more than {MAX_STEPS:,} instructions; it is refused")
            if opcode.name == "STOP":
                (value,) = self.stack
                return value
            self.step(opcode.name, arg)
        raise DataError("the pickle is truncated")

    def step(self, name: str, arg: Any) -> None:
        stack = self.stack
        if name in ("PROTO", "FRAME"):
            return
        if name in _EMPTY or name == "TUPLE" or name in _FIXED_TUPLES:
            self.containers -= _CONTAINER_BYTES
            if self.containers < 0:
                raise DataError("the pickle holds far more containers than data; it is refused")
        if name in _LITERALS:
            stack.append(_LITERALS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _INTEGERS or name in _TEXTS or name == "BINFLOAT":
            stack.append(arg)
        elif name in _BYTES:
            stack.append(bytes(arg))
        elif name in _PY2_STRINGS:
            stack.append(arg.encode("latin-1"))
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[arg] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[arg])
        elif name == "TUPLE":
            items = self.pop_to_mark()
            stack.append(tuple(items))
        elif name in _FIXED_TUPLES:
            items = [stack.pop() for _ in range(_FIXED_TUPLES[name])]
            stack.append(tuple(reversed(items)))
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else self.pop_to_mark()
            _expect(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else self.pop_to_mark()
            for key in items[::2]:
                if not isinstance(key, _SCALARS):  # hashing nested values can take forever
                    raise DataError(f"the pickle has a {type(key).__name__} as a key; it is refused")
            _expect(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
        elif name == "GLOBAL":
            stack.append(_symbol(*arg.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_symbol(module, attribute))
        elif name == "REDUCE":
            args, function = stack.pop(), stack.pop()
            stack.append(self.reduce(_expect(function, _Symbol).kind, _expect(args, tuple)))
        elif name == "BUILD":
            state = _expect(stack.pop(), tuple)
            _build(stack[-1], state)
        else:
            raise DataError(f"the pickle uses the opcode {name}, which plain data never need; it is refused")

    def pop_to_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise DataError("the pickle is damaged (no mark on the stack)")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def spend(self, size: int) -> None:
        self.budget -= size
        if self.budget < 0:
            raise DataError("the pickle repeats data far beyond its size; it is refused")

    def reduce(self, kind: str, args: tuple[Any, ...]) -> Any:
        if kind == "reconstruct":
            return _Array()
        if kind == "dtype":
            return _DType(_code(args[0]))
        if kind == "encode" and args[1:] in (("latin1",), ("latin-1",)):
            text = _expect(args[0], str)
            self.spend(len(text))
            return text.encode("latin-1")
        if kind == "frombuffer" and len(args) == 4:
            buffer, dtype, shape, order = args
            return _Array(_array(buffer, dtype, shape, order == "F"))
        raise DataError(f"the pickle calls {kind} in a way that plain data never need; it is refused")


def _symbol(module: Any, attribute: Any) -> _Symbol:
    kind = _SYMBOLS.get((module, attribute)) if isinstance(module, str) and isinstance(attribute, str) else None
    if kind is None:
        asked = f"{_for_message(module)}.{_for_message(attribute)}"
        raise DataError(f"the pickle asks for {asked}, which is not plain data; it is refused, not run")
    return _Symbol(kind)


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise DataError(f"the pickle is damaged (found {type(value).__name__} instead of {kind.__name__})")
    return value


def _code(value: Any) -> str:
    text = value.decode("ascii") if isinstance(value, bytes) else value
    if not isinstance(text, str) or not _CODE.fullmatch(text):
        raise DataError(f"the pickle holds an array of type {_for_message(text)!r}; only numbers are allowed")
    return text


def _build(target: Any, state: tuple[Any, ...]) -> None:
    if isinstance(target, _DType):
        order = state[1].decode("ascii") if isinstance(state[1], bytes) else state[1]
        if not isinstance(order, str) or order not in ("<", ">", "=", "|"):
            raise DataError(f"the pickle holds an array with byte order {_for_message(order)!r}")
        target.order = order
    elif isinstance(target, _Array):
        _, shape, dtype, fortran, raw = state
        target.value = _array(raw, dtype, shape, bool(fortran))
    else:
        raise DataError(f"the pickle sets the state of a {type(target).__name__}; plain data never need that")


def _array(raw: Any, dtype: Any, shape: Any, fortran: bool) -> np.ndarray[Any, Any]:
    kind = _expect(dtype, _DType).numpy()
    flat = np.frombuffer(_expect(raw, bytes), kind)
    if not all(isinstance(n, int) and n >= 0 for n in _expect(shape, tuple)):
        raise DataError("the pickle holds an array with an impossible shape")
    return flat.reshape(shape, order="F" if fortran else "C")


def _for_message(value: Any) -> str:
    """Return a short text for a message: the text cut off, or the name of the type."""
    return value[:80] if isinstance(value, str) else f"a {type(value).__name__}"


def _check_nesting(value: Any, steps: int) -> None:
    """Raise if the value is nested too deeply, or larger than its file when repeated items count each time."""
    level, left = [value], steps
    for _ in range(MAX_DEPTH):
        inside: list[Any] = []
        for item in level:
            if isinstance(item, dict | list | tuple):
                left -= len(item)
                if left < 0:
                    raise DataError("the pickle repeats data far beyond its size; it is refused")
                inside += item.values() if isinstance(item, dict) else item
        level = inside
        if not level:
            return
    raise DataError(f"the pickle is nested more than {MAX_DEPTH} deep; it is refused")


def _resolve(value: Any) -> Any:
    """Replace the placeholders by arrays, at the top and in a dict's values. No batch nests them deeper."""
    if isinstance(value, _Array):
        if value.value is None:
            raise DataError("the pickle holds an array without contents")
        return value.value
    if isinstance(value, (_Symbol, _DType)):
        raise DataError("the pickle holds a bare function or type; only plain data are allowed")
    if isinstance(value, dict):
        return {k: _resolve(v) if isinstance(v, _Array) else v for k, v in value.items()}
    return value
