"""Samples of any form: dicts, tuples, single arrays, nested ones, with entries of variable length.

``Columns`` keeps each entry of all samples in one flat array, with offsets where lengths differ, so that samples take
no more memory than their numbers and all workers share them. ``Items`` keeps samples as they are: texts, Pillow images,
or a Dataset that is read batch by batch. A batch is padded to its longest sample, or made by a user's ``collate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from freshet.data.adapters import (
    CHUNK_ROWS,
    LABEL_NAMES,
    READ_TWICE,
    differs_when_read_again,
    evenly_spaced,
    is_table,
    own_draws,
    to_numpy,
)
from freshet.errors import DataError

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]
#: Makes a batch from a list of samples, as a DataLoader's ``collate_fn`` does.
Collate = Callable[[list[Any]], Any]
#: The place of every entry in a sample: a number, or a dict or tuple of forms.
Form = Any
#: The target of entries that fill up a shorter sample. Losses ignore it.
IGNORED = -100
_TARGETS = (*LABEL_NAMES, "label_ids")


class NotColumnar(DataError):
    """Samples that only a user's ``collate`` can make a batch of."""


# ---- the form of a sample


def form_of(sample: Any) -> Form:
    """Number the entries of a sample in the order in which ``flatten`` returns them."""
    count = iter(range(2**31))

    def number(part: Any) -> Form:
        if isinstance(part, Mapping):
            return {str(key): number(value) for key, value in part.items()}
        if isinstance(part, tuple) or (isinstance(part, list) and not _is_numbers(part)):
            return tuple(number(value) for value in part)
        return next(count)

    return number(sample)


def _is_numbers(part: list[Any]) -> bool:
    """Whether a list holds plain numbers, perhaps in lists, so that it is one entry and not several."""
    return all(_is_numbers(each) if isinstance(each, list) else isinstance(each, int | float) for each in part)


def flatten(sample: Any, form: Form) -> list[Any]:
    """The entries of a sample. Raises ``ValueError`` if it has another form."""
    if isinstance(form, int):
        return [sample]
    if isinstance(form, dict):
        if not isinstance(sample, Mapping) or {str(key) for key in sample} != set(form):
            raise ValueError(f"has {_describe(sample)} where others have {', '.join(form)}")
        return [entry for key in form for entry in flatten(sample[key], form[key])]
    if not isinstance(sample, tuple | list) or len(sample) != len(form):
        raise ValueError(f"has {_describe(sample)} where others have {len(form)} parts")
    return [entry for part, inner in zip(sample, form, strict=True) for entry in flatten(part, inner)]


def rebuild(form: Form, entries: Sequence[Any]) -> Any:
    """The inverse of ``flatten``."""
    if isinstance(form, int):
        return entries[form]
    if isinstance(form, dict):
        return {key: rebuild(inner, entries) for key, inner in form.items()}
    return tuple(rebuild(inner, entries) for inner in form)


def _describe(sample: Any) -> str:
    if isinstance(sample, Mapping):
        return ", ".join(str(key) for key in sample)
    return f"{len(sample)} parts" if isinstance(sample, tuple | list) else type(sample).__name__


def _names(form: Form, name: str = "") -> list[str]:
    """The name of each entry: the key that leads to it, or its number in a tuple."""
    if isinstance(form, int):
        return [name]
    parts = form.items() if isinstance(form, dict) else enumerate(form)
    return [found for key, inner in parts for found in _names(inner, str(key))]


def target_entry(form: Form, name: str = "") -> int | None:
    """The number of the entry that holds the target: a named one, the last part of a tuple, or None."""
    if isinstance(form, dict):
        known = [key for key in ((name,) if name else _TARGETS) if isinstance(form.get(key), int)]
        return form[known[0]] if known else None
    return form[-1] if isinstance(form, tuple) and len(form) > 1 and isinstance(form[-1], int) else None


# ---- compact storage


