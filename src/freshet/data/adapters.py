"""Adapters for user data: pairs of arrays, torch Datasets, and tables with named columns (Hugging Face ``datasets``).

Nothing here imports the libraries that the data come from.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from freshet.errors import DataError

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]
#: Rows of a table or Dataset to read at a time.
CHUNK_ROWS = 1000
#: Samples that are read twice to find out whether a Dataset draws anew each time.
READ_TWICE = 32
#: Names of a column of labels.
LABEL_NAMES = ("label", "labels", "y", "target", "targets")

#: The end of a sentence about a table with several columns, or about samples of several shapes.
_WHOLE = ', or give task="huggingface" if a Hugging Face model takes them all'
_PAD = '; all must have the same shape, or give collate="pad" or a function'


@contextmanager
def own_draws(seed: int | None = None) -> Iterator[None]:
    """Keep what the block draws apart: restore the global generators of Python, numpy and torch after it.

    With a seed, the block does not depend on their state either.
    """
    python, numpy, torch = random.getstate(), np.random.get_state(), sys.modules.get("torch")
    drawn = None if torch is None else torch.get_rng_state()
    if seed is not None:
        seed_generators(seed)
        if torch is not None:
            torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch is not None:
            torch.set_rng_state(drawn)


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python and numpy, from which a user's transforms may draw."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def differs_when_read_again(read: Callable[[], Any]) -> bool:
    """Whether ``read`` draws random numbers: it gives something else under another seed."""
    with own_draws(1):
        first = read()
    with own_draws(2):
        return bool(first != read())


class SampleSource(Protocol):
    """Samples that can be read by number."""

    @property
    def class_names(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def inputs(self, rows: Indices) -> Sequence[Any]:
        """Return the inputs of these samples."""

    def labels(self) -> Array:
        """Return the labels of all samples."""

    def column(self, name: str) -> Array:
        """Return another column, such as the user of each sample."""


@dataclass(frozen=True, eq=False)
class PairSource:
    """A torch ``Dataset`` or ``Subset``, or any other sequence of (x, y) pairs."""

    where: str
    items: Any
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.items)

    def inputs(self, rows: Indices) -> Sequence[Any]:
        return [self._pair(row)[0] for row in rows.tolist()]

    def labels(self) -> Array:
        """Return the list that most Datasets keep if it agrees with three samples, else read all samples."""
        known = stored_labels(self.items)
        if known is not None and all(
            np.array_equal(known[row], to_numpy(self._pair(row)[1])) for row in {0, len(self) // 2, len(self) - 1}
        ):
            return known
        return as_array(self.where, [to_numpy(self._pair(row)[1]) for row in range(len(self))])

    def column(self, name: str) -> Array:
        raise DataError(f"{self.where} data have no column {name!r}; give groups as an array with one entry per sample")

    def _pair(self, row: int) -> tuple[Any, Any]:
        sample = self.items[row]
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise DataError(f"{self.where} data set does not give (x, y) pairs")
        return sample[0], sample[1]


@dataclass(frozen=True, eq=False)
class TableSource:
    """A table with named columns: a Hugging Face ``datasets.Dataset``."""

    where: str
    table: Any
    x: str
    y: str

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(getattr(self.table.features.get(self.y), "names", None) or ())

    def __len__(self) -> int:
        return len(self.table)

    def inputs(self, rows: Indices) -> Sequence[Any]:
        found: Sequence[Any] = self._only(self.x)[rows.tolist()][self.x]
        return found

    def labels(self) -> Array:
        return self.column(self.y)

    def column(self, name: str) -> Array:
        if name not in self.table.column_names:
            raise DataError(f"{self.where} data have no column {name!r}; columns: {', '.join(self.table.column_names)}")
        return as_array(self.where, self._only(name)[:][name])

    def _only(self, name: str) -> Any:
        """Return the table with this column only, unless a user's transform may need the others."""
        custom = getattr(self.table, "format", {}).get("type") == "custom"
        return self.table if custom else self.table.select_columns([name])


def is_table(given: Any) -> bool:
    """Return whether this looks like a Hugging Face Dataset."""
    return all(hasattr(given, name) for name in ("column_names", "features", "select_columns"))


def without_loader(given: Any, collate: Any = None) -> tuple[Any, Any]:
    """Return the Dataset and the ``collate_fn`` of a DataLoader; other data unchanged.

    Freshet makes the batches, so a loader's batch size, order and workers do not count.
    """
    if not all(hasattr(given, name) for name in ("dataset", "collate_fn", "batch_sampler")):
        return given, collate
    own = given.collate_fn
    plain = getattr(own, "__name__", "") in ("default_collate", "default_convert")
    return given.dataset, collate if plain or collate is not None else own


