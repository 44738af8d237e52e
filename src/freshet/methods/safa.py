"""SAFA: a round merges a quota of arrivals into a cache of all devices' models and averages the whole cache.

W. Wu, L. He, W. Lin, R. Mao, C. Maple, S. Jarvis, "SAFA: a Semi-Asynchronous Protocol for Fast Federated Learning with
Low Overhead", IEEE Transactions on Computers 2021.

Arrivals of devices that were not picked in the last round form P, the others R. The round ends when P has the quota
``ceil(C M)``, at the deadline, or when no device is in flight. P is then filled up from R in order of arrival. The
devices in P are picked, and with n_k samples of M devices::

    cache_k <- u_k for k in P     w <- sum_k n_k / (sum n) cache_k over all M     then cache_k <- u_k for the rest of R

Then ``cache_k <- w`` for every device whose version is more than ``lag_tol`` behind the new one. If it is in flight,
its trip is cancelled, and it starts again. The version of a device in flight is its base; an arrival makes it that of
the new model, and so does ``cache_k <- w``. All caches are w^0 at first.

Decisions [D]: the equations are those of the authors' code, the end of a round is as we remember the paper (the code
picks with hindsight among all devices that would finish in the round). Every device that starts gets the newest model;
in the paper one that is a little behind goes on with its own. A deployed device cannot be interrupted: it is asked to
stop at the end of its epoch, and its upload is refused. A lost upload leaves the cache. A step that is not finite
drops the round's arrivals. Buffers of the network are averaged in the same way. lag_tol = 1 is the code's, C = 0.3
ours, and by default there is no deadline. The cache is one model per device; a run that needs more than 1 GiB says so.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.admission import overflows
from freshet.core.defence import counted_samples
from freshet.core.events import Aggregated, Contribution, Event
from freshet.core.messages import Upload
from freshet.core.method import Aggregate, Method, MethodContext, Mismatch, Options, Reject, Verdict, Wait, expect
from freshet.core.server import NOT_FINITE, ActiveTrip, Server
from freshet.core.vectors import Vector, combine, distance
from freshet.methods._shared.asynchronous import cache_notice

#: That of w^0.
FIRST_VERSION = 1


class SAFAOptions(Options):
    """Hyper-parameters with the paper's symbols."""

    C: float = Field(0.3, gt=0, le=1, description="quota of a round, as a share of all devices")
    lag_tol: int = Field(1, ge=1, description="versions that a device in flight may be behind")
    deadline: float = Field(0.0, ge=0, description="most seconds of a round (0: no limit)")

    def quota(self, devices: int) -> int:
        return math.ceil(self.C * devices)


@dataclass(frozen=True)
class RoundArrival:
    """An uploaded model of the open round."""

    device: int
    base: int
    weights: Vector


@dataclass
class SAFAState:
    """The cache (w^0 stands for absent devices), the devices' versions (the first stands for absent ones), the last
    picks, the arrivals of the open round, and its start."""

    cache: dict[int, Vector] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    first: Vector | None = None
    picked: list[int] = field(default_factory=list)
    arrived: list[RoundArrival] = field(default_factory=list)
    started: float = 0.0


