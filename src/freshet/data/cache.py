"""Decoded arrays kept as .npy files, because decoding some formats takes many seconds.

The store is optional: whatever goes wrong with it (no space, no rights, damaged, removed meanwhile) counts as a miss.
Entries are written to a temporary folder and renamed, and read only if every file has the recorded checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from freshet.data.dataset import Array

_VERSION = 1  # raise it when a reader's output changes: old entries are then never found
_MAX_ENTRIES = 4  # entries per data set; the oldest go first


def cache_dir() -> Path:
    """The user's cache folder for Freshet: FRESHET_CACHE, or the platform's usual place."""
    if chosen := os.environ.get("FRESHET_CACHE"):
        return Path(chosen).expanduser()
    import pooch

    return Path(pooch.os_cache("freshet"))


def fingerprint(paths: tuple[Path, ...], *options: Any) -> str:
    """A key that changes when a source file's size or time changes, or when another result is asked for."""
    digest = hashlib.sha256(json.dumps([_VERSION, *options]).encode())
    for path in paths:
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            stat = file.stat()
            digest.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def fetch(name: str, key: str) -> dict[str, Array] | None:
    """The stored arrays, or None if there are none that can be trusted."""
    folder = _folder(name, key)
    try:
        recorded = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        result = {}
        for part, checksum in recorded.items():
            data = np.load(folder / f"{part}.npy", allow_pickle=False)
            if _checksum(data) != checksum:
                return None
            result[part] = data
        return result or None
    except (OSError, ValueError, AttributeError, EOFError):
        return None


def store(name: str, key: str, arrays: dict[str, Array]) -> None:
    """Keep the arrays for the next load; never fails."""
    target = _folder(name, key)
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))
        for part, data in arrays.items():
            np.save(temporary / f"{part}.npy", data, allow_pickle=False)
        index = {part: _checksum(data) for part, data in arrays.items()}
        (temporary / "index.json").write_text(json.dumps(index), encoding="utf-8")
        if target.exists():  # a damaged entry, or another process was faster
            shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        _prune(name, target)
    except (OSError, ValueError):
        pass
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _folder(name: str, key: str) -> Path:
    return cache_dir() / "decoded" / f"{name}-{key}"


def _checksum(data: Array) -> str:
    """SHA-256 over type, shape and contents: about 0.1 s for 150 MB."""
    contiguous = np.ascontiguousarray(data)
    digest = hashlib.sha256(f"{contiguous.dtype.str}{contiguous.shape}".encode())
    digest.update(contiguous.data if contiguous.dtype.kind != "U" else contiguous.tobytes())
    return digest.hexdigest()


def _prune(name: str, newest: Path) -> None:
    entries = [p for p in newest.parent.glob(f"{name}-*") if len(p.name) == len(newest.name) and p != newest]
    entries.sort(key=lambda p: p.stat().st_mtime, reverse=True)
    for old in entries[_MAX_ENTRIES - 1 :]:
        shutil.rmtree(old, ignore_errors=True)
