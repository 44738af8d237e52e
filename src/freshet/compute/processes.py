"""Training in worker processes that live as long as the pool.

Workers map the data from a file without a name. Weights travel over socket pairs. Workers are forked from a server that
has loaded the libraries (``fork_server.py``, ``worker.py``). A worker ends as soon as the other end of its socket is
closed, so it never outlives its parent, however that ends.
"""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle

from freshet.compute import worker
from freshet.compute.fork_server import ForkServerProcess, search_path, take_server
from freshet.compute.pool import Pool, StartFailed, WorkerDied
from freshet.compute.share import BlockFile, pack_setup
from freshet.errors import RunError
from freshet.training.trainer import Setup


@dataclass(frozen=True)
class SetupFile:
    """A setup with its large arrays in a file that all workers map."""

    message: bytes
    file: BlockFile


class ProcessWorker:
    """One process and the connection to it."""

    def __init__(self, server: ForkServerProcess, place: int) -> None:
        ours, theirs = Pipe()
        self._connection: Connection = ours
        self._close_lock = threading.Lock()
        try:
            ours.send((search_path(), place))
            with theirs:
                self.process = server.fork(theirs)
        except OSError as error:
            ours.close()
            raise WorkerDied(f"the system could not start a process ({error})") from None

    def wait_ready(self) -> None:
        answer = self._exchange(lambda: None)
        if answer != worker.READY:
            raise StartFailed(f"it cannot import Freshet\n{answer.decode(errors='replace')}")

    def alive(self) -> bool:
        return not self.process.has_ended()

    def install(self, number: int, setup: SetupFile, drop: list[int]) -> bytes:
        def send() -> None:
            self._connection.send((number, setup.file.spans, drop))
            self._connection.send_bytes(setup.message)
            send_handle(self._connection, setup.file.descriptor, self.process.pid)

        return self._exchange(send)

    def call(self, number: int, content: bytes) -> bytes:
        def send() -> None:
            self._connection.send((number, None, ()))
            self._connection.send_bytes(content)

        return self._exchange(send)

    def _exchange(self, send: Callable[[], None]) -> bytes:
        """Send a message and wait for the answer."""
        try:
            send()
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            raise WorkerDied(self.process.exit_description()) from None
        except BaseException:  # half a message may be sent; this worker is lost
            self.kill()
            raise

    def kill(self) -> None:
        self.process.kill()
        with self._close_lock, suppress(OSError):
            line = socket.socket(fileno=os.dup(self._connection.fileno()))
            line.shutdown(socket.SHUT_RDWR)  # ends a waiting thread, and a worker that starts later
            line.close()

    def discard(self) -> None:
        self.kill()
        self.process.wait()
        with self._close_lock:
            self._connection.close()


class WorkerPool(Pool[SetupFile]):
    """Worker processes on this machine; by default one per core."""

    def __init__(self, workers: int = 0) -> None:
        super().__init__(workers or available_cores())
        self.server: ForkServerProcess | None = None
        self._open()

    def _launch(self, index: int) -> ProcessWorker:
        try:
            if self.server is None or not self.server.alive():
                self.server = take_server()
            return ProcessWorker(self.server, index)
        except OSError as error:
            raise WorkerDied(f"the system could not start a process ({error})") from None

    def _publish(self, setup: Setup) -> SetupFile:
        packed = pack_setup(setup)
        try:
            return SetupFile(packed.message, BlockFile(packed.blocks))
        except OSError as error:
            raise RunError(
                f"cannot store the data for the workers; set TMPDIR to a disk with more space ({error})"
            ) from None

    def _end(self) -> None:
        if self.server is not None:
            self.server.close()


def available_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
