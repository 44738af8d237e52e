"""One answer to the question where training runs."""

from types import SimpleNamespace

import pytest

from freshet.compute import choice, ray
from freshet.compute.pool import PoolExecutor
from freshet.config import resolve
from freshet.experiments.compare import Workers


def wish(executor: str, workers: int = 0, address: str = "") -> SimpleNamespace:
    return SimpleNamespace(executor=executor, workers=workers, address=address)


@pytest.mark.parametrize(
    ("executor", "workers", "alone"),
    [("serial", 4, True), ("auto", 1, True), ("auto", 2, False), ("processes", 1, False), ("ray", 1, False)],
)
def test_only_serial_and_auto_with_one_worker_train_in_this_process(executor: str, workers: int, alone: bool) -> None:
    assert choice.trains_in_process(wish(executor, workers)) == alone


def test_asking_for_ray_gives_ray_also_in_a_grid_of_runs(monkeypatch) -> None:
    started = []

    class Pool:
        def __init__(self, workers: int, address: str) -> None:
            started.append((workers, address))

        def close(self, *, now: bool) -> None:
            pass

    monkeypatch.setattr(ray, "RayPool", Pool)
    run = {"executor": "ray", "workers": 3, "address": "head:6379"}
    job = SimpleNamespace(config=resolve({"run": run}))
    workers = Workers()
    assert isinstance(workers.pool(job), Pool) and workers.pool(job) is workers.pool(job)
    workers.close()
    assert started == [(3, "head:6379")]


def test_a_shared_pool_is_used_whatever_is_wished_and_left_open() -> None:
    said = []
    pool = SimpleNamespace(register=lambda _: 7, release=said.append, close=lambda **_: said.append("closed"))
    executor = choice.open_executor(wish("serial"), None, pool)  # type: ignore[arg-type]
    assert isinstance(executor, PoolExecutor)
    executor.close()
    assert said == [7]
