"""The queue, the repeated attempts and the end, with workers that are only pretended."""

import pickle
import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest

from freshet.compute.host import answer
from freshet.compute.pool import ATTEMPTS, KEPT_TRAINERS, Pool, StartFailed, WorkerDied
from freshet.errors import ConfigError, RunError

WAIT = 240


class Pretender:
    """Calls what it is sent, in this process; ``script`` decides how it starts and what it survives."""

    def __init__(self, pool: "Stage") -> None:
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
        return answer(lambda: None)

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
        return answer(lambda: (name, *arguments))

    def kill(self) -> None:
        self.dead.set()

    def discard(self) -> None:
        self.dead.set()


class Stage(Pool[Any]):
    """A pool of pretenders."""

    def __init__(self, workers: int = 1, starts: list[Exception | None] | None = None) -> None:
        super().__init__(workers)
        self.starts, self.script_lock = starts or [], threading.Lock()
        self.calls: list[str] = []
        self.installs: list[tuple[int, list[int]]] = []
        self.gate, self.blocked = threading.Event(), threading.Event()
        self._open()

    def _launch(self) -> Pretender:
        return Pretender(self)

    def _publish(self, setup: Any) -> Any:
        return setup

    def block(self, number: int):
        """Keep the only worker busy until ``gate`` is set."""
        future = self.submit(number, "block", (), -1.0)
        assert self.blocked.wait(WAIT)
        return future


@pytest.fixture
def stage():
    pools = []

    def build(*args, **kwargs) -> Stage:
        pools.append(Stage(*args, **kwargs))
        return pools[-1]

    yield build
    for pool in pools:
        pool.gate.set()
        pool.close(now=True)
        assert not any(thread.is_alive() for thread in pool._threads)


def test_the_earliest_due_goes_first_and_ties_in_order(stage):
    pool = stage()
    number = pool.register("setup")
    pool.block(number)
    futures = [pool.submit(number, name, (), due) for name, due in (("c", 5), ("a", 1), ("b", 3), ("d", 5))]
    pool.gate.set()
    assert [future.result(WAIT)[0] for future in futures] == ["c", "a", "b", "d"]
    assert pool.calls == ["block", "a", "b", "c", "d"]


def test_queued_work_can_be_cancelled_and_is_never_done(stage):
    pool = stage()
    number = pool.register("setup")
    pool.block(number)
    unwanted, wanted = pool.submit(number, "unwanted", (), 1.0), pool.submit(number, "wanted", (), 2.0)
    assert unwanted.cancel()
    pool.gate.set()
    assert wanted.result(WAIT) == ("wanted",)
    assert "unwanted" not in pool.calls


def test_a_task_that_kills_its_worker_is_repeated_and_then_given_up(stage):
    pool = stage()
    number = pool.register("setup")
    with pytest.raises(RunError, match=r"ended its worker 3 times \(last: signal SIGKILL\); is there enough memory"):
        pool.submit(number, "die", (), 0.0).result(WAIT)
    assert pool.calls == ["die"] * ATTEMPTS
    assert pool.submit(number, "next", (), 0.0).result(WAIT) == ("next",)


def test_a_death_in_idleness_is_no_tasks_fault(stage):
    pool = stage()
    number = pool.register("setup")
    pool.submit(number, "first", (), 0.0).result(WAIT)
    for _ in range(2 * ATTEMPTS):
        pool.workers[0].kill()
        assert pool.submit(number, "again", (), 0.0).result(WAIT) == ("again",)


def test_workers_keep_a_few_trainers(stage):
    pool = stage()
    numbers = [pool.register("setup") for _ in range(KEPT_TRAINERS + 1)]
    for number in numbers[:-1] * 3:
        pool.submit(number, "x", (), 0.0).result(WAIT)
    assert pool.installs == [(number, []) for number in numbers[:-1]]
    pool.submit(numbers[0], "x", (), 0.0).result(WAIT)
    pool.submit(numbers[-1], "x", (), 0.0).result(WAIT)
    assert pool.installs[-1] == (numbers[-1], [numbers[1]])  # the one that was not used for longest


