"""The device's part of FedASMU and FedSSMU, and the hyper-parameters of both.

At the start of epoch l* the device asks for the fresh model ``w_g`` and merges it into its own, ``w_b``::

    w_a = (1 - beta) w_b + beta w_g

The weight beta is learned. The reward ``loss(w_b) - loss(w_a)`` trains the choice of l*.

``merge = "rebase"`` (not in the paper) carries the device's progress over whole. With the anchor a, which is the base
at first and ``(1 - beta) a + beta w_g`` after each merge::

    w_a = w_b + beta (w_g - a)

The mix gives up as much of the device's progress as it takes in of the others'; here nothing is lost.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from freshet.core.messages import Assignment, Fresh, Number, Slot, Upload
from freshet.core.method import ADDED, ConditionalDefaults, Facts, Local, LocalRule, Memory, MethodContext, Options
from freshet.core.vectors import distance, dot_difference, mix, norm
from freshet.methods._shared.rebase import (
    Refresh,
    check_refresh,
    check_slot,
    fixed_slot,
    further_slots,
    merge_order_problem,
    rebase_model,
)
from freshet.methods.asmu import slots
from freshet.methods.asmu.staleness import (
    Equations,
    cosine,
    distance_factor,
    freshness_weight,
    gradient_step,
    merge_gradients,
    saturate,
)
from freshet.methods.asmu.steps import ControlMemory

#: Learning rates of the five controls.
RATE_NAMES = ("eta_lambda", "eta_sigma", "eta_iota", "eta_gamma", "eta_upsilon")
#: Below this rate, a control that descends a cosine does not move in a run of ordinary length.
SLOW_RATE = 1e-3
#: The selector of ``apply = "progress"``. Its prior takes the place of pre-training.
SHAPED = {"selector": "shaped", "meta_from": "none"}


class ASMUOptions(Options):
    """Hyper-parameters shared by FedASMU and FedSSMU, with the paper's symbols.

    The paper gives no initial controls; these were chosen on validation data (docs/methods-appendix.md). The useful
    scale of alpha depends on ``apply``, so ``apply = "progress"`` has its own default controls.
    """

    conditional_defaults: ClassVar[ConditionalDefaults] = {
        ("apply", "progress"): {"lambda0": 1.0, "sigma0": 0.5, "iota0": 0.05, **SHAPED},
        ("selector", "shaped"): {"meta_from": "none"},
        ("merge", "rebase"): {"beta": 1.0, "slot": "last"},
        ("controls", "direction"): dict.fromkeys(RATE_NAMES, 0.02),
        ("controls", "course"): dict.fromkeys(RATE_NAMES[:3], 0.005),
    }
    #: Uploads in flight for which the default rates of ``course`` are meant.
    reference_span: ClassVar[int] = 30

    lambda0: float = Field(10.0, description="initial lambda: weight of the staleness term")
    sigma0: float = Field(0.5, description="initial sigma: how fast the weight falls with staleness")
    iota0: float = Field(0.0, description="initial iota: weight independent of staleness")
    gamma0: float = Field(1.0, description="initial gamma: scale of the fresh model's weight on a device")
    upsilon0: float = Field(0.5, description="initial upsilon: reduction for a barely newer model")
    mu_alpha: float = Field(1.0, gt=0, description="saturation of the server's weight alpha")
    mu_beta: float = Field(1.0, gt=0, description="saturation of the device's weight beta")
    eta_lambda: float = Field(1e-4, ge=0, description="learning rate of lambda")
    eta_sigma: float = Field(1e-4, ge=0, description="learning rate of sigma")
    eta_iota: float = Field(1e-4, ge=0, description="learning rate of iota")
    eta_gamma: float = Field(1e-4, ge=0, description="learning rate of gamma")
    eta_upsilon: float = Field(1e-4, ge=0, description="learning rate of upsilon")
    eta_rl: float = Field(1e-3, ge=0, description="learning rate of the meta model")
    tau_max: int = Field(99, ge=1, description="largest staleness; staler uploads are discarded")
    xi_min: float = Field(1e-3, gt=0, description="lower bound of xi, so that alpha stays above 0")
    epsilon: float = Field(
        0.1,
        ge=0,
        le=1,
        description="probability of exploring another slot; epsilon / k in trip k of a device if selector = shaped",
    )
    phi_q: float = Field(0.5, ge=0, le=1, description="learning rate of the Q-table")
    psi: float = Field(0.9, ge=0, lt=1, description="discount of the Q-table")
    rho: float = Field(0.1, ge=0, le=1, description="rate of the running mean of rewards")
    slot: slots.Policy | int = Field(
        "rl", description="when to ask: rl (learned), h1, h2, h3, last, random, never, or an epoch number"
    )
    merge: Literal["mix", "rebase"] = Field(
        "mix",
        description="mix: (1 - beta) w_b + beta w_g (the paper's). rebase: w_b + beta (w_g - w_o), which keeps all "
        "that the device has trained (not in the paper; needs apply = progress)",
        json_schema_extra=ADDED,
    )
    beta: Annotated[float, Field(ge=0, le=1)] | Literal["learned"] = Field(
        "learned",
        description="weight of the fresh model: learned (the paper's) or fixed; 1 only with merge = rebase",
        json_schema_extra=ADDED,
    )
    refresh: Refresh = Field(
        1,
        description="requests per trip: the first in its slot, the others at the start of the next epochs; every: in "
        "all epochs from the first slot on (the paper restricts itself to 1)",
        json_schema_extra=ADDED,
    )
    push_after: int = Field(
        0,
        ge=0,
        description="instead of requests, the server sends its model to a device in flight when it is so many versions "
        "ahead; 0: devices ask (the paper's). Needs slot = never",
        json_schema_extra=ADDED,
    )
    meta_from: str = Field(
        "shipped",
        description="pre-trained meta model. shipped: for trips of 5 epochs (with others it starts untrained). none: "
        "untrained (default of selector = shaped). Or a file made by `freshet pretrain`",
    )
    equations: Equations = Field(
        "corrected", description="corrected: true derivatives; published: formulas as printed, errors included"
    )
    selector: slots.Selector = Field(
        "printed",
        description="how slots are learned. printed: the paper's. shaped: with a prior, scaled rewards, importance "
        "weights, less exploring over time, and a reward of 0 where nothing was newer (not in the paper; default of "
        "apply = progress)",
    )
    apply: Literal["mix", "progress"] = Field(
        "mix",
        description="mix: mix the upload in (the paper's); progress: add what training produced (not in the paper)",
    )
    controls: Literal["loss", "direction", "course"] = Field(
        "loss",
        description="what the controls descend. loss: the device's loss (the paper's). direction: its slope per unit "
        "of length, a cosine. course: one shared set of controls; the signal is whether a device that starts from the "
        "new model continues in the server's direction or turns back. direction and course are not in the paper and "
        "need apply = progress",
    )
    judge: Literal["own", "base"] = Field(
        "own",
        description="which aggregation an upload judges. own: the device's last one, some versions before its base. "
        "base: the one that made its base, whoever uploaded it; the controls of that device move",
        json_schema_extra=ADDED,
    )
    local_work: Literal["steps", "passes"] = Field(
        "steps",
        description="L in the pseudo-gradient (w_o - w_i) / (eta L): steps of SGD, or passes over the device's data "
        "(the paper's word, local epochs, allows both)",
        json_schema_extra=ADDED,
    )
    span: int | None = Field(
        None,
        ge=1,
        description="with controls = course: uploads in flight (default: run.in_flight, synchronous run.per_round). "
        "Above 30 (FedSSMU: 10) the rates scale by 30/span (10/span)",
    )
    probe: Literal["batch", "held-out"] = Field(
        "batch",
        description="data for rewards and the slope of beta. batch: the next mini-batch (the paper's). held-out: a "
        "tenth of the device's samples, never trained on (not in the paper)",
    )
    distance: bool = Field(
        False,
        description="multiply phi by 2 a / (a + b), where a and b are the distances of server and device from their "
        "common base (not in the paper)",
    )
    control_memory: ControlMemory = Field(
        "exact", description="steps that the server keeps: exact (all), budget (the newest), sketch (estimates)"
    )
    control_budget_mb: int = Field(
        1024,
        ge=1,
        description="MiB of steps in main memory; beyond it exact moves steps to a file, budget forgets them",
    )
    dynamic_server: bool = Field(True, description="learn lambda, sigma, iota (off: -DA)")
    adaptive_device: bool = Field(True, description="ask for and merge the fresh model (off: -FA)")

    @model_validator(mode="before")
    @classmethod
    def _read_former_settings(cls, values: Any) -> Any:
        """Read the settings of runs made before ``selector``: ``advantage = "scaled"`` was the shaped selector."""
        if not isinstance(values, dict):
            return values
        if values.get("advantage") == "raw":
            raise ValueError('advantage = "raw" no longer exists; selector = "printed" is the paper\'s selector')
        if values.get("advantage") == "scaled":
            values = SHAPED | {key: value for key, value in values.items() if key != "advantage"}
        return values | {"meta_from": "none"} if values.get("meta_from") == "" else values

    @model_validator(mode="after")
    def _check_controls(self) -> Self:
        if self.controls != "loss" and self.apply != "progress":
            raise ValueError(
                f'controls = "{self.controls}" compares what training produced; it needs apply = "progress"'
            )
        if self.judge == "base" and self.controls == "course":
            raise ValueError('judge = "base" judges one aggregation, controls = "course" all since; choose one of them')
        if self.merge == "rebase" and not (self.apply == "progress" and self.equations == "corrected"):
            raise ValueError('merge = "rebase" needs apply = "progress" and equations = "corrected"')
        if self.beta == 1.0 and self.merge == "mix":
            raise ValueError('beta = 1 replaces the local model; it needs merge = "rebase"')
        check_refresh(self.refresh)
        if self.push_after and self.slot != "never":
            raise ValueError('push_after takes the place of requests; set slot = "never"')
        return self

    def with_derived(self, context: MethodContext) -> Self:
        """Set ``span`` of ``course`` from the run."""
        if self.controls != "course" or self.span is not None or not context.in_flight:
            return self
        return self.model_copy(update={"span": context.in_flight})

    def check_run(self, facts: Facts) -> None:
        check_slot(self.slot, facts.epochs)

    def control_rates(self) -> tuple[float, float, float]:
        """Return the rates of lambda, sigma and iota.

        Under ``course``, about ``span`` more uploads get the same weight before the first one is judged. Their verdicts
        add up, so above ``reference_span`` each counts less.
        """
        share = min(1.0, self.reference_span / self.span) if self.controls == "course" and self.span else 1.0
        return share * self.eta_lambda, share * self.eta_sigma, share * self.eta_iota

    def slow_rate_notices(self) -> list[str]:
        """Return a notice if a cosine is descended with rates meant for a loss, such as those of the paper's cells."""
        own = self.conditional_defaults.get(("controls", self.controls), {})
        slow = [key for key in own if 0.0 < getattr(self, key) < SLOW_RATE]
        if not slow:
            return []
        keys, default = ", ".join(f"method.{key}" for key in slow), own[slow[0]]
        problem = f"controls = {self.controls} hardly moves with rates below {SLOW_RATE:g} ({keys})"
        return [f"{problem}; its default is {default:g}"]


