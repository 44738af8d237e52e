"""The journal of a deployment: everything that has happened since the last checkpoint, on disk before anybody is told.

A killed server restores its checkpoint and applies the journal again. The core is a function of what happens to it, so
the server then knows every trip that it has started, every fresh model that it has sent and every upload that it has
taken. Each checkpoint begins a new file, ``checkpoint/journal-N``, where N counts the entries before it.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from freshet.core.saving import Tree
from freshet.files import open_own, open_regular, own_folder, reason, sync_folder, writing
from freshet.flower.wire import MalformedMessage, from_bytes, to_bytes
from freshet.runs.reader import JOURNAL

#: Before each entry: its length and its SHA-256. An entry that a kill has cut off does not match.
_LENGTH_BYTES, _HASH_BYTES = 8, 32
#: Entries since this many checkpoints are kept: two checkpoints are on disk while the third is being written.
_KEPT_CHECKPOINTS = 3


class Journal:
    """Appends entries (trees of plain values and arrays), and reads those after a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        #: Entries so far, in all files.
        self.entries = 0
        #: Bytes since the last checkpoint.
        self.nbytes = 0
        self._unsynced = False
        self._checkpoints: list[int] = []

    def append(self, entry: Tree) -> None:
        """Add an entry. It survives a kill of this process at once, and a power cut after ``sync``."""
        if self._file is None:
            return
        content = to_bytes(entry)
        head = len(content).to_bytes(_LENGTH_BYTES, "little") + hashlib.sha256(content).digest()
        with self._write_errors():
            self._file.write(head + content)
            self._file.flush()
        self.entries, self.nbytes, self._unsynced = self.entries + 1, self.nbytes + len(content), True

    def sync(self) -> None:
        """Wait until all entries are on the disk."""
        if self._unsynced and self._file is not None:
            with self._write_errors():
                os.fsync(self._file.fileno())
            self._unsynced = False

    def begin_file(self) -> None:
        """Begin a new file. Files after it are leftovers behind a damaged entry."""
        with self._write_errors():
            own_folder(self._folder)
            self.close()
            path = self._folder / f"{JOURNAL}{self.entries:012d}"
            self._file = open_own(path, create=True)
            self._file.truncate()
            sync_folder(self._folder)
            for number, leftover in _files(self._folder).items():
                if number > self.entries:
                    leftover.unlink()
        self.nbytes = 0

    def mark_checkpoint(self) -> int:
        """Begin the file that follows a checkpoint. Returns the number that the checkpoint keeps for ``read``."""
        self.begin_file()
        self._checkpoints = [*self._checkpoints, self.entries][-_KEPT_CHECKPOINTS:]
        for number, old in _files(self._folder).items():
            if number < self._checkpoints[0]:
                old.unlink(missing_ok=True)
        return self.entries

    def read(self, start: int) -> Iterator[Tree]:
        """Entries after the checkpoint that holds ``start``, up to one that is incomplete: nobody was told of it."""
        files = _files(self._folder)
        if start not in files:
            raise ValueError(f"its journal, {JOURNAL}{start:012d}, is missing")
        self.entries, self._checkpoints = start, [start]
        for number, path in files.items():
            if number != self.entries:
                continue  # before the checkpoint, or after a damaged entry
            with _open(path) as file:
                while (entry := _read_entry(file)) is not None:
                    self.entries += 1
                    yield entry

    def close(self) -> None:
        """Close the file. Later entries are dropped until ``begin_file``."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_errors(self) -> AbstractContextManager[None]:
        return writing(self._folder, "fix this, then start the server again")


def _files(folder: Path) -> dict[int, Path]:
    """The files of the journal by the number of their first entry, in ascending order."""
    found = {path.name.removeprefix(JOURNAL): path for path in folder.glob(f"{JOURNAL}*")} if folder.is_dir() else {}
    return {int(number): path for number, path in sorted(found.items()) if number.isdecimal() and number.isascii()}


def _open(path: Path) -> BinaryIO:
    try:
        return open_regular(path, links=False)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({reason(error)})") from None


def _read_entry(file: BinaryIO) -> Tree | None:
    """The next entry, or None at the end and at an entry that is incomplete or damaged."""
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    digest = file.read(_HASH_BYTES)
    left = os.fstat(file.fileno()).st_size - file.tell()
    if len(digest) < _HASH_BYTES or length > left:
        return None
    content = file.read(length)
    if hashlib.sha256(content).digest() != digest:
        return None
    try:
        return from_bytes(content)
    except MalformedMessage:
        return None
