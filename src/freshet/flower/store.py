"""What a device keeps in its own folder: its memory, its last upload, and a trip that waits for the fresh model.

Each is one file, replaced as a whole. It belongs to a session (one run of a server) and bears its name: another one
begins with nothing, so that no run learns from a Q-table or a control variate of another, and wipes nothing.
"""

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freshet.core.method import Memory
from freshet.files import replacing
from freshet.flower.codec import Malformed, from_bytes, to_bytes
from freshet.runs.checkpoint import Tree

#: Runs that a device remembers, the latest; it may take part in several at once.
SESSIONS = 4


@dataclass
class Kept:
    """The device's memory, and its last answer with the ticket it belongs to."""

    memory: Memory
    ticket: str = ""
    answer: Tree | None = None


class DeviceFolder:
    """The folder of one device, for its own user only."""

    def __init__(self, folder: Path, session: str) -> None:
        self.folder, self.session = folder, session
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):  # it is somebody else's; the files are ours in any case
            folder.chmod(0o700)  # Flower may have made it, open to all

    def read(self) -> Kept:
        """What is kept of this session; nothing, if there is none or it cannot be read."""
        tree = self._read("memory")
        if tree is None:
            return Kept({})
        try:
            return Kept(dict(tree["memory"]), tree["ticket"], tree["answer"])
        except (KeyError, TypeError, ValueError):
            return Kept({})

    def write(self, kept: Kept) -> None:
        """Replace it."""
        self._write("memory", dict(vars(kept)))

    def pause(self, ticket: str, trip: Tree) -> None:
        """Keep a trip until the fresh model comes."""
        self._write("paused", {"ticket": ticket, "trip": trip})

    def paused(self, ticket: str) -> Tree | None:
        """The trip of this ticket that was paused, or None when it is lost."""
        tree = self._read("paused")
        found: Any = None if tree is None or tree.get("ticket") != ticket else tree.get("trip")
        return found if isinstance(found, dict) else None

    def _file(self, kind: str) -> Path:
        """The server chooses the session's name, so that it may be any text."""
        return self.folder / f"{kind}.{hashlib.sha256(self.session.encode()).hexdigest()[:16]}.safetensors"

    def _write(self, kind: str, tree: Tree) -> None:
        with replacing(self._file(kind), 0o600) as file:
            file.write(to_bytes({"session": self.session} | tree))
        self._forget(kind)

    def _forget(self, kind: str) -> None:
        """Of runs that are long over nothing stays."""
        found = dict[Path, float]()
        for path in self.folder.glob(f"{kind}.*safetensors"):
            with contextlib.suppress(FileNotFoundError):  # another run's trip has just done the same
                found[path] = path.stat().st_mtime
        for path in sorted(found, key=lambda each: found[each])[:-SESSIONS]:
            path.unlink(missing_ok=True)

    def _read(self, kind: str) -> Tree | None:
        try:
            tree = from_bytes(self._file(kind).read_bytes())
        except (FileNotFoundError, Malformed):
            return None
        return tree if tree.get("session") == self.session else None
