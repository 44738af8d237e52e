"""FedASMU: asynchronous federated learning with dynamic staleness-aware aggregation and fresh models in mid-training.

J. Jia, J. Liu et al., "Efficient Federated Learning with Timely Update Dissemination" (FedASMU: AAAI 2024).

Server, for an upload ``w_i`` that device i trained from version o while the model is at version t, ``s = t - o + 1``::

    xi    = lambda_i / (sqrt(t) s^sigma_i) + iota_i          alpha = mu_alpha xi / (1 + mu_alpha xi)
    w    <- (1 - alpha) w + alpha w_i                        (apply = "mix", the paper's)
    w    <- w + alpha d,  d = w_i - w_o - beta (w_g - w_o)   (apply = "progress": no pull back to an old base)

lambda, sigma, iota descend the loss of the model that the device's previous upload produced. This upload gives an
estimate of its gradient: ``g = -d / (eta ((1 - beta) n1 + n2))``, n1 and n2 the steps before and after the merge.
The gradient is one device's, summed along its path, and taken at w_o, ``gap`` versions later (E10).
The index p marks the values of that previous upload, made at version p; ``step`` is what it moved the model along::

    q = <g, step>      c = mu_alpha / (1 + mu_alpha xi_p)^2      r = 1 / (sqrt(p) s_p^sigma_p)
    lambda -= eta_lambda q c r      sigma += eta_sigma q c r lambda_p ln(s_p)      iota -= eta_iota q c

Device, at the start of epoch l* with fresh version g > o and ``w_b`` the local model::

    phi = gamma / sqrt(g) (1 - upsilon / sqrt(g - o + 1))    beta = mu_beta phi / (1 + mu_beta phi)
    w_a = (1 - beta) w_b + beta w_g

gamma and upsilon descend the mini-batch loss at ``w_a``, with gradient h::

    q = <h, w_g - w_b>      c = mu_beta / (1 + mu_beta phi)^2
    gamma -= eta_gamma q c (1 - upsilon / sqrt(g - o + 1)) / sqrt(g)
    upsilon += eta_upsilon q c gamma / (sqrt(g) sqrt(g - o + 1))

The reward ``R = loss(w_b) - loss(w_a)`` trains the selector of l*. An LSTM selects the slot of a device's first trip
and learns by REINFORCE. A table H of the device selects later slots, by an action a in {-1, 0, +1} from l to l'::

    theta += eta_rl (P / mu) grad log P(l*) (R - b) / std      H(l, a) += phi_q (R + psi max_a' H(l', a') - H(l, a))

b and std are running values. P / mu is the probability of the slot over that with which it was chosen (std and P / mu
are 1 when raw). ``equations = "published"`` keeps the printed forms where they are not derivatives (errata E1, E2, E4,
E6, E13).
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from freshet.core.about import About, Curve, Range
from freshet.core.admission import overflows
from freshet.core.events import Contribution, Event, Noted
from freshet.core.messages import Number, Upload
from freshet.core.method import Aggregate, Discard, Facts, LocalRule, Method, MethodContext, Options, Reject, Verdict
from freshet.core.server import NOT_FINITE, ActiveTrip, Server
from freshet.core.vectors import mix
from freshet.errors import ConfigError
from freshet.methods.asmu import replay
from freshet.methods.asmu.rule import ASMUOptions, FreshModelRule
from freshet.methods.asmu.staleness import (
    Control,
    PastUpload,
    control_gradients,
    cosine,
    descend,
    saturate,
    staleness_weight,
    training_scale,
)
from freshet.methods.asmu.steps import Course, StepMemory, TrainedModel, move_along, write_step

if TYPE_CHECKING:
    from freshet.methods.asmu.meta import MetaSelector


#: Upper bound of a reward: its square must be finite, because it is averaged.
MAX_REWARD = 1e100


@dataclass
class DeviceControl:
    """Server state of one device: its controls and the numbers of its last accepted upload."""

    control: Control
    past: PastUpload | None = None


@dataclass
class ServerState:
    """Everything that the server has learned."""

    steps: StepMemory
    meta: "MetaSelector"
    devices: dict[int, DeviceControl] = field(default_factory=dict)
    #: Replaces ``steps`` and ``devices`` under ``controls = "course"``.
    course: Course | None = None
    adaptations: int = 0
    skipped: int = 0


class FedASMU(Method):
    """The server's part."""

    about = About(
        "fedasmu",
        "async",
        "FedASMU",
        "Liu et al., FedASMU, AAAI 2024",
        variants={
            "fedasmu-da": {"dynamic_server": False},
            "fedasmu-fa": {"adaptive_device": False},
            "fedasmu-0": {"dynamic_server": False, "adaptive_device": False},
            "fedasmu-published": {"equations": "published"},
            "fedasmu-progress": {"apply": "progress"},
            "fedasmu-course": {"apply": "progress", "controls": "course"},
        },
        space={
            "lambda0": Range(0.1, 20.0, log=True),
            "sigma0": Range(0.0, 1.5),
            "iota0": Range(0.0, 0.3),
            "gamma0": Range(0.1, 5.0, log=True),
            "upsilon0": Range(0.0, 1.0),
        },
        # Progress adds up: with 30 devices in flight, an alpha of 0.03 to 0.2 has the effect of a mean.
        spaces={
            name: {"lambda0": Range(0.1, 3.0, log=True), "iota0": Range(0.0, 0.1)}
            for name in ("fedasmu-progress", "fedasmu-course")
        },
        curves=(
            Curve("lambda", "aggregate", "lambda", "λ", "server, scale of α"),
            Curve("sigma", "aggregate", "sigma", "σ", "server, power of staleness"),
            Curve("iota", "aggregate", "iota", "ι", "server, offset of α"),
            Curve("gamma", "merge", "gamma_after", "γ", "device, scale of β"),
            Curve("upsilon", "merge", "upsilon_after", "υ", "device, offset of β"),
        ),
    )
    Options: ClassVar[type[Options]] = ASMUOptions
    options: ASMUOptions
    state: ServerState

    @classmethod
    def check(cls, options: ASMUOptions, facts: Facts) -> None:
        """Check that a slot given by number is one of the epochs."""
        slot, epochs = options.slot, facts.epochs
        if isinstance(slot, int) and not 1 <= slot <= epochs:
            raise ConfigError("method.slot", f"must be an epoch in 1..{epochs} (training.epochs), but {slot} was given")

    def __init__(self, options: ASMUOptions, context: MethodContext) -> None:
        from freshet.methods.asmu.meta import MetaSelector

        super().__init__(options, context)
        budget = options.control_budget_mb * 2**20
        steps = StepMemory(options.control_memory, context.layout.learnable, budget, context.seed)
        learning = (options.eta_rl, options.rho, context.seed, options.advantage, options.epsilon)
        self.state = ServerState(steps, MetaSelector(context.most_epochs, *learning))
        if options.dynamic_server and options.controls == "course":
            self.state.course = Course(self._first_control())
        if options.meta_from:
            self.state.meta.load(Path(options.meta_from))

    def _first_control(self) -> Control:
        return Control(self.options.lambda0, self.options.sigma0, self.options.iota0)

    @classmethod
    def rule(cls, options: ASMUOptions) -> LocalRule:
        return FreshModelRule(options) if options.adaptive_device else LocalRule()

    def instruct(self, server: Server, device: int) -> dict[str, Number]:
        learned = self.options.adaptive_device and self.options.slot == "rl"
        return {"meta_slot": self.state.meta.best_slot(self.epochs(server, device))} if learned else {}

    def discard_early(self, server: Server, trip: ActiveTrip) -> Discard | None:
        return Discard("too stale") if server.staleness(trip) > self.options.tau_max else None

    def validate_report(self, upload: Upload, trip: ActiveTrip) -> str | None:
        beta, report = upload.merged.get("beta", 0.0), upload.report
        if not 0.0 <= beta < 1.0:
            return f"reports a merge with weight {beta}, which is impossible"
        before = upload.merged.get("n1", -1 if beta else 0)
        if not (isinstance(before, int) and 0 <= before < upload.steps):
            return f"reports a merge after {upload.merged.get('n1')} of {upload.steps} steps, which is impossible"
        if "reward" in report and (trip.slot is None or report.get("slot") != trip.slot):
            return f"reports slot {report.get('slot')}, but asked in {trip.slot}"
        if "reward" in report and report["slot"] > self.state.meta.epochs:
            return f"reports slot {report['slot']}, but the meta model has {self.state.meta.epochs}"
        if abs(report.get("reward", 0.0)) > MAX_REWARD:
            return f"reports a reward of {report['reward']:g}, which is impossible"
        return None

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        s, w, o, n, state = (
            server.staleness(trip),
            server.weights,
            self.options,
            self.context.layout.learnable,
            self.state,
        )
        known = state.devices.get(upload.device) or DeviceControl(self._first_control())
        # E6: training itself produced (w_i - w_o) - beta (w_g - w_o).
        base, beta = server.store.get(trip.base), float(upload.merged.get("beta", 0.0))
        fresh = base if trip.fresh is None or beta == 0.0 else server.store.get(trip.fresh)
        start, along = (base, beta) if o.apply == "progress" else (w, 0.0)
        new, product = np.empty_like(w), None
        if o.dynamic_server and state.course is None:
            measured = beta if o.equations == "corrected" else 0.0
            trained = TrainedModel(upload.weights, base, fresh)
            product, step, length = state.steps.measure(upload.device, trained, start, along, measured)
        else:
            step = new[:n] if state.course is None else np.empty(n, np.float32)
            length = write_step(step, upload.weights[:n], start[:n], fresh[:n], base[:n], along)
        if state.course is not None:
            product, before = state.course.measure(trip.base, step)
            known = DeviceControl(state.course.control, before)
        numbers: dict[str, Any] = {"adapted": False, "lr": trip.lr, "steps": upload.steps, "beta": beta}
        numbers["n1"] = int(upload.merged.get("n1", 0))
        c = known.control
        if product is not None and known.past is not None:
            c, adaptation = self._adapt(c, known.past, product, length, upload, trip)
            numbers |= adaptation
        elif known.past is not None:
            numbers["forgotten"] = True  # dropped to stay within the budget: one adaptation is skipped
        xi = staleness_weight(c, server.age, s, o.xi_min)
        alpha = saturate(o.mu_alpha, xi)
        move_along(w[:n], step, alpha, new[:n])
        mix(w[n:], upload.weights[n:], alpha, out=new[n:])
        self.context.layout.max_counters(new, w, upload.weights)
        if not math.isfinite(length + (product or 0.0)) or overflows(new, alpha * length):
            return Reject(NOT_FINITE)
        # Only accepted uploads change the state.
        state.adaptations += numbers["adapted"]
        state.skipped += "forgotten" in numbers
        past = PastUpload(server.version, server.age, s, xi, c, length)
        if state.course is not None:
            numbers["course"] = state.course.advance(past, alpha, step, server.store.__contains__)
        elif o.dynamic_server:
            state.steps.remember(upload.device, step)
            state.devices[upload.device] = DeviceControl(c, past)
        else:
            state.devices[upload.device] = DeviceControl(c)
        news = self._learn_slot(upload, trip)
        numbers |= {"lambda": c.lambda_, "sigma": c.sigma, "iota": c.iota, "xi": xi, "alpha": alpha}
        part = Contribution(upload.device, trip.base, s, alpha)
        return Aggregate(new, (part,), numbers, alpha * length, news)

    def _adapt(
        self, control: Control, past: PastUpload, product: float, length: float, upload: Upload, trip: ActiveTrip
    ) -> tuple[Control, dict[str, Any]]:
        """Return the adapted controls and the numbers for the log.

        The controls of the device descend the loss of the model that its last upload produced. Under ``course`` the
        shared controls descend along the course that led to the base. ``length`` is that of the new step. A trip at a
        learning rate of 0 gives no gradient, so the controls stay.
        """
        o = self.options
        scale, numbers = trip.lr * upload.steps, dict[str, Any]()  # as printed, where one epoch is one step (E5)
        if o.equations == "corrected":
            # E1: training moves against the gradient. E6: the merge keeps only a part of the steps before it.
            # A step is the optimiser's response to a unit gradient: 1 for plain SGD, more with momentum.
            n1, beta = int(upload.merged.get("n1", 0)), float(upload.merged.get("beta", 0.0))
            reach = [self.context.reach(n1), self.context.reach(upload.steps)]
            scale = -training_scale(trip.lr, reach[1], reach[0], beta)
            numbers = {} if reach == [n1, upload.steps] else {"reach": reach}
        if scale == 0.0:
            return control, {"untaught": True, **numbers}
        q = product / scale
        if o.controls != "loss":  # <g, step> / (|g| |step|); g points against what training produced
            q, numbers = -cosine(product, length, past.length), numbers | {"length": length, "length_p": past.length}
        gradients = control_gradients(q, o.mu_alpha, o.xi_min, past, o.equations, o.controls == "course")
        moved = descend(control, gradients, o.control_rates())
        names = ("grad_lambda", "grad_sigma", "grad_iota")
        return moved, {
            "adapted": True,
            "gap": trip.base - past.version - 1,  # E10
            "product": product,
            "q": q,
            "p": past.p,
            "s_p": past.s_p,
            "xi_p": past.xi_p,
            "lambda_p": past.control.lambda_,
            "sigma_p": past.control.sigma,
            "iota_p": past.control.iota,
            **numbers,
            **dict(zip(names, gradients, strict=True)),
        }

    def notices(self) -> list[str]:
        return [*self.options.slow_rate_notices(), *self._memory_notices()]

    def _memory_notices(self) -> list[str]:
        """Say what happens to the steps that do not fit in memory."""
        limit, devices = self.state.steps.limit, self.context.devices
        if not self.options.dynamic_server or self.state.course is not None or limit is None or limit >= devices:
            return []
        kept = f"{self.options.control_budget_mb} MiB (method.control_budget_mb) hold the steps of {limit} devices"
        if self.options.control_memory == "exact":
            size = 4e-9 * self.context.layout.learnable * (devices - limit)
            return [f"{kept} of {devices}; those of the others go to a temporary file of up to {size:.1f} GB"]
        return [f"{kept} of {devices}; a device with a forgotten step skips one adaptation of its controls"]

    def summary(self) -> dict[str, Any]:
        return {"adaptations": self.state.adaptations, "adaptations_skipped": self.state.skipped}

    def _learn_slot(self, upload: Upload, trip: ActiveTrip) -> tuple[Noted, ...]:
        """Add the upload's reward to the running mean. After a device's first trip, train the meta model too."""
        if "reward" not in upload.report:
            return ()
        reward, meta = float(upload.report["reward"]), self.state.meta
        meta.add_reward(reward)
        if not upload.report.get("first"):
            return ()
        meta.reinforce(int(upload.report["slot"]), reward, epochs=trip.epochs)
        news = meta.changed_distribution()
        return () if news is None else (Noted("slots", news),)

    @classmethod
    def audit(cls, options: Any, event: Event, time: float, memory: dict[Any, Any]) -> None:
        replay.audit_event(options, event, memory, cls.about.kind)
