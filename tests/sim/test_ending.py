"""What ends a run before its time: its last round, or a model that has diverged. The same bits everywhere."""

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

Federate = Callable[..., Federation]
#: Steps so long that the model runs away but stays finite: losses of 1e5 and more within a few uploads.
#: Without the gate of proportion, which keeps some of this out: how a run ends whose model does diverge.
WILD = {
    "training": {"lr": 3e4, "lr_decay": 1.0},
    "run": {"eval_every": 4.0, "checkpoint_every": 3.0, "gate": "off"},
}


def rows(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in RunDirectory(directory).events() if event["kind"] == kind]


def traces(directory: Path) -> tuple[bytes, list[dict[str, Any]], dict[str, Any]]:
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


def test_rounds_that_nobody_could_join_count(federate: Federate, tmp_path: Path):
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


def test_the_last_model_of_a_run_by_rounds_is_tested_and_every_test_says_its_round(federate: Federate, tmp_path: Path):
    result = federate("fedavg", run={"rounds": 3}).run(out=tmp_path / "run")
    assert result.rows[-1]["time"] == result.summary["virtual_time"]
    assert [row["rounds"] for row in result.rows] == sorted(row["rounds"] for row in result.rows)
    assert (result.rows[0]["rounds"], result.rows[-1]["rounds"]) == (0, 3)


def test_a_limit_that_is_not_reached_changes_no_bit(federate: Federate, finished: Any, tmp_path: Path):
    limited = federate("fedasmu", run={"rounds": 10_000}).run(60, out=tmp_path / "run")
    assert traces(limited.directory) == traces(finished("fedasmu").directory)


class Crash(Observer):
    """Ends a run abruptly when so many events have been written."""

    def __init__(self, after: int) -> None:
        self.left = after

    def on_event(self, event: dict[str, Any]) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("crash")


