"""Trackers: one small interface for TensorBoard, MLflow, Weights & Biases and users; none can end a run."""

import builtins
import importlib.util
import logging
import sys
import types
from typing import ClassVar

import numpy as np
import pytest

from freshet import Federation, trackers
from freshet.errors import FreshetError, RunError
from freshet.trackers import MLflowTracker, TensorBoardTracker, Tracker, WandbTracker, tracker


class Memory(Tracker):
    def __init__(self):
        super().__init__()
        self.points, self.end = [], None

    def series(self, values, step):
        self.points.append((step, dict(values)))

    def close(self, summary):
        self.end = summary


def test_a_tracker_gets_every_test_and_the_aggregations_between(federate, tmp_path):
    memory = Memory()
    result = federate("fedasmu").run(60, out=tmp_path / "run", observers=[memory])
    assert [step for step, _ in memory.points] == [0, 20, 40, 60]
    assert memory.points[-1][1]["accuracy"] == result.accuracy[-1]
    assert "time" not in memory.points[0][1]
    assert memory.points[-1][1]["mean_staleness"] >= 1
    assert 0 < memory.points[-1][1]["mean_alpha"] < 1
    assert memory.end["status"] == "finished"


def test_means_are_those_since_the_last_test():
    memory = Memory()
    for staleness in (1, 3):
        parts = [{"device": 0, "base": 1, "staleness": s, "weight": 0.25} for s in (1, staleness)]
        memory.on_event({"kind": "aggregate", "contributions": parts, "alpha": 0.5})
    memory.on_event({"kind": "upload"})
    memory.on_metrics({"time": 9.6, "accuracy": None, "loss": 2, "version": 3})
    memory.on_metrics({"time": 20.0, "accuracy": 0.5, "loss": 1, "version": 3})
    assert memory.points[0] == (10, {"loss": 2.0, "version": 3.0, "mean_staleness": 2.0, "mean_alpha": 0.5})
    assert memory.points[1] == (20, {"accuracy": 0.5, "loss": 1.0, "version": 3.0})


def test_a_tracker_gets_the_scores_of_every_device(tmp_path):
    memory = Memory()
    run = {"rounds": 2, "per_round": 2, "evaluate_devices": "end", "executor": "serial"}
    result = Federation(devices=4, method="fedavg", run=run).run(out=tmp_path / "run", observers=[memory])
    (step, scores), *_ = [point for point in memory.points if "devices/accuracy/0" in point[1]]
    assert step == round(result.time[-1])
    assert set(scores) == {f"devices/{name}/{device}" for name in ("accuracy", "loss") for device in range(4)}
    assert np.median([scores[f"devices/accuracy/{k}"] for k in range(4)]) == result.rows[-1]["devices_median"]


def test_a_device_without_a_score_has_no_point():
    memory = Memory()
    memory.on_event({"kind": "devices", "time": 3.2, "version": 4, "accuracy": [0.5, None], "loss": [1.0, None]})
    assert memory.points == [(3, {"devices/accuracy/0": 0.5, "devices/loss/0": 1.0})]


def test_mlflow_gets_at_most_a_thousand_metrics_at_once(mlflow):
    batches = []
    tracked = MLflowTracker("here")
    tracked._client.log_batch = lambda run, metrics: batches.append(len(metrics))
    tracked.series({f"devices/accuracy/{k}": 0.5 for k in range(2300)}, 1)
    assert batches == [1000, 1000, 300]


def test_a_tracker_that_fails_warns_once_and_the_run_continues(federate, tmp_path, caplog):
    class Broken(Tracker):
        def series(self, values, step):
            raise ConnectionError("the server is gone")

    with caplog.at_level(logging.WARNING):
        plain = federate("fedavg").run(40, out=tmp_path / "a")
        tracked = federate("fedavg").run(40, out=tmp_path / "b", observers=[Broken()])
    assert plain.summary["weights_sha256"] == tracked.summary["weights_sha256"]
    said = [record.getMessage() for record in caplog.records if "is reduced" not in record.getMessage()]
    assert said == ["Broken stops tracking this run: the server is gone"]


# ---- MLflow, with a stand-in for its client


class FakeClient:
    made: ClassVar[list] = []

    def __init__(self, tracking_uri):
        self.uri, self.params, self.metrics, self.tags, self.status = tracking_uri, {}, [], {}, None
        FakeClient.made.append(self)

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        if "refuse" in self.uri:
            raise ConnectionError("refused")
        self.experiment = name
        return "7"

    def create_run(self, number, run_name=None):
        self.name = run_name
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"run-of-{number}"))

    def log_param(self, run, key, value):
        self.params[key] = value

    def log_batch(self, run, metrics):
        self.metrics += [(run, m.key, m.value, m.step) for m in metrics]

    def log_metric(self, run, key, value):
        self.metrics.append((run, key, value, 0))

    def set_tag(self, run, key, value):
        self.tags[key] = value

    def set_terminated(self, run, status):
        self.status = status


@pytest.fixture
def mlflow(monkeypatch):
    module, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    module.MlflowClient = FakeClient
    entities.Metric = lambda key, value, timestamp, step: types.SimpleNamespace(key=key, value=value, step=step)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    FakeClient.made = []