def as_source(where: str, given: Any, x: str = "", y: str = "") -> SampleSource | None:
    """Wrap the given data as a source. Return None for a pair of arrays, which is already in memory."""
    given, _ = without_loader(given)
    if isinstance(given, tuple | list) and len(given) == 2:
        return None
    if isinstance(given, dict):
        raise DataError(f"{where} data are a dict of {', '.join(map(str, given))[:80]}; give one of these")
    if is_table(given):
        return TableSource(where, given, *_columns(where, given, x, y))
    if hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, str):
        return PairSource(where, given)
    kind = type(given).__name__
    raise DataError(f"{where} data are a {kind}; allowed: a pair (x, y), a torch Dataset or a Hugging Face Dataset")


def _columns(where: str, table: Any, x: str, y: str) -> tuple[str, str]:
    """Return the input and label columns: as named, or guessed if there is no doubt."""
    names = list(table.column_names)
    listed = ", ".join(names)
    if not y:
        encoded = [name for name in names if hasattr(table.features[name], "names")]
        guesses = encoded or [name for name in names if name in LABEL_NAMES]
        if len(guesses) != 1:
            raise DataError(f"{where} data have the columns {listed}; name the labels with data.label_column{_WHOLE}")
        y = guesses[0]
    rest = [name for name in names if name != y]
    if not x and len(rest) != 1:
        raise DataError(f"{where} data have the columns {listed}; name the inputs with data.input_column{_WHOLE}")
    x = x or rest[0]
    for key, name in (("data.input_column", x), ("data.label_column", y)):
        if name not in names:
            raise DataError(f"{where} data have no column {name!r} ({key}); columns: {listed}")
    return x, y


def draws_anew(source: SampleSource) -> bool:
    """Whether a Dataset's own transforms draw random numbers at each read of a sample."""
    rows = evenly_spaced(len(source), READ_TWICE)

    def read() -> list[tuple[tuple[int, ...], bytes]]:
        arrays = [as_array("", each) for each in source.inputs(rows)]
        return [(array.shape, b"" if array.dtype.kind == "O" else array.tobytes()) for array in arrays]

    return len(source) > 0 and differs_when_read_again(read)


def read_samples(where: str, given: Any, x: str = "", y: str = "") -> tuple[Array, Array, tuple[str, ...]]:
    """Read inputs, labels and class names into memory. A Dataset that draws gives the same samples every time."""
    with own_draws(0):
        return _read_samples(where, given, x, y)


def _read_samples(where: str, given: Any, x: str, y: str) -> tuple[Array, Array, tuple[str, ...]]:
    source = as_source(where, given, x, y)
    if source is None:
        return as_inputs(where, as_array(where, given[0])), as_labels(where, as_array(where, given[1])), ()
    if len(source) == 0:
        raise DataError(f"{where} set is empty; at least one sample is needed")
    rows = (np.arange(start, min(start + CHUNK_ROWS, len(source))) for start in range(0, len(source), CHUNK_ROWS))
    if isinstance(source, PairSource):  # reading x also reads y, and may be costly
        pairs = [source._pair(row) for row in range(len(source))]
        inputs = stack(where, [pair[0] for pair in pairs])
        return as_inputs(where, inputs), as_labels(where, as_array(where, [to_numpy(pair[1]) for pair in pairs])), ()
    parts = [stack(where, source.inputs(chunk)) for chunk in rows]
    if len({part.shape[1:] for part in parts}) > 1:
        raise DataError(f"{where} samples differ in shape{_PAD}")
    return as_inputs(where, np.concatenate(parts)), as_labels(where, source.labels()), source.class_names


def stored_labels(items: Any) -> Array | None:
    """Return the labels that a Dataset keeps as one list, as those of torchvision and torch do; else None."""
    if hasattr(items, "dataset") and hasattr(items, "indices"):  # a Subset
        inner = stored_labels(items.dataset)
        return None if inner is None else inner[np.asarray(items.indices, dtype=np.int64)]
    if getattr(items, "target_transform", None) is not None:
        return None
    tensors = getattr(items, "tensors", None)
    if isinstance(tensors, tuple) and len(tensors) == 2:
        return as_array("", tensors[1])
    for name in ("targets", "labels"):
        value = getattr(items, name, None)
        if value is not None and hasattr(value, "__len__") and len(value) == len(items):
            return as_array("", value)
    return None


