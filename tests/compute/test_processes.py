"""Worker processes: whoever dies and whenever, the bits are the same and nothing hangs."""

import os
import signal
import time
from concurrent.futures import CancelledError

import pytest
from torch import nn

from freshet.compute.pool import GRACE, PoolExecutor
from freshet.compute.processes import WorkerPool
from freshet.errors import ConfigError, RunError

from .helpers import (
    LIMIT,
    Big,
    Deadly,
    Failing,
    Objecting,
    Patient,
    begun,
    eventually,
    gone,
    make_setup,
    make_work,
    same,
)

WAIT = LIMIT


@pytest.fixture
def executor(pool):
    built = PoolExecutor(make_setup(), pool, owns_pool=False)
    yield built
    built.close()


def reference(setup, work):
    return setup.trainer().train(work)


def test_training_and_scores_are_those_of_this_process(executor):
    setup = make_setup()
    works = [make_work(setup, trip) for trip in range(6)]
    futures = [executor.train(work, due=float(-work.assignment.trip)) for work in works]
    score = executor.evaluate(works[0].assignment.weights)
    assert all(same(f.result(WAIT), reference(setup, w)) for f, w in zip(futures, works, strict=True))
    assert score.result(WAIT) == setup.trainer().evaluate(works[0].assignment.weights)
    assert futures[0].done()


def test_factories_may_be_lambdas_and_local_classes(pool):
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, x):
            return self.layer(x)

    for factory in (lambda: nn.Linear(8, 3, bias=False), Local):
        setup = make_setup(factory)
        executor = PoolExecutor(setup, pool, owns_pool=False)
        work = make_work(setup)
        assert same(executor.train(work, 0.0).result(WAIT), reference(setup, work))
        executor.close()


def test_federations_take_turns_on_one_pool(pool):
    setups = [make_setup(seed=seed) for seed in range(3)]
    executors = [PoolExecutor(setup, pool, owns_pool=False) for setup in setups]
    works = [make_work(setup, trip) for trip in range(4) for setup in setups]
    futures = [executors[index % 3].train(work, 0.0) for index, work in enumerate(works)]
    for index, (future, work) in enumerate(zip(futures, works, strict=True)):
        assert same(future.result(WAIT), reference(setups[index % 3], work))
    for executor in executors:
        executor.close()


# ---- errors


def test_an_error_in_training_brings_its_traceback_along(executor):
    work = make_work(make_setup(), rule=Failing(ZeroDivisionError("one by nothing")))
    with pytest.raises(RunError, match=r"(?s)training failed in a worker:.*helpers\.py.*ZeroDivisionError: one by"):
        executor.train(work, 0.0).result(WAIT)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_training_that_tries_to_leave_is_an_error_too(executor, error):
    with pytest.raises(RunError, match=type(error).__name__):
        executor.train(make_work(make_setup(), rule=Failing(error)), 0.0).result(WAIT)


def test_a_rules_objection_arrives_as_it_was(executor):
    with pytest.raises(ConfigError, match=r"^model\.name: no features$"):
        executor.train(make_work(make_setup(), rule=Objecting()), 0.0).result(WAIT)


def test_a_factory_that_fails_is_an_error(pool):
    broken = make_setup(lambda: 1 / 0)
    executor = PoolExecutor(broken, pool, owns_pool=False)
    with pytest.raises(RunError, match="ZeroDivisionError"):
        executor.train(make_work(make_setup()), 0.0).result(WAIT)
    executor.close()


# ---- deaths


def test_killed_in_training(executor, tmp_path):
    work = make_work(make_setup(), rule=Patient(tmp_path))
    future = executor.train(work, 0.0)
    os.kill(begun(tmp_path)[0], signal.SIGKILL)
    (tmp_path / "go").touch()
    assert same(future.result(WAIT), reference(make_setup(), work))


def test_killed_while_idle(executor, pool):
    eventually(lambda: len(pool._ready) == len(pool.workers))
    for worker in pool.workers:
        worker.process.kill()
        worker.process.wait()
    works = [make_work(make_setup(), trip) for trip in range(4)]
    futures = [executor.train(work, 0.0) for work in works]
    assert all(same(f.result(WAIT), reference(make_setup(), w)) for f, w in zip(futures, works, strict=True))


def test_a_model_of_40_mb_and_a_worker_that_dies_while_it_is_sent(tmp_path):
    pool = WorkerPool(1)
    setup = make_setup(Big)
    executor = PoolExecutor(setup, pool, owns_pool=True)
    works = [make_work(setup, trip) for trip in range(2)]
    first = executor.train(works[0], 0.0).result(WAIT)
    process = pool.workers[0].process
    process.send_signal(signal.SIGSTOP)  # takes nothing more: the model fills the socket and stays there
    future = executor.train(works[1], 0.0)
    time.sleep(0.5)
    assert not future.done()
    process.kill()
    assert same(future.result(WAIT), reference(setup, works[1]))
    assert same(first, reference(setup, works[0]))
    executor.close()


def test_a_task_that_kills_its_worker_once_is_repeated(executor, tmp_path):
    work = make_work(make_setup(), rule=Deadly(tmp_path / "count", 1))
    assert same(executor.train(work, 0.0).result(WAIT), reference(make_setup(), work))


def test_a_task_that_always_kills_its_worker_is_given_up(executor, tmp_path):
    with pytest.raises(RunError, match=r"task \(train\) ended its worker 3 times \(last: signal SIGKILL\)"):
        executor.train(make_work(make_setup(), rule=Deadly(tmp_path / "count", 99)), 0.0).result(WAIT)
    assert (tmp_path / "count").stat().st_size == 3
    assert executor.train(make_work(make_setup()), 0.0).result(WAIT)


# ---- the end


def test_closing_ends_training_and_leaves_no_process(tmp_path):
    pool = WorkerPool(1)
    setup = make_setup()
    executor = PoolExecutor(setup, pool, owns_pool=True)
    running = executor.train(make_work(setup, rule=Patient(tmp_path)), 0.0)
    queued = executor.train(make_work(setup), 1.0)
    pids = begun(tmp_path)
    start = time.monotonic()
    executor.close()
    assert time.monotonic() - start < GRACE
    assert all(gone(pid) for pid in pids)
    assert not any(thread.is_alive() for thread in pool._threads)
    with pytest.raises(CancelledError):
        queued.result(0)
    with pytest.raises(RunError, match="closed"):
        running.result(0)


def test_closing_while_workers_start(tmp_path):
    pool = WorkerPool(2)
    eventually(lambda: all(pool.workers))
    pids = [worker.process.pid for worker in pool.workers]
    start = time.monotonic()
    pool.close(now=True)
    assert time.monotonic() - start < GRACE
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("code", "told"),
    [("raise ImportError('libtorch is broken')", "libtorch is broken"), ("import os; os._exit(3)", "exit code 3")],
)
def test_a_worker_that_cannot_start_is_an_error(tmp_path, monkeypatch, code, told):
    (tmp_path / "freshet").mkdir()
    (tmp_path / "freshet" / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = WorkerPool(2)
    executor = PoolExecutor(make_setup(), pool, owns_pool=True)
    with pytest.raises(RunError, match=f"(?s)a worker could not be started.*{told}"):
        executor.train(make_work(make_setup()), 0.0).result(WAIT)
    executor.close()
