"""What a trip leaves behind that merged and came to nothing: it diverged later, or its device left."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from freshet import Federation
from freshet.core.method import Memory
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.sim.driver import Simulation
from freshet.sim.fleet import Fleet
from tests.conftest import small
from tests.sim.test_resume import Crash, CrashError, traces

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
def test_a_merge_is_logged_alike_whether_or_not_its_trip_is_seen_to_diverge(first: float, tmp_path: Path) -> None:
    whole = unsteady(40.0).run(out=tmp_path / "whole")
    assert whole.summary["rejected"] > 3 and audit(RunDirectory(whole.directory)).problem is None
    unsteady(first).run(out=tmp_path / "part")
    unsteady(first).resume(tmp_path / "part", until=40.0)
    assert traces(tmp_path / "part") == traces(whole.directory)
    assert audit(RunDirectory(tmp_path / "part")).problem is None


def leaving(**run: Any) -> Federation:
    fleet, run = {"fastest": 6.0, "on_seconds": 14.0, "off_seconds": 4.0}, {"trigger": "concurrency"} | run
    return small({"name": "fedasmu", "slot": 2}, links={"up": "topk"}, fleet=fleet, run=run)


def test_a_device_that_left_after_its_merge_remembers_the_merge_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What did not fit into an upload (the residual of its link) is known at its end, which it never came to."""
    seen: list[tuple[Memory, Memory]] = []
    set_aside = Simulation._set_aside

    def watched(self: Simulation, journey: Any, finished: bool) -> None:
        device, merged = journey.assignment.device, journey.merged and not finished
        before = dict(self.devices.get(device))
        set_aside(self, journey, finished)
        if merged:
            seen.append((before, dict(self.devices.get(device))))

    monkeypatch.setattr(Simulation, "_set_aside", watched)
    result = leaving().run(120, out=tmp_path / "run")
    assert len(seen) > 2 and audit(RunDirectory(result.directory)).problem is None
    for before, after in seen:
        assert before != after, "it has merged"
        residual, known = after.get("links.residual"), before.get("links.residual")
        assert (residual is None and known is None) or np.array_equal(residual, known)


@pytest.mark.parametrize("first", [31.0, 47.0])
def test_such_a_run_goes_on_bit_for_bit(first: float, tmp_path: Path) -> None:
    whole = leaving().run(110, out=tmp_path / "whole")
    leaving().run(first, out=tmp_path / "part")
    leaving().resume(tmp_path / "part", until=110)
    assert traces(tmp_path / "part") == traces(whole.directory)
    with pytest.raises(CrashError):
        leaving(checkpoint_every=9.0).run(110, out=tmp_path / "cut", observers=[Crash(90)])
    leaving(checkpoint_every=9.0).resume(tmp_path / "cut")
    assert traces(tmp_path / "cut") == traces(whole.directory)
