"""The life of a run with any driver; here the driver only ticks, without fleet, training or simulator."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from freshet import Observer
from freshet.core.events import Evaluated, Merged, Noted
from freshet.core.layout import Layout
from freshet.core.method import MethodContext
from freshet.core.server import Server
from freshet.methods import class_and_preset, method_options
from freshet.runs import checkpoint, lifecycle
from freshet.runs.lifecycle import OpenRun, RunOutcome, RunPlan, Stopwatch, drive, interruptible
from freshet.runs.writer import RunWriter, weights_sha256
from freshet.training.optimisers import constant

PLAN = RunPlan("mine:Method", 7, 0.8, 10.0, checkpoint_every=3.0, checkpoint_minutes=0.0, stop_diverged=True)
FILES = ["config.toml", "events.jsonl", "metrics.jsonl", "model.safetensors", "summary.json"]
Act = Callable[["Ticking"], None]


#: An event whose numbers come later.
MERGE = Merged(0, 1, 1, 2, 1)


class Ticking:
    """A driver with one event per second; at some of them something happens."""

    checkpoint_due = False

    def __init__(self, writer: RunWriter, happens: dict[int, Act]) -> None:
        self.writer, self.happens = writer, happens
        self.ticks = 0
        self.diverged: float | None = None
        self.saved: list[float] = []
        self.concluded: list[float] = []

    @property
    def now(self) -> float:
        return float(self.ticks)

    def run(self, until: float, between: Callable[[], bool]) -> bool:
        while self.now < until:
            if between():
                return False
            self.ticks += 1
            self.writer.event(self.now, Noted("tick"))
            self.happens.get(self.ticks, lambda _: None)(self)
        return True

    def conclude(self) -> None:
        self.concluded.append(self.now)

    def state(self) -> dict[str, Any]:
        self.writer.drain(wait=True)
        self.saved.append(self.now)
        return {"ticks": self.ticks, "array": np.arange(self.ticks), "log": self.writer.position()}

    def restore(self, tree: dict[str, Any], until: float) -> None:
        assert len(tree["array"]) == tree["ticks"] and until == PLAN.until
        self.ticks = tree["ticks"]

    def facts(self) -> dict[str, Any]:
        return {"diverged": self.diverged, "uploads": self.ticks, "rejected": 0}


class Stage:
    """Runs in one directory: what they leave, and what was around them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.said: list[str] = []
        self.closed = 0
        self.driver: Ticking
        self.server = small_server()

    def live(self, happens: dict[int, Act] | None = None, resume: bool = False, **plan: Any) -> RunOutcome:
        observer = Observer()
        observer.on_message = self.said.append  # type: ignore[method-assign]
        tree = checkpoint.read(self.directory).tree if resume else None

        @contextmanager
        def opened() -> Iterator[OpenRun]:
            if tree is None:
                writer = RunWriter.create(self.directory, {}, [observer])
            else:
                writer = RunWriter(self.directory, [observer], resume=tree["log"])
            self.driver = Ticking(writer, happens or {})
            try:
                yield OpenRun(self.driver, self.server, writer)
            finally:
                self.closed += 1

        ended = drive(replace(PLAN, **plan), opened(), tree)
        assert not tree, "what was read from a checkpoint is let go"
        return ended

    def events(self) -> list[float]:
        rows = [json.loads(line) for line in (self.directory / "events.jsonl").read_text().splitlines()]
        assert [row["seq"] for row in rows] == list(range(1, len(rows) + 1))
        return [row["time"] for row in rows]

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return summary

    def files(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


def small_server() -> Server:
    layout = Layout.build([("w", (3,), "learnable")])
    context = MethodContext(4, np.ones(4, np.int64), 1, 2, layout, 0)
    method = class_and_preset("fedavg")[0](method_options("fedavg", {}), context)
    return Server(method, context, np.array([1.0, 2.0, 3.0], np.float32), constant(0.1))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "run")


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock on the wall, moved by hand."""
    shown = [1000.0]
    monkeypatch.setattr(lifecycle.time, "perf_counter", lambda: shown[0])
    return shown


def press(driver: Ticking) -> None:
    """Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def press_twice(driver: Ticking) -> None:
    press(driver)
    press(driver)


