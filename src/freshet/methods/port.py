"""PORT: average K reported models by freshness and by agreement with the last global step; hurry overdue devices.

N. Su, B. Li, "How Asynchronous can Federated Learning Be?", IEEE/ACM IWQoS 2022.

R the models reported since the last aggregation, tau_k = s_k - 1 their staleness, Omega its bound (Eqs. 1-4)::

    s_k  = alpha Omega / (tau_k + Omega)          c_k = beta (cos(u_k - w^v, w^v - w^{v-1}) + 1) / 2
    p~_k = n_k / sum_R n (s_k + c_k)              w^{v+1} = sum_R p_k u_k,   p_k = p~_k / sum_R p~

The server aggregates when K models have arrived and no device in flight has tau > Omega (``wait = "ge"``: tau >= Omega,
the paper's Definition 1; "gt", the authors' code, is our default [D]). With ``urgent``, the server asks a device in
flight with tau > Omega, at the next arrival, to upload at the end of its current epoch. That model counts with its full
n_k. Nothing is dropped. Devices are replaced only at an aggregation.

Decisions [D]: the compared update is u_k minus the *current* model, as in the authors' code (the paper just says
"update"). cos = 1 at the first aggregation, which has no previous step, and 0 if either vector is zero. Omega = 0 gives
s_k = alpha. All p~ = 0 gives n_k weights. ``gate`` (cos = 1 unless tau > 1, authors' code only) is off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import Field

from freshet.core.about import About, Range, UploadCount
from freshet.core.admission import overflows
from freshet.core.defence import bounded_notes, bounded_samples
from freshet.core.events import Aggregated, Contribution, Event, Hurried, Lost, Triggered, Uploaded
from freshet.core.messages import Upload
from freshet.core.method import (
    Aggregate,
    Facts,
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
from freshet.core.vectors import Vector, combine, distance, dot_differences
from freshet.errors import ConfigError


class PORTOptions(Options):
    """Hyper-parameters with the paper's symbols and values."""

    K: int = Field(5, ge=1, description="models to wait for")
    omega: int = Field(10, ge=0, description="Omega: bound on the staleness tau")
    alpha: float = Field(3.0, ge=0, description="weight of freshness")
    beta: float = Field(1.0, ge=0, description="weight of agreement with the last global step")
    wait: Literal["gt", "ge"] = Field("gt", description="wait for devices with tau > omega (gt) or tau >= omega (ge)")
    urgent: bool = Field(True, description="ask overdue devices to upload at the end of their epoch")
    gate: bool = Field(False, description="use the agreement only for tau > 1")

    def check_run(self, facts: Facts) -> None:
        """Devices are replaced only at an aggregation, so K of them must be in flight at once."""
        if facts.in_flight < self.K:
            raise ConfigError("method.K", f"must be at most run.in_flight = {facts.in_flight}, but {self.K} was given")

    def is_overdue(self, tau: int) -> bool:
        return tau > self.omega if self.wait == "gt" else tau >= self.omega

    def freshness(self, tau: int) -> float:
        """``s_k``."""
        return self.alpha * self.omega / (tau + self.omega) if self.omega else self.alpha

    def agreement(self, cos: float) -> float:
        """``c_k``."""
        return self.beta * (cos + 1.0) / 2.0


def normalised_weights(samples: Sequence[int], s: Sequence[float], c: Sequence[float]) -> list[float]:
    """``p_k``."""
    total = sum(samples)
    raw = [n / total * (s_k + c_k) for n, s_k, c_k in zip(samples, s, c, strict=True)]
    return [p / sum(raw) for p in raw] if sum(raw) > 0.0 else [n / total for n in samples]


def cosine(u: Vector, w: Vector, previous: Vector) -> float:
    """``cos(u - w, w - previous)``; 0 if either is zero."""
    lengths = distance(u, w) * distance(w, previous)
    return dot_differences(u, w, w, previous) / lengths if lengths > 0.0 else 0.0


@dataclass(frozen=True)
class ReportedModel:
    """An uploaded model that waits for aggregation."""

    device: int
    base: int
    samples: int
    weights: Vector


@dataclass
class PORTState:
    """Reported models in order of arrival, the previous model w^{v-1}, and the hurried trips by device."""

    reported: list[ReportedModel] = field(default_factory=list)
    previous: Vector | None = None
    asked: dict[int, int] = field(default_factory=dict)


