"""Shards given by a user: which samples each device trains and is tested on.

They come as lists of sample numbers, from a function, or from a partitioner object of Flower Datasets
(``flwr_datasets``). A function gets ``(labels, devices, rng)``, as the schemes in ``partition.py`` do, and returns one
list of sample numbers per device. A partitioner gets a table of the samples; only its public interface is used.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from freshet.data.adapters import is_table, read_samples
from freshet.data.dataset import Array, DataSet, check
from freshet.data.samples import Records
from freshet.errors import ConfigError, FreshetError

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DeviceTests:
    """What each device is tested on: samples of the test set, or of ``data``, the devices' own inputs and labels."""

    shards: list[Indices]
    data: tuple[Array, Array] | None = None

    def as_test_of(self, dataset: DataSet) -> DataSet:
        """Return the data set with the devices' samples as its test set."""
        x, y = self.data or (dataset.x_test, dataset.y_test)
        return replace(dataset, x_test=x, y_test=y)


def as_device_tests(given: Any, devices: int, dataset: DataSet, columns: tuple[str, str] = ("", "")) -> DeviceTests:
    """Convert test shards: sample numbers per device in any form of shards, or data per device as for ``test``."""
    key = "test_shards"
    parts = _by_device(given, devices, key)
    own = [_is_data(part) for part in parts]
    if not any(own):
        return DeviceTests(as_shards(given, devices, len(dataset.y_test), key))
    if len(parts) != devices or not all(own):
        lack = f"device {own.index(False)} has none" if not all(own) else f"there are {len(parts)} for {devices}"
        raise ConfigError(key, f"all devices need their own test data, or none, but {lack}")
    if isinstance(dataset.x_test, Records):
        raise ConfigError(key, "samples of this form can be given as numbers of samples of the test set only")
    sides = [read_samples(f"{key}: device {device}", part, *columns)[:2] for device, part in enumerate(parts)]
    brief = replace(dataset, x_train=dataset.x_train[:1], y_train=dataset.y_train[:1], groups=None)
    for device, (x, y) in enumerate(sides):
        check(replace(brief, name=f"{key}: device {device}", x_test=x, y_test=y))
    bounds = np.cumsum([0, *(len(y) for _, y in sides)])
    shards = [np.arange(bounds[k], bounds[k + 1]) for k in range(devices)]
    return DeviceTests(shards, (np.concatenate([x for x, _ in sides]), np.concatenate([y for _, y in sides])))


def natural_tests(dataset: DataSet, shards: list[Indices]) -> DeviceTests | None:
    """The test samples of each device's clients, if the data set names them. A device may have none."""
    if dataset.groups is None or dataset.test_groups is None:
        return None
    names, client = np.unique(np.concatenate([dataset.groups, dataset.test_groups]), return_inverse=True)
    home = np.full(len(names), -1, np.int64)
    for device, shard in enumerate(shards):
        home[client[shard]] = device
    device_of = home[client[len(dataset.groups) :]]
    order = np.argsort(device_of, kind="stable")
    bounds = np.searchsorted(device_of[order], np.arange(len(shards) + 1))
    return DeviceTests([np.sort(order[a:b]) for a, b in pairwise(bounds)])


def _is_data(part: Any) -> bool:
    """Return whether a part is data (a pair of arrays or a Dataset) and not sample numbers."""
    if isinstance(part, tuple | list):
        return len(part) == 2 and all(getattr(half, "ndim", 0) > 0 or isinstance(half, list) for half in part)
    return not hasattr(part, "dtype") and not isinstance(part, range | set | frozenset) and hasattr(part, "__getitem__")


class LoadedSamples(NamedTuple):
    """What DataLoaders hold: their samples as one Dataset, each device's part of it, and what they have in common."""

    samples: Any
    shards: list[Indices] | None
    batch_size: int | None
    #: None for torch's own.
    collate: Any = None


def unwrap_loaders(given: Any, where: str) -> LoadedSamples | None:
    """Unwrap a torch ``DataLoader``, or one per device in a list. None for anything else.

    Each epoch's order is Freshet's own, from the run's seed, whatever the loaders' samplers would draw.
    """
    several = isinstance(given, list | tuple) and len(given) > 0 and all(map(_is_loader, given))
    if not several and not _is_loader(given):
        return None
    from torch.utils.data import ConcatDataset

    loaders = list(given) if several else [given]
    parts = [_loader_samples(loader, where) for loader in loaders]
    bounds = np.cumsum([0, *map(len, parts)])
    shards = [np.arange(bounds[k], bounds[k + 1]) for k in range(len(parts))]
    sizes = {loader.batch_size for loader in loaders}
    size = sizes.pop() if len(sizes) == 1 else None
    collate = _common_collate(loaders, where)
    return LoadedSamples(ConcatDataset(parts) if several else parts[0], shards if several else None, size, collate)


