"""The fork server: one thread, few modules, nothing that outlives its parent, and a run that goes on without it."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import pytest

from freshet.cli import _needs_workers
from freshet.compute import executor as executors
from freshet.compute import worker
from freshet.compute.executor import LateExecutor, SerialExecutor
from freshet.compute.forking import Server, a_server, start_early
from freshet.compute.host import NotOnDisk, _never_compiling
from freshet.compute.pool import GRACE, PoolExecutor
from freshet.compute.processes import ProcessWorker, WorkerPool
from freshet.core.method import LocalRule

from .helpers import LIMIT, Patient, begun, children, eventually, gone, make_setup, make_work, same

WAIT = LIMIT
#: What the command and reports need, and no training.
FOREIGN = {"typer", "rich", "click", "pandas", "plotly", "matplotlib", "sklearn", "optuna", "flwr", "ray", "sympy"}


@dataclass(frozen=True)
class Telling(LocalRule):
    """Writes down what has been loaded into its process."""

    file: Path

    def begin(self, local: Any) -> None:
        self.file.write_text(" ".join({name.partition(".")[0] for name in sys.modules}))


@pytest.fixture
def executor(pool):
    built = PoolExecutor(make_setup(), pool, owns_pool=False)
    yield built
    built.close()


needs_proc = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="looks into /proc")


@needs_proc
def test_a_server_has_one_thread_and_all_workers_are_its_children(executor, pool):
    assert executor.train(make_work(make_setup()), 0.0).result(WAIT)
    server = pool._server.process.pid
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1, "a fork of several threads is not safe"
    eventually(lambda: all(pool.workers))  # the work may have been done before the last one was begun
    assert {each.process.pid for each in pool.workers if each.alive()} <= children(server)


def test_workers_load_what_training_needs_and_no_more(executor, tmp_path):
    assert executor.train(make_work(make_setup(), rule=Telling(tmp_path / "names")), 0.0).result(WAIT)
    names = set((tmp_path / "names").read_text().split())
    assert "torch" in names and not names & FOREIGN
    assert not worker.LOADS_FIRST or "numba" in names, "the compiled loops are loaded before the fork"


def test_a_server_that_is_killed_takes_its_workers_along_and_the_work_is_repeated(tmp_path):
    pool, setup = WorkerPool(2), make_setup()
    executor = PoolExecutor(setup, pool, owns_pool=True)
    work = make_work(setup, rule=Patient(tmp_path))
    future = executor.train(work, 0.0)
    (first,) = begun(tmp_path)
    pool._server.process.kill()
    eventually(lambda: gone(first))
    (tmp_path / "go").touch()
    assert same(future.result(WAIT), setup.trainer().train(work))
    server = pool._server.process.pid
    executor.close()
    assert gone(server)


def test_a_pool_that_is_closed_while_its_server_loads_does_not_wait_for_it(tmp_path, monkeypatch):
    (tmp_path / "freshet").mkdir()
    (tmp_path / "freshet" / "__init__.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = WorkerPool(2)
    eventually(lambda: all(pool.workers))
    server, start = pool._server.process.pid, time.monotonic()
    pool.close(now=True)
    assert time.monotonic() - start < GRACE
    assert gone(server) and not any(thread.is_alive() for thread in pool._threads)


class Overtaken:
    """Reports of a worker whose end another thread hears just before this one begins to wait for it."""

    def __init__(self, report: Any, meanwhile: Any) -> None:
        self._report, self._meanwhile = report, [meanwhile]
        self.recv, self.close = report.recv, report.close

    def poll(self, seconds: float | None) -> bool:
        ready = select.poll()
        ready.register(self._report.fileno(), select.POLLIN)
        if seconds is None and self._meanwhile:
            self._meanwhile.pop()()
        return bool(ready.poll(None if seconds is None else 1000 * seconds))


def test_two_threads_may_wait_for_the_same_workers_end():
    server = Server()
    worker, opened = ProcessWorker(server), []
    worker.wait_ready()

    def another_thread() -> None:
        worker.discard()
        opened.extend(os.pipe() for _ in range(10))  # would get the numbers of what was closed

    assert worker.alive() and worker.process.pid
    worker.process._report = Overtaken(worker.process._report, another_thread)
    waiting = threading.Thread(target=worker.process.wait, daemon=True)
    waiting.start()
    waiting.join(WAIT)
    assert opened and not waiting.is_alive()
    for ends in opened:
        os.close(ends[0])
        os.close(ends[1])
    server.close()


def test_a_server_that_was_started_early_is_taken_once_and_only_alive():
    start_early()
    start_early()
    early = a_server()
    other = a_server()
    assert early is not other
    early.close()
    other.close()
    start_early()
    dead = a_server()
    start_early()
    dead.close()
    assert gone(dead.process.pid)
    taken = a_server()
    assert taken.alive()
    taken.close()


def test_a_fork_of_the_main_process_that_ends_does_not_end_the_server():
    server = Server()
    child = os.fork()
    if child == 0:
        server.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert server.alive()
    server.close()
    assert not server.alive()


@pytest.mark.parametrize(
    ("line", "needed"),
    [
        ("run -m fedavg --executor processes -w 2", True),
        ("resume runs/x --executor=processes", True),
        ("run -m fedavg -o processes", False),
        ("run -m fedavg --executor serial", False),
        ("report --executor processes", False),
        ("", False),
    ],
)
def test_the_command_starts_a_server_early_when_it_will_be_needed(line, needed):
    assert _needs_workers(line.split()) is needed


START = "import sys; from freshet.cli import main; sys.argv[0] = 'freshet'; main()"


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("seconds", [0.0, 0.7])
def test_a_command_that_is_ended_while_it_starts_leaves_nothing_behind(tmp_path, number, seconds):
    line = [sys.executable, "-c", START, "run", "-m", "fedavg", "--executor", "processes", "-w", "2", "-q"]
    process = subprocess.Popen(
        [*line, "-o", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    eventually(lambda: children(process.pid))
    time.sleep(seconds)
    (server,) = children(process.pid)
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=WAIT)
    eventually(lambda: gone(server))
    if number == signal.SIGINT:
        assert (process.returncode, out, err) == (130, "", "interrupted\n")


def test_a_loop_that_is_not_on_disk_is_not_compiled_before_a_fork():
    with _never_compiling(), pytest.raises(NotOnDisk):
        numba.njit("f8(f8)")(lambda x: x + 1.0)
    assert numba.njit("f8(f8)")(lambda x: x + 1.0)(1.0) == 2.0


def test_a_late_executor_gets_its_user_ready_once_and_not_before_the_first_result(monkeypatch):
    monkeypatch.setattr(executors, "SECONDS_TO_WAIT", 0.01)
    setup, said = make_setup(), []
    executor = LateExecutor(SerialExecutor(setup), lambda: said.append("ready"))
    works = [make_work(setup, trip) for trip in range(3)]
    futures = [executor.train(work, 0.0) for work in works[:2]]
    assert said == [] and not futures[0].done()
    assert same(futures[0].result(), setup.trainer().train(works[0])) and futures[0].done()
    assert said == ["ready"]
    futures.append(executor.train(works[2], 0.0))
    assert all(same(f.result(), setup.trainer().train(w)) for f, w in zip(futures, works, strict=True))
    assert executor.evaluate(works[0].assignment.weights).result() == setup.trainer().evaluate(
        works[0].assignment.weights
    )
    assert said == ["ready"]
    executor.close()


def test_who_waits_long_for_the_first_result_gets_ready_meanwhile(executor, tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "SECONDS_TO_WAIT", 0.01)
    patient = LateExecutor(executor, (tmp_path / "go").touch)  # for which the training waits
    assert patient.train(make_work(make_setup(), rule=Patient(tmp_path)), 0.0).result()
