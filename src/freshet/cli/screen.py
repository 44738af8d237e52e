"""What a run looks like in a terminal: a live progress line and tables.

The results of a grid as tables in a terminal, with everything that a reader must know to read them right.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from freshet.files import printable
from freshet.methods import builtin_about
from freshet.report.columns import DEVICES, chosen, judged, overhead, reachable
from freshet.report.columns import Column as ResultColumn
from freshet.report.groups import Ratio, said_diverged
from freshet.runs.records import metric_of
from freshet.runs.writer import Observer

#: The pace of a run is taken from so many uploads on, over at least so much of its length and so many seconds: before
#: them workers start and loops are compiled.
WARMUP_UPLOADS, WARMUP_SHARE, WARMUP_SECONDS = 3, 0.01, 1.0
#: A shorter run is not worth a line about its duration.
MIN_ANNOUNCED_SECONDS = 20.0
#: Columns of a screen on which every table fits.
WIDEST_SCREEN = 10_000
#: Columns that the names beside numbers have at least.
MIN_NAME_COLUMNS = 12


class LiveProgress(Observer):
    """A bar over virtual time, or over rounds where they end the run, with the newest accuracy and the real time that
    the run will have taken. It only moves to and fro until the first event (workers start, loops are compiled). On a
    pipe it stays silent but for messages, one of them the expected duration."""

    def __init__(self, console: Console) -> None:
        self.bar = Progress(
            TextColumn("[bold]{task.description:<11}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[now]:>7} s{task.fields[rounds]}"),
            TextColumn("{task.fields[metric]} [bold]{task.fields[value]}"),
            TextColumn("[dim]uploads {task.fields[uploads]}"),
            TimeElapsedColumn(),
            TextColumn("[cyan]{task.fields[expected]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._end, self._rounds, self._share = math.inf, 0, 0.0
        self._began: tuple[float, float] | None = None
        self._start, self._uploads, self._announced = 0.0, 0, False

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def begin(self, label: str, until: float, rounds: int = 0) -> None:
        """A new run starts; it ends at ``until`` or after so many rounds (0: no limit), whichever is first."""
        self._end, self._rounds, self._share = until or math.inf, rounds, 0.0
        self._start, self._began, self._uploads, self._announced = time.monotonic(), None, 0, False
        self._task = self.bar.add_task(
            label,
            total=None,
            now="0",
            rounds=self._of_rounds(0),
            metric="accuracy",
            value="  –  ",
            uploads=0,
            expected="",
        )

    def _of_rounds(self, done: int) -> str:
        return f"  round {done}/{self._rounds}" if self._rounds else ""

    def _move(self, share: float, **shown: Any) -> None:
        """The bar never goes back: the limit that is nearer counts."""
        if self._task is None:
            return
        self._share = min(1.0, max(self._share, share))
        if self._began is None and self._uploads >= WARMUP_UPLOADS:
            self._began = (time.monotonic(), self._share)
        length = self.expected_seconds()
        if length is not None:
            shown["expected"] = f"of about {clock(length)}"
            self._announce(length)
        self.bar.update(self._task, total=1.0, completed=self._share, **shown)

    def expected_seconds(self) -> float | None:
        """Real seconds from start to end, by the pace since the first trips; None before them."""
        if self._began is None:
            return None
        began, share = self._began
        spent, done = time.monotonic() - began, self._share - share
        if not self._uploads or done < WARMUP_SHARE or spent < WARMUP_SECONDS:
            return None
        return (began - self._start) + spent / done * (1.0 - share)

    def _announce(self, length: float) -> None:
        """On a pipe, where there is no bar: once, if the run is long."""
        if not self._announced and self.bar.disable and length >= MIN_ANNOUNCED_SECONDS:
            self.on_message(
                f"expected to take about {clock(length)} in all, by the pace of its first {self._share:.0%}"
            )
        self._announced = True

    def on_progress(self, time: float) -> None:
        self._move(time / self._end, now=f"{time:.0f}")

    def on_event(self, event: dict[str, Any]) -> None:
        self._uploads += event.get("kind") == "upload"

    def on_metrics(self, row: dict[str, Any]) -> None:
        share = row["rounds"] / self._rounds if self._rounds else 0.0
        metric = metric_of(row)
        shown = {"metric": metric.name, "value": number(metric.of(row)), "uploads": row["uploads"]}
        self._move(share, rounds=self._of_rounds(row["rounds"]), **shown)

    def on_message(self, message: str) -> None:
        self.bar.console.print(f"[yellow]{escape(printable(message))}", highlight=False, soft_wrap=True)

    def on_end(self, summary: dict[str, Any]) -> None:
        share = 1.0 if summary["status"] == "finished" else 0.0
        self._uploads = 0  # nothing is left to be expected
        shown = {"now": f"{summary['virtual_time']:.0f}", "rounds": self._of_rounds(summary["rounds"]), "expected": ""}
        self._move(share, **shown)


def clock(seconds: float) -> str:
    """Seconds as 1:05, or 2:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def number(value: float | None, digits: int = 3) -> str:
    """A figure, or a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def name_with_marks(name: str) -> str:
    """A method's name with its marks; code that a run only names (``module:Class``) is not imported for it."""
    about = builtin_about(name)
    marks = about.marks() if about else {}
    return " ".join([name, *(f"[{mark}]" for mark in marks)])


