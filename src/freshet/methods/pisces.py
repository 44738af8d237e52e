"""Pisces: start useful devices that are rarely stale, and aggregate at the pace of the slowest that is running.

Z. Jiang, W. Wang, B. Li, B. Li, "Pisces: Efficient Federated Learning via Guided Asynchronous Training", SoCC 2022.

A device reports the moving average of its mini-batch losses over its first epoch (decay 0.01); l_k is its root.
taubar_k is the mean of its last 5 values of tau = s - 1. To start N devices::

    explore   min(#unexplored, Binomial(N, epsilon)) that never started, at random;   epsilon <- max(0.98 epsilon, 0.3)
    exploit   the rest, by the largest U_k = n_k l_k (1 + taubar_k)^-beta

The server aggregates its buffer B if nobody is running or ``now - t_last >= L_max / C``. L_max is the longest last
trip among the devices that are running, C the number of devices in flight::

    w <- w + sum_B n_k / (sum_B n) (1 + tau_k)^-beta (u_k - w^v)

Decisions [D]: differences are to the *current* model w^v, and l_k comes from batch means, both as in the authors' code
(the paper's utility is the root mean square of sample losses). Devices that wait in the buffer do not start. If fewer
explored devices are free than wanted, unexplored ones fill up. If no running device has a known trip, L_max is the
option ``first_latency``, 180 s in the code. The pace is checked at every event and by a timer (the code: every 5 s).
Of two uploads of one device the newer counts. Losses, staleness and durations count with the step that uses the
upload. Buffers of the network become the plain mean. beta = 0.5, epsilon = 0.9.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.admission import overflows
from freshet.core.defence import bounded_notes, bounded_samples
from freshet.core.events import Aggregated, Contribution, Event
from freshet.core.messages import LOSS_DECAY, Number, Upload
from freshet.core.method import (
    Aggregate,
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
from freshet.core.scheduling import View
from freshet.core.server import NOT_FINITE, ActiveTrip, Server
from freshet.core.vectors import Vector
from freshet.methods._shared.asynchronous import polynomial_discount, stepped_model

#: Of the code: decay of the loss, values of staleness that are kept, decay and least value of epsilon.
DECAY, WINDOW, EPSILON_DECAY, LEAST_EPSILON = 0.01, 5, 0.98, 0.3


class PiscesOptions(Options):
    """Hyper-parameters with the paper's symbols."""

    beta: float = Field(0.5, ge=0, description="exponent of the staleness discounts, of utility and of weight")
    epsilon: float = Field(0.9, ge=0, le=1, description="share of devices that are explored, at first")
    first_latency: float = Field(180.0, gt=0, description="seconds of a trip while none is known")


class LossRule(LocalRule):
    """Plain SGD; the trip reports its loss."""

    reports_loss: ClassVar[bool] = True

    def leak(self) -> str | None:
        return "it reports its training loss beside the model"


@dataclass(frozen=True)
class PacedUpload:
    """An upload in the buffer, with its trip's loss and seconds."""

    base: int
    samples: int
    weights: Vector
    loss: float
    seconds: float


@dataclass
class PiscesState:
    """Per device: l_k, the last tau, seconds of the last trip, whether it ever started. The buffer, epsilon, t_last."""

    epsilon: float
    root_loss: dict[int, float] = field(default_factory=dict)
    taus: dict[int, list[int]] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    explored: dict[int, bool] = field(default_factory=dict)
    buffer: dict[int, PacedUpload] = field(default_factory=dict)
    last: float = 0.0


