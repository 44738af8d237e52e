"""The columns of results tables: named once, formatted by each medium."""

from typing import Any

import pytest

from freshet.cli.screen import cell, results_table
from freshet.report.columns import COLUMNS, SUMMARY_COLUMNS, best_median, choose_columns, overhead
from freshet.report.groups import group_runs, headline
from freshet.report.page import table_columns
from freshet.report.reading import read_all

from .conftest import Write
from .helpers import spread

Record = dict[str, Any]


def test_columns_match_results_lines_and_summaries(written: Write) -> None:
    facts: Record = {column.summary: 3 for column in SUMMARY_COLUMNS}
    (group,) = group_runs(read_all([written("a", summary=facts)]))
    line = headline(group, 0.8, 10.0, None)
    assert COLUMNS.keys() <= line.keys()
    assert [line[column.key]["median"] for column in SUMMARY_COLUMNS] == [3.0] * len(SUMMARY_COLUMNS)


def test_rare_columns_are_shown_if_a_line_has_a_value() -> None:
    none, some = {"rejected": spread(0.0), "lost": spread(0.0)}, {"rejected": spread(2.0), "lost": spread(0.0)}
    assert [column.key for column in choose_columns(("rejected", "lost"), [none, none])] == ["lost"]
    assert [column.key for column in choose_columns(("rejected", "lost"), [none, some])] == ["rejected", "lost"]
    devices = [{"devices_worst": spread(0.0), "devices_jain": spread(None, 0)}]
    keys = [column.key for column in choose_columns(("devices_worst", "devices_jain"), devices)]
    assert keys == ["devices_worst"], "a worst device at 0 is worth telling"


def test_the_best_of_several_lines() -> None:
    lines = [{"best": spread(v), "time_raw": spread(t), "lost": spread(1.0)} for v, t in ((0.5, 30.0), (0.7, None))]
    assert (best_median(COLUMNS["best"], lines), best_median(COLUMNS["time_raw"], lines)) == (0.7, 30.0)
    assert best_median(COLUMNS["lost"], lines) is None, "neither way is better"
    assert best_median(COLUMNS["best"], lines[:1]) is None, "nobody to be better than"
    assert best_median(COLUMNS["time_raw"], [lines[1]] * 2) is None, "nobody got there"


def test_the_page_gets_columns_with_their_best_values(written: Write) -> None:
    groups = group_runs(read_all([written("a", accuracy=[0.9]), written("b", method="fedavg", accuracy=[0.4])]))
    found = table_columns([headline(group, 0.8, 10.0, None) for group in groups], ("accuracy", "rejected"))
    assert found[0] == {"key": "accuracy", "title": "final accuracy", "kind": "share", "best": 0.9}
    assert len(found) == 1, "nobody has rejected uploads"


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("accuracy", 0.81234, "0.812"),
        ("time_raw", 120.4, "120 s"),
        ("wall_seconds", 1.26, "1.3 s"),
        ("mean_staleness", 4.25, "4.2"),
        ("uploads", 42, "42"),
        ("bytes_up", 2.4e6, "2.4 MB"),
        ("bytes_up", None, "–"),
    ],
)
def test_in_the_terminal(key: str, value: float | None, shown: str) -> None:
    assert cell(COLUMNS[key], value) == shown


def test_one_line_per_run_in_the_terminal() -> None:
    summary: Record = {"method": "fedavg", "target": 0.8, "time_to_target": None, "final_accuracy": 0.5}
    summary |= {
        "best_accuracy": 0.6,
        "uploads": 7,
        "rejected": 0,
        "discards": 1,
        "mean_staleness": 1.0,
    } | dict.fromkeys(("bytes_up", "bytes_down"), 1000)
    table = results_table([summary])
    heads = [str(column.header) for column in table.columns]
    assert heads == ["method", "accuracy", "best", "to 0.8", "uploads", "discarded", "stale", "up", "down"]
    assert [next(iter(column.cells)) for column in table.columns][1:5] == ["0.500", "0.600", "–", "7"]


def test_overhead_is_fresh_bytes_over_all_others() -> None:
    assert overhead(300.0, 700.0, 200.0) == pytest.approx(0.25)
    assert overhead(None, 1.0, 1.0) is None and overhead(1.0, 1.0, 2.0) is None
