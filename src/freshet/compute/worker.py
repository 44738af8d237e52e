"""What runs in other processes: a fork server, and the workers that it forks.

``python worker.py FD PATH`` is the server. It loads the libraries once, then forks a worker for every connection that
its parent sends, so that starting another one takes no time and all share the libraries' memory. It has one thread and
computes nothing: nothing that a fork would break has begun. On macOS, whose system libraries do not allow for that, it
loads nothing, and every worker loads the libraries itself.

It is started as a plain child process, not by ``multiprocessing``, so a user's script needs no ``__main__`` guard and
notebooks work. All trust the parent, which is the only one that holds the other ends. This file runs on its own:
whatever goes wrong when Freshet is imported is told to the parent.
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

#: What a worker says when it is ready for calls.
READY = b"ready"
#: What the server reports about a worker: its process id, its exit code (or why it could not be forked).
BEGUN, ENDED = "begun", "ended"
#: Whether libraries may be loaded before a fork.
LOADS_FIRST = sys.platform.startswith("linux")
#: How often, in milliseconds, a process looks whether its parent is still there.
LOOK = 1000


# ---- the server


class ForkServer:
    """Forks workers, and reports about each to the parent: first its process id, at its end its exit code."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._parent = control, os.getppid()
        self._reports: dict[int, Connection] = {}
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the poll
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._woken, self._wake = woken, wake

    def run(self) -> None:
        """Fork whenever asked, until the parent closes its end or is gone."""
        poll = select.poll()
        for descriptor in (self._control.fileno(), self._woken):
            poll.register(descriptor, select.POLLIN)
        while os.getppid() == self._parent:  # a fork of the parent may keep its end open
            ready = [descriptor for descriptor, _ in poll.poll(LOOK)]
            if self._woken in ready:
                os.read(self._woken, 1 << 10)
                self._bury()
            if self._control.fileno() in ready:
                _, descriptors, _, _ = socket.recv_fds(self._control, 1, 2)
                if not descriptors:
                    return
                self._fork(*descriptors)

    def _fork(self, descriptor: int, report_descriptor: int) -> None:
        """Start a worker on a connection."""
        report = Connection(report_descriptor, readable=False)
        try:
            pid = os.fork()
        except OSError as error:
            pid = -1
            self._tell(report, ENDED, f"the system gave no process ({error})")
        if pid == 0:
            try:
                self._forget(report)
                work(descriptor)
            except BaseException:  # must not get to the server's own loop
                traceback.print_exc()
                os._exit(1)
            os._exit(0)  # skip the slow tear-down of torch
        os.close(descriptor)
        if pid > 0:
            self._reports[pid] = report
            self._tell(report, BEGUN, pid)

    def _forget(self, report: Connection) -> None:
        """In a new worker: leave what is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for each in (report, *self._reports.values()):
            each.close()
        os.close(self._woken)
        os.close(self._wake)

    def _bury(self) -> None:
        """Report the workers that have ended."""
        for pid in list(self._reports):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with self._reports.pop(pid) as report:
                    self._tell(report, ENDED, os.waitstatus_to_exitcode(status))

    def _tell(self, report: Connection, kind: str, what: int | str) -> None:
        with suppress(OSError):  # the parent does not want to know any more
            report.send((kind, what))


class LeaveWithParent:
    """Asked for every module, knows none, and ends this process when the parent is gone: loading takes a while."""

    def __init__(self) -> None:
        self._parent = os.getppid()

    def find_spec(self, *_: object) -> None:
        if os.getppid() != self._parent:
            os._exit(0)


def load_first() -> None:
    """Load what all workers need."""
    leaving = LeaveWithParent()
    sys.meta_path.insert(0, leaving)
    gc.disable()  # loading modules makes many objects and no garbage
    with suppress(BaseException):  # the workers will fail in the same way, and tell
        from freshet.compute.host import load

        load()
    gc.freeze()  # what is shared by all workers stays untouched
    gc.enable()
    sys.meta_path.remove(leaving)


def serve(descriptor: int, path: list[str]) -> None:
    """Be the server."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business, and so it is in every worker
    sys.path[:] = path
    if LOADS_FIRST:
        load_first()
    with socket.socket(fileno=descriptor) as control:
        ForkServer(control).run()


# ---- a worker


def work(descriptor: int) -> None:
    """Answer calls until the parent closes the connection."""
    threading.Thread(target=_leave_with_parent, args=(descriptor,), daemon=True).start()
    with Connection(descriptor) as connection, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        sys.path[:] = connection.recv()
        try:
            from freshet.compute.host import Host

            host = Host()
        except BaseException:
            connection.send_bytes(traceback.format_exc().encode())
            return
        connection.send_bytes(READY)
        while True:
            connection.send_bytes(_answer(host, connection))


def _answer(host: "Host", connection: Connection) -> bytes:
    """Take one call and compute its answer."""
    from freshet.compute.share import assemble, mapped

    number, spans, drop = connection.recv()
    message = connection.recv_bytes()
    if spans is None:
        return host.call(number, message)
    handle = recv_handle(connection)
    try:
        return host.install(number, drop, lambda: assemble(message, mapped(handle, spans)))
    finally:
        os.close(handle)


def _leave_with_parent(descriptor: int) -> None:
    """End this process as soon as the other end is closed or the server is gone, even in the middle of a training."""
    server = os.getppid()
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-ups are always reported
    while not poll.poll(LOOK) and os.getppid() == server:  # a fork of the main process may keep the other end open
        pass
    os._exit(0)


if __name__ == "__main__":
    serve(int(sys.argv[1]), json.loads(sys.argv[2]))
    os._exit(0)
