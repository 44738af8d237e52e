"""Training in worker processes that live as long as the pool.

Data lie in files without a name that the workers map; weights travel over socket pairs. Workers are forked from a
server that has loaded the libraries (``forking.py``, ``worker.py``). A worker ends as soon as the other end of its
socket is closed, so none outlives its parent, however that ends.
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
from freshet.compute.executor import Setup
from freshet.compute.forking import Server, a_server, search_path
from freshet.compute.pool import Pool, StartFailed, WorkerDied
from freshet.compute.share import BlockFile, dismantle
from freshet.errors import RunError


@dataclass(frozen=True)
class FiledSetup:
    """A setup whose large arrays lie in a file that all workers map."""

    message: bytes
    file: BlockFile


class ProcessWorker:
    """One process and the connection to it."""

    def __init__(self, server: Server) -> None:
        ours, theirs = Pipe()
        self._connection: Connection = ours
        self._hanging_up = threading.Lock()
        try:
            ours.send(search_path())
            with theirs:
                self.process = server.fork(theirs)
        except OSError as error:
            ours.close()
            raise WorkerDied(f"the system gave no process ({error})") from None

    def wait_ready(self) -> None:
        said = self._exchange(lambda: None)
        if said != worker.READY:
            raise StartFailed(f"Freshet cannot be imported in it\n{said.decode(errors='replace')}")

    def alive(self) -> bool:
        return not self.process.ended()

    def install(self, number: int, setup: FiledSetup, drop: list[int]) -> bytes:
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
        """Say something and wait for the answer."""
        try:
            send()
            return self._connection.recv_bytes()
        except (EOFError, OSError):
            raise WorkerDied(self.process.how_it_ended()) from None
        except BaseException:  # half a message may be on its way: nobody can talk to this one any more
            self.kill()
            raise

    def kill(self) -> None:
        self.process.kill()
        with self._hanging_up, suppress(OSError):
            line = socket.socket(fileno=os.dup(self._connection.fileno()))
            line.shutdown(socket.SHUT_RDWR)  # who waits for it here stops, and one that begins later leaves at once
            line.close()

    def discard(self) -> None:
        self.kill()
        self.process.wait()
        with self._hanging_up:
            self._connection.close()


class WorkerPool(Pool[FiledSetup]):
    """Worker processes on this machine, one per core unless a number is given."""

    def __init__(self, workers: int = 0) -> None:
        super().__init__(workers or available_cores())
        self._server: Server | None = None
        self._open()

    def _launch(self) -> ProcessWorker:
        try:
            if self._server is None or not self._server.alive():
                self._server = a_server()
            return ProcessWorker(self._server)
        except OSError as error:
            raise WorkerDied(f"the system gave no process ({error})") from None

    def _publish(self, setup: Setup) -> FiledSetup:
        parts = dismantle(setup)
        try:
            return FiledSetup(parts.message, BlockFile(parts.blocks))
        except OSError as error:
            raise RunError(
                f"the data cannot be stored for the workers (set TMPDIR to a roomier disk): {error}"
            ) from None

    def _end(self) -> None:
        if self._server is not None:
            self._server.close()


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
