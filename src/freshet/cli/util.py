"""A bar for commands that go through logs: large ones take a while.

Folders that commands write to.

Loading the libraries that a command needs.
"""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from freshet.errors import ConfigError, RunError
from freshet.runs.segments import LIVE, size


def make_writable(folder: Path) -> Path:
    """The folder, made if it is not there yet; one sentence if nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(folder, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise ConfigError("--out", f"{folder} cannot be written ({problem}); choose another folder")
    return folder


def unused_name(folder: Path) -> Path:
    """The folder, or one beside it with a number when it is taken."""
    names = (folder if n == 0 else folder.with_name(f"{folder.name}-{n + 1}") for n in range(10_000))
    return next(name for name in names if not name.exists())


@contextmanager
def quick_imports() -> Iterator[None]:
    """For imports: without the garbage collector, which finds nothing then and takes a tenth of the time; what they
    have made is not looked at later, either. Ctrl-C ends them at once."""
    gc.disable()
    try:
        with exit_on_interrupt():
            yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Ctrl-C in here ends the process: as an exception it may get lost in a library that is being loaded."""

    def leave(*_: object) -> None:
        os.write(2, b"interrupted\n")
        os._exit(130)

    usual = threading.current_thread() is threading.main_thread()
    usual = usual and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)


#: Logs of fewer bytes are read in a moment.
MIN_BAR_BYTES = 20_000_000
#: The bar moves after so many bytes.
BAR_STEP_BYTES = 1_000_000


@contextmanager
def reading_bar(runs: Iterable[Path], passes: int = 1, console: Console | None = None) -> Iterator[Callable[[int], None]]:
    """To be told how many bytes of these runs' logs were read, which are gone through so many times."""
    console = console or Console(stderr=True)
    total = passes * sum(_size(Path(run) / LIVE) for run in runs)
    columns = (TextColumn("reading"), BarColumn(bar_width=28), DownloadColumn(), TimeRemainingColumn())
    shown = console.is_terminal and total >= MIN_BAR_BYTES
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task, waiting = bar.add_task("", total=total), 0

        def seen(count: int) -> None:
            nonlocal waiting
            waiting += count
            if waiting >= BAR_STEP_BYTES:
                bar.advance(task, waiting)
                waiting = 0

        yield seen


def _size(path: Path) -> int:
    try:
        return size(path)
    except (OSError, RunError):  # who reads it will say so
        return 0
