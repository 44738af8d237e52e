"""FedDyn: a dual variable per device makes the local optima agree with the global one.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama, "Federated Learning Based on
Dynamic Regularization", ICLR 2021.

Device, from theta^t, with its dual lambda_k (zero at first; ``-(1 / alpha) grad L_k`` of the paper), and
``alpha_k = alpha / (M n_k / sum_j n_j)``::

    gradient = grad f_k(u; B) + alpha_k (u - theta^t + lambda_k) + lambda_wd u
    lambda_k <- lambda_k + (u_k - theta^t)

Server, S the devices that uploaded and M all devices::

    abar = 1/|S| sum_S u_k       G <- G + 1/M sum_S (u_k - theta^t)       theta^{t+1} = abar + G

``G = -h / alpha`` in the paper's symbols. It equals the mean of lambda over all devices as long as no upload is lost.
If a defence accepts only a share of ``u_k - theta^t``, the server tells the device, and lambda_k keeps that share [D].
theta is sent down; **abar is tested** and given to the user [D] (the authors report it too). An empty round changes
neither. ``alpha = 0`` drops the regulariser and G and leaves the plain mean of the models [D]. Buffers take the plain
mean and never G. Default alpha = 0.01 as in the authors' CIFAR-10 example. The authors' code also clips every local
gradient to a norm of 10, for all its methods. We leave that out: no method here clips [D].
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.events import Aggregated, Event
from freshet.core.messages import Number
from freshet.core.method import Local, LocalRule, MethodContext, Options, expect
from freshet.core.server import Server
from freshet.core.vectors import Vector, combine, is_finite
from freshet.methods._shared.rounds import (
    PartialUpload,
    Round,
    RoundMethod,
    RoundUpload,
    accepted_share,
    accepted_share_instruction,
    with_partial_uploads,
)
from freshet.methods.fedprox import drift


class FedDynOptions(Options):
    """Hyper-parameters with the paper's symbols."""

    alpha: float = Field(0.01, ge=0, description="strength of the dynamic regulariser (0: plain mean, no dual)")


@dataclass
class FedDynState(Round):
    """The server's dual G, the mean model that is tested, and the uploads of which G holds only a share."""

    G: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    a_bar: Vector | None = None
    shortened: dict[int, PartialUpload] = field(default_factory=dict)


class FedDyn(RoundMethod):
    """The server's part."""

    about = About(
        "feddyn",
        "sync",
        "FedDyn",
        "Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021",
        space={"alpha": Range(1e-3, 0.3, log=True)},
    )
    Options: ClassVar[type[Options]] = FedDynOptions
    options: FedDynOptions
    state: FedDynState

    def __init__(self, options: FedDynOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.state = FedDynState(G=np.zeros(context.layout.learnable))

    @classmethod
    def rule(cls, options: FedDynOptions) -> LocalRule:
        return DualRule() if options.alpha else LocalRule()

    @classmethod
    def beyond_sum(cls, options: FedDynOptions) -> str | None:
        return "its devices keep sums of their own updates, which the server's sum with noise does not match"

    def instruct(self, server: Server, device: int) -> dict[str, Number]:
        if not self.options.alpha:
            return {}
        samples = self.context.samples
        share = self.context.devices * float(samples[device]) / float(samples.sum())
        return {"alpha_k": self.options.alpha / share, **accepted_share_instruction(self.state.shortened, device)}

    def shares(self, members: list[RoundUpload]) -> list[float]:
        return [1.0 / len(members)] * len(members)

    def aggregate(
        self, server: Server, members: list[RoundUpload], shares: list[float]
    ) -> tuple[Vector, dict[str, Any]]:
        a_bar, _ = super().aggregate(server, members, shares)
        self.context.layout.max_counters(a_bar, *(m.weights for m in members))
        self.state.a_bar = a_bar
        if not self.options.alpha:
            return a_bar.copy(), {}
        n, theta, theta_next = self.context.layout.learnable, server.weights, a_bar.copy()
        mean, moved = np.zeros(n), np.zeros(n)
        for member, share in zip(members, shares, strict=True):
            u = member.weights[:n].astype(np.float64)
            mean += share * u
            moved += u - theta[:n]
        self.state.G = self.state.G + moved / self.context.devices
        self.state.shortened = with_partial_uploads(self.state.shortened, members)
        theta_next[:n] = mean + self.state.G
        return theta_next, {"dual_norm": float(np.linalg.norm(self.state.G))}

    def is_sane(self) -> bool:
        return self.state.a_bar is None or is_finite(self.state.a_bar)

    def evaluation_model(self, server: Server) -> Vector:
        return server.weights if self.state.a_bar is None else self.state.a_bar

    @classmethod
    def audit(cls, options: FedDynOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        if isinstance(event, Aggregated):
            for part in event.contributions:
                expect(f"weight of device {part.device}", part.weight, 1.0 / len(event.contributions))


@dataclass(frozen=True)
class DualRule(LocalRule):
    """The device's part: the regulariser, and in memory the dual and the last trip's change of it."""

    remembers: ClassVar[bool] = True

    def begin(self, local: Local) -> None:
        memory = local.memory
        dual, share = memory.get("lambda"), accepted_share(local.assignment.instruction, memory)
        if share != 1.0:
            dual = combine([(1.0, memory["lambda"]), (share - 1.0, memory["moved"])])
        local.scratch["lambda"] = local.base.new_zeros(local.base.shape) if dual is None else local.tensor(dual)

    def adjust(self, local: Local) -> None:
        pull = drift(local).add_(local.scratch["lambda"])
        local.gradient.add_(pull, alpha=float(local.assignment.instruction["alpha_k"]))

    def finish(self, local: Local) -> None:
        n = local.learnable
        dual, base = local.scratch["lambda"].cpu().numpy(), local.base.cpu().numpy()
        u = local.snapshot()[:n]
        local.memory["lambda"] = combine([(1.0, dual), (1.0, u), (-1.0, base)])
        local.memory |= {"moved": combine([(1.0, u), (-1.0, base)]), "trip": local.assignment.trip}
