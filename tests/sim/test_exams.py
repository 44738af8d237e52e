"""Tests on the devices: when asked for, at these tests, and without any effect on the run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freshet import ConfigError, Federation
from freshet.compute.processes import WorkerPool
from freshet.config import resolve
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.sim.exams import Exams

from .test_resume import Crash, CrashError


def asked(federate, method: Any = "fedasmu", **run: Any) -> Federation:
    return federate(method, run={"evaluate_devices": 2, "personalise": 3} | run)


def exams(directory: Path) -> list[dict[str, Any]]:
    return [event for event in RunDirectory(directory).events() if event["kind"] == "devices"]


def without_exams(directory: Path) -> list[dict[str, Any]]:
    kept = [event for event in RunDirectory(directory).events() if event["kind"] != "devices"]
    scores = ("devices_", "personal_", "seq")
    return [{key: value for key, value in event.items() if not key.startswith(scores)} for event in kept]


@pytest.mark.parametrize("method", ["fedasmu", "feddyn", "fedavg"])
def test_they_change_nothing_of_a_run(method: str, federate, finished, tmp_path: Path) -> None:
    plain = finished(method)
    result = asked(federate, method, evaluate_devices=1).run(60, out=tmp_path / "run")
    assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert without_exams(result.directory) == without_exams(plain.directory)
    assert len(exams(result.directory)) == len(result.rows)
    assert not exams(plain.directory) and not any("devices_median" in row for row in plain.rows)
    assert audit(RunDirectory(result.directory)).passed


def test_at_every_other_test_and_at_the_last(federate, tmp_path: Path) -> None:
    result = asked(federate).run(70, out=tmp_path / "run")
    tested = [0.0, 20.0, 40.0, 60.0, 70.0]
    assert [row["time"] for row in result.rows] == tested
    assert [event["time"] for event in exams(result.directory)] == [0.0, 40.0, 70.0]
    assert ["devices_median" in row for row in result.rows] == [True, False, True, False, True]


@pytest.mark.parametrize(("run", "at"), [({"until": 60.0}, 60.0), ({"rounds": 2}, None)])
def test_at_the_end_alone(run: dict[str, Any], at: float | None, federate, tmp_path: Path) -> None:
    result = asked(federate, "fedavg", evaluate_devices="end", **run).run(out=tmp_path / "run")
    [event] = exams(result.directory)
    assert event["time"] == result.rows[-1]["time"] == (at or result.summary["virtual_time"])
    assert [row["time"] for row in result.rows].count(event["time"]) == 1


def test_a_run_that_stops_because_it_diverged_has_its_last_model_tested_too(federate, tmp_path: Path) -> None:
    federation = federate("fedavg", run={"evaluate_devices": "end"}, training={"lr": 1e6})
    result = federation.run(300, out=tmp_path / "run")
    assert result.summary["status"] == "diverged"
    assert [event["time"] for event in exams(result.directory)] == [result.rows[-1]["time"]]


def test_row_and_summary_hold_what_the_devices_hold(federate, tmp_path: Path) -> None:
    result = asked(federate).run(60, out=tmp_path / "run")
    event, row = exams(result.directory)[-1], result.rows[-1]
    for key, prefix in (("accuracy", "devices"), ("personal_accuracy", "personal")):
        values = event[key]
        assert len(values) == 8
        assert row[f"{prefix}_median"] == np.median(values)
        assert (row[f"{prefix}_worst"], row[f"{prefix}_best"]) == (min(values), max(values))
        assert row[f"{prefix}_p10"] == np.quantile(values, 0.1)
        assert row[f"{prefix}_jain"] == pytest.approx(sum(values) ** 2 / (8 * sum(v * v for v in values)))
    named = ("median", "p10", "worst", "best", "jain")
    assert all(result.summary[f"devices_{name}"] == row[f"devices_{name}"] for name in named)
    assert np.median(event["personal_accuracy"]) > np.median(event["accuracy"]), "local steps help at home"


def test_test_shards_are_what_devices_are_tested_on(federate, tmp_path: Path) -> None:
    shards = [[device] for device in range(8)]
    federation = federate("fedavg", run={"evaluate_devices": "end"}, test_shards=shards)
    result = federation.run(60, out=tmp_path / "run")
    [event] = exams(result.directory)
    assert set(event["accuracy"]) <= {0.0, 1.0}
    assert "personal_accuracy" not in event


def test_workers_give_the_same_bits(federate, tmp_path: Path) -> None:
    serial = asked(federate).run(60, out=tmp_path / "serial")
    pool = WorkerPool(2)
    try:
        spread = asked(federate).run(60, out=tmp_path / "spread", pool=pool)
    finally:
        pool.close()
    logs = [(result.directory / "events.jsonl").read_bytes() for result in (serial, spread)]
    assert logs[0] == logs[1]


@pytest.mark.parametrize(("method", "after"), [("feddyn", 12), ("fedbuff", 60)])
def test_a_resumed_run_has_the_same(method: str, after: int, federate, tmp_path: Path) -> None:
    run = {"checkpoint_every": 7.0, "until": 70.0}
    whole = asked(federate, method, **run).run(out=tmp_path / "whole")
    with pytest.raises(CrashError):
        asked(federate, method, **run).run(out=tmp_path / "cut", observers=[Crash(after)])
    resumed = asked(federate, method, **run).resume(tmp_path / "cut")
    assert (tmp_path / "cut" / "events.jsonl").read_bytes() == (tmp_path / "whole" / "events.jsonl").read_bytes()
    keys = [key for key in whole.summary if key.startswith(("devices_", "personal_"))]
    assert len(keys) == 10
    assert {key: resumed.summary[key] for key in keys} == {key: whole.summary[key] for key in keys}


def test_local_steps_are_at_the_rate_of_the_test_though_the_version_is_the_same(federate, tmp_path: Path) -> None:
    """A version outlives a change of the learning rate where many uploads make one; a resumed run has no cache."""
    run = {"evaluate_devices": 1, "eval_every": 5.0, "checkpoint_every": 7.0, "trigger": "concurrency", "in_flight": 3}
    made = asked(federate, {"name": "fedbuff", "K": 40}, **run).changed({"training.lr_decay": 0.5})
    whole = made.run(60, out=tmp_path / "whole")
    assert len({event["version"] for event in exams(whole.directory)}) < len(exams(whole.directory)) - 3
    for after in (15, 25, 35):
        directory = tmp_path / str(after)
        with pytest.raises(CrashError):
            made.run(60, out=directory, observers=[Crash(after)])
        made.resume(directory)
        assert (directory / "events.jsonl").read_bytes() == (whole.directory / "events.jsonl").read_bytes()


@pytest.mark.parametrize("value", ["always", 0, -1, True, 1.5])
def test_anything_else_is_refused_in_a_sentence(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"run\.evaluate_devices"):
        resolve({"run": {"evaluate_devices": value}})


def test_local_steps_alone_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"run\.personalise.*run\.evaluate_devices"):
        resolve({"run": {"personalise": 5}})


def test_when_they_are_due_follows_from_the_time() -> None:
    every = Exams(3, 0)
    assert [every.due(10.0 * n, 10.0, last=False) for n in range(5)] == [True, False, False, True, False]
    assert every.due(33.0, 10.0, last=True)
    assert not Exams(0, 0).due(0.0, 10.0, last=False)


def test_the_settings_survive_the_config_file(federate, tmp_path: Path) -> None:
    result = asked(federate, evaluate_devices="end").run(20, out=tmp_path / "run")
    config = resolve(RunDirectory(result.directory).config())
    assert (config.run.evaluate_devices, config.run.personalise) == ("end", 3)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["devices_worst"] is not None