@dataclass(frozen=True, eq=False)
class SampleColumn:
    """One entry of all samples: (N, ...), or (sum of lengths, ...) with offsets if lengths differ."""

    values: Array
    offsets: Indices | None
    #: What a batch holds: bool, uint8, int64 or float32.
    dtype: np.dtype[Any]
    #: What a sample held: a tensor, an array, a list or a number. A user's ``collate`` gets the same.
    given: str
    #: Fills up shorter samples.
    fill: int = 0

    def batch(self, rows: Indices) -> Array:
        """This entry of these samples, padded to the longest."""
        if self.offsets is None:
            return self.values[rows].astype(self.dtype)
        starts, ends = self.offsets[rows], self.offsets[rows + 1]
        lengths = ends - starts
        out = np.full((len(rows), int(lengths.max()), *self.values.shape[1:]), self.fill, self.dtype)
        parts = [self.values[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        out[np.arange(out.shape[1]) < lengths[:, None]] = np.concatenate(parts)
        return out

    def entry(self, row: int) -> Any:
        """This entry of one sample, in the form in which it was given."""
        if self.offsets is None:
            value = self.values[row].astype(self.dtype)
        else:
            value = self.values[self.offsets[row] : self.offsets[row + 1]].astype(self.dtype)
        if self.given == "tensor":
            import torch

            return torch.from_numpy(np.array(value))
        return value if self.given == "array" else value.tolist()


@dataclass(frozen=True, eq=False)
class Columns:
    """Samples in memory, entry by entry."""

    form: Form
    columns: tuple[SampleColumn, ...]
    count: int

    def __len__(self) -> int:
        return self.count

    def samples(self, rows: Indices) -> list[Any]:
        return [rebuild(self.form, [column.entry(row) for column in self.columns]) for row in rows.tolist()]

    def batch(self, rows: Indices) -> Any:
        """A padded batch. Padded ``input_ids`` get an ``attention_mask``, which Hugging Face models need."""
        batch = rebuild(self.form, [column.batch(rows) for column in self.columns])
        ids = self.form.get("input_ids") if isinstance(self.form, dict) else None
        if isinstance(ids, int) and "attention_mask" not in batch:
            offsets = self.columns[ids].offsets
            if offsets is not None:
                lengths = (offsets[rows + 1] - offsets[rows])[:, None]
                batch["attention_mask"] = (np.arange(batch["input_ids"].shape[1]) < lengths).astype(np.int64)
        return batch

    def content(self) -> Iterator[Any]:
        yield [str(self.form), self.count]
        for column in self.columns:
            yield column.values
            yield [] if column.offsets is None else column.offsets


@dataclass(frozen=True, eq=False)
class Items:
    """Samples in the object that the user gave."""

    where: str
    items: Any

    def __len__(self) -> int:
        return len(self.items)

    def samples(self, rows: Indices) -> list[Any]:
        return (
            _read_table(self.items, rows.tolist()) if is_table(self.items) else [self.items[k] for k in rows.tolist()]
        )

    def batch(self, rows: Indices) -> Any:
        return read_columns(self.where, self.samples(rows)).batch(np.arange(len(rows)))

    def content(self) -> Iterator[Any]:
        """An even sample. A source that draws anew each time has no content."""
        yield len(self)
        if not self.draws_anew(64):
            yield [_plain(sample) for sample in self.samples(evenly_spaced(len(self), 64))]

    def draws_anew(self, count: int = READ_TWICE) -> bool:
        """Whether transforms draw random numbers at each read of a sample. ``count`` samples are tried."""
        some = evenly_spaced(len(self), count)
        return differs_when_read_again(lambda: str([_plain(sample) for sample in self.samples(some)]))


def _plain(part: Any) -> Any:
    """A sample as plain values, for hashing."""
    if isinstance(part, Mapping):
        return {str(key): _plain(value) for key, value in part.items()}
    if isinstance(part, tuple | list):
        return [_plain(value) for value in part]
    if part is None or isinstance(part, str | int | float):
        return part
    array = _as_numbers(part)
    return type(part).__name__ if array is None else array.tolist()


def read_columns(where: str, samples: Any, target: str = "") -> Columns:
    """Read samples into compact columns, a chunk at a time. ``target`` names the entry that holds the target."""
    count = len(samples)
    if count == 0:
        raise DataError(f"{where} set is empty; at least one sample is needed")
    form = form_of(samples[0])
    names = _names(form)
    builders = [_ColumnBuilder(where, name) for name in names]
    for start, chunk in _chunks(samples):
        flat = [_flat_sample(where, start + row, sample, form) for row, sample in enumerate(chunk)]
        for builder, entries in zip(builders, zip(*flat, strict=True), strict=True):
            builder.add(start, entries)
    place = target_entry(form, target)
    targets = {place} | {number for number, name in enumerate(names) if name in _TARGETS}
    columns = tuple(builder.column(number in targets) for number, builder in enumerate(builders))
    return Columns(form, columns, count)


def _flat_sample(where: str, row: int, sample: Any, form: Form) -> list[Any]:
    try:
        return flatten(sample, form)
    except ValueError as problem:
        raise NotColumnar(f"{where} sample {row} {problem}; all samples must have the same form") from None


def _chunks(samples: Any) -> Iterator[tuple[int, Sequence[Any]]]:
    """The samples in chunks, each with the number of its first. A table is read by columns, which is faster."""
    for start in range(0, len(samples), CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, len(samples))
        if is_table(samples):
            yield start, _read_table(samples, slice(start, stop))
        else:
            yield start, [samples[row] for row in range(start, stop)]


def _read_table(table: Any, rows: list[int] | slice) -> list[dict[str, Any]]:
    """These rows of a table, each as a dict."""
    columns = table[rows]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


class _ColumnBuilder:
    """Collects one entry of all samples."""

    def __init__(self, where: str, name: str) -> None:
        self.where, self.what = where, f"entry {name!r} of a sample" if name else "a sample"
        self.parts: list[Array] = []
        self.lengths: list[Indices] = []
        self.shape: tuple[int, ...] | None = None
        self.given, self.narrow = "number", False

    def add(self, start: int, entries: Sequence[Any]) -> None:
        """Add the entries of a chunk of samples."""
        arrays = [self._array(entry) for entry in entries]
        first = arrays[0]
        if self.shape is None:
            self.given = _kind_of(entries[0])
            self.narrow = self.given in ("tensor", "array") and first.dtype in (np.uint8, np.bool_)
            self.shape = first.shape[1:] if first.ndim else (-1,)
        for row, array in enumerate(arrays):
            if (array.shape[1:] if array.ndim else (-1,)) != self.shape:
                raise NotColumnar(
                    f"{self.where} {self.what}: sample {start + row} has shape {array.shape}, the first {first.shape}; "
                    "only the first dimension may vary: give collate="
                )
        kinds = [array.dtype for array in arrays if array.size] or [np.dtype(np.int8)]
        rows = [np.atleast_1d(array) for array in arrays]
        flat = np.concatenate(rows, dtype=np.result_type(*kinds), casting="unsafe")
        if flat.dtype.kind == "f":
            flat = flat.astype(np.float32)
            if not np.isfinite(flat).all():
                raise DataError(f"{self.where} {self.what} holds NaN or infinity; every value must be a finite number")
        self.parts.append(flat if self.narrow else _smallest(flat))
        self.lengths.append(np.array([len(each) for each in rows], np.int64))

    def _array(self, entry: Any) -> Array:
        array = _as_numbers(entry)
        if array is None:
            kind = type(entry).__name__
            raise NotColumnar(f"{self.where} {self.what} is a {kind}, not numbers; convert it first, or give collate=")
        return array

    def column(self, is_target: bool) -> SampleColumn:
        values, lengths = np.concatenate(self.parts), np.concatenate(self.lengths)
        self.parts.clear()
        whole = np.dtype(np.float32 if values.dtype.kind == "f" else np.int64)
        dtype = values.dtype if self.narrow and values.dtype in (np.uint8, np.bool_) else whole
        fill = IGNORED if is_target and dtype == np.int64 else 0
        if self.shape == (-1,):
            return SampleColumn(values, None, dtype, self.given, fill)
        if (lengths == lengths[0]).all():
            values = values.reshape(len(lengths), int(lengths[0]), *values.shape[1:])
            return SampleColumn(values, None, dtype, self.given, fill)
        return SampleColumn(values, np.concatenate([[0], np.cumsum(lengths)]), dtype, self.given, fill)


def _kind_of(entry: Any) -> str:
    if hasattr(entry, "detach"):
        return "tensor"
    if isinstance(entry, np.ndarray):
        return "array"
    return "list" if isinstance(entry, list) else "number"


def _as_numbers(entry: Any) -> Array | None:
    """A tensor, array, list or number as an array; None if it holds anything but numbers. numpy has no bfloat16."""
    if hasattr(entry, "detach") and "bfloat16" in str(entry.dtype):
        entry = entry.float()
    try:
        array = np.asarray(to_numpy(entry))
    except ValueError:  # lists of different lengths
        return None
    return array if array.dtype.kind in "biuf" else None


def _smallest(values: Array) -> Array:
    """Whole numbers in the smallest type that holds them. Token ids then take 2 or 4 bytes, a mask one."""
    if values.dtype.kind not in "iu" or not values.size:
        return values
    low, high = int(values.min()), int(values.max())
    fits = (kind for kind in (np.int8, np.int16, np.int32) if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    return values.astype(next(fits, np.int64))


# ---- what a data set holds


@dataclass(frozen=True, eq=False)
class Records:
    """Samples of a data set in place of an array of inputs: selected by ``records[index]``, read by ``batch``."""

    store: Columns | Items
    index: Indices
    collate: Collate | None = None
    #: Whether the loss gets the target alone (the tasks with a name) or the whole batch (a task from Python).
    split: bool = False
    target: str = ""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.index),)

    ndim = 1
    dtype = np.dtype(object)

    @property
    def size(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: Any) -> Records:
        return replace(self, index=self.index[rows])

    def samples(self, rows: Indices) -> list[Any]:
        """These samples as they were given."""
        return list(self.store.samples(self.index[rows]))

    def batch(self, rows: Indices) -> Any:
        """The batch of these samples: arrays, or what ``collate`` makes of the samples."""
        chosen = self.index[rows]
        return self.store.batch(chosen) if self.collate is None else self.collate(self.store.samples(chosen))

    def parts(self, batch: Any) -> tuple[Any, Any]:
        """The inputs and targets of a batch. Where the two cannot be told apart, both are the whole batch."""
        if isinstance(batch, tuple | list) and (len(batch) == 2 or (self.split and len(batch) > 2)):
            *parts, target = batch
            return parts[0] if len(parts) == 1 else tuple(parts), target
        if self.split and isinstance(batch, Mapping):
            key = next((key for key in ((self.target,) if self.target else _TARGETS) if key in batch), None)
            if key is not None:
                inputs = {name: value for name, value in batch.items() if name != key}
                return next(iter(inputs.values())) if len(inputs) == 1 else inputs, batch[key]
        return batch, batch

    @property
    def draws(self) -> bool:
        """Whether reading a batch runs code of the user's, which may draw random numbers."""
        return self.collate is not None or isinstance(self.store, Items)

    def labels(self) -> Array:
        """One class label per sample if every sample has a whole number as its target, else no targets: (N, 0)."""
        none = np.zeros((len(self), 0), np.float32)
        if isinstance(self.store, Columns):
            place = target_entry(self.store.form, self.target)
            column = None if place is None else self.store.columns[place]
            plain = column is not None and column.values.ndim == 1 and column.offsets is None
            if column is None or not plain or column.dtype != np.int64:
                return none
            return column.values.astype(np.int64)[self.index]
        chunks = np.array_split(self.index, -(-len(self) // CHUNK_ROWS))
        found = [_label_of(sample, self.target) for rows in chunks for sample in self.store.samples(rows)]
        whole = all(isinstance(label, int | np.integer) and not isinstance(label, bool) for label in found)
        return np.array(found, np.int64) if found and whole else none

    def content(self) -> Iterator[Any]:
        """What a fingerprint covers."""
        yield ["records", self.split, self.target, _name_of(self.collate)]
        yield self.index
        yield from self.store.content()


def _label_of(sample: Any, name: str) -> Any:
    form = form_of(sample)
    place = target_entry(form, name)
    label: Any = None if place is None else to_numpy(flatten(sample, form)[place])
    return label.item() if getattr(label, "ndim", None) == 0 else label


def _name_of(collate: Collate | None) -> str:
    return "" if collate is None else getattr(collate, "__qualname__", type(collate).__qualname__)


# ---- from a user's data


def is_pair_of_arrays(given: Any) -> bool:
    """Whether this is (x, y), and not two samples in a list."""
    pair = isinstance(given, tuple | list) and len(given) == 2
    return pair and (isinstance(given, tuple) or not all(isinstance(each, Mapping) for each in given))


def needs_records(given: Any) -> bool:
    """Whether a Dataset or list has samples that are no plain pairs (x, y): dicts, single arrays, nested or longer
    tuples. A pair of arrays is no list of samples."""
    if is_table(given) or isinstance(given, str) or not (hasattr(given, "__getitem__") and hasattr(given, "__len__")):
        return False
    if isinstance(given, Mapping) or len(given) == 0 or is_pair_of_arrays(given) or isinstance(given, tuple):
        return False
    with own_draws():  # a Dataset may draw
        first = given[0]
    pair = isinstance(first, tuple | list) and len(first) == 2
    return not pair or isinstance(first[0], Mapping | tuple)


def as_records(
    where: str, given: Any, collate: Collate | None, *, split: bool, target: str = "", lazy: bool = False
) -> Records:
    """The samples of a Dataset, a table or a list: in columns if they are numbers, else as they are.

    Without ``collate``, a table keeps only its columns of numbers, because no batch could hold the others. A Dataset
    that draws anew at each read stays unread, too.
    """
    if is_table(given) and collate is None:
        given = _numeric_columns(where, given)
    plain = isinstance(given, list | tuple) or (is_table(given) and not _has_transform(given)) or not len(given)
    lazy = lazy or (not plain and Items(where, given).draws_anew())
    store = Items(where, given) if lazy else _read(where, given, target, keep=collate is not None)
    return Records(store, np.arange(len(store)), collate, split, target)


def _read(where: str, given: Any, target: str, *, keep: bool) -> Columns | Items:
    """Columns of the samples. With ``keep``, samples that cannot form columns are kept as they are."""
    try:
        return read_columns(where, given, target)
    except NotColumnar:
        if not keep:
            raise
    return Items(where, given if is_table(given) else [given[row] for row in range(len(given))])


def _numeric_columns(where: str, table: Any) -> Any:
    if len(table) == 0:
        raise DataError(f"{where} set is empty; at least one sample is needed")
    first = table[0]
    keep = [name for name, value in first.items() if _as_numbers(value) is not None]
    if not keep:
        raise DataError(f"{where} data have no column of numbers ({', '.join(first)}); tokenise them, or give collate=")
    needed = _has_transform(table)  # which may need the other columns
    return table if needed or len(keep) == len(first) else table.select_columns(keep)


def _has_transform(table: Any) -> bool:
    """Whether a table has a user's transform."""
    return bool(getattr(table, "format", {}).get("type") == "custom")
