"""The end of a run by its last round or by divergence, with the same bits everywhere."""

import itertools
import json
import math
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from freshet import Federation, Observer, RunError
from freshet.core import stopping
from freshet.core.stopping import DivergenceMonitor
from freshet.runs import lifecycle
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory
from freshet.runs.summary import remarks
from freshet.training.task import Score
from tests.conftest import exploring

Federate = Callable[..., Federation]
#: Steps so long that the model diverges but stays finite: losses of 1e5 and more within a few uploads.
#: The norm gate is off, as it would reject some of these uploads.
DIVERGING = {
    "training": {"lr": 3e4, "lr_decay": 1.0},
    "run": {"eval_every": 4.0, "checkpoint_every": 3.0, "gate": "off"},
}


def rows(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in RunDirectory(directory).events() if event["kind"] == kind]


def outputs(directory: Path) -> tuple[bytes, list[dict[str, Any]], dict[str, Any]]:
    metrics = RunDirectory(directory).metrics()
    for row in metrics:
        row.pop("wall_seconds")
    summary = {key: value for key, value in RunDirectory(directory).summary().items() if key != "wall_seconds"}
    return (directory / "events.jsonl").read_bytes(), metrics, summary


# ---- rounds


@pytest.mark.parametrize("method", ["fedavg", "fedssmu"])
def test_a_synchronous_run_ends_with_the_last_upload_of_its_last_round(federate: Federate, tmp_path: Path, method: str):
    summary = federate(method, run={"rounds": 3}).run(out=tmp_path / "run").summary
    assert (summary["status"], summary["rounds"], summary["trips"], summary["uploads"]) == ("finished", 3, 9, 9)
    assert summary["virtual_time"] == rows(tmp_path / "run", "upload")[-1]["time"]
    assert audit(RunDirectory(tmp_path / "run")).problem is None


@pytest.mark.parametrize(
    "method", ["fedasmu", "fedasync", {"name": "fedbuff", "K": 2}, {"name": "fedasmu", "tau_max": 3}]
)
def test_an_asynchronous_round_is_as_many_consumed_uploads_as_are_triggered_at_a_time(
    federate: Federate, tmp_path: Path, method: Any
):
    summary = federate(method, run={"rounds": 5}).run(out=tmp_path / "run").summary
    assert (summary["status"], summary["rounds"]) == ("finished", 5)
    assert summary["uploads"] - summary["discards"] == 5 * 3
    assert summary["virtual_time"] == rows(tmp_path / "run", "upload")[-1]["time"]
    assert audit(RunDirectory(tmp_path / "run")).problem is None


def test_under_constant_concurrency_a_round_is_the_number_in_flight(federate: Federate, tmp_path: Path):
    run = {"trigger": "concurrency", "in_flight": 5, "rounds": 4}
    assert federate("fedasync", run=run).run(out=tmp_path / "run").summary["uploads"] == 4 * 5


def test_rounds_without_devices_count(federate: Federate, tmp_path: Path):
    fleet = {"on_seconds": 6.0, "off_seconds": 60.0, "devices": 3}
    run = {"rounds": 30, "per_round": 1, "in_flight": 1}
    summary = federate("fedavg", fleet=fleet, run=run).run(out=tmp_path / "run").summary
    assert summary["rounds"] == 30 > summary["trips"]


@pytest.mark.parametrize("method", ["fedasmu", "fedavg"])
def test_a_run_ends_by_time_or_by_rounds_whichever_is_first(federate: Federate, tmp_path: Path, method: str):
    by_rounds = federate(method, run={"rounds": 3}).run(out=tmp_path / "rounds")
    end = by_rounds.summary["virtual_time"]
    late = federate(method, run={"rounds": 3, "until": end + 20.0}).run(out=tmp_path / "late")
    assert late.summary["virtual_time"] == end
    assert late.summary["weights_sha256"] == by_rounds.summary["weights_sha256"]
    early = federate(method, run={"rounds": 3}).run(end - 3.0, out=tmp_path / "early")
    assert (early.summary["virtual_time"], early.summary["rounds"]) == (end - 3.0, 2)
    assert early.rows[-1]["time"] == end - 3.0


def test_the_last_model_of_a_run_by_rounds_is_tested_and_every_test_has_its_round(federate: Federate, tmp_path: Path):
    result = federate("fedavg", run={"rounds": 3}).run(out=tmp_path / "run")
    assert result.rows[-1]["time"] == result.summary["virtual_time"]
    assert [row["rounds"] for row in result.rows] == sorted(row["rounds"] for row in result.rows)
    assert (result.rows[0]["rounds"], result.rows[-1]["rounds"]) == (0, 3)


def test_a_limit_that_is_not_reached_changes_no_bit(federate: Federate, finished: Any, tmp_path: Path):
    limited = federate(exploring("fedasmu"), run={"rounds": 10_000}).run(60, out=tmp_path / "run")
    assert outputs(limited.directory) == outputs(finished("fedasmu").directory)


