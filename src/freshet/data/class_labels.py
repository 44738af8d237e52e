"""Class labels in another form than one integer per sample: what they look like, and what makes integers of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Remedy(NamedTuple):
    """What labels look like, and the expression in ``y`` that makes class labels of them."""

    looks: str
    give: str


def are_plain(y: Array) -> bool:
    """Whether there is one integer per sample."""
    return y.dtype.kind == "i" and y.ndim == 1


def remedy(y: Array) -> Remedy | None:
    """How to make class labels of these, or None if they are such already or look like none."""
    if are_plain(y) or not _are_whole(y):
        return None
    cast, floats = (".astype(int)", " of floats") if y.dtype.kind == "f" else ("", "")
    if y.ndim == 1:
        return Remedy("whole numbers stored as floats", "y.astype(int)")
    if y.ndim == 2 and y.shape[1] == 1:
        return Remedy(f"one column{floats}", f"y[:, 0]{cast}")
    if y.ndim == 2 and y.max() == 1 and (y.sum(axis=1) == 1).all():
        return Remedy("one-hot rows", "y.argmax(1)")
    return None


def _are_whole(y: Array) -> bool:
    return bool(y.size) and bool((y >= 0).all()) and bool((np.floor(y) == y).all())


def agreement(y_train: Array, y_test: Array) -> str:
    """What to do about training and test labels of different types or shapes, as the end of a sentence; or nothing."""
    for side, y, other in (("train", y_train, y_test), ("test", y_test, y_train)):
        found = remedy(y) if are_plain(other) else None
        if found is not None:
            regression = ", for regression floats in both" if y.dtype.kind == "f" and y.ndim == 1 else ""
            return f": the {side} labels are {found.looks}; for classes give {found.give}{regression}"
    return ": for regression give floats in both" if y_train.shape[1:] == y_test.shape[1:] else ""
