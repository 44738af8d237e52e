"""Every cell of the paper runs: its network on its data, with its rates, for two virtual rounds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import freshet.assembly
from freshet import Federation
from freshet.config import resolve
from freshet.data.dataset import DataSet
from freshet.data.sources import load
from freshet.errors import DataError
from freshet.paper.cells import CELLS, cell_tables
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory

SHAPES = {"fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32), "tiny-imagenet": (3, 64, 64)}
CLASSES = {"fashion-mnist": 10, "cifar10": 10, "cifar100": 100, "tiny-imagenet": 200, "imdb": 2}


def stand_in(name: str) -> DataSet:
    """Random samples of the right shape, where the data set is not on this machine."""
    rng, classes = np.random.default_rng(0), CLASSES[name]
    y = np.arange(600) % classes
    if name == "imdb":
        x = rng.integers(2, 500, (600, 64), dtype=np.int32)
        return DataSet(name, x, y, x, y, classes, pad_id=0, vocabulary=500)
    x = rng.integers(0, 256, (600, *SHAPES[name]), dtype=np.uint8)
    half = (0.5,) * x.shape[1]
    return DataSet(name, x, y, x, y, classes, mean=half, std=half)


def real_or_stand_in(name: str, data_dir: Any = None, **options: Any) -> DataSet:
    try:
        return load(name, data_dir, download=False, **options)
    except DataError:
        return stand_in(name)


@pytest.mark.parametrize("name", list(CELLS))
def test_a_cell_runs_two_virtual_rounds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freshet.assembly, "load", real_or_stand_in)
    tables = cell_tables(CELLS[name], "fedssmu")
    tables["fleet"] |= {"devices": 6}
    tables["run"] |= {"per_round": 2, "until": 200.0, "executor": "serial", "eval_every": 200.0}
    tables["training"] |= {"epochs": 1, "batch_size": 20}
    tables["data"] |= {"train_samples": 240, "test_samples": 200, "vocabulary": 2000, "length": 64}
    config = resolve(tables)
    result = Federation.from_config(config).run(out=tmp_path / "run")
    rounds = {event["round"] for event in RunDirectory(result.directory).events() if event["kind"] == "aggregate"}
    assert len(rounds) >= 2
    assert np.isfinite(result.loss).all() and result.summary["rejected"] == 0
    assert audit(RunDirectory(result.directory)).passed
    assert (config.model.name, config.run.target) == (CELLS[name].model, CELLS[name].target)
