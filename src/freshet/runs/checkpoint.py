"""Checkpoints: a tree of plain values and arrays as JSON + safetensors with checksums, written atomically.

    checkpoint/000007/state.json, arrays.safetensors, checksums.json

Nothing is unpickled. Two checkpoints are kept: if the newest is damaged, the one before it is used. Arrays are written
and read one by one, so no array is in memory twice.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freshet.core.saving import is_key, is_leaf, saving_problem
from freshet.errors import RunError
from freshet.files import open_regular, own_folder, read_regular, sync_folder, writing
from freshet.runs import segments
from freshet.runs.reader import CHECKPOINTS, EVENTS, METRICS

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


#: Format 1 stored all keys as strings and all tuples as lists.
FORMAT, READABLE_FORMATS = 2, (1, 2)
_ARRAY, _TUPLE, _PAIRS = "$array", "$tuple", "$pairs"
Tree = dict[str, Any]


def pack(tree: Tree) -> tuple[Any, dict[str, NDArray[Any] | LazyArray]]:
    """Split a tree into its JSON part and its arrays. An array that occurs twice is stored once.

    Raises a ``RunError`` that names the value that cannot be stored.
    """
    arrays: dict[str, NDArray[Any] | LazyArray] = {}
    names: dict[int, str] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, LazyArray) or (isinstance(value, np.ndarray) and is_leaf(value)):
            if id(value) not in names:
                names[id(value)] = f"a{len(arrays)}"
                arrays[names[id(value)]] = value
            return {_ARRAY: names[id(value)]}
        kind = type(value)
        if kind is dict:
            if all(type(key) is str and key[:1] != "$" for key in value):
                return {key: walk(item) for key, item in value.items()}
            return {_PAIRS: [[walk(key), walk(item)] for key, item in value.items()]}
        if kind is list:
            return [walk(item) for item in value]
        if kind is tuple:
            return {_TUPLE: [walk(item) for item in value]}
        if not is_leaf(value):
            raise TypeError(f"a {kind.__name__} cannot be stored")
        return value.item() if isinstance(value, np.generic) else value

    try:
        return walk(tree), arrays
    except TypeError as error:
        raise RunError(_blame(tree) or str(error)) from None


def _blame(tree: Any) -> str | None:
    """The value that cannot be stored. One in a device's memory is named as its rule names it (``local.memory``)."""

    def here(value: Any) -> Any:
        if type(value) is dict:
            return {key: here(item) for key, item in value.items()}
        return None if isinstance(value, LazyArray) else type(value)(map(here, value)) if type(value) is list else value

    tree = here(tree)
    devices = tree.get("devices", {})
    by_device = devices.get("memory") if type(devices) is dict else None
    memories = [*(by_device.values() if type(by_device) is dict else []), tree.get("memory")]
    found = (saving_problem(memory, "local.memory") for memory in memories)
    return next(filter(None, found), None) or saving_problem(tree, "the state")


