"""Find, download, read and verify the data sets of the catalogue.

A data set comes from a given folder, the user's cache, a system copy, or a download of the official files.
``verify`` compares a local copy with the published counts and checksums.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import cast

import numpy as np

from freshet.data import cache
from freshet.data.catalogue import CATALOGUE, Format, ReadOptions, Spec
from freshet.data.dataset import Array, DataSet, check, stratified_indices
from freshet.data.download import download, verify_file
from freshet.data.leaf import is_leaf, read_leaf
from freshet.errors import ConfigError, DataError

SYSTEM_ROOTS = (Path("/usr/share/datasets"), Path("/usr/local/share/datasets"))  # Debian's dataset-* packages

Reader = Callable[[tuple[Path, ...], ReadOptions], dict[str, Array]]


@dataclass(frozen=True)
class LocalCopy:
    """A data set on this machine: its format, its files, and the source that holds them."""

    format: Format
    paths: tuple[Path, ...]
    source: str

    @property
    def place(self) -> Path:
        """The folder or archive to show to a user."""
        return self.paths[0] if len(self.paths) == 1 else self.paths[0].parent


@dataclass(frozen=True)
class DataSetInfo:
    """One line of ``freshet data list``."""

    name: str
    title: str
    kind: str
    classes: int
    train: int
    test: int
    built_in: bool
    found: LocalCopy | None  # None: built in, or not on this machine


def available(data_dir: str | os.PathLike[str] | None = None) -> list[DataSetInfo]:
    """Every data set that ``load`` knows, with its place on this machine."""
    rows = []
    for spec in CATALOGUE.values():
        found = None if spec.built_in else locate(spec.name, data_dir, partial_is_error=False)
        rows.append(DataSetInfo(spec.name, spec.title, spec.kind, spec.classes, *spec.counts[0], spec.built_in, found))
    return rows


def load(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    vocabulary: int = 20_000,
    length: int | None = None,
    any_size: bool = False,
    use_cache: bool = True,
) -> DataSet:
    """Return the data set ``name`` from the first source that has it.

    ``vocabulary`` and ``length`` (default: the data set's own) apply to text only. A copy with an unpublished number of
    samples is refused unless ``any_size`` is set, so that no run trains on a truncated file by accident.
    """
    if is_leaf(name):
        return check(read_leaf(name, data_dir, use_cache=use_cache))
    spec = find_spec(name)
    ids = spec.token_ids(vocabulary)
    options = ReadOptions(spec.classes) if ids is None else ReadOptions(spec.classes, ids, length or spec.length)
    if spec.built_in:
        return check(_assemble(spec, find_reader(spec.formats[0])((), options), options))
    found = obtain(name, data_dir, download=download)
    dataset = check(_assemble(spec, _read_arrays(spec, found, options, use_cache), options))
    counts = (len(dataset.y_train), len(dataset.y_test))
    if not any_size and spec.kind == "characters":  # the length of a window decides the number of samples
        _check_files(spec, found)
    elif not any_size and counts not in spec.counts:
        allowed = " or ".join(f"{a} + {b}" for a, b in spec.counts)
        raise DataError(
            f"{found.place} holds {counts[0]} + {counts[1]} samples; {spec.title} has {allowed}; get it again"
        )
    return dataset


def _check_files(spec: Spec, found: LocalCopy) -> None:
    for path in found.paths:
        checksum = found.format.checksums.get(path.name)
        if checksum and not verify_file(path, checksum):
            raise DataError(f"{path} is not the published file of {spec.title}; get it again")


def obtain(name: str, data_dir: str | os.PathLike[str] | None = None, *, download: bool = True) -> LocalCopy:
    """Locate the files of a data set. If no local source has them, download the official archive to the cache."""
    spec = find_spec(name)
    found = locate(name, data_dir)
    if found is None and download:
        _download(spec)
        found = locate(name, data_dir)
    if found is None:
        looked = ", ".join(dict.fromkeys(str(root) for root, _ in _roots(data_dir)))
        raise DataError(
            f"{spec.name} is not on this machine (looked in {looked}); run 'freshet data get {spec.name}', or name the "
            "folder that has it with --data-dir or FRESHET_DATA"
        )
    return found


def locate(
    name: str, data_dir: str | os.PathLike[str] | None = None, *, partial_is_error: bool = True
) -> LocalCopy | None:
    """Return the first local source that has every file of one format, or None. Uses no network.

    A given folder with only some of the files is an error: the next source would silently supply another copy.
    """
    spec = find_spec(name)
    if data_dir is not None and not Path(data_dir).expanduser().is_dir():
        raise DataError(f"the data folder {data_dir} does not exist or is not a folder")
    for root, source in _roots(data_dir):
        partial: str | None = None
        for folder in _candidates(root, spec):
            for form in spec.formats:
                paths = tuple(_packed_or_plain(folder / need) for need in form.needs)
                here = [path for path in paths if path.exists()]
                if paths and len(here) == len(paths):
                    return LocalCopy(form, paths, source)
                if here:
                    lacks = ", ".join(path.name for path in paths if path not in here)
                    partial = f"{folder} has {here[0].name} but lacks {lacks}, which {spec.title} needs too"
        if partial and partial_is_error and source in ("--data-dir", "FRESHET_DATA"):
            raise DataError(partial)
    return None


def find_spec(name: str) -> Spec:
    """Return the catalogue's entry. The error for an unknown name suggests the nearest known one."""
    key = name.lower().replace("_", "-")
    if key in CATALOGUE:
        return CATALOGUE[key]
    if is_leaf(name):
        raise ConfigError("data.name", f"{name} is a folder of yours, which is read as it is")
    near = get_close_matches(key, CATALOGUE, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError("data.name", f"{name!r} is unknown; allowed: {', '.join(CATALOGUE)}{hint}")


def find_reader(form: Format) -> Reader:
    """Import the reader that a format names."""
    module, _, function = form.reader.partition(":")
    return cast(Reader, getattr(import_module(module), function))


def _roots(data_dir: str | os.PathLike[str] | None) -> Iterator[tuple[Path, str]]:
    if data_dir is not None:
        yield Path(data_dir).expanduser(), "--data-dir"
    elif given := os.environ.get("FRESHET_DATA"):
        yield Path(given).expanduser(), "FRESHET_DATA"
    yield cache.cache_dir(), "cache"
    for root in SYSTEM_ROOTS:
        yield root, "system"


def _candidates(root: Path, spec: Spec) -> Iterator[Path]:
    """The data set's folder inside the root, the root, and the root's parent if the root is an unpacked release."""
    folders = [*(root / alias for alias in spec.folders), root]
    if any(form.needs == (root.name,) for form in spec.formats):
        folders.append(root.parent)
    yield from (folder for folder in folders if folder.is_dir())


def _packed_or_plain(path: Path) -> Path:
    """The .gz file, or its unpacked form if only that exists."""
    single = path.suffix == ".gz" and not path.name.endswith(".tar.gz")
    plain = path.with_suffix("") if single else path
    return path if path.exists() or not plain.exists() else plain


def _download(spec: Spec) -> None:
    for remote in spec.remotes:
        download(spec.name, remote, cache.cache_dir() / spec.name)


def _read_arrays(spec: Spec, found: LocalCopy, options: ReadOptions, use_cache: bool) -> dict[str, Array]:
    read = find_reader(found.format)
    if not (use_cache and found.format.slow):
        return read(found.paths, options)
    key = cache.fingerprint(found.paths, spec.name, found.format.title, options.vocabulary, options.length)
    arrays = cache.fetch(spec.name, key)
    if arrays is None:
        arrays = read(found.paths, options)
        cache.store(spec.name, key, arrays)
    return arrays


def _assemble(spec: Spec, arrays: dict[str, Array], options: ReadOptions) -> DataSet:
    names = arrays.get("class_names")
    class_names = spec.class_names if names is None else tuple(str(n) for n in names)
    return DataSet(
        name=spec.name,
        x_train=arrays["x_train"],
        y_train=arrays["y_train"],
        x_test=arrays["x_test"],
        y_test=arrays["y_test"],
        classes=spec.classes,
        class_names=class_names if len(class_names) == spec.classes else (),
        mean=spec.mean,
        std=spec.std,
        pad_id=0 if spec.kind == "text" else None,
        vocabulary=options.vocabulary or None,
        groups=arrays.get("groups_train"),
        full_counts=(len(arrays["y_train"]), len(arrays["y_test"])) if spec.kind == "characters" else spec.counts[0],
        test_groups=arrays.get("groups_test"),
    )


@dataclass(frozen=True)
class CheckRow:
    """One comparison of a local copy with the published data set."""

    item: str
    expected: str
    found: str
    ok: bool


def verify(name: str, data_dir: str | os.PathLike[str] | None = None) -> list[CheckRow]:
    """Read the local copy again, without cache and network, and compare it with the published facts."""
    spec = find_spec(name)
    rows: list[CheckRow] = []
    if not spec.built_in:
        found = obtain(name, data_dir, download=False)
        full = f"{spec.counts[0][0]:,} + {spec.counts[0][1]:,} samples"  # beside a subset's title this shows the gap
        rows.append(CheckRow("copy", full, found.format.title, True))
        for path in found.paths:
            if checksum := found.format.checksums.get(path.name):
                ok = verify_file(path, checksum)
                rows.append(CheckRow(f"file {path.name}", checksum[:23], "the same" if ok else "differs", ok))
    data = load(name, data_dir, download=False, any_size=True, use_cache=False)
    counts = (len(data.y_train), len(data.y_test))
    expected = min(spec.counts, key=lambda c: abs(c[0] - counts[0]))
    rows.append(_count("training samples", expected[0], counts[0]))
    rows.append(_count("test samples", expected[1], counts[1]))
    for part, y, count in (("training", data.y_train, expected[0]), ("test", data.y_test, expected[1])):
        if not data.has_classes:
            break
        sizes = np.bincount(y, minlength=spec.classes)
        spread = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
        each = count // spec.classes
        ok = bool((sizes == each).all()) if spec.balanced else bool(sizes.min() > 0)
        rows.append(CheckRow(f"{part} samples per class", str(each) if spec.balanced else "all classes", spread, ok))
    if spec.digest:
        here = digest(data)
        rows.append(CheckRow("contents (sha256)", spec.digest[:16], here[:16], here == spec.digest))
    return rows


def digest(data: DataSet) -> str:
    """SHA-256 over training samples and labels, then test samples and labels. The file format does not matter."""
    total = hashlib.sha256()
    for array in (data.x_train, data.y_train, data.x_test, data.y_test):
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        total.update(little.data)
    return total.hexdigest()


def _count(item: str, expected: int, found: int) -> CheckRow:
    return CheckRow(item, f"{expected:,}", f"{found:,}", expected == found)


def read_digits(_: tuple[Path, ...], options: ReadOptions) -> dict[str, Array]:
    """1,797 digits as float32 in 0..1. A fixed stratified fifth is the test set."""
    from sklearn.datasets import load_digits

    bunch = load_digits(n_class=options.classes)
    x = np.ascontiguousarray(bunch.images[:, None] / 16.0, dtype=np.float32)
    y = bunch.target.astype(np.int64)
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([0])))
    test = stratified_indices(y, len(y) // 5, rng)
    train = np.setdiff1d(np.arange(len(y)), test)
    return {"x_train": x[train], "y_train": y[train], "x_test": x[test], "y_test": y[test]}


def read_moved_digits(files: tuple[Path, ...], options: ReadOptions) -> dict[str, Array]:
    """27 versions of each training digit: moved by -1, 0 or 1 pixel both ways, at full, 0.8 and 0.6 of its contrast.

    The test set is that of the digits. There are enough samples for a fleet of ten thousand devices.
    """
    found = read_digits(files, options)
    x = found["x_train"]
    wide = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    height, width = x.shape[2:]
    moved = [wide[:, :, row : row + height, column : column + width] for row in range(3) for column in range(3)]
    versions = [np.float32(contrast) * each for contrast in (1.0, 0.8, 0.6) for each in moved]
    return found | {"x_train": np.concatenate(versions), "y_train": np.tile(found["y_train"], len(versions))}
