"""The fork server: one thread, few modules, never outlives its parent, and a run survives its death."""

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

import pytest

from freshet.cli import _needs_workers
from freshet.compute import worker
from freshet.compute.fork_server import ForkServerProcess, start_early, take_server
from freshet.compute.pool import CLOSE_TIMEOUT_SECONDS, PoolExecutor
from freshet.compute.processes import ProcessWorker, WorkerPool
from freshet.core.method import LocalRule

from .helpers import (
    TIMEOUT_SECONDS,
    Patient,
    children,
    has_ended,
    make_setup,
    make_work,
    same,
    wait_for_pids,
    wait_until,
)

#: Libraries that the command and reports need, but training does not.
FOREIGN = {"typer", "rich", "click", "pandas", "plotly", "matplotlib", "sklearn", "optuna", "flwr", "ray", "sympy"}


@dataclass(frozen=True)
class ModuleRecorder(LocalRule):
    """Writes the names of the modules loaded in its process to a file."""

    file: Path

    def begin(self, local: Any) -> None:
        self.file.write_text(" ".join({name.partition(".")[0] for name in sys.modules}))


@pytest.fixture
def executor(pool):
    built = PoolExecutor(make_setup(), pool, owns_pool=False)
    yield built
    built.close()


needs_proc = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")


@needs_proc
def test_a_server_has_one_thread_and_all_workers_are_its_children(executor, pool):
    assert executor.train(make_work(make_setup()), 0.0).result(TIMEOUT_SECONDS)
    server = pool.server.process.pid
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1, "a fork with several threads is not safe"
    wait_until(lambda: all(pool.workers))  # the call may end before the last worker starts
    assert {each.process.pid for each in pool.workers if each.alive()} <= children(server)


def test_workers_load_only_what_training_needs(executor, tmp_path):
    assert executor.train(make_work(make_setup(), rule=ModuleRecorder(tmp_path / "names")), 0.0).result(TIMEOUT_SECONDS)
    names = set((tmp_path / "names").read_text().split())
    assert "torch" in names
    assert names & FOREIGN == set()
    assert not worker.PRELOADS or "numba" in names, "compiled kernels are loaded before the fork"


def test_a_killed_server_takes_its_workers_along_and_the_call_is_repeated(tmp_path):
    pool, setup = WorkerPool(2), make_setup()
    executor = PoolExecutor(setup, pool, owns_pool=True)
    work = make_work(setup, rule=Patient(tmp_path))
    future = executor.train(work, 0.0)
    (first,) = wait_for_pids(tmp_path)
    pool.server.process.kill()
    wait_until(lambda: has_ended(first))
    (tmp_path / "go").touch()
    assert same(future.result(TIMEOUT_SECONDS), setup.trainer().train(work))
    server = pool.server.process.pid
    executor.close()
    assert has_ended(server)


def test_closing_a_pool_does_not_wait_for_a_server_that_loads(tmp_path, monkeypatch):
    (tmp_path / "freshet").mkdir()
    (tmp_path / "freshet" / "__init__.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = WorkerPool(2)
    wait_until(lambda: all(pool.workers))
    server, start = pool.server.process.pid, time.monotonic()
    pool.close(now=True)
    assert time.monotonic() - start < CLOSE_TIMEOUT_SECONDS
    assert has_ended(server) and not any(thread.is_alive() for thread in pool.threads)


class Overtaken:
    """A report pipe whose last report another thread reads just before this one begins to wait."""

    def __init__(self, report: Any, meanwhile: Any) -> None:
        self._report, self._meanwhile = report, [meanwhile]
        self.recv, self.close = report.recv, report.close

    def poll(self, seconds: float | None) -> bool:
        ready = select.poll()
        ready.register(self._report.fileno(), select.POLLIN)
        if seconds is None and self._meanwhile:
            self._meanwhile.pop()()
        return bool(ready.poll(None if seconds is None else 1000 * seconds))


def test_two_threads_may_wait_for_the_end_of_one_worker():
    server = ForkServerProcess()
    worker, opened = ProcessWorker(server, 0), []
    worker.wait_ready()

    def another_thread() -> None:
        worker.discard()
        opened.extend(os.pipe() for _ in range(10))  # would get the closed descriptors

    assert worker.alive() and worker.process.pid
    worker.process.report = Overtaken(worker.process.report, another_thread)
    waiting = threading.Thread(target=worker.process.wait, daemon=True)
    waiting.start()
    waiting.join(TIMEOUT_SECONDS)
    assert opened and not waiting.is_alive()
    for ends in opened:
        os.close(ends[0])
        os.close(ends[1])
    server.close()


def test_an_early_server_is_used_once_and_only_while_it_is_alive():
    start_early()
    start_early()
    early = take_server()
    other = take_server()
    assert early is not other
    early.close()
    other.close()
    start_early()
    dead = take_server()
    start_early()
    dead.close()
    assert has_ended(dead.process.pid)
    taken = take_server()
    assert taken.alive()
    taken.close()


def test_a_fork_of_the_main_process_that_ends_does_not_end_the_server():
    server = ForkServerProcess()
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
def test_the_command_starts_a_server_early_if_it_needs_one(line, needed):
    assert _needs_workers(line.split()) is needed


START = "import sys; from freshet.cli import main; sys.argv[0] = 'freshet'; main()"


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("seconds", [0.0, 0.7])
def test_a_command_that_is_ended_during_startup_leaves_no_process(tmp_path, number, seconds):
    line = [sys.executable, "-c", START, "run", "-m", "fedavg", "--executor", "processes", "-w", "2", "-q"]
    process = subprocess.Popen(
        [*line, "-o", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_until(lambda: children(process.pid))
    time.sleep(seconds)
    (server,) = children(process.pid)
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    wait_until(lambda: has_ended(server))
    if number == signal.SIGINT:
        assert (process.returncode, out, err) == (130, "", "interrupted\n")