@pytest.mark.parametrize("method", ["fedasmu", "fedavg"])
def test_a_run_by_rounds_that_crashes_ends_as_the_uninterrupted_one(federate: Federate, tmp_path: Path, method: str):
    def run() -> Federation:
        return federate(method, run={"rounds": 6, "checkpoint_every": 5.0})

    whole = run().run(out=tmp_path / "whole")
    total = len((whole.directory / "events.jsonl").read_bytes().splitlines())
    with pytest.raises(RuntimeError, match="crash"):
        run().run(out=tmp_path / "cut", observers=[Crash(total // 2)])
    with pytest.raises(RuntimeError, match="crash"):
        run().resume(tmp_path / "cut", observers=[Crash(total // 4)])
    run().resume(tmp_path / "cut")
    assert traces(tmp_path / "cut") == traces(whole.directory)
    assert len(list((tmp_path / "cut" / "checkpoint").iterdir())) == 1


def test_a_run_by_rounds_gives_the_same_bits_on_any_number_of_workers(federate: Federate, tmp_path: Path):
    results = [
        federate("fedasmu", run={"rounds": 4, "executor": executor, "workers": 2}).run(out=tmp_path / executor)
        for executor in ("serial", "processes")
    ]
    assert traces(results[0].directory) == traces(results[1].directory)


def test_rounds_that_never_end_are_one_sentence_and_not_a_run_without_end(
    federate: Federate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every model is thrown away: no upload is ever consumed."""
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
        ([1e-6, 9.9], None),  # a model that starts nearly perfect
        ([1e-6, 10.1], 1.0),
    ],
)
def test_a_loss_that_is_not_finite_or_a_thousand_times_the_first_has_diverged(losses: list[float], time: float | None):
    watch = DivergenceMonitor()
    for number, loss in enumerate(losses):
        watch.test(float(number), score(loss))
    watch.check_latest()
    assert watch.diverged == time


def test_a_test_is_only_waited_for_when_the_next_one_begins():
    watch, pending = DivergenceMonitor(), Future[Score]()
    watch.test(0.0, score(1.0))
    watch.test(1.0, pending)
    assert not pending.done()
    pending.set_result(Score(0.1, math.inf))
    assert watch.diverged is None
    watch.test(2.0, score(1.0))
    assert watch.diverged == 1.0


@pytest.mark.parametrize("looked_at", [0, 1, 2, 3])
def test_a_watch_goes_on_from_its_saved_state(looked_at: int):
    losses = [2.0, 3.0, math.inf, 1.0]
    watch = DivergenceMonitor()
    for number, loss in enumerate(losses[:looked_at]):
        watch.test(float(number), score(loss))
    again = DivergenceMonitor()
    again.restore(json.loads(json.dumps(watch.state())))
    for number, loss in enumerate(losses[looked_at:], looked_at):
        again.test(float(number), score(loss))
    again.check_latest()
    assert (again.first, again.diverged) == (2.0, 2.0)


def wild(federate: Federate, method: str = "fedavg", **run: Any) -> Federation:
    return federate(method, training=WILD["training"], run=WILD["run"] | run)


@pytest.mark.parametrize("method", ["fedavg", "feddyn", "fedasync", "fedasmu"])
def test_a_run_that_diverges_stops_at_the_next_test_with_all_its_files(federate: Federate, tmp_path: Path, method: str):
    result = wild(federate, method).run(200, out=tmp_path / "run")
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
    result = wild(federate).run(200, out=tmp_path / "run")
    with pytest.raises(RunError, match=rf"diverged at {result.summary['diverged']} s and cannot be resumed") as caught:
        wild(federate).resume(tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert RunDirectory(tmp_path / "run").summary()["status"] == "diverged"


@pytest.mark.parametrize("method", ["fedavg", "feddyn", "fedasync"])
def test_a_run_may_be_told_to_go_on_and_still_says_that_it_diverged(federate: Federate, tmp_path: Path, method: str):
    stopped = wild(federate, method).run(100, out=tmp_path / "stopped").summary
    went_on = wild(federate, method, diverged="continue").run(100, out=tmp_path / "on").summary
    assert (went_on["status"], went_on["virtual_time"]) == ("finished", 100.0)
    assert went_on["diverged"] == stopped["diverged"] is not None
    assert audit(RunDirectory(tmp_path / "on")).problem is None
    with pytest.raises(RunError, match="already finished"):
        wild(federate, method, diverged="continue").resume(tmp_path / "on")


def test_a_divergence_that_only_the_last_test_shows_counts(federate: Federate, tmp_path: Path):
    time = wild(federate).run(200, out=tmp_path / "whole").summary["diverged"]
    summary = wild(federate).run(time, out=tmp_path / "run").summary
    assert (summary["status"], summary["diverged"], summary["virtual_time"]) == ("diverged", time, time)


@pytest.mark.parametrize("method", ["fedavg", "fedasmu"])
def test_divergence_is_the_same_on_any_number_of_workers_and_after_a_crash(
    federate: Federate, tmp_path: Path, method: str
):
    whole = wild(federate, method).run(200, out=tmp_path / "serial")
    wild(federate, method, executor="processes", workers=2).run(200, out=tmp_path / "processes")
    assert traces(tmp_path / "processes") == traces(whole.directory)
    total = len((whole.directory / "events.jsonl").read_bytes().splitlines())
    for after in (total - 3, total // 2):
        cut = tmp_path / f"cut-{after}"
        with pytest.raises(RuntimeError, match="crash"):
            wild(federate, method).run(200, out=cut, observers=[Crash(after)])
        wild(federate, method).resume(cut)
        assert traces(cut) == traces(whole.directory)


# ---- what is said


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
                "asofed: all 600 uploads were rejected; most were not finite or out of all proportion; "
                "try a smaller training.lr"
            ],
        ),
        ({"uploads": 0}, []),
        (
            {"stalled": 213.0, "virtual_time": 600.0},
            [
                "asofed has waited since 213 s of 600 for devices that do not return; run.round_deadline = seconds "
                "gives them up"
            ],
        ),
        ({"lost": 50, "trips": 100}, []),
        (
            {"lost": 51, "trips": 100},
            [
                "asofed: 51 of 100 trips were lost; a device that is there for less than a trip (fleet.on_seconds) "
                "never uploads; see the reasons in events.jsonl"
            ],
        ),
        ({"diverged": 240.0}, ["asofed diverged at 240 s: test loss 4e+31; try a smaller training.lr"]),
        ({"diverged": 250.0}, ["asofed diverged at 250 s: test loss is not finite; try a smaller training.lr"]),
    ],
)
def test_what_a_person_should_know_is_one_sentence_each(changes: dict[str, Any], sentences: list[str]):
    tests = [{"time": 0.0, "loss": 2.3}, {"time": 240.0, "loss": 4.04e31}, {"time": 250.0, "loss": None}]
    assert remarks(summary_of(**changes), tests) == sentences


def test_without_anybody_who_watches_it_is_said_in_the_log_of_the_process(federate: Federate, tmp_path: Path, caplog):
    wild(federate).run(200, out=tmp_path / "run")
    assert "fedavg diverged at" in caplog.text


def test_a_script_is_told_that_what_it_is_given_was_interrupted(
    federate: Federate, tmp_path: Path, caplog, monkeypatch
):
    looks = itertools.count()
    monkeypatch.setattr(lifecycle, "interruptible", lambda: nullcontext(lambda: next(looks) > 20))
    result = federate("fedavg").run(200, out=tmp_path / "run")
    assert result.summary["status"] == "interrupted"
    assert f"all of it is in {tmp_path / 'run'} and can be resumed" in caplog.text
    monkeypatch.undo()
    assert federate("fedavg").resume(tmp_path / "run").summary["status"] == "finished"
    assert caplog.text.count("interrupted") == 1