class Pisces(Method):
    """The server's part."""

    about = About(
        "pisces",
        "async",
        "Pisces",
        "Jiang et al., Pisces, SoCC 2022",
        space={"beta": Range(0.2, 0.8)},
    )
    Options: ClassVar[type[Options]] = PiscesOptions
    options: PiscesOptions
    state: PiscesState

    def __init__(self, options: PiscesOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.state = PiscesState(options.epsilon)

    @classmethod
    def rule(cls, options: PiscesOptions) -> LocalRule:
        return LossRule()

    def instruct(self, server: Server, device: int) -> dict[str, Number]:
        return {LOSS_DECAY: DECAY}

    def validate_report(self, upload: Upload, trip: ActiveTrip) -> str | None:
        loss = upload.report.get("loss")
        return None if loss is not None and loss >= 0.0 else f"reports a loss of {loss}, which is impossible"

    # ---- which devices start

    def utility(self, device: int) -> float:
        """``U_k``; 0 before a device's first upload counts."""
        taus = self.state.taus.get(device, [0])
        discount = float((1.0 + sum(taus) / len(taus)) ** -self.options.beta)
        return self.context.samples.item(device) * self.state.root_loss.get(device, 0.0) * discount

    def select(self, view: View, count: int, candidates: list[int]) -> list[int]:
        state, rng = self.state, view.rng
        free: list[int] = rng.permutation([each for each in candidates if each not in state.buffer]).tolist()
        new = [device for device in free if device not in state.explored]
        known = sorted((device for device in free if device in state.explored), key=self.utility, reverse=True)
        explore = min(len(new), int(rng.binomial(count, state.epsilon)))
        state.epsilon = max(EPSILON_DECAY * state.epsilon, min(LEAST_EPSILON, state.epsilon))
        chosen = [*new[:explore], *known[: count - explore]]
        chosen += new[explore : explore + count - len(chosen)]
        state.explored |= dict.fromkeys(chosen, True)
        return chosen

    # ---- when to aggregate

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        samples, device = self.context.samples.item(upload.device), upload.device
        seconds, loss = server.now - trip.started, float(upload.report["loss"])
        self.state.buffer[device] = PacedUpload(trip.base, samples, upload.weights, loss, seconds)
        return self._step(server) if self._due_at(server, device) <= server.now else Wait()

    def forget(self, server: Server, device: int) -> Verdict | None:
        return self._step(server) if self._due_at(server, device) <= server.now else None

    def timer(self, server: Server) -> float | None:
        due = self._due_at(server)
        return due if due < math.inf else None

    def on_timer(self, server: Server) -> Verdict | None:
        return self._step(server)

    def _due_at(self, server: Server, landed: int | None = None) -> float:
        """When to aggregate. ``landed`` is a device that no longer runs."""
        running = [device for device in server.active_trips if device != landed]
        if not self.state.buffer:
            return math.inf
        if not running:
            return server.now
        known = [self.state.seconds[device] for device in running if device in self.state.seconds]
        return self.state.last + max(known, default=self.options.first_latency) / max(1, self.context.in_flight)

    def _step(self, server: Server) -> Verdict:
        state, layout, w = self.state, self.context.layout, server.weights
        buffer, state.buffer = state.buffer, {}
        claimed = [each.samples for each in buffer.values()]
        samples = bounded_samples(claimed, self.context.share_limit(len(buffer)))
        total, notes, taus = sum(samples), bounded_notes(list(buffer), claimed, samples), {}
        step, shares = np.zeros(layout.learnable), {}
        for own, (device, each) in zip(samples, buffer.items(), strict=True):
            taus[device] = server.version - each.base
            shares[device] = own / total * polynomial_discount(taus[device], self.options.beta)
            step += shares[device] * (each.weights[: layout.learnable].astype(np.float64) - w[: layout.learnable])
        new, length = stepped_model(layout, w, step, [each.weights for each in buffer.values()])
        if overflows(new, length):
            return Reject(NOT_FINITE)
        for device, each in buffer.items():
            state.root_loss[device], state.seconds[device] = math.sqrt(each.loss), each.seconds
            state.taus[device] = [*state.taus.get(device, []), taus[device]][-WINDOW:]
        waited, state.last = server.now - state.last, server.now
        parts = [Contribution(device, each.base, taus[device] + 1, shares[device]) for device, each in buffer.items()]
        numbers = {"alpha": sum(shares.values()), "samples": samples}
        return Aggregate(new, parts, {**numbers, "waited": waited}, length, notes)

    @classmethod
    def audit(cls, options: PiscesOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check every weight, and the time since the last step."""
        if not isinstance(event, Aggregated):
            return
        samples = event.numbers["samples"]
        for part, own in zip(event.contributions, samples, strict=True):
            share = own / sum(samples) * polynomial_discount(part.staleness - 1, options.beta)
            expect(f"weight of device {part.device}", part.weight, share)
        expect("alpha", event.numbers["alpha"], sum(part.weight for part in event.contributions))
        if not math.isclose(event.numbers["waited"], time - memory.get("last", 0.0), rel_tol=1e-6, abs_tol=0.1):
            raise Mismatch(f"waited {event.numbers['waited']} s, the log says {time - memory.get('last', 0.0)} s")
        memory["last"] = time
