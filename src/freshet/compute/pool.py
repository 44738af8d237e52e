"""A pool of workers of any kind: the queue, the repeated attempts and the end; what a worker is, a subclass says.

Each worker has one thread here that feeds it. A worker that dies is replaced and its task goes back into the queue, so
a kill never changes a result. A task that kills its worker three times ends the run.
"""

import heapq
import itertools
import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from freshet.compute.executor import Setup
from freshet.compute.host import open_answer, request
from freshet.core.vectors import Vector
from freshet.errors import RunError
from freshet.training.device_eval import DeviceScores, Exam
from freshet.training.task import Score
from freshet.training.trainer import Work
from freshet.training.trip import Outcome

#: How often a task may kill its worker, and how often in a row a worker may die while it starts.
ATTEMPTS = 3
#: Trainers that a worker keeps, so that federations can take turns.
KEPT_TRAINERS = 4
#: Seconds that ``close`` waits for the tasks under way before it kills the workers.
GRACE = 30.0
_log = logging.getLogger(__name__)

S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)


class WorkerDied(Exception):
    """The worker is gone (the text says how); its task may be repeated by another."""


class StartFailed(Exception):
    """No worker can be started (the text says why); trying again would not help."""


@dataclass(order=True)
class Task:
    """Work in the queue, ordered by when its result is needed."""

    due: float
    order: int
    setup: int = field(compare=False)
    name: str = field(compare=False)
    arguments: tuple[Any, ...] = field(compare=False)
    future: "Future[Any]" = field(compare=False, default_factory=Future)
    deaths: int = field(compare=False, default=0)


class Worker(Protocol[S_contra]):
    """One worker, somewhere. ``S_contra`` is what it needs to know of a setup."""

    def wait_ready(self) -> None:
        """Return when it can take calls; raises ``WorkerDied`` or ``StartFailed``."""

    def alive(self) -> bool:
        """False when it is known to be gone."""

    def install(self, number: int, setup: S_contra, drop: list[int]) -> bytes:
        """Build a setup's trainer and forget others; raises ``WorkerDied``."""

    def call(self, number: int, content: bytes) -> bytes:
        """Call a trainer; raises ``WorkerDied``."""

    def kill(self) -> None:
        """End it at once, whatever it does; from any thread, and more than once."""

    def discard(self) -> None:
        """End it and give back what belongs to it; only from the thread that feeds it."""


