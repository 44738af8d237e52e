"""Federations of real processes on this machine: what the tests ask of them, and how they are disturbed."""

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

#: Seconds for anything that should happen; machines may be slow, and a hang must not last for ever.
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
    """The events of a run that may still be going."""
    path = directory / "events.jsonl"
    if not path.is_file():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0].splitlines()  # its end may be half a line, or half a letter
    return [event for event in map(json.loads, whole) if event["kind"] in kinds]


def events(local: LocalRun, *kinds: str, device: int | None = None) -> list[dict[str, Any]]:
    return [e for e in events_of(local.server.out, *kinds) if device is None or e.get("device") == device]


def wait_for(happened: Callable[[], Any], what: str, meanwhile: Callable[[], Any] = lambda: None) -> Any:
    """Wait for something."""
    end = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < end:
        found = happened()
        if found:
            return found
        meanwhile()
        time.sleep(0.5)
    raise AssertionError(f"{what} did not happen")


def wait_until(local: LocalRun, happened: Callable[[], Any], what: str) -> Any:
    """Wait for something while the federation goes on."""

    def goes_on() -> None:
        assert local.poll() is None, f"the run ended before {what}"

    return wait_for(happened, what, goes_on)


def passes_audit(directory: Path) -> bool:
    """Whether a log holds together; the run must have been stopped, or its last line may be half a line."""
    found = audit(RunDirectory(directory))
    assert found.passed, found.problem
    return True


def finished_run(local: LocalRun) -> RunDirectory:
    """The run at its end: whole files, and a log that adds up."""
    assert local.wait(TIMEOUT_SECONDS) == "finished"
    assert passes_audit(local.server.out)
    for name in ("config.toml", "world.json", "events.jsonl", "metrics.jsonl", "summary.json", "model.safetensors"):
        assert (local.server.out / name).is_file()
    return RunDirectory(local.server.out)


def checkpoints(directory: Path) -> int:
    """How many have been written so far."""
    return max((int(path.name) for path in (directory / "checkpoint").glob("[0-9]*")), default=0)


def find_processes(word: str, mark: str) -> list[int]:
    """Processes with a word in their command and a mark (a path of the test) in their command or environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
            if word.encode() in command and mark.encode() in command + path.with_name("environ").read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def client_processes(folder: Folder, node: int) -> list[int]:
    """Client apps of a device that train now."""
    return find_processes("flwr-clientapp", str(folder.root / "memory" / f"node_{node}"))


# ---- devices that stand still, that come late, that leave

_STILL = '''
"""A device that stands still as long as a file says so: before it asks for the fresh model, or after; in every trip,
or in one."""

import time
from pathlib import Path

from freshet.flower.device import Device
from freshet.training.trip import LocalTrip


def held(name, step):
    def slowly(trip):
        place = Path({folder!r}) / f"{{name}}_{{trip.assignment.device}}"
        while place.exists() or Path(f"{{place}}_{{trip.assignment.trip}}").exists():
            place.with_name(f"stands_{{trip.assignment.device}}_{{trip.assignment.trip}}").touch()
            time.sleep(0.2)
        return step(trip)

    return slowly


def heard(hurry):
    def told(trip):
        hurry(trip)
        (Path({folder!r}) / f"hurried_{{trip.assignment.device}}").touch()

    return told


LocalTrip.to_slot = held("before", LocalTrip.to_slot)
LocalTrip.finish = held("after", LocalTrip.finish)
LocalTrip.hurry = heard(LocalTrip.hurry)
app = Device().app(Path(__file__).with_name("federation.toml"))
'''


def install_stalling_app(root: Path, holds: Path, *names: str) -> None:
    """Before a federation is made in ``root``: its devices stand still while ``holds`` has a file before_K, after_K, or
    before_K_T, after_K_T for trip T alone; stands_K_T says that one does."""
    package = root / "app" / APP
    package.mkdir(parents=True)
    (package / "client_app.py").write_text(_STILL.format(folder=str(holds)))
    holds.mkdir()
    for name in names:
        (holds / name).touch()


def start_on_demand(doors: Path) -> Callable[[Folder, int], Command]:
    """Devices that start as soon as a file of their number is there."""
    wait = 'until [ -e "$0" ]; do sleep 0.2; done; exec "$@"'

    def command(folder: Folder, node: int) -> Command:
        inner = commands.supernode(folder, node)
        return Command(inner.name, ["sh", "-c", wait, str(doors / str(node)), *inner.words], inner.environment)

    return command


# ---- a network that stalls


class StallableProxy:
    """Carries bytes from ports of 127.0.0.2, where devices look for the server, to those of 127.0.0.1, where it is."""

    HOST = "127.0.0.2"

    def __init__(self, *ports: int) -> None:
        self._flows = threading.Event()
        self._flows.set()
        self._listeners = [socket.create_server((self.HOST, port)) for port in ports]
        for listener, port in zip(self._listeners, ports, strict=True):
            threading.Thread(target=self._listen, args=(listener, port), daemon=True).start()

    def stall(self, seconds: float, meanwhile: Callable[[], Any]) -> None:
        """Nothing gets through for a while, and no connection is closed."""
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
    """What a command of Freshet prints; it must end well."""
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
