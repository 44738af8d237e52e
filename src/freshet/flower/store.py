"""What a device keeps in its own folder: its memory, its last upload, and a trip that waits for the fresh model.

Each is one file, replaced as a whole. It belongs to a session (one run of a server): another session begins with
nothing, so that no run learns from a Q-table or a control variate of another.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freshet.core.method import Memory
from freshet.flower.codec import Malformed, from_bytes, to_bytes
from freshet.runs.checkpoint import Tree
from freshet.runs.writer import write_atomically


@dataclass
class Kept:
    """The device's memory, and its last answer with the ticket it belongs to."""

    memory: Memory
    ticket: str = ""
    answer: Tree | None = None


class DeviceFolder:
    """The folder of one device."""

    def __init__(self, folder: Path, session: str) -> None:
        self.folder, self.session = folder, session
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def read(self) -> Kept:
        """What is kept of this session; nothing, if there is none or it cannot be read."""
        tree = self._read("memory.safetensors")
        if tree is None:
            return Kept({})
        try:
            return Kept(dict(tree["memory"]), tree["ticket"], tree["answer"])
        except (KeyError, TypeError, ValueError):
            return Kept({})

    def write(self, kept: Kept) -> None:
        """Replace it."""
        self._write("memory.safetensors", dict(vars(kept)))

    def pause(self, ticket: str, trip: Tree) -> None:
        """Keep a trip until the fresh model comes."""
        self._write("paused.safetensors", {"ticket": ticket, "trip": trip})

    def paused(self, ticket: str) -> Tree | None:
        """The trip of this ticket that was paused, or None when it is lost."""
        tree = self._read("paused.safetensors")
        found: Any = None if tree is None or tree.get("ticket") != ticket else tree.get("trip")
        return found if isinstance(found, dict) else None

    def _write(self, name: str, tree: Tree) -> None:
        write_atomically(self.folder / name, to_bytes({"session": self.session} | tree))

    def _read(self, name: str) -> Tree | None:
        try:
            tree = from_bytes((self.folder / name).read_bytes())
        except (FileNotFoundError, Malformed):
            return None
        return tree if tree.get("session") == self.session else None
