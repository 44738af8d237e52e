"""Memory runs out, a disk cannot be written, a clock jumps: one sentence, and no file is called damaged wrongly."""

import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from freshet import RunError
from freshet.data import archives
from freshet.runs.lifecycle import Stopwatch

from ..cli.conftest import command  # noqa: F401
from ..conftest import small
from .test_machine import disk  # noqa: F401
from .test_run_directories import SAVED, StopAt
from .test_run_directories import Stop as Stopped


class Panic(BaseException):
    """What a library in Rust raises when it finds no memory."""


def short_of_memory(*_: Any) -> None:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried")


def panic(*_: Any) -> None:
    try:
        short_of_memory()
    finally:
        raise Panic("PyObject pointer is null")


@pytest.mark.parametrize("fails", [short_of_memory, panic])
def test_torch_out_of_memory_is_one_sentence(command: Any, monkeypatch: Any, fails: Any) -> None:  # noqa: F811
    monkeypatch.setattr("freshet.cli.inspect.RunDirectory", fails)
    done = command("show", "run")
    assert (done.code, done.err) == (2, "freshet: there is not enough memory (--debug shows the traceback)\n")


def test_an_error_in_code_is_still_a_traceback(command: Any, monkeypatch: Any) -> None:  # noqa: F811
    def wrong(*_: Any) -> None:
        raise RuntimeError("the author's mistake")

    monkeypatch.setattr("freshet.cli.inspect.RunDirectory", wrong)
    with pytest.raises(RuntimeError, match="the author's mistake"):
        command("show", "run")


def test_a_file_that_does_not_fit_into_memory_is_not_called_damaged(tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise MemoryError

    with pytest.raises(MemoryError), archives.as_data_errors(tmp_path):
        full()


def test_a_read_only_folder_is_one_sentence_and_can_be_read(command: Any, disk: Path, finished: Any) -> None:  # noqa: F811
    shutil.copytree(finished("fedavg").directory, disk / "run", ignore=shutil.ignore_patterns("checkpoint"))
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for line in (["show", disk / "run"], ["audit", disk / "run"]):
        assert command(*line).code == 0
    with pytest.raises(RunError, match=r"cannot be locked: .*Read-only file system"):
        small("fedavg").resume(disk / "run", until=100)
    for line in (
        ["report", disk / "run", "-o", disk / "page.html"],
        ["export", disk / "run", "--csv", disk / "table.csv"],
        ["run", "-m", "fedavg", "--until", "10s", "-o", disk / "new"],
        ["compare", "-m", "fedavg", "--seeds", "1", "--until", "10s", "-o", disk / "grid"],
    ):
        done = command(*line)
        assert done.code == 2 and "Read-only file system" in done.err and len(done.err.strip().splitlines()) == 1, line


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of day goes back a year in the midst of a run and forward ten before it is resumed."""
    settings = SAVED | {"checkpoint_minutes": 1.0}
    whole = small("fedasmu", run=settings).run(60, out=tmp_path / "whole")
    shown = time.time

    class Jump(StopAt):
        def on_progress(self, time: float) -> None:
            if time >= 15:
                monkeypatch.setattr("time.time", lambda: shown() - 3e7)
            super().on_progress(time)

    with pytest.raises(Stopped):
        small("fedasmu", run=settings).run(60, out=tmp_path / "run", observers=[Jump(35.0)])
    monkeypatch.setattr("time.time", lambda: shown() + 3e8)
    result = small("fedasmu", run=settings).resume(tmp_path / "run")
    assert result.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert (tmp_path / "run/events.jsonl").read_bytes() == (tmp_path / "whole/events.jsonl").read_bytes()
    assert 0 <= result.summary["wall_seconds"] < 1e6


def test_real_time_comes_from_a_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch(5.0)
    monkeypatch.setattr("time.time", lambda: -1e9)
    assert 5.0 <= watch.seconds() < 60.0