class Pool(Generic[S]):
    """Workers that serve any number of federations, one after the other or side by side."""

    def __init__(self, workers: int) -> None:
        self._changed = threading.Condition()
        self._heap: list[Task] = []
        self._order, self._numbers = itertools.count(), itertools.count()
        self._setups: dict[int, S] = {}
        self._closed = False
        self._broken: str | None = None
        self._ready: set[int] = set()
        self._serving = workers
        self.workers: list[Worker[S] | None] = [None] * workers
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), daemon=True, name=f"freshet-worker-{index}")
            for index in range(workers)
        ]

    def _open(self) -> None:
        """Start the workers (the last step of a subclass's constructor)."""
        for thread in self._threads:
            thread.start()

    # ---- what a kind of pool adds

    def _launch(self) -> Worker[S]:
        """Begin to start a worker, without waiting for it; raises ``WorkerDied`` or ``StartFailed``."""
        raise NotImplementedError

    def _publish(self, setup: Setup) -> S:
        """Put a setup where workers can reach it, for as long as somebody holds what is returned."""
        raise NotImplementedError

    def _end(self) -> None:
        """All workers are gone: give back what the pool holds."""

    # ---- for executors

    def register(self, setup: Setup) -> int:
        """Make a federation's fixed part known to the workers; its data are stored once and shared by all."""
        published = self._publish(setup)
        with self._changed:
            number = next(self._numbers)
            self._setups[number] = published
            return number

    def release(self, number: int) -> None:
        """A federation is over: drop its queued tasks and its data."""
        with self._changed:
            self._setups.pop(number, None)
            mine = [task for task in self._heap if task.setup == number]
            self._heap = [task for task in self._heap if task.setup != number]
            heapq.heapify(self._heap)
        _give_up(mine, "the federation was closed before this task was done")

    def submit(self, setup: int, name: str, arguments: tuple[Any, ...], due: float) -> "Future[Any]":
        """Queue a call of a trainer's method; the earliest ``due`` goes first."""
        with self._changed:
            if self._broken is not None:
                raise RunError(self._broken)
            if self._closed or setup not in self._setups:
                raise RunError("the pool of workers is closed")
            task = Task(due, next(self._order), setup, name, arguments)
            heapq.heappush(self._heap, task)
            self._changed.notify()
        return task.future

    def close(self, *, now: bool = False) -> None:
        """End all workers, after their current task or at once, and give up what is queued."""
        with self._changed:
            self._closed = True
            left, self._heap = self._heap, []
            self._changed.notify_all()
        _give_up(left, "the pool of workers was closed before this task was done")
        if not now:
            self._join(GRACE)
        with self._changed:
            for worker in self.workers:
                if worker is not None:
                    worker.kill()
        self._join(GRACE)
        self._setups.clear()
        self._end()

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=max(0.0, deadline - time.monotonic()))

    # ---- one thread per worker

    def _serve(self, index: int) -> None:
        """Feed one worker for as long as the pool lives."""
        try:
            while self._hire(index) and self._feed(index):
                pass
        except (WorkerDied, StartFailed) as problem:
            self._retire(f"a worker could not be started: {problem}")
        except Exception as error:  # a fault of ours must end the run, not let it wait for ever
            self._retire(f"a worker's thread failed: {error!r}", fatal=True)
        finally:
            with self._changed:
                self._ready.discard(index)
                worker, self.workers[index] = self.workers[index], None
            if worker is not None:
                worker.discard()

    def _hire(self, index: int) -> bool:
        """Start a worker in this place; False when the pool is closed."""
        for attempt in range(1, ATTEMPTS + 1):
            worker: Worker[S] | None = None
            try:
                with self._changed:
                    if self._closed:
                        return False
                    worker = self.workers[index] = self._launch()
                worker.wait_ready()
            except (WorkerDied, StartFailed) as problem:
                if worker is not None:
                    worker.discard()
                if self._closed:
                    return False
                if isinstance(problem, StartFailed) or attempt == ATTEMPTS:
                    raise
            else:
                with self._changed:
                    self._ready.add(index)
                return True
        return False

    def _feed(self, index: int) -> bool:
        """Give tasks to a worker until it dies (True) or the pool is closed (False)."""
        worker = self.workers[index]
        assert worker is not None
        known: OrderedDict[int, None] = OrderedDict()
        while (task := self._take()) is not None:
            if not worker.alive():  # it died while it had nothing to do: not this task's fault
                self._put_back(task)
                break
            if task.deaths == 0 and not task.future.set_running_or_notify_cancel():
                continue
            try:
                self._perform(worker, task, known)
            except WorkerDied as death:
                self._blame(task, death)
                break
        with self._changed:
            self._ready.discard(index)
        worker.discard()
        return not self._closed

    def _perform(self, worker: Worker[S], task: Task, known: "OrderedDict[int, None]") -> None:
        """Let a worker compute a task and hand its result or its error to the one who waits."""
        try:
            if task.setup not in known:
                self._install(worker, task.setup, known)
            known.move_to_end(task.setup)
            result = open_answer(worker.call(task.setup, request(task.name, task.arguments)))
        except WorkerDied:
            raise
        except Exception as error:
            task.future.set_exception(error)
        else:
            task.future.set_result(result)

    def _install(self, worker: Worker[S], number: int, known: "OrderedDict[int, None]") -> None:
        """Bring a setup to a worker; the one it has not used for longest makes room."""
        with self._changed:
            setup = self._setups.get(number)
            drop = [old for old in known if old not in self._setups]
        if setup is None:
            raise RunError("the federation was closed before this task was done")
        room = len(known) - len(drop) - KEPT_TRAINERS + 1
        drop += [old for old in known if old not in drop][: max(0, room)]
        for old in drop:
            del known[old]
        open_answer(worker.install(number, setup, drop))
        known[number] = None

    def _take(self) -> Task | None:
        """The most urgent task, as soon as there is one; None when the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._heap or self._closed)
            return None if self._closed else heapq.heappop(self._heap)

    def _put_back(self, task: Task) -> None:
        with self._changed:
            if not self._closed and task.setup in self._setups:
                heapq.heappush(self._heap, task)
                self._changed.notify()
                return
        _give_up([task], "the pool of workers was closed before this task was done")

    def _blame(self, task: Task, death: WorkerDied) -> None:
        """A worker died of a task, or with it: repeat it, but not for ever."""
        task.deaths += 1
        if task.deaths < ATTEMPTS or self._closed:
            self._put_back(task)
            return
        problem = f"a task ({task.name}) ended its worker {ATTEMPTS} times (last: {death}); is there enough memory?"
        task.future.set_exception(RunError(problem))

    def _retire(self, problem: str, *, fatal: bool = False) -> None:
        """A place stays empty from now on; when it was the last one, everybody who waits is told."""
        with self._changed:
            self._serving -= 1
            if self._closed:
                return
            if self._serving and not fatal:
                _log.warning("%s; going on with %d", problem, self._serving)
                return
            self._broken = problem
            left, self._heap = self._heap, []
        for task in left:
            _fail(task, problem)


def _give_up(tasks: list[Task], reason: str) -> None:
    """Nobody will compute these: cancel them, or tell those who wait for a task that had begun before."""
    for task in tasks:
        if not task.future.cancel():
            _fail(task, reason)


def _fail(task: Task, reason: str) -> None:
    if task.deaths or task.future.set_running_or_notify_cancel():
        task.future.set_exception(RunError(reason))


class PoolExecutor:
    """A federation on a pool; ends the pool with itself when it owns it."""

    def __init__(self, setup: Setup, pool: Pool[Any], *, owns_pool: bool) -> None:
        self._pool, self._owns = pool, owns_pool
        try:
            self._setup = pool.register(setup)
        except BaseException:
            self._close_pool()
            raise

    def train(self, work: Work, due: float) -> "Future[Outcome]":
        return self._pool.submit(self._setup, "train", (work,), due)

    def evaluate(self, weights: Vector) -> "Future[Score]":
        return self._pool.submit(self._setup, "evaluate", (weights,), 0.0)

    def examine(self, exam: Exam, due: float) -> "Future[DeviceScores]":
        return self._pool.submit(self._setup, "examine", (exam,), due)

    def close(self) -> None:
        self._pool.release(self._setup)
        self._close_pool()

    def _close_pool(self) -> None:
        if self._owns:
            self._pool.close(now=True)
