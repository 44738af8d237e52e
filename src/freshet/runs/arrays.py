"""Write and read the arrays of a safetensors file one by one, so that no array is in memory twice."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

_TYPES = {
    name: np.dtype(code)
    for name, code in {
        "BOOL": "|b1",
        "U8": "|u1",
        "I8": "|i1",
        "U16": "<u2",
        "I16": "<i2",
        "U32": "<u4",
        "I32": "<i4",
        "I64": "<i8",
        "U64": "<u8",
        "F16": "<f2",
        "F32": "<f4",
        "F64": "<f8",
    }.items()
}
_NOTES = "__metadata__"
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


@dataclass(frozen=True)
class LazyArray:
    """An array that is not in memory: its shape, its type, and a function that loads it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    load: Callable[[], NDArray[Any]]


def serialise(arrays: Mapping[str, NDArray[Any] | LazyArray], notes: Mapping[str, str] | None = None) -> Iterator[Any]:
    """The bytes of a safetensors file, in parts."""
    header: dict[str, Any] = {_NOTES: dict(notes)} if notes else {}
    end = 0
    for name, array in arrays.items():
        if array.dtype not in _NAMES or name == _NOTES:
            raise ValueError(f"array {name!r} of type {array.dtype} cannot be stored")
        start, end = end, end + math.prod(array.shape) * array.dtype.itemsize
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for array in arrays.values():
        loaded = array.load() if isinstance(array, LazyArray) else array
        yield np.ascontiguousarray(loaded).reshape(-1).view(np.uint8)


class StoredArray(NamedTuple):
    """An array in a file: its type, its shape, and the range of its bytes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    end: int


def contents(file: BinaryIO) -> tuple[dict[str, StoredArray], dict[str, str]]:
    """The arrays of a safetensors file and its notes; raises ``ValueError`` if the header is not valid."""
    file.seek(0, 2)
    length = file.tell()
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    if size > length - 8:
        raise ValueError("the header of its arrays is longer than the file")
    try:
        header = json.loads(file.read(size))
        notes = header.pop(_NOTES, {})
        found = {str(name): _parse_entry(entry, 8 + size, length) for name, entry in header.items()}
        return found, {str(name): str(note) for name, note in notes.items()}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"the header of its arrays is not valid ({error})") from None


def _parse_entry(entry: Mapping[str, Any], place: int, length: int) -> StoredArray:
    dtype, shape, (start, end) = _TYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError("a size is not a number")
    if end - start != math.prod(shape) * dtype.itemsize or place + end > length:
        raise ValueError("an array does not match its range of bytes")
    return StoredArray(dtype, shape, place + start, place + end)


def views(file: BinaryIO) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file as read-only memory maps."""
    found, _ = contents(file)
    mapped = np.memmap(file, np.uint8, "r") if found else np.empty(0, np.uint8)
    return {name: mapped[a.start : a.end].view(a.dtype).reshape(a.shape) for name, a in found.items()}
