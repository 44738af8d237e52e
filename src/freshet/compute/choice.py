"""Which executor a run gets: the one place where ``run.executor``, ``run.workers`` and ``run.address`` are read."""

from typing import Any, Protocol

from freshet.compute.base import Executor, Setup
from freshet.compute.memory import keep_freed_memory
from freshet.compute.pool import Pool, PoolExecutor
from freshet.compute.processes import WorkerPool, available_cores
from freshet.compute.serial import SerialExecutor


class Wish(Protocol):
    """What a user says about where to train (the run's options)."""

    @property
    def executor(self) -> str: ...

    @property
    def workers(self) -> int: ...

    @property
    def address(self) -> str: ...


def in_this_process(wish: Wish) -> bool:
    """Whether training needs no workers."""
    alone = (wish.workers or available_cores()) == 1
    return wish.executor == "serial" or (wish.executor == "auto" and alone)


def start_pool(wish: Wish) -> Pool[Any]:
    """The workers that are asked for: processes of this machine, or Ray's."""
    if wish.executor == "ray":
        from freshet.compute.ray import RayPool

        return RayPool(wish.workers, wish.address)
    return WorkerPool(wish.workers or available_cores())


def open_executor(wish: Wish, setup: Setup, pool: Pool[Any] | None = None) -> Executor:
    """The executor for a run; with a ``pool``, the workers that it shares with other runs."""
    keep_freed_memory()  # the server makes a model per aggregation, wherever the training is
    if pool is not None:
        return PoolExecutor(setup, pool, owns_pool=False)
    if in_this_process(wish):
        return SerialExecutor(setup)
    return PoolExecutor(setup, start_pool(wish), owns_pool=True)
