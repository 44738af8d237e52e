"""Checkpoints: a tree of plain values and arrays as JSON + safetensors with checksums, written whole or not at all.

    checkpoint/000007/state.json, arrays.safetensors, checksums.json

Nothing is unpickled. A damaged checkpoint is noticed and the one before it is used; two are kept.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from freshet.errors import RunError
from freshet.runs.writer import sync_folder

FORMAT = 1
_ARRAY = "$array"
Tree = dict[str, Any]


def pack(tree: Tree) -> tuple[Any, dict[str, np.ndarray[Any, Any]]]:
    """Separate a tree into what JSON holds and the arrays; an array that occurs twice is stored once."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    names: dict[int, str] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            if id(value) not in names:
                names[id(value)] = f"a{len(arrays)}"
                arrays[names[id(value)]] = np.ascontiguousarray(value).reshape(value.shape)
            return {_ARRAY: names[id(value)]}
        if isinstance(value, dict):
            return {str(key): walk(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [walk(item) for item in value]
        return value.item() if isinstance(value, np.generic) else value

    return walk(tree), arrays


def unpack(plain: Any, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    """The inverse of ``pack`` (tuples come back as lists, keys as strings)."""
    if isinstance(plain, dict):
        if set(plain) == {_ARRAY}:
            return arrays[plain[_ARRAY]]
        return {key: unpack(item, arrays) for key, item in plain.items()}
    return [unpack(item, arrays) for item in plain] if isinstance(plain, list) else plain


def write(run: Path, tree: Tree) -> Path:
    """Add a checkpoint to a run directory and drop all but the newest two."""
    folder = run / "checkpoint"
    folder.mkdir(exist_ok=True)
    taken = _numbers(folder)
    number = taken[-1] + 1 if taken else 1
    temporary = folder / f".writing-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    plain, arrays = pack(tree)
    parts = {
        "state.json": json.dumps({"format": FORMAT, "state": plain}).encode(),
        "arrays.safetensors": save(arrays),
    }
    parts["checksums.json"] = json.dumps({name: _digest(content) for name, content in parts.items()}).encode()
    for name, content in parts.items():
        with (temporary / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(temporary)
    final = folder / f"{number:06d}"
    temporary.rename(final)
    sync_folder(folder)
    for old in taken[:-1]:
        shutil.rmtree(folder / f"{old:06d}", ignore_errors=True)
    return final


def read(run: Path) -> tuple[Tree, list[str]]:
    """The newest checkpoint that is whole, and what was wrong with newer ones."""
    folder = run / "checkpoint"
    problems: list[str] = []
    for number in reversed(_numbers(folder) if folder.is_dir() else []):
        path = folder / f"{number:06d}"
        try:
            return _read(path), problems
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"checkpoint {path.name} is damaged ({error}) and not used")
    detail = f" ({'; '.join(problems)})" if problems else ""
    raise RunError(f"{run} has no checkpoint to resume from{detail}; run it again with --config {run / 'config.toml'}")


def _read(path: Path) -> Tree:
    sums = json.loads((path / "checksums.json").read_bytes())
    contents = {}
    for name in ("state.json", "arrays.safetensors"):
        contents[name] = (path / name).read_bytes()
        if _digest(contents[name]) != sums[name]:
            raise ValueError(f"{name} does not match its checksum")
    document = json.loads(contents["state.json"])
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']} is not known")
    tree: Tree = unpack(document["state"], load(contents["arrays.safetensors"]))
    return tree


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _numbers(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
