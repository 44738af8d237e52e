"""Synchronous rounds that aggregate once, at the end: what FedAvg and its descendants share."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from freshet.core.admission import overflows
from freshet.core.defence import share_of
from freshet.core.events import make_contribution
from freshet.core.making import maker
from freshet.core.messages import Upload
from freshet.core.method import Aggregate, Method, Reject, Verdict, Wait, World
from freshet.core.server import NOT_FINITE, Flight, Server
from freshet.core.vectors import Vector, combine, distance

WAIT = Wait()


class Member(NamedTuple):
    """One device's upload in the open round, the learning rate that it trained with, and how much of its step a defence
    let in."""

    device: int
    weights: Vector
    samples: int
    trip: int
    lr: float
    steps: int
    vectors: dict[str, Vector]
    share: float


make_member = maker(Member)


def sample_shares(members: list[Member]) -> list[float]:
    """``n_k / sum n``, over those that uploaded."""
    total = sum(member.samples for member in members)
    return [member.samples / total for member in members]


@dataclass
class Round:
    """The uploads of the open round, by device."""

    members: dict[int, Member] = field(default_factory=dict)


class RoundMethod(Method):
    """Collects a round's uploads and calls ``aggregate`` with them in ascending order of device.

    A round whose model would not be finite leaves no trace: the state goes back to what it was before ``aggregate``,
    which therefore puts new values into its fields and changes none in place.
    """

    state: Round

    def __init__(self, options: Any, world: World) -> None:
        super().__init__(options, world)
        self.state = Round()

    def receive(self, server: Server, upload: Upload, flight: Flight) -> Verdict:
        device, trip, _, weights, steps, report, _, vectors, _ = upload
        samples = self.world.samples.item(device)
        kept = dict(vectors) if vectors else {}
        share = share_of(upload) if report else 1.0
        self.state.members[device] = make_member((device, weights, samples, trip, flight.lr, steps, kept, share))
        return WAIT

    def finish_round(self, server: Server) -> Verdict | None:
        members = [self.state.members[device] for device in sorted(self.state.members)]
        self.state.members.clear()
        if not members:  # everybody was lost: the round counts, the model stays
            return Aggregate(server.weights, (), {"alpha": 0.0, "samples": []}, length=0.0)
        before, shares = replace(self.state), self.shares(members)
        with np.errstate(over="ignore"):  # a model that is not finite is refused
            new, more = self.aggregate(server, members, shares)
        self.world.layout.max_counters(new, *(m.weights for m in members))
        n = self.world.layout.learnable
        length = distance(new[:n], server.weights[:n])
        if overflows(new, length) or not self.is_sane():
            self.state = before
            return Reject(NOT_FINITE)
        version = server.version
        parts = [make_contribution((m.device, version, 1, share)) for m, share in zip(members, shares, strict=True)]
        return Aggregate(new, parts, {"alpha": 1.0, "samples": [m.samples for m in members], **more}, length)

    def is_sane(self) -> bool:
        """Whether what ``aggregate`` has put into the state may stay; the model itself is looked at in any case."""
        return True

    def shares(self, members: list[Member]) -> list[float]:
        """The weight of each member in the new model, as it is logged."""
        return sample_shares(members)

    def aggregate(self, server: Server, members: list[Member], shares: list[float]) -> tuple[Vector, dict[str, Any]]:
        """The next global model, and further numbers for the log."""
        return combine([(share, member.weights) for share, member in zip(shares, members, strict=True)]), {}
