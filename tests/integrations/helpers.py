"""A small federation for other libraries' training, run with three methods on one process and on two workers."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from freshet import Federation, RunDirectory
from freshet.compute.processes import WorkerPool
from freshet.result import Result
from freshet.runs.audit import audit

#: The device's part of FedASMU asks for fresh models; the others do not.
METHODS: list[Any] = ["fedasmu", {"name": "fedbuff", "K": 3}, "fedavg"]
UNTIL = 20.0
TRAINING = {"epochs": 3, "batch_size": 16, "lr": 0.1, "fast": False}


def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    x = rng.normal(size=(count, 6)).astype(np.float32)
    return x, x[:, :3].argmax(1)


def build(model: Any, trainer: Any, method: Any, **training: Any) -> Federation:
    return Federation(
        model,
        samples(240),
        samples(90),
        devices=6,
        method=method,
        trainer=trainer,
        training=TRAINING | training,
        fleet={"fastest": 3.0, "ratio": 2.0, "time": "trip"},
        run={"executor": "serial", "per_round": 3, "eval_every": 5.0},
    )


def events(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(result.directory) / "events.jsonl").read_text().splitlines()]


def run_on_one_and_two(model: Any, trainer: Any, method: Any, pool: WorkerPool, folder: Path) -> Result:
    """Run on this process and on two workers. The logs are the same, the model learns, the log passes its audit."""
    one = build(model, trainer, method).run(UNTIL, out=folder / "one")
    two = build(model, trainer, method).run(UNTIL, out=folder / "two", pool=pool)
    assert events(one) == events(two) and one.summary["weights_sha256"] == two.summary["weights_sha256"]
    assert one.summary["aggregations"] >= 2 and one.loss[-1] < one.loss[0]
    assert audit(RunDirectory(one.directory)).problem is None
    return one
