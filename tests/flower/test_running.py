"""A device or a server in the foreground: whatever ends it, what it started goes with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from freshet.assembly import Overrides
from freshet.config import resolve
from freshet.errors import RunError
from freshet.flower import commands, hosting
from freshet.flower.folder import init
from freshet.flower.running import LocalRun, Stopped, run_server, stoppable
from freshet.runs.lock import RunLock

ATTEND = """
import sys
from freshet.flower import running
from freshet.flower.commands import Command
running.DEVICE_RETRY_SECONDS = 0.1
words = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
running.run_device(Command("device 3", words), lambda text: print(text, flush=True))
"""
#: A stand-in for a SuperNode: says who it is, and stays.
STAYS = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"
ENDS = "import os, sys; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); sys.exit(7)"


def attending(node: str, told: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", ATTEND, node, str(told)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def nodes(told: Path, count: int) -> list[int]:
    """The processes that were started, when there are so many."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        found = told.read_text().splitlines() if told.exists() else []
        if len(found) >= count:
            return [int(line) for line in found]
        time.sleep(0.05)
    raise AssertionError(f"fewer than {count} were started")


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_both(number: signal.Signals, tmp_path: Path) -> None:
    watcher = attending(STAYS, tmp_path / "told")
    (node,) = nodes(tmp_path / "told", 1)
    watcher.send_signal(number)
    assert watcher.wait(60) == 0
    assert not lives(node)


def test_a_node_that_ends_is_started_again_and_that_is_said(tmp_path: Path) -> None:
    watcher = attending(ENDS, tmp_path / "told")
    assert len(set(nodes(tmp_path / "told", 3))) >= 3
    watcher.send_signal(signal.SIGTERM)
    said, _ = watcher.communicate(timeout=60)
    assert "device 3: its SuperNode ended with code 7; restarting in" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_server_hears_of_it_too_and_its_signals_are_as_before(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Stopped), stoppable():
        os.kill(os.getpid(), number)
        time.sleep(60)
    assert signal.getsignal(number) == before


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with stoppable():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_server_of_a_folder_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"method": {"name": "fedavg"}, "fleet": {"devices": 1}}
    folder = init(tmp_path, tables, [])
    (folder.state / "deploy.pid").write_text("4711\n")
    (folder.state / "server.pid").write_text("4712\n")

    def reached(*_: object, **__: object) -> None:
        raise AssertionError("the federation that runs would be disturbed")

    monkeypatch.setattr(commands, "start_server", reached)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    config = resolve(tables | {"run": {"until": 7.0}})
    with RunLock(folder.state):
        with pytest.raises(RunError, match=r"state is in use by process \d+ on .*; wait for it, or stop it"):
            run_server(folder, print)
        with pytest.raises(RunError, match="state is in use"):
            LocalRun(tmp_path, tables, tmp_path / "run", print)
        with pytest.raises(RunError, match="state is in use"):
            hosting.host(config, Overrides(), tmp_path, [], {})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_server_that_has_ended_lets_the_next_one_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RunError("no SuperLink here")

    monkeypatch.setattr(commands, "start_server", fails)
    tables = {"method": {"name": "fedavg"}, "fleet": {"devices": 1}}
    folder = init(tmp_path, tables, [])
    for _ in range(2):
        with pytest.raises(RunError, match="no SuperLink here"):
            run_server(folder, print)
        with pytest.raises(RunError, match="no SuperLink here"):
            LocalRun(tmp_path, tables, tmp_path / "run", print)
    assert not (folder.state / "deploy.pid").exists()
