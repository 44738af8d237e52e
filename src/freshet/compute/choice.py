"""Which executor a run gets: the one place where ``run.executor``, ``run.workers`` and ``run.address`` are read."""

import math
from typing import Any, Protocol

from freshet.compute.executor import Executor, SerialExecutor, Setup, training_seconds
from freshet.compute.host import keep_freed_memory
from freshet.compute.pool import Pool, PoolExecutor
from freshet.compute.processes import WorkerPool, available_cores

#: Seconds until worker processes have loaded torch and can train (docs/executors.md).
START_SECONDS = 3.0


class Wish(Protocol):
    """What a user says about where to train (the run's options)."""

    @property
    def executor(self) -> str: ...

    @property
    def workers(self) -> int: ...

    @property
    def address(self) -> str: ...


def in_this_process(wish: Wish) -> bool:
    """Whether training needs no workers, however long it takes."""
    alone = (wish.workers or available_cores()) == 1
    return wish.executor == "serial" or (wish.executor == "auto" and alone)


def worth_starting(seconds: float, workers: int) -> bool:
    """Whether n workers save more of so many seconds of training than they take to start: ``s (1 - 1 / n) > start``."""
    return seconds * (1.0 - 1.0 / workers) > START_SECONDS


def start_pool(wish: Wish) -> Pool[Any]:
    """The workers that are asked for: processes of this machine, or Ray's."""
    if wish.executor == "ray":
        from freshet.compute.ray import RayPool

        return RayPool(wish.workers, wish.address)
    return WorkerPool(wish.workers or available_cores())


def open_executor(wish: Wish, setup: Setup, pool: Pool[Any] | None = None, uploads: float = math.inf) -> Executor:
    """The executor for a run of so many ``uploads``; with a ``pool``, the workers that it shares with other runs."""
    keep_freed_memory()  # the server makes a model per aggregation, wherever the training is
    if pool is not None:
        return PoolExecutor(setup, pool, owns_pool=False)
    if in_this_process(wish) or (wish.executor == "auto" and not _worth_workers(wish, setup, uploads)):
        return SerialExecutor(setup)
    return PoolExecutor(setup, start_pool(wish), owns_pool=True)


def _worth_workers(wish: Wish, setup: Setup, uploads: float) -> bool:
    return worth_starting(training_seconds(setup, uploads), wish.workers or available_cores())