class Crash(Observer):
    """Ends a run abruptly after ``after`` events."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_event(self, event: dict[str, Any]) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("crash")


@pytest.mark.parametrize("method", ["fedasmu", "fedavg"])
def test_a_run_by_rounds_that_crashes_equals_the_uninterrupted_one(federate: Federate, tmp_path: Path, method: str):
    def run() -> Federation:
        return federate(method, run={"rounds": 6, "checkpoint_every": 5.0})

    whole = run().run(out=tmp_path / "whole")
    total = len((whole.directory / "events.jsonl").read_bytes().splitlines())
    with pytest.raises(RuntimeError, match="crash"):
        run().run(out=tmp_path / "cut", observers=[Crash(total // 2)])
    with pytest.raises(RuntimeError, match="crash"):
        run().resume(tmp_path / "cut", observers=[Crash(total // 4)])
    run().resume(tmp_path / "cut")
    assert outputs(tmp_path / "cut") == outputs(whole.directory)
    assert len(list((tmp_path / "cut" / "checkpoint").iterdir())) == 1


def test_a_run_by_rounds_gives_the_same_bits_on_any_number_of_workers(federate: Federate, tmp_path: Path):
    results = [
        federate("fedasmu", run={"rounds": 4, "executor": executor, "workers": 2}).run(out=tmp_path / executor)
        for executor in ("serial", "processes")
    ]
    assert outputs(results[0].directory) == outputs(results[1].directory)


def test_a_round_that_never_ends_is_an_error(federate: Federate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every upload is rejected, so none is ever consumed."""
    monkeypatch.setattr(stopping, "MAX_UNUSED_TRIPS", 40)
    federation = federate("fedasync", training={"lr": 1e38}, run={"rounds": 2})
    with pytest.raises(RunError, match=r"run\.rounds: the last 40 trips were all rejected.*run\.until"):
        federation.run(out=tmp_path / "run")
    summary = RunDirectory(tmp_path / "run").summary()
    assert (summary["status"], summary["rounds"], summary["rejected"]) == ("failed", 0, 40)


# ---- divergence


def score(loss: float) -> "Future[Score]":
    future: Future[Score] = Future()
    future.set_result(Score(0.1, loss))
    return future


@pytest.mark.parametrize(
    ("losses", "time"),
    [
        ([2.3, 2.0, 1.0], None),
        ([2.3, 2300.0], None),
        ([2.3, 2300.1, 1.0], 1.0),
        ([2.3, 1.0, math.nan], 2.0),
        ([2.3, math.inf, math.inf], 1.0),
        ([math.nan, 1.0], 0.0),
        ([1e-6, 9.9], None),  # a model that starts almost perfect
        ([1e-6, 10.1], 1.0),
    ],
)
def test_a_loss_that_is_not_finite_or_a_thousand_times_the_first_means_divergence(
    losses: list[float], time: float | None
):
    monitor = DivergenceMonitor()
    for number, loss in enumerate(losses):
        monitor.test(float(number), score(loss))
    monitor.check_latest()
    assert monitor.diverged == time


def test_a_score_is_awaited_only_at_the_next_test():
    monitor, pending = DivergenceMonitor(), Future[Score]()
    monitor.test(0.0, score(1.0))
    monitor.test(1.0, pending)
    assert not pending.done()
    pending.set_result(Score(0.1, math.inf))
    assert monitor.diverged is None
    monitor.test(2.0, score(1.0))
    assert monitor.diverged == 1.0


@pytest.mark.parametrize("tested", [0, 1, 2, 3])
def test_a_divergence_monitor_resumes_from_its_saved_state(tested: int):
    losses = [2.0, 3.0, math.inf, 1.0]
    monitor = DivergenceMonitor()
    for number, loss in enumerate(losses[:tested]):
        monitor.test(float(number), score(loss))
    again = DivergenceMonitor()
    again.restore(json.loads(json.dumps(monitor.state())))
    for number, loss in enumerate(losses[tested:], tested):
        again.test(float(number), score(loss))
    again.check_latest()
    assert (again.first, again.diverged) == (2.0, 2.0)


def diverging(federate: Federate, method: str = "fedavg", **run: Any) -> Federation:
    return federate(method, training=DIVERGING["training"], run=DIVERGING["run"] | run)


@pytest.mark.parametrize("method", ["fedavg", "feddyn", "fedasync", "fedasmu"])
def test_a_run_that_diverges_stops_at_the_next_test_with_all_its_files(federate: Federate, tmp_path: Path, method: str):
    result = diverging(federate, method).run(200, out=tmp_path / "run")
    summary = RunDirectory(tmp_path / "run").summary()
    tests = {row["time"]: row["loss"] for row in result.rows}
    first = next(time for time, loss in tests.items() if loss is None or loss > 1000 * tests[0.0])
    assert summary["diverged"] == first < 100.0
    assert summary["status"] == "diverged"
    assert (summary["virtual_time"], result.rows[-1]["time"]) == (first + 4.0, first + 4.0)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.toml",
        "world.json",
        "events.jsonl",
        "metrics.jsonl",
        "summary.json",
        "model.safetensors",
    }
    assert audit(RunDirectory(tmp_path / "run")).problem is None
    assert RunDirectory(tmp_path / "run").finished()


