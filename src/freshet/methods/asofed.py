"""ASO-Fed: devices correct their gradients with past ones; the server adds each device's progress by its share of the
data.

Y. Chen, Y. Ning, M. Slawski, H. Rangwala, "Asynchronous Online Federated Learning for Edge Devices with Non-IID
Data", IEEE Big Data 2020.

Device, from base ``w^b``, with g the gradient of ``s_k(u) = f_k(u) + lambda / 2 |u - w^b|^2`` and H_k, V_k kept
between trips (zero at first)::

    z = g - V_k + H_k      u <- u - r_k eta z      H_k <- beta H_k + (1 - beta) V_k,  then V_k <- g
    r_k = max(1, ln(d_k / D)),  d_k = mean seconds of the device's completed trips (r_k = 1 before the first)

Server, N the samples of *all* devices: ``w <- w + n_k / N (u_k - w^b)``.

The paper allows several readings. Decisions [D]: ``variant = "S"`` runs the recursion at every mini-batch. "R" trains
on s_k first and applies the recursion once to ``g = w^b - u`` with eta = 1. z uses the old H_k (Algorithm 2). Weight
decay is part of f_k and so of g; only then do S and R agree on one full batch. Momentum acts on ``r_k z``. n_k does not
grow. Buffers mix with n_k / N. ``feature_step`` is the paper's Eqs. 5-6 on the first layer: rows are scaled by their
softmax of |A|. It is off by default, which is the paper's own ablation ASO-Fed(-F). Taken literally it destroys a
convolution within three arrivals, so use it for checks only.

**The unit D of the delay [D].** The paper writes ``log d_k`` without a unit, with delays of 10-100 s and a rate of
0.001. A logarithm of plain seconds multiplies *every* rate by 2.3-4.6 and changes with the clock's unit; at the common
rate of 0.1 the model then diverges. The purpose of r_k is that a device that reports less often counts as much as the
others. What matters is how slow it is relative to them. So D is the trip of the fleet's fastest device (trigger to
upload, written to config.toml). r_k = 1 for devices up to e times slower, and rescaling all times changes nothing.
``delay_unit = 1`` gives plain seconds.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from freshet.core.about import About, Range, Remark
from freshet.core.events import Aggregated, Contribution, Event, Triggered, Uploaded
from freshet.core.layout import Layout
from freshet.core.messages import Upload
from freshet.core.method import Aggregate, Local, LocalRule, Method, MethodContext, Options, Verdict, expect
from freshet.core.server import ActiveTrip, Server
from freshet.core.vectors import Vector, combine, mix
from freshet.methods._shared.rebase import FreshOptions, with_fresh
from freshet.methods.fedprox import Proximal, drift


class ASOFedOptions(FreshOptions):
    """Hyper-parameters with the paper's symbols."""

    beta: float = Field(0.001, ge=0, le=1, description="share of H kept at each step")
    lambda_: float = Field(0.5, ge=0, description="lambda: proximal term of the local loss")
    delay_unit: float | None = Field(
        None, gt=0, description="D: seconds in which delays are counted (default: the trip of the fastest device)"
    )
    variant: Literal["S", "R"] = Field("S", description="recursion at every step (S) or once per trip (R)")
    feature_step: bool = Field(False, description="rescale the first layer at every arrival (destroys a CNN)")

    def with_derived(self, context: MethodContext) -> Self:
        """Set D from the fleet's fastest device."""
        if self.delay_unit is not None or not context.fastest_seconds:
            return self
        return self.model_copy(update={"delay_unit": context.fastest_seconds})


