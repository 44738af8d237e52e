"""FedASMU: asynchronous federated learning with dynamic staleness-aware aggregation and fresh models in mid-training.

J. Jia, J. Liu et al., "Efficient Federated Learning with Timely Update Dissemination" (FedASMU: AAAI 2024).

Server, for an upload ``w_i`` that device i trained from version o while the model is at version t, ``s = t - o + 1``::

    xi    = lambda_i / (sqrt(t) s^sigma_i) + iota_i          alpha = mu_alpha xi / (1 + mu_alpha xi)
    w    <- (1 - alpha) w + alpha w_i                        (apply = "mix", the paper's)
    w    <- w + alpha d,  d = w_i - a                        (apply = "progress": no pull back to an old base)

The anchor a is w_o, or ``w_o + beta (w_g - w_o)`` after a merge; of several merges, each does ``a += beta (w_g - a)``.
lambda, sigma, iota descend the loss of the model that the device's previous upload produced. This upload gives an
estimate of its gradient: ``g = -d / (eta ((1 - beta) n1 + n2))``, n1 and n2 the steps before and after the merge.
The gradient is one device's, summed along its path, and taken at w_o, ``gap`` versions later (E10). With
``judge = "base"`` the upload judges the aggregation that made w_o instead, and the controls of its device move
(gap 0). ``local_work = "passes"`` counts passes over the data instead of steps.
The index p marks the values of the judged upload, made at version p; ``step`` is what it moved the model along::

    q = <g, step>      c = mu_alpha / (1 + mu_alpha xi_p)^2      r = 1 / (sqrt(p) s_p^sigma_p)
    lambda -= eta_lambda q c r      sigma += eta_sigma q c r lambda_p ln(s_p)      iota -= eta_iota q c

Device, at the start of epoch l* with fresh version g > o and ``w_b`` the local model::

    phi = gamma / sqrt(g) (1 - upsilon / sqrt(g - o + 1))    beta = mu_beta phi / (1 + mu_beta phi)
    w_a = (1 - beta) w_b + beta w_g

gamma and upsilon descend the mini-batch loss at ``w_a``, with gradient h::

    q = <h, w_g - w_b>      c = mu_beta / (1 + mu_beta phi)^2
    gamma -= eta_gamma q c (1 - upsilon / sqrt(g - o + 1)) / sqrt(g)
    upsilon += eta_upsilon q c gamma / (sqrt(g) sqrt(g - o + 1))

With ``merge = "rebase"`` (not in the paper) ``w_a = w_b + beta (w_g - a)`` and ``q = <h, w_g - a>``: no progress is
given up, so g divides by all n steps. ``refresh`` repeats the request in the next epochs; for a further model, o is the
version that the device merged last. ``push_after`` lets the server send models unasked.

The reward ``R = loss(w_b) - loss(w_a)`` trains the selector of l*. An LSTM selects the slot until a device has merged
once, and learns by REINFORCE from that merge. A table H of the device selects later slots, by an action a in
{-1, 0, +1} from l to l'::

    theta += eta_rl grad log P(l*) (R - b)      H(l, a) += phi_q (R + psi max_a' H(l', a') - H(l, a))

b is the running mean of R. Both choices are epsilon-greedy, ties at random. A trip without a merge teaches nothing.
That is ``selector = "printed"``. With ``selector = "shaped"`` (not in the paper) both learn faster (``asmu/meta.py``)::

    theta += eta_rl (P / mu) grad log P(l*) (R - b) / std      H(l, a) += phi_q (R - b + psi max_a' H(l', a') - H(l, a))

std is the running deviation of R, and P / mu the probability of the slot over that with which it was chosen. A request
that found nothing newer has R = 0, untried actions come first, and trip k of a device explores with epsilon / k.

``equations = "published"`` keeps the printed forms where they are not derivatives (errata E1, E2, E4, E6, E13).
"""

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from freshet.core.about import About, Curve, Range
from freshet.core.admission import overflows
from freshet.core.events import Contribution, Event, Noted
from freshet.core.messages import Number, Upload
from freshet.core.method import Aggregate, Discard, LocalRule, Method, MethodContext, Options, Reject, Verdict
from freshet.core.server import NOT_FINITE, ActiveTrip, Server
from freshet.core.vectors import Vector, distance, mix
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
from freshet.methods.asmu.steps import Course, Makers, StepMemory, TrainedModel, move_along, next_step, write_step

