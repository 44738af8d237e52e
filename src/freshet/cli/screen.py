"""Runs in a terminal: a summary table, and the tables of a grid with notes on reading them."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from freshet.display import number
from freshet.files import printable
from freshet.methods import builtin_about
from freshet.report.columns import DEVICES, choose_columns, column_for, overhead, without_times
from freshet.report.columns import Column as ResultColumn
from freshet.report.groups import Ratio, describe_divergence
from freshet.runs.records import metric_of

#: Columns of a screen that fits every table.
WIDEST_SCREEN = 10_000
#: Fewest columns for names beside numbers.
MIN_NAME_COLUMNS = 12


def size(count: float) -> str:
    """Format bytes with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def name_with_marks(name: str) -> str:
    """Return a method's name with its marks. A user's method (``module:Class``) is not imported."""
    about = builtin_about(name)
    marks = about.marks() if about else {}
    return " ".join([name, *(f"[{mark}]" for mark in marks)])


def cell(column: ResultColumn, value: float | None) -> str:
    """Format one cell of a table of results."""
    if value is None:
        return "–"
    if column.kind == "bytes":
        return size(value)
    if column.kind == "seconds":
        return f"{value:.1f} s" if column.key == "wall_seconds" else f"{value:.0f} s"
    return number(value, {"share": 3, "value": 4, "mean": 1, "index": 3, "count": 0}[column.kind])


_SUMMARY_COLUMNS = ("accuracy", "best", "time_raw", "uploads", "discards", "mean_staleness", "bytes_up", "bytes_down")


def results_table(summaries: list[dict[str, Any]]) -> Table:
    """Return a table with one line per run: what it reached, how fast, at what cost."""
    target, metric = summaries[0]["target"], metric_of(summaries[0])
    table = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    table.add_column("method", no_wrap=True)
    columns = [column_for(key, metric) for key in without_times(_SUMMARY_COLUMNS, target)]
    for column in columns:
        table.add_column(column.short.format(target=f"{target or 0:g}"), justify="right", no_wrap=True)
    for summary in summaries:
        diverged = " [red]diverged[/red]" if summary.get("diverged") is not None else ""
        if 0 < summary["uploads"] <= summary["rejected"]:
            diverged += " [red]all uploads rejected[/red]"
        method = escape(name_with_marks(printable(summary["method"]))) + diverged
        table.add_row(method, *(cell(column, summary[column.summary]) for column in columns))
    return table


def summary_table(console: Console, summaries: list[dict[str, Any]]) -> Table:
    """Return the results table, transposed if the screen is too narrow. No number is ever cut."""
    table = results_table(summaries)
    return table if _width(console, table) <= console.width else _transpose(table)


