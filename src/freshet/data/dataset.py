"""The data of a federation: arrays in memory, checked once, shared by all workers.

Samples that are no pairs of arrays (dicts, tuples, variable lengths) are kept as ``Records``. Inputs too large for
memory stay in their source and are read by the batch (``LazyRows``). Class labels must be one integer per sample;
errors about other forms name the expression that converts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from freshet.data import adapters
from freshet.data.adapters import LazyRows
from freshet.data.samples import Collate, Records, as_records, is_pair_of_arrays, needs_records
from freshet.errors import ConfigError, DataError

Array = npt.NDArray[Any]


class Remedy(NamedTuple):
    """What labels look like, and the expression in ``y`` that turns them into class labels."""

    looks: str
    give: str


def are_class_labels(y: Array) -> bool:
    """Return whether there is one integer per sample."""
    return y.dtype.kind == "i" and y.ndim == 1


def label_remedy(y: Array) -> Remedy | None:
    """Return how to turn ``y`` into class labels; None if it has them already or cannot be converted."""
    if are_class_labels(y) or not _are_whole_numbers(y):
        return None
    cast, floats = (".astype(int)", " of floats") if y.dtype.kind == "f" else ("", "")
    if y.ndim == 1:
        return Remedy("whole numbers stored as floats", "y.astype(int)")
    if y.ndim == 2 and y.shape[1] == 1:
        return Remedy(f"one column{floats}", f"y[:, 0]{cast}")
    if y.ndim == 2 and y.max() == 1 and (y.sum(axis=1) == 1).all():
        return Remedy("one-hot rows", "y.argmax(1)")
    return None


def _are_whole_numbers(y: Array) -> bool:
    return bool(y.size) and bool((y >= 0).all()) and bool((np.floor(y) == y).all())


def mismatch_remedy(y_train: Array, y_test: Array) -> str:
    """Return the end of a sentence: what to do about training and test labels of different types or shapes."""
    for side, y, other in (("train", y_train, y_test), ("test", y_test, y_train)):
        found = label_remedy(y) if are_class_labels(other) else None
        if found is not None:
            regression = ", for regression floats in both" if y.dtype.kind == "f" and y.ndim == 1 else ""
            return f": the {side} labels are {found.looks}; for classes give {found.give}{regression}"
    return ": for regression give floats in both" if y_train.shape[1:] == y_test.shape[1:] else ""


Rows = Array | LazyRows | Records
#: Images to read for the channel mean and standard deviation of a data set outside memory.
STATISTICS_SAMPLES = 2000
#: The target of a token that the loss ignores.
IGNORED_TOKEN = -100

_SPLIT_KEY, _SUBSET_KEY = 0x56414C49, 0x53554253  # purposes of the random streams, so that two splits never share draws


@dataclass(frozen=True, eq=False)
class DataSet:
    """Training and test samples of one task.

    ``x`` is uint8 (N, C, H, W) for images, int32 (N, length) for token ids, and float32 of any shape otherwise, or
    ``Records`` for samples of any other form. ``y`` of records without class labels is empty, (N, 0).
    """

    name: str
    x_train: Rows
    y_train: Array
    x_test: Rows
    y_test: Array
    classes: int
    class_names: tuple[str, ...] = ()
    mean: tuple[float, ...] | None = None  # per channel, in units of 0..1, for uint8 images; None: no normalisation
    std: tuple[float, ...] | None = None
    pad_id: int | None = None  # text only: the id that fills short samples
    vocabulary: int | None = None  # text only: number of token ids
    groups: Array | None = None  # client of each training sample, for the natural partition
    full_counts: tuple[int, int] | None = None  # training and test samples of the full data set, if known
    held_out: bool = False  # the test samples come from the training set
    test_groups: Array | None = None  # client of each test sample; a device is then tested on those of its clients

    @property
    def has_classes(self) -> bool:
        """Whether every sample has one class label, so that samples can be partitioned by class."""
        return self.y_train.dtype == np.int64 and self.y_train.ndim == 1

    def with_validation(self, fraction: float, seed: int) -> DataSet:
        """Hold out a stratified part of the training samples as the test set.

        Tuning works on the result, so it cannot see the real test set. Every class keeps its share. The choice of
        samples depends on ``seed`` alone.
        """
        held = self.validation_indices(fraction, seed)
        keep = np.setdiff1d(np.arange(len(self.y_train)), held, assume_unique=True)
        return replace(
            self,
            x_train=self.x_train[keep],
            y_train=self.y_train[keep],
            x_test=self.x_train[held],
            y_test=self.y_train[held],
            groups=None if self.groups is None else self.groups[keep],
            held_out=True,
            test_groups=None if self.groups is None or self.test_groups is None else self.groups[held],
        )

    def validation_indices(self, fraction: float, seed: int) -> Array:
        """Return the training samples that ``with_validation`` holds out, sorted."""
        if not 0.0 < fraction < 1.0:
            raise ConfigError("data.validation", f"{fraction} is not a share of the training set; allowed: 0 < x < 1")
        held = stratified_indices(self.y_train, round(fraction * len(self.y_train)), _stream(seed, _SPLIT_KEY))
        if len(held) in (0, len(self.y_train)):
            raise ConfigError("data.validation", f"{fraction} of {len(self.y_train)} samples leaves one side empty")
        return held

    def subset(self, train: int | None = None, test: int | None = None, seed: int = 0) -> DataSet:
        """Return a stratified part with ``train`` and ``test`` samples (None: all), for scaled-down runs."""
        a = _subset_rows("data.train_samples", self.y_train, train, seed)
        b = _subset_rows("data.test_samples", self.y_test, test, seed + 1)
        return replace(
            self,
            x_train=self.x_train[a],
            y_train=self.y_train[a],
            x_test=self.x_test[b],
            y_test=self.y_test[b],
            groups=None if self.groups is None else self.groups[a],
            test_groups=None if self.test_groups is None else self.test_groups[b],
        )

    def facts(self) -> dict[str, Any]:
        """Return the numbers of samples used and of samples in the full data set."""
        train, test = len(self.y_train), len(self.y_test)
        whole = self.full_counts or (train, test)
        facts = {"name": self.name, "train": train, "test": test, "whole_train": whole[0], "whole_test": whole[1]}
        return facts | {"held_out": self.held_out, "part": self.reduction_notice()}

    def reduction_notice(self) -> str | None:
        """Return a sentence for readers of results if this is not the full data set, else None."""
        train, test = len(self.y_train), len(self.y_test)
        whole = self.full_counts or (train, test)
        if (train, test) == whole and not self.held_out:
            return None
        parts = [f"trains on {train:,} of {whole[0]:,} samples" if train != whole[0] else "trains on all samples"]
        if self.held_out:
            parts.append(f"tests on {test:,} samples held out of the training set")
        else:
            parts.append(f"tests on {test:,} of {whole[1]:,}" if test != whole[1] else "tests on all test samples")
        return f"{self.name} is reduced: {' and '.join(parts)}"

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.x_train.shape[1:])


def _stream(seed: int, purpose: int) -> np.random.Generator:
    if seed < 0:
        raise ConfigError("seed", f"{seed} is negative; allowed: 0 or more")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, purpose])))


def _subset_rows(key: str, labels: Array, count: int | None, seed: int) -> Array | slice:
    if count is None:
        return slice(None)
    if not 1 <= count <= len(labels):
        raise ConfigError(key, f"{count} samples requested; allowed: 1 to {len(labels)}")
    return stratified_indices(labels, count, _stream(seed, _SUBSET_KEY))


def stratified_indices(labels: Array, count: int, rng: np.random.Generator) -> Array:
    """Return sorted indices of ``count`` samples. Every class keeps its share (largest remainders rounded up)."""
    if labels.dtype != np.int64 or labels.ndim != 1:
        return np.sort(rng.permutation(len(labels))[:count])
    values, inverse, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    share = sizes * (count / len(labels))
    take = np.floor(share).astype(np.int64)
    by_remainder = np.argsort(take - share, kind="stable")
    take[by_remainder[: count - int(take.sum())]] += 1
    picked = [rng.permutation(np.flatnonzero(inverse == k))[: take[k]] for k in range(len(values))]
    return np.sort(np.concatenate(picked))


def check(dataset: DataSet) -> DataSet:
    """Return the data set if it can be trained on, else raise one sentence that names the problem."""
    name = dataset.name
    if dataset.has_classes and dataset.classes < 2:
        raise DataError(f"{name}: {dataset.classes} class(es) leave nothing to learn; at least 2 are needed")
    for part, x, y in (("train", dataset.x_train, dataset.y_train), ("test", dataset.x_test, dataset.y_test)):
        _check_part(f"{name}: {part}", x, y, dataset)
    if dataset.x_train.shape[1:] != dataset.x_test.shape[1:] or dataset.x_train.dtype != dataset.x_test.dtype:
        raise DataError(
            f"{name}: train samples are {dataset.x_train.dtype} {dataset.x_train.shape[1:]} but test samples are "
            f"{dataset.x_test.dtype} {dataset.x_test.shape[1:]}; both must agree"
        )
    if dataset.y_train.shape[1:] != dataset.y_test.shape[1:] or dataset.y_train.dtype != dataset.y_test.dtype:
        raise DataError(
            f"{name}: train labels are {dataset.y_train.dtype} {dataset.y_train.shape[1:]} but test labels are "
            f"{dataset.y_test.dtype} {dataset.y_test.shape[1:]}; both must agree"
            f"{mismatch_remedy(dataset.y_train, dataset.y_test)}"
        )
    if dataset.class_names and len(dataset.class_names) != dataset.classes:
        raise DataError(f"{name}: {len(dataset.class_names)} class names for {dataset.classes} classes")
    if dataset.groups is not None and dataset.groups.shape != dataset.y_train.shape[:1]:
        raise DataError(f"{name}: groups has shape {dataset.groups.shape}; one entry per training sample is needed")
    if dataset.test_groups is not None and dataset.test_groups.shape != dataset.y_test.shape[:1]:
        raise DataError(
            f"{name}: test_groups has shape {dataset.test_groups.shape}; one entry per test sample is needed"
        )
    _check_statistics(dataset)
    return dataset


def _check_part(where: str, x: Rows, y: Array, dataset: DataSet) -> None:
    if len(y) == 0 or x.size == 0:
        raise DataError(f"{where} set is empty; at least one sample is needed")
    if y.ndim == 0 or y.dtype not in (np.int64, np.float32):
        raise DataError(f"{where} labels are {y.dtype} with shape {y.shape}; int64 or float32, one row per sample")
    if len(x) != len(y):
        raise DataError(f"{where} set has {len(x)} samples but {len(y)} labels; the numbers must match")
    if y.dtype == np.float32:
        if not np.isfinite(y).all():
            raise DataError(f"{where} targets hold NaN or infinity; every value must be a finite number")
        low = high = 0
    else:
        counted = y if y.ndim == 1 else y[y != IGNORED_TOKEN]
        low, high = int(counted.min(initial=0)), int(counted.max(initial=0))
    counted_by_class = (
        dataset.y_train.dtype == y.dtype == np.int64
    )  # else the types disagree, which is reported instead
    if low < 0 or (high >= dataset.classes and counted_by_class):
        bad = low if low < 0 else high
        raise DataError(f"{where} label {bad} is out of range; allowed: 0 to {dataset.classes - 1}")
    if isinstance(x, Records):  # checked when they were read
        return
    if isinstance(x, LazyRows):  # check the first sample now, the others when they are read
        x = x.read(np.zeros(1, np.int64))
    if x.dtype == np.uint8:
        _check_images(where, x)
    elif x.dtype == np.int32:
        limit = dataset.vocabulary
        if x.ndim != 2 or limit is None:
            raise DataError(f"{where} token ids need the shape (samples, length) and a vocabulary size, got {x.shape}")
        if x.min() < 0 or x.max() >= limit:
            raise DataError(f"{where} token ids run from {x.min()} to {x.max()}; allowed: 0 to {limit - 1}")
    elif x.dtype == np.float32:
        if not np.isfinite(x).all():
            row = int(np.argmin(np.isfinite(x.reshape(len(x), -1)).all(axis=1)))
            raise DataError(f"{where} sample {row} holds NaN or infinity; every value must be a finite number")
    else:
        raise DataError(f"{where} samples have type {x.dtype}; allowed: uint8 images, int32 token ids, float32")


def _check_images(where: str, x: Array) -> None:
    if x.ndim != 4 or not x.flags.c_contiguous:
        raise DataError(f"{where} images have shape {x.shape}; uint8 images need contiguous (samples, C, H, W)")
    if x.shape[1] > 4 and x.shape[3] <= 4:
        raise DataError(f"{where} images have shape {x.shape}, channels last; use transpose(0, 3, 1, 2)")


def _check_statistics(dataset: DataSet) -> None:
    mean, std = dataset.mean, dataset.std
    if (mean is None) != (std is None):
        raise DataError(f"{dataset.name}: mean and std belong together; give both or none")
    if mean is None or std is None:
        return
    channels = dataset.x_train.shape[1]
    if len(mean) != channels or len(std) != channels or not all(s > 0 for s in std):
        raise DataError(f"{dataset.name}: mean and std need {channels} finite values, std above 0; got {mean}, {std}")


@adapters.own_draws(0)
def from_arrays(
    name: str,
    train: Any,
    test: Any,
    classes: int | None = None,
    *,
    class_names: Sequence[str] = (),
    groups: Any = None,
    vocabulary: int | None = None,
    pad_id: int | None = None,
    input_column: str = "",
    label_column: str = "",
    lazy: bool = False,
    collate: Collate | str | None = None,
    whole: bool = False,
) -> DataSet:
    """Make a checked DataSet from a user's data.

    ``train`` and ``test`` are each a pair ``(x, y)`` of arrays or tensors, a torch ``Dataset`` of such pairs, or a
    Hugging Face ``Dataset``. Floats become float32, and integer (samples, length) arrays become token ids. uint8 stays
    uint8 and gets the channel mean and standard deviation of the training images. Datasets are read once. With
    ``lazy``, or if a Dataset's transforms draw random numbers, they are read batch by batch. ``groups`` is an array or
    the name of a column.

    Samples of any other form (dicts, tuples, single arrays, variable lengths) are kept as ``Records``. ``collate``
    makes a batch from a list of samples; "pad" pads them. With ``whole``, the loss gets the whole batch, not the target
    alone.
    """
    columns = (input_column, label_column)
    sides = {
        side: _records(f"{name}: {side}", given, label_column, lazy, collate, whole)
        or _side(f"{name}: {side}", given, columns, lazy, vocabulary)
        for side, given in (("train", train), ("test", test))
    }
    (x_train, y_train, names), (x_test, y_test, _) = sides["train"], sides["test"]
    if x_train.dtype != np.int32:
        vocabulary = None
    if classes is None:
        classes = max(len(names), _outputs(y_train, y_test))
    if vocabulary is None and isinstance(x_train, np.ndarray) and isinstance(x_test, np.ndarray):
        ids = x_train.dtype == np.int32 and x_train.size and x_test.size
        vocabulary = 1 + int(max(x_train.max(), x_test.max())) if ids else None
    mean, std = _statistics(x_train)
    if isinstance(groups, str):
        table = adapters.is_table(train)
        source = (
            adapters.TableSource(f"{name}: train", train, "", "")
            if table
            else adapters.as_source(f"{name}: train", train, *columns)
        )
        groups = None if source is None else source.column(groups)
        if groups is None:
            raise DataError(f"{name}: groups names a column, but the training data are arrays; give an array")
    return check(
        DataSet(
            name,
            x_train,
            y_train,
            x_test,
            y_test,
            classes,
            tuple(class_names) or names,
            mean,
            std,
            pad_id,
            vocabulary,
            None if groups is None else adapters.as_array(f"{name}: groups", groups),
            (len(y_train), len(y_test)),
        )
    )


class OwnDataOptions(Protocol):
    """The settings of ``data`` that apply to data given from Python."""

    @property
    def lazy(self) -> bool: ...
    @property
    def input_column(self) -> str: ...
    @property
    def label_column(self) -> str: ...
    @property
    def vocabulary(self) -> int: ...


def own_data(
    name: str,
    train: Any,
    test: Any,
    groups: Any,
    options: OwnDataOptions,
    collate: Collate | str | None = None,
    whole: bool = False,
) -> DataSet | None:
    """Return the data given from Python, or None if there are none."""
    if isinstance(train, DataSet):
        if test is not None:
            raise DataError("a DataSet holds its test samples; leave test out")
        return train if groups is None else check(replace(train, groups=adapters.as_array("groups", groups)))
    if train is None:
        if test is not None:
            raise DataError("training data are missing; give train=(x, y) or a Dataset besides test")
        if groups is not None:
            raise DataError("groups apply to your own data only; give train and test too")
        if collate is not None:
            raise DataError("collate applies to your own data only; give train and test too")
        return None
    if test is None:
        raise DataError("test data are missing; give test=(x, y) or a Dataset besides train")
    return from_arrays(
        name,
        train,
        test,
        groups=groups,
        input_column=options.input_column,
        label_column=options.label_column,
        lazy=options.lazy,
        vocabulary=options.vocabulary if options.lazy else None,
        collate=collate,
        whole=whole,
    )


def _outputs(*targets: Array) -> int:
    """Return the number of classes of labels and tokens, or of real targets per sample."""
    if targets[0].dtype == np.float32:
        return int(np.prod(targets[0].shape[1:], dtype=np.int64))
    return 1 + max((int(y.max()) for y in targets if y.size), default=1)


def _records(
    where: str, given: Any, target: str, lazy: bool, collate: Collate | str | None, whole: bool
) -> tuple[Records, Array, tuple[str, ...]] | None:
    """Return records, their class labels and class names; None for data that become arrays."""
    given, collate = adapters.without_loader(given, collate)
    table = adapters.is_table(given)
    if collate is None and not (whole if table else needs_records(given)):
        return None
    if is_pair_of_arrays(given):
        x, y = given
        if len(x) != len(y):
            raise DataError(f"{where} set has {len(x)} samples but {len(y)} labels; the numbers must match")
        given = list(zip(x, y, strict=True))
    make = None if collate == "pad" else collate
    if make is not None and not callable(make):
        raise DataError(f'collate must be "pad" or a function of a list of samples, not {make!r}')
    records = as_records(where, given, make, split=not whole, target=target, lazy=lazy)
    label = target or next((name for name in adapters.LABEL_NAMES if table and name in given.column_names), "")
    names = tuple(getattr(given.features.get(label), "names", None) or ()) if table else ()
    return records, records.labels(), names


def _side(
    where: str, given: Any, columns: tuple[str, str], lazy: bool, vocabulary: int | None
) -> tuple[Rows, Array, tuple[str, ...]]:
    """Return inputs, labels and class names of the training or the test set."""
    source = adapters.as_source(where, given, *columns)
    if source is None or not (lazy or adapters.draws_anew(source)):
        return adapters.read_samples(where, given, *columns)
    rows = LazyRows.of(where, source, vocabulary)
    if rows.dtype == np.int32 and vocabulary is None:
        if not lazy:
            problem = f"{where} token ids are drawn anew at each read, so they must be read batch by batch"
            raise DataError(f"{problem}; set data.lazy = true and data.vocabulary")
        raise DataError(f"{where} token ids read lazily need a vocabulary size; give vocabulary")
    return rows, adapters.as_labels(where, source.labels()), source.class_names


def _statistics(x: Rows) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Return channel mean and standard deviation of uint8 images; outside memory, of an even sample."""
    if isinstance(x, Records) or x.dtype != np.uint8 or not x.size:
        return None, None
    return channel_statistics(
        x.read(adapters.evenly_spaced(len(x), STATISTICS_SAMPLES)) if isinstance(x, LazyRows) else x
    )


def channel_statistics(images: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of uint8 (N, C, H, W), in 0..1. A flat channel gets std 1."""
    if images.ndim != 4:
        raise DataError(f"images have shape {images.shape}; uint8 images need (samples, C, H, W)")
    levels = np.arange(256) / 255.0
    means, stds = [], []
    for c in range(images.shape[1]):
        weight = np.bincount(images[:, c].ravel(), minlength=256) / images[:, c].size
        mean = float(weight @ levels)
        std = float(np.sqrt(weight @ (levels - mean) ** 2))
        means.append(mean)
        stds.append(std if std > 1e-6 else 1.0)
    return tuple(means), tuple(stds)
