"""Trips that merged a fresh model and then failed: training diverged, or the device left."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from freshet import Federation
from freshet.compute.executor import DeferredFuture, Future
from freshet.core.method import Memory
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.sim.device_memory import DeviceStore
from freshet.sim.fleet import Fleet
from tests.conftest import small
from tests.sim.helpers import Crash, CrashError, outputs

SHARDS = [np.arange(20 * device, 20 * device + 20) for device in range(12)]


def unsteady(until: float) -> Federation:
    """A regression that diverges on every third device, most often after its merge."""
    x = np.random.default_rng(0).normal(size=(240, 4)).astype(np.float32)
    for device in (2, 5, 8, 11):
        x[SHARDS[device]] *= 22.0
    y = (0.1 * x.sum(1)).astype(np.float32)
    training = {"epochs": 4, "batch_size": 4, "lr": 0.2, "schedule": "step", "schedule_every": 2, "lr_decay": 0.1}
    run = {"until": until, "trigger": "concurrency", "in_flight": 8, "per_round": 8, "eval_every": 10.0}
    return Federation(
        lambda: nn.Linear(4, 1),
        (x, y),
        (x[:40], y[:40]),
        shards=SHARDS,
        task="regression",
        method={"name": "fedasmu", "slot": 2, "eta_gamma": 0.05, "eta_upsilon": 0.05},
        fleet=Fleet(np.linspace(2, 6, 12), up_rate=1e6, down_rate=1e6),
        training=training,
        run=run | {"executor": "serial", "diverged": "continue"},
    )


@pytest.mark.parametrize("first", [10.0, 11.0, 12.0, 13.0, 14.0])
def test_a_merge_is_logged_alike_whether_or_not_the_run_ends_before_its_trip_diverges(
    first: float, tmp_path: Path
) -> None:
    whole = unsteady(40.0).run(out=tmp_path / "whole")
    assert whole.summary["rejected"] > 3 and audit(RunDirectory(whole.directory)).problem is None
    unsteady(first).run(out=tmp_path / "part")
    unsteady(first).resume(tmp_path / "part", until=40.0)
    assert outputs(tmp_path / "part") == outputs(whole.directory)
    assert audit(RunDirectory(tmp_path / "part")).problem is None


def leaving(**run: Any) -> Federation:
    fleet, run = {"fastest": 6.0, "on_seconds": 14.0, "off_seconds": 4.0}, {"trigger": "concurrency"} | run
    return small({"name": "fedasmu", "slot": 2}, links={"up": "topk"}, fleet=fleet, run=run)


def test_a_device_that_left_after_its_merge_keeps_only_the_memory_of_the_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The residual of its link exists only at the end of a trip, which the device never reached."""
    seen: list[tuple[Memory, Memory]] = []
    defer = DeviceStore.defer

    def watch(self: DeviceStore, device: int, outcome: Future[Any]) -> None:
        before = dict(self.get(device))
        defer(self, device, outcome)
        if isinstance(outcome, DeferredFuture):  # of a trip that did not finish
            seen.append((before, dict(self.get(device))))

    monkeypatch.setattr(DeviceStore, "defer", watch)
    result = leaving().run(120, out=tmp_path / "run")
    assert len(seen) > 2 and audit(RunDirectory(result.directory)).problem is None
    for before, after in seen:
        assert before != after, "the merge changed the memory"
        residual, known = after.get("links.residual"), before.get("links.residual")
        assert (residual is None and known is None) or np.array_equal(residual, known)


@pytest.mark.parametrize("first", [31.0, 47.0])
def test_a_run_with_leaving_devices_resumes_bit_for_bit(first: float, tmp_path: Path) -> None:
    whole = leaving().run(110, out=tmp_path / "whole")
    leaving().run(first, out=tmp_path / "part")
    leaving().resume(tmp_path / "part", until=110)
    assert outputs(tmp_path / "part") == outputs(whole.directory)
    with pytest.raises(CrashError):
        leaving(checkpoint_every=9.0).run(110, out=tmp_path / "cut", observers=[Crash(90)])
    leaving(checkpoint_every=9.0).resume(tmp_path / "cut")
    assert outputs(tmp_path / "cut") == outputs(whole.directory)