def split_to_fit(console: Console, table: Table) -> list[Table]:
    """Split a table that is too wide for the screen. Every part repeats the first column. No number is ever cut."""
    if _width(console, table) <= console.width:
        return [table]
    first, *rest = table.columns
    if not first.no_wrap:
        first.max_width = max(MIN_NAME_COLUMNS, console.width // 3)
    found: list[list[Column]] = []
    for column in rest:
        if not found or _width(console, _part(table, [first, *found[-1], column])) > console.width:
            found.append([])
        found[-1].append(column)
    return [_part(table, [first, *columns]) for columns in found]


def _width(console: Console, table: Table) -> int:
    """Return the screen columns that the table needs."""
    return Measurement.get(console, console.options.update(max_width=WIDEST_SCREEN), table).maximum


def _part(table: Table, columns: list[Column]) -> Table:
    """Return a table with these columns only."""
    part = Table(*(column.copy() for column in columns), box=None, header_style=table.header_style, pad_edge=False)
    for cells in zip(*(column.cells for column in columns), strict=True):
        part.add_row(*cells)
    return part


def _transpose(table: Table) -> Table:
    turned = Table(box=None, show_header=False, pad_edge=False)
    turned.add_column(style="bold", no_wrap=True)
    for _ in table.rows:
        turned.add_column(justify="right", overflow="fold")
    for column in table.columns:
        turned.add_row(column.header, *column.cells)
    return turned


Record = Mapping[str, Any]


def seed_range(value: Record) -> str:
    """Format the range over seeds: 0.805–0.820."""
    return f"{number(value['low'])}–{number(value['high'])}" if value["count"] > 1 else "–"


def time_to_target(value: Record) -> str:
    """Format the median time to the target, a dash if never reached, and how many seeds reached it if not all."""
    text = "–" if value["median"] is None else f"{value['median']:.0f} s"
    return f"{text} ({value['count']}/{value['of']})" if 0 < value["count"] < value["of"] else text


def time_ratio(value: Record | None) -> str:
    """Format the time to target relative to the reference: 1.60x, or a bound if one of them never reached it."""
    return "–" if value is None else str(Ratio(value["ratio"], value["bound"]))


def _runs(line: Record) -> str:
    failed = f" [red]{line['failed']} failed[/red]" if line["failed"] else ""
    diverged = describe_divergence(dict(line))
    return f"{line['finished']}/{line['all']}{failed}" + (f" [red]{diverged}[/red]" if diverged else "")


def accuracy_table(world: Record) -> Table:
    """Return a table of what each method reached and how fast, beside its reference and the paper's numbers."""
    lines, target, metric = world["lines"], world["target"], metric_of(world)
    paper, timed = any(line["published"] for line in lines), target is not None
    accuracy, best, *times = (
        column_for(key, metric).short.format(target=f"{target or 0:g}")
        for key in without_times(("accuracy", "best", "time_raw", "time_mean"), target)
    )
    held = [*(["time vs reference"] if timed else []), f"{metric.name} vs", "p"]
    published = ["published", f"its time to {target:g}"] if paper and timed else []
    table = _table(["runs", accuracy, "range", best, *times, *held, *published])
    for line in lines:
        row = [escape(line["label"]), _runs(line), number(line["accuracy"]["median"]), seed_range(line["accuracy"])]
        row += [number(line["best"]["median"]), *([time_to_target(line[key]) for key in _TIMES] if timed else [])]
        row += _reference_cells(world, line)
        if published:
            theirs = line["published"]
            row.append("–" if theirs is None else f"{theirs['accuracy']:g}")
            row.append("–" if theirs is None or theirs["time"] is None else f"{theirs['time']:,g}")
        table.add_row(*row)
    return table


_TIMES = ("time_raw", "time_mean")


def _reference_cells(world: Record, line: Record) -> list[str]:
    """Return the cells that compare a method with its reference: time if there is a target, difference, p."""
    against = line.get("against") or {}
    difference = against.get("difference")
    time = time_ratio(against.get("time_raw")) if against else _reference(world, line)
    shown = "–" if difference is None else f"{difference:+.3f}"
    return [*([] if world["target"] is None else [time]), shown, number(against.get("p"))]


def _reference(world: Record, line: Record) -> str:
    return "reference" if line["label"] in world["references"] else "–"


def cost_table(world: Record) -> Table:
    """Return a table of costs, as medians over seeds: staleness, discards, trips computed, real time."""
    lines = world["lines"]
    columns = choose_columns(("mean_staleness", "discards", "rejected", "trips", "wall_seconds"), lines)
    table = _table([column.short for column in columns])
    for line in lines:
        table.add_row(escape(line["label"]), *(cell(column, line[column.key]["median"]) for column in columns))
    return table


def devices_table(world: Record) -> Table | None:
    """Return a table of results on the devices, as medians over seeds; None if no run tested them."""
    lines = world["lines"]
    columns = choose_columns(DEVICES, lines)
    table = _table([column.short for column in columns])
    for line in lines:
        table.add_row(escape(line["label"]), *(cell(column, line[column.key]["median"]) for column in columns))
    return table if columns else None


def traffic_table(world: Record) -> Table:
    """Return a table of bytes sent, as medians over seeds. Fresh models are what FedASMU and FedSSMU send extra."""
    table = _table(["up", "down", "of which fresh models", "relative to the rest"])
    for line in world["lines"]:
        up, down, fresh = (line[key]["median"] for key in ("bytes_up", "bytes_down", "bytes_fresh"))
        share = overhead(up, down, fresh)
        table.add_row(
            escape(line["label"]),
            *("–" if count is None else size(count) for count in (up, down, fresh)),
            "–" if share is None else f"+{100 * share:.1f} %",
        )
    return table


def _table(headings: Sequence[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("method", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=heading != "runs", overflow="fold")
    return table


def wide_console() -> Console:
    """Return a console for tables. A file or pipe has room for all columns."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=180)


def print_results(console: Console, results: Record) -> None:
    """Print all tables of a grid, with notes on how to read them."""
    console.print(Text(results["title"], style="bold"))
    if results["scale"]:
        console.print(Text(f"SCALE {results['scale']['scale']:g}: {results['scale']['meaning']}", style="yellow"))
    for world in results["worlds"]:
        scaled = f" (scale {results['scale']['scale']:g})" if results["scale"] else ""
        name = (world["name"] or world["shared"]["data"]["name"]) + scaled
        devices = f"{world['shared']['fleet']['devices']} devices"
        length = f"until {world['until']:g} s, tested every {world['eval_every']:g} s"
        console.print(Text(f"\n{name}, {devices}, {length}", style="bold"))
        for table in (accuracy_table(world), devices_table(world), cost_table(world), traffic_table(world)):
            for part in [] if table is None else split_to_fit(console, table):
                console.print(part)
        for line in world["lines"]:
            for run in line["runs"]:
                if run["error"]:
                    console.print(Text(f"failed: {run['key']}: {run['error']}", style="red"), soft_wrap=True)
    for note in [*reading_notes(results), *results["notes"]]:
        console.print(Text(note, style="dim"), soft_wrap=True)


_TIMES_NOTE = (
    " Times: first test that reaches the target, and first mean of five tests that does; – means never, (1/3) one seed "
    "of 3"
)
_RATIOS_NOTE = (
    "time vs reference: 1.60x = takes 1.6 times as long as its reference to reach the target, 0.50x = half as long; "
    ">2.10x: the method never reached it, <0.50x: the reference never did. "
)


def reading_notes(results: Record) -> list[str]:
    """Return notes on how to read the tables."""
    lines = [line for world in results["worlds"] for line in world["lines"]]
    held = [line for line in lines if "against" in line]
    pairs = max((line["against"]["pairs"] for line in held), default=0)
    name = "/".join(dict.fromkeys(metric_of(world).name for world in results["worlds"])) or "accuracy"
    timed = any(world["target"] is not None for world in results["worlds"])
    columns, times = (f"{name}, best, times", _TIMES_NOTE) if timed else (f"{name}, best", "")
    notes = [f"{columns}: median over finished seeds; range: lowest–highest.{times}"]
    if any(line[key]["count"] for line in lines for key in DEVICES):
        notes.append(
            "median device, 10th pct., worst device: accuracy of the last model on each device's test samples; "
            "Jain: 1 if all devices do equally well, 1/n if one has everything; personal: after local steps there"
        )
    if held:
        named: dict[str, list[str]] = {}
        for line in held:
            named.setdefault(line["against"]["reference"], []).append(line["label"])
        pairs_text = "; ".join(
            f"{', '.join(dict.fromkeys(names))} against {reference}" for reference, names in named.items()
        )
        notes.append(f"{_RATIOS_NOTE if timed else ''}References: {pairs_text}")
    if pairs:
        notes.append(
            f"{name} vs: mean difference of {name} from the reference over common seeds; p: exact paired sign-flip "
            f"test, not corrected for the number of methods; with {pairs} seeds it is at least {2 / 2**pairs:.2g}"
        )
    if any(line["diverged"] for line in lines):
        notes.append(
            "diverged: the model became useless; the run stopped there, and its last numbers count in the medians"
        )
    marks = {mark: text for line in lines for mark, text in line["marks"].items()}
    return notes + [f"[{mark}] {text}" for mark, text in marks.items()]
