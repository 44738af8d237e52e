"""The columns of results tables: their titles, what they measure, and which direction is better.

A table chooses columns by key. Each medium (terminal, page, LaTeX) formats the kinds of numbers in its own way.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from freshet.runs.records import ACCURACY, Maybe, Metric

Record = dict[str, Any]
Kind = Literal["share", "value", "seconds", "count", "mean", "index", "bytes"]


class Column(NamedTuple):
    """One column. In its titles ``{target}`` stands for the target and ``{metric}`` for the metric of the runs."""

    key: str
    #: Its key in summary.json.
    summary: str
    title: str
    #: A short title for narrow tables.
    short: str
    kind: Kind
    #: -1: more is better, 1: less is better, 0: neither.
    better: int = 0
    #: Shown only if some line has a value; a count, only if it is more than 0.
    rare: bool = False


COLUMNS = {
    column.key: column
    for column in (
        Column("accuracy", "final_{metric}", "final {metric}", "{metric}", "share", -1),
        Column("best", "best_{metric}", "best {metric}", "best", "share", -1),
        Column("time_raw", "time_to_target", "first crossing", "to {target}", "seconds", 1),
        Column("time_mean", "", "5-point mean", "5-mean", "seconds", 1),
        Column("devices_median", "devices_median", "median device", "median device", "share", -1, rare=True),
        Column("devices_p10", "devices_p10", "10th percentile", "10th pct.", "share", -1, rare=True),
        Column("devices_worst", "devices_worst", "worst device", "worst device", "share", -1, rare=True),
        Column("devices_jain", "devices_jain", "Jain index", "Jain", "index", -1, rare=True),
        Column("personal_median", "personal_median", "median personalised", "personal", "share", -1, rare=True),
        Column("personal_worst", "personal_worst", "worst personalised", "worst pers.", "share", -1, rare=True),
        Column("mean_staleness", "mean_staleness", "mean staleness", "stale", "mean"),
        Column("trips", "trips", "trips", "trips", "count"),
        Column("uploads", "uploads", "uploads", "uploads", "count"),
        Column("discards", "discards", "discarded", "discarded", "count"),
        Column("rejected", "rejected", "rejected", "rejected", "count", rare=True),
        Column("lost", "lost", "lost", "lost", "count"),
        Column("bytes_up", "bytes_up", "up", "up", "bytes"),
        Column("bytes_down", "bytes_down", "down", "down", "bytes"),
        Column("wall_seconds", "wall_seconds", "compute", "computed in", "seconds"),
    )
}
#: Accuracy on single devices, for runs that evaluate it.
DEVICES = tuple(key for key in COLUMNS if key.startswith(("devices_", "personal_")))
#: Columns that are in summary.json; the others are computed from the tests.
SUMMARY_COLUMNS = tuple(column for column in COLUMNS.values() if column.key == column.summary)


def column_for(key: str, metric: Metric = ACCURACY) -> Column:
    """A column for runs that are judged by this metric, which may not be a share."""
    column = COLUMNS[key]
    if key not in ("accuracy", "best"):
        return column
    words = {part: getattr(column, part).format(metric=metric.name) for part in ("summary", "title", "short")}
    return column._replace(**words, kind=kind_of(metric), better=-1 if metric.direction == "max" else 1)


def kind_of(metric: Metric) -> Literal["share", "value"]:
    """The kind of number: an accuracy is a share, any other metric a plain value."""
    return "share" if metric.name == ACCURACY.name else "value"


def format_target(target: float, metric: Metric) -> str:
    """A target as text: 80 % for an accuracy, 14.2 for any other metric."""
    return f"{100 * target:g} %" if kind_of(metric) == "share" else f"{target:g}"


def without_times(keys: Sequence[str], target: Maybe) -> list[str]:
    """These columns, without the times to the target if there is no target."""
    return [key for key in keys if target is not None or not key.startswith("time_")]


def choose_columns(keys: Sequence[str], lines: Sequence[Record], metric: Metric = ACCURACY) -> list[Column]:
    """These columns, without rare ones that no line has a value for."""
    columns = [column_for(key, metric) for key in keys]
    return [column for column in columns if not column.rare or any(_has_values(column, line) for line in lines)]


def _has_values(column: Column, line: Record) -> bool:
    high = line[column.key]["high"]
    return high is not None and (column.kind != "count" or high > 0)


def best_median(column: Column, lines: Sequence[Record]) -> Maybe:
    """The best median; None if there is only one line, or neither direction is better."""
    medians = [line[column.key]["median"] for line in lines if line[column.key]["median"] is not None]
    if not column.better or len(lines) < 2:
        return None
    return (min if column.better > 0 else max)(medians, default=None)


def by_result(lines: Sequence[Record], value: Callable[[Record], Maybe], metric: Metric) -> list[Record]:
    """The lines of a table, best value of the metric first. Lines without a value come last."""
    sign = -1.0 if metric.direction == "max" else 1.0
    return sorted(lines, key=lambda line: math.inf if (found := value(line)) is None else sign * found)


def overhead(up: Maybe, down: Maybe, fresh: Maybe) -> Maybe:
    """Bytes of fresh models divided by all other bytes."""
    if up is None or down is None or fresh is None or up + down <= fresh:
        return None
    return fresh / (up + down - fresh)
