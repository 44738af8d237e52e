"""What a run looks like in a terminal: a live progress line and tables."""

import math
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from freshet.methods import known
from freshet.report.columns import COLUMNS, Column
from freshet.runs.writer import Observer


class LiveProgress(Observer):
    """A bar over virtual time, or over rounds where they end the run, with the newest accuracy. On a pipe it stays
    silent."""

    def __init__(self, console: Console) -> None:
        self.bar = Progress(
            TextColumn("[bold]{task.description:<11}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[now]:>7} s{task.fields[rounds]}"),
            TextColumn("accuracy [bold]{task.fields[accuracy]}"),
            TextColumn("[dim]uploads {task.fields[uploads]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._end, self._rounds, self._share = math.inf, 0, 0.0

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def begin(self, label: str, until: float, rounds: int = 0) -> None:
        """A new run starts; it ends at ``until`` or after so many rounds (0: no limit), whichever is first."""
        self._end, self._rounds, self._share = until or math.inf, rounds, 0.0
        self._task = self.bar.add_task(
            label, total=1.0, now="0", rounds=self._of_rounds(0), accuracy="  –  ", uploads=0
        )

    def _of_rounds(self, done: int) -> str:
        return f"  round {done}/{self._rounds}" if self._rounds else ""

    def _move(self, share: float, **shown: Any) -> None:
        """The bar never goes back: the limit that is nearer counts."""
        if self._task is not None:
            self._share = min(1.0, max(self._share, share))
            self.bar.update(self._task, completed=self._share, **shown)

    def on_progress(self, time: float) -> None:
        self._move(time / self._end, now=f"{time:.0f}")

    def on_metrics(self, row: dict[str, Any]) -> None:
        share = row["rounds"] / self._rounds if self._rounds else 0.0
        shown = {"accuracy": f"{row['accuracy']:.3f}", "uploads": row["uploads"]}
        self._move(share, rounds=self._of_rounds(row["rounds"]), **shown)

    def on_message(self, message: str) -> None:
        self.bar.console.print(f"[yellow]{escape(message)}", highlight=False, soft_wrap=True)

    def on_end(self, summary: dict[str, Any]) -> None:
        share = 1.0 if summary["status"] == "finished" else 0.0
        self._move(share, now=f"{summary['virtual_time']:.0f}", rounds=self._of_rounds(summary["rounds"]))


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


def marked(name: str) -> str:
    """A method's name with its marks; code that a run only names (``module:Class``) is not imported for it."""
    about = known(name)
    marks = about.marks() if about else {}
    return " ".join([name, *(f"[{mark}]" for mark in marks)])


def cell(column: Column, value: float | None) -> str:
    """A number of a table of results as the terminal shows it."""
    if value is None:
        return "–"
    if column.kind == "bytes":
        return size(value)
    if column.kind == "seconds":
        return f"{value:.1f} s" if column.key == "wall_seconds" else f"{value:.0f} s"
    return number(value, {"share": 3, "mean": 1, "count": 0}[column.kind])


_SHOWN = ("accuracy", "best", "time_raw", "uploads", "discards", "mean_staleness", "bytes_up", "bytes_down")


def results_table(summaries: list[dict[str, Any]]) -> Table:
    """One line per run: what it reached, how fast, at what cost."""
    target = summaries[0]["target"]
    table = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    table.add_column("method", no_wrap=True)
    columns = [COLUMNS[key] for key in _SHOWN]
    for column in columns:
        table.add_column(column.short.format(target=f"{target:g}"), justify="right", no_wrap=True)
    for summary in summaries:
        diverged = " [red]diverged[/red]" if summary.get("diverged") is not None else ""
        method = escape(marked(str(summary["method"]))) + diverged
        table.add_row(method, *(cell(column, summary[column.summary]) for column in columns))
    return table