def _common_collate(loaders: list[Any], where: str) -> Any:
    """The ``collate_fn`` of all loaders; None if it is torch's own."""
    from torch.utils.data import default_collate

    first = loaders[0].collate_fn
    if any(loader.collate_fn is not first for loader in loaders):
        raise ConfigError(where, "has DataLoaders with different functions collate_fn; use one for all devices")
    return None if first is default_collate else first


def _is_loader(given: Any) -> bool:
    return all(hasattr(given, name) for name in ("dataset", "sampler", "batch_sampler", "collate_fn"))


def _loader_samples(loader: Any, where: str) -> Any:
    """The samples of one DataLoader as a Dataset. Raises one sentence for what cannot be kept."""
    from torch.utils.data import (
        IterableDataset,
        RandomSampler,
        SequentialSampler,
        Subset,
        SubsetRandomSampler,
    )

    if isinstance(loader.dataset, IterableDataset):
        problem = "a DataLoader of an IterableDataset has no sample numbers"
        raise ConfigError(where, f"{problem}; give a Dataset with __getitem__, or open the stream in your own trainer")
    if type(loader.sampler) is SubsetRandomSampler:
        return Subset(loader.dataset, list(loader.sampler.indices))
    if type(loader.sampler) not in (RandomSampler, SequentialSampler) or loader.batch_size is None:
        problem = f"a DataLoader's {type(loader.sampler).__name__} is not used; give its Dataset, or a Subset"
        raise ConfigError(where, problem)
    return loader.dataset


def as_shards(given: Any, devices: int, samples: int, key: str = "shards") -> list[Indices]:
    """Convert lists, arrays, tensors or masks, in a sequence or a dict by device, to one index array per device."""
    parts = _by_device(given, devices, key)
    if len(parts) != devices:
        raise ConfigError(key, f"there must be one per device ({devices}), but {len(parts)} were given")
    return [_indices(part, device, samples, key) for device, part in enumerate(parts)]


def overlap_notices(shards: list[Indices], samples: int) -> list[str]:
    """What a user should know about given shards: how many samples are there more than once."""
    several = int((np.bincount(np.concatenate(shards), minlength=samples) > 1).sum())
    if not several:
        return []
    counted = f"{several:,} of {samples:,} training samples" if several > 1 else "one training sample"
    twice = "occur" if several > 1 else "occurs"
    return [f"the shards overlap: {counted} {twice} more than once, and every occurrence counts as a sample"]


def without_held_out(shards: list[Indices], held: Array, samples: int) -> list[Indices]:
    """Return the shards without the held-out samples, renumbered among the remaining ones."""
    keep = np.setdiff1d(np.arange(samples), held, assume_unique=True)
    place = np.full(samples, -1, np.int64)
    place[keep] = np.arange(len(keep))
    left = [place[shard][place[shard] >= 0] for shard in shards]
    empty = next((device for device, shard in enumerate(left) if not len(shard)), None)
    if empty is not None:
        raise ConfigError("data.validation", f"holds out every sample of device {empty}; hold out fewer")
    return left


def device_count(given: Any) -> int | None:
    """Return the number of devices that shards are given for, or None if it is unknown."""
    return len(given) if hasattr(given, "__len__") and not isinstance(given, str) else None


def _by_device(given: Any, devices: int, key: str) -> list[Any]:
    if isinstance(given, Mapping):
        strange = [name for name in given if isinstance(name, bool) or not isinstance(name, int | np.integer)]
        if strange:
            raise ConfigError(key, f"the keys must be device numbers 0..{devices - 1}, but {strange[0]!r} was given")
        missing = [device for device in range(devices) if device not in given]
        if missing or len(given) != devices:
            lack = f"device {missing[0]} has none" if missing else f"device {max(given)} does not exist"
            raise ConfigError(key, f"there must be one per device 0..{devices - 1}, but {lack}")
        return [given[device] for device in range(devices)]
    if isinstance(given, str | bytes) or not hasattr(given, "__iter__"):
        raise ConfigError(key, f"must be a list or dict of sample numbers per device, but {given!r} was given")
    if getattr(given, "ndim", 2) < 2:
        raise ConfigError(key, "a flat array was given; give one list or array of sample numbers per device")
    return list(given)


