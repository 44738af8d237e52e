"""Arrays in safetensors files that are written and read one by one, so that they are never in memory twice."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

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
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


@dataclass(frozen=True)
class Elsewhere:
    """An array that is not in memory: its shape and type, and how to get it when its turn comes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    load: Callable[[], NDArray[Any]]


def serialised(arrays: Mapping[str, NDArray[Any] | Elsewhere], notes: Mapping[str, str] | None = None) -> Iterator[Any]:
    """The bytes of a safetensors file, in pieces."""
    header: dict[str, Any] = {"__metadata__": dict(notes)} if notes else {}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + math.prod(array.shape) * array.dtype.itemsize
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for array in arrays.values():
        here = array.load() if isinstance(array, Elsewhere) else array
        yield np.ascontiguousarray(here).reshape(-1).view(np.uint8)


def contents(file: BinaryIO) -> tuple[dict[str, tuple[np.dtype[Any], tuple[int, ...]]], dict[str, str]]:
    """Type and shape of each array in a safetensors file, and its notes."""
    header, _ = _header(file)
    notes = header.pop("__metadata__", {})
    return {name: (_TYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in header.items()}, notes


def views(file: BinaryIO) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file, mapped into memory: read-only, and read when they are looked at."""
    header, place = _header(file)
    header.pop("__metadata__", None)
    ends = [entry["data_offsets"][1] for entry in header.values()]
    mapped = np.memmap(file, np.uint8, "r", offset=place) if any(ends) else np.empty(0, np.uint8)
    found = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        found[name] = mapped[start:end].view(_TYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The table of contents, and where the first array begins."""
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    header: dict[str, Any] = json.loads(file.read(size))
    return header, 8 + size
