"""Synchronous rounds that aggregate once, at the end: the base of FedAvg and the methods built on it.

A defence may accept only a share of an upload (``core.defence``). SCAFFOLD's c is the mean of its devices' c_i, and
FedDyn's G that of their lambda_k, because server and device add the same changes. So the server reports the accepted
share at the device's next trip, and the device takes back the rest. Fully accepted updates are not reported.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from freshet.core.admission import overflows
from freshet.core.audit import expect
from freshet.core.defence import share_of
from freshet.core.events import Aggregated, Contribution, Event
from freshet.core.messages import NOTHING, Number, Upload
from freshet.core.method import Aggregate, Memory, Method, MethodContext, Reject, Verdict, Wait
from freshet.core.server import NOT_FINITE, ActiveTrip, Server
from freshet.core.vectors import Vector, combine, distance

WAIT = Wait()


class RoundUpload(NamedTuple):
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


def sample_shares(members: list[RoundUpload]) -> list[float]:
    """``n_k / sum n``, over those that uploaded."""
    total = sum(member.samples for member in members)
    return [member.samples / total for member in members]


def audit_sample_shares(event: Event) -> None:
    """Check FedAvg's weights: each device's share of the round's samples."""
    if isinstance(event, Aggregated):
        samples = event.numbers["samples"]
        for part, own in zip(event.contributions, samples, strict=True):
            expect(f"weight of device {part.device}", part.weight, own / sum(samples))


@dataclass
class Round:
    """The uploads of the open round, by device."""

    members: dict[int, RoundUpload] = field(default_factory=dict)


class RoundMethod(Method):
    """Collects a round's uploads and calls ``aggregate`` with them in ascending order of device.

    A round whose model would not be finite leaves no trace: the state goes back to what it was before ``aggregate``,
    which therefore puts new values into its fields and changes none in place.
    """

    state: Round

    def __init__(self, options: Any, context: MethodContext) -> None:
        super().__init__(options, context)
        self.state = Round()

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        self.state.members[upload.device] = RoundUpload(
            device=upload.device,
            weights=upload.weights,
            samples=self.context.samples.item(upload.device),
            trip=upload.trip,
            lr=trip.lr,
            steps=upload.steps,
            vectors=dict(upload.vectors),
            share=share_of(upload),
        )
        return WAIT

    def finish_round(self, server: Server) -> Verdict | None:
        members = [self.state.members[device] for device in sorted(self.state.members)]
        self.state.members.clear()
        if not members:  # everybody was lost: the round counts, the model stays
            return Aggregate(server.weights, (), {"alpha": 0.0, "samples": []}, length=0.0)
        before, shares = replace(self.state), self.shares(members)
        with np.errstate(over="ignore"):  # a model that is not finite is refused
            new, more = self.aggregate(server, members, shares)
        self.context.layout.max_counters(new, *(m.weights for m in members))
        n = self.context.layout.learnable
        length = distance(new[:n], server.weights[:n])
        if overflows(new, length) or not self.is_sane():
            self.state = before
            return Reject(NOT_FINITE)
        parts = [Contribution(m.device, server.version, 1, share) for m, share in zip(members, shares, strict=True)]
        return Aggregate(new, parts, {"alpha": 1.0, "samples": [m.samples for m in members], **more}, length)

    def is_sane(self) -> bool:
        """Whether what ``aggregate`` has put into the state may stay; the model itself is looked at in any case."""
        return True

    def shares(self, members: list[RoundUpload]) -> list[float]:
        """The weight of each member in the new model, as it is logged."""
        return sample_shares(members)

    def aggregate(
        self, server: Server, members: list[RoundUpload], shares: list[float]
    ) -> tuple[Vector, dict[str, Any]]:
        """The next global model, and further numbers for the log."""
        return combine([(share, member.weights) for share, member in zip(shares, members, strict=True)]), {}


class PartialUpload(NamedTuple):
    """The last upload of a device that was shortened: its trip, and the share of it that is in the server's sum."""

    trip: int
    share: float


def with_partial_uploads(
    known: Mapping[int, PartialUpload], members: Iterable[RoundUpload]
) -> dict[int, PartialUpload]:
    """Those known, and those of this round, by device."""
    return {**known, **{m.device: PartialUpload(m.trip, m.share) for m in members if m.share != 1.0}}


def accepted_share_instruction(known: Mapping[int, PartialUpload], device: int) -> Mapping[str, Number]:
    """What goes down to the device."""
    last = known.get(device)
    return NOTHING if last is None else {"shortened": last.trip, "share": last.share}


def accepted_share(instruction: Mapping[str, Number], memory: Memory) -> float:
    """The device's side: how much the server took of the change that ``memory["trip"]`` made, if it took it at all."""
    is_meant = "share" in instruction and instruction["shortened"] == memory.get("trip")
    return float(instruction["share"]) if is_meant else 1.0