def test_mlflow_gets_settings_metrics_and_the_end(federate, tmp_path, mlflow):
    federation = federate("fedavg")
    watch = tracker("mlflow:http://localhost:5000", federation.config.tables(), "mine")
    assert isinstance(watch, MLflowTracker)
    result = federation.run(40, out=tmp_path / "run", observers=[watch])
    client = FakeClient.made[0]
    assert (client.uri, client.experiment, client.name) == ("http://localhost:5000", "freshet", "mine")
    assert (client.params["method.name"], client.params["fleet.devices"]) == ("fedavg", 8)
    assert ("run-of-7", "accuracy", result.accuracy[-1], 40) in client.metrics
    assert client.tags["freshet.weights_sha256"] == result.summary["weights_sha256"]
    assert client.status == "FINISHED"


def test_an_mlflow_server_that_fails_is_one_sentence(mlflow):
    with pytest.raises(RunError, match="cannot be used"):
        MLflowTracker("http://refuse")


# ---- Weights & Biases, with a stand-in, and the real one without its server


class FakeWandbRun:
    def __init__(self):
        self.points, self.axes, self.summary, self.code = [], {}, {}, None

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, values):
        self.points.append(values)

    def finish(self, exit_code):
        self.code = exit_code


@pytest.fixture
def wandb(monkeypatch):
    module = types.ModuleType("wandb")
    module.started = []

    def init(**given):
        if given["project"] == "refuse":
            raise ConnectionError("refused")
        module.started.append((given, FakeWandbRun()))
        return module.started[-1][1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_settings_metrics_over_virtual_time_and_the_end(federate, tmp_path, wandb):
    federation = federate("fedavg")
    watch = tracker("wandb:team/mine", federation.config.tables(), "first")
    assert isinstance(watch, WandbTracker)
    result = federation.run(40, out=tmp_path / "run", observers=[watch])
    (given, run) = wandb.started[0]
    assert (given["entity"], given["project"], given["name"]) == ("team", "mine", "first")
    assert (given["config"]["method.name"], given["config"]["fleet.devices"]) == ("fedavg", 8)
    assert run.axes == {"time": None, "*": "time"}
    assert [point["time"] for point in run.points] == [0, 20, 40]
    assert run.points[-1]["accuracy"] == result.accuracy[-1]
    assert run.summary["summary.weights_sha256"] == result.summary["weights_sha256"]
    assert run.code == 0


def test_a_wandb_project_that_refuses_is_one_sentence(wandb):
    with pytest.raises(RunError, match="project refuse cannot be used"):
        WandbTracker("refuse")


def test_wandb_offline_writes_a_run_for_a_later_sync(federate, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install 'freshet-fl[track]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    watch = tracker("wandb:mine", {"method": {"name": "fedavg"}}, "first")
    federate("fedavg").run(40, out=tmp_path / "run", observers=[watch])
    assert not watch._broken
    (made,) = (tmp_path / "wandb").glob("offline-run-*")
    (kept,) = made.glob("*.wandb")
    assert b"mean_staleness" in kept.read_bytes()


# ---- TensorBoard, the real one


def test_tensorboard_files_hold_the_series(federate, tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed: pip install 'freshet-fl[track]'")
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    federation = federate("fedasmu")
    watch = tracker(f"tensorboard:{tmp_path / 'tb'}", federation.config.tables())
    assert isinstance(watch, TensorBoardTracker)
    result = federation.run(60, out=tmp_path / "run", observers=[watch])
    found = accumulator.EventAccumulator(str(tmp_path / "tb"))
    found.Reload()
    points = found.Scalars("freshet/accuracy")
    assert [point.step for point in points] == [0, 20, 40, 60]
    assert points[-1].value == pytest.approx(result.accuracy[-1])
    assert "freshet/mean_alpha" in found.Tags()["scalars"]
    assert {"config/text_summary", "summary/text_summary"} <= set(found.Tags()["tensors"])


# ---- words


@pytest.mark.parametrize("spec", ["", "tensorboard", "tensorboard:", "mlflow:", "wandb:", "wandb:team/", "x"])
def test_a_wrong_spec_is_one_sentence(spec):
    with pytest.raises(FreshetError, match="tensorboard:DIR, mlflow:URI or wandb:PROJECT"):
        tracker(spec)


@pytest.mark.parametrize("spec", ["tensorboard:logs", "mlflow:http://x", "wandb:mine"])
def test_missing_packages_are_one_sentence(monkeypatch, spec):
    def gone(name):
        raise ImportError(name)

    monkeypatch.setattr(trackers.importlib, "import_module", gone)
    with pytest.raises(RunError, match=r"pip install 'freshet-fl\[track\]'"):
        tracker(spec)


def test_importing_trackers_needs_no_tracking_package(monkeypatch):
    real = builtins.__import__

    def guarded(name, *rest):
        assert name.split(".")[0] not in ("tensorboard", "mlflow", "wandb")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", guarded)
    spec = importlib.util.spec_from_file_location("another_copy_of_trackers", trackers.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