def test_the_trainer_of_a_federation_that_is_over_makes_room(stage):
    pool = stage()
    first, second = pool.register("setup"), pool.register("setup")
    pool.submit(first, "x", (), 0.0).result(WAIT)
    pool.release(first)
    pool.submit(second, "x", (), 0.0).result(WAIT)
    assert pool.installs == [(first, []), (second, [first])]


def test_a_federation_that_is_over_takes_only_its_own_tasks_along(stage):
    pool = stage()
    first, second = pool.register("setup"), pool.register("setup")
    pool.block(first)
    mine, other = pool.submit(first, "mine", (), 0.0), pool.submit(second, "other", (), 0.0)
    pool.release(first)
    pool.gate.set()
    assert other.result(WAIT) == ("other",)
    with pytest.raises(CancelledError):
        mine.result(WAIT)
    with pytest.raises(RunError, match="closed"):
        pool.submit(first, "x", (), 0.0)


def test_deaths_at_the_start_are_repeated_only_so_often(stage):
    pool = stage(1, [WorkerDied("exit code 1")] * (ATTEMPTS - 1))
    number = pool.register("setup")
    assert pool.submit(number, "x", (), 0.0).result(WAIT) == ("x",)


@pytest.mark.parametrize("starts", [[WorkerDied("exit code 1")] * ATTEMPTS, [StartFailed("exit code 1")]])
def test_a_pool_that_cannot_start_tells_everybody(stage, starts):
    pool = stage(1, starts)
    number = pool.register("setup")
    with pytest.raises(RunError, match="could not be started: exit code 1"):
        pool.submit(number, "x", (), 0.0).result(WAIT)
    with pytest.raises(RunError, match="could not be started"):
        pool.submit(number, "x", (), 0.0)


def test_one_worker_that_cannot_start_leaves_the_work_to_the_others(stage):
    pool = stage(2, [StartFailed("no room")])
    number = pool.register("setup")
    assert [pool.submit(number, "x", (), 0.0).result(WAIT) for _ in range(5)] == [("x",)] * 5


def test_closing_gives_up_what_waits_and_what_runs(stage):
    pool = stage()
    number = pool.register("setup")
    running = pool.block(number)
    queued = pool.submit(number, "queued", (), 0.0)
    pool.close(now=True)
    with pytest.raises(CancelledError):
        queued.result(WAIT)
    with pytest.raises(RunError, match="closed before this task was done"):
        running.result(WAIT)
    with pytest.raises(RunError, match="closed"):
        pool.submit(number, "late", (), 0.0)
    pool.close()


def test_closing_without_haste_lets_a_task_finish(stage):
    pool = stage()
    number = pool.register("setup")
    running = pool.block(number)
    threading.Timer(0.1, pool.gate.set).start()
    pool.close()
    assert running.result(0) == ("block",)


def test_arguments_that_cannot_be_sent_fail_alone(stage):
    pool = stage()
    number = pool.register("setup")
    with pytest.raises(RunError, match="cannot be sent to a worker"):
        pool.submit(number, "x", (threading.Lock(),), 0.0).result(WAIT)
    assert pool.submit(number, "x", (1,), 0.0).result(WAIT) == ("x", 1)


def test_an_error_of_ours_arrives_as_it_was(stage, monkeypatch):
    def refuse(self, number, setup, drop):
        def fail():
            raise ConfigError("model", "has no features()")

        return answer(fail)

    monkeypatch.setattr(Pretender, "install", refuse)
    pool = stage()
    with pytest.raises(ConfigError, match=r"^model: has no features\(\)$") as caught:
        pool.submit(pool.register("setup"), "x", (), 0.0).result(WAIT)
    assert caught.value.key == "model"
