"""The columns of tables of results: what each is called, what it measures, and which way is better.

A table chooses by key; how a kind of number is written is the medium's own affair (terminal, page, LaTeX).
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from freshet.runs.records import ACCURACY, Maybe, Metric

Record = dict[str, Any]
Kind = Literal["share", "value", "seconds", "count", "mean", "index", "bytes"]


class Column(NamedTuple):
    """One column; ``{target}`` in a title stands for the value to reach, ``{metric}`` for what runs are judged by."""

    key: str
    #: What summary.json calls it.
    summary: str
    title: str
    #: Its title where there is little room.
    short: str
    kind: Kind
    #: -1: more is better, 1: less is better, 0: neither.
    better: int = 0
    #: Shown only where some line has it; a count, where it is more than 0.
    seldom: bool = False


COLUMNS = {
    column.key: column
    for column in (
        Column("accuracy", "final_{metric}", "final {metric}", "{metric}", "share", -1),
        Column("best", "best_{metric}", "best {metric}", "best", "share", -1),
        Column("time_raw", "time_to_target", "first crossing", "to {target}", "seconds", 1),
        Column("time_mean", "", "5-point mean", "5-mean", "seconds", 1),
        Column("devices_median", "devices_median", "median device", "median device", "share", -1, seldom=True),
        Column("devices_p10", "devices_p10", "10th percentile", "10th pct.", "share", -1, seldom=True),
        Column("devices_worst", "devices_worst", "worst device", "worst device", "share", -1, seldom=True),
        Column("devices_jain", "devices_jain", "Jain index", "Jain", "index", -1, seldom=True),
        Column("personal_median", "personal_median", "median personalised", "personal", "share", -1, seldom=True),
        Column("personal_worst", "personal_worst", "worst personalised", "worst pers.", "share", -1, seldom=True),
        Column("mean_staleness", "mean_staleness", "mean staleness", "stale", "mean"),
        Column("trips", "trips", "trips", "trips", "count"),
        Column("uploads", "uploads", "uploads", "uploads", "count"),
        Column("discards", "discards", "discarded", "discarded", "count"),
        Column("rejected", "rejected", "rejected", "rejected", "count", seldom=True),
        Column("lost", "lost", "lost", "lost", "count"),
        Column("bytes_up", "bytes_up", "up", "up", "bytes"),
        Column("bytes_down", "bytes_down", "down", "down", "bytes"),
        Column("wall_seconds", "wall_seconds", "compute", "computed in", "seconds"),
    )
}
#: The accuracy on single devices, of runs that tested it.
DEVICES = tuple(key for key in COLUMNS if key.startswith(("devices_", "personal_")))
#: Those that a run's summary holds as they are; the others follow from its tests.
COUNTED = tuple(column for column in COLUMNS.values() if column.key == column.summary)


def judged(key: str, metric: Metric = ACCURACY) -> Column:
    """A column as it is called where runs are judged by this metric, which need not be a share."""
    column = COLUMNS[key]
    if key not in ("accuracy", "best"):
        return column
    words = {part: getattr(column, part).format(metric=metric.name) for part in ("summary", "title", "short")}
    return column._replace(**words, kind=kind_of(metric), better=-1 if metric.direction == "max" else 1)


def kind_of(metric: Metric) -> Literal["share", "value"]:
    """What kind of number a metric is: an accuracy is a share, of any other nothing is known."""
    return "share" if metric.name == ACCURACY.name else "value"


def goal(target: float, metric: Metric) -> str:
    """A value to reach as a figure writes it: 80 % of an accuracy, 14.2 of anything else."""
    return f"{100 * target:g} %" if kind_of(metric) == "share" else f"{target:g}"


def reachable(keys: Sequence[str], target: Maybe) -> list[str]:
    """These columns, without the times to a target where there is none."""
    return [key for key in keys if target is not None or not key.startswith("time_")]


def chosen(keys: Sequence[str], lines: Sequence[Record], metric: Metric = ACCURACY) -> list[Column]:
    """These columns, without those that are seldom wanted and that no line needs."""
    columns = [judged(key, metric) for key in keys]
    return [column for column in columns if not column.seldom or any(_told(column, line) for line in lines)]


def _told(column: Column, line: Record) -> bool:
    high = line[column.key]["high"]
    return high is not None and (column.kind != "count" or high > 0)


def best(column: Column, lines: Sequence[Record]) -> Maybe:
    """The best median, where there are several lines and one can be better than another."""
    medians = [line[column.key]["median"] for line in lines if line[column.key]["median"] is not None]
    if not column.better or len(lines) < 2:
        return None
    return (min if column.better > 0 else max)(medians, default=None)


def overhead(up: Maybe, down: Maybe, fresh: Maybe) -> Maybe:
    """Bytes of the fresh models over all other bytes."""
    if up is None or down is None or fresh is None or up + down <= fresh:
        return None
    return fresh / (up + down - fresh)