def test_a_run_that_has_diverged_cannot_be_resumed(federate: Federate, tmp_path: Path):
    result = diverging(federate).run(200, out=tmp_path / "run")
    with pytest.raises(RunError, match=rf"diverged at {result.summary['diverged']} s and cannot be resumed") as caught:
        diverging(federate).resume(tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert RunDirectory(tmp_path / "run").summary()["status"] == "diverged"


@pytest.mark.parametrize("method", ["fedavg", "feddyn", "fedasync"])
def test_a_run_may_continue_after_divergence_and_still_reports_it(federate: Federate, tmp_path: Path, method: str):
    stopped = diverging(federate, method).run(100, out=tmp_path / "stopped").summary
    continued = diverging(federate, method, diverged="continue").run(100, out=tmp_path / "on").summary
    assert (continued["status"], continued["virtual_time"]) == ("finished", 100.0)
    assert continued["diverged"] == stopped["diverged"] is not None
    assert audit(RunDirectory(tmp_path / "on")).problem is None
    with pytest.raises(RunError, match="already finished"):
        diverging(federate, method, diverged="continue").resume(tmp_path / "on")


def test_divergence_in_the_last_test_counts(federate: Federate, tmp_path: Path):
    time = diverging(federate).run(200, out=tmp_path / "whole").summary["diverged"]
    summary = diverging(federate).run(time, out=tmp_path / "run").summary
    assert (summary["status"], summary["diverged"], summary["virtual_time"]) == ("diverged", time, time)


@pytest.mark.parametrize("method", ["fedavg", "fedasmu"])
def test_divergence_is_the_same_on_any_number_of_workers_and_after_a_crash(
    federate: Federate, tmp_path: Path, method: str
):
    whole = diverging(federate, method).run(200, out=tmp_path / "serial")
    diverging(federate, method, executor="processes", workers=2).run(200, out=tmp_path / "processes")
    assert outputs(tmp_path / "processes") == outputs(whole.directory)
    total = len((whole.directory / "events.jsonl").read_bytes().splitlines())
    for after in (total - 3, total // 2):
        cut = tmp_path / f"cut-{after}"
        with pytest.raises(RuntimeError, match="crash"):
            diverging(federate, method).run(200, out=cut, observers=[Crash(after)])
        diverging(federate, method).resume(cut)
        assert outputs(cut) == outputs(whole.directory)


# ---- messages


def summary_of(**changes: Any) -> dict[str, Any]:
    return {"method": "asofed", "uploads": 600, "rejected": 0, "diverged": None} | changes


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ({}, []),
        ({"rejected": 29}, []),
        ({"rejected": 30}, ["asofed: 30 of 600 uploads were rejected; see the reasons in events.jsonl"]),
        ({"rejected": 600}, ["asofed: all 600 uploads were rejected; see the reasons in events.jsonl"]),
        (
            {"rejected": 600, "wild": 301},
            [
                "asofed: all 600 uploads were rejected; most were not finite or far larger than usual; "
                "try a smaller training.lr"
            ],
        ),
        ({"uploads": 0}, []),
        (
            {"stalled": 213.0, "virtual_time": 600.0},
            [
                "asofed has waited since 213 s of 600 for devices that do not return; set run.round_deadline "
                "(seconds) to give them up"
            ],
        ),
        ({"lost": 50, "trips": 100}, []),
        (
            {"lost": 51, "trips": 100},
            [
                "asofed: 51 of 100 trips were lost; a device that is online for less than a trip (fleet.on_seconds) "
                "never uploads; see the reasons in events.jsonl"
            ],
        ),
        ({"diverged": 240.0}, ["asofed diverged at 240 s: test loss 4e+31; try a smaller training.lr"]),
        ({"diverged": 250.0}, ["asofed diverged at 250 s: test loss is not finite; try a smaller training.lr"]),
    ],
)
def test_every_problem_is_one_sentence(changes: dict[str, Any], sentences: list[str]):
    tests = [{"time": 0.0, "loss": 2.3}, {"time": 240.0, "loss": 4.04e31}, {"time": 250.0, "loss": None}]
    assert remarks(summary_of(**changes), tests) == sentences


def test_without_observers_divergence_is_logged(federate: Federate, tmp_path: Path, caplog):
    diverging(federate).run(200, out=tmp_path / "run")
    assert "fedavg diverged at" in caplog.text


def test_an_interruption_is_logged_once(federate: Federate, tmp_path: Path, caplog, monkeypatch):
    looks = itertools.count()
    monkeypatch.setattr(lifecycle, "interruptible", lambda: nullcontext(lambda: next(looks) > 20))
    result = federate("fedavg").run(200, out=tmp_path / "run")
    assert result.summary["status"] == "interrupted"
    assert f"it can be resumed from {tmp_path / 'run'}" in caplog.text
    monkeypatch.undo()
    assert federate("fedavg").resume(tmp_path / "run").summary["status"] == "finished"
    assert caplog.text.count("interrupted") == 1
