"""Runs and supervises a deployment: the server or a device in the foreground, or a whole federation on this machine."""

import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from freshet.errors import RunError
from freshet.flower import commands, status
from freshet.flower.commands import Child, Command
from freshet.flower.folder import Folder, init, write_made_app
from freshet.runs.lifecycle import interruptible
from freshet.runs.lock import RunLock
from freshet.runs.reader import ENDED, METRICS, SUMMARY, LineFollower
from freshet.runs.writer import RunWriter, default_directory

Say = Callable[[str], None]
_POLL_SECONDS = 0.5
#: Seconds between two lines about the progress of a run.
PROGRESS_SECONDS = 10.0
#: Seconds that a server app may take to start, and seconds before a SuperNode is restarted.
SERVER_APP_TIMEOUT_SECONDS, DEVICE_RETRY_SECONDS = 300.0, 5.0
#: Why a SuperNode ends by itself.
REFUSED_HINT = " (the server refuses its key, which is unknown or revoked, or its clock; access.log on the server says)"


class Stopped(Exception):
    """A signal asked this process to end."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise ``Stopped`` on Ctrl-C, SIGTERM and a closed terminal, except for ignored signals (nohup)."""

    def handler(*_: Any) -> None:
        raise Stopped

    ends = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {each: signal.signal(each, handler) for each in ends if signal.getsignal(each) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class ServerRun:
    """A server with its run: SuperLink, executor and server app. Restarts what dies, up to ``restarts`` times."""

    def __init__(self, folder: Folder, say: Say, accept_changes: bool = False) -> None:
        self.folder, self.say, self.out = folder, say, folder.out()
        self._accept_changes = accept_changes
        self.children = commands.start_server(folder)
        self._restarts = folder.server().restarts
        self._started_at = 0.0
        try:
            self._start_run()
        except BaseException:
            commands.stop(self.children)
            raise

    def _start_run(self) -> None:
        """Start the server app. The SuperLink may have been restarted a moment ago."""
        link = self.children[0]
        commands.wait_for_port(
            self.folder.server().port, commands.FLOWER_TIMEOUT_SECONDS, lambda: link.exit_code is None
        )
        for name in ("server.pid", "server.error"):
            (self.folder.state / name).unlink(missing_ok=True)
        commands.call(commands.run(self.folder, self._accept_changes))
        self._started_at = time.monotonic()

    def poll(self) -> str | None:
        """Restart what has died. Returns the status of the run once it has ended, else None."""
        status = self.status()
        if status is not None:
            return status
        for place, child in enumerate(self.children):
            if child.exit_code is not None:
                self._use_restart(f"{child.command.name} ended with code {child.exit_code}")
                self.children[place] = Child(child.command)
        if commands.server_process(self.folder) is None and not self._starting():
            status = self.status()  # it may have ended since the first check
            failed = self.folder.state / "server.error"
            if failed.is_file():
                raise RunError(f"the server app failed: {failed.read_text(encoding='utf-8').strip()}")
            if status is None:
                self._use_restart("the server app died")
                try:
                    self._start_run()
                except RunError as problem:  # the SuperLink has died as well; the next poll restarts both
                    self._started_at = -math.inf
                    self.say(str(problem))
        return status

    def status(self) -> str | None:
        path = self.out / SUMMARY
        started = (self.folder.state / "server.pid").exists()  # else the summary is from an earlier part of the run
        if not started or not path.is_file() or commands.server_process(self.folder) is not None:
            return None
        return str(json.loads(path.read_text(encoding="utf-8")).get("status"))

    def _starting(self) -> bool:
        started = (self.folder.state / "server.pid").exists()
        return not started and time.monotonic() - self._started_at < SERVER_APP_TIMEOUT_SECONDS

    def _use_restart(self, what: str) -> None:
        log = self.folder.state / "logs"
        if not self._restarts:
            raise RunError(f"{what}, and no restarts are left; see {log}")
        self._restarts -= 1
        self.say(f"{what}; restarting, {self._restarts} restarts left (logs: {log})")

    def stop(self) -> None:
        """Stop the server app first, so that it can write its checkpoint and summary."""
        pid = commands.server_process(self.folder)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
            end = time.monotonic() + 6 * commands.STOP_TIMEOUT_SECONDS
            while time.monotonic() < end and commands.server_process(self.folder) == pid:
                time.sleep(0.2)
        commands.stop(self.children)


def run_server(folder: Folder, say: Say, accept_changes: bool = False) -> str:
    """Run a server in the foreground until its run has ended or it is stopped. Returns the run's status."""
    own = folder.state / "deploy.pid"
    with RunLock(folder.state), stoppable():  # a second server would end the run of the first
        server = None
        try:
            own.write_text(f"{os.getpid()}\n", encoding="ascii")
            server = ServerRun(folder, say, accept_changes)
            say(f"the federation runs; run directory: {server.out}")
            progress = ProgressPrinter(folder, say)
            while (ended := server.poll()) is None:
                progress()
                time.sleep(_POLL_SECONDS)
            return ended
        except Stopped:
            return "interrupted"
        finally:
            if server is not None:
                server.stop()
            own.unlink(missing_ok=True)


def run_devices(nodes: Sequence[Command], executor: Command, say: Say, over: Sequence[Path] = ()) -> None:
    """Run devices in the foreground: their SuperNodes, and the executor that trains for all of them.

    What ends is restarted, until a signal stops this or until the files ``over`` appear, which say that the run is
    over. A SuperNode that returns before the SuperLink has noticed its absence is refused for about a minute.
    """
    for path in over:
        path.unlink(missing_ok=True)  # of an earlier run
    children: dict[str, Child] = {}
    restarts: dict[str, float] = {}
    with interruptible() as interrupted:  # polled, not raised: a signal must not leave a child behind
        try:
            for command in (*nodes, executor):
                children[command.name] = Child(command)
            while not interrupted():
                if over and all(path.exists() for path in over):
                    say(f"{', '.join(command.name for command in nodes)}: the run is over")
                    return
                for name, child in children.items():
                    if child.exit_code is not None and name not in restarts:
                        hint = REFUSED_HINT if child.exit_code == 0 and child.command is not executor else ""
                        what = "its executor" if child.command is executor else f"{name}: its SuperNode"
                        delay = DEVICE_RETRY_SECONDS
                        say(f"{what} ended with code {child.exit_code}{hint}; restarting in {delay:g} s")
                        restarts[name] = time.monotonic() + delay
                    if time.monotonic() >= restarts.get(name, math.inf):
                        del restarts[name]
                        children[name] = Child(child.command)
                time.sleep(_POLL_SECONDS)
        finally:
            commands.stop(list(children.values()))


class LocalRun:
    """A whole federation on this machine, for trials and tests."""

    def __init__(
        self,
        root: Path,
        tables: Mapping[str, Any],
        out: Path,
        say: Say,
        server: Mapping[str, Any] | None = None,
        devices: Callable[[Folder, int], Command] | None = None,
    ) -> None:
        ports = free_ports(2 + int(tables["fleet"]["devices"]))
        given = {"port": ports[0], "fresh_port": ports[1], "out": str(out.absolute()), "farewell": 0.0}
        given |= dict(server or {})  # its devices are stopped with it
        self.folder = init(root, tables, [], given)
        self.say = say
        self._command, self._ports = devices or commands.supernode, ports[2:]
        self._lock = RunLock(self.folder.state)
        try:
            self.server = ServerRun(self.folder, say)
        except BaseException:
            self._lock.release()
            raise
        nodes = range(len(self._ports))
        commands.make_task_secrets(self.folder, nodes)
        self.devices = [Child(self.command(node)) for node in nodes]
        self.executor = Child(self._executor())
        self._ended: dict[int, float] = {}

    def _executor(self) -> Command:
        """All devices may train at once, as on machines of their own."""
        log = self.folder.state / "logs" / "executor.log"
        ports = dict(enumerate(self._ports))
        return replace(commands.executor(self.folder, ports, trainers=len(ports), threads=1), log=log)

    def command(self, node: int) -> Command:
        command = self._command(self.folder, node)
        words = list(command.words)
        words[words.index("--port") + 1] = str(self._ports[node])
        log = self.folder.state / "logs" / f"device_{node}.log"
        return Command(command.name, words, command.environment, log)

    def poll(self) -> str | None:
        """Restart devices that have died. Returns the status of the run once it has ended, else None."""
        for node, child in enumerate(self.devices):
            if child.exit_code is None:
                continue
            if time.monotonic() - self._ended.setdefault(node, time.monotonic()) >= DEVICE_RETRY_SECONDS:
                del self._ended[node]
                self.devices[node] = Child(child.command)
        if self.executor.exit_code is not None:
            self.say(f"the devices' executor ended with code {self.executor.exit_code}; restarting")
            self.executor = Child(self.executor.command)
        return self.server.poll()

    def wait(self, seconds: float, each: Callable[[], None] = lambda: None) -> str:
        """Wait until the run has ended. Returns its status."""
        end = time.monotonic() + seconds
        while (status := self.poll()) is None:
            each()
            if time.monotonic() > end:
                raise RunError(f"the run did not end within {seconds:g} s; see {self.folder.state / 'logs'}")
            time.sleep(_POLL_SECONDS)
        return status

    def stop(self) -> None:
        self.server.stop()
        commands.stop([*self.devices, self.executor])
        self._lock.release()


def free_ports(count: int) -> list[int]:
    """Unused ports below the range that systems use for outgoing connections."""
    found = list[int]()
    with contextlib.ExitStack() as held:
        while len(found) < count:
            each, port = held.enter_context(socket.socket()), 20_000 + secrets.randbelow(12_000)
            with contextlib.suppress(OSError):  # taken
                each.bind(("127.0.0.1", port))
                found.append(port)
    return found


#: Seconds that the start and the end of a run may take beyond its length.
LOCAL_MARGIN_SECONDS = 300.0


def score_text(row: Mapping[str, Any]) -> str:
    """The score in a row of metrics, as text."""
    name = str(row.get("metric", "accuracy"))
    return f"{name} {row[name]:.3f}" if isinstance(row.get(name), int | float) else f"{name} –"


class ProgressPrinter:
    """Prints how far a run is when something has happened, at most every ``PROGRESS_SECONDS``."""

    def __init__(self, folder: Folder, say: Say) -> None:
        self._path, self._say = folder.status, say
        self._last: tuple[Any, ...] = ()
        self._printed_at = -math.inf

    def __call__(self) -> None:
        if time.monotonic() - self._printed_at < PROGRESS_SECONDS:
            return
        found = status.read(self._path)
        if found is None or not found["running"]:
            return
        news = (found["uploads"], found["waiting_for"], status.online_count(found))
        if news != self._last:
            self._last, self._printed_at = news, time.monotonic()
            self._say(status.progress_line(found))


class MetricsPrinter:
    """Prints each new row of a run's metrics."""

    def __init__(self, out: Path, say: Say) -> None:
        self._metrics, self._say, self._seen = LineFollower(out / METRICS), say, 0

    def __call__(self) -> None:
        self._metrics.read()
        for row in self._metrics.rows[self._seen :]:
            self._say(
                f"{row['time']:6.1f} s  version {row['version']:4d}  {row['uploads']:4d} uploads  {score_text(row)}"
            )
        self._seen = max(self._seen, len(self._metrics.rows))


def run_local(
    tables: Mapping[str, Any],
    out: Path | None,
    keep: Path | None,
    server: Mapping[str, Any],
    dry_run: bool,
    say: Say,
    trainer: str = "",
    made_by: str = "",
) -> tuple[Path | None, str]:
    """Run a whole federation, or print its commands. Returns the run directory and status. Failures keep the logs.

    ``made_by`` names the user's function that makes the federation (``module:function``).
    """
    folder = keep or Path(tempfile.mkdtemp(prefix="freshet-deploy-"))
    if made_by:
        write_made_app(folder / "app", made_by, Path.cwd())
    if dry_run:
        made = init(folder, tables, [], server)
        devices = range(int(tables["fleet"]["devices"]))
        registrations = [commands.register(made, node) for node in devices]
        supernodes = [commands.supernode(made, node, trainer=trainer) for node in devices]
        ports = {node: commands.node_port(made, node) for node in devices}
        executor = commands.executor(made, ports, trainers=len(ports), threads=1)
        for command in [*commands.superlink(made), *registrations, *supernodes, executor, commands.run(made)]:
            print(command)
        if keep is None:
            shutil.rmtree(folder)
        return None, ""
    name, seed = str(tables["method"]["name"]), int(tables["run"].get("seed", 0))
    directory = out or default_directory(name, seed)
    RunWriter.check_empty(directory)
    say(f"starting a SuperLink and {tables['fleet']['devices']} SuperNodes; keys and logs are in {folder}")
    local, status = None, "failed"
    with stoppable():
        try:
            local = LocalRun(folder, tables, directory, say, server, partial(commands.supernode, trainer=trainer))
            seconds = float(tables["run"].get("until") or 0.0)
            status = local.wait(
                seconds + LOCAL_MARGIN_SECONDS if seconds else 7 * 86400.0, MetricsPrinter(directory, say)
            )
        except Stopped:
            status = "interrupted"
        finally:
            if local is not None:
                local.stop()
    if keep is None and status in ENDED:
        shutil.rmtree(folder, ignore_errors=True)
    if status not in (*ENDED, "interrupted"):
        raise RunError(f"the run ended with status {status}; see {folder / 'state' / 'logs'}")
    return directory, status
