"""Shards given by a user: which samples each device trains and is tested on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from freshet.data.adapters import read_samples
from freshet.data.dataset import Array, DataSet, check
from freshet.errors import ConfigError

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
    sides = [read_samples(f"{key}: device {device}", part, *columns)[:2] for device, part in enumerate(parts)]
    brief = replace(dataset, x_train=dataset.x_train[:1], y_train=dataset.y_train[:1], groups=None)
    for device, (x, y) in enumerate(sides):
        check(replace(brief, name=f"{key}: device {device}", x_test=x, y_test=y))
    bounds = np.cumsum([0, *(len(y) for _, y in sides)])
    shards = [np.arange(bounds[k], bounds[k + 1]) for k in range(devices)]
    return DeviceTests(shards, (np.concatenate([x for x, _ in sides]), np.concatenate([y for _, y in sides])))


def _is_data(part: Any) -> bool:
    """Return whether a part is data (a pair of arrays or a Dataset) and not sample numbers."""
    if isinstance(part, tuple | list):
        return len(part) == 2 and all(getattr(half, "ndim", 0) > 0 or isinstance(half, list) for half in part)
    return not hasattr(part, "dtype") and not isinstance(part, range | set | frozenset) and hasattr(part, "__getitem__")


def as_shards(given: Any, devices: int, samples: int, key: str = "shards") -> list[Indices]:
    """Convert lists, arrays, tensors or masks, in a sequence or a dict by device, to one index array per device."""
    parts = _by_device(given, devices, key)
    if len(parts) != devices:
        raise ConfigError(key, f"there must be one per device ({devices}), but {len(parts)} were given")
    return [_indices(part, device, samples, key) for device, part in enumerate(parts)]


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
