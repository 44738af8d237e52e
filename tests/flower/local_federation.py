"""Helpers for tests with real processes on this machine: waiting, inspecting, and disturbing a federation."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from freshet.flower import commands
from freshet.flower.commands import Command
from freshet.flower.folder import APP, Folder
from freshet.flower.running import LocalRun
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory

#: Seconds to wait for anything. Machines may be slow, but a hang must end.
TIMEOUT_SECONDS = 400.0


def tables(method: str, devices: int, rounds: int, **run: Any) -> dict[str, Any]:
    kind = {} if method in ("fedssmu", "fedavg", "scaffold") else {"trigger": "concurrency"}
    common: dict[str, Any] = {"rounds": rounds, "period": 1.0, "eval_every": 5.0, "checkpoint_every": 2.0}
    return {
        "method": {"name": method},
        "fleet": {"devices": devices},
        "training": {"epochs": 3},
        "data": {"train_samples": 400, "test_samples": 200},
        "run": common | kind | run,
    }


def events_of(directory: Path, *kinds: str) -> list[dict[str, Any]]:
    """The events of a run, which may still be running."""
    path = directory / "events.jsonl"
    if not path.is_file():
        return []
    lines = path.read_bytes().rpartition(b"\n")[0].splitlines()  # the last line may be incomplete
    return [event for event in map(json.loads, lines) if event["kind"] in kinds]


def events(local: LocalRun, *kinds: str, device: int | None = None) -> list[dict[str, Any]]:
    return [e for e in events_of(local.server.out, *kinds) if device is None or e.get("device") == device]


def wait_for(happened: Callable[[], Any], what: str, meanwhile: Callable[[], Any] = lambda: None) -> Any:
    """Wait until ``happened`` returns something true, and return it."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < end:
        found = happened()
        if found:
            return found
        meanwhile()
        time.sleep(0.5)
    raise AssertionError(f"{what} did not happen")


def wait_until(local: LocalRun, happened: Callable[[], Any], what: str) -> Any:
    """Wait for something while the federation runs."""

    def check_running() -> None:
        assert local.poll() is None, f"the run ended before {what}"

    return wait_for(happened, what, check_running)


def passes_audit(directory: Path) -> bool:
    """Whether the log passes the audit. The run must have ended, else its last line may be incomplete."""
    found = audit(RunDirectory(directory))
    assert found.passed, found.problem
    return True


def finished_run(local: LocalRun) -> RunDirectory:
    """Wait for the end of the run, and check its files and its log."""
    assert local.wait(TIMEOUT_SECONDS) == "finished"
    assert passes_audit(local.server.out)
    for name in ("config.toml", "world.json", "events.jsonl", "metrics.jsonl", "summary.json", "model.safetensors"):
        assert (local.server.out / name).is_file()
    return RunDirectory(local.server.out)


def checkpoints(directory: Path) -> int:
    """The number of checkpoints written so far."""
    return max((int(path.name) for path in (directory / "checkpoint").glob("[0-9]*")), default=0)


def find_processes(word: str, mark: str) -> list[int]:
    """Processes with ``word`` in their command and ``mark`` (a path of the test) in their command or environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
            if word.encode() in command and mark.encode() in command + path.with_name("environ").read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# ---- devices that stall, come late, or leave

_STALLING_APP = '''
"""A device that stalls while a file exists: before it requests the fresh model or after, in all trips or in one."""

import os
import time
from pathlib import Path

from freshet.flower.device import Device
from freshet.training.trip import LocalTrip


def stalling(name, step):
    def wait_and_step(trip):
        file = Path({folder!r}) / f"{{name}}_{{trip.assignment.device}}"
        while file.exists() or Path(f"{{file}}_{{trip.assignment.trip}}").exists():
            stalls = file.with_name(f"stalls_{{trip.assignment.device}}_{{trip.assignment.trip}}")
            stalls.write_text(str(os.getpid()))
            time.sleep(0.2)
        return step(trip)

    return wait_and_step


def recording(hurry):
    def hurry_and_record(trip):
        hurry(trip)
        (Path({folder!r}) / f"hurried_{{trip.assignment.device}}").touch()

    return hurry_and_record


LocalTrip.to_slot = stalling("before", LocalTrip.to_slot)
LocalTrip.finish = stalling("after", LocalTrip.finish)
LocalTrip.hurry = recording(LocalTrip.hurry)
app = Device().app(Path(__file__).with_name("federation.toml"))
'''


def install_stalling_app(root: Path, holds: Path, *names: str) -> None:
    """Call before a federation is made in ``root``. Device K stalls while ``holds`` has a file before_K or after_K.

    before_K_T and after_K_T stall trip T only. The file stalls_K_T says which process has stalled.
    """
    package = root / "app" / APP
    package.mkdir(parents=True)
    (package / "client_app.py").write_text(_STALLING_APP.format(folder=str(holds)))
    holds.mkdir()
    for name in names:
        (holds / name).touch()


def start_on_demand(doors: Path) -> Callable[[Folder, int], Command]:
    """Devices that start as soon as ``doors`` has a file with their number."""
    wait = 'until [ -e "$0" ]; do sleep 0.2; done; exec "$@"'

    def command(folder: Folder, node: int) -> Command:
        inner = commands.supernode(folder, node)
        return Command(inner.name, ["sh", "-c", wait, str(doors / str(node)), *inner.words], inner.environment)

    return command


# ---- a network that stalls


class StallableProxy:
    """Forwards ports of 127.0.0.2, which devices use, to those of 127.0.0.1, where the server listens."""

    HOST = "127.0.0.2"

    def __init__(self, *ports: int) -> None:
        self._flows = threading.Event()
        self._flows.set()
        self._listeners = [socket.create_server((self.HOST, port)) for port in ports]
        for listener, port in zip(self._listeners, ports, strict=True):
            threading.Thread(target=self._listen, args=(listener, port), daemon=True).start()

    def stall(self, seconds: float, meanwhile: Callable[[], Any]) -> None:
        """Stop forwarding for a while without closing any connection."""
        self._flows.clear()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            meanwhile()
            time.sleep(0.5)
        self._flows.set()

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _listen(self, listener: socket.socket, port: int) -> None:
        while True:
            try:
                near = listener.accept()[0]
            except OSError:  # closed
                return
            try:
                far = socket.create_connection(("127.0.0.1", port))
            except OSError:
                near.close()
                continue
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flows.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


# ---- the command line


def freshet(*words: str, env: dict[str, str], cwd: Path) -> str:
    """Run a command of Freshet, which must succeed. Returns its output."""
    done = subprocess.run(
        [sys.executable, "-m", "freshet", *words],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
