"""A bar for commands that go through logs: large ones take a while."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from freshet.errors import RunError
from freshet.runs.segments import LIVE, size

#: Logs of fewer bytes are read in a moment.
LONG_BYTES = 20_000_000
#: The bar moves after so many bytes.
PORTION = 1_000_000


@contextmanager
def reading(runs: Iterable[Path], passes: int = 1, console: Console | None = None) -> Iterator[Callable[[int], None]]:
    """To be told how many bytes of these runs' logs were read, which are gone through so many times."""
    console = console or Console(stderr=True)
    total = passes * sum(_size(Path(run) / LIVE) for run in runs)
    columns = (TextColumn("reading"), BarColumn(bar_width=28), DownloadColumn(), TimeRemainingColumn())
    shown = console.is_terminal and total >= LONG_BYTES
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task, waiting = bar.add_task("", total=total), 0

        def seen(count: int) -> None:
            nonlocal waiting
            waiting += count
            if waiting >= PORTION:
                bar.advance(task, waiting)
                waiting = 0

        yield seen


def _size(path: Path) -> int:
    try:
        return size(path)
    except (OSError, RunError):  # who reads it will say so
        return 0
