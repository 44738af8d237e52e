"""A pool of workers: queue, retries and shutdown. Subclasses define what a worker is.

One thread feeds each worker. A worker that dies is replaced and its call goes back into the queue, so a kill never
changes a result. A call that kills its worker three times ends the run.
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

from freshet.compute.host import decode_answer, encode_request
from freshet.core.vectors import Vector
from freshet.errors import RunError
from freshet.training.device_eval import DeviceEvaluation, DeviceScores
from freshet.training.task import Score
from freshet.training.trainer import Setup, TripInput
from freshet.training.trip import TripOutcome

#: How often a call may kill its worker, and how often in a row a worker may die while it starts.
MAX_ATTEMPTS = 3
#: Trainers that a worker keeps, so that federations can take turns.
MAX_TRAINERS_PER_WORKER = 4
#: Seconds that ``close`` waits for running calls before it kills the workers.
CLOSE_TIMEOUT_SECONDS = 30.0
_log = logging.getLogger(__name__)

S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)


class WorkerDied(Exception):
    """The worker has died (the text says how). Another worker may repeat its call."""


class StartFailed(Exception):
    """No worker can be started (the text says why), and a retry would not help."""


@dataclass(order=True)
class QueuedCall:
    """A call of a trainer's method, ordered by when its result is needed."""

    due: float
    order: int
    setup: int = field(compare=False)
    name: str = field(compare=False)
    arguments: tuple[Any, ...] = field(compare=False)
    future: "Future[Any]" = field(compare=False, default_factory=Future)
    deaths: int = field(compare=False, default=0)


class Worker(Protocol[S_contra]):
    """One worker. ``S_contra`` is the form in which it receives a setup."""

    def wait_ready(self) -> None:
        """Return when it can take calls. Raises ``WorkerDied`` or ``StartFailed``."""

    def alive(self) -> bool:
        """Return False if it is known to have died."""

    def install(self, number: int, setup: S_contra, drop: list[int]) -> bytes:
        """Build a setup's trainer and drop others. Raises ``WorkerDied``."""

    def call(self, number: int, content: bytes) -> bytes:
        """Call a trainer. Raises ``WorkerDied``."""

    def kill(self) -> None:
        """End it at once. Safe from any thread and to repeat."""

    def discard(self) -> None:
        """End it and release its resources. Only for the thread that feeds it."""