def cell(column: ResultColumn, value: float | None) -> str:
    """A number of a table of results as the terminal shows it."""
    if value is None:
        return "–"
    if column.kind == "bytes":
        return size(value)
    if column.kind == "seconds":
        return f"{value:.1f} s" if column.key == "wall_seconds" else f"{value:.0f} s"
    return number(value, {"share": 3, "value": 4, "mean": 1, "index": 3, "count": 0}[column.kind])


_SUMMARY_COLUMNS = ("accuracy", "best", "time_raw", "uploads", "discards", "mean_staleness", "bytes_up", "bytes_down")


def results_table(summaries: list[dict[str, Any]]) -> Table:
    """One line per run: what it reached, how fast, at what cost."""
    target, metric = summaries[0]["target"], metric_of(summaries[0])
    table = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    table.add_column("method", no_wrap=True)
    columns = [judged(key, metric) for key in reachable(_SUMMARY_COLUMNS, target)]
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
    """The same; where the screen is too narrow for it, one line per figure: no number is ever cut."""
    table = results_table(summaries)
    return table if _width(console, table) <= console.width else _transpose(table)


def split_to_fit(console: Console, table: Table) -> list[Table]:
    """A table; where the screen is too narrow for it, several that all begin with its first column: no number is ever
    cut."""
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
    """Columns of a screen on which it is whole."""
    return Measurement.get(console, console.options.update(max_width=WIDEST_SCREEN), table).maximum


def _part(table: Table, columns: list[Column]) -> Table:
    """Some columns of a table."""
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
    """Least and greatest over seeds: 0.805–0.820."""
    return f"{number(value['low'])}–{number(value['high'])}" if value["count"] > 1 else "–"


def time_to_target(value: Record) -> str:
    """Median time to the target, a dash when it was not reached, and how many seeds reached it if not all did."""
    text = "–" if value["median"] is None else f"{value['median']:.0f} s"
    return f"{text} ({value['count']}/{value['of']})" if 0 < value["count"] < value["of"] else text


def time_ratio(value: Record | None) -> str:
    """Time to target over the reference's: 1.60x, or a bound where one of them never got there."""
    return "–" if value is None else str(Ratio(value["ratio"], value["bound"]))


def _runs(line: Record) -> str:
    failed = f" [red]{line['failed']} failed[/red]" if line["failed"] else ""
    diverged = said_diverged(dict(line))
    return f"{line['finished']}/{line['all']}{failed}" + (f" [red]{diverged}[/red]" if diverged else "")


