"""How many devices to trigger, and when: plain functions of what is in flight.

``periodic``: m' devices every T seconds, whenever fewer than a cap are busy (the paper's Algorithm 1).
``concurrency``: as many as keep a constant number in flight, right after each arrival.
``rounds``: m' devices when the last round is over (synchronous methods).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from freshet.core.server import Server

TriggerKind = Literal["periodic", "concurrency", "rounds"]


@dataclass(frozen=True)
class Trigger:
    """When to trigger; ``per_round`` is m', ``period`` T (also the polling interval when no device is available).

    ``in_flight`` is the constant number of ``concurrency``; ``periodic`` starts nobody while so many are busy, and else
    all m', so that up to ``in_flight + m' - 1`` may be.
    """

    kind: TriggerKind
    per_round: int
    period: float
    in_flight: int

    def wanted(self, server: Server) -> int:
        """How many devices should start now (if so many are idle)."""
        if self.kind == "rounds":
            return 0 if server.flights else self.per_round
        free = self.in_flight - server.busy
        if free <= 0:
            return 0
        return free if self.kind == "concurrency" else self.per_round

    @cached_property
    def on_arrival(self) -> bool:
        """Whether an arrival may start new trips (the periodic trigger only listens to its clock)."""
        return self.kind != "periodic"
