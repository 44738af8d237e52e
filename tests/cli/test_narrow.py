"""Tables in narrow terminals: they are turned or split, and no number is ever cut."""

import io
import re

import pytest
from rich.console import Console
from rich.table import Table

from freshet.cli.screen import _reading_notes, accuracy_table, split_to_fit
from freshet.paper.cells import CELLS
from freshet.report.columns import DEVICES
from tests.report.helpers import line as line_of
from tests.report.helpers import results, spread, world

SMALL = ["-s", "model.name=mlp", "-s", "fleet.devices=6", "-s", "data.train_samples=150", "-s", "run.executor=serial"]


def printed(table: Table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    for part in split_to_fit(console, table):
        console.print(part)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [30, 40, 60, 80, 200])
def test_a_table_that_is_too_wide_is_split_and_every_part_has_the_names(width: int) -> None:
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
def test_the_numbers_of_cells_are_whole(command, monkeypatch, width: int) -> None:
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


def test_how_to_read_a_comparison_names_its_metric() -> None:
    against = {"reference": "a", "pairs": 2}
    lines = [line_of("a"), line_of("b", against=against)]
    for each in lines:
        each |= {key: spread(None, 0) for key in DEVICES} | {"marks": {}}
    facts = {"target": None, "metric": "rmse", "direction": "min"}
    said = " ".join(_reading_notes(results("curves", [world("mine", lines) | facts])))
    assert said.startswith("rmse, best: median") and "References: b against a" in said and "rmse vs: mean" in said
    assert "accuracy" not in said and "target" not in said
    usual = " ".join(_reading_notes(results("curves", [world("mine", lines)])))
    assert usual.startswith("accuracy, best, times: median") and "1.60x = takes" in usual
