"""Run directories made by hand, line by line, for reports."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

Write = Callable[..., Path]

#: Two devices that train 10 s (5 epochs of 2 s); 1 MB takes 1 s down and 1.5 s up, a short message 0.5 s each way.
FLEET = {"devices": 2, "fastest": 10.0, "ratio": 1.0, "up_mbps": 8.0, "down_mbps": 16.0}
FLEET |= {"up_latency": 0.5, "down_latency": 0.5}


def lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_run(
    folder: Path,
    *,
    method: str = "fedasmu",
    seed: int = 1,
    status: str | None = "finished",
    accuracy: Iterable[float | None] = (0.1, 0.5, 0.9),
    events: Iterable[dict[str, Any]] = (),
    summary: dict[str, Any] | None = None,
    **config: dict[str, Any],
) -> Path:
    """A run directory tested every 10 s; without status it has no summary, like one that was killed."""
    folder.mkdir(parents=True)
    tables: dict[str, Any] = {
        "method": {"name": method},
        "training": {"epochs": 5},
        "fleet": FLEET,
        "data": {"name": "custom"},
        "model": {"name": "custom"},
        "run": {"seed": seed, "until": 100.0, "eval_every": 10.0, "target": 0.8},
    }
    for section, values in config.items():
        tables[section] = tables.get(section, {}) | values
    (folder / "config.toml").write_text(tomli_w.dumps(tables))
    rows = [
        {
            "time": 10.0 * i,
            "version": i + 1,
            "accuracy": value,
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
