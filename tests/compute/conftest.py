"""Worker pools that live as long as the test session: starting a worker means importing torch."""

from collections.abc import Callable, Iterator

import pytest

from freshet.compute.processes import WorkerPool


@pytest.fixture(scope="session")
def pool_of() -> Iterator[Callable[[int], WorkerPool]]:
    """``pool_of(2)``: the session's pool of two processes."""
    pools: dict[int, WorkerPool] = {}

    def get(workers: int) -> WorkerPool:
        if workers not in pools:
            pools[workers] = WorkerPool(workers)
        return pools[workers]

    yield get
    for pool in pools.values():
        pool.close(now=True)


@pytest.fixture(scope="session")
def pool(pool_of) -> WorkerPool:
    """Two processes."""
    return pool_of(2)
