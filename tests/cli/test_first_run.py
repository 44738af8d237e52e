"""The first minutes with Freshet: something moves, and what happens next is said."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from freshet.cli import screen
from freshet.cli.screen import LiveProgress, clock
from freshet.compute import choice
from freshet.compute.executor import SerialExecutor


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def timer(monkeypatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(screen, "time", found)
    return found


def watcher(terminal: bool) -> tuple[LiveProgress, io.StringIO]:
    file = io.StringIO()
    return LiveProgress(Console(file=file, force_terminal=terminal, width=200)), file


def uploads(progress: LiveProgress, count: int) -> None:
    for _ in range(count):
        progress.on_event({"kind": "upload"})


def test_the_bar_moves_to_and_fro_until_the_first_event():
    progress, _ = watcher(terminal=True)
    progress.begin("fedavg", 100.0)
    task = progress.bar.tasks[0]
    assert task.total is None  # a bar without an end pulses
    progress.on_progress(10.0)
    assert (task.total, task.completed) == (1.0, 0.1)


def test_the_expected_duration_follows_from_the_pace_once_the_first_trips_are_over(timer):
    progress, _ = watcher(terminal=True)
    progress.begin("fedavg", 1000.0)
    progress.on_progress(0.0)
    timer.now += 25.0  # workers start, loops are compiled: that is not the pace of the run
    uploads(progress, 3)
    progress.on_progress(20.0)
    assert progress.expected_seconds() is None
    timer.now += 4.0
    progress.on_progress(40.0)
    assert progress.expected_seconds() == pytest.approx(25.0 + 4.0 * 980 / 20)
    assert progress.bar.tasks[0].fields["expected"] == "of about 3:41"
    timer.now += 14.0
    progress.on_progress(200.0)  # faster now
    assert progress.expected_seconds() == pytest.approx(25.0 + 18.0 * 980 / 180)


def test_a_resumed_run_is_timed_by_what_is_left_of_it(timer):
    progress, _ = watcher(terminal=True)
    progress.begin("fedavg", 1000.0)
    uploads(progress, 3)
    progress.on_progress(500.0)
    timer.now += 10.0
    progress.on_progress(600.0)
    assert progress.expected_seconds() == pytest.approx(50.0)


@pytest.mark.parametrize(("per_step", "said"), [(10.0, "expected to take about 8:20 in total"), (0.2, "")])
def test_on_a_pipe_a_long_run_says_once_how_long_it_takes(timer, per_step, said):
    progress, file = watcher(terminal=False)
    progress.begin("fedavg", 1000.0)
    progress.on_progress(0.0)
    for time in range(20, 200, 20):
        timer.now += per_step
        uploads(progress, 2)
        progress.on_progress(float(time))
    assert file.getvalue().count("expected") == bool(said)
    assert said in file.getvalue()


def test_durations_for_people():
    assert [clock(seconds) for seconds in (0.4, 65, 3600)] == ["0:00", "1:05", "1:00:00"]


def test_the_demo_ends_with_the_line_that_makes_its_report(command, monkeypatch):
    from freshet.cli import run

    monkeypatch.setattr(run, "DEMO_METHODS", ("fedavg",))
    done = command("demo", "--until", "30s")
    assert done.code == 0
    last = done.out.strip().splitlines()[-1]
    assert last == "see the full report in a browser: freshet report runs/demo --open"
    assert command(*last.partition("freshet ")[2].split()[:2]).code == 0  # what is typed works
    assert Path("report.html").is_file()


def test_a_small_run_starts_no_workers(command, monkeypatch):
    def refuse(*_):
        raise AssertionError("workers were started")

    monkeypatch.setattr(choice, "start_pool", refuse)
    monkeypatch.setattr(choice, "available_cores", lambda: 8)
    opened = []
    monkeypatch.setattr(choice, "SerialExecutor", lambda setup: opened.append(1) or SerialExecutor(setup))
    assert command("run", "-m", "fedavg", "--until", 20, "-s", "model.name=mlp", "-q", "-o", "x").code == 0
    assert opened == [1]
    assert json.loads(Path("x/summary.json").read_text())["status"] == "finished"