class ASOFed(Method):
    """The server's part."""

    about = About(
        "asofed",
        "async",
        "ASO-Fed",
        "Chen et al., Asynchronous Online Federated Learning, IEEE Big Data 2020",
        remark=Remark(
            "-F",
            "ASO-Fed without its feature step, the paper's ablation ASO-Fed(-F); its recursion at every mini-batch is "
            "our reading",
        ),
        space={"beta": Range(1e-4, 0.1, log=True), "lambda_": Range(0.05, 2.0, log=True)},
    )
    Options: ClassVar[type[Options]] = ASOFedOptions
    options: ASOFedOptions

    @classmethod
    def rule(cls, options: ASOFedOptions) -> LocalRule:
        o, unit = options, delay_unit(options)
        rule = StepRule(o.beta, o.lambda_, unit) if o.variant == "S" else TripRule(o.lambda_, o.beta, unit)
        return with_fresh(o, rule)

    def validate_report(self, upload: Upload, trip: ActiveTrip) -> str | None:
        return None if {"r", "seconds"} <= upload.report.keys() else "does not report its r and its seconds"

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        samples, total = int(self.context.samples[upload.device]), int(self.context.samples.sum())
        layout, w, u, base = self.context.layout, server.weights, upload.weights, server.start_of(upload)
        n, limit = layout.learnable, self.context.share_limit(self.context.devices)
        share = min(samples / total, limit)
        new = mix(w, u, share)
        combine([(1.0, w[:n]), (share, u[:n]), (-share, base[:n])], out=new[:n])
        layout.max_counters(new, w, u)
        if self.options.feature_step:
            scale_first_layer(layout, new)
        part = Contribution(upload.device, trip.base, server.staleness(trip), share)
        numbers = {"alpha": share, "samples": samples, "total": total} | ({"max_share": limit} if limit < 1 else {})
        return Aggregate(new, (part,), numbers | {name: upload.report[name] for name in ("r", "seconds")})

    @classmethod
    def audit(cls, options: ASOFedOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check alpha, and r from the times of the device's earlier trips."""
        if isinstance(event, Triggered):
            count, total = memory.get(("trips", event.device), (0, 0.0))
            memory["trip", event.device] = (time, total / count if count else None)
        elif isinstance(event, Uploaded):
            count, total = memory.get(("trips", event.device), (0, 0.0))
            memory["trips", event.device] = (count + 1, total + (time - memory["trip", event.device][0]))
        elif isinstance(event, Aggregated):
            (part,), n = event.contributions, event.numbers
            expect("alpha", n["alpha"], min(n["samples"] / n["total"], n.get("max_share", 1.0)))
            expect("weight", part.weight, n["alpha"])
            known: Any = memory.setdefault("total", n["total"])
            expect("total", n["total"], known)
            known = memory.setdefault(("samples", part.device), n["samples"])
            expect("samples", n["samples"], known)
            seconds = memory["trip", part.device][1]
            expect("seconds", n["seconds"], seconds or 0.0)
            expect("r", n["r"], delay_factor(seconds, delay_unit(options)))


def delay_unit(options: ASOFedOptions) -> float:
    """``D``; plain seconds if the fleet is unknown."""
    return 1.0 if options.delay_unit is None else options.delay_unit


def delay_factor(seconds: float | None, unit: float) -> float:
    """``r_k``."""
    return max(1.0, math.log(seconds / unit)) if seconds else 1.0


def scale_features(A: NDArray[np.float64]) -> NDArray[np.float64]:
    """``a_ij = exp|A_ij| / sum_j exp|A_ij|``, ``A_ij <- a_ij A_ij``."""
    size = np.abs(A)
    a = np.exp(size - size.max(axis=1, keepdims=True))
    scaled: NDArray[np.float64] = a / a.sum(axis=1, keepdims=True) * A
    return scaled


def scale_first_layer(layout: Layout, w: Vector) -> None:
    """The feature step on the first weight matrix (rows: output units), in place."""
    entry = next(e for e in layout.entries if e.kind == "learnable" and len(e.shape) >= 2)
    matrix = w[entry.span].astype(np.float64).reshape(entry.shape[0], -1)
    w[entry.span] = scale_features(matrix).ravel()


def _stored_vector(local: Local, name: str) -> Vector:
    """Return the device's H or V from before this trip."""
    stored: Vector | None = local.memory.get(name)
    return np.zeros(local.learnable, np.float32) if stored is None else stored


def _report_delay(local: Local, unit: float) -> None:
    r = local.scratch["r"] = delay_factor(local.seconds, unit)
    local.report |= {"r": r, "seconds": local.seconds or 0.0}


@dataclass(frozen=True)
class StepRule(LocalRule):
    """The device's part, variant S: the recursion at every mini-batch."""

    remembers: ClassVar[bool] = True
    public: ClassVar[tuple[str, ...]] = ("r", "seconds")
    timed: ClassVar[bool] = True
    decay_first: ClassVar[bool] = True
    beta: float
    lambda_: float
    unit: float = 1.0

    def begin(self, local: Local) -> None:
        _report_delay(local, self.unit)
        local.scratch |= {name: local.tensor(_stored_vector(local, name)) for name in ("H", "V")}

    def adjust(self, local: Local) -> None:
        import torch

        H, V, g = local.scratch["H"], local.scratch["V"], local.gradient
        if self.lambda_:
            g.add_(drift(local), alpha=self.lambda_)
        z = (g - V).add_(H)
        H.mul_(self.beta).add_(V, alpha=1.0 - self.beta)
        V.copy_(g)
        torch.mul(z, local.scratch["r"], out=g)

    def finish(self, local: Local) -> None:
        local.memory |= {name: local.scratch[name].cpu().numpy() for name in ("H", "V")}


@dataclass(frozen=True)
class TripRule(Proximal):
    """The device's part, variant R: train on s_k, then run the recursion once with the whole trip as gradient."""

    remembers: ClassVar[bool] = True
    public: ClassVar[tuple[str, ...]] = ("r", "seconds")
    timed: ClassVar[bool] = True
    beta: float
    unit: float = 1.0

    def begin(self, local: Local) -> None:
        _report_delay(local, self.unit)

    def finish(self, local: Local) -> None:
        r, H, V = local.scratch["r"], _stored_vector(local, "H"), _stored_vector(local, "V")
        model, base = local.snapshot(), local.base.cpu().numpy()
        u = model[: local.learnable]
        G = combine([(1.0, base), (-1.0, u)])
        combine([(1.0 - r, base), (r, u), (r, V), (-r, H)], out=u)  # w^b - r (G - V + H)
        local.set_weights(model)
        local.memory |= {"H": combine([(self.beta, H), (1.0 - self.beta, V)]), "V": G}
