"""Worker processes: deaths change no bits, nothing hangs, and nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from torch import nn

from freshet.compute.pool import CLOSE_TIMEOUT_SECONDS, PoolExecutor
from freshet.compute.processes import WorkerPool
from freshet.errors import ConfigError, RunError

from .helpers import (
    TIMEOUT_SECONDS,
    Big,
    Deadly,
    Failing,
    Patient,
    Refusing,
    has_ended,
    make_setup,
    make_work,
    same,
    wait_for_pids,
    wait_until,
)


@pytest.fixture
def executor(pool):
    built = PoolExecutor(make_setup(), pool, owns_pool=False)
    yield built
    built.close()


def reference(setup, work):
    return setup.trainer().train(work)


def test_training_and_scores_equal_those_of_this_process(executor):
    setup = make_setup()
    works = [make_work(setup, trip) for trip in range(6)]
    futures = [executor.train(work, due=float(-work.assignment.trip)) for work in works]
    score = executor.evaluate(works[0].assignment.weights)
    assert all(same(f.result(TIMEOUT_SECONDS), reference(setup, w)) for f, w in zip(futures, works, strict=True))
    assert score.result(TIMEOUT_SECONDS) == setup.trainer().evaluate(works[0].assignment.weights)
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
        assert same(executor.train(work, 0.0).result(TIMEOUT_SECONDS), reference(setup, work))
        executor.close()


def test_federations_take_turns_on_one_pool(pool):
    setups = [make_setup(seed=seed) for seed in range(3)]
    executors = [PoolExecutor(setup, pool, owns_pool=False) for setup in setups]
    works = [make_work(setup, trip) for trip in range(4) for setup in setups]
    futures = [executors[index % 3].train(work, 0.0) for index, work in enumerate(works)]
    for index, (future, work) in enumerate(zip(futures, works, strict=True)):
        assert same(future.result(TIMEOUT_SECONDS), reference(setups[index % 3], work))
    for executor in executors:
        executor.close()


# ---- errors


def test_an_error_in_training_arrives_with_its_traceback(executor):
    work = make_work(make_setup(), rule=Failing(ZeroDivisionError("one by nothing")))
    with pytest.raises(RunError, match=r"(?s)training failed in a worker:.*helpers\.py.*ZeroDivisionError: one by"):
        executor.train(work, 0.0).result(TIMEOUT_SECONDS)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_training_that_exits_is_an_error(executor, error):
    with pytest.raises(RunError, match=type(error).__name__):
        executor.train(make_work(make_setup(), rule=Failing(error)), 0.0).result(TIMEOUT_SECONDS)


def test_an_error_of_freshet_keeps_its_type_and_text(executor):
    with pytest.raises(ConfigError, match=r"^model\.name: no features$"):
        executor.train(make_work(make_setup(), rule=Refusing()), 0.0).result(TIMEOUT_SECONDS)


def test_a_factory_that_fails_is_an_error(pool):
    broken = make_setup(lambda: 1 / 0)
    executor = PoolExecutor(broken, pool, owns_pool=False)
    with pytest.raises(RunError, match="ZeroDivisionError"):
        executor.train(make_work(make_setup()), 0.0).result(TIMEOUT_SECONDS)
    executor.close()


# ---- deaths


def test_a_worker_killed_in_training(executor, tmp_path):
    work = make_work(make_setup(), rule=Patient(tmp_path))
    future = executor.train(work, 0.0)
    os.kill(wait_for_pids(tmp_path)[0], signal.SIGKILL)
    (tmp_path / "go").touch()
    assert same(future.result(TIMEOUT_SECONDS), reference(make_setup(), work))


def test_a_worker_killed_while_idle(executor, pool):
    wait_until(lambda: len(pool.ready) == len(pool.workers))
    for worker in pool.workers:
        worker.process.kill()
        worker.process.wait()
    works = [make_work(make_setup(), trip) for trip in range(4)]
    futures = [executor.train(work, 0.0) for work in works]
    assert all(same(f.result(TIMEOUT_SECONDS), reference(make_setup(), w)) for f, w in zip(futures, works, strict=True))


def test_a_model_of_40_mb_and_a_worker_that_dies_while_it_is_sent(tmp_path):
    pool = WorkerPool(1)
    setup = make_setup(Big)
    executor = PoolExecutor(setup, pool, owns_pool=True)
    works = [make_work(setup, trip) for trip in range(2)]
    first = executor.train(works[0], 0.0).result(TIMEOUT_SECONDS)
    process = pool.workers[0].process
    process.send_signal(signal.SIGSTOP)  # stops reading, so the model fills the socket
    future = executor.train(works[1], 0.0)
    time.sleep(0.5)
    assert not future.done()
    process.kill()
    assert same(future.result(TIMEOUT_SECONDS), reference(setup, works[1]))
    assert same(first, reference(setup, works[0]))
    executor.close()


def test_a_call_that_kills_its_worker_once_is_repeated(executor, tmp_path):
    work = make_work(make_setup(), rule=Deadly(tmp_path / "count", 1))
    assert same(executor.train(work, 0.0).result(TIMEOUT_SECONDS), reference(make_setup(), work))


def test_a_call_that_always_kills_its_worker_fails(executor, tmp_path):
    with pytest.raises(RunError, match=r"call \(train\) killed its worker 3 times \(last: signal SIGKILL\)"):
        executor.train(make_work(make_setup(), rule=Deadly(tmp_path / "count", 99)), 0.0).result(TIMEOUT_SECONDS)
    assert (tmp_path / "count").stat().st_size == 3
    assert executor.train(make_work(make_setup()), 0.0).result(TIMEOUT_SECONDS)


# ---- the end


def test_closing_ends_training_and_leaves_no_process(tmp_path):
    pool = WorkerPool(1)
    setup = make_setup()
    executor = PoolExecutor(setup, pool, owns_pool=True)
    running = executor.train(make_work(setup, rule=Patient(tmp_path)), 0.0)
    queued = executor.train(make_work(setup), 1.0)
    pids = wait_for_pids(tmp_path)
    start = time.monotonic()
    executor.close()
    assert time.monotonic() - start < CLOSE_TIMEOUT_SECONDS
    assert all(has_ended(pid) for pid in pids)
    assert not any(thread.is_alive() for thread in pool.threads)
    with pytest.raises(CancelledError):
        queued.result(0)
    with pytest.raises(RunError, match="closed"):
        running.result(0)


def test_closing_while_workers_start(tmp_path):
    pool = WorkerPool(2)
    wait_until(lambda: all(pool.workers))
    pids = [worker.process.pid for worker in pool.workers]
    start = time.monotonic()
    pool.close(now=True)
    assert time.monotonic() - start < CLOSE_TIMEOUT_SECONDS
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.parametrize(
    ("code", "message"),
    [("raise ImportError('libtorch is broken')", "libtorch is broken"), ("import os; os._exit(3)", "exit code 3")],
)
def test_a_worker_that_cannot_start_is_an_error(tmp_path, monkeypatch, code, message):
    (tmp_path / "freshet").mkdir()
    (tmp_path / "freshet" / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = WorkerPool(2)
    executor = PoolExecutor(make_setup(), pool, owns_pool=True)
    with pytest.raises(RunError, match=f"(?s)a worker could not be started.*{message}"):
        executor.train(make_work(make_setup()), 0.0).result(TIMEOUT_SECONDS)
    executor.close()


# ---- a script without a ``__main__`` guard, ended by a signal


SCRIPT = """
import sys
from pathlib import Path
from torch import nn
from freshet.compute.pool import PoolExecutor
from freshet.compute.processes import WorkerPool
from freshet.core.method import LocalRule
from tests.compute.helpers import Patient, make_setup, make_work, same

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        return self.layer(x)

