"""Handwritten run directories for the tests of reports."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from freshet.methods import builtin_about

from .helpers import lines

Write = Callable[..., Path]


def world_of(devices: int) -> dict[str, Any]:
    """Devices that train 10 s (5 epochs of 2 s); 1 MB takes 1 s down and 1.5 s up, a short message 0.5 s each way."""
    return {
        "data": "custom",
        "classes": ["cat", "dog"],
        "train_samples": 5 * devices,
        "test_samples": 7,
        "model_bytes": 1_000_000,
        "train_seconds": [10.0] * devices,
        "up_rate": [1e6] * devices,
        "down_rate": [2e6] * devices,
        "samples": [5] * devices,
        "label_counts": [[3, 2]] * devices,
        "up_latency": 0.5,
        "down_latency": 0.5,
        "on_seconds": 0.0,
        "off_seconds": 0.0,
        "loss": 0.0,
        "aside": ["run.executor", "run.workers", "run.target"],
        "curves": [],
    }


def write_run(
    folder: Path,
    *,
    method: str = "fedasmu",
    seed: int = 1,
    status: str | None = "finished",
    accuracy: Iterable[float | None] = (0.1, 0.5, 0.9),
    events: Iterable[dict[str, Any]] = (),
    summary: dict[str, Any] | None = None,
    world: dict[str, Any] | None = None,
    metric: str = "accuracy",
    **config: dict[str, Any],
) -> Path:
    """A run directory tested every 10 s; without status it has no summary, like one that was killed.

    ``world`` changes some of ``world_of`` its devices. A ``metric`` of another name is better when it is less, its
    values are those of ``accuracy``, and it has no target of its own.
    """
    folder.mkdir(parents=True)
    tables: dict[str, Any] = {
        "method": {"name": method},
        "training": {"epochs": 5},
        "fleet": {"devices": 2},
        "data": {"name": "custom"},
        "model": {"name": "custom"},
        "run": {"seed": seed, "until": 100.0, "eval_every": 10.0, "target": 0.8},
    }
    judged = {"metric": metric, "direction": "max"}
    if metric != "accuracy":
        judged["direction"] = "min"
        del tables["run"]["target"]
    for section, values in config.items():
        tables[section] = tables.get(section, {}) | values
    (folder / "config.toml").write_text(tomli_w.dumps(tables))
    about = builtin_about(method)
    drawn = {"curves": [list(curve) for curve in about.curves] if about else []}
    (folder / "world.json").write_text(
        json.dumps(world_of(tables["fleet"]["devices"]) | drawn | judged | (world or {}))
    )
    rows = [
        {
            "time": 10.0 * i,
            "version": i + 1,
            metric: value,
            "loss": 1.0,
            "bytes_up": 1000 * i,
            "bytes_down": 2000 * i,
        }
        for i, value in enumerate(accuracy)
    ]
    (folder / "metrics.jsonl").write_text(lines(rows))
    (folder / "events.jsonl").write_text(lines({"seq": i, **event} for i, event in enumerate(events, 1)))
    if status is not None:
        facts = {"method": method, "seed": seed, "status": status, "uploads": 1, "discards": 0}
        (folder / "summary.json").write_text(json.dumps(facts | (summary or {})))
    return folder


@pytest.fixture
def written(tmp_path: Path) -> Write:
    """``written("a", seed=2, accuracy=[...])``: a run directory in the test's folder."""
    return lambda name, **given: write_run(tmp_path / name, **given)
