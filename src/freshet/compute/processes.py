"""Training in worker processes that live as long as the pool.

Data lie in files without a name that the workers map, weights travel over socket pairs. A worker ends as soon as the
other end of its socket is closed, so none outlives its parent, however that ends.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path

from freshet.compute import worker as worker_script
from freshet.compute.base import Setup
from freshet.compute.pool import Pool, PoolExecutor, StartFailed, WorkerDied
from freshet.compute.share import BlockFile, dismantle
from freshet.errors import RunError

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True)
class StoredSetup:
    """A setup whose large arrays lie in a file that all workers map."""

    message: bytes
    file: BlockFile


class ProcessWorker:
    """One child process and the connection to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        ours, theirs = Pipe()
        self.connection: Connection = ours
        command = [sys.executable, "-P", str(Path(worker_script.__file__)), str(theirs.fileno()), json.dumps(sys.path)]
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
        if said != worker_script.READY:
            raise StartFailed(f"Freshet cannot be imported there\n{said.decode(errors='replace')}")

    def alive(self) -> bool:
        return self.process.poll() is None

    def install(self, number: int, setup: StoredSetup, drop: list[int]) -> bytes:
        def send() -> None:
            content = pickle.dumps((setup.message, setup.file.spans, drop))
            self._send("install", number, content)
            send_handle(self.connection, setup.file.fileno(), self.process.pid)

        return self._exchange(send)

    def call(self, number: int, content: bytes) -> bytes:
        return self._exchange(lambda: self._send("call", number, content))
