"""A run that is stopped, by an observer or at its target, has complete files and can be resumed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from freshet import ConfigError, Federation, Observer, Stop
from freshet.experiments.store import State, Store
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from tests.conftest import small
from tests.sim.helpers import outputs


class StopIn(Observer):
    """Raises in one of its methods, at the n-th call."""

    def __init__(self, method: str, calls: int, why: str = "") -> None:
        self.calls, self.ended = calls, 0

        def count(*_: Any) -> None:
            self.calls -= 1
            if self.calls == 0:
                raise Stop(why)

        setattr(self, method, count)
        self.on_end = self._end  # type: ignore[method-assign]

    def _end(self, summary: dict[str, Any]) -> None:
        self.ended += 1
        raise Stop("too late to matter")


@pytest.mark.parametrize("method", ["on_event", "on_metrics", "on_progress"])
def test_a_run_that_an_observer_stops_resumes_to_the_same_end(method: str, tmp_path: Path) -> None:
    whole = small("fedasmu").run(100, out=tmp_path / "whole")
    observer = StopIn(method, 3 if method == "on_metrics" else 20, "enough")
    cut = small("fedasmu").run(100, out=tmp_path / "cut", observers=[observer])
    assert (cut.summary["status"], cut.summary["stopped"], observer.ended) == ("stopped", "enough", 1)
    assert 0 < cut.summary["virtual_time"] < 100
    assert cut.rows[-1]["time"] == cut.summary["virtual_time"], "the model that is left was tested"
    assert {path.name for path in cut.directory.iterdir()} == {path.name for path in whole.directory.iterdir()}
    assert audit(RunDirectory(cut.directory)).passed
    cut.module()
    going_on = small("fedasmu").resume(cut.directory)
    assert (going_on.summary["status"], "stopped" in going_on.summary) == ("finished", False)
    assert outputs(cut.directory) == outputs(whole.directory)


def test_a_stop_waits_for_the_end_of_the_event_and_for_all_observers(tmp_path: Path) -> None:
    seen: list[int] = []

    class Second(Observer):
        def on_event(self, event: dict[str, Any]) -> None:
            seen.append(event["seq"])

    result = small("fedavg").run(60, out=tmp_path / "run", observers=[StopIn("on_event", 5), Second()])
    assert result.summary["stopped"] == "an observer asked for it"
    assert seen == [event["seq"] for event in RunDirectory(result.directory).events()]


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_a_run_stops_with_the_first_test_that_reaches_its_target(executor: str, tmp_path: Path) -> None:
    whole = small("fedasmu").run(200, out=tmp_path / "whole")
    target = sorted(whole.accuracy)[len(whole.rows) // 2]
    reached = whole.time_to(target)
    assert reached is not None and 0 < reached < 200
    run = {"target": float(target), "stop_at_target": True, "executor": executor, "workers": 2}
    cut = small("fedasmu", run=run).run(200, out=tmp_path / "cut")
    assert (cut.summary["status"], cut.summary["virtual_time"], cut.time_to(target)) == ("stopped", reached, reached)
    assert cut.rows[-1]["time"] == reached
    log = (cut.directory / "events.jsonl").read_bytes()
    assert (whole.directory / "events.jsonl").read_bytes().startswith(log), "the same up to there"
    small("fedasmu", run=run).resume(cut.directory)
    assert outputs(cut.directory) == outputs(whole.directory), "with its target behind it, it goes on to its end"


def test_a_reached_target_counts_even_with_ctrl_c_at_that_test(tmp_path: Path) -> None:
    run = {"target": 0.2, "stop_at_target": True}
    whole = small("fedavg", run=run).run(300, out=tmp_path / "whole")
    assert (whole.summary["status"], whole.summary["virtual_time"]) == ("stopped", whole.time_to(0.2))

    class CtrlC(Observer):
        def on_metrics(self, row: dict[str, Any]) -> None:
            if row["accuracy"] >= 0.2:
                os.kill(os.getpid(), signal.SIGINT)

    cut = small("fedavg", run=run).run(300, out=tmp_path / "cut", observers=[CtrlC()])
    if cut.summary["status"] == "interrupted":
        cut = small("fedavg", run=run).resume(cut.directory)
    assert (cut.summary["status"], cut.summary["stopped"]) == ("stopped", whole.summary["stopped"])
    assert outputs(cut.directory) == outputs(whole.directory)


def test_a_target_that_is_never_reached_changes_nothing(tmp_path: Path) -> None:
    results = [
        small("fedavg", run={"target": 1.0, "stop_at_target": stops}).run(60, out=tmp_path / str(stops))
        for stops in (False, True)
    ]
    assert outputs(results[0].directory) == outputs(results[1].directory)
    assert [result.summary["status"] for result in results] == ["finished", "finished"]


def test_without_a_target_there_is_nothing_to_stop_at() -> None:
    with pytest.raises(ConfigError, match=r"run\.stop_at_target: needs a target"):
        Federation(run={"stop_at_target": True}, training={"task": "regression"})


def test_a_grid_counts_a_stopped_run_as_done(tmp_path: Path) -> None:
    store = Store(tmp_path)
    small("fedavg").run(60, out=store.directory("key"), observers=[StopIn("on_metrics", 2)])
    assert store.state("key") is State.FINISHED