def test_a_finished_run_leaves_its_files_and_no_checkpoint(stage: Stage) -> None:
    ended = stage.live()
    assert stage.events() == [float(tick) for tick in range(1, 11)]
    assert stage.files() == FILES
    assert stage.closed == 1
    np.testing.assert_array_equal(load_file(stage.directory / "model.safetensors")["w"], ended.weights)
    assert (ended.directory, ended.summary["status"], ended.rows) == (stage.directory, "finished", [])


def test_the_order_of_keys_in_the_summary(stage: Stage):
    stage.server.method.summary = lambda: {"adaptations": 5}  # type: ignore[method-assign]
    summary = stage.live().summary
    assert stage.summary() == summary
    head = {"method": "mine:Method", "seed": 7, "status": "finished"}
    tests = {
        "metric": "accuracy",
        "direction": "max",
        "final_accuracy": None,
        "best_accuracy": None,
        "final_loss": None,
        "target": 0.8,
        "time_to_target": None,
    }
    facts = {"virtual_time": 10.0, "diverged": None, "uploads": 10, "rejected": 0}
    digest = weights_sha256(np.array([1.0, 2.0, 3.0], np.float32))
    rest = {"weights_sha256": digest, "wall_seconds": summary["wall_seconds"], "freshet": summary["freshet"]}
    assert list(summary.items()) == list((head | tests | facts | rest | {"adaptations": 5}).items())


def test_the_tests_of_the_model_are_in_the_summary(stage: Stage, wall: list[float]) -> None:
    def test(accuracy: float) -> Act:
        tested = Evaluated(1, {"accuracy": accuracy, "loss": 1.0 - accuracy})

        def act(driver: Ticking) -> None:
            wall[0] += 1.5
            driver.writer.event(driver.now, tested, row={})

        return act

    ended = stage.live({2: test(0.5), 4: test(0.9), 6: test(0.75)})
    facts = [ended.summary[key] for key in ("final_accuracy", "best_accuracy", "final_loss", "time_to_target")]
    assert facts == [0.75, 0.9, 0.25, 4.0]
    assert [row["accuracy"] for row in ended.rows] == [0.5, 0.9, 0.75]
    assert [row["wall_seconds"] for row in ended.rows] == [1.5, 3.0, 4.5]


def test_notices_of_the_method_and_remarks_are_sent_to_observers(stage: Stage) -> None:
    stage.server.method.notices = lambda: ["mind the gap"]  # type: ignore[method-assign]
    stage.server.method.summary = lambda: {"adaptations": 1, "adaptations_skipped": 3}  # type: ignore[method-assign]
    stage.live({1: lambda _: stage.said.append("first event")})
    assert stage.said[:2] == ["mind the gap", "first event"]
    assert stage.said[2:] == ["mine:Method: 3 of 4 adaptations were skipped: their steps were forgotten"]