class SAFA(Method):
    """The server's part; devices do plain SGD."""

    about = About(
        "safa",
        "async",
        "SAFA",
        "Wu et al., SAFA, IEEE Trans. Computers 2021",
        replaces="aggregation",
        space={"C": Range(0.1, 0.5), "lag_tol": Range(1, 5, whole=True)},
    )
    Options: ClassVar[type[Options]] = SAFAOptions
    options: SAFAOptions
    state: SAFAState

    def __init__(self, options: SAFAOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.state = SAFAState()

    def notices(self) -> list[str]:
        return cache_notice("SAFA", self.context)

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        others = [each for each in self.state.arrived if each.device != upload.device]
        self.state.arrived = [*others, RoundArrival(upload.device, trip.base, upload.weights)]
        return self._end_if_over(server, upload.device) or Wait()

    def forget(self, server: Server, device: int) -> Verdict | None:
        return self._end_if_over(server, device)

    def timer(self, server: Server) -> float | None:
        return self.state.started + self.options.deadline if self.options.deadline else None

    def on_timer(self, server: Server) -> Verdict | None:
        self.state.started = server.now
        return self._step(server, None) if self.state.arrived else None

    def _end_if_over(self, server: Server, landed: int) -> Verdict | None:
        """The step, if the quota is reached or no other device is in flight."""
        arrived, quota = self.state.arrived, self.options.quota(self.context.devices)
        reached = sum(each.device not in self.state.picked for each in arrived) >= quota
        flies = any(device != landed for device in server.active_trips)
        return self._step(server, landed) if arrived and (reached or not flies) else None

    def _picks(self) -> list[RoundArrival]:
        """P, filled up from R."""
        quota, state = self.options.quota(self.context.devices), self.state
        return sorted(state.arrived, key=lambda each: each.device in state.picked)[:quota]

    def _step(self, server: Server, landed: int | None) -> Verdict:
        state, n, layout = self.state, counted_samples(self.context), self.context.layout
        picks, arrived, state.arrived = self._picks(), state.arrived, []
        first, total = server.weights if state.first is None else state.first, float(n.sum())
        cache = state.cache | {each.device: each.weights for each in picks}
        shares = {device: n.item(device) / total for device in sorted(cache)}
        absent = sum(n.item(device) for device in range(self.context.devices) if device not in cache) / total
        terms = [(share, cache[device]) for device, share in shares.items()] + ([(absent, first)] if absent else [])
        new = combine(terms)
        layout.max_counters(new, *(model for _, model in terms))
        length = distance(new[: layout.learnable], server.weights[: layout.learnable])
        if overflows(new, length):
            return Reject(NOT_FINITE)
        bypassed = [each for each in arrived if each.device not in {pick.device for pick in picks}]
        bases = {device: trip.base for device, trip in server.active_trips.items() if device != landed}
        versions = state.versions | bases | dict.fromkeys((each.device for each in arrived), server.version + 1)
        late = self._late(versions, server.version + 1)
        state.cache = cache | {each.device: each.weights for each in bypassed} | dict.fromkeys(late, new)
        state.versions = versions | dict.fromkeys(late, server.version + 1)
        state.first, state.picked, state.started = first, [each.device for each in picks], server.now
        parts = [
            Contribution(each.device, each.base, server.version - each.base + 1, shares[each.device]) for each in picks
        ]
        numbers = {
            "alpha": sum(part.weight for part in parts),
            "samples": [n.item(each.device) for each in picks],
            "all_samples": int(total),
            "devices": self.context.devices,
            "bypassed": [each.device for each in bypassed],
        }
        return Aggregate(new, parts, numbers, length, cancel=tuple(device for device in late if device in bases))

    def _late(self, versions: Mapping[int, int], newest: int) -> list[int]:
        """The devices that are too far behind the model that is about to be made."""
        devices, lag_tol = range(self.context.devices), self.options.lag_tol
        return [device for device in devices if newest - versions.get(device, FIRST_VERSION) > lag_tol]

    @classmethod
    def audit(cls, options: SAFAOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check every weight, the quota, who was passed over, and that no pick is too far behind."""
        if not isinstance(event, Aggregated):
            return
        parts, n, quota = event.contributions, event.numbers, options.quota(event.numbers["devices"])
        if len(parts) > quota or (n["bypassed"] and len(parts) < quota):
            raise Mismatch(f"{len(parts)} uploads are picked, and the quota is {quota}")
        if wrong := [device for device in n["bypassed"] if device not in memory.get("picked", [])]:
            raise Mismatch(f"device {wrong[0]} was passed over, though it was not picked in the last round")
        for part, samples in zip(parts, n["samples"], strict=True):
            if part.staleness - 1 > options.lag_tol:
                raise Mismatch(f"device {part.device} is picked at staleness {part.staleness}, beyond lag_tol")
            expect(f"weight of device {part.device}", part.weight, samples / n["all_samples"])
        expect("alpha", n["alpha"], sum(part.weight for part in parts))
        memory["picked"] = [part.device for part in parts]