if TYPE_CHECKING:
    from freshet.methods.asmu.meta import MetaSelector


#: Upper bound of a reward: its square must be finite, because it is averaged.
MAX_REWARD = 1e100


#: A fixed beta does not depend on these, so there is nothing to tune.
FIXED_BETA: dict[str, Range | None] = {"gamma0": None, "upsilon0": None}


@dataclass
class DeviceControl:
    """Server state of one device: its controls and the numbers of its last accepted upload."""

    control: Control
    past: PastUpload | None = None


class MergeNumbers(NamedTuple):
    """The merges of an upload: their weights, and the steps before each."""

    betas: list[float]
    before: list[int]

    @staticmethod
    def of(upload: Upload) -> "MergeNumbers":
        numbers = [merge.numbers for merge in upload.merges]
        return MergeNumbers([float(n.get("beta", 0.0)) for n in numbers], [int(n.get("n1", 0)) for n in numbers])

    def log_entries(self) -> dict[str, Any]:
        """beta and n1 of the only merge (0 without one), or lists of them."""
        if len(self.betas) > 1:
            return {"beta": self.betas, "n1": self.before}
        return {"beta": self.betas[0] if self.betas else 0.0, "n1": self.before[0] if self.before else 0}


class Judged(NamedTuple):
    """An upload's step, and the aggregation that the upload judges: whose it was, and how the upload continues it."""

    device: int
    step: Vector
    length: float
    #: ``<d, step of that aggregation>`` with d what training produced; None if nothing is judged.
    product: float | None
    past: PastUpload | None


@dataclass
class ServerState:
    """Everything that the server has learned."""

    steps: StepMemory
    meta: "MetaSelector"
    devices: dict[int, DeviceControl] = field(default_factory=dict)
    #: Replaces ``steps`` and ``devices`` under ``controls = "course"``.
    course: Course | None = None
    #: Replaces ``steps`` under ``judge = "base"``.
    makers: Makers | None = None
    adaptations: int = 0
    skipped: int = 0


