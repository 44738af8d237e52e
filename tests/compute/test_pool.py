"""The queue, the retries and the shutdown of a pool, with fake workers."""

import pickle
import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest

from freshet.compute.host import encode_answer
from freshet.compute.pool import MAX_ATTEMPTS, MAX_TRAINERS_PER_WORKER, Pool, StartFailed, WorkerDied
from freshet.errors import ConfigError, RunError

TIMEOUT_SECONDS = 240


class FakeWorker:
    """Answers calls in this process. The pool's ``starts`` decide how it starts."""

    def __init__(self, pool: "FakePool") -> None:
        self.pool, self.dead = pool, threading.Event()

    def wait_ready(self) -> None:
        with self.pool.script_lock:
            problem = self.pool.starts.pop(0) if self.pool.starts else None
        if problem is not None:
            raise problem

    def alive(self) -> bool:
        return not self.dead.is_set()

    def install(self, number: int, setup: Any, drop: list[int]) -> bytes:
        self.pool.installs.append((number, drop))
        return encode_answer(lambda: None)

    def call(self, number: int, content: bytes) -> bytes:
        name, arguments = pickle.loads(content)
        self.pool.calls.append(name)
        if name == "die":
            self.dead.set()
        if name == "block":
            self.pool.blocked.set()
            while not (self.pool.gate.wait(0.01) or self.dead.is_set()):
                pass
        if self.dead.is_set():
            raise WorkerDied("signal SIGKILL")
        return encode_answer(lambda: (name, *arguments))

    def kill(self) -> None:
        self.dead.set()

    def discard(self) -> None:
        self.dead.set()


class FakePool(Pool[Any]):
    """A pool of fake workers."""

    def __init__(self, workers: int = 1, starts: list[Exception | None] | None = None) -> None:
        super().__init__(workers)
        self.starts, self.script_lock = starts or [], threading.Lock()
        self.calls: list[str] = []
        self.installs: list[tuple[int, list[int]]] = []
        self.gate, self.blocked = threading.Event(), threading.Event()
        self._open()

    def _launch(self, index: int) -> FakeWorker:
        return FakeWorker(self)

    def _publish(self, setup: Any) -> Any:
        return setup

    def block(self, number: int):
        """Keep the only worker busy until ``gate`` is set."""
        future = self.submit(number, "block", (), -1.0)
        assert self.blocked.wait(TIMEOUT_SECONDS)
        return future


@pytest.fixture
def make_pool():
    pools = []

    def build(*args, **kwargs) -> FakePool:
        pools.append(FakePool(*args, **kwargs))
        return pools[-1]

    yield build
    for pool in pools:
        pool.gate.set()
        pool.close(now=True)
        assert not any(thread.is_alive() for thread in pool.threads)


def test_the_earliest_due_goes_first_and_ties_in_order(make_pool):
    pool = make_pool()
    number = pool.register("setup")
    pool.block(number)
    futures = [pool.submit(number, name, (), due) for name, due in (("c", 5), ("a", 1), ("b", 3), ("d", 5))]
    pool.gate.set()
    assert [future.result(TIMEOUT_SECONDS)[0] for future in futures] == ["c", "a", "b", "d"]
    assert pool.calls == ["block", "a", "b", "c", "d"]


def test_a_queued_call_can_be_cancelled_and_never_runs(make_pool):
    pool = make_pool()
    number = pool.register("setup")
    pool.block(number)
    unwanted, wanted = pool.submit(number, "unwanted", (), 1.0), pool.submit(number, "wanted", (), 2.0)
    assert unwanted.cancel()
    pool.gate.set()
    assert wanted.result(TIMEOUT_SECONDS) == ("wanted",)
    assert "unwanted" not in pool.calls


def test_a_call_that_kills_its_worker_is_repeated_and_then_fails(make_pool):
    pool = make_pool()
    number = pool.register("setup")
    with pytest.raises(RunError, match=r"killed its worker 3 times \(last: signal SIGKILL\); give it more memory"):
        pool.submit(number, "die", (), 0.0).result(TIMEOUT_SECONDS)
    assert pool.calls == ["die"] * MAX_ATTEMPTS
    assert pool.submit(number, "next", (), 0.0).result(TIMEOUT_SECONDS) == ("next",)


def test_the_death_of_an_idle_worker_is_not_counted_against_a_call(make_pool):
    pool = make_pool()
    number = pool.register("setup")
    pool.submit(number, "first", (), 0.0).result(TIMEOUT_SECONDS)
    for _ in range(2 * MAX_ATTEMPTS):
        pool.workers[0].kill()
        assert pool.submit(number, "again", (), 0.0).result(TIMEOUT_SECONDS) == ("again",)


