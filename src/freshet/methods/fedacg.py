"""FedACG: the server sends its model moved ahead along its momentum, and devices stay near it.

G. Kim, J. Kim, B. Han, "Communication-Efficient Federated Learning with Accelerated Client Gradient", CVPR 2024.

Sent to the devices is the look-ahead model wtilde. S the devices that uploaded, means are plain::

    wtilde = w + lambda m                              device: loss + beta |u - wtilde|^2, from wtilde
    m <- lambda m + mean_S (u_k - wtilde)              w <- mean_S u_k   (= w + m)

wtilde is the model that devices get; **w is tested** and given to the user. m = 0 at first, so wtilde = w^0.

Decisions [D]: beta without a half, as in the authors' code (the paper may write beta / 2). Defaults lambda = 0.85 and
beta = 0.001 are the code's. Buffers of the network take the plain mean and are not moved ahead. A round without
uploads changes neither m nor w. Gradients are not clipped.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.events import Aggregated, Event
from freshet.core.method import LocalRule, MethodContext, Options, expect
from freshet.core.server import Server
from freshet.core.vectors import Vector, is_finite
from freshet.methods._shared.rounds import Round, RoundMethod, RoundUpload
from freshet.methods.fedprox import proximal


class FedACGOptions(Options):
    """Hyper-parameters with the paper's symbols."""

    lambda_: float = Field(0.85, ge=0, lt=1, description="lambda: server momentum, and how far the model is sent ahead")
    beta: float = Field(1e-3, ge=0, description="weight of |u - wtilde|^2 in the local loss (0: none)")


@dataclass
class FedACGState(Round):
    """The momentum m, and the model w that is tested."""

    m: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    w: Vector | None = None


class FedACG(RoundMethod):
    """The server's part."""

    about = About(
        "fedacg",
        "sync",
        "FedACG",
        "Kim, Kim, Han, Accelerated Client Gradient, CVPR 2024",
        space={"lambda_": Range(0.8, 0.95), "beta": Range(1e-4, 1e-2, log=True)},
    )
    Options: ClassVar[type[Options]] = FedACGOptions
    options: FedACGOptions
    state: FedACGState

    def __init__(self, options: FedACGOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.state = FedACGState(m=np.zeros(context.layout.learnable))

    @classmethod
    def rule(cls, options: FedACGOptions) -> LocalRule:
        return proximal(2.0 * options.beta)

    def shares(self, members: list[RoundUpload]) -> list[float]:
        return [1.0 / len(members)] * len(members)

    def aggregate(
        self, server: Server, members: list[RoundUpload], shares: list[float]
    ) -> tuple[Vector, dict[str, Any]]:
        n, wtilde, lambda_ = self.context.layout.learnable, server.weights, self.options.lambda_
        w, _ = super().aggregate(server, members, shares)
        self.context.layout.max_counters(w, *(member.weights for member in members))
        mean = np.zeros(n)
        for share, member in zip(shares, members, strict=True):
            mean += share * member.weights[:n].astype(np.float64)
        self.state.m = lambda_ * self.state.m + (mean - wtilde[:n])
        self.state.w, ahead = w, w.copy()
        ahead[:n] = mean + lambda_ * self.state.m
        return ahead, {"lambda": lambda_, "m_norm": float(np.linalg.norm(self.state.m))}

    def is_sane(self) -> bool:
        return self.state.w is None or is_finite(self.state.w)

    def evaluation_model(self, server: Server) -> Vector:
        return server.weights if self.state.w is None else self.state.w

    @classmethod
    def audit(cls, options: FedACGOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        if isinstance(event, Aggregated) and event.contributions:
            for part in event.contributions:
                expect(f"weight of device {part.device}", part.weight, 1.0 / len(event.contributions))
            expect("lambda", event.numbers["lambda"], options.lambda_)
