"""Worker pools that live as long as the test session, since a worker has to import torch."""

from collections.abc import Callable, Iterator

import pytest

from freshet.compute.processes import WorkerPool
from freshet.result import Result

from .helpers import UNTIL, federation


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


@pytest.fixture(scope="session")
def serial_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """``serial_run("fedasmu")``: the run that every executor must reproduce, computed once."""
    results: dict[str, Result] = {}

    def get(method: str) -> Result:
        if method not in results:
            results[method] = federation(method).run(UNTIL, out=tmp_path_factory.mktemp(method) / "run")
        return results[method]

    return get
