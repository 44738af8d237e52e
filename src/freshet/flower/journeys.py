"""What the real-time driver works with: messages and who carries them, how they travel, trips under way."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from freshet.core.messages import Assignment, Fresh, Slot
from freshet.core.saving import Tree


class Reply(NamedTuple):
    """An answer to a message: records, or what went wrong."""

    message: str
    content: Any = None
    error: str = ""


class Post(Protocol):
    """Carries messages to nodes; every call may fail with ``ConnectionError``."""

    def nodes(self) -> set[int]:
        """Nodes that are there now."""

    def send(self, node: int, content: Any, seconds: float) -> str:
        """Send a message that is of no use after so many seconds; its number."""

    def receive(self, messages: list[str]) -> list[Reply]:
        """Those answers to these messages that have arrived; each is handed out once."""


@dataclass(frozen=True)
class Network:
    """How messages travel."""

    fresh: str = "side"
    address: str = ""
    certificate: str = ""
    #: Seconds that a trip may take, between two looks for answers, and that a node may be away before its trip is lost.
    ttl: float = 600.0
    poll: float = 0.2
    patience: float = 120.0
    #: Seconds between two looks for nodes that have come or gone.
    roll_call: float = 2.0


@dataclass(slots=True)
class Journey:
    """A trip under way."""

    assignment: Assignment
    ticket: str
    started: float
    #: The message that is to be answered (empty: still to be sent), and when it was sent.
    message: str = ""
    sent: float = 0.0
    slot: Slot | None = None
    fresh: Fresh | None = None
    #: Whether the second message of the trip is due (or sent).
    onward: bool = False
    urgent: bool = False


@dataclass(slots=True)
class Done:
    """How many trips a device has completed, and how long they took from trigger to upload."""

    trips: int = 0
    seconds: float = 0.0


def check(tree: Tree) -> None:
    """Raise ``ValueError`` unless a saved state is one of a run in real time."""
    missing = {"coordinator", "samples", "now", "wakes", "session", "devices", "journeys", "log"} - tree.keys()
    if missing:
        raise ValueError(f"it has no {', '.join(sorted(missing))}")


def saved(journey: Journey) -> Tree:
    return {
        "ticket": journey.ticket,
        "started": journey.started,
        "onward": journey.onward,
        "instruction": dict(journey.assignment.instruction),
        "vectors": dict(journey.assignment.vectors),
        "fresh_vectors": {} if journey.fresh is None else dict(journey.fresh.vectors),
    }
