"""Early stopping and the best model: when a run ends, which model is kept, and both after a resume."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import freshet
from freshet import Federation
from freshet.errors import RunError
from freshet.runs.reader import RunDirectory
from freshet.runs.records import Metric
from freshet.runs.summary import tests_since_best as since_best
from freshet.runs.writer import BestModel
from tests.sim.helpers import Crash, CrashError, outputs


def federation(**run: Any) -> Federation:
    settings = {"until": 400.0, "eval_every": 10.0, "executor": "serial", "per_round": 3, "checkpoint_every": 20.0}
    # a large rate, so that the accuracy goes up and down
    training = {"epochs": 3, "lr": 0.7, "batch_size": 16}
    return Federation("mlp", data={"partition": "by_label"}, devices=8, training=training, run={**settings, **run})


@pytest.mark.parametrize(
    ("values", "direction", "expected"),
    [
        ([], "max", 0),
        ([0.1], "max", 0),
        ([0.1, 0.3, 0.3, 0.2], "max", 2),  # as good is not better
        ([0.1, None, 0.2, None], "max", 1),
        ([None, None], "max", 2),
        ([3.0, 1.0, 2.0], "min", 1),
    ],
)
def test_tests_since_the_best(values: list[float | None], direction: str, expected: int) -> None:
    assert since_best([{"mae": value} for value in values], Metric("mae", direction)) == expected


def test_the_best_model_is_the_first_of_equals() -> None:
    best, metric = BestModel(), Metric("loss", "min")
    for time, value in enumerate([None, 2.0, 1.0, 1.0, 3.0]):
        best.offer({"loss": value, "time": time, "version": 10 + time}, metric, np.full(1, time))
    assert (best.time, best.version, best.weights) == (2, 12, np.full(1, 2))
    assert best.summary() == {"best_time": 2, "best_version": 12}


def test_a_run_ends_when_tests_get_no_better(tmp_path: Path) -> None:
    result = federation(patience=3).run(out=tmp_path / "run")
    assert result.summary["status"] == "stopped" and result.summary["stopped"] == "3 tests in a row were no better"
    values = list(result.accuracy)
    assert since_best([{"accuracy": value} for value in values]) >= 3
    for stop in range(1, len(values) - 1):  # nothing ended it earlier
        assert since_best([{"accuracy": value} for value in values[:stop]]) < 3
    assert result.summary["virtual_time"] < 400


def test_without_patience_the_same_run_goes_on(tmp_path: Path) -> None:
    short, whole = federation(patience=3).run(out=tmp_path / "a"), federation().run(out=tmp_path / "b")
    tests = len(short.rows) - 1
    assert whole.summary["status"] == "finished" and len(whole.rows) > tests
    assert list(short.accuracy[:tests]) == list(whole.accuracy[:tests])


@pytest.mark.parametrize("after", [15, 60])
def test_a_resumed_run_has_the_same_end_and_the_same_best_model(tmp_path: Path, after: int) -> None:
    settings: dict[str, Any] = {"patience": 3, "keep": "best"}
    federation(**settings).run(out=tmp_path / "a")
    with pytest.raises(CrashError):
        federation(**settings).run(out=tmp_path / "b", observers=[Crash(after)])
    federation(**settings).resume(tmp_path / "b")
    assert outputs(tmp_path / "a") == outputs(tmp_path / "b")
    models = [(tmp_path / name / "best.safetensors").read_bytes() for name in "ab"]
    assert models[0] == models[1]


def test_workers_keep_the_same_best_model(tmp_path: Path) -> None:
    for name, executor in (("a", "serial"), ("b", "processes")):
        federation(keep="best", executor=executor, workers=2, until=120.0).run(out=tmp_path / name)
    models = [(tmp_path / name / "best.safetensors").read_bytes() for name in "ab"]
    assert models[0] == models[1]


def test_the_best_model_has_the_score_of_its_test(tmp_path: Path) -> None:
    result = federation(keep="best").run(out=tmp_path / "run")
    assert result.summary["best_accuracy"] > result.summary["final_accuracy"]
    row = next(row for row in result.rows if row["time"] == result.summary["best_time"])
    assert (row["accuracy"], row["version"]) == (result.summary["best_accuracy"], result.summary["best_version"])
    data = federation().dataset
    for module in (result.module(best=True), freshet.load(tmp_path / "run").module(best=True)):
        with torch.no_grad():
            right = module(torch.from_numpy(np.asarray(data.x_test))).argmax(1).numpy() == data.y_test
        assert right.mean() == pytest.approx(row["accuracy"])


def test_a_run_that_kept_none_says_so(tmp_path: Path) -> None:
    result = federation(until=20.0).run(out=tmp_path / "run")
    assert not (tmp_path / "run" / "best.safetensors").exists() and "best_time" not in result.summary
    with pytest.raises(RunError, match=r'has no best model; make the run with run\.keep = "best"'):
        result.module(best=True)


def test_patience_changes_a_runs_identity_and_keep_does_not() -> None:
    plain, patient, best = (federation(**run).config for run in ({}, {"patience": 2}, {"keep": "best"}))
    assert plain.sha256() == best.sha256() != patient.sha256()


def test_a_stopped_run_can_go_on(tmp_path: Path) -> None:
    made = federation(patience=2)
    first = made.run(out=tmp_path / "run")
    longer = made.resume(tmp_path / "run")
    assert longer.summary["virtual_time"] > first.summary["virtual_time"]
    assert RunDirectory(tmp_path / "run").summary()["status"] in ("stopped", "finished")


def test_model_that_is_tested_again_is_not_counted_again() -> None:
    rows = [{"time": float(k), "version": version, "accuracy": 0.5} for k, version in enumerate([1, 1, 1, 1, 2, 2, 3])]
    assert since_best(rows) == 2