class PORT(Method):
    """The server's part; devices do plain SGD."""

    about = About(
        "port",
        "async",
        "PORT",
        "Su, Li, How Asynchronous can Federated Learning Be?, IWQoS 2022",
        replaces="aggregation",
        space={
            "K": UploadCount(2, 20, whole=True),
            "alpha": Range(0.3, 10.0, log=True),
            "beta": Range(0.1, 10.0, log=True),
        },
    )
    Options: ClassVar[type[Options]] = PORTOptions
    options: PORTOptions
    state: PORTState

    def __init__(self, options: PORTOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        if context.devices < options.K:
            raise ConfigError(
                "method.K", f"must be at most fleet.devices = {context.devices}, but {options.K} was given"
            )
        self.state = PORTState()

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        samples = int(self.context.samples[upload.device])
        self.state.reported.append(ReportedModel(upload.device, trip.base, samples, upload.weights))
        return self._decide(server, landed=upload.device)

    def forget(self, server: Server, device: int) -> Verdict | None:
        return self._decide(server, landed=device)

    def _decide(self, server: Server, landed: int) -> Verdict:
        o = self.options
        flying = {device: trip for device, trip in server.active_trips.items() if device != landed}
        overdue = [d for d, trip in flying.items() if o.is_overdue(server.staleness(trip) - 1)]
        if len(self.state.reported) >= o.K and not overdue:
            return self._aggregate(server)
        hurry = [d for d in overdue if self.state.asked.get(d) != flying[d].trip] if o.urgent else []
        self.state.asked = {d: flying[d].trip for d in overdue} if o.urgent else {}
        return Wait(urgent=tuple(hurry))

    def _aggregate(self, server: Server) -> Aggregate | Reject:
        """Average the reported models into the next one. If it is not finite, drop them."""
        o, n, w, R = self.options, self.context.layout.learnable, server.weights, self.state.reported
        stalenesses = [server.version - r.base + 1 for r in R]
        cosines = [self._cosine(r, s - 1, w[:n]) for r, s in zip(R, stalenesses, strict=True)]
        s_k = [o.freshness(s - 1) for s in stalenesses]
        c_k = [o.agreement(cos) for cos in cosines]
        claimed = [r.samples for r in R]
        samples = bounded_samples(claimed, self.context.share_limit(len(R)))
        p = normalised_weights(samples, s_k, c_k)
        new = combine([(p_k, r.weights) for p_k, r in zip(p, R, strict=True)])
        self.context.layout.max_counters(new, *(r.weights for r in R))
        parts = [Contribution(r.device, r.base, s, p_k) for r, s, p_k in zip(R, stalenesses, p, strict=True)]
        self.state.reported, length = [], distance(new[:n], w[:n])
        if overflows(new, length):
            return Reject(NOT_FINITE)
        self.state.previous = w
        notes = bounded_notes([r.device for r in R], claimed, samples)
        numbers = {"alpha": 1.0, "samples": samples, "s": s_k, "c": c_k, "cos": cosines}
        return Aggregate(new, parts, numbers, length, notes)

    def _cosine(self, reported: ReportedModel, tau: int, w: Vector) -> float:
        previous = self.state.previous
        if previous is None or (self.options.gate and tau <= 1):
            return 1.0
        return cosine(reported.weights[: len(w)], w, previous[: len(w)])

    @classmethod
    def audit(cls, options: PORTOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check every s_k, c_k and p_k, that no overdue device was left out, and that only those were hurried."""
        flying = memory.setdefault("flying", {})
        if isinstance(event, Triggered):
            flying[event.device] = event.version
        elif isinstance(event, Uploaded | Lost):
            flying.pop(event.device, None)
        elif isinstance(event, Hurried) and not options.is_overdue(memory.get("version", 1) - flying[event.device]):
            raise Mismatch(f"device {event.device} was hurried without being overdue")
        elif isinstance(event, Aggregated):
            _audit_weights(options, event)
            late = [device for device, base in flying.items() if options.is_overdue(event.version - base)]
            if late or len(event.contributions) < options.K:
                raise Mismatch(f"aggregated {len(event.contributions)} models while devices {late} were overdue")
            memory["version"] = event.version + 1


def _audit_weights(options: PORTOptions, event: Aggregated) -> None:
    n = event.numbers
    p = normalised_weights(n["samples"], n["s"], n["c"])
    for part, cos, s_k, c_k, p_k in zip(event.contributions, n["cos"], n["s"], n["c"], p, strict=True):
        expect(f"s of device {part.device}", s_k, options.freshness(part.staleness - 1))
        expect(f"c of device {part.device}", c_k, options.agreement(cos))
        if cos != 1.0 and (event.version == 1 or (options.gate and part.staleness <= 2)):
            raise Mismatch(f"cos of device {part.device} must be 1")
        expect(f"weight of device {part.device}", part.weight, p_k)
