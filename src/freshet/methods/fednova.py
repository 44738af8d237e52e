"""FedNova: every device's progress is divided by the length of its path, so longer training does not count more.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization", NeurIPS 2020.

Local training that sums its gradients with weights a_i moves by ``y_i - x = -eta |a_i|_1 d_i``, where d_i is a mean
of gradients. With ``p_i = n_i / sum_S n``::

    x <- x - tau_eff eta sum_S p_i d_i = x + sum_S p_i tau_eff / |a_i|_1 (y_i - x)        tau_eff = sum_S p_i |a_i|_1

|a_i|_1 is how far tau_i steps along a constant unit gradient lead, in units of eta: tau_i for plain SGD, ``sum_k (1 -
rho^k) / (1 - rho)`` with momentum rho (``MethodContext.reach``), ``(1 - (1 - eta mu)^tau_i) / (eta mu)`` with the
proximal term mu. Equal steps give FedAvg, bit for bit (FedProx where mu > 0).

Decisions [D]: p_i is normalised over the devices that uploaded, as in every method here. With momentum and the proximal
term together, the term joins the gradient before momentum. |a_i|_1 is then how far the optimiser moves along ``1 - eta
mu x_k`` instead of 1, where x_k is its position (the authors' code puts the term after momentum and has another
recursion). ``tau_eff = "steps"`` is ``sum_S p_i tau_i``, which the authors' code uses where mu > 0. Under Adam |a_i|_1
is the number of steps. Weight decay is part of the gradient. Buffers of the network take FedAvg's mean. Server momentum
belongs to ``fedavgm``, not to FedNova.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.events import Aggregated, Event
from freshet.core.messages import Upload
from freshet.core.method import LocalRule, Mismatch, Options, expect
from freshet.core.server import ActiveTrip, Server
from freshet.core.vectors import Vector, combine
from freshet.methods._shared.rounds import RoundMethod, RoundUpload
from freshet.methods.fedprox import proximal


class FedNovaOptions(Options):
    """Hyper-parameters with the paper's symbols."""

    mu: float = Field(0.0, ge=0, description="proximal term of the local loss (0: none)")
    tau_eff: Literal["paths", "steps"] = Field(
        "paths", description="effective steps of a round: mean of the |a_i|, or mean of the steps"
    )


@lru_cache(maxsize=4096)
def path_length(reach: Callable[[int], float], steps: int, eta_mu: float) -> float:
    """``|a_i|_1``: how far ``steps`` steps lead along a constant unit gradient, held back by the proximal term.

    The optimiser's response to a gradient, j steps later, is ``r_{j+1} - r_j``; r_k is its k-th step along a constant
    gradient.
    """
    if not eta_mu:
        return float(reach(steps))
    reached = np.array([0.0, *(reach(k) for k in range(1, steps + 1))])
    answer = np.diff(np.diff(reached), prepend=0.0)
    gradient, moved = np.zeros(steps), 0.0
    for k in range(steps):
        gradient[k] = 1.0 - eta_mu * moved
        moved += float(answer[: k + 1] @ gradient[k::-1])
    return moved


def effective_steps(samples: Sequence[int], lengths: Sequence[float]) -> float:
    """``tau_eff = sum p_i |a_i|``; exactly the common value if all are equal."""
    return sum(n * a for n, a in zip(samples, lengths, strict=True)) / sum(samples)


def contribution_weights(samples: Sequence[int], a: Sequence[float], tau_eff: float) -> list[float]:
    """``p_i tau_eff / |a_i|``."""
    total = sum(samples)
    return [n / total * (tau_eff / a_i) for n, a_i in zip(samples, a, strict=True)]


class FedNova(RoundMethod):
    """The server's part."""

    about = About(
        "fednova",
        "sync",
        "FedNova",
        "Wang et al., Tackling the Objective Inconsistency Problem, NeurIPS 2020",
        space={"mu": Range(0.0, 0.5)},
    )
    Options: ClassVar[type[Options]] = FedNovaOptions
    options: FedNovaOptions

    @classmethod
    def rule(cls, options: FedNovaOptions) -> LocalRule:
        return proximal(options.mu)

    def validate_report(self, upload: Upload, trip: ActiveTrip) -> str | None:
        too_strong = trip.lr * self.options.mu >= 1.0
        return "cannot be normalised: method.mu times the learning rate must be below 1" if too_strong else None

    def _paths(self, members: list[RoundUpload]) -> list[float]:
        return [path_length(self.context.reach, m.steps, m.lr * self.options.mu) for m in members]

    def _tau_eff(self, members: list[RoundUpload], a: list[float]) -> float:
        lengths = a if self.options.tau_eff == "paths" else [float(m.steps) for m in members]
        return effective_steps([m.samples for m in members], lengths)

    def shares(self, members: list[RoundUpload]) -> list[float]:
        a = self._paths(members)
        return contribution_weights([m.samples for m in members], a, self._tau_eff(members, a))

    def aggregate(
        self, server: Server, members: list[RoundUpload], shares: list[float]
    ) -> tuple[Vector, dict[str, Any]]:
        n, total, a = self.context.layout.learnable, sum(m.samples for m in members), self._paths(members)
        p = [m.samples / total for m in members]
        new = combine([(p_i, m.weights) for p_i, m in zip(p, members, strict=True)])
        kept = sum(p_i - share for p_i, share in zip(p, shares, strict=True))  # 0 where all paths are equal
        step = [(share, m.weights[:n]) for share, m in zip(shares, members, strict=True)]
        combine([*step, (kept, server.weights[:n])], out=new[:n])
        steps, reach = [m.steps for m in members], [self.context.reach(m.steps) for m in members]
        numbers: dict[str, Any] = {"alpha": sum(shares), "steps": steps, "a": a, "lr": [m.lr for m in members]}
        if reach != steps:
            numbers["reach"] = reach
        return new, numbers | {"tau_eff": self._tau_eff(members, a)}

    @classmethod
    def audit(cls, options: FedNovaOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        """Check tau_eff, every weight, and |a_i| from the steps (with momentum: from the optimiser's reach)."""
        if not isinstance(event, Aggregated) or not event.contributions:
            return
        n, parts = event.numbers, event.contributions
        for place, part in enumerate(parts):
            _audit_path_length(options, n, place, part.device)
        expect(
            "tau_eff", n["tau_eff"], effective_steps(n["samples"], n["a" if options.tau_eff == "paths" else "steps"])
        )
        for part, weight in zip(parts, contribution_weights(n["samples"], n["a"], n["tau_eff"]), strict=True):
            expect(f"weight of device {part.device}", part.weight, weight)
        expect("alpha", n["alpha"], sum(part.weight for part in parts))


def _audit_path_length(options: FedNovaOptions, n: Any, place: int, device: int) -> None:
    a, steps, eta_mu, name = n["a"][place], n["steps"][place], n["lr"][place] * options.mu, f"|a| of device {device}"
    if "reach" not in n:
        expect(name, a, path_length(float, steps, eta_mu))
    elif not eta_mu:
        expect(name, a, n["reach"][place])
    elif not 0.0 < a <= n["reach"][place]:
        raise Mismatch(f"{name} is {a!r}, beyond what the optimiser reaches in {steps} steps")