def unpack(plain: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """The inverse of ``pack``; raises ``ValueError`` for a value that cannot be a key."""
    if isinstance(plain, list):
        return [unpack(item, arrays) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        ((tag, held),) = plain.items()
        if tag == _ARRAY:
            return arrays[held]
        if tag == _TUPLE:
            return tuple(unpack(item, arrays) for item in held)
        if tag == _PAIRS:
            return {_key(unpack(key, arrays)): unpack(item, arrays) for key, item in held}
    return {key: unpack(item, arrays) for key, item in plain.items()}


def _key(key: Any) -> Any:
    if not is_key(key):
        raise ValueError(f"{str(key)[:40]!r} is not a key")
    return key


def copy_arrays(tree: Any) -> Any:
    """Copy a tree so that its arrays are in memory and writable. An array that occurs twice is copied once."""
    copies: dict[int, NDArray[Any]] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, np.ndarray | LazyArray):
            if id(value) not in copies:
                copies[id(value)] = value.load() if isinstance(value, LazyArray) else np.array(value)
            return copies[id(value)]
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return type(value)(map(walk, value)) if type(value) in (list, tuple) else value

    return walk(tree)


def write(run: Path, tree: Tree) -> Path:
    """Add a checkpoint to a run directory and remove all but the newest two."""
    folder = run / CHECKPOINTS
    with writing(folder, f"fix this, then run: freshet resume {run}"):
        own_folder(folder)
        return _write_into(folder, tree)


def _write_into(folder: Path, tree: Tree) -> Path:
    for leftover in folder.glob(".writing-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    taken = _numbers(folder)
    number = taken[-1] + 1 if taken else 1
    temporary = folder / f".writing-{os.getpid()}"
    temporary.mkdir()
    plain, arrays = pack(tree)
    parts: dict[str, Iterator[Any]] = {
        "state.json": iter([json.dumps({"format": FORMAT, "state": plain}).encode()]),
        "arrays.safetensors": serialise(arrays),
    }
    try:
        sums = {name: _write(temporary / name, content) for name, content in parts.items()}
        _write(temporary / "checksums.json", iter([json.dumps(sums).encode()]))
        sync_folder(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # frees space on a full disk
        raise
    final = folder / f"{number:06d}"
    temporary.rename(final)
    sync_folder(folder)
    prune(folder.parent, 2)
    return final


def prune(run: Path, keep: int) -> None:
    """Remove all checkpoints but the ``keep`` newest."""
    folder = run / CHECKPOINTS
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for old in _numbers(folder)[:-keep] if folder.is_dir() else []:
        shutil.rmtree(folder / f"{old:06d}", ignore_errors=True)


def _write(path: Path, pieces: Iterator[Any]) -> str:
    """Write a file in parts, sync it to disk, and return its checksum."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


class LoadedCheckpoint(NamedTuple):
    """A checkpoint to resume from, and the newer ones that are damaged: what is wrong with each, and where it is."""

    tree: Tree
    problems: list[str]
    damaged: list[Path]

    def remove_damaged(self) -> None:
        """Remove the damaged checkpoints. Otherwise the next ``write`` would keep them and remove this one."""
        for path in self.damaged:
            shutil.rmtree(path, ignore_errors=True)


def read(run: Path) -> LoadedCheckpoint:
    """The newest checkpoint that is intact and matches the logs.

    Its arrays are read-only views of the file; ``copy_arrays`` makes them writable.
    """
    folder = run / CHECKPOINTS
    problems: list[str] = []
    damaged: list[Path] = []
    if folder.is_symlink():
        raise RunError(f"{folder} is a link; a checkpoint must be in the run directory itself")
    for number in reversed(_numbers(folder) if folder.is_dir() else []):
        path = folder / f"{number:06d}"
        try:
            tree = _read(path)
            _check_logs(run, tree["log"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError, IndexError) as error:
            problems.append(f"checkpoint {path.name} is damaged ({error}) and not used")
            damaged.append(path)
        else:
            return LoadedCheckpoint(tree, problems, damaged)
    detail = f" ({'; '.join(problems)})" if problems else ""
    remedy = "run it again; run.keep_checkpoint = true keeps one at the end (a grid keeps none otherwise)"
    raise RunError(f"{run} has no checkpoint to resume from{detail}; {remedy}")


def _read(path: Path) -> Tree:
    sums = json.loads(read_regular(path / "checksums.json", links=False))
    for name in ("state.json", "arrays.safetensors"):
        with open_regular(path / name, links=False) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sums[name]:
                raise ValueError(f"{name} does not match its checksum")
    document = json.loads(read_regular(path / "state.json", 1 << 32, links=False))
    if document["format"] not in READABLE_FORMATS:
        raise ValueError(f"format {document['format']} is not known")
    with open_regular(path / "arrays.safetensors", links=False) as file:
        tree: Tree = unpack(document["state"], views(file))
    return tree


def _check_logs(run: Path, log: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if the logs end before the checkpoint."""
    if not all(type(log[name]) is int and log[name] >= 0 for name in ("seq", "events", "metrics")):
        raise ValueError("it does not say where the logs ended")
    segments.check_position(run / EVENTS, log["events"], log["seq"])
    if (run / METRICS).stat().st_size < log["metrics"]:
        raise ValueError("metrics.jsonl was cut off before it")


def _numbers(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.name.isascii())
