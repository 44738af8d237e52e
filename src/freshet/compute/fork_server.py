"""The parent's side of the fork server: start it, request workers and learn when they end.

The other side is ``worker.py``. This module imports nothing slow, so a command can start the server first and load its
own libraries meanwhile.
"""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe

from freshet.compute import worker

ONE_THREAD_ENV = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class ForkedWorker:
    """A worker process. The fork server is its parent and reports its process id and its exit code.

    The report pipe stays open as long as this object. If one thread closed it while another began to wait, that thread
    would wait for whatever file gets the same descriptor next.
    """

    def __init__(self, server: "ForkServerProcess", report: Connection) -> None:
        self._server, self.report = server, report
        self._reports: dict[str, int | str] = {}
        self._over, self._lock = False, threading.Lock()

    @property
    def pid(self) -> int:
        """The process id, once it is known; 0 if the fork failed."""
        while not self._over and worker.STARTED not in self._reports:
            self._read_report(None)
        return int(self._reports.get(worker.STARTED, 0))

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended."""
        self._read_report(0.0)
        return self._over

    def wait(self, seconds: float = math.inf) -> None:
        """Wait until the process ends, at most ``seconds``."""
        deadline = time.monotonic() + seconds
        while not self._over and (left := deadline - time.monotonic()) > 0:
            self._read_report(None if left == math.inf else left)

    def kill(self) -> None:
        """Kill the process. One that has not started yet counts as ended."""
        self._read_report(0.0)
        with self._lock:
            if not self._over and worker.STARTED not in self._reports:
                self._reports[worker.ENDED], self._over = "it was no longer needed", True
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        if not self.has_ended():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def exit_description(self) -> str:
        """Describe how the process ended."""
        self.wait(30.0)  # the report follows at once
        cause = self._reports.get(worker.ENDED)
        if cause is None and worker.STARTED not in self._reports:
            cause = self._server.exit_code()
        if cause is None:
            return "it closed its connection"
        if isinstance(cause, str):
            return cause
        return f"exit code {cause}" if cause >= 0 else f"signal {signal.Signals(-cause).name}"

    def _read_report(self, seconds: float | None) -> None:
        """Wait for the next report. None follows the report of the end or the death of the server."""
        try:
            if self._over or not self.report.poll(seconds):
                return
            with self._lock:
                if not self._over and self.report.poll(0.0):  # else another thread has read it
                    kind, number = self.report.recv()
                    self._reports[kind] = number
                    self._over = kind == worker.ENDED  # never reset: it was False before
        except (EOFError, OSError):  # the server has died
            self._over = True


class ForkServerProcess:
    """The fork server's process. It ends with this object and with this process, however that ends."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-P", str(worker.__file__), str(theirs.fileno()), json.dumps(search_path())]
        try:
            self.process = subprocess.Popen(  # noqa: S603  (this interpreter, a script of this package)
                command,
                pass_fds=[theirs.fileno()],
                env=os.environ | ONE_THREAD_ENV,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal reaches the parent only
            )
        except OSError:
            self._control.close()
            raise
        finally:
            theirs.close()
        self.close = weakref.finalize(self, _stop_server, self.process, self._control, os.getpid())

    def alive(self) -> bool:
        return self.close.alive and self.process.poll() is None

    def exit_code(self) -> int | None:
        """The exit code, or None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(10.0)
        return None

    def fork(self, connection: Connection) -> ForkedWorker:
        """Request a worker that answers at this end of a connection, without waiting for it."""
        reader, theirs = Pipe(duplex=False)
        with theirs, suppress(OSError):  # if the server is dead, the closed pipe shows it
            socket.send_fds(self._control, [b"w"], [connection.fileno(), theirs.fileno()])
        return ForkedWorker(self, reader)


def _stop_server(process: "subprocess.Popen[bytes]", control: socket.socket, parent: int) -> None:
    control.close()
    if os.getpid() == parent:  # not in a fork of the parent
        process.kill()
        process.wait()


def search_path() -> list[str]:
    """The module search path of this process."""
    return [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores other types too


_early: list[ForkServerProcess] = []


def start_early() -> None:
    """Start a server for a pool that opens soon. If that fails, the pool reports it."""
    if not _early:
        with suppress(OSError):
            _early.append(ForkServerProcess())


def take_server() -> ForkServerProcess:
    """Return the server that was started early, or a new one."""
    with suppress(IndexError):
        while not (server := _early.pop()).alive():
            pass
        return server
    return ForkServerProcess()
