"""A run that fails ends with a complete log, a written summary and no process left."""

import json
import os
import threading

import pytest
import torch
from torch import nn

from freshet import Federation
from freshet.errors import ConfigError, RunError
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory

from .helpers import children


class Fragile(nn.Module):
    """Fails in training once its weights have moved: the first trips succeed, later ones fail."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.layer.weight.detach().abs().max() > 0.05:
            raise RuntimeError("too heavy")
        return self.layer(x.flatten(1))


def fragile(executor: str, **training: object) -> Federation:
    return Federation(
        method="fedasmu",
        model=Fragile,
        data={"train_samples": 240, "test_samples": 120},
        fleet={"devices": 8, "fastest": 3.0, "ratio": 4.0},
        training={"epochs": 2, "lr": 0.02} | training,
        run={"per_round": 3, "period": 4.0, "in_flight": 6, "executor": executor, "workers": 2},
    )


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_an_error_in_training_leaves_a_complete_log_and_no_process(executor, tmp_path):
    before, threads = children(os.getpid()), set(threading.enumerate())
    with pytest.raises((RunError, RuntimeError), match="too heavy"):
        fragile(executor).run(200, out=tmp_path / "run")
    assert children(os.getpid()) <= before and set(threading.enumerate()) <= threads
    run = RunDirectory(tmp_path / "run")
    assert run.summary()["status"] == "failed"
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert len(lines) > 10, "it failed in the middle"
    assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1))
    assert audit(run).problem is None


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_a_missing_gpu_is_a_configuration_error_and_leaves_no_process(executor, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    before = children(os.getpid())
    with pytest.raises(ConfigError, match=r"training\.device"):
        fragile(executor, device="cuda").run(20, out=tmp_path / "run")
    assert children(os.getpid()) <= before


def test_a_missing_ray_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r"run\.executor"):
        fragile("ray").run(20, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_search_path_may_hold_other_types_than_strings(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.path", [tmp_path, *os.sys.path])  # type: ignore[attr-defined]
    assert fragile("processes").run(1, out=tmp_path / "run").summary["status"] == "finished"


def test_an_address_without_ray_is_rejected():
    with pytest.raises(ConfigError, match=r"run\.address"):
        Federation(method="fedavg", run={"executor": "serial", "address": "127.0.0.1:6379"})