def to_numpy(value: Any) -> Any:
    """Turn a tensor into an array; return anything else unchanged."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def stack(where: str, items: Sequence[Any]) -> Array:
    """Stack single samples into one array."""
    if hasattr(items, "detach"):
        return as_array(where, items)
    arrays = [as_array(where, item) for item in items]
    if len(items) and hasattr(items[0], "getbands"):  # Pillow images: (H, W) or (H, W, C)
        arrays = [a[None] if a.ndim == 2 else a.transpose(2, 0, 1) for a in arrays]
    if len({a.shape for a in arrays}) > 1:
        raise DataError(f"{where} samples differ in shape{_PAD}")
    return np.stack(arrays)


def as_array(where: str, value: Any) -> Array:
    try:
        return np.asarray(to_numpy(value))
    except ValueError as error:
        raise DataError(f"{where} samples cannot form one array ({error})") from error


def as_inputs(where: str, x: Array) -> Array:
    """Convert inputs to one of the three types of Freshet: uint8, int32 or float32."""
    if x.ndim == 0:
        raise DataError(f"{where} samples are a single number; an array with one row per sample is needed")
    if x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    if x.dtype.kind in "iu" and x.ndim == 2:
        if x.size and (x.min() < 0 or x.max() > np.iinfo(np.int32).max):
            raise DataError(f"{where} token ids run from {x.min()} to {x.max()}; allowed: 0 to 2147483647")
        return np.ascontiguousarray(x, dtype=np.int32)
    if x.dtype.kind in "USO":
        raise DataError(f"{where} samples have type {x.dtype}, perhaps texts; turn them into numbers (token ids) first")
    if x.dtype.kind != "f":
        raise DataError(f"{where} samples have type {x.dtype}; allowed: uint8 images, integer (N, length) ids, floats")
    with np.errstate(over="ignore"):  # a value too large for float32 becomes infinity, which check() names
        return np.ascontiguousarray(x, dtype=np.float32)


def as_labels(where: str, y: Array) -> Array:
    """Convert class labels and tokens to int64, real targets to float32."""
    if y.dtype.kind == "f":
        return np.ascontiguousarray(y, dtype=np.float32)
    if y.dtype.kind not in "iub" and y.size:
        raise DataError(f"{where} labels have type {y.dtype}; allowed: integers from 0, or real numbers for regression")
    return np.ascontiguousarray(y, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class LazyRows:
    """Inputs that stay in their source until a batch is read. ``rows[index]`` selects, ``read`` reads.

    Shape and type are those of the equivalent array, taken from the first sample. Every sample is checked when read.
    """

    where: str
    source: SampleSource
    index: Indices
    sample_shape: tuple[int, ...]
    dtype: np.dtype[Any]
    limit: int | None = None  # token ids are below this

    @staticmethod
    def of(where: str, source: SampleSource, limit: int | None) -> LazyRows:
        if len(source) == 0:
            raise DataError(f"{where} set is empty; at least one sample is needed")
        first = as_inputs(where, stack(where, source.inputs(np.zeros(1, np.int64))))
        return LazyRows(where, source, np.arange(len(source)), first.shape[1:], first.dtype, limit)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.index), *self.sample_shape)

    @property
    def ndim(self) -> int:
        return 1 + len(self.sample_shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def __getitem__(self, rows: Any) -> LazyRows:
        return LazyRows(self.where, self.source, self.index[rows], self.sample_shape, self.dtype, self.limit)

    def read(self, rows: Indices) -> Array:
        """Read these samples into memory."""
        x = as_inputs(self.where, stack(self.where, self.source.inputs(self.index[rows])))
        if x.shape[1:] != self.sample_shape or x.dtype != self.dtype:
            raise DataError(
                f"{self.where} samples differ: {self.dtype} {self.sample_shape} at first, {x.dtype} {x.shape[1:]} later"
            )
        bad = _bad_rows(x, self.limit)
        if len(bad):
            fault = "a token id outside the vocabulary" if x.dtype == np.int32 else "NaN or infinity"
            raise DataError(f"{self.where} sample {self.index[rows][bad[0]]} holds {fault}")
        return x


def _bad_rows(x: Array, limit: int | None) -> Indices:
    flat = x.reshape(len(x), -1)
    if x.dtype == np.float32:
        return np.flatnonzero(~np.isfinite(flat).all(axis=1))
    if x.dtype == np.int32 and limit is not None:
        return np.flatnonzero((flat >= limit).any(axis=1))
    return np.empty(0, np.int64)


def evenly_spaced(count: int, most: int) -> Indices:
    """Return up to ``most`` numbers, evenly spaced over 0..count-1."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))
