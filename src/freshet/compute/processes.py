"""Training in worker processes that live as long as the pool.

Data lie in files without a name that the workers map; weights travel over socket pairs. A worker ends as soon as the
other end of its socket is closed, so none outlives its parent, however that ends.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle

from freshet.compute import worker
from freshet.compute.base import Setup
from freshet.compute.pool import Pool, StartFailed, WorkerDied
from freshet.compute.share import BlockFile, dismantle
from freshet.errors import RunError

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True)
class FiledSetup:
    """A setup whose large arrays lie in a file that all workers map."""

    message: bytes
    file: BlockFile


class ProcessWorker:
    """One child process and the connection to it."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        self._connection: Connection = ours
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])  # Python ignores others, too
        command = [sys.executable, "-P", str(worker.__file__), str(theirs.fileno()), path]
        try:
            self.process = subprocess.Popen(  # noqa: S603  (our own interpreter and script)
                command,
                pass_fds=[theirs.fileno()],
                env=os.environ | ONE_THREAD,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal goes to the parent alone
            )
        except OSError as error:
            ours.close()
            raise WorkerDied(f"the system gave no process ({error})") from None
        finally:
            theirs.close()

    def wait_ready(self) -> None:
        said = self._exchange(lambda: None)
        if said != worker.READY:
            raise StartFailed(f"Freshet cannot be imported in it\n{said.decode(errors='replace')}")

    def alive(self) -> bool:
        return self.process.poll() is None

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
            raise WorkerDied(self._how_it_ended()) from None
        except BaseException:  # half a message may be on its way: nobody can talk to this one any more
            self.kill()
            raise

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code >= 0:
            return f"exit code {code}"
        return f"signal {signal.Signals(-code).name}"

    def kill(self) -> None:
        self.process.kill()

    def discard(self) -> None:
        self.process.kill()
        self.process.wait()
        self._connection.close()


class WorkerPool(Pool[FiledSetup]):
    """Worker processes on this machine, one per core unless a number is given."""

    def __init__(self, workers: int = 0) -> None:
        super().__init__(workers or available_cores())
        self._open()

    def _launch(self) -> ProcessWorker:
        return ProcessWorker()

    def _publish(self, setup: Setup) -> FiledSetup:
        parts = dismantle(setup)
        try:
            return FiledSetup(parts.message, BlockFile(parts.blocks))
        except OSError as error:
            raise RunError(
                f"the data cannot be stored for the workers (set TMPDIR to a roomier disk): {error}"
            ) from None


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
