"""The handwritten digits that come with scikit-learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from freshet.data.catalogue import ReadOptions
from freshet.data.dataset import Array, stratified_indices


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
