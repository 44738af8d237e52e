"""The progress bar, number formats, and tables that fit narrow terminals without cutting a number."""

import io
import re

import pytest
from rich.console import Console
from rich.table import Table

from freshet import display
from freshet.cli.screen import accuracy_table, reading_notes, size, split_to_fit
from freshet.display import LiveProgress, clock, number
from freshet.paper.cells import CELLS
from freshet.report.columns import DEVICES
from tests.report.helpers import line as line_of
from tests.report.helpers import results, spread, world


@pytest.mark.parametrize(
    ("until", "rounds", "time", "done", "share"),
    [(100.0, 0, 40.0, 7, 0.4), (0.0, 20, 40.0, 5, 0.25), (100.0, 20, 40.0, 5, 0.4), (100.0, 20, 40.0, 12, 0.6)],
)
def test_the_bar_shows_the_nearer_end(until, rounds, time, done, share):
    progress = LiveProgress(Console(file=io.StringIO(), force_terminal=True))
    progress.begin("fedavg", until, rounds)
    progress.on_progress(time)
    progress.on_metrics({"rounds": done, "accuracy": 0.5, "uploads": 3})
    task = progress.bar.tasks[0]
    assert task.completed / task.total == pytest.approx(share)
    assert task.fields["rounds"] == (f"  round {done}/20" if rounds else "")
    progress.on_end({"status": "finished", "virtual_time": 50.0, "rounds": done})
    assert task.finished


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (3e15, "3000.0 TB")]
)
def test_bytes_are_printed_with_a_unit(value, text):
    assert size(value) == text


def test_a_missing_number_is_a_dash():
    assert (number(None), number(0.12345), number(2, 1)) == ("–", "0.123", "2.0")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def timer(monkeypatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(display, "time", found)
    return found


def watcher(terminal: bool) -> tuple[LiveProgress, io.StringIO]:
    file = io.StringIO()
    return LiveProgress(Console(file=file, force_terminal=terminal, width=200)), file


def uploads(progress: LiveProgress, count: int) -> None:
    for _ in range(count):
        progress.on_event({"kind": "upload"})


def test_the_bar_pulses_until_the_first_event():
    progress, _ = watcher(terminal=True)
    progress.begin("fedavg", 100.0)
    task = progress.bar.tasks[0]
    assert task.total is None  # a bar without an end pulses
    progress.on_progress(10.0)
    assert (task.total, task.completed) == (1.0, 0.1)


def test_the_expected_duration_follows_from_the_pace_after_the_first_trips(timer):
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


def test_a_resumed_run_is_timed_by_its_remaining_part(timer):
    progress, _ = watcher(terminal=True)
    progress.begin("fedavg", 1000.0)
    uploads(progress, 3)
    progress.on_progress(500.0)
    timer.now += 10.0
    progress.on_progress(600.0)
    assert progress.expected_seconds() == pytest.approx(50.0)


@pytest.mark.parametrize(("per_step", "said"), [(10.0, "expected to take about 8:20 in total"), (0.2, "")])
def test_on_a_pipe_a_long_run_prints_its_expected_duration_once(timer, per_step, said):
    progress, file = watcher(terminal=False)
    progress.begin("fedavg", 1000.0)
    progress.on_progress(0.0)
    for time in range(20, 200, 20):
        timer.now += per_step
        uploads(progress, 2)
        progress.on_progress(float(time))
    assert file.getvalue().count("expected") == bool(said)
    assert said in file.getvalue()


def test_durations_are_printed_as_hours_minutes_and_seconds():
    assert [clock(seconds) for seconds in (0.4, 65, 3600)] == ["0:00", "1:05", "1:00:00"]


SMALL = ["-s", "model.name=mlp", "-s", "fleet.devices=6", "-s", "data.train_samples=150", "-s", "run.executor=serial"]


def printed(table: Table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    for part in split_to_fit(console, table):
        console.print(part)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_a_table_that_is_too_wide_is_split_and_every_part_repeats_the_names(width: int) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("method", overflow="fold")
    for place in range(6):
        table.add_column(f"heading {place}", justify="right", no_wrap=True)
    table.add_row("fedasync with a very long name indeed", *(f"{10.0**place:.3f}" for place in range(6)))
    table.add_row("b", *["–"] * 6)
    lines = printed(table, width)
    text = " ".join(lines)
    assert all(f"{10.0**place:.3f}" in text and f"heading {place}" in text for place in range(6))
    assert max(map(len, lines)) <= width and "…" not in text
    heads = [line for line in lines if line.startswith("method")]
    assert len(heads) == sum(line.startswith("fedasync") for line in lines) and (len(heads) == 1) == (width == 200)


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_comparison_can_be_read_in_a_narrow_terminal(command, monkeypatch, width: int) -> None:
    line = ["compare", "-m", "fedasmu,fedavg", "--seeds", 2, "--until", 20, "-s", "run.target=0.05", *SMALL]
    wide = command(*line).out
    monkeypatch.setenv("COLUMNS", str(width))
    narrow = command(*line).out
    assert "6 devices, until 20 s" in wide
    split = [row for row in narrow.splitlines() if row.startswith(("method", "fedasmu", "fedavg"))]
    assert max(map(len, split)) <= width
    numbers = re.findall(r"[\d.–x/%+-]+", " ".join(row for row in wide.splitlines() if row.startswith("fed")))
    shown = " ".join(split).split()
    assert [each for each in numbers if each not in shown] == []


@pytest.mark.parametrize("width", [40, 60])
def test_the_numbers_of_cells_are_not_cut(command, monkeypatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = command("cells").out
    assert "…" not in out
    assert all(
        word in out.split() for cell in CELLS.values() for word in (cell.name, f"{cell.lr:g}", f"{cell.target:g}")
    )


@pytest.mark.parametrize(("target", "times"), [(15.0, ["to 15", "5-mean", "time vs reference"]), (None, [])])
def test_a_comparison_without_a_target_has_no_times(target: float | None, times: list[str]) -> None:
    held = {"reference": "a", "difference": 2.5, "p": 0.5, "pairs": 2, "time_raw": None}
    more = {"best": spread(14.0), "time_mean": spread(None, 0), "failed": 0}
    lines = [line_of("a", accuracy=14.25, time=None, **more), line_of("b", accuracy=16.75, time=None, **more)]
    lines[1]["against"] = held
    facts = {"target": target, "metric": "rmse", "direction": "min", "references": ["a"]}
    table = accuracy_table(world("mine", lines) | facts)
    heads = [column.header for column in table.columns]
    assert heads == ["method", "runs", "rmse", "range", "best", *times[:2], *times[2:], "rmse vs", "p"]
    assert printed(table, 200)[-1].split()[-2:] == ["+2.500", "0.500"]


def test_the_notes_of_a_comparison_name_its_metric() -> None:
    against = {"reference": "a", "pairs": 2}
    lines = [line_of("a"), line_of("b", against=against)]
    for each in lines:
        each |= {key: spread(None, 0) for key in DEVICES} | {"marks": {}}
    facts = {"target": None, "metric": "rmse", "direction": "min"}
    said = " ".join(reading_notes(results("curves", [world("mine", lines) | facts])))
    assert said.startswith("rmse, best: median") and "References: b against a" in said and "rmse vs: mean" in said
    assert "accuracy" not in said and "target" not in said
    usual = " ".join(reading_notes(results("curves", [world("mine", lines)])))
    assert usual.startswith("accuracy, best, times: median") and "1.60x = takes" in usual
