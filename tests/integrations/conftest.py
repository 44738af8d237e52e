"""One pool of two workers for all tests here."""

from collections.abc import Iterator

import pytest

from freshet.compute.processes import WorkerPool


@pytest.fixture(scope="package")
def pool() -> Iterator[WorkerPool]:
    built = WorkerPool(2)
    yield built
    built.close(now=True)
