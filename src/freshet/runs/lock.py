"""One owner per run directory: a lock that the operating system releases when its owner dies.

``.lock`` in the run directory names the owner (process, host, since when) for people. Only ``flock`` on the file
counts: a file left by a killed run does not block the next one.
"""

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Self

from freshet.errors import RunError
from freshet.files import open_own, reason

LOCK = ".lock"


class RunLock:
    """Holds a run directory from construction until ``release``, or until the process ends."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._path = directory, directory / LOCK
        try:
            self._file = self._take()
        except OSError as error:
            raise RunError(f"{directory} cannot be locked: {self._path}: {reason(error)}") from None

    def _take(self) -> Any:
        """Lock the file, and make sure that it is still the one in the directory."""
        while True:
            file = open_own(self._path, create=True)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with file:
                    raise RunError(f"{self.directory} is in use {_describe_owner(_read_owner(file))}") from None
            except BaseException:
                file.close()
                raise
            if self._same(file):
                break
            file.close()  # its owner has just removed it
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        file.truncate(0)
        file.write((json.dumps(owner) + "\n").encode())
        file.flush()
        return file

    def _same(self, file: Any) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._path.lstat())
        except OSError:
            return False

    def check(self) -> None:
        """Raise if the directory was removed or replaced."""
        if self._file.closed or not self._same(self._file):
            raise RunError(f"{self.directory} was removed or replaced during its run; nothing more is written")

    def release(self) -> None:
        """Release the directory; safe to repeat."""
        if self._file.closed:
            return
        if self._same(self._file):
            self._path.unlink(missing_ok=True)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _read_owner(file: Any) -> bytes:
    """What the owner wrote into the lock file. It writes just after it takes the lock, so wait for it."""
    deadline = time.monotonic() + 5.0
    while not (content := bytes(file.read(1000))) and time.monotonic() < deadline:
        time.sleep(0.02)
        file.seek(0)
    return content


def _describe_owner(content: bytes) -> str:
    """Who holds a lock, in words. The file may contain anything."""
    try:
        owner = json.loads(content)
        pid, host, since = int(owner["pid"]), str(owner["host"])[:80], str(owner["since"])[:40]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "by another process; wait for it, or stop it"
    return f"by process {pid} on {host} since {since}; wait for it, or stop it"