def test_numbers_that_arrive_late_are_awaited_at_the_end(stage: Stage) -> None:
    late: Future[int] = Future()

    def hand_out(driver: Ticking) -> None:
        driver.writer.event(driver.now, MERGE, late, lambda number: {"number": number})
        threading.Timer(0.05, late.set_result, [42]).start()

    stage.live({9: hand_out}, checkpoint_every=0.0)
    rows = [json.loads(line) for line in (stage.directory / "events.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows[-3:]] == ["note", "merge", "note"]
    assert rows[-2]["number"] == 42


@pytest.mark.parametrize(("stop", "status"), [(True, "diverged"), (False, "finished")])
def test_a_run_that_diverged_has_ended_too(stage: Stage, stop: bool, status: str) -> None:
    ended = stage.live({4: lambda driver: setattr(driver, "diverged", 4.0)}, stop_diverged=stop)
    assert (ended.summary["status"], ended.summary["diverged"]) == (status, 4.0)
    assert stage.files() == FILES
    assert "mine:Method diverged at 4 s" in stage.said[0]


# ---- checkpoints


@pytest.mark.parametrize(
    ("every", "times"), [(3.0, [0.0, 3.0, 6.0, 9.0]), (4.5, [0.0, 5.0]), (1.0, [float(t) for t in range(10)])]
)
def test_a_driver_is_saved_at_its_start_and_at_intervals_of_its_time(stage: Stage, every: float, times: list):
    stage.live(checkpoint_every=every)
    assert stage.driver.saved == times


def slowly(wall: list[float], seconds: float) -> dict[int, Act]:
    def wait(driver: Ticking) -> None:
        wall[0] += seconds

    return dict.fromkeys(range(1, 11), wait)


def test_a_driver_is_saved_at_intervals_of_real_time(stage: Stage, wall: list[float]) -> None:
    """Events of 25 s: after three of them a minute is over, counted from the last save."""
    ended = stage.live(slowly(wall, 25.0), checkpoint_every=0.0, checkpoint_minutes=1.0)
    assert stage.driver.saved == [0.0, 3.0, 6.0, 9.0]
    assert ended.summary["wall_seconds"] == 250.0


def test_each_save_restarts_both_intervals(stage: Stage, wall: list[float]) -> None:
    stage.live(slowly(wall, 25.0), checkpoint_every=2.0, checkpoint_minutes=1.0)
    assert stage.driver.saved == [0.0, 2.0, 4.0, 6.0, 8.0], "the minute never comes"
    other = Stage(stage.directory.parent / "other")
    other.live(slowly(wall, 25.0), checkpoint_every=4.0, checkpoint_minutes=1.0)
    assert other.driver.saved == [0.0, 3.0, 6.0, 9.0], "nor do the four seconds"


def test_without_either_setting_a_run_is_saved_only_when_it_is_interrupted(stage: Stage) -> None:
    never = {"checkpoint_every": 0.0, "checkpoint_minutes": 0.0}
    stage.live({4: press}, **never)
    assert stage.driver.saved == [4.0]
    other = Stage(stage.directory.parent / "other")
    other.live(**never)
    assert other.driver.saved == []


# ---- Ctrl-C


def test_ctrl_c_ends_a_run_before_its_next_event_with_a_checkpoint_of_that_moment(stage: Stage) -> None:
    ended = stage.live({5: press})
    assert stage.events() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert (ended.summary["status"], ended.summary["virtual_time"]) == ("interrupted", 5.0)
    assert stage.files() == sorted([*FILES, "checkpoint"])
    assert stage.driver.saved == [0.0, 3.0, 5.0]
    assert checkpoint.read(stage.directory).tree["ticks"] == 5
    assert stage.closed == 1


def test_an_interrupted_run_resumes_to_the_same_log_and_adds_its_real_time(stage: Stage, wall: list[float]) -> None:
    whole = Stage(stage.directory.parent / "whole")
    whole.live()
    stage.live(slowly(wall, 10.0) | {5: press})
    wall[0] += 5000.0
    ended = stage.live(slowly(wall, 10.0), resume=True)
    assert (stage.directory / "events.jsonl").read_bytes() == (whole.directory / "events.jsonl").read_bytes()
    assert ended.summary["status"] == "finished"
    assert ended.summary["wall_seconds"] == 40.0 + 50.0
    assert stage.files() == FILES


def test_ctrl_c_wins_over_a_checkpoint_that_is_due(stage: Stage) -> None:
    stage.live({3: press})
    assert stage.driver.saved == [0.0, 3.0], "saved once, not twice"


def test_a_second_ctrl_c_ends_it_at_once_without_a_new_checkpoint(stage: Stage) -> None:
    never: Future[int] = Future()

    def hang(driver: Ticking) -> None:
        driver.writer.event(driver.now, MERGE, never, lambda number: {"number": number})
        press_twice(driver)

    ended = stage.live({5: hang})
    assert ended.summary["status"] == stage.summary()["status"] == "interrupted"
    assert stage.events() == [1.0, 2.0, 3.0, 4.0, 5.0], "whole up to the event whose numbers never came"
    assert stage.driver.saved == [0.0, 3.0]
    assert stage.files() == sorted([*FILES, "checkpoint"])
    assert stage.closed == 1
    again = stage.live(resume=True)
    assert again.summary["status"] == "finished"
    assert stage.events() == [float(tick) for tick in range(1, 11)]


def test_ctrl_c_in_the_last_event_changes_nothing(stage: Stage) -> None:
    assert stage.live({10: press}).summary["status"] == "finished"


@pytest.mark.parametrize("happens", [{}, {5: press}, {5: press_twice}])
def test_the_signal_handlers_are_restored_after_a_run(stage: Stage, happens: dict[int, Act]) -> None:
    before = signal.getsignal(signal.SIGINT)
    stage.live(happens)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_in_a_thread_leaves_signals_alone(stage: Stage) -> None:
    before, seen = signal.getsignal(signal.SIGINT), []
    happens = {5: lambda _: seen.append(signal.getsignal(signal.SIGINT))}
    thread = threading.Thread(target=stage.live, args=[happens])
    thread.start()
    thread.join()
    assert seen == [before]
    assert stage.summary()["status"] == "finished"


def test_the_first_ctrl_c_is_noted_and_the_second_raised() -> None:
    with pytest.raises(KeyboardInterrupt), interruptible() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        os.kill(os.getpid(), signal.SIGINT)


# ---- failures


class Broken(Exception):
    pass


def fail(driver: Ticking) -> None:
    raise Broken


def test_a_failure_is_raised_after_all_files_are_written(stage: Stage) -> None:
    with pytest.raises(Broken):
        stage.live({5: fail})
    assert stage.events() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert (stage.summary()["status"], stage.summary()["virtual_time"]) == ("failed", 5.0)
    assert stage.files() == sorted([*FILES, "checkpoint"]), "from which it can be resumed"
    assert stage.closed == 1
    assert stage.live(resume=True).summary["status"] == "finished"
    assert stage.events() == [float(tick) for tick in range(1, 11)]


def test_numbers_that_cannot_be_computed_fail_the_run_and_the_log_ends_before_them(stage: Stage) -> None:
    lost: Future[int] = Future()
    lost.set_exception(Broken())
    with pytest.raises(Broken):
        stage.live({5: lambda d: d.writer.event(d.now, MERGE, lost, lambda number: {"number": number})})
    assert stage.events() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert stage.summary()["status"] == "failed"


def test_numbers_that_came_before_the_failure_are_in_the_log(stage: Stage) -> None:
    late: Future[int] = Future()

    def come_and_fail(driver: Ticking) -> None:
        late.set_result(1)
        raise Broken

    happens = {
        4: lambda d: d.writer.event(d.now, MERGE, late, lambda number: {"number": number}),
        5: come_and_fail,
    }
    with pytest.raises(Broken):
        stage.live(happens)
    assert stage.events() == [1.0, 2.0, 3.0, 4.0, 4.0, 5.0]


def test_a_failing_run_waits_for_pending_numbers_so_the_log_does_not_depend_on_worker_speed(stage):
    late: Future[int] = Future()

    def fail_before(driver: Ticking) -> None:
        threading.Timer(0.05, late.set_result, [42]).start()
        raise Broken

    happens = {
        4: lambda d: d.writer.event(d.now, MERGE, late, lambda number: {"number": number}),
        5: fail_before,
    }
    with pytest.raises(Broken):
        stage.live(happens)
    assert stage.events() == [1.0, 2.0, 3.0, 4.0, 4.0, 5.0]


def test_a_state_that_cannot_be_restored_fails_the_run_and_is_kept(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.live({5: press})
    monkeypatch.setattr(Ticking, "restore", lambda self, tree, until: fail(self))
    with pytest.raises(Broken):
        stage.live(resume=True)
    assert stage.summary()["status"] == "failed"
    assert checkpoint.read(stage.directory).tree["ticks"] == 5


def test_a_run_that_cannot_be_opened_writes_nothing(stage: Stage) -> None:
    @contextmanager
    def opened() -> Iterator[OpenRun]:
        raise Broken
        yield

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Broken):
        drive(PLAN, opened())
    assert not stage.directory.exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_stopwatch_continues_from_its_saved_time(wall: list[float]) -> None:
    watch = Stopwatch(30.0)
    wall[0] += 12.0
    assert watch.seconds() == pytest.approx(42.0)