def accuracy_table(world: Record) -> Table:
    """What each method reached and how fast, held against its reference; the paper's numbers beside it."""
    lines, target, metric = world["lines"], world["target"], metric_of(world)
    paper, timed = any(line["published"] for line in lines), target is not None
    accuracy, best, *times = (
        judged(key, metric).short.format(target=f"{target or 0:g}")
        for key in reachable(("accuracy", "best", "time_raw", "time_mean"), target)
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
    """A method beside its reference: time where there is a target, difference and p."""
    against = line.get("against") or {}
    difference = against.get("difference")
    time = time_ratio(against.get("time_raw")) if against else _reference(world, line)
    told = "–" if difference is None else f"{difference:+.3f}"
    return [*([] if world["target"] is None else [time]), told, number(against.get("p"))]


def _reference(world: Record, line: Record) -> str:
    return "reference" if line["label"] in world["references"] else "–"


def cost_table(world: Record) -> Table:
    """What each method cost, as medians over seeds: staleness, discards, trips computed, real time."""
    lines = world["lines"]
    columns = chosen(("mean_staleness", "discards", "rejected", "trips", "wall_seconds"), lines)
    table = _table([column.short for column in columns])
    for line in lines:
        table.add_row(escape(line["label"]), *(cell(column, line[column.key]["median"]) for column in columns))
    return table


def devices_table(world: Record) -> Table | None:
    """How the devices fared, as medians over seeds; None where no run tested it."""
    lines = world["lines"]
    columns = chosen(DEVICES, lines)
    table = _table([column.short for column in columns])
    for line in lines:
        table.add_row(escape(line["label"]), *(cell(column, line[column.key]["median"]) for column in columns))
    return table if columns else None


def traffic_table(world: Record) -> Table:
    """What each method sent, as medians over seeds; the fresh models are what FedASMU and FedSSMU send besides."""
    table = _table(["up", "down", "of it fresh models", "on top of the rest"])
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
    """A console for tables; in a file or a pipe there is room for all columns."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=180)


def print_results(console: Console, results: Record) -> None:
    """All tables of a grid, with everything that a reader must know to read them right."""
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
    for note in [*_reading_notes(results), *results["notes"]]:
        console.print(Text(note, style="dim"), soft_wrap=True)


_TIMES_NOTE = (
    " Times: first test with the target reached, and first with the mean of five tests there; – means never, (1/3) by "
    "one seed of 3"
)
_RATIOS_NOTE = (
    "time vs reference: 1.60x = takes 1.6 times as long as its reference to reach the target, 0.50x = half as long; "
    ">2.10x: had not reached it when its runs ended, <0.50x: the reference had not. "
)


def _reading_notes(results: Record) -> list[str]:
    """How to read the tables."""
    lines = [line for world in results["worlds"] for line in world["lines"]]
    held = [line for line in lines if "against" in line]
    pairs = max((line["against"]["pairs"] for line in held), default=0)
    name = "/".join(dict.fromkeys(metric_of(world).name for world in results["worlds"])) or "accuracy"
    timed = any(world["target"] is not None for world in results["worlds"])
    told, times = (f"{name}, best, times", _TIMES_NOTE) if timed else (f"{name}, best", "")
    notes = [f"{told}: median over the seeds that came to their end; range: least–greatest.{times}"]
    if any(line[key]["count"] for line in lines for key in DEVICES):
        notes.append(
            "median device, 10th pct., worst device: accuracy of the last model on what each device is tested on; "
            "Jain: 1 when all devices fare alike, 1/n when one has everything; personal: after local steps there"
        )
    if held:
        named: dict[str, list[str]] = {}
        for line in held:
            named.setdefault(line["against"]["reference"], []).append(line["label"])
        said = "; ".join(f"{', '.join(dict.fromkeys(names))} against {reference}" for reference, names in named.items())
        notes.append(f"{_RATIOS_NOTE if timed else ''}References: {said}")
    if pairs:
        notes.append(
            f"{name} vs: mean difference of {name} to the reference over common seeds; p: exact paired sign-flip "
            f"test, not corrected for the number of methods; with {pairs} seeds it cannot be below {2 / 2**pairs:.2g}"
        )
    if any(line["diverged"] for line in lines):
        notes.append("diverged: the model became useless; such a run has ended, and its last numbers enter the medians")
    marks = {mark: text for line in lines for mark, text in line["marks"].items()}
    return notes + [f"[{mark}] {text}" for mark, text in marks.items()]
