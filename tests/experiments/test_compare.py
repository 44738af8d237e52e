"""Running a grid: no run is repeated or lost, and a crash does not stop the others."""

import os
import shutil
import signal

import pytest

from freshet.errors import RunError
from freshet.experiments import compare
from freshet.experiments.compare import run_grid, to_do
from freshet.experiments.store import State, Store
from freshet.federation import Federation
from freshet.runs.reader import RunDirectory

from .helpers import Diary, jobs


@pytest.fixture
def calls(monkeypatch):
    """Counts the runs that are started."""
    found = {"run": 0, "resume": 0}
    for name in found:
        real = getattr(Federation, name)

        def counted(self, *args, _name=name, _real=real, **kwargs):
            found[_name] += 1
            return _real(self, *args, **kwargs)

        monkeypatch.setattr(Federation, name, counted)
    return found


def sums(store, grid):
    return [RunDirectory(store.directory(job.key)).summary()["weights_sha256"] for job in grid]


def test_a_half_done_comparison_runs_only_what_is_missing(tmp_path, calls):
    store = Store(tmp_path)
    assert run_grid(jobs("fedasmu", (0,)), store)
    before = sums(store, jobs("fedasmu", (0,)))
    assert calls == {"run": 1, "resume": 0}
    diary = Diary()
    assert run_grid(jobs("fedasmu,fedavg", (0, 1)), store, watch=diary)
    assert calls == {"run": 4, "resume": 0}
    assert len(diary.begun) == 3
    assert sums(store, jobs("fedasmu", (0,))) == before
    assert run_grid(jobs("fedasmu,fedavg", (0, 1)), store)
    assert calls == {"run": 4, "resume": 0}


def test_another_executor_or_target_repeats_nothing(tmp_path, calls):
    store = Store(tmp_path)
    run_grid(jobs("fedavg", (0,)), store)
    run_grid(jobs("fedavg", (0,), ["run.executor=processes", "run.target=0.1", "run.workers=2"]), store)
    assert calls == {"run": 1, "resume": 0}
    run_grid(jobs("fedavg", (0,), ["fleet.ratio=6.0"]), store)
    assert calls == {"run": 2, "resume": 0}


class CtrlC(Diary):
    """Presses Ctrl-C once, in the middle of a run."""

    def on_metrics(self, row):
        if row["time"] == 8.0:
            os.kill(os.getpid(), signal.SIGINT)


def test_after_ctrl_c_the_same_command_continues_to_the_same_bits(tmp_path, calls):
    grid = jobs("fedasmu,fedavg", (0,))
    plain, store = Store(tmp_path / "plain"), Store(tmp_path / "stopped")
    run_grid(grid, plain)
    diary = CtrlC()
    assert not run_grid(grid, store, watch=diary)
    assert [state for _, state, _ in diary.done] == [State.UNFINISHED]
    assert [store.state(job.key) for job in grid] == [State.UNFINISHED, State.MISSING]
    assert len(to_do(grid, store)) == 2
    calls.update(run=0, resume=0)
    assert run_grid(grid, store)
    assert calls == {"run": 1, "resume": 1}
    assert sums(store, grid) == sums(plain, grid)


class LateCtrlC(Diary):
    """Presses Ctrl-C at the last test of a run, which ends anyway."""

    def on_metrics(self, row):
        if row["time"] == 24.0:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_at_the_last_test_of_a_run_prevents_the_next_run(tmp_path):
    grid, store = jobs("fedasmu,fedavg", (0,)), Store(tmp_path)
    assert not run_grid(grid, store, watch=LateCtrlC())
    assert [store.state(job.key) for job in grid] == [State.FINISHED, State.MISSING]
    assert run_grid(grid, store, watch=LateCtrlC()), "there is no next one"


def test_ctrl_c_in_a_run_that_crashes_prevents_the_next_run(tmp_path):
    class Unlucky(CtrlC):
        def on_metrics(self, row):
            super().on_metrics(row)
            if row["time"] == 8.0:
                raise MemoryError("no room")

    grid, store = jobs("fedasmu,fedavg", (0,)), Store(tmp_path)
    assert not run_grid(grid, store, watch=Unlucky())
    assert [store.state(job.key) for job in grid] == [State.FAILED, State.MISSING]
    assert run_grid(grid, store), "what an earlier grid heard is forgotten"


