"""Synchronous rounds that aggregate once, at the end: what FedAvg and its descendants share."""

from typing import Any, NamedTuple

import numpy as np

from freshet.core.messages import Upload
from freshet.core.method import Aggregate, Method, Verdict, Wait, World
from freshet.core.server import Flight, Server
from freshet.core.vectors import Vector, combine, distance

WAIT = Wait()


class Member(NamedTuple):
    """One device's upload in the open round."""

    device: int
    weights: Vector
    samples: int


def sample_shares(members: list[Member]) -> list[float]:
    """``n_k / sum n``, over those that uploaded."""
    total = sum(member.samples for member in members)
    return [member.samples / total for member in members]


class RoundMethod(Method):
    """Collects a round's uploads and calls ``aggregate`` with them in ascending order of device."""

    def __init__(self, options: Any, world: World) -> None:
        super().__init__(options, world)
        self.members: dict[int, Member] = {}

    def receive(self, server: Server, upload: Upload, flight: Flight) -> Verdict:
        samples = int(self.world.samples[upload.device])
        self.members[upload.device] = Member(upload.device, upload.weights, samples)
        return WAIT

    def finish_round(self, server: Server) -> Verdict | None:
        members = [self.members[device] for device in sorted(self.members)]
        self.members.clear()
        record: dict[str, Any] = {"base": server.version, "staleness": 1, "devices": [m.device for m in members]}
        if not members:  # everybody was lost: the round counts, the model stays
            return Aggregate(server.weights, record | {"alpha": 0.0, "weights": [], "samples": [], "update_norm": 0.0})
        shares = self.shares(members)
        new, more = self.aggregate(server, members, shares)
        self.world.layout.max_counters(new, *(m.weights for m in members))
        n = self.world.layout.learnable
        record |= {"alpha": 1.0, "weights": shares, "samples": [m.samples for m in members], **more}
        record["update_norm"] = distance(new[:n], server.weights[:n])
        return Aggregate(new, record)

    def shares(self, members: list[Member]) -> list[float]:
        """The weight of each member's model; they sum to 1."""
        return sample_shares(members)

    def aggregate(self, server: Server, members: list[Member], shares: list[float]) -> tuple[Vector, dict[str, Any]]:
        """The next global model, and further numbers for the log."""
        return combine([(share, member.weights) for share, member in zip(shares, members, strict=True)]), {}

    def state(self) -> dict[str, Any]:
        return {"members": {str(m.device): {"weights": m.weights, "samples": m.samples} for m in self.members.values()}}

    def restore(self, state: dict[str, Any]) -> None:
        self.members = {
            int(d): Member(int(d), np.array(m["weights"]), m["samples"]) for d, m in state["members"].items()
        }
