"""How many devices to trigger, and when: plain functions of what is in flight.

``periodic``: up to m' devices every T seconds while fewer than a cap are in flight (the paper's asynchronous world).
``concurrency``: as many as keep a constant number in flight, right after each arrival.
``rounds``: m' devices when the last round is over (synchronous methods).
"""

from dataclasses import dataclass
from typing import Literal

from freshet.core.server import Server

TriggerKind = Literal["periodic", "concurrency", "rounds"]


@dataclass(frozen=True)
class Trigger:
    """When to trigger; ``per_round`` is m', ``period`` T (also the polling interval when no device is available)."""

    kind: TriggerKind
    per_round: int
    period: float
    in_flight: int

    def wanted(self, server: Server) -> int:
        """How many devices should start now."""
        if self.kind == "rounds":
            return 0 if server.flights else self.per_round
        free = max(0, self.in_flight - server.busy)
        return min(self.per_round, free) if self.kind == "periodic" else free

    @property
    def on_arrival(self) -> bool:
        """Whether an arrival may start new trips (the periodic trigger only listens to its clock)."""
        return self.kind != "periodic"