class Pool(Generic[S]):
    """Workers that serve any number of federations, in sequence or in parallel."""

    def __init__(self, workers: int) -> None:
        self._changed = threading.Condition()
        self._heap: list[QueuedCall] = []
        self._order, self._numbers = itertools.count(), itertools.count()
        self._setups: dict[int, S] = {}
        self._closed = False
        self._broken: str | None = None
        self.ready: set[int] = set()
        self._serving = workers
        self.workers: list[Worker[S] | None] = [None] * workers
        self.threads = [
            threading.Thread(target=self._serve, args=(index,), daemon=True, name=f"freshet-worker-{index}")
            for index in range(workers)
        ]

    def _open(self) -> None:
        """Start the workers. A subclass calls it last in its constructor."""
        for thread in self.threads:
            thread.start()

    # ---- for subclasses

    def _launch(self, index: int) -> Worker[S]:
        """Begin to start the worker of a slot without waiting for it. Raises ``WorkerDied`` or ``StartFailed``."""
        raise NotImplementedError

    def _publish(self, setup: Setup) -> S:
        """Put a setup where workers can reach it, as long as the returned object lives."""
        raise NotImplementedError

    def _end(self) -> None:
        """Release the pool's resources, after all workers have ended."""

    # ---- for executors

    def register(self, setup: Setup) -> int:
        """Publish a federation's setup to the workers, which share one copy of its data."""
        published = self._publish(setup)
        with self._changed:
            number = next(self._numbers)
            self._setups[number] = published
            return number

    def release(self, number: int) -> None:
        """Drop the queued calls and the data of a federation that has ended."""
        with self._changed:
            self._setups.pop(number, None)
            dropped = [call for call in self._heap if call.setup == number]
            self._heap = [call for call in self._heap if call.setup != number]
            heapq.heapify(self._heap)
        _cancel_all(dropped, "the federation was closed before this call was done")

    def submit(self, setup: int, name: str, arguments: tuple[Any, ...], due: float) -> "Future[Any]":
        """Queue a call of a trainer's method. The earliest ``due`` goes first."""
        with self._changed:
            if self._broken is not None:
                raise RunError(self._broken)
            if self._closed or setup not in self._setups:
                raise RunError("the pool of workers is closed")
            call = QueuedCall(due, next(self._order), setup, name, arguments)
            heapq.heappush(self._heap, call)
            self._changed.notify()
        return call.future

    def close(self, *, now: bool = False) -> None:
        """End all workers, after their current call or at once, and cancel what is queued."""
        with self._changed:
            self._closed = True
            queued, self._heap = self._heap, []
            self._changed.notify_all()
        _cancel_all(queued, "the pool of workers was closed before this call was done")
        if not now:
            self._join(CLOSE_TIMEOUT_SECONDS)
        with self._changed:
            for worker in self.workers:
                if worker is not None:
                    worker.kill()
        self._join(CLOSE_TIMEOUT_SECONDS)
        self._setups.clear()
        self._end()

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            if thread.ident is not None:
                thread.join(timeout=max(0.0, deadline - time.monotonic()))

    # ---- one thread per worker

    def _serve(self, index: int) -> None:
        """Feed one worker as long as the pool lives."""
        try:
            while self._start_worker(index) and self._feed_worker(index):
                pass
        except (WorkerDied, StartFailed) as problem:
            self._retire_slot(f"a worker could not be started: {problem}")
        except Exception as error:  # a bug must end the run, not let it wait for ever
            self._retire_slot(f"a worker's thread failed: {error!r}", fatal=True)
        finally:
            with self._changed:
                self.ready.discard(index)
                worker, self.workers[index] = self.workers[index], None
            if worker is not None:
                worker.discard()

    def _start_worker(self, index: int) -> bool:
        """Start a worker in this slot. Returns False when the pool is closed."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            worker: Worker[S] | None = None
            try:
                with self._changed:
                    if self._closed:
                        return False
                    worker = self.workers[index] = self._launch(index)
                worker.wait_ready()
            except (WorkerDied, StartFailed) as problem:
                if worker is not None:
                    worker.discard()
                if self._closed:
                    return False
                if isinstance(problem, StartFailed) or attempt == MAX_ATTEMPTS:
                    raise
            else:
                with self._changed:
                    self.ready.add(index)
                return True
        return False

    def _feed_worker(self, index: int) -> bool:
        """Give calls to a worker until it dies (True) or the pool is closed (False)."""
        worker = self.workers[index]
        assert worker is not None
        known: OrderedDict[int, None] = OrderedDict()
        while (call := self._take()) is not None:
            if not worker.alive():  # it died while idle; this call is not to blame
                self._put_back(call)
                break
            if call.deaths == 0 and not call.future.set_running_or_notify_cancel():
                continue
            try:
                self._run_call(worker, call, known)
            except WorkerDied as death:
                self._handle_death(call, death)
                break
        with self._changed:
            self.ready.discard(index)
        worker.discard()
        return not self._closed

    def _run_call(self, worker: Worker[S], call: QueuedCall, known: "OrderedDict[int, None]") -> None:
        """Let a worker compute a call, and set the result or error of its future."""
        try:
            if call.setup not in known:
                self._install(worker, call.setup, known)
            known.move_to_end(call.setup)
            result = decode_answer(worker.call(call.setup, encode_request(call.name, call.arguments)))
        except WorkerDied:
            raise
        except Exception as error:
            call.future.set_exception(error)
        else:
            call.future.set_result(result)

    def _install(self, worker: Worker[S], number: int, known: "OrderedDict[int, None]") -> None:
        """Install a setup in a worker, in place of the least recently used one if it is full."""
        with self._changed:
            setup = self._setups.get(number)
            drop = [old for old in known if old not in self._setups]
        if setup is None:
            raise RunError("the federation was closed before this call was done")
        room = len(known) - len(drop) - MAX_TRAINERS_PER_WORKER + 1
        drop += [old for old in known if old not in drop][: max(0, room)]
        for old in drop:
            del known[old]
        decode_answer(worker.install(number, setup, drop))
        known[number] = None

    def _take(self) -> QueuedCall | None:
        """Wait for the most urgent call. Returns None when the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._heap or self._closed)
            return None if self._closed else heapq.heappop(self._heap)

    def _put_back(self, call: QueuedCall) -> None:
        with self._changed:
            if not self._closed and call.setup in self._setups:
                heapq.heappush(self._heap, call)
                self._changed.notify()
                return
        _cancel_all([call], "the pool of workers was closed before this call was done")

    def _handle_death(self, call: QueuedCall, death: WorkerDied) -> None:
        """Queue a call again after its worker died, or fail it after too many deaths."""
        call.deaths += 1
        if call.deaths < MAX_ATTEMPTS or self._closed:
            self._put_back(call)
            return
        problem = f"a call ({call.name}) killed its worker {MAX_ATTEMPTS} times (last: {death}); give it more memory"
        call.future.set_exception(RunError(problem))

    def _retire_slot(self, problem: str, *, fatal: bool = False) -> None:
        """Give up one worker for good. After the last one, or a fatal problem, all queued calls fail."""
        with self._changed:
            self._serving -= 1
            if self._closed:
                return
            if self._serving and not fatal:
                _log.warning("%s; continuing with %d workers", problem, self._serving)
                return
            self._broken = problem
            queued, self._heap = self._heap, []
        for call in queued:
            _fail_call(call, problem)


def _cancel_all(calls: list[QueuedCall], reason: str) -> None:
    """Cancel calls. One that had begun before fails with the reason."""
    for call in calls:
        if not call.future.cancel():
            _fail_call(call, reason)


def _fail_call(call: QueuedCall, reason: str) -> None:
    if call.deaths or call.future.set_running_or_notify_cancel():
        call.future.set_exception(RunError(reason))


class PoolExecutor:
    """Runs a federation on a pool, and closes the pool with itself if it owns it."""

    def __init__(self, setup: Setup, pool: Pool[Any], *, owns_pool: bool) -> None:
        self._pool, self._owns_pool = pool, owns_pool
        try:
            self._setup = pool.register(setup)
        except BaseException:
            self._close_pool()
            raise

    def train(self, work: TripInput, due: float) -> "Future[TripOutcome]":
        return self._pool.submit(self._setup, "train", (work,), due)

    def evaluate(self, weights: Vector) -> "Future[Score]":
        return self._pool.submit(self._setup, "evaluate", (weights,), 0.0)

    def evaluate_devices(self, evaluation: DeviceEvaluation, due: float) -> "Future[DeviceScores]":
        return self._pool.submit(self._setup, "evaluate_devices", (evaluation,), due)

    def close(self) -> None:
        self._pool.release(self._setup)
        self._close_pool()

    def _close_pool(self) -> None:
        if self._owns_pool:
            self._pool.close(now=True)
