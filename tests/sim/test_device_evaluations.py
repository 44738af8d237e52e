"""Evaluations on the devices: at the requested tests, and without any effect on the run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet import ConfigError, Federation, Observer, Stop
from freshet.compute.processes import WorkerPool
from freshet.config import resolve
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.sim.driver import EvaluationSchedule
from tests.conftest import exploring

from .helpers import Crash, CrashError, outputs


def evaluating(federate, method: Any = "fedasmu", **run: Any) -> Federation:
    return federate(method, run={"evaluate_devices": 2, "personalise": 3} | run)


def evaluations(directory: Path) -> list[dict[str, Any]]:
    return [event for event in RunDirectory(directory).events() if event["kind"] == "devices"]


def without_evaluations(directory: Path) -> list[dict[str, Any]]:
    others = [event for event in RunDirectory(directory).events() if event["kind"] != "devices"]
    scores = ("devices_", "personal_", "seq")
    return [{key: value for key, value in event.items() if not key.startswith(scores)} for event in others]


@pytest.mark.parametrize("method", ["fedasmu", "feddyn", "fedavg"])
def test_device_evaluations_change_nothing_of_a_run(method: str, federate, finished, tmp_path: Path) -> None:
    plain = finished(method)
    result = evaluating(federate, exploring(method), evaluate_devices=1).run(60, out=tmp_path / "run")
    assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert without_evaluations(result.directory) == without_evaluations(plain.directory)
    assert len(evaluations(result.directory)) == len(result.rows)
    assert not evaluations(plain.directory) and not any("devices_median" in row for row in plain.rows)
    assert audit(RunDirectory(result.directory)).passed


def test_devices_are_evaluated_at_every_other_test_and_at_the_last(federate, tmp_path: Path) -> None:
    result = evaluating(federate).run(70, out=tmp_path / "run")
    tested = [0.0, 20.0, 40.0, 60.0, 70.0]
    assert [row["time"] for row in result.rows] == tested
    assert [event["time"] for event in evaluations(result.directory)] == [0.0, 40.0, 70.0]
    assert ["devices_median" in row for row in result.rows] == [True, False, True, False, True]


@pytest.mark.parametrize(("run", "at"), [({"until": 60.0}, 60.0), ({"rounds": 2}, None)])
def test_devices_are_evaluated_only_at_the_end(run: dict[str, Any], at: float | None, federate, tmp_path: Path) -> None:
    result = evaluating(federate, "fedavg", evaluate_devices="end", **run).run(out=tmp_path / "run")
    [event] = evaluations(result.directory)
    assert event["time"] == result.rows[-1]["time"] == (at or result.summary["virtual_time"])
    assert [row["time"] for row in result.rows].count(event["time"]) == 1


def test_the_last_model_of_a_diverged_run_is_evaluated(federate, tmp_path: Path) -> None:
    federation = federate("fedavg", run={"evaluate_devices": "end"}, training={"lr": 1e6})
    result = federation.run(300, out=tmp_path / "run")
    assert result.summary["status"] == "diverged"
    assert [event["time"] for event in evaluations(result.directory)] == [result.rows[-1]["time"]]


def test_row_and_summary_hold_statistics_over_the_devices(federate, tmp_path: Path) -> None:
    result = evaluating(federate).run(60, out=tmp_path / "run")
    event, row = evaluations(result.directory)[-1], result.rows[-1]
    for key, prefix in (("accuracy", "devices"), ("personal_accuracy", "personal")):
        values = event[key]
        assert len(values) == 8
        assert row[f"{prefix}_median"] == np.median(values)
        assert (row[f"{prefix}_worst"], row[f"{prefix}_best"]) == (min(values), max(values))
        assert row[f"{prefix}_p10"] == np.quantile(values, 0.1)
        assert row[f"{prefix}_jain"] == pytest.approx(sum(values) ** 2 / (8 * sum(v * v for v in values)))
    named = ("median", "p10", "worst", "best", "jain")
    assert all(result.summary[f"devices_{name}"] == row[f"devices_{name}"] for name in named)
    assert np.median(event["personal_accuracy"]) > np.median(event["accuracy"]), "local steps help on the device"


def test_devices_are_evaluated_on_their_test_shards(federate, tmp_path: Path) -> None:
    shards = [[device] for device in range(8)]
    federation = federate("fedavg", run={"evaluate_devices": "end"}, test_shards=shards)
    result = federation.run(60, out=tmp_path / "run")
    [event] = evaluations(result.directory)
    assert set(event["accuracy"]) <= {0.0, 1.0}
    assert "personal_accuracy" not in event


def test_workers_give_the_same_bits(federate, tmp_path: Path) -> None:
    serial = evaluating(federate).run(60, out=tmp_path / "serial")
    pool = WorkerPool(2)
    try:
        spread = evaluating(federate).run(60, out=tmp_path / "spread", pool=pool)
    finally:
        pool.close()
    logs = [(result.directory / "events.jsonl").read_bytes() for result in (serial, spread)]
    assert logs[0] == logs[1]


@pytest.mark.parametrize(("method", "after"), [("feddyn", 12), ("fedbuff", 60)])
def test_a_resumed_run_has_the_same_evaluations(method: str, after: int, federate, tmp_path: Path) -> None:
    run = {"checkpoint_every": 7.0, "until": 70.0}
    whole = evaluating(federate, method, **run).run(out=tmp_path / "whole")
    with pytest.raises(CrashError):
        evaluating(federate, method, **run).run(out=tmp_path / "cut", observers=[Crash(after)])
    resumed = evaluating(federate, method, **run).resume(tmp_path / "cut")
    assert (tmp_path / "cut" / "events.jsonl").read_bytes() == (tmp_path / "whole" / "events.jsonl").read_bytes()
    keys = [key for key in whole.summary if key.startswith(("devices_", "personal_"))]
    assert len(keys) == 10
    assert {key: resumed.summary[key] for key in keys} == {key: whole.summary[key] for key in keys}


def test_local_steps_use_the_current_learning_rate_even_for_an_old_version(federate, tmp_path: Path) -> None:
    """Many uploads make one version here, so the learning rate changes meanwhile. A resumed run has no cache."""
    run = {"evaluate_devices": 1, "eval_every": 5.0, "checkpoint_every": 7.0, "trigger": "concurrency", "in_flight": 3}
    made = evaluating(federate, {"name": "fedbuff", "K": 40}, **run).with_settings({"training.lr_decay": 0.5})
    whole = made.run(60, out=tmp_path / "whole")
    assert len({event["version"] for event in evaluations(whole.directory)}) < len(evaluations(whole.directory)) - 3
    for after in (15, 25, 35):
        directory = tmp_path / str(after)
        with pytest.raises(CrashError):
            made.run(60, out=directory, observers=[Crash(after)])
        made.resume(directory)
        assert (directory / "events.jsonl").read_bytes() == (whole.directory / "events.jsonl").read_bytes()


@pytest.mark.parametrize("value", ["always", 0, -1, True, 1.5])
def test_other_values_are_rejected(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"run\.evaluate_devices"):
        resolve({"run": {"evaluate_devices": value}})


def test_local_steps_alone_are_rejected_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"run\.personalise.*run\.evaluate_devices"):
        resolve({"run": {"personalise": 5}})


def test_the_schedule_depends_on_time_alone() -> None:
    every = EvaluationSchedule(3, 0)
    assert [every.due(10.0 * n, 10.0, last=False) for n in range(5)] == [True, False, False, True, False]
    assert every.due(33.0, 10.0, last=True)
    assert not EvaluationSchedule(0, 0).due(0.0, 10.0, last=False)


def test_the_settings_survive_the_config_file(federate, tmp_path: Path) -> None:
    result = evaluating(federate, evaluate_devices="end").run(20, out=tmp_path / "run")
    config = resolve(RunDirectory(result.directory).config())
    assert (config.run.evaluate_devices, config.run.personalise) == ("end", 3)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["devices_worst"] is not None


# ---- at the end of a run


def test_the_last_model_of_a_run_that_stops_at_its_target_is_evaluated(federate, tmp_path: Path) -> None:
    run = {"evaluate_devices": "end", "target": 0.2, "stop_at_target": True}
    cut = evaluating(federate, "fedavg", **run).run(300, out=tmp_path / "cut")
    assert (cut.summary["status"], cut.time_to(0.2)) == ("stopped", cut.summary["virtual_time"])
    [event] = evaluations(cut.directory)
    assert (event["time"], event["version"]) == (cut.summary["virtual_time"], cut.summary["versions"])
    assert cut.summary["devices_median"] == cut.rows[-1]["devices_median"]
    assert audit(RunDirectory(cut.directory)).passed
    evaluating(federate, "fedavg", **run).resume(cut.directory)
    whole = evaluating(federate, "fedavg", evaluate_devices="end").run(300, out=tmp_path / "whole")
    assert outputs(cut.directory) == outputs(whole.directory)


def test_the_last_model_of_a_run_stopped_by_an_observer_is_evaluated(federate, tmp_path: Path) -> None:
    class AtTheSecondTest(Observer):
        def on_metrics(self, row: dict[str, Any]) -> None:
            if row["time"] == 20.0:
                raise Stop

    cut = evaluating(federate, "fedavg").run(100, out=tmp_path / "cut", observers=[AtTheSecondTest()])
    assert [event["time"] for event in evaluations(cut.directory)] == [0.0, 20.0]


@pytest.mark.parametrize("when", ["end", 2])
@pytest.mark.parametrize("first", [20.0, 47.0, 60.0])
def test_an_extended_run_has_no_evaluation_at_its_earlier_end(
    first: float, when: str | int, federate, tmp_path: Path
) -> None:
    short = evaluating(federate, "fedavg", evaluate_devices=when).run(first, out=tmp_path / "part")
    assert evaluations(short.directory)[-1]["time"] == first
    assert [row["time"] for row in short.rows].count(first) == 1
    evaluating(federate, "fedavg", evaluate_devices=when).resume(tmp_path / "part", until=100)
    whole = evaluating(federate, "fedavg", evaluate_devices=when).run(100, out=tmp_path / "whole")
    assert outputs(tmp_path / "part") == outputs(whole.directory)
    assert [event["time"] for event in evaluations(tmp_path / "part")] == (
        [100.0] if when == "end" else [0, 40, 80, 100]
    )


def test_a_kill_after_the_last_checkpoint_adds_no_evaluation(federate, tmp_path: Path) -> None:
    whole = evaluating(federate, evaluate_devices="end").run(60, out=tmp_path / "run")
    before = outputs(whole.directory)
    (whole.directory / "summary.json").unlink()
    evaluating(federate, evaluate_devices="end").resume(whole.directory)
    assert outputs(whole.directory) == before
