"""FedASMU: asynchronous federated learning with dynamic staleness-aware aggregation and fresh models in mid-training.

J. Liu et al., "Efficient Federated Learning with Timely Update Dissemination" (FedASMU: AAAI 2024).

Server, for an upload ``w_i`` that device i trained from version o while the model is at version t, ``s = t - o + 1``::

    xi    = lambda_i / (sqrt(t) s^sigma_i) + iota_i          alpha = mu_alpha xi / (1 + mu_alpha xi)
    w    <- (1 - alpha) w + alpha w_i                        (apply = "mix", the paper's)
    w    <- w + alpha d,  d = w_i - w_o - beta (w_g - w_o)   (apply = "progress", ours: no pull back to an old base)

lambda, sigma, iota descend the loss of the model that the device's previous upload produced, with its gradient
estimated from this upload, ``g = -d / (eta n)``.

Device, at the start of epoch l* with fresh version g > o and ``w_b`` the local model::

    phi = gamma / sqrt(g) (1 - upsilon / sqrt(g - o + 1))    beta = mu_beta phi / (1 + mu_beta phi)
    w_a = (1 - beta) w_b + beta w_g

gamma and upsilon descend the mini-batch loss at ``w_a``; the reward ``loss(w_b) - loss(w_a)`` teaches the selector of
l*. ``equations = "published"`` keeps the printed forms where they are not the derivatives (errata E1, E2, E4-E6).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from freshet.core.messages import Assignment, Fresh, Number, Upload
from freshet.core.method import Aggregate, Discard, Kind, Local, LocalRule, Memory, Method, Options, Verdict, World
from freshet.core.server import Flight, Server
from freshet.core.trip import DeviceTrip, Slot
from freshet.core.vectors import Vector, combine, distance, dot_combined, mix
from freshet.methods.parts import audits, slots
from freshet.methods.parts.staleness import (
    Control,
    Equations,
    Past,
    control_gradients,
    descend,
    freshness_weight,
    merge_gradients,
    moved,
    saturate,
    staleness_weight,
)
from freshet.methods.parts.steps import ControlMemory, StepMemory


class ASMUOptions(Options):
    """Hyper-parameters shared by FedASMU and FedSSMU, with the paper's symbols.

    The paper gives no initial controls; these were chosen on validation data (docs/methods.md). The useful scale of
    alpha depends on ``apply``: ``apply = "mix"`` has its own initial controls where none are given.
    """

    #: Initial controls under ``apply = "mix"``.
    mix_controls: ClassVar[dict[str, float]] = {"lambda0": 3.0, "sigma0": 0.5, "iota0": 0.0}

    lambda0: float = Field(1.0, description="initial lambda: weight of the staleness term")
    sigma0: float = Field(0.5, description="initial sigma: how fast the weight falls with staleness")
    iota0: float = Field(0.05, description="initial iota: weight that staleness does not touch")
    gamma0: float = Field(1.0, description="initial gamma: scale of the fresh model's weight on a device")
    upsilon0: float = Field(0.5, description="initial upsilon: how much less a barely newer model counts")
    mu_alpha: float = Field(1.0, gt=0, description="saturation of the server's weight alpha")
    mu_beta: float = Field(1.0, gt=0, description="saturation of the device's weight beta")
    eta_lambda: float = Field(1e-4, ge=0, description="learning rate of lambda")
    eta_sigma: float = Field(1e-4, ge=0, description="learning rate of sigma")
    eta_iota: float = Field(1e-4, ge=0, description="learning rate of iota")
    eta_gamma: float = Field(1e-4, ge=0, description="learning rate of gamma")
    eta_upsilon: float = Field(1e-4, ge=0, description="learning rate of upsilon")
    eta_rl: float = Field(1e-3, ge=0, description="learning rate of the meta model")
    tau_max: int = Field(99, ge=1, description="uploads staler than this are discarded")
    xi_min: float = Field(1e-3, gt=0, description="lower bound of xi, so that alpha stays above 0")
    epsilon: float = Field(0.1, ge=0, le=1, description="probability of exploring another slot")
    phi_q: float = Field(0.1, ge=0, le=1, description="learning rate of the Q-table")
    psi: float = Field(0.9, ge=0, lt=1, description="discount of the Q-table")
    rho: float = Field(0.1, ge=0, le=1, description="rate of the running mean of rewards")
    slot: slots.Policy | int = Field("rl", description="when to ask: rl, h1, h2, h3, random, never, or an epoch number")
    meta_from: str = Field("", description="file with a pre-trained meta model, made by `freshet pretrain`")
    equations: Equations = Field("corrected", description="corrected derivatives, or the printed ones")
    apply: Literal["mix", "progress"] = Field(
        "progress", description="add the upload's progress, or mix its model in (default of the published equations)"
    )
    control_memory: ControlMemory = Field(
        "budget", description="which steps the server remembers: exact (all), budget (the newest), sketch (estimates)"
    )
    control_budget_mb: int = Field(1024, ge=1, description="MiB of steps under control_memory = budget")
    dynamic_server: bool = Field(True, description="learn lambda, sigma, iota (off: -DA)")
    adaptive_device: bool = Field(True, description="ask for and merge the fresh model (off: -FA)")

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_follow(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        given = dict(given)
        if given.get("equations") == "published":
            given.setdefault("apply", "mix")
        return cls.mix_controls | given if given.get("apply") == "mix" else given


@dataclass
class DeviceControl:
    """What the server keeps per device: the controls and the numbers of its last accepted upload."""

    control: Control
    past: Past | None = None


class FedASMU(Method):
    """The server's part."""

    name: ClassVar[str] = "fedasmu"
    kind: ClassVar[Kind] = "async"
    title: ClassVar[str] = "FedASMU"
    citation: ClassVar[str] = "Liu et al., FedASMU, AAAI 2024"
    Options: ClassVar[type[Options]] = ASMUOptions
    variants: ClassVar = {
        "fedasmu-da": {"dynamic_server": False},
        "fedasmu-fa": {"adaptive_device": False},
        "fedasmu-0": {"dynamic_server": False, "adaptive_device": False},
    }
    options: ASMUOptions

    def __init__(self, options: ASMUOptions, world: World) -> None:
        super().__init__(options, world)
        self.devices: dict[int, DeviceControl] = {}
        budget = options.control_budget_mb * 2**20
        self.steps = StepMemory(options.control_memory, world.layout.learnable, budget, world.seed)
        self.meta = slots.MetaSelector(world.epochs, options.eta_rl, options.rho, world.seed)
        if options.meta_from:
            self.meta.load(Path(options.meta_from))

    def rule(self) -> LocalRule:
        return FreshModelRule(self.options) if self.options.adaptive_device else LocalRule()

    def instruct(self, server: Server, device: int) -> dict[str, Number]:
        learned = self.options.adaptive_device and self.options.slot == "rl"
        return {"meta_slot": self.meta.best()} if learned else {}

    def prejudge(self, server: Server, flight: Flight) -> Discard | None:
        s = server.staleness(flight)
        if s <= self.options.tau_max:
            return None
        return Discard("too stale", {"version": server.version, "base": flight.base, "staleness": s})

    def objection(self, upload: Upload, flight: Flight) -> str | None:
        beta, slot = upload.report.get("beta", 0.0), upload.report.get("slot", 1)
        if not 0.0 <= beta < 1.0 or (beta and flight.fresh is None):
            return f"reports a merge with weight {beta}, which is impossible"
        if slot not in range(1, flight.epochs + 1) or ("first" in upload.report and "slot" not in upload.report):
            return f"reports slot {upload.report.get('slot')}, which is no epoch of 1..{flight.epochs}"
        return None

    def receive(self, server: Server, upload: Upload, flight: Flight) -> Verdict:
        s = server.staleness(flight)
        if "reward" in upload.report:
            self._learn_slot(upload)
        n, w, o = self.world.layout.learnable, server.weights, self.options
        progress = self._progress(server, upload, flight)
        known = self.devices.setdefault(upload.device, DeviceControl(Control(o.lambda0, o.sigma0, o.iota0)))
        record: dict[str, Any] = {
            "base": flight.base,
            "staleness": s,
            "adapted": False,
            "lr": flight.lr,
            "steps": upload.steps,
        }
        if known.past is not None and upload.device not in self.steps:
            record["forgotten"] = True  # dropped to stay within the budget: one adaptation is skipped
        elif known.past is not None:
            published = [(1.0, upload.weights), (-1.0, server.store.get(flight.base))]
            terms = progress if o.equations == "corrected" else published
            record |= self._adapt(known, terms, upload, flight)
        c = known.control
        xi = staleness_weight(c, server.age, s, o.xi_min)
        alpha = saturate(o.mu_alpha, xi)
        new = mix(w, upload.weights, alpha)
        if o.apply == "progress":
            combine([(1.0, w[:n]), *((alpha * k, v[:n]) for k, v in progress)], out=new[:n])
        self.world.layout.max_counters(new, w, upload.weights)
        if o.dynamic_server:
            known.past = Past(server.age, s, xi, c)
            self.steps.remember(
                upload.device, progress if o.apply == "progress" else [(1.0, upload.weights), (-1.0, w)]
            )
        record |= {"lambda": c.lambda_, "sigma": c.sigma, "iota": c.iota, "xi": xi, "alpha": alpha}
        record["update_norm"] = distance(new[:n], w[:n])
        return Aggregate(new, record)

    def _progress(self, server: Server, upload: Upload, flight: Flight) -> list[tuple[float, Vector]]:
        """``d = w_i - w_o - beta (w_g - w_o)`` as a sum of models (E6): what training itself produced."""
        base, beta = server.store.get(flight.base), float(upload.report.get("beta", 0.0))
        if flight.fresh is None or beta == 0.0:
            return [(1.0, upload.weights), (-1.0, base)]
        return [(1.0, upload.weights), (beta - 1.0, base), (-beta, server.store.get(flight.fresh))]

    def _adapt(
        self, known: DeviceControl, displacement: list[tuple[float, Vector]], upload: Upload, flight: Flight
    ) -> dict[str, Any]:
        """Move the device's controls down the loss of the model that its last upload produced."""
        o, past = self.options, known.past
        assert past is not None
        # E1: training moves against the gradient. E5: the displacement sums all SGD steps, not epochs.
        scale = -flight.lr * upload.steps if o.equations == "corrected" else flight.lr * flight.epochs
        q = self.steps.product(upload.device, displacement) / scale
        gradients = control_gradients(q, o.mu_alpha, past, o.equations)
        known.control = descend(known.control, gradients, (o.eta_lambda, o.eta_sigma, o.eta_iota))
        names = ("grad_lambda", "grad_sigma", "grad_iota")
        return {
            "adapted": True,
            "q": q,
            "p": past.p,
            "s_p": past.s_p,
            "xi_p": past.xi_p,
            "lambda_p": past.control.lambda_,
            "sigma_p": past.control.sigma,
            "iota_p": past.control.iota,
            **dict(zip(names, gradients, strict=True)),
        }

    def _learn_slot(self, upload: Upload) -> None:
        """A reward came with the upload: the running mean always, the meta model after a device's first trip."""
        reward = float(upload.report["reward"])
        self.meta.note(reward)
        if upload.report.get("first"):
            self.meta.reinforce(int(upload.report["slot"]), reward)

    def state(self) -> dict[str, Any]:
        devices = {}
        for device, known in self.devices.items():
            c, past = known.control, known.past
            entry: dict[str, Any] = {"control": [c.lambda_, c.sigma, c.iota]}
            if past is not None:
                k = past.control
                entry |= {"past": [past.p, past.s_p, past.xi_p, k.lambda_, k.sigma, k.iota]}
            devices[str(device)] = entry
        return {"devices": devices, "steps": self.steps.state(), "meta": self.meta.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.meta.restore(state["meta"])
        self.steps.restore(state["steps"])
        self.devices = {}
        for device, entry in state["devices"].items():
            known = DeviceControl(Control(*entry["control"]))
            if "past" in entry:
                p, s_p, xi_p, *rest = entry["past"]
                known.past = Past(int(p), int(s_p), xi_p, Control(*rest))
            self.devices[int(device)] = known

    @classmethod
    def audit(cls, options: Any, event: dict[str, Any], memory: dict[Any, Any]) -> None:
        audits.asmu(options, event, memory, cls.kind)


@dataclass(frozen=True)
class FreshModelRule(LocalRule):
    """The device's part: choose the slot, merge the fresh model, learn from the reward."""

    remembers: ClassVar[bool] = True
    options: ASMUOptions

    def plan(self, memory: Memory, assignment: Assignment, rng: np.random.Generator) -> Slot | None:
        o = self.options
        if o.slot != "rl":
            return slots.fixed_slot(o.slot, assignment.epochs, rng)
        if "slot" not in memory:
            return slots.first_slot(int(assignment.instruction["meta_slot"]), assignment.epochs, o.epsilon, rng)
        return slots.next_slot(memory["table"], int(memory["slot"]), o.epsilon, rng)

    def begin(self, local: Local) -> None:
        local.memory.setdefault("gamma", self.options.gamma0)
        local.memory.setdefault("upsilon", self.options.upsilon0)

    def merge(self, local: Local, trip: DeviceTrip, fresh: Fresh) -> None:
        o, memory, n = self.options, local.memory, local.learnable
        gamma, upsilon = memory["gamma"], memory["upsilon"]
        age, s = fresh.age, fresh.version - trip.base + 1
        phi = freshness_weight(gamma, upsilon, age, s)
        beta = saturate(o.mu_beta, phi)
        x, y = local.next_batch()
        before = local.snapshot()
        loss_before, h_before = local.gradient_at(x, y)
        merged = mix(before, fresh.weights, beta)
        local.layout.max_counters(merged, before, fresh.weights)
        local.become(merged)
        loss_after, h_after = local.gradient_at(x, y)
        # E4: the merged model depends on beta, the model before it does not; the paper prints them swapped.
        h, at = (h_after, before) if o.equations == "corrected" else (h_before, merged)
        q = dot_combined([(1.0, fresh.weights[:n]), (-1.0, at[:n])], h)
        grad_gamma, grad_upsilon = merge_gradients(q, o.mu_beta, phi, gamma, upsilon, age, s)
        memory["gamma"] = moved(gamma, o.eta_gamma, grad_gamma)
        memory["upsilon"] = moved(upsilon, o.eta_upsilon, grad_upsilon)
        reward = loss_before - loss_after
        self._learn_slot(memory, trip, reward)
        local.report |= {"beta": beta, "reward": reward, "phi": phi, "gamma": gamma, "upsilon": upsilon, "q": q}
        local.report |= {"gamma_after": memory["gamma"], "upsilon_after": memory["upsilon"]}
        local.report |= {"loss_before": loss_before, "loss_after": loss_after}

    def _learn_slot(self, memory: Memory, trip: DeviceTrip, reward: float) -> None:
        if self.options.slot == "rl" and trip.slot is not None and "slot" in memory:
            o = self.options
            memory["table"] = memory["table"].copy()
            slots.learn(memory["table"], int(memory["slot"]), trip.slot.action, trip.slot.epoch, reward, o.phi_q, o.psi)

    def finish(self, local: Local) -> None:
        trip = local.trip
        if self.options.slot != "rl" or trip.slot is None:
            return
        local.report |= {"slot": trip.slot.epoch, "first": int("slot" not in local.memory)}
        local.memory.setdefault("table", slots.empty_table(trip.epochs))
        local.memory["slot"] = trip.slot.epoch
