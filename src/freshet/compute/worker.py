"""The fork server and its workers: the code that runs in the child processes.

``python worker.py FD PATH`` is the fork server. It loads the libraries once and forks a worker for every connection
that its parent sends. A worker starts at once, and all workers share the libraries' memory. The server has one thread
and computes nothing, so a fork is safe. On macOS the system libraries do not survive a fork. There the server loads
nothing, and every worker loads the libraries itself.

The server is a plain child process, not one of ``multiprocessing``. A user's script therefore needs no ``__main__``
guard, and notebooks work. Server and workers trust the parent, which alone holds the other ends of their connections.
This file imports Freshet late, so that it can report a failed import to the parent.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freshet.compute.host import Host

#: A worker sends this when it is ready for calls.
READY = b"ready"
#: Kinds of reports about a worker: its process id, and its exit code (or why the fork failed).
STARTED, ENDED = "started", "ended"
#: Whether libraries may be loaded before a fork.
PRELOADS = sys.platform.startswith("linux")
#: How often a process checks that its parent is alive.
POLL_MILLISECONDS = 1000


# ---- the server


class ForkServer:
    """Forks workers and reports each to the parent: first its process id, at the end its exit code."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._parent = control, os.getppid()
        self._reports: dict[int, Connection] = {}
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # interrupts the poll
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._woken, self._wake = woken, wake

    def run(self) -> None:
        """Fork on request until the parent closes its end or dies."""
        poll = select.poll()
        for descriptor in (self._control.fileno(), self._woken):
            poll.register(descriptor, select.POLLIN)
        while os.getppid() == self._parent:  # a fork of the parent may hold its end open
            ready = [descriptor for descriptor, _ in poll.poll(POLL_MILLISECONDS)]
            if self._woken in ready:
                os.read(self._woken, 1 << 10)
                self._reap()
            if self._control.fileno() in ready:
                _, descriptors, _, _ = socket.recv_fds(self._control, 1, 2)
                if not descriptors:
                    return
                self._fork(*descriptors)

    def _fork(self, descriptor: int, report_descriptor: int) -> None:
        """Fork a worker that serves a connection."""
        report = Connection(report_descriptor, readable=False)
        try:
            pid = os.fork()
        except OSError as error:
            pid = -1
            self._send_report(report, ENDED, f"the system could not start a process ({error})")
        if pid == 0:
            try:
                self._close_inherited(report)
                work(descriptor)
            except BaseException:  # must not return to the server's loop
                traceback.print_exc()
                os._exit(1)
            os._exit(0)  # skip torch's slow teardown
        os.close(descriptor)
        if pid > 0:
            self._reports[pid] = report
            self._send_report(report, STARTED, pid)

    def _close_inherited(self, report: Connection) -> None:
        """In a new worker, close what belongs to the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for each in (report, *self._reports.values()):
            each.close()
        os.close(self._woken)
        os.close(self._wake)

    def _reap(self) -> None:
        """Reap and report the workers that have ended."""
        for pid in list(self._reports):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with self._reports.pop(pid) as report:
                    self._send_report(report, ENDED, os.waitstatus_to_exitcode(status))

    def _send_report(self, report: Connection, kind: str, value: int | str) -> None:
        with suppress(OSError):  # the parent no longer listens
            report.send((kind, value))


class ExitWithParent:
    """An import hook that finds nothing and ends this process when the parent is gone, since imports take long."""

    def __init__(self) -> None:
        self._parent = os.getppid()

    def find_spec(self, *_: object) -> None:
        if os.getppid() != self._parent:
            os._exit(0)


def preload() -> None:
    """Load what all workers need."""
    hook = ExitWithParent()
    sys.meta_path.insert(0, hook)
    gc.disable()  # imports make many objects and no garbage
    with suppress(BaseException):  # the workers will fail alike, and report it
        from freshet.compute.host import preload_modules

        preload_modules()
    gc.freeze()  # keeps the pages that all workers share untouched
    gc.enable()
    sys.meta_path.remove(hook)


def serve(descriptor: int, path: list[str]) -> None:
    """Run the fork server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C; workers inherit this
    sys.path[:] = path
    if PRELOADS:
        preload()
    with socket.socket(fileno=descriptor) as control:
        ForkServer(control).run()


# ---- a worker


def work(descriptor: int) -> None:
    """Answer calls until the parent closes the connection."""
    threading.Thread(target=_exit_with_parent, args=(descriptor,), daemon=True).start()
    with Connection(descriptor) as connection, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        sys.path[:], place = connection.recv()
        try:
            from freshet.compute.host import Host

            host = Host(place)
        except BaseException:
            connection.send_bytes(traceback.format_exc().encode())
            return
        connection.send_bytes(READY)
        while True:
            connection.send_bytes(_answer(host, connection))


def _answer(host: "Host", connection: Connection) -> bytes:
    """Receive one call and compute its answer."""
    from freshet.compute.share import map_blocks, unpack_setup

    number, spans, drop = connection.recv()
    message = connection.recv_bytes()
    if spans is None:
        return host.call(number, message)
    handle = recv_handle(connection)
    try:
        return host.install(number, drop, lambda: unpack_setup(message, map_blocks(handle, spans)))
    finally:
        os.close(handle)


def _exit_with_parent(descriptor: int) -> None:
    """End this process as soon as the other end is closed or the server is gone, even during training."""
    server = os.getppid()
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-ups are always reported
    while not poll.poll(POLL_MILLISECONDS) and os.getppid() == server:  # a fork of the main process may hold it open
        pass
    os._exit(0)


if __name__ == "__main__":
    serve(int(sys.argv[1]), json.loads(sys.argv[2]))
    os._exit(0)
