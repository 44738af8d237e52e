"""Independent calls in several processes, with a clean end at Ctrl-C."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from freshet.compute.fork_server import ONE_THREAD_ENV
from freshet.runs.lifecycle import interrupt_listener

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")
Call = Callable[[Any], Any]
Mapper = Callable[[Call, Sequence[Any]], Iterator[Any]]


def run_each(
    function: Callable[[Item], Outcome | None],
    items: Sequence[Item],
    workers: int,
    on_result: Callable[[Item, Outcome], None],
) -> bool:
    """Call ``function`` on each item and ``on_result`` with each result as it arrives; return False at Ctrl-C.

    ``function`` returns None when Ctrl-C ended it. With one worker everything runs in this process.
    """
    left = len(items)
    try:
        with interrupt_listener() as interrupted, _mapper(min(workers, left)) as each:
            for item, outcome in each(partial(_with_item, function), items):
                if outcome is None:
                    return False
                on_result(item, outcome)
                left -= 1
                if left and interrupted():
                    return False
    except KeyboardInterrupt:
        return False
    return True


def _with_item(function: Call, item: Any) -> tuple[Any, Any]:
    return item, function(item)


@contextmanager
def _mapper(workers: int) -> Iterator[Mapper]:
    """``map`` in this process, or over worker processes that end with the block."""
    if workers <= 1:
        yield map
        return
    os.environ.update(ONE_THREAD_ENV)  # for the children: this process has loaded its libraries already
    with multiprocessing.get_context("spawn").Pool(workers, _ignore_interrupts) as pool:
        yield pool.imap_unordered


def _ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
