"""What the real-time driver works with: messages and who carries them, how they travel, trips under way."""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from freshet.core.messages import Assignment, Fresh, Slot
from freshet.core.saving import Tree

#: What a device spends its time on: process and Flower's part of it, loading our code and torch, data and model,
#: training, waiting for the fresh model.
PHASES = ("start", "import", "load", "train", "fresh")
#: Questions of one trip that are answered: a device that gets no answer tries three times, and may begin anew.
MOST_QUESTIONS = 20


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
    #: Devices that have to be there before the first trip of a run.
    wait_for: int = 1
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
    #: When it was begun by this machine's clock; None after a restart of the server, when its time tells nothing.
    begun: float | None = field(default_factory=time.time)
    #: Seconds by phase of its first message, where it takes two.
    spent: Mapping[str, float] = field(default_factory=dict)
    #: How often the device has asked for the fresh model.
    asked: int = 0

    def asks_too_often(self) -> bool:
        """Count a question; whether these are more than lost answers explain."""
        self.asked += 1
        return self.asked > MOST_QUESTIONS

    def durations(self, whole: float, timing: Mapping[str, float]) -> dict[str, float]:
        """Where a trip's time went, ``timing`` being what the device says of its last message.

        What the device does not account for are messages: down until its process began (as far as the two clocks
        agree), up for the rest.
        """
        both = {phase: self.spent.get(phase, 0.0) + timing.get(phase, math.nan) for phase in (*PHASES, "cpu")}
        found = {phase: value for phase, value in both.items() if 0 <= value < 1e6}
        messages = max(0.0, whole - sum(found[phase] for phase in PHASES if phase in found))
        began = self.spent.get("began", timing.get("began", 0.0))
        down = min(max(0.0, began - (self.begun or began)), messages)
        return found | {"down": down, "up": messages - down, "messages": messages, "whole": whole}


@dataclass(slots=True)
class Done:
    """How many trips a device has completed, and how long they took from trigger to upload."""

    trips: int = 0
    seconds: float = 0.0


def medians(seconds: Iterable[Mapping[str, Iterable[float]]]) -> dict[str, float]:
    """Of the seconds by phase of several devices."""
    phases: dict[str, list[float]] = defaultdict(list)
    for by_phase in seconds:
        for phase, values in by_phase.items():
            phases[phase] += values
    return {phase: round(statistics.median(values), 3) for phase, values in sorted(phases.items())}


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
