"""FedCompass: the server chooses local work so that devices of unequal speed arrive together, in groups.

Z. Li, P. Chaturvedi, S. He, H. Chen, G. Singh, V. Kindratenko, E. Huerta, K. Kim, R. Madduri, "FedCompass: Efficient
Cross-Silo Federated Learning on Heterogeneous Client Devices using a Computing Power Aware Scheduler", ICLR 2024.

z_k, the seconds of one unit of work of device k, is its first measurement, then ``0.1 z_k + 0.9 measured``. A group
has an expected arrival T_exp and a latest one T_late. A device that starts now gets its work Q in [Q_min, Q_max]::

    unknown z    Q = Q_max, no group
    join         the group with the largest Q = floor((T_exp - now) / z) in [Q_min, Q_max]
    create       Q' = floor((T_late + z_fastest Q_max - now) / z) over the groups with now < T_late, z_fastest that of
                 the group's fastest device; Q is the largest Q' <= Q_max, at least Q_min; Q_max without any
                 T_exp = now + Q z,   T_late = now + lambda Q z

An upload without a group makes a step at once. One in time (now <= T_late) waits for its group; when the last member
is in, or at T_late, all that are in make a step together with those that came late. A late one waits for the next step
of any group, and its device starts again. With ``Delta_k = u_k - w^b``, tau_k = s_k - 1 at the step and M devices::

    w <- w + sum_k alpha (1 + tau_k)^-a / M Delta_k

Decisions [D]: the unit of work is a local epoch, not a step. Q_max is the common number of epochs and Q_min a fifth of
it, the authors' 100 and 20 in proportion. Devices that start at the same time are assigned in ascending order of z; at
a tie the later group is joined. A lost device leaves its group; if the others are in, they make a step. A group of
which nobody came in time is dissolved without a step. Of two uploads of one device the newer counts. Seconds of a trip
include the links. A step that is not finite drops its uploads. Buffers of the network become the plain mean. alpha =
0.95 (the authors' configuration), a = 0.5, lambda = 1.5.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.admission import overflows
from freshet.core.events import Aggregated, Contribution, Event, Triggered
from freshet.core.messages import Upload
from freshet.core.method import Aggregate, Method, MethodContext, Mismatch, Options, Reject, Verdict, Wait, expect
from freshet.core.scheduling import View
from freshet.core.server import NOT_FINITE, ActiveTrip, Server
from freshet.methods._shared.asynchronous import Arrival, arrival_of, polynomial_discount, stepped_model

#: The weight of a new measurement of z.
NEW_MEASUREMENT = 0.9
NO_GROUP = -1


class FedCompassOptions(Options):
    """Hyper-parameters with the paper's symbols."""

    alpha: float = Field(0.95, gt=0, description="weight of a fresh upload, times the number of devices")
    a: float = Field(0.5, ge=0, description="exponent of the staleness discount (1 + tau)^-a")
    lambda_: float = Field(
        1.5, ge=1, description="lambda: the latest arrival of a group, as a multiple of the expected"
    )
    Q_max: int | None = Field(None, ge=1, description="most local epochs (default: the common number)")
    Q_min: int | None = Field(None, ge=1, description="fewest local epochs (default: a fifth of Q_max)")

    def with_derived(self, context: MethodContext) -> Self:
        """Set Q_max and Q_min from the common number of epochs."""
        most = self.Q_max or context.epochs
        return self.model_copy(update={"Q_max": most, "Q_min": min(most, self.Q_min or max(1, round(most / 5)))})

    @property
    def work(self) -> tuple[int, int]:
        """Q_min and Q_max."""
        return self.Q_min or 1, self.Q_max or 1


@dataclass(frozen=True)
class ArrivalGroup:
    """Devices that should arrive together: those still under way, and those that are in."""

    expected: float
    latest: float
    awaited: tuple[int, ...]
    arrived: tuple[int, ...] = ()


@dataclass(frozen=True)
class WaitingProgress:
    """An upload that waits for its group's step, or as a late one for any."""

    group: int
    arrival: Arrival


@dataclass
class FedCompassState:
    """Seconds per epoch and group by device, the groups by number, how many there were, and the waiting uploads."""

    z: dict[int, float] = field(default_factory=dict)
    group_of: dict[int, int] = field(default_factory=dict)
    groups: dict[int, ArrivalGroup] = field(default_factory=dict)
    count: int = 0
    waiting: dict[int, WaitingProgress] = field(default_factory=dict)


def joined_work(
    options: FedCompassOptions, groups: dict[int, ArrivalGroup], now: float, z: float
) -> tuple[int, int] | None:
    """The group to join and the work until its expected arrival; None if no group fits."""
    fewest, most = options.work
    fitting = [(math.floor((group.expected - now) / z), number) for number, group in groups.items()]
    found = max(((Q, number) for Q, number in fitting if fewest <= Q <= most), default=None)
    return None if found is None else (found[1], found[0])


def created_work(
    options: FedCompassOptions, groups: dict[int, ArrivalGroup], speeds: dict[int, float], now: float, z: float
) -> int:
    """The work of a device that begins a new group."""
    fewest, most = options.work
    work = []
    for group in groups.values():
        if now < group.latest:
            fastest = min(speeds[device] for device in group.awaited + group.arrived)
            work.append(math.floor((group.latest + fastest * most - now) / z))
    return max(fewest, max((Q for Q in work if 0 <= Q <= most), default=most))


