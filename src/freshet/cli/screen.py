"""What a run looks like in a terminal: a live progress line and tables."""

from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from freshet.runs.writer import Observer


class LiveProgress(Observer):
    """A bar over virtual time, with the newest accuracy. On a pipe it stays silent."""

    def __init__(self, console: Console) -> None:
        self.bar = Progress(
            TextColumn("[bold]{task.description:<11}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[now]:>7} s"),
            TextColumn("accuracy [bold]{task.fields[accuracy]}"),
            TextColumn("[dim]uploads {task.fields[uploads]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._end = 0.0

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def begin(self, label: str, until: float) -> None:
        """A new run starts."""
        self._end = until
        self._task = self.bar.add_task(label, total=until, now="0", accuracy="  –  ", uploads=0)

    def on_progress(self, time: float) -> None:
        if self._task is not None:
            self.bar.update(self._task, completed=min(time, self._end), now=f"{time:.0f}")

    def on_metrics(self, row: dict[str, Any]) -> None:
        if self._task is not None:
            self.bar.update(self._task, accuracy=f"{row['accuracy']:.3f}", uploads=row["uploads"])

    def on_message(self, message: str) -> None:
        self.bar.console.print(f"[yellow]{message}", highlight=False, soft_wrap=True)

    def on_end(self, summary: dict[str, Any]) -> None:
        if self._task is not None:
            self.bar.update(self._task, completed=summary["virtual_time"], now=f"{summary['virtual_time']:.0f}")


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


def results_table(summaries: list[dict[str, Any]]) -> Table:
    """One line per run: what it reached, how fast, at what cost."""
    target = summaries[0]["target"]
    table = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    table.add_column("method", no_wrap=True)
    for heading in ("accuracy", "best", f"to {target:g}", "uploads", "discards", "staleness", "up", "down"):
        table.add_column(heading, justify="right", no_wrap=True)
    for summary in summaries:
        reached = summary["time_to_target"]
        table.add_row(
            escape(str(summary["method"])),
            number(summary["final_accuracy"]),
            number(summary["best_accuracy"]),
            "–" if reached is None else f"{reached:.0f} s",
            str(summary["uploads"]),
            str(summary["discards"]),
            number(summary["mean_staleness"], 1),
            size(summary["bytes_up"]),
            size(summary["bytes_down"]),
        )
    return table