def _indices(part: Any, device: int, samples: int, key: str) -> Indices:
    value = part.detach().cpu().numpy() if hasattr(part, "detach") else part
    try:
        found = np.asarray(sorted(value) if isinstance(value, set | frozenset) else value)
    except (TypeError, ValueError):
        found = np.asarray(None)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iub"):
        what = f"{found.dtype} with shape {found.shape}"
        raise ConfigError(key, f"device {device} must have a list of sample numbers or a boolean mask, but has {what}")
    if found.dtype.kind == "b" and found.size:
        if len(found) != samples:
            raise ConfigError(key, f"device {device} has a mask of {len(found)} entries for {samples} samples")
        found = np.flatnonzero(found)
    if found.size == 0:
        raise ConfigError(key, f"device {device} has no samples; every device needs at least one")
    if found.min() < 0 or found.max() >= samples:
        raise ConfigError(key, f"device {device} names a sample outside 0..{samples - 1}")
    return np.require(found, np.int64, ["C", "W"])  # torch warns about arrays that are not writable


# ---- partitions by a function or a partitioner

Labels = npt.NDArray[Any]
PartitionFunction = Callable[[Labels, int, np.random.Generator], Any]

PARTITION = "data.partition"
#: The column that numbers the samples of a table.
ROW = "freshet_row"


def is_partitioner(given: Any) -> bool:
    """Whether this looks like a partitioner of Flower Datasets."""
    return all(hasattr(type(given), name) for name in ("dataset", "num_partitions", "load_partition"))


def is_given(partition: Any) -> bool:
    """Whether a partition is a partitioner or a function, not the name of a scheme."""
    return is_partitioner(partition) or callable(partition)


def by_function(function: PartitionFunction, labels: Labels, devices: int, rng: np.random.Generator) -> list[Indices]:
    """The shards that a user's function returns."""
    try:
        found = function(labels, devices, rng)
    except FreshetError:
        raise
    except Exception as error:  # whatever a user's function may raise
        raise ConfigError(PARTITION, f"the function failed ({_first_line(error)})") from error
    return as_shards(found, devices, len(labels), PARTITION)


def by_partitioner(partitioner: Any, samples: Any, devices: int | None = None) -> list[Indices]:
    """The shards that a partitioner makes of a table, or of columns; without ``devices`` as many as it makes."""
    own = _with_samples(partitioner, samples)
    try:
        found = [_row_numbers(own.load_partition(k)) for k in range(own.num_partitions)]
    except Exception as error:  # a wrong column, too few samples: whatever a partitioner may raise
        raise ConfigError(PARTITION, f"{type(partitioner).__name__} failed ({_first_line(error)})") from error
    if devices is not None and len(found) != devices:
        problem = f"{type(partitioner).__name__} makes {len(found)} parts, but there are {devices} devices"
        raise ConfigError(PARTITION, f"{problem}; set fleet.devices to {len(found)}")
    return as_shards(found, len(found), len(own.dataset), PARTITION)


def columns_of(dataset: DataSet) -> dict[str, Labels]:
    """The columns of a data set in memory that a partitioner may name: ``label`` and ``group``."""
    found = {ROW: np.arange(len(dataset.y_train))}
    if dataset.y_train.ndim == 1:
        found["label"] = dataset.y_train
    return found if dataset.groups is None else found | {"group": dataset.groups}


def _with_samples(partitioner: Any, samples: Any) -> Any:
    """A copy of the partitioner with these samples. A partitioner takes samples only once."""
    assigned = getattr(partitioner, "is_dataset_assigned", None)
    if assigned is not None and assigned():
        problem = f"{type(partitioner).__name__} has a dataset already; give one without, the training samples follow"
        raise ConfigError(PARTITION, problem)
    own = copy.deepcopy(partitioner)
    own.dataset = samples.add_column(ROW, np.arange(len(samples))) if is_table(samples) else _as_table(samples)
    return own


def _as_table(columns: Mapping[str, Labels]) -> Any:
    try:
        from datasets import Dataset  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise ConfigError(PARTITION, "a partitioner needs the package datasets; install flwr-datasets") from None
    return Dataset.from_dict(dict(columns))


def _row_numbers(part: Any) -> Indices:
    return np.asarray(part.select_columns([ROW]).with_format("numpy")[:][ROW], dtype=np.int64)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200].rstrip(".: ")
