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
from freshet.core.defence import bounded_notes, bounded_samples, share_of
from freshet.core.events import Aggregated, Contribution, Event, Noted
from freshet.core.messages import NOTHING, Number, Upload
from freshet.core.method import Aggregate, Memory, Method, MethodContext, Reject, Verdict, Wait, expect, overrides
from freshet.core.server import NOT_FINITE, ActiveTrip, Server
from freshet.core.vectors import Vector, combine, distance

WAIT = Wait()


class RoundUpload(NamedTuple):
    """One device's upload in the open round. ``share`` is the part of its step that a defence accepted."""

    device: int
    weights: Vector
    samples: int
    trip: int
    lr: float
    steps: int
    vectors: dict[str, Vector]
    share: float


def sample_shares(members: list[RoundUpload]) -> list[float]:
    """``n_k / sum n``, over the devices that uploaded."""
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

    If the round's model is not finite, the state before ``aggregate`` is restored. So ``aggregate`` must assign new
    values to the fields of the state and never change them in place.
    """

    state: Round

    def __init__(self, options: Any, context: MethodContext) -> None:
        super().__init__(options, context)
        self.state = Round()

    @classmethod
    def beyond_sum(cls, options: Any) -> str | None:
        own = [name for name in ("receive", "finish_round") if overrides(cls, RoundMethod, name)]
        return f"its own {own[0]}() sees single uploads" if own else None

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
        if not members:  # all devices were lost: the round counts, the model stays
            return Aggregate(server.weights, (), {"alpha": 0.0, "samples": []}, length=0.0)
        models = [m.weights for m in members]
        if server.noise is not None:  # nothing but their noised mean decides anything
            members = [m._replace(weights=server.weights, vectors={}, share=1.0) for m in members]
        members, notes = self._with_bounded_samples(members)
        before, shares = replace(self.state), self.shares(members)
        parts = [Contribution(m.device, server.version, 1, share) for m, share in zip(members, shares, strict=True)]
        if server.noise is not None:
            noised = self._noised_mean(server, models, parts)
            members = [m._replace(weights=noised) for m in members]
        with np.errstate(over="ignore"):  # a model that is not finite is refused below
            new, more = self.aggregate(server, members, shares)
        self.context.layout.max_counters(new, *(m.weights for m in members))
        n = self.context.layout.learnable
        length = distance(new[:n], server.weights[:n])
        if overflows(new, length) or not self.is_sane():
            self.state = before
            return Reject(NOT_FINITE)
        numbers = {"alpha": 1.0, "samples": [m.samples for m in members], **more}
        return Aggregate(new, parts, numbers, length, notes)

    def _noised_mean(self, server: Server, models: list[Vector], parts: list[Contribution]) -> Vector:
        """``w + S / sum of p_k`` with the noised sum S of ``p_k (u_k - w)``: a mean of it with weights p_k moves by S.

        Every member gets this model, so that ``aggregate`` sees nothing else of the uploads.
        """
        w, total = server.weights.astype(np.float64), np.zeros(len(server.weights))
        for part, model in zip(parts, models, strict=True):
            total += part.weight * (model - w)
        step = server.release(total, parts) / sum(part.weight for part in parts)
        with np.errstate(over="ignore"):  # a model that is not finite is refused below
            return (w + step).astype(np.float32)

    def _with_bounded_samples(self, members: list[RoundUpload]) -> tuple[list[RoundUpload], tuple[Noted, ...]]:
        """Let no device have more than its share of the round by the samples that it claims."""
        claimed = [m.samples for m in members]
        counted = bounded_samples(claimed, self.context.share_limit(len(members)))
        bounded = [m._replace(samples=n) for m, n in zip(members, counted, strict=True)]
        if self.shares(bounded) == self.shares(members):  # samples do not count, or they are within the bound
            return members, ()
        return bounded, bounded_notes([m.device for m in members], claimed, counted)

    def is_sane(self) -> bool:
        """Whether the state that ``aggregate`` left is valid. The model itself is always checked."""
        return True

    def shares(self, members: list[RoundUpload]) -> list[float]:
        """Return each member's weight in the new model, as logged."""
        return sample_shares(members)

    def aggregate(
        self, server: Server, members: list[RoundUpload], shares: list[float]
    ) -> tuple[Vector, dict[str, Any]]:
        """Return the next global model, and further numbers for the log by names of their own.

        ``members`` are the round's uploads in ascending order of device, and ``shares`` their weights, which add up to
        1. Override it; the default is their weighted mean.
        """
        return combine([(share, member.weights) for share, member in zip(shares, members, strict=True)]), {}


class PartialUpload(NamedTuple):
    """A device's last shortened upload: its trip, and the share of it in the server's sum."""

    trip: int
    share: float


def with_partial_uploads(
    known: Mapping[int, PartialUpload], members: Iterable[RoundUpload]
) -> dict[int, PartialUpload]:
    """Return ``known`` with this round's shortened uploads added, by device."""
    return {**known, **{m.device: PartialUpload(m.trip, m.share) for m in members if m.share != 1.0}}


def accepted_share_instruction(known: Mapping[int, PartialUpload], device: int) -> Mapping[str, Number]:
    """Return what the server sends to the device about its last shortened upload."""
    last = known.get(device)
    return NOTHING if last is None else {"shortened": last.trip, "share": last.share}


def accepted_share(instruction: Mapping[str, Number], memory: Memory) -> float:
    """Return the share that the server accepted of the change made in trip ``memory["trip"]``, on the device's side."""
    is_meant = "share" in instruction and instruction["shortened"] == memory.get("trip")
    return float(instruction["share"]) if is_meant else 1.0
