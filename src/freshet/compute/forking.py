"""The parent's side of the fork server (``worker.py``): starting it, having workers forked, and hearing of their end.

Nothing slow is imported here, so that a command can start the server first and load its own libraries meanwhile.
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

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class Forked:
    """A worker process: not our child but the server's, which reports its process id and its exit code.

    The reports' pipe stays open as long as this object: a thread that begins to wait at the moment when another closed
    it would wait for whatever is opened next under the same number.
    """

    def __init__(self, server: "Server", report: Connection) -> None:
        self._server, self._report = server, report
        self._heard: dict[str, int | str] = {}
        self._over, self._lock = False, threading.Lock()

    @property
    def pid(self) -> int:
        """Its process id, waited for (0: it could not be forked)."""
        while not self._over and worker.BEGUN not in self._heard:
            self._hear(None)
        return int(self._heard.get(worker.BEGUN, 0))

    def ended(self) -> bool:
        """Whether it is known to be gone."""
        self._hear(0.0)
        return self._over

    def wait(self, seconds: float = math.inf) -> None:
        """Wait for its end, or so many seconds."""
        deadline = time.monotonic() + seconds
        while not self._over and (left := deadline - time.monotonic()) > 0:
            self._hear(None if left == math.inf else left)

    def kill(self) -> None:
        """End it at once; one that has not begun is not waited for any more."""
        self._hear(0.0)
        with self._lock:
            if not self._over and worker.BEGUN not in self._heard:
                self._heard[worker.ENDED], self._over = "it was not needed any more", True
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        if not self.ended():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def how_it_ended(self) -> str:
        """In words."""
        self.wait(30.0)  # the report of its end follows at once
        found = self._heard.get(worker.ENDED)
        if found is None and worker.BEGUN not in self._heard:
            found = self._server.exit_code()
        if found is None:
            return "it closed its connection"
        if isinstance(found, str):
            return found
        return f"exit code {found}" if found >= 0 else f"signal {signal.Signals(-found).name}"

    def _hear(self, seconds: float | None) -> None:
        """Wait for the next report; after that of its end, or without a server, there is none."""
        try:
            if self._over or not self._report.poll(seconds):
                return
            with self._lock:
                if not self._over and self._report.poll(0.0):  # else another thread has heard it
                    kind, number = self._report.recv()
                    self._heard[kind] = number
                    self._over = kind == worker.ENDED  # never back: it was not over before
        except (EOFError, OSError):  # the server is gone
            self._over = True


class Server:
    """The fork server's process. It ends with this object, and with this process however that ends."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-P", str(worker.__file__), str(theirs.fileno()), json.dumps(search_path())]
        try:
            self.process = subprocess.Popen(  # noqa: S603  (our own interpreter and script)
                command,
                pass_fds=[theirs.fileno()],
                env=os.environ | ONE_THREAD,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal goes to the parent alone
            )
        except OSError:
            self._control.close()
            raise
        finally:
            theirs.close()
        self.close = weakref.finalize(self, _end, self.process, self._control, os.getpid())

    def alive(self) -> bool:
        return self.close.alive and self.process.poll() is None

    def exit_code(self) -> int | None:
        """How it ended, if it has."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(10.0)
        return None

    def fork(self, connection: Connection) -> Forked:
        """Have a worker forked that answers at this end of a connection; does not wait for it."""
        ours, theirs = Pipe(duplex=False)
        with theirs, suppress(OSError):  # a server that is gone: nobody has the other end then, which tells all
            socket.send_fds(self._control, [b"w"], [connection.fileno(), theirs.fileno()])
        return Forked(self, ours)


def _end(process: "subprocess.Popen[bytes]", control: socket.socket, parent: int) -> None:
    control.close()
    if os.getpid() == parent:  # not in a fork of it
        process.kill()
        process.wait()


def search_path() -> list[str]:
    """Where modules are found."""
    return [entry for entry in sys.path if isinstance(entry, str)]  # Python ignores others, too


_early: list[Server] = []


def start_early() -> None:
    """Start a server for a pool that will be opened soon; if there is no process for it, the pool will say so."""
    if not _early:
        with suppress(OSError):
            _early.append(Server())


def a_server() -> Server:
    """The server that was started early, or a new one."""
    with suppress(IndexError):
        while not (server := _early.pop()).alive():
            pass
        return server
    return Server()
