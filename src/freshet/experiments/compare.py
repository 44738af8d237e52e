"""Running a grid: finished runs are not repeated, interrupted runs continue, and crashes are recorded.

``run_each`` makes independent calls in several processes and ends cleanly at Ctrl-C.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, TypeVar

from freshet.compute.choice import start_pool, trains_in_process
from freshet.compute.fork_server import ONE_THREAD_ENV
from freshet.compute.pool import Pool
from freshet.config import Config
from freshet.experiments.grid import Job
from freshet.experiments.store import State, Store
from freshet.federation import Federation
from freshet.runs.lifecycle import interrupt_listener
from freshet.runs.reader import ENDED
from freshet.runs.writer import Observer

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


class GridObserver(Observer):
    """Observes a grid and each of its runs. Override what you need."""

    def on_begin(self, job: Job, state: State) -> None:
        """A run starts or continues; ``state`` is its state before."""

    def on_done(self, job: Job, state: State, error: str | None) -> None:
        """A run is over: finished, failed with an error, or unfinished after Ctrl-C."""


def to_do(jobs: Sequence[Job], store: Store, *, retry: bool = False) -> list[Job]:
    """The runs that are missing, and with ``retry`` those that crashed. Runs with equal keys count once."""
    over = (State.FINISHED,) if retry else (State.FINISHED, State.FAILED)
    return [job for job in {job.key: job for job in jobs}.values() if store.state(job.key) not in over]


def run_grid(jobs: Sequence[Job], store: Store, *, watch: GridObserver | None = None, retry: bool = False) -> bool:
    """Run what is missing, one run after the other over shared workers; return False at Ctrl-C."""
    watch = watch or GridObserver()
    with store.lock(), closing(Workers()) as workers, interrupt_listener() as asked:
        try:
            for job in to_do(jobs, store, retry=retry):
                if asked() or run_job(job, store, watch, workers) is State.UNFINISHED:
                    return False
        except KeyboardInterrupt:  # between two runs, or while data is loading
            return False
    return True


def run_job(job: Job, store: Store, watch: GridObserver, workers: "Workers") -> State:
    """Run one job from its start or its last checkpoint; a crash is recorded and does not stop the others."""
    before = store.state(job.key)
    store.clear_failure(job.key)
    watch.on_begin(job, before)
    error: str | None = None
    try:
        summary = execute(job, store, [watch], workers.pool(job))
        state = State.FINISHED if summary["status"] in ENDED else State.UNFINISHED
    except Exception as problem:
        error = store.record_failure(job.key, problem)
        state = State.FAILED
        workers.close()  # the workers may have crashed: the next run gets new ones
    watch.on_done(job, state, error)
    return state


def execute(job: Job, store: Store, observers: Sequence[Observer], pool: Pool[Any] | None) -> dict[str, Any]:
    """Run or resume one job in its directory and return its summary."""
    directory = store.directory(job.key)
    build: Callable[[Config], Federation] = Federation.from_config if job.recipe is None else job.recipe.build
    federation = build(job.config)
    if store.resumable(job.key):
        return federation.resume(directory, observers=observers, pool=pool, progress=False).summary
    store.clear(job.key)
    return federation.run(out=directory, observers=observers, pool=pool, progress=False).summary


class Workers:
    """One worker pool for a whole grid, started at first use and again after a crash."""

    def __init__(self, start: Callable[[str, int, str, str], Pool[Any]] = start_pool) -> None:
        self._start = start
        self._pool: Pool[Any] | None = None

    def pool(self, job: Job) -> Pool[Any] | None:
        """The pool for a run, or None if it trains in this process."""
        run = job.config.run
        if trains_in_process(run.executor, run.workers):
            return None
        if self._pool is None:
            self._pool = self._start(run.executor, run.workers, run.address, job.config.training.device)
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close(now=True)
            self._pool = None
