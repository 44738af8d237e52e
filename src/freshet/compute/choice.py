"""Choose the executor of a run from ``run.executor``, ``run.workers`` and ``run.address``."""

import math
from typing import Any

from freshet.compute.executor import Executor, SerialExecutor, estimate_training_seconds
from freshet.compute.host import keep_freed_memory
from freshet.compute.pool import Pool, PoolExecutor
from freshet.compute.processes import WorkerPool, available_cores
from freshet.training.trainer import Setup

#: Seconds until worker processes have loaded torch and can train (docs/executors.md).
WORKER_START_SECONDS = 3.0


def trains_in_process(kind: str, workers: int) -> bool:
    """Return whether these settings never start workers, however long training takes."""
    return kind == "serial" or (kind == "auto" and (workers or available_cores()) == 1)


def workers_pay_off(seconds: float, workers: int) -> bool:
    """Return whether n workers save more of s seconds of training than their start takes: ``s (1 - 1 / n) > start``."""
    return seconds * (1.0 - 1.0 / workers) > WORKER_START_SECONDS


def start_pool(kind: str, workers: int, address: str = "", device: str = "auto") -> Pool[Any]:
    """Start workers for training on a kind of device: processes on this machine, or Ray actors."""
    if kind == "ray":
        from freshet.compute.ray import RayPool

        return RayPool(workers, address, device)
    return WorkerPool(workers or available_cores())


def open_executor(
    setup: Setup, kind: str, workers: int = 0, address: str = "", *, pool: Pool[Any] | None, uploads: float = math.inf
) -> Executor:
    """Open the executor for a run with ``uploads`` uploads. A given ``pool`` is used and stays open."""
    keep_freed_memory()  # the server allocates a model per aggregation, wherever training runs
    if pool is not None:
        return PoolExecutor(setup, pool, owns_pool=False)
    if trains_in_process(kind, workers) or (kind == "auto" and not _needs_workers(setup, workers, uploads)):
        return SerialExecutor(setup)
    return PoolExecutor(setup, start_pool(kind, workers, address, setup.training.device), owns_pool=True)


def _needs_workers(setup: Setup, workers: int, uploads: float) -> bool:
    return workers_pay_off(estimate_training_seconds(setup, uploads), workers or available_cores())