def _noised_model(server: Server, upload: Upload, part: Contribution) -> tuple[Vector, float]:
    """``w + alpha d`` with noise, for an upload that was clipped on arrival; and the length of the step."""
    w, start = server.weights, server.start_of(upload)
    step = server.release(part.weight * (upload.weights.astype(np.float64) - start), [part])
    with np.errstate(over="ignore"):  # the caller refuses a model that is not finite
        new: Vector = (w + step).astype(np.float32)
    return new, distance(new, w)


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
            "fedasmu-fresh": {"apply": "progress", "controls": "course", "merge": "rebase"},
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
            name: {"lambda0": Range(0.1, 3.0, log=True), "iota0": Range(0.0, 0.1), **fixed}
            for name, fixed in (("fedasmu-progress", {}), ("fedasmu-course", {}), ("fedasmu-fresh", FIXED_BETA))
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

    def __init__(self, options: ASMUOptions, context: MethodContext) -> None:
        from freshet.methods.asmu.meta import SELECTORS, load_pretrained

        super().__init__(options, context)
        budget = options.control_budget_mb * 2**20
        steps = StepMemory(options.control_memory, context.layout.learnable, budget, context.seed)
        learning = (options.eta_rl, options.rho, context.seed, options.epsilon)
        self.state = ServerState(steps, SELECTORS[options.selector](context.most_epochs, *learning))
        if options.dynamic_server and options.controls == "course":
            self.state.course = Course(self._first_control())
        if options.dynamic_server and options.judge == "base":
            self.state.makers = Makers()
        load_pretrained(self.state.meta, options.meta_from, self.about.kind)

    def _first_control(self) -> Control:
        return Control(self.options.lambda0, self.options.sigma0, self.options.iota0)

    @classmethod
    def rule(cls, options: ASMUOptions) -> LocalRule:
        return FreshModelRule(options) if options.adaptive_device else LocalRule()

    @classmethod
    def beyond_sum(cls, options: ASMUOptions) -> str | None:
        """An upload is a sum of one if its weight is not learned and the server adds what training produced.

        Slots may be learned: only their device and the server see them, since rewards are withheld.
        """
        o = options
        if o.dynamic_server or o.apply != "progress":
            remedy = 'set method.apply to "progress" and method.dynamic_server to false'
            return f"it mixes whole models, with weights learned from them; {remedy}"
        if o.adaptive_device and o.merge != "rebase":
            return 'a merge in a learned slot moves the model by more than training; set method.merge to "rebase"'
        return FreshModelRule(o.model_copy(update={"slot": "last"})).leak() if o.adaptive_device else None

    def instruct(self, server: Server, device: int) -> dict[str, Number]:
        learned = self.options.adaptive_device and self.options.slot == "rl"
        return {"meta_slot": self.state.meta.best_slot(self.epochs(server, device))} if learned else {}

    def discard_early(self, server: Server, trip: ActiveTrip) -> Discard | None:
        return Discard("too stale") if server.staleness(trip) > self.options.tau_max else None

    def validate_report(self, upload: Upload, trip: ActiveTrip) -> str | None:
        report = upload.report
        if "reward" in report and (trip.slot is None or report.get("slot") != trip.slot):
            return f"reports slot {report.get('slot')}, but asked in {trip.slot}"
        if "reward" in report and report["slot"] > self.state.meta.epochs:
            return f"reports slot {report['slot']}, but the meta model has {self.state.meta.epochs}"
        if abs(report.get("reward", 0.0)) > MAX_REWARD:
            return f"reports a reward of {report['reward']:g}, which is impossible"
        return None

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        w, o, n, state = server.weights, self.options, self.context.layout.learnable, self.state
        s, merges = server.staleness(trip), MergeNumbers.of(upload)
        numbers: dict[str, Any] = {"adapted": False, "lr": trip.lr, "steps": upload.steps} | merges.log_entries()
        judged = self._judge(server, upload, trip)
        step, length = judged.step, judged.length
        c, moved = self._control(upload.device), None
        if judged.product is not None and judged.past is not None:
            moved, adaptation = self._adapt(self._control(judged.device), judged, upload, trip)
            c = moved if judged.device == upload.device else c
            numbers |= adaptation
        elif judged.past is not None:
            numbers["forgotten"] = True  # dropped to stay within the budget: one adaptation is skipped
        xi = staleness_weight(c, server.age, s, o.xi_min)
        alpha = saturate(o.mu_alpha, xi)
        part, new, norm = Contribution(upload.device, trip.base, s, alpha), np.empty_like(w), alpha * length
        move_along(w[:n], step, alpha, new[:n])
        mix(w[n:], upload.weights[n:], alpha, out=new[n:])
        self.context.layout.max_counters(new, w, upload.weights)
        if server.noise is not None:
            new, norm = _noised_model(server, upload, part)
        if not math.isfinite(length + (judged.product or 0.0)) or overflows(new, norm):
            return Reject(NOT_FINITE)
        # Only accepted uploads change the state.
        state.adaptations += numbers["adapted"]
        state.skipped += "forgotten" in numbers
        if moved is not None and judged.device != upload.device:
            state.devices[judged.device] = replace(self._device(judged.device), control=moved)
        numbers |= self._remember(
            server, upload.device, PastUpload(server.version, server.age, s, xi, c, length), alpha, step
        )
        news = self._learn_slot(upload, trip)
        numbers |= {"lambda": c.lambda_, "sigma": c.sigma, "iota": c.iota, "xi": xi, "alpha": alpha}
        return Aggregate(new, (part,), numbers, norm, news)

    def _device(self, device: int) -> DeviceControl:
        return self.state.devices.get(device) or DeviceControl(self._first_control())

    def _control(self, device: int) -> Control:
        """Return the controls of a device, which all devices share under ``controls = "course"``."""
        course = self.state.course
        return self._device(device).control if course is None else course.control

    def _judge(self, server: Server, upload: Upload, trip: ActiveTrip) -> Judged:
        """Return the upload's step, and how the upload continues the step of the aggregation that it judges."""
        o, n, state = self.options, self.context.layout.learnable, self.state
        base, fresh, beta = self._start(server, upload, trip)
        start, along = (base, beta) if o.apply == "progress" else (server.weights, 0.0)
        measured = beta
        if o.equations == "published":
            base, measured = server.store.get(trip.base), 0.0
            fresh = base if along == 0.0 else fresh
        parts = (upload.weights[:n], start[:n], fresh[:n], base[:n])
        if o.dynamic_server and state.course is None and state.makers is None:
            trained = TrainedModel(upload.weights, base, fresh)
            product, step, length = state.steps.measure(upload.device, trained, start, along, measured)
            return Judged(upload.device, step, length, product, self._device(upload.device).past)
        step = np.empty(n, np.float32)
        maker = None if state.makers is None else state.makers.made.get(trip.base)
        if maker is not None:
            product, length = next_step(step, maker.step, *parts, along, measured)
            return Judged(maker.device, step, length, product, maker.past)
        length = write_step(step, *parts, along)
        product, past = (None, None) if state.course is None else state.course.measure(trip.base, step)
        return Judged(upload.device, step, length, product, past)

    def _start(self, server: Server, upload: Upload, trip: ActiveTrip) -> tuple[Vector, Vector, float]:
        """Return base, fresh model and beta: training produced ``(w_i - base) - beta (fresh - base)`` (E6).

        After several merges the base is the anchor, which took part in all of them (``Upload.anchor``).
        """
        base = server.store.get(trip.base)
        if not upload.merges:
            return base, base, 0.0
        fresh = server.merged_models(upload)
        if len(upload.merges) == 1:
            (merge,) = upload.merges
            beta = float(merge.numbers.get("beta", 0.0))
            return base, base if beta == 0.0 else fresh[merge.version], beta
        moved = upload.anchor(base, fresh)
        return moved, moved, 0.0

    def _remember(self, server: Server, device: int, past: PastUpload, alpha: float, step: Vector) -> dict[str, Any]:
        """Keep what later uploads judge. Return the numbers for the log."""
        state = self.state
        if state.course is not None:
            return {"course": state.course.advance(past, alpha, step, server.store.__contains__)}
        if state.makers is not None:
            state.makers.add(device, past, step, server.store.__contains__)
        elif self.options.dynamic_server:
            state.steps.remember(device, step)
        keeps = self.options.dynamic_server and state.makers is None
        state.devices[device] = DeviceControl(past.control, past if keeps else None)
        return {}

    def _adapt(
        self, control: Control, judged: Judged, upload: Upload, trip: ActiveTrip
    ) -> tuple[Control, dict[str, Any]]:
        """Return the adapted controls and the numbers for the log.

        The controls descend the loss of the model that the judged aggregation produced. Under ``course`` the shared
        controls descend along the course that led to the base. A trip at a learning rate of 0 gives no gradient, so the
        controls stay.
        """
        o, past, product = self.options, judged.past, judged.product
        assert past is not None and product is not None
        numbers: dict[str, Any] = {} if o.judge == "own" else {"judged": judged.device}
        scale = trip.lr * upload.steps  # as printed, where one epoch is one step (E5)
        if o.equations == "corrected":
            # E1: training moves against the gradient. E6: the merge keeps only a part of the steps before it.
            # A step is the optimiser's response to a unit gradient: 1 for plain SGD, more with momentum.
            merges, whole = MergeNumbers.of(upload), self.context.reach(upload.steps)
            before = [self.context.reach(steps) for steps in merges.before]
            shrunk = merges.betas if o.merge == "mix" else [0.0 for _ in merges.betas]  # a rebase keeps every step
            scale = -training_scale(trip.lr, whole, before, shrunk)
            plain = [*merges.before, upload.steps]
            numbers |= {} if [*before, whole] == plain else {"reach": [*(before or [0.0]), whole]}
        if o.local_work == "passes":
            numbers["passes"] = trip.epochs
            scale *= trip.epochs / upload.steps
        if scale == 0.0:
            return control, {"untaught": True, **numbers}
        q = product / scale
        if o.controls != "loss":  # <g, step> / (|g| |step|); g points against what training produced
            q = -cosine(product, judged.length, past.length)
            numbers |= {"length": judged.length, "length_p": past.length}
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
        return [*self.options.slow_rate_notices(), *self._memory_notices(), *self._untrained_notices()]

    def _untrained_notices(self) -> list[str]:
        """Say that the shipped meta model does not fit."""
        from freshet.methods.asmu.meta import SHIPPED_EPOCHS

        o, epochs = self.options, self.state.meta.epochs
        learns = o.adaptive_device and o.slot == "rl"
        if not learns or o.meta_from != "shipped" or epochs == SHIPPED_EPOCHS:
            return []
        problem = f"the shipped meta model is for {SHIPPED_EPOCHS} epochs, trips have up to {epochs}"
        return [f"{problem}: it starts untrained (method.meta_from; `freshet pretrain` makes one)"]

    def _memory_notices(self) -> list[str]:
        """Say what happens to the steps that do not fit in memory."""
        limit, devices = self.state.steps.limit, self.context.devices
        unused = self.state.course is not None or self.state.makers is not None
        if not self.options.dynamic_server or unused or limit is None or limit >= devices:
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