def test_workers_keep_a_few_trainers(make_pool):
    pool = make_pool()
    numbers = [pool.register("setup") for _ in range(MAX_TRAINERS_PER_WORKER + 1)]
    for number in numbers[:-1] * 3:
        pool.submit(number, "x", (), 0.0).result(TIMEOUT_SECONDS)
    assert pool.installs == [(number, []) for number in numbers[:-1]]
    pool.submit(numbers[0], "x", (), 0.0).result(TIMEOUT_SECONDS)
    pool.submit(numbers[-1], "x", (), 0.0).result(TIMEOUT_SECONDS)
    assert pool.installs[-1] == (numbers[-1], [numbers[1]])  # the least recently used


def test_the_trainer_of_a_closed_federation_is_dropped(make_pool):
    pool = make_pool()
    first, second = pool.register("setup"), pool.register("setup")
    pool.submit(first, "x", (), 0.0).result(TIMEOUT_SECONDS)
    pool.release(first)
    pool.submit(second, "x", (), 0.0).result(TIMEOUT_SECONDS)
    assert pool.installs == [(first, []), (second, [first])]


def test_closing_a_federation_cancels_only_its_own_calls(make_pool):
    pool = make_pool()
    first, second = pool.register("setup"), pool.register("setup")
    pool.block(first)
    mine, other = pool.submit(first, "mine", (), 0.0), pool.submit(second, "other", (), 0.0)
    pool.release(first)
    pool.gate.set()
    assert other.result(TIMEOUT_SECONDS) == ("other",)
    with pytest.raises(CancelledError):
        mine.result(TIMEOUT_SECONDS)
    with pytest.raises(RunError, match="closed"):
        pool.submit(first, "x", (), 0.0)


def test_a_worker_that_dies_at_the_start_is_replaced(make_pool):
    pool = make_pool(1, [WorkerDied("exit code 1")] * (MAX_ATTEMPTS - 1))
    number = pool.register("setup")
    assert pool.submit(number, "x", (), 0.0).result(TIMEOUT_SECONDS) == ("x",)


@pytest.mark.parametrize("starts", [[WorkerDied("exit code 1")] * MAX_ATTEMPTS, [StartFailed("exit code 1")]])
def test_a_pool_that_cannot_start_fails_every_call(make_pool, starts):
    pool = make_pool(1, starts)
    number = pool.register("setup")
    with pytest.raises(RunError, match="could not be started: exit code 1"):
        pool.submit(number, "x", (), 0.0).result(TIMEOUT_SECONDS)
    with pytest.raises(RunError, match="could not be started"):
        pool.submit(number, "x", (), 0.0)


def test_one_worker_that_cannot_start_leaves_the_work_to_the_others(make_pool):
    pool = make_pool(2, [StartFailed("no room")])
    number = pool.register("setup")
    assert [pool.submit(number, "x", (), 0.0).result(TIMEOUT_SECONDS) for _ in range(5)] == [("x",)] * 5


def test_closing_cancels_queued_calls_and_fails_the_running_one(make_pool):
    pool = make_pool()
    number = pool.register("setup")
    running = pool.block(number)
    queued = pool.submit(number, "queued", (), 0.0)
    pool.close(now=True)
    with pytest.raises(CancelledError):
        queued.result(TIMEOUT_SECONDS)
    with pytest.raises(RunError, match="closed before this call was done"):
        running.result(TIMEOUT_SECONDS)
    with pytest.raises(RunError, match="closed"):
        pool.submit(number, "late", (), 0.0)
    pool.close()


def test_closing_normally_lets_a_call_finish(make_pool):
    pool = make_pool()
    number = pool.register("setup")
    running = pool.block(number)
    threading.Timer(0.1, pool.gate.set).start()
    pool.close()
    assert running.result(0) == ("block",)


def test_a_call_that_cannot_be_sent_fails_alone(make_pool):
    pool = make_pool()
    number = pool.register("setup")
    with pytest.raises(RunError, match="cannot be sent to a worker"):
        pool.submit(number, "x", (threading.Lock(),), 0.0).result(TIMEOUT_SECONDS)
    assert pool.submit(number, "x", (1,), 0.0).result(TIMEOUT_SECONDS) == ("x", 1)


def test_an_error_of_freshet_keeps_its_type_and_key(make_pool, monkeypatch):
    def refuse(self, number, setup, drop):
        def fail():
            raise ConfigError("model", "has no features()")

        return encode_answer(fail)

    monkeypatch.setattr(FakeWorker, "install", refuse)
    pool = make_pool()
    with pytest.raises(ConfigError, match=r"^model: has no features\(\)$") as caught:
        pool.submit(pool.register("setup"), "x", (), 0.0).result(TIMEOUT_SECONDS)
    assert caught.value.key == "model"
