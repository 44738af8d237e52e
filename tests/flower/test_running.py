"""A device or a server in the foreground: whatever ends it also ends its children."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from freshet.assembly import Overrides
from freshet.config import resolve
from freshet.errors import RunError
from freshet.flower import commands, hosting
from freshet.flower.folder import init
from freshet.flower.running import LocalRun, ServerRun, Stopped, run_server, stoppable
from freshet.runs.lock import RunLock

ATTEND = """
import sys
from freshet.flower import running
from freshet.flower.commands import Command
running.DEVICE_RETRY_SECONDS = 0.1
words = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
trains = [sys.executable, "-c", "import time; time.sleep(600)"]
running.run_devices([Command("device 3", words)], Command("executor", trains), lambda text: print(text, flush=True))
"""
#: A stand-in for a SuperNode: writes its process id and keeps running.
STAYS = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(600)"
ENDS = "import os, sys; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); sys.exit(7)"


def start_device(node: str, pids: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", ATTEND, node, str(pids)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def nodes(pids: Path, count: int) -> list[int]:
    """Wait for ``count`` started processes and return their ids."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        found = pids.read_text().splitlines() if pids.exists() else []
        if len(found) >= count:
            return [int(line) for line in found]
        time.sleep(0.05)
    raise AssertionError(f"fewer than {count} were started")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_ends_the_command_and_its_supernode(number: signal.Signals, tmp_path: Path) -> None:
    watcher = start_device(STAYS, tmp_path / "pids")
    (node,) = nodes(tmp_path / "pids", 1)
    watcher.send_signal(number)
    assert watcher.wait(60) == 0
    assert not is_alive(node)


def test_supernode_is_restarted_with_a_message(tmp_path: Path) -> None:
    watcher = start_device(ENDS, tmp_path / "pids")
    assert len(set(nodes(tmp_path / "pids", 3))) >= 3
    watcher.send_signal(signal.SIGTERM)
    said, _ = watcher.communicate(timeout=60)
    assert "device 3: its SuperNode ended with code 7; restarting in" in said


def test_device_ends_when_the_run_is_over(tmp_path: Path) -> None:
    over = tmp_path / "over"
    over.touch()  # of an earlier run
    code = ATTEND.replace(
        "lambda text: print(text, flush=True))", "lambda text: print(text, flush=True), [Path(sys.argv[3])])"
    )
    command = [sys.executable, "-c", "from pathlib import Path\n" + code, STAYS, str(tmp_path / "pids"), str(over)]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    (node,) = nodes(tmp_path / "pids", 1)
    assert watcher.poll() is None and not over.exists()
    over.touch()
    said, _ = watcher.communicate(timeout=60)
    assert watcher.returncode == 0 and said == "device 3: the run is over\n" and not is_alive(node)


def test_executor_is_restarted_with_a_message(tmp_path: Path) -> None:
    code = ATTEND.replace("import time; time.sleep(600)", "import sys; sys.exit(4)")
    command = [sys.executable, "-c", code, STAYS, str(tmp_path / "pids")]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    nodes(tmp_path / "pids", 1)
    assert watcher.stdout is not None
    assert watcher.stdout.readline().startswith("its executor ended with code 4; restarting in")
    watcher.send_signal(signal.SIGTERM)
    assert watcher.wait(60) == 0


def test_several_devices_end_when_the_run_is_over_for_all(tmp_path: Path) -> None:
    over = [tmp_path / "over_3", tmp_path / "over_4"]
    code = ATTEND.replace('[Command("device 3", words)]', '[Command("device 3", words), Command("device 4", words)]')
    code = code.replace("print(text, flush=True))", "print(text, flush=True), [Path(each) for each in sys.argv[3:]])")
    words = [sys.executable, "-c", "from pathlib import Path\n" + code, STAYS, str(tmp_path / "pids")]
    watcher = subprocess.Popen([*words, *map(str, over)], stdout=subprocess.PIPE, text=True)
    started = nodes(tmp_path / "pids", 2)
    over[0].touch()
    time.sleep(1.5)
    assert watcher.poll() is None, "one of them still trains"
    over[1].touch()
    said, _ = watcher.communicate(timeout=60)
    assert said == "device 3, device 4: the run is over\n" and not any(map(is_alive, started))


def test_refused_supernode_gets_a_hint(tmp_path: Path) -> None:
    """Flower's SuperNode ends with code 0 and no reason when the server refuses its key."""
    watcher = start_device(ENDS.replace("sys.exit(7)", "sys.exit(0)"), tmp_path / "pids")
    nodes(tmp_path / "pids", 2)
    watcher.send_signal(signal.SIGTERM)
    said, _ = watcher.communicate(timeout=60)
    assert "ended with code 0 (the server refuses its key, which is unknown or revoked, or its clock" in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_stops_the_server_and_handlers_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Stopped), stoppable():
        os.kill(os.getpid(), number)
        time.sleep(60)
    assert signal.getsignal(number) == before


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with stoppable():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_second_server_of_a_folder_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"method": {"name": "fedavg"}, "fleet": {"devices": 1}}
    folder = init(tmp_path, tables, [])
    (folder.state / "deploy.pid").write_text("4711\n")
    (folder.state / "server.pid").write_text("4712\n")

    def fail_if_reached(*_: object, **__: object) -> None:
        raise AssertionError("the running federation would be disturbed")

    monkeypatch.setattr(commands, "start_server", fail_if_reached)
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


def test_next_server_may_start_after_the_first_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


class FakeChild:
    """A process that a test ends."""

    def __init__(self, command: object = None) -> None:
        self.command = SimpleNamespace(name="superlink")
        self.exit_code: int | None = None


def test_everything_of_the_server_may_die_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new server app was started before the new SuperLink listened, and that ended ``deploy server``."""
    folder = init(tmp_path, {"method": {"name": "fedavg"}, "fleet": {"devices": 1}, "run": {"until": 60.0}}, [])
    called, said, fails = list[str](), list[str](), [False, True, False]

    def call(command: commands.Command) -> list[dict]:
        called.append(command.name)
        if fails[len(called) - 1]:
            raise RunError("Flower refused `run`: Connection to the SuperLink is unavailable")
        return [{}]

    def wait_for_port(port: int, seconds: float, alive: Callable[[], bool]) -> None:
        assert alive()
        waits.append(port)

    waits: list[int] = []
    monkeypatch.setattr(commands, "start_server", lambda folder: [FakeChild(), FakeChild()])
    monkeypatch.setattr(commands, "call", call)
    monkeypatch.setattr(commands, "wait_for_port", wait_for_port)
    monkeypatch.setattr(commands, "server_process", lambda folder: None)
    monkeypatch.setattr("freshet.flower.running.Child", FakeChild)
    server = ServerRun(folder, said.append)
    (folder.state / "server.pid").write_text("1")  # the server app has run
    for child in server.children:
        child.exit_code = -9  # type: ignore[misc]
    assert server.poll() is None and server.poll() is None
    assert called == ["run"] * 3 and len(waits) == 3, "each start waits until the SuperLink listens"
    assert any("unavailable" in line for line in said) and sum("restarts left" in line for line in said) == 4