class Rule(LocalRule):
    def begin(self, local):
        local.weights.mul_(0.5)

pool = WorkerPool(1)
setup = make_setup(lambda: Net())
executor = PoolExecutor(setup, pool, owns_pool=True)
work = make_work(setup, rule=Rule())
assert same(executor.train(work, 0.0).result(), setup.trainer().train(work))
try:
    executor.train(make_work(setup, rule=Patient(Path(sys.argv[1]))), 0.0).result()
finally:
    executor.close()
"""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """One script per signal, run in parallel: process, folder of its training, folder for temporary files."""
    started = {}
    for number in SIGNALS:
        folder = tmp_path_factory.mktemp(number.name)
        training, temporary = folder / "training", folder / "tmp"
        training.mkdir()
        temporary.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        root = Path(__file__).parents[2]
        process = subprocess.Popen(
            [sys.executable, folder / "script.py", training],
            env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        started[number] = (process, training, temporary)
    yield started
    for process, _, _ in started.values():
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize("number", SIGNALS)
def test_no_worker_and_no_file_outlives_a_script(scripts, number):
    process, training, temporary = scripts[number]
    wait_until(lambda: list(training.iterdir()) or process.poll() is not None)
    assert process.poll() is None, process.stderr.read().decode()
    (worker,) = wait_for_pids(training)
    os.killpg(process.pid, number)  # as a terminal does with Ctrl-C
    assert process.wait(timeout=TIMEOUT_SECONDS) in (-number, 130)
    wait_until(lambda: has_ended(worker))
    assert list(temporary.iterdir()) == []
