"""FedASMU: asynchronous federated learning with dynamic staleness-aware aggregation and fresh models in mid-training.

J. Liu et al., "Efficient Federated Learning with Timely Update Dissemination" (FedASMU: AAAI 2024).

Server, for an upload ``w_i`` that device i trained from version o while the model is at version t, ``s = t - o + 1``::

    xi    = lambda_i / (sqrt(t) s^sigma_i) + iota_i          alpha = mu_alpha xi / (1 + mu_alpha xi)
    w    <- (1 - alpha) w + alpha w_i                        (apply = "mix", the paper's)
    w    <- w + alpha d,  d = w_i - w_o - beta (w_g - w_o)   (apply = "progress", ours: no pull back to an old base)

lambda, sigma, iota descend the loss of the model that the device's previous upload produced, with its gradient
estimated from this upload: ``g = -d / (eta ((1 - beta) n1 + n2))``, n1 and n2 the steps before and after the merge.
It is an estimate: the gradient is one device's, summed along its path, and taken at w_o, ``gap`` versions later (E10).

Device, at the start of epoch l* with fresh version g > o and ``w_b`` the local model::

    phi = gamma / sqrt(g) (1 - upsilon / sqrt(g - o + 1))    beta = mu_beta phi / (1 + mu_beta phi)
    w_a = (1 - beta) w_b + beta w_g

gamma and upsilon descend the mini-batch loss at ``w_a``; the reward ``loss(w_b) - loss(w_a)`` teaches the selector of
l*. ``equations = "published"`` keeps the printed forms where they are not the derivatives (errata E1, E2, E4-E6).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from freshet.core.messages import Number, Upload
from freshet.core.method import Aggregate, Discard, Kind, LocalRule, Method, Options, Verdict, World
from freshet.core.server import Flight, Server, overflows
from freshet.core.vectors import mix, move_along, write_step
from freshet.methods.parts import audits
from freshet.methods.parts.fresh import ASMUOptions, FreshModelRule
from freshet.methods.parts.staleness import (
    Control,
    Past,
    control_gradients,
    descend,
    saturate,
    staleness_weight,
    training_scale,
)
from freshet.methods.parts.steps import StepMemory, Trained


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
        "fedasmu-published": {"equations": "published"},
        "fedasmu-progress": {"apply": "progress"},
    }
    options: ASMUOptions

    def __init__(self, options: ASMUOptions, world: World) -> None:
        from freshet.methods.parts.meta import MetaSelector

        super().__init__(options, world)
        self.devices: dict[int, DeviceControl] = {}
        self.adaptations = self.skipped = 0
        budget = options.control_budget_mb * 2**20
        self.steps = StepMemory(options.control_memory, world.layout.learnable, budget, world.seed)
        learning = (options.eta_rl, options.rho, world.seed, options.advantage, options.epsilon)
        self.meta = MetaSelector(world.epochs, *learning)
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
        before = upload.report.get("n1", -1 if beta else 0)
        if not (isinstance(before, int) and 0 <= before < upload.steps):
            return f"reports a merge after {upload.report.get('n1')} of {upload.steps} steps, which is impossible"
        if slot not in range(1, flight.epochs + 1) or ("first" in upload.report and "slot" not in upload.report):
            return f"reports slot {upload.report.get('slot')}, which is no epoch of 1..{flight.epochs}"
        return None

    def receive(self, server: Server, upload: Upload, flight: Flight) -> Verdict:
        s, news = server.staleness(flight), self._learn_slot(upload)
        w, o, n = server.weights, self.options, self.world.layout.learnable
        known = self.devices.setdefault(upload.device, DeviceControl(Control(o.lambda0, o.sigma0, o.iota0)))
        # E6: what training itself produced is (w_i - w_o) - beta (w_g - w_o).
        base, beta = server.store.get(flight.base), float(upload.report.get("beta", 0.0))
        fresh = base if flight.fresh is None or beta == 0.0 else server.store.get(flight.fresh)
        start, along = (base, beta) if o.apply == "progress" else (w, 0.0)
        new, product = np.empty_like(w), None
        if o.dynamic_server:
            measured = beta if o.equations == "corrected" else 0.0
            trained = Trained(upload.weights, base, fresh)
            product, step, length = self.steps.exchange(upload.device, trained, start, along, measured)
        else:
            step = new[:n]
            length = write_step(step, upload.weights[:n], start[:n], fresh[:n], base[:n], along)
        record: dict[str, Any] = {"base": flight.base, "staleness": s, "adapted": False}
        record |= {"lr": flight.lr, "steps": upload.steps, "beta": beta, "n1": int(upload.report.get("n1", 0))}
        before = known.control
        if product is not None and known.past is not None:
            self.adaptations += 1
            record |= self._adapt(known, product, upload, flight)
        elif known.past is not None:
            self.skipped += 1
            record["forgotten"] = True  # dropped to stay within the budget: one adaptation is skipped
        c = known.control
        xi = staleness_weight(c, server.age, s, o.xi_min)
        alpha = saturate(o.mu_alpha, xi)
        move_along(w[:n], step, alpha, new[:n])
        mix(w[n:], upload.weights[n:], alpha, out=new[n:])
        self.world.layout.max_counters(new, w, upload.weights)
        if not math.isfinite(length + (product or 0.0)) or overflows(new, alpha * length):
            self.steps.forget(upload.device)  # the server rejects it; the device starts over
            known.control, known.past = before, None
            return Aggregate(w, record | {"update_norm": math.inf})
        if o.dynamic_server:
            known.past = Past(server.version, server.age, s, xi, c)
        record |= {"lambda": c.lambda_, "sigma": c.sigma, "iota": c.iota, "xi": xi, "alpha": alpha}
        return Aggregate(new, record | {"update_norm": alpha * length}, news)

    def _adapt(self, known: DeviceControl, product: float, upload: Upload, flight: Flight) -> dict[str, Any]:
        """Move the device's controls down the loss of the model that its last upload produced."""
        o, past = self.options, known.past
        assert past is not None
        scale = flight.lr * flight.epochs  # as printed
        if o.equations == "corrected":
            # E1: training moves against the gradient. E5: it sums steps, not epochs. E6: what the merge left of them.
            n1, beta = int(upload.report.get("n1", 0)), float(upload.report.get("beta", 0.0))
            scale = -training_scale(flight.lr, upload.steps, n1, beta)
        q = product / scale
        gradients = control_gradients(q, o.mu_alpha, o.xi_min, past, o.equations)
        known.control = descend(known.control, gradients, (o.eta_lambda, o.eta_sigma, o.eta_iota))
        names = ("grad_lambda", "grad_sigma", "grad_iota")
        return {
            "adapted": True,
            "gap": flight.base - past.version - 1,  # E10
            "product": product,
            "q": q,
            "p": past.p,
            "s_p": past.s_p,
            "xi_p": past.xi_p,
            "lambda_p": past.control.lambda_,
            "sigma_p": past.control.sigma,
            "iota_p": past.control.iota,
            **dict(zip(names, gradients, strict=True)),
        }

    def opening(self) -> list[str]:
        limit, devices = self.steps.limit, self.world.devices
        if not self.options.dynamic_server or limit is None or limit >= devices:
            return []
        kept = f"{self.options.control_budget_mb} MiB (method.control_budget_mb) hold the steps of {limit} devices"
        if self.options.control_memory == "exact":
            size = 4e-9 * self.world.layout.learnable * (devices - limit)
            return [f"{kept} of {devices}; those of the others go to a temporary file of up to {size:.1f} GB"]
        return [f"{kept} of {devices}; devices whose step is forgotten skip an adaptation of their controls"]

    def closing(self) -> dict[str, Any]:
        return {"adaptations": self.adaptations, "adaptations_skipped": self.skipped}

    def _learn_slot(self, upload: Upload) -> tuple[dict[str, Any], ...]:
        """A reward came with the upload: the running mean always, the meta model after a device's first trip."""
        if "reward" not in upload.report:
            return ()
        reward = float(upload.report["reward"])
        self.meta.note(reward)
        if not upload.report.get("first"):
            return ()
        self.meta.reinforce(int(upload.report["slot"]), reward)
        news = self.meta.news()
        return () if news is None else ({"kind": "slots", **news},)

    def state(self) -> dict[str, Any]:
        devices = {}
        for device, known in self.devices.items():
            c, past = known.control, known.past
            entry: dict[str, Any] = {"control": [c.lambda_, c.sigma, c.iota]}
            if past is not None:
                k = past.control
                entry |= {"past": [past.version, past.p, past.s_p, past.xi_p, k.lambda_, k.sigma, k.iota]}
            devices[str(device)] = entry
        counts = {"adaptations": self.adaptations, "skipped": self.skipped}
        return {"devices": devices, "steps": self.steps.state(), "meta": self.meta.state(), **counts}

    def restore(self, state: dict[str, Any]) -> None:
        self.meta.restore(state["meta"])
        self.steps.restore(state["steps"])
        self.adaptations, self.skipped = int(state["adaptations"]), int(state["skipped"])
        self.devices = {}
        for device, entry in state["devices"].items():
            known = DeviceControl(Control(*entry["control"]))
            if "past" in entry:
                version, p, s_p, xi_p, *rest = entry["past"]
                known.past = Past(int(version), int(p), int(s_p), xi_p, Control(*rest))
            self.devices[int(device)] = known

    @classmethod
    def audit(cls, options: Any, event: dict[str, Any], memory: dict[Any, Any]) -> None:
        audits.asmu(options, event, memory, cls.kind)