def test_an_unfinished_run_without_a_checkpoint_begins_again(tmp_path, calls):
    grid, store = jobs("fedavg", (0,)), Store(tmp_path)
    run_grid(grid, store, watch=CtrlC())
    shutil.rmtree(store.directory(grid[0].key) / "checkpoint")
    assert run_grid(grid, store)
    assert (calls["resume"], store.state(grid[0].key)) == (0, State.FINISHED)


def test_a_crashed_run_is_recorded_and_the_others_go_on(tmp_path, monkeypatch):
    grid, store, diary = jobs("fedasmu,fedavg", (0, 1)), Store(tmp_path), Diary()
    real = compare.execute

    def broken(job, *args):
        if (job.entry.label, job.seed) == ("fedasmu", 1):
            raise ZeroDivisionError("a hole in the ground")
        return real(job, *args)

    monkeypatch.setattr(compare, "execute", broken)
    assert run_grid(grid, store, watch=diary)
    states = {(job.entry.label, job.seed): store.state(job.key) for job in grid}
    assert states.pop(("fedasmu", 1)) is State.FAILED
    assert set(states.values()) == {State.FINISHED}
    assert [error for _, _, error in diary.done if error] == ["ZeroDivisionError: a hole in the ground"]
    failed = next(job for job in grid if (job.entry.label, job.seed) == ("fedasmu", 1))
    assert store.error(failed.key) == "ZeroDivisionError: a hole in the ground"
    monkeypatch.setattr(compare, "execute", real)
    assert to_do(grid, store) == []
    assert to_do(grid, store, retry=True) == [failed]
    assert run_grid(grid, store, retry=True)
    assert (store.state(failed.key), store.error(failed.key)) == (State.FINISHED, None)


def test_a_run_that_crashes_in_the_middle_is_failed_too(tmp_path):
    class Bomb(Diary):
        def on_metrics(self, row):
            if row["time"] > 8:
                raise MemoryError("no room")

    grid, store = jobs("fedavg", (0,)), Store(tmp_path)
    assert run_grid(grid, store, watch=Bomb())
    assert store.state(grid[0].key) is State.FAILED
    assert store.error(grid[0].key) == "MemoryError: no room"


def test_after_a_crash_the_next_run_gets_new_workers(monkeypatch):
    class Pool:
        closed = False

        def close(self, *, now):
            self.closed = True

    workers = compare.Workers(start=lambda *_: Pool())
    job = jobs("fedavg", (0,), ["run.executor=processes", "run.workers=2"])[0]
    first = workers.pool(job)
    assert workers.pool(job) is first
    workers.close()
    assert first.closed
    assert workers.pool(job) is not first
    assert workers.pool(jobs("fedavg", (0,))[0]) is None


def test_one_pool_serves_the_whole_grid_and_gives_the_same_bits(tmp_path, monkeypatch):
    started = []
    real = compare.start_pool

    def pool(kind, workers, address, device):
        started.append(workers)
        return real(kind, workers, address, device)

    monkeypatch.setattr(compare.Workers.__init__, "__defaults__", (pool,))
    grid = jobs("fedasmu,fedavg", (0,), ["run.executor=processes", "run.workers=1"])
    shared, serial = Store(tmp_path / "shared"), Store(tmp_path / "serial")
    assert run_grid(grid, shared)
    assert run_grid(jobs("fedasmu,fedavg", (0,)), serial)
    assert started == [1]
    assert sums(shared, grid) == sums(serial, grid)


def test_two_commands_do_not_work_in_one_folder(tmp_path):
    store = Store(tmp_path)
    with store.lock(), pytest.raises(RunError, match="another freshet command"):
        run_grid(jobs("fedavg", (0,)), Store(tmp_path))


def test_a_directory_with_edited_settings_is_not_resumed(tmp_path):
    grid, store = jobs("fedavg", (0,)), Store(tmp_path)
    run_grid(grid, store, watch=CtrlC())
    path = store.directory(grid[0].key) / "config.toml"
    path.write_text(path.read_text().replace("lr = 0.1\n", "lr = 0.2\n"))
    run_grid(grid, store)
    assert "another configuration (training.lr)" in store.error(grid[0].key)


def test_a_finished_run_is_never_removed(tmp_path):
    grid, store = jobs("fedavg", (0,)), Store(tmp_path)
    run_grid(grid, store)
    with pytest.raises(RunError, match="not repeated"):
        store.clear(grid[0].key)
