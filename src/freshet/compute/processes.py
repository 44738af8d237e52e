"""Training in worker processes that live as long as the pool.

Each worker has one thread here that feeds it; a worker that dies is replaced and its task repeated, so a kill never
changes a result. A task that kills its worker three times ends the run.
"""

import itertools
import os
import queue
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import cloudpickle

from freshet.compute.base import Setup, StoredSetup
from freshet.core.vectors import Vector
from freshet.errors import RunError
from freshet.training.local import Outcome, Score, Work

ATTEMPTS = 3


@dataclass(order=True)
class _Task:
    """Work in the queue, ordered by when its result is needed."""

    due: float
    order: int
    setup: int = field(compare=False)
    name: str = field(compare=False)
    arguments: tuple[Any, ...] = field(compare=False)
    future: "Future[Any]" = field(compare=False)


class _Worker:
    """One child process and the connection to it."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        descriptor = theirs.fileno()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
            [sys.executable, "-m", "freshet.compute.worker", str(descriptor)],
            pass_fds=[descriptor],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.connection: Connection = ours
        self.setup: int | None = None

    def ask(self, task: _Task, setups: dict[int, bytes]) -> tuple[bool, Any]:
        """Send a task and wait for the answer; raises EOFError or OSError when the worker dies."""
        if self.setup != task.setup:
            ok, problem = self._call(task.setup, "setup", (setups[task.setup],))
            if not ok:
                return False, problem
            self.setup = task.setup
        return self._call(task.setup, task.name, task.arguments)

    def _call(self, setup: int, name: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        self.connection.send((setup, name, arguments))
        answer: tuple[bool, Any] = self.connection.recv()
        return answer

    def close(self) -> None:
        self.connection.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class WorkerPool:
    """Worker processes that serve any number of federations, one after the other or side by side."""

    def __init__(self, workers: int = 0) -> None:
        self._queue: queue.PriorityQueue[_Task] = queue.PriorityQueue()
        self._order = itertools.count()
        self._folder = tempfile.TemporaryDirectory(prefix="freshet-")
        self._setups: dict[int, bytes] = {}
        self._closed = False
        self.workers: list[_Worker | None] = [None] * (workers or available_cores())
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), daemon=True, name=f"freshet-worker-{index}")
            for index in range(len(self.workers))
        ]
        for thread in self._threads:
            thread.start()

    def register(self, setup: Setup) -> int:
        """Make a federation's fixed part known to the workers; its data are written once and mapped by all."""
        number = len(self._setups)
        folder = Path(self._folder.name) / str(number)
        folder.mkdir()
        self._setups[number] = cloudpickle.dumps(StoredSetup.store(setup, folder))
        return number

    def submit(self, setup: int, name: str, arguments: tuple[Any, ...], due: float) -> "Future[Any]":
        """Queue a call of a trainer's method; the earliest ``due`` goes first."""
        future: Future[Any] = Future()
        self._queue.put(_Task(due, next(self._order), setup, name, arguments, future))
        return future

    def _serve(self, index: int) -> None:
        """Feed one worker (in its own thread)."""
        worker = self.workers[index] = _Worker()
        while True:
            task = self._queue.get()
            if task.setup < 0:
                worker.close()
                return
            if not task.future.set_running_or_notify_cancel():
                continue
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    ok, answer = worker.ask(task, self._setups)
                except (EOFError, OSError):
                    worker.kill()
                    if self._closed:
                        return
                    worker = self.workers[index] = _Worker()
                    if attempt == ATTEMPTS:
                        problem = f"a training task killed its worker {ATTEMPTS} times; is there enough memory?"
                        task.future.set_exception(RunError(problem))
                    continue
                if ok:
                    task.future.set_result(answer)
                else:
                    task.future.set_exception(RunError(f"training failed in a worker:\n{answer}"))
                break

    def close(self, *, now: bool = False) -> None:
        """End all workers, after their current task or at once, and remove the shared data."""
        self._closed = True
        if now:
            for worker in self.workers:
                if worker is not None:
                    worker.process.kill()
        for _ in self._threads:
            self._queue.put(_Task(-1.0, -1, -1, "stop", (), Future()))
        for thread in self._threads:
            thread.join(timeout=30)
        self._folder.cleanup()


class ProcessExecutor:
    """A federation on a pool; ends the pool with itself when it owns it."""

    def __init__(self, setup: Setup, pool: WorkerPool, *, owns_pool: bool) -> None:
        self._pool, self._owns = pool, owns_pool
        self._setup = pool.register(setup)

    def train(self, work: Work, due: float) -> "Future[Outcome]":
        return self._pool.submit(self._setup, "train", (work,), due)

    def evaluate(self, weights: Vector) -> "Future[Score]":
        return self._pool.submit(self._setup, "evaluate", (weights,), 0.0)

    def close(self) -> None:
        if self._owns:
            self._pool.close(now=True)


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
