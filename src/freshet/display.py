"""How runs look while they go and when they are printed: a progress bar, and facts in a terminal or a notebook."""

import html
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from freshet.files import printable
from freshet.runs.records import metric_of
from freshet.runs.writer import Observer

if TYPE_CHECKING:
    import pandas as pd

#: The expected duration is measured after this many uploads, over at least this share of the run and this many seconds.
#: Before that, workers start and loops are compiled.
WARMUP_UPLOADS, WARMUP_SHARE, WARMUP_SECONDS = 3, 0.01, 1.0
#: Shorter runs do not announce their expected duration.
MIN_ANNOUNCED_SECONDS = 20.0


class LiveProgress(Observer):
    """A bar over virtual time or rounds, whichever ends the run, with the latest accuracy and the expected real time.

    Until the first event, while workers start and loops are compiled, the bar only pulses. On a pipe it prints only
    messages, among them the expected duration.
    """

    def __init__(self, console: Console, bar: "Progress | NotebookBar | None" = None) -> None:
        self.bar = bar or Progress(
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
        """Start the bar of a run that ends at ``until`` or after ``rounds`` (0: no limit), whichever comes first."""
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
        """Move the bar to the larger share of time and rounds. It never moves back."""
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
        """Return the expected real seconds from start to end at the measured pace, or None if it is too early."""
        if self._began is None:
            return None
        began, share = self._began
        spent, done = time.monotonic() - began, self._share - share
        if not self._uploads or done < WARMUP_SHARE or spent < WARMUP_SECONDS:
            return None
        return (began - self._start) + spent / done * (1.0 - share)

    def _announce(self, length: float) -> None:
        """Print the expected duration of a long run once, on a pipe, where there is no bar."""
        if not self._announced and self.bar.disable and length >= MIN_ANNOUNCED_SECONDS:
            self.on_message(
                f"expected to take about {clock(length)} in total, at the pace of the first {self._share:.0%}"
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
        self._uploads = 0  # no more estimates
        shown = {"now": f"{summary['virtual_time']:.0f}", "rounds": self._of_rounds(summary["rounds"]), "expected": ""}
        self._move(share, **shown)


def clock(seconds: float) -> str:
    """Format seconds as 1:05 or 2:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def number(value: float | None, digits: int = 3) -> str:
    """Format a number; a dash stands for None."""
    return "–" if value is None else f"{value:.{digits}f}"


# ---- notebooks

#: A bar in a notebook is drawn again after this many seconds.
NOTEBOOK_SECONDS = 0.2


class NotebookBar:
    """A progress bar in a notebook: one output that is replaced as the run goes on. It stands in for rich's."""

    disable = False

    def __init__(self) -> None:
        ipython: Any = import_module("IPython.display")
        self.console, self._html = self, ipython.HTML
        self._shown: dict[str, Any] = {}
        self._share, self._drawn, self._began = 0.0, -math.inf, time.monotonic()
        self._place: Any = ipython.display(self._html(""), display_id=True)

    def add_task(self, label: str, total: float | None = None, **shown: Any) -> TaskID:
        self._shown, self._share, self._began = {"label": label} | shown, 0.0, time.monotonic()
        self._draw()
        return TaskID(0)

    def update(self, task: TaskID, *, completed: float = 0.0, total: float | None = None, **shown: Any) -> None:
        self._share = completed
        self._shown |= shown
        if time.monotonic() - self._drawn >= NOTEBOOK_SECONDS or completed >= 1.0:
            self._draw()

    def print(self, text: str, **_: Any) -> None:
        print(Text.from_markup(text).plain, file=sys.stderr)

    def start(self) -> None:
        """Nothing to do: the output is there."""

    def stop(self) -> None:
        self._draw()

    def _draw(self) -> None:
        if not self._shown:
            return
        shown = {key: html.escape(str(value)) for key, value in self._shown.items()}
        facts = [f"{shown['now']} s{shown['rounds']}", f"{shown['metric']} <b>{shown['value']}</b>"]
        facts += [f"uploads {shown['uploads']}", clock(time.monotonic() - self._began), shown["expected"]]
        bar = f'<progress value="{self._share:.4f}" max="1"></progress>'
        words = " &nbsp; ".join(fact for fact in facts if fact)
        self._place.update(self._html(f"<div><b>{shown['label']}</b> {bar} {words}</div>"))
        self._drawn = time.monotonic()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


@contextmanager
def progress_bar(label: str, until: float, rounds: int, wanted: bool) -> Iterator[list[Observer]]:
    """The progress bar of a run as an observer; nobody if it is not wanted, or if there is no screen to draw it on."""
    console = Console(stderr=True)
    if not wanted or not (in_notebook() or console.is_terminal):
        yield []
        return
    with LiveProgress(console, NotebookBar() if in_notebook() else None) as progress:
        progress.begin(label, until, rounds)
        yield [progress]


def facts_html(title: str, facts: Mapping[str, Any]) -> str:
    """A title and facts as a small table, for a notebook."""
    cells = "".join(
        f'<tr><th style="text-align:left">{html.escape(name)}</th>'
        f'<td style="text-align:left">{html.escape(str(value))}</td></tr>'
        for name, value in facts.items()
    )
    return f"<div><b>{html.escape(title)}</b><table>{cells}</table></div>"


def table_html(title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A title and a table, for a notebook."""
    head = "".join(f"<th>{html.escape(each)}</th>" for each in headings)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    caption = f"<b>{html.escape(title)}</b>"
    return f"<div>{caption}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


# ---- tables

#: Longer tables are printed as pandas prints them, with dots in the middle.
MAX_ROWS = 1_000


def whole_table(rows: Any) -> "pd.DataFrame":
    """A DataFrame that prints all its rows and columns, where pandas leaves some out. What is cut from it is plain."""
    return _table_class()(rows)


@cache
def _table_class() -> "type[pd.DataFrame]":
    """The class of such tables. pandas is only loaded when there is one."""
    import pandas as pd

    class Table(pd.DataFrame):
        @property
        def _constructor(self) -> Callable[..., pd.DataFrame]:
            return pd.DataFrame

        def __reduce__(self) -> tuple[Any, ...]:
            return pd.DataFrame, (pd.DataFrame(self),)

        def __repr__(self) -> str:
            return str(self.to_string()) if len(self) <= MAX_ROWS else str(pd.DataFrame(self))

        def _repr_html_(self) -> Any:
            rows = None if len(self) <= MAX_ROWS else 60
            with pd.option_context("display.max_columns", None, "display.max_rows", rows):
                return pd.DataFrame(self)._repr_html_()  # type: ignore[operator]

    return Table
