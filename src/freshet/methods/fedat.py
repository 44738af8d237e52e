"""FedAT: rounds inside tiers of equally fast devices, asynchronous between tiers; slow tiers weigh more.

Z. Chai, Y. Chen, A. Anwar, L. Zhao, Y. Cheng, H. Rangwala, "FedAT: A High-Performance and Communication-Efficient
Federated Learning System with Asynchronous Tiers", SC 2021.

Devices form G tiers by speed, tier 1 the fastest. At the K-th arrival of tier m, S_m its buffer and T_m how often the
tier has reported::

    w_m <- sum_{S_m} n_k u_k / sum_{S_m} n_k        T_m <- T_m + 1        w <- sum_m T_{G+1-m} / (sum T) w_m

Device: the loss has the term lambda / 2 |u - w^b|^2.

Decisions [D]: all tier models are w^0 at first and T_m = 1: with the literal T_m = 0, all weight is on the slowest
tier until it reports. Tiers have equal numbers of devices and are fixed, by the expected seconds of a trip. A
deployment does not know them: there a tier follows from the mean of the measured seconds, among the devices that were
heard. Devices start as in every asynchronous method here, so a tier's round is the next K arrivals of its devices. The
compression of messages is left out (``[links]`` has others). If a device is twice in a buffer, both count. A step that
is not finite drops its tier's buffer. Buffers of the network are averaged in the same way. G = 5, lambda = 0.4 and K =
10 are the paper's, as far as we know.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

from pydantic import Field

from freshet.core.about import About, Range, UploadCount
from freshet.core.admission import overflows
from freshet.core.defence import bounded_notes, bounded_samples
from freshet.core.events import Aggregated, Contribution, Event
from freshet.core.messages import Upload
from freshet.core.method import (
    Aggregate,
    Facts,
    LocalRule,
    Method,
    MethodContext,
    Mismatch,
    Options,
    Reject,
    Verdict,
    Wait,
    expect,
)
from freshet.core.server import NOT_FINITE, ActiveTrip, Server
from freshet.core.vectors import Vector, combine, distance
from freshet.errors import ConfigError
from freshet.methods.fedprox import proximal


class FedATOptions(Options):
    """Hyper-parameters with the paper's symbols."""

    G: int = Field(5, ge=1, description="tiers")
    K: int = Field(10, ge=1, description="uploads of a tier per aggregation")
    lambda_: float = Field(0.4, ge=0, description="lambda: proximal term of the local loss (0: none)")

    def check_run(self, facts: Facts) -> None:
        """Every tier needs a device."""
        if facts.devices < self.G:
            problem = f"must be at most fleet.devices = {facts.devices}, but {self.G} was given"
            raise ConfigError("method.G", problem)


