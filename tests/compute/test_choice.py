"""The choice of the executor."""

import math
from types import SimpleNamespace

import pytest

from freshet.compute import choice, ray
from freshet.compute.executor import SerialExecutor
from freshet.compute.pool import PoolExecutor
from freshet.config import resolve
from freshet.experiments.compare import Workers

from .helpers import Big, make_setup


@pytest.mark.parametrize(
    ("kind", "workers", "alone"),
    [("serial", 4, True), ("auto", 1, True), ("auto", 2, False), ("processes", 1, False), ("ray", 1, False)],
)
def test_only_serial_and_auto_with_one_worker_train_in_this_process(kind: str, workers: int, alone: bool) -> None:
    assert choice.trains_in_process(kind, workers) == alone


def test_a_grid_of_runs_uses_ray_too(monkeypatch) -> None:
    started = []

    class Pool:
        def __init__(self, workers: int, address: str, device: str) -> None:
            started.append((workers, address, device))

        def close(self, *, now: bool) -> None:
            pass

    monkeypatch.setattr(ray, "RayPool", Pool)
    run = {"executor": "ray", "workers": 3, "address": "head:6379"}
    job = SimpleNamespace(config=resolve({"run": run, "training": {"device": "cpu"}}))
    workers = Workers()
    assert isinstance(workers.pool(job), Pool) and workers.pool(job) is workers.pool(job)
    workers.close()
    assert started == [(3, "head:6379", "cpu")]


def test_a_given_pool_is_used_whatever_the_settings_and_stays_open() -> None:
    calls = []
    pool = SimpleNamespace(register=lambda _: 7, release=calls.append, close=lambda **_: calls.append("closed"))
    executor = choice.open_executor(None, "serial", pool=pool)  # type: ignore[arg-type]
    assert isinstance(executor, PoolExecutor)
    executor.close()
    assert calls == [7]


@pytest.mark.parametrize(
    ("seconds", "workers", "worth"), [(5.9, 2, False), (6.1, 2, True), (3.9, 4, False), (4.1, 4, True), (1e9, 1, False)]
)
def test_workers_pay_off_when_they_save_more_than_three_seconds(seconds, workers, worth):
    assert choice.workers_pay_off(seconds, workers) is worth


@pytest.mark.parametrize(
    ("kind", "factory", "uploads", "expected"),
    [
        ("auto", None, 10, SerialExecutor),
        ("auto", None, 1_000_000, PoolExecutor),
        ("auto", None, math.inf, PoolExecutor),
        ("auto", Big, 2_000, PoolExecutor),
        ("serial", None, 1_000_000, SerialExecutor),
        ("processes", None, 10, PoolExecutor),
    ],
)
def test_auto_starts_workers_for_much_work_and_the_other_kinds_do_as_they_say(
    monkeypatch, kind, factory, uploads, expected
):
    class Pool:
        def register(self, _: object) -> int:
            return 1

        def release(self, _: int) -> None:
            pass

        def close(self, **_: object) -> None:
            pass

    monkeypatch.setattr(choice, "start_pool", lambda *_: Pool())
    setup = make_setup(factory) if factory else make_setup()
    executor = choice.open_executor(setup, kind, 2, pool=None, uploads=uploads)
    assert isinstance(executor, expected)
    executor.close()