class FedCompass(Method):
    """The server's part; devices do plain SGD."""

    about = About(
        "fedcompass",
        "async",
        "FedCompass",
        "Li et al., FedCompass, ICLR 2024",
        space={"alpha": Range(0.3, 10.0, log=True), "a": Range(0.0, 1.0), "lambda_": Range(1.0, 2.0)},
    )
    Options: ClassVar[type[Options]] = FedCompassOptions
    options: FedCompassOptions
    state: FedCompassState

    def __init__(self, options: FedCompassOptions, context: MethodContext) -> None:
        super().__init__(options.with_derived(context), context)
        self.state = FedCompassState()

    # ---- work

    def select(self, view: View, count: int, candidates: list[int]) -> list[int]:
        """Uniformly among the devices that do not wait for their group; the fastest start first."""
        state = self.state
        waits = {device for device, each in state.waiting.items() if each.group in state.groups}
        free = [device for device in candidates if device not in waits]
        chosen = view.rng.permutation(free)[:count].tolist()
        return sorted(chosen, key=lambda device: (state.z.get(device, math.inf), device))

    def epochs(self, server: Server, device: int) -> int:
        """``Q_k``, with which the device joins or begins a group."""
        state, now = self.state, server.now
        self._leave_group(device)
        z = state.z.get(device)
        if z is None:
            return self.options.work[1]
        joined = joined_work(self.options, state.groups, now, z)
        if joined is not None:
            number, Q = joined
            group = state.groups[number]
            state.groups[number] = replace(group, awaited=(*group.awaited, device))
        else:
            number, Q = state.count, created_work(self.options, state.groups, state.z, now, z)
            state.groups[number] = ArrivalGroup(now + Q * z, now + self.options.lambda_ * Q * z, (device,))
            state.count += 1
        state.group_of[device] = number
        return Q

    def _leave_group(self, device: int) -> int:
        """Take a device out of its group, which it may have outlived. Returns the group's number."""
        state, number = self.state, self.state.group_of.pop(device, NO_GROUP)
        group = state.groups.get(number)
        if group is None or device not in group.awaited:
            return number
        awaited = tuple(each for each in group.awaited if each != device)
        state.groups[number] = replace(group, awaited=awaited)
        if not awaited and not group.arrived:
            del state.groups[number]
        return number

    # ---- arrivals

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        state, device, now = self.state, upload.device, server.now
        arrival = arrival_of(server, upload, trip, server.store.get(trip.base))
        measured, z = (now - trip.started) / trip.epochs, state.z.get(device)
        if measured > 0.0:
            state.z[device] = measured if z is None else (1.0 - NEW_MEASUREMENT) * z + NEW_MEASUREMENT * measured
        group = state.groups.get(state.group_of.get(device, NO_GROUP))
        number = self._leave_group(device)
        if number == NO_GROUP:
            return self._step(server, [arrival])
        if group is None or now > group.latest:
            state.waiting[device] = WaitingProgress(NO_GROUP, arrival)
            return Wait()
        left = state.groups.get(number, replace(group, awaited=()))
        state.groups[number] = replace(left, arrived=(*left.arrived, device))
        state.waiting[device] = WaitingProgress(number, arrival)
        return (None if state.groups[number].awaited else self._step_group(server, number)) or Wait()

    def forget(self, server: Server, device: int) -> Verdict | None:
        number = self._leave_group(device)
        group = self.state.groups.get(number)
        return None if group is None or group.awaited else self._step_group(server, number)

    def timer(self, server: Server) -> float | None:
        return min((group.latest for group in self.state.groups.values()), default=None)

    def on_timer(self, server: Server) -> Verdict | None:
        """The first group whose time is over makes its step."""
        number = min(self.state.groups, key=lambda each: (self.state.groups[each].latest, each))
        return self._step_group(server, number)

    def _step_group(self, server: Server, number: int) -> Verdict | None:
        state = self.state
        group = state.groups.pop(number)
        if not group.arrived:
            return None
        due = {device: each for device, each in state.waiting.items() if each.group in (NO_GROUP, number)}
        state.waiting = {device: each for device, each in state.waiting.items() if device not in due}
        return self._step(server, [each.arrival for each in due.values()]) if due else None

    def _step(self, server: Server, arrivals: list[Arrival]) -> Verdict:
        o, M, layout = self.options, self.context.devices, self.context.layout
        taus = [server.version - each.base for each in arrivals]
        shares = [o.alpha * polynomial_discount(tau, o.a) / M for tau in taus]
        step = np.zeros(layout.learnable)
        for share, each in zip(shares, arrivals, strict=True):
            step += share * each.progress
        new, length = stepped_model(layout, server.weights, step, [each.weights for each in arrivals])
        if overflows(new, length):
            return Reject(NOT_FINITE)
        parts = [
            Contribution(each.device, each.base, tau + 1, share)
            for each, tau, share in zip(arrivals, taus, shares, strict=True)
        ]
        return Aggregate(new, parts, {"alpha": sum(shares), "devices": M}, length)

    @classmethod
    def audit(cls, options: FedCompassOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check every weight, and that the work of every trip lies within its bounds."""
        fewest, most = options.work
        if isinstance(event, Triggered) and not fewest <= event.epochs <= most:
            raise Mismatch(f"device {event.device} trains {event.epochs} epochs, not {fewest} to {most}")
        if isinstance(event, Aggregated):
            for part in event.contributions:
                share = options.alpha * polynomial_discount(part.staleness - 1, options.a) / event.numbers["devices"]
                expect(f"weight of device {part.device}", part.weight, share)
            expect("alpha", event.numbers["alpha"], sum(part.weight for part in event.contributions))