def tiers_of(seconds: Mapping[int, float], tiers: int) -> dict[int, int]:
    """The tier, from 0 for the fastest, of each device whose seconds are known. Ties go by number."""
    order = sorted(seconds, key=lambda device: (seconds[device], device))
    return {device: place * tiers // len(order) for place, device in enumerate(order)}


def tier_weights(T: Sequence[int]) -> list[float]:
    """``T_{G+1-m} / sum T``."""
    return [count / sum(T) for count in reversed(T)]


@dataclass(frozen=True)
class TierUpload:
    """An uploaded model in the buffer of its tier, and the seconds of its trip."""

    device: int
    base: int
    samples: int
    weights: Vector
    seconds: float


@dataclass(frozen=True)
class MeasuredTrips:
    """Completed trips of a device and their total seconds."""

    trips: int = 0
    seconds: float = 0.0


def with_trips(measured: Mapping[int, MeasuredTrips], uploads: Iterable[TierUpload]) -> dict[int, MeasuredTrips]:
    """The measured trips of all devices after these uploads."""
    found = dict(measured)
    for upload in uploads:
        before = found.get(upload.device, MeasuredTrips())
        found[upload.device] = MeasuredTrips(before.trips + 1, before.seconds + upload.seconds)
    return found


@dataclass
class FedATState:
    """Counts T, models of the tiers (none before the first step), buffers by tier, and measured trips by device."""

    T: list[int]
    models: list[Vector] = field(default_factory=list)
    buffers: dict[int, list[TierUpload]] = field(default_factory=dict)
    measured: dict[int, MeasuredTrips] = field(default_factory=dict)


class FedAT(Method):
    """The server's part."""

    about = About(
        "fedat",
        "async",
        "FedAT",
        "Chai et al., FedAT, SC 2021",
        space={"K": UploadCount(2, 20, whole=True), "lambda_": Range(1e-3, 0.4, log=True)},
    )
    Options: ClassVar[type[Options]] = FedATOptions
    options: FedATOptions
    state: FedATState

    def __init__(self, options: FedATOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.state = FedATState([1] * options.G)
        self._expected: dict[int, int] | None = None
        if context.seconds is not None:
            self._expected = tiers_of(dict(enumerate(context.seconds.tolist())), options.G)

    @classmethod
    def rule(cls, options: FedATOptions) -> LocalRule:
        return proximal(options.lambda_)

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        device, state, samples = upload.device, self.state, self.context.samples.item(upload.device)
        arrived = TierUpload(device, trip.base, samples, upload.weights, server.now - trip.started)
        m = self._tier(arrived)
        buffer = [*state.buffers.get(m, []), arrived]
        state.buffers = {tier: each for tier, each in state.buffers.items() if tier != m}
        if len(buffer) < self.options.K:
            state.buffers[m] = buffer
            return Wait()
        return self._step(server, m, buffer)

    def _tier(self, arrived: TierUpload) -> int:
        """The tier of a device that has just uploaded."""
        if self._expected is not None:
            return self._expected[arrived.device]
        pending = [*chain(*self.state.buffers.values()), arrived]
        seconds = {k: each.seconds / each.trips for k, each in with_trips(self.state.measured, pending).items()}
        return tiers_of(seconds, self.options.G)[arrived.device]

    def _step(self, server: Server, m: int, buffer: list[TierUpload]) -> Aggregate | Reject:
        layout, state, n = self.context.layout, self.state, self.context.layout.learnable
        models = list(state.models) or [server.weights] * self.options.G
        claimed, T = [each.samples for each in buffer], list(state.T)
        samples = bounded_samples(claimed, self.context.share_limit(len(buffer)))
        total, notes = sum(samples), bounded_notes([each.device for each in buffer], claimed, samples)
        models[m] = combine([(own / total, each.weights) for own, each in zip(samples, buffer, strict=True)])
        layout.max_counters(models[m], *(each.weights for each in buffer))
        T[m] += 1
        shares = tier_weights(T)
        new = combine(list(zip(shares, models, strict=True)))
        layout.max_counters(new, *models)
        length = distance(new[:n], server.weights[:n])
        if overflows(new, length):
            return Reject(NOT_FINITE)
        state.models, state.T = models, T
        if self._expected is None:
            state.measured = with_trips(state.measured, buffer)
        parts = [
            Contribution(each.device, each.base, server.version - each.base + 1, shares[m] * own / total)
            for own, each in zip(samples, buffer, strict=True)
        ]
        numbers = {"alpha": shares[m], "tier": m + 1, "T": T, "samples": samples}
        return Aggregate(new, parts, numbers, length, notes)

    @classmethod
    def audit(cls, options: FedATOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check how often each tier has reported, its weight, and every device's share of it."""
        if not isinstance(event, Aggregated):
            return
        parts, n = event.contributions, event.numbers
        if len(parts) != options.K:
            raise Mismatch(f"{len(parts)} uploads make an aggregation, not K = {options.K}")
        T = memory.setdefault("T", [1] * options.G)
        T[n["tier"] - 1] += 1
        if n["T"] != T:
            raise Mismatch(f"T is {n['T']}, the log gives {T}")
        expect("alpha", n["alpha"], tier_weights(T)[n["tier"] - 1])
        for part, samples in zip(parts, n["samples"], strict=True):
            expect(f"weight of device {part.device}", part.weight, n["alpha"] * samples / sum(n["samples"]))
