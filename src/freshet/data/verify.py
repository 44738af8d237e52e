"""Is this copy of a data set the published one? Counts, balance and checksums, as rows for a table."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

import numpy as np

from freshet.data import sources
from freshet.data.dataset import DataSet
from freshet.data.download import verify_file


@dataclass(frozen=True)
class Finding:
    """One line of the check: what was compared, what is published, what is here."""

    item: str
    expected: str
    found: str
    ok: bool


def verify(name: str, data_dir: str | os.PathLike[str] | None = None) -> list[Finding]:
    """Read the local copy afresh (no decoded cache, no network) and compare it with the published facts."""
    spec = sources.spec_of(name)
    rows: list[Finding] = []
    if not spec.built_in:
        found = sources.obtain(name, data_dir, download=False)
        full = f"{spec.counts[0][0]:,} + {spec.counts[0][1]:,} samples"  # beside a subset's title this shows the gap
        rows.append(Finding("copy", full, found.format.title, True))
        for path in found.paths:
            if checksum := found.format.checksums.get(path.name):
                ok = verify_file(path, checksum)
                rows.append(Finding(f"file {path.name}", checksum[:23], "the same" if ok else "differs", ok))
    data = sources.load(name, data_dir, download=False, any_size=True, use_cache=False)
    counts = (len(data.y_train), len(data.y_test))
    expected = min(spec.counts, key=lambda c: abs(c[0] - counts[0]))
    rows.append(_count("training samples", expected[0], counts[0]))
    rows.append(_count("test samples", expected[1], counts[1]))
    for part, y in (("training", data.y_train), ("test", data.y_test)):
        sizes = np.bincount(y, minlength=spec.classes)
        spread = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
        if spec.built_in:
            rows.append(Finding(f"{part} samples per class", "all classes", spread, bool(sizes.min() > 0)))
        else:
            each = (expected[0] if part == "training" else expected[1]) // spec.classes
            rows.append(Finding(f"{part} samples per class", str(each), spread, bool((sizes == each).all())))
    if spec.digest:
        here = digest(data)
        rows.append(Finding("contents (sha256)", spec.digest[:16], here[:16], here == spec.digest))
    return rows


def digest(data: DataSet) -> str:
    """SHA-256 over training samples and labels, then test samples and labels; independent of the file format."""
    total = hashlib.sha256()
    for array in (data.x_train, data.y_train, data.x_test, data.y_test):
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        total.update(little.data)
    return total.hexdigest()


def _count(item: str, expected: int, found: int) -> Finding:
    return Finding(item, f"{expected:,}", f"{found:,}", expected == found)
