"""Synchronous rounds that aggregate once, at the end: what FedAvg and its descendants share."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from freshet.core.events import Contribution
from freshet.core.messages import Upload
from freshet.core.method import Aggregate, Method, Verdict, Wait, World
from freshet.core.server import Flight, Server
from freshet.core.vectors import Vector, combine

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


@dataclass
class Round:
    """The uploads of the open round, by device."""

    members: dict[int, Member] = field(default_factory=dict)


class RoundMethod(Method):
    """Collects a round's uploads and calls ``aggregate`` with them in ascending order of device."""

    state: Round

    def __init__(self, options: Any, world: World) -> None:
        super().__init__(options, world)
        self.state = Round()

    def receive(self, server: Server, upload: Upload, flight: Flight) -> Verdict:
        samples = int(self.world.samples[upload.device])
        self.state.members[upload.device] = Member(upload.device, upload.weights, samples)
        return WAIT

    def finish_round(self, server: Server) -> Verdict | None:
        members = [self.state.members[device] for device in sorted(self.state.members)]
        self.state.members.clear()
        if not members:  # everybody was lost: the round counts, the model stays
            return Aggregate(server.weights, (), {"alpha": 0.0, "samples": []}, length=0.0)
        shares = self.shares(members)
        new, more = self.aggregate(server, members, shares)
        self.world.layout.max_counters(new, *(m.weights for m in members))
        parts = [Contribution(m.device, server.version, 1, share) for m, share in zip(members, shares, strict=True)]
        return Aggregate(new, parts, {"alpha": 1.0, "samples": [m.samples for m in members], **more})

    def shares(self, members: list[Member]) -> list[float]:
        """The weight of each member's model; they sum to 1."""
        return sample_shares(members)

    def aggregate(self, server: Server, members: list[Member], shares: list[float]) -> tuple[Vector, dict[str, Any]]:
        """The next global model, and further numbers for the log."""
        return combine([(share, member.weights) for share, member in zip(shares, members, strict=True)]), {}
