"""Helpers of the commands: output folders, quick imports, and a progress bar for reading logs."""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from freshet.errors import ConfigError, RunError
from freshet.runs.segments import LIVE, size

#: The choices of ``--executor``.
Executor = Literal["auto", "serial", "processes", "ray"]


def make_writable(folder: Path) -> Path:
    """Create the folder if needed and return it. Raise one sentence if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(folder, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise ConfigError("--out", f"{folder} cannot be written ({problem}); choose another folder")
    return folder


def unused_name(folder: Path) -> Path:
    """Return the folder, or a numbered name beside it if it exists."""
    names = (folder if n == 0 else folder.with_name(f"{folder.name}-{n + 1}") for n in range(10_000))
    return next(name for name in names if not name.exists())


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without the garbage collector, which finds nothing then and takes a tenth of the time.

    Later collections skip the imported objects. Ctrl-C ends the process at once.
    """
    gc.disable()
    try:
        with exit_on_interrupt():
            yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process. An exception could get lost in a library that is being imported."""

    def leave(*_: object) -> None:
        os.write(2, b"interrupted\n")
        os._exit(130)

    main = threading.current_thread() is threading.main_thread()
    replace = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if replace:
        signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        if replace:
            signal.signal(signal.SIGINT, signal.default_int_handler)


#: Smaller logs need no bar.
MIN_BAR_BYTES = 20_000_000
#: The bar moves in steps of this size.
BAR_STEP_BYTES = 1_000_000


@contextmanager
def reading_bar(
    runs: Iterable[Path], passes: int = 1, console: Console | None = None
) -> Iterator[Callable[[int], None]]:
    """Show a bar while reading the logs of these runs ``passes`` times. Call the result with the bytes read."""
    console = console or Console(stderr=True)
    total = passes * sum(_size(Path(run) / LIVE) for run in runs)
    columns = (TextColumn("reading"), BarColumn(bar_width=28), DownloadColumn(), TimeRemainingColumn())
    shown = console.is_terminal and total >= MIN_BAR_BYTES
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task, pending = bar.add_task("", total=total), 0

        def advance(count: int) -> None:
            nonlocal pending
            pending += count
            if pending >= BAR_STEP_BYTES:
                bar.advance(task, pending)
                pending = 0

        yield advance


def _size(path: Path) -> int:
    try:
        return size(path)
    except (OSError, RunError):  # the reader reports it
        return 0