@dataclass(frozen=True)
class FreshModelRule(LocalRule):
    """The device's part: choose the slot, merge the fresh model, learn from the reward."""

    remembers: ClassVar[bool] = True
    #: Public only if slots, gamma and upsilon are not learned and phi has no lengths; ``leak`` checks this.
    public: ClassVar[tuple[str, ...]] = ("n1", "beta", "phi", "gamma", "upsilon", "gamma_after", "upsilon_after")
    options: ASMUOptions

    @property
    def holds_out(self) -> bool:
        return self.options.probe == "held-out"

    @property
    def anchored(self) -> bool:
        return self.options.merge == "rebase"

    def leak(self) -> str | None:
        o = self.options
        if o.slot == "rl":
            return 'slots are learned from losses; set method.slot to "last", "random", "never" or a number'
        if o.beta == "learned" and (o.eta_gamma or o.eta_upsilon):
            return "beta is learned from losses; set method.beta, or method.eta_gamma and method.eta_upsilon to 0"
        if o.distance:
            return "phi and beta contain the exact length of the training; set method.distance to false"
        return None

    def plan(self, memory: Memory, assignment: Assignment, rng: np.random.Generator) -> Slot | None:
        o = self.options
        if o.slot != "rl":
            return fixed_slot(o.slot, assignment.epochs, rng)
        if "slot" not in memory:
            proposed = min(int(assignment.instruction["meta_slot"]), assignment.epochs)
            return slots.first_slot(proposed, assignment.epochs, o.epsilon, rng)
        epsilon = o.epsilon if o.selector == "printed" else o.epsilon / assignment.trip
        return slots.next_slot(memory["table"], int(memory["slot"]), epsilon, rng)

    def later_slots(self, first: Slot, epochs: int) -> tuple[Slot, ...]:
        return further_slots(first, epochs, self.options.refresh)

    @property
    def push_after(self) -> int:
        return self.options.push_after

    def begin(self, local: Local) -> None:
        local.memory.setdefault("gamma", self.options.gamma0)
        local.memory.setdefault("upsilon", self.options.upsilon0)

    def merge(self, local: Local, fresh: Fresh) -> dict[str, Number]:
        o, memory, n = self.options, local.memory, local.learnable
        gamma, upsilon = memory["gamma"], memory["upsilon"]
        age, s = fresh.age, fresh.version - local.newest + 1
        before, corrected, numbers = local.snapshot(), o.equations == "corrected", dict[str, Number]()
        if o.distance:
            base = local.assignment.weights[:n]
            numbers["far"] = distance_factor(distance(fresh.weights[:n], base), distance(before[:n], base))
        far = float(numbers.get("far", 1.0))
        phi = freshness_weight(gamma, upsilon, age, s, far)
        beta = saturate(o.mu_beta, phi) if o.beta == "learned" else o.beta
        x, y = local.next_batch() if o.probe == "batch" else local.held_out()
        loss_before, h_before = (local.loss_at(x, y), None) if corrected else local.gradient_at(x, y)
        if o.merge == "rebase":
            merged = rebase_model(before, fresh.weights, local.anchor, beta, local.layout)
        else:
            merged = mix(before, fresh.weights, beta)
            local.layout.max_counters(merged, before, fresh.weights)
        local.set_weights(merged)
        loss_after, h_after = local.gradient_at(x, y)
        # E4: the merged model depends on beta, the model before it does not; the paper prints them swapped.
        h, at = (h_after, before) if h_before is None else (h_before, merged)
        at = local.anchor if o.merge == "rebase" else at
        q = dot_difference(fresh.weights[:n], at[:n], h)
        if o.controls == "direction":
            q = cosine(q, norm(h), distance(fresh.weights[:n], at[:n]))
        grad_gamma, grad_upsilon = merge_gradients(q, o.mu_beta, phi, gamma, upsilon, age, s, o.equations, far)
        if o.beta == "learned":
            memory["gamma"] = gradient_step(gamma, o.eta_gamma, grad_gamma)
            memory["upsilon"] = gradient_step(upsilon, o.eta_upsilon, grad_upsilon)
        return {
            "n1": local.steps,
            "beta": beta,
            "reward": loss_before - loss_after,
            "phi": phi,
            "gamma": gamma,
            "upsilon": upsilon,
            "q": q,
            "gamma_after": memory["gamma"],
            "upsilon_after": memory["upsilon"],
            "loss_before": loss_before,
            "loss_after": loss_after,
            **numbers,
        }

    def report_problem(self, upload: Upload) -> str | None:
        for merge in upload.merges:
            beta = merge.numbers.get("beta", 0.0)
            if not 0.0 <= beta <= 1.0 or (beta == 1.0 and self.options.merge == "mix"):
                return f"reports a merge with weight {beta}, which is impossible"
        return merge_order_problem(upload)

    def finish(self, local: Local) -> None:
        o = self.options
        if o.slot != "rl" or local.slot is None:
            return
        # Several merges of a trip have one reward, their sum. Without a newer model nothing changed: it is 0.
        if local.merges or o.selector == "shaped":
            self._learn_slot(local, local.slot, sum((merge.numbers["reward"] for merge in local.merges), 0.0))

    def _learn_slot(self, local: Local, slot: Slot, reward: float) -> None:
        """Update the Q-table from this trip. A device's first lesson trains the server's meta model instead."""
        o, memory = self.options, local.memory
        first = "slot" not in memory
        rewards = slots.RunningReward(o.rho, memory.get("b", reward))
        table = slots.empty_table(local.assignment.epochs, o.selector) if first else memory["table"].copy()
        if not first:
            measured = reward - rewards.mean if o.selector == "shaped" else reward
            slots.update_table(table, int(memory["slot"]), slot.action, slot.epoch, measured, o.phi_q, o.psi)
        rewards.add(reward)
        memory |= {"table": table, "slot": slot.epoch, "b": rewards.mean}
        local.report |= {"slot": slot.epoch, "first": int(first), "reward": reward}
