"""Partition training samples over devices: pure functions of the labels and one random generator.

Every scheme returns one sorted index array per device. The arrays are disjoint and together hold every sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from freshet.errors import ConfigError

Indices = npt.NDArray[np.int64]
Labels = npt.NDArray[Any]

SCHEMES = ("dirichlet", "dirichlet_by_device", "iid", "by_label", "natural")
_PURPOSE = 0x50415254  # separates this stream from other uses of the seed
_MAX_CONCENTRATION = 1e8  # above this, draws are uniform to float precision and sums would overflow


def partition(
    labels: Labels,
    devices: int,
    scheme: str = "dirichlet",
    *,
    seed: int,
    concentration: float = 0.5,
    min_samples: int = 1,
    shards_per_device: int = 2,
    groups: npt.NDArray[Any] | None = None,
) -> list[Indices]:
    """Assign every sample to one of ``devices`` devices. The same arguments give the same partition."""
    labels = np.asarray(labels)
    _check_request(labels, devices, min_samples)
    if seed < 0:
        raise ConfigError("seed", f"{seed} is negative; allowed: 0 or more")
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, _PURPOSE])))
    if scheme == "dirichlet":
        return dirichlet(labels, devices, rng, concentration, min_samples)
    if scheme == "dirichlet_by_device":
        return dirichlet_by_device(labels, devices, rng, concentration)
    if scheme == "iid":
        return iid(labels, devices, rng)
    if scheme == "by_label":
        return by_label(labels, devices, rng, shards_per_device, min_samples)
    if scheme == "natural":
        if groups is None:
            raise ConfigError("data.partition", "natural needs a column with the client of each training sample")
        return natural(labels, devices, rng, groups, min_samples)
    raise ConfigError("data.partition", f"{scheme!r} is unknown; allowed: {', '.join(SCHEMES)}")


def iid(labels: Labels, devices: int, rng: np.random.Generator) -> list[Indices]:
    """Shuffle and cut. Sizes differ by at most one sample."""
    owner = np.empty(len(labels), np.int64)
    owner[rng.permutation(len(labels))] = np.arange(len(labels)) % devices
    return _indices_by_device(owner, devices)


def dirichlet(
    labels: Labels, devices: int, rng: np.random.Generator, concentration: float, min_samples: int = 1
) -> list[Indices]:
    """Spread each class over the devices in shares drawn from Dir(concentration, ..., concentration).

    Small concentrations give few classes per device and very unequal sizes. If a device has fewer than
    ``min_samples``, the largest devices hand samples over (see ``raise_minimum``); nothing is drawn again.
    """
    alpha = np.full(devices, _check_concentration(concentration))
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        mine = rng.permutation(np.flatnonzero(labels == label))
        bounds = np.floor(np.cumsum(_draw(rng, alpha)) * len(mine) + 0.5).astype(np.int64)
        bounds[-1] = len(mine)
        owner[mine] = np.repeat(np.arange(devices), np.diff(bounds, prepend=0))
    return _indices_by_device(raise_minimum(owner, devices, min_samples, rng), devices)


def dirichlet_by_device(labels: Labels, devices: int, rng: np.random.Generator, concentration: float) -> list[Indices]:
    """Draw each device's class mix from a Dirichlet around the global mix. Sizes differ by at most one.

    Samples are not repeated. If a device's classes run out, it fills up from the classes that remain.
    Devices are served in random order.
    """
    values, inverse, left = np.unique(labels, return_inverse=True, return_counts=True)
    alpha = (_check_concentration(concentration) * left * (len(values) / len(labels))).astype(np.float64)
    sizes = np.full(devices, len(labels) // devices)
    sizes[: len(labels) % devices] += 1
    counts = np.zeros((devices, len(values)), np.int64)
    for device in rng.permutation(devices):
        counts[device] = _class_counts(int(sizes[device]), _draw(rng, alpha), left, rng)
        left -= counts[device]
    owner = np.empty(len(labels), np.int64)
    for k in range(len(values)):
        owner[rng.permutation(np.flatnonzero(inverse == k))] = np.repeat(np.arange(devices), counts[:, k])
    return _indices_by_device(owner, devices)


def by_label(
    labels: Labels, devices: int, rng: np.random.Generator, shards_per_device: int = 2, min_samples: int = 1
) -> list[Indices]:
    """Sort by label, cut into equal shards, give each device ``shards_per_device`` of them (McMahan et al., 2017)."""
    shards = devices * shards_per_device
    if shards_per_device < 1 or shards > len(labels):
        raise ConfigError(
            "data.shards_per_device",
            f"{shards_per_device} for {devices} devices cannot be cut from {len(labels)} samples; "
            f"allowed: 1 to {len(labels) // devices}",
        )
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    shard_of = np.arange(len(labels)) * shards // len(labels)
    owner = np.empty(len(labels), np.int64)
    owner[by_class] = rng.permutation(np.arange(shards) % devices)[shard_of]
    return _indices_by_device(raise_minimum(owner, devices, min_samples, rng), devices)


def natural(
    labels: Labels, devices: int, rng: np.random.Generator, groups: npt.NDArray[Any], min_samples: int = 0
) -> list[Indices]:
    """Give each group its own device, in sorted order. With fewer devices, whole groups share a device."""
    column = np.asarray(groups)
    if column.shape != (len(labels),):
        raise ConfigError("data.groups", f"the column has shape {column.shape}; allowed: one entry per training sample")
    if column.dtype.kind == "f" and np.isnan(column).any():
        raise ConfigError("data.groups", "the column has entries that are not a number; give every sample a group")
    try:
        names, inverse = np.unique(column, return_inverse=True)
    except TypeError as error:
        raise ConfigError("data.groups", "the column mixes types that cannot be compared") from error
    if devices > len(names):
        raise ConfigError("fleet.devices", f"{devices} devices for {len(names)} groups; allowed: 1 to {len(names)}")
    home = np.arange(len(names)) if devices == len(names) else rng.permutation(len(names)) % devices
    owner = home[inverse]
    smallest = int(np.bincount(owner, minlength=devices).min())
    if smallest < min_samples:
        raise ConfigError(
            "data.min_samples", f"{min_samples} is too many; a client has {smallest} samples, and natural moves none"
        )
    return _indices_by_device(owner, devices)


def raise_minimum(owner: Indices, devices: int, minimum: int, rng: np.random.Generator) -> Indices:
    """Move samples from the largest devices until each device has at least ``minimum``. The total never changes.

    The largest devices are cut to a common level, the highest that frees enough samples. This equals taking one sample
    at a time from the largest device. Each gives a random part of its samples, which stays together, so that
    receivers keep a skewed mix. Requires ``devices * minimum <= len(owner)``.
    """
    sizes = np.bincount(owner, minlength=devices)
    missing = np.maximum(minimum - sizes, 0)
    deficit = int(missing.sum())
    if deficit == 0:
        return owner
    low, high = (
        minimum,
        int(sizes.max()),
    )  # find the highest level with excess(level) >= deficit; it always holds for low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if int(np.maximum(sizes - middle, 0).sum()) >= deficit else (low, middle)
    give = np.maximum(sizes - low, 0)
    surplus = int(give.sum()) - deficit
    givers = np.flatnonzero(give)
    give[givers[:surplus]] -= 1
    order = rng.permutation(len(owner))
    order = order[np.argsort(owner[order], kind="stable")]  # grouped by device, random inside each
    place = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    moved = order[place < np.repeat(give, sizes)]
    result = owner.copy()
    result[moved] = np.repeat(np.arange(devices), missing)
    return result


def label_counts(labels: Labels, parts: list[Indices], classes: int) -> npt.NDArray[np.int64]:
    """Count the samples per device (rows) and class (columns)."""
    counts = np.zeros((len(parts), classes), np.int64)
    for row, part in zip(counts, parts, strict=True):
        row += np.bincount(labels[part], minlength=classes)
    return counts


@dataclass(frozen=True)
class Skew:
    """How unequal a partition is."""

    devices: int
    samples: int
    size_min: int
    size_median: float
    size_max: int
    classes_per_device: float  # mean number of classes present on a device that has samples
    label_distance: float  # mean total-variation distance of a device's label mix to the global one, 0..1
    size_gini: float  # Gini coefficient of the sizes: 0 all equal, towards 1 all samples on one device


def skew(labels: Labels, parts: list[Indices], classes: int) -> Skew:
    """Compute the figures that ``freshet data partition`` prints."""
    counts = label_counts(labels, parts, classes)
    sizes = counts.sum(axis=1)
    filled = counts[sizes > 0]
    total = int(sizes.sum())
    mixes = filled / np.maximum(filled.sum(axis=1, keepdims=True), 1)
    overall = counts.sum(axis=0) / max(total, 1)
    ranked = np.sort(sizes)
    rank = np.arange(1, len(parts) + 1)
    return Skew(
        devices=len(parts),
        samples=total,
        size_min=int(ranked[0]),
        size_median=float(np.median(ranked)),
        size_max=int(ranked[-1]),
        classes_per_device=float((filled > 0).sum(axis=1).mean()) if len(filled) else 0.0,
        label_distance=float(np.abs(mixes - overall).sum(axis=1).mean() / 2) if len(filled) else 0.0,
        size_gini=float((2 * rank - len(parts) - 1) @ ranked / (len(parts) * max(total, 1))),
    )


def _check_request(labels: Labels, devices: int, min_samples: int) -> None:
    if labels.ndim != 1 or len(labels) == 0:
        raise ConfigError("data.partition", f"labels have shape {labels.shape}; allowed: one label per sample")
    if not 1 <= devices <= len(labels):
        raise ConfigError("fleet.devices", f"{devices} devices for {len(labels)} samples; allowed: 1 to {len(labels)}")
    if min_samples < 0 or devices * min_samples > len(labels):
        raise ConfigError(
            "data.min_samples",
            f"{min_samples} each for {devices} devices cannot come from {len(labels)} samples; "
            f"allowed: 0 to {len(labels) // devices}",
        )


def _check_concentration(value: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError("data.concentration", f"{value} is not possible; allowed: a number above 0")
    return min(float(value), _MAX_CONCENTRATION)


def _draw(rng: np.random.Generator, alpha: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Draw from a Dirichlet. If a small concentration underflows, return the limit: all on one entry."""
    if len(alpha) == 1:
        return np.ones(1)
    with np.errstate(all="ignore"):
        shares = rng.dirichlet(alpha)
    if not np.isfinite(shares).all() or not 0.999 < shares.sum() < 1.001:
        shares = np.zeros(len(alpha))
        shares[rng.choice(len(alpha), p=alpha / alpha.sum())] = 1.0
    return shares


def _class_counts(size: int, mix: npt.NDArray[np.float64], left: Indices, rng: np.random.Generator) -> Indices:
    """Draw one device's samples per class from its mix. Draw again among the other classes if a class runs out."""
    taken = np.zeros_like(left)
    while size > 0:
        open_ = left > taken
        weight = np.where(open_, mix, 0.0)
        if weight.sum() < 1e-12:
            weight = np.where(open_, left - taken, 0).astype(np.float64)
        step = np.minimum(rng.multinomial(size, weight / weight.sum()), left - taken)
        taken += step
        size -= int(step.sum())
    return taken


def _indices_by_device(owner: Indices, devices: int) -> list[Indices]:
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=devices))[:-1])
