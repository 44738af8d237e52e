"""FedOpt: the mean progress of a round is a gradient for an optimiser on the server.

S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan, "Adaptive Federated
Optimization", ICLR 2021 (FedAdagrad, FedAdam, FedYogi); T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the Effects of
Non-Identical Data Distribution for Federated Visual Classification", 2019 (FedAvgM).

With ``Delta = sum_S p_i (x_i - x)``, ``p_i = n_i / sum_S n``, every operation per coordinate::

    fedavgm      m <- beta1 m + Delta                                                  x <- x + eta m
    the others   m <- beta1 m + (1 - beta1) Delta                                      x <- x + eta m / (sqrt(v) + tau)
    fedadagrad   v <- v + Delta^2
    fedadam      v <- beta2 v + (1 - beta2) Delta^2
    fedyogi      v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)

m = 0 and v = tau^2 at first, no bias correction. The plain server (``server = "sgd"``, beta1 = 0, eta = 1) is FedAvg.

Decisions [D]: v starts at tau^2, the least that the paper's analysis allows (public implementations often start at 0).
Devices are weighted by their samples, as in the paper's experiments (its algorithm prints 1/|S|). tau = 0.001 and
beta2 = 0.99 are the paper's. beta1 = 0.9, but 0 for Adagrad, as in its experiments. eta has no common default: 1 for
SGD, 0.03 for the others (about ``10^-1.5``, the paper's best for several tasks). Buffers of the network take FedAvg's
mean. A round without uploads changes neither m nor v.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from freshet.core.about import About, Range
from freshet.core.events import Aggregated, Event
from freshet.core.method import MethodContext, Options, expect
from freshet.core.server import Server
from freshet.core.vectors import Vector
from freshet.methods._shared.rounds import Round, RoundMethod, RoundUpload, audit_sample_shares

Wide = NDArray[np.float64]


class FedOptOptions(Options):
    """Hyper-parameters with the paper's symbols."""

    #: Defaults that follow from the server's optimiser.
    server_defaults: ClassVar[dict[str, dict[str, Any]]] = {"sgd": {"eta": 1.0}, "adagrad": {"beta1": 0.0}}

    server: Literal["sgd", "adagrad", "adam", "yogi"] = Field("adam", description="the server's optimiser")
    eta: float = Field(0.03, gt=0, description="server learning rate (default under sgd: 1)")
    beta1: float = Field(0.9, ge=0, lt=1, description="server momentum (default under adagrad: 0)")
    beta2: float = Field(0.99, ge=0, lt=1, description="decay rate of v (adam, yogi)")
    tau: float = Field(1e-3, gt=0, description="degree of adaptivity: larger values act more like SGD (not under sgd)")

    @model_validator(mode="before")
    @classmethod
    def _defaults_that_follow(cls, given: Any) -> Any:
        return cls.server_defaults.get(given.get("server", ""), {}) | given if isinstance(given, dict) else given


@dataclass
class FedOptState(Round):
    """First and second moments of the mean progress."""

    m: Wide = field(default_factory=lambda: np.zeros(0))
    v: Wide = field(default_factory=lambda: np.zeros(0))


def second_moment(options: FedOptOptions, v: Wide, delta: Wide) -> Wide:
    """The next ``v``."""
    square = delta * delta
    if options.server == "adagrad":
        return v + square
    if options.server == "adam":
        return options.beta2 * v + (1.0 - options.beta2) * square
    return v - (1.0 - options.beta2) * square * np.sign(v - square)


class FedOpt(RoundMethod):
    """The server's part; devices do plain SGD."""

    about = About(
        "fedopt",
        "sync",
        "FedOpt",
        "Reddi et al., Adaptive Federated Optimization, ICLR 2021",
        variants={
            "fedavgm": {"server": "sgd"},
            "fedadagrad": {"server": "adagrad"},
            "fedadam": {"server": "adam"},
            "fedyogi": {"server": "yogi"},
        },
        space={
            "eta": Range(1e-3, 3.0, log=True),
            "beta1": Range(0.0, 0.95),
            "tau": Range(1e-5, 0.1, log=True),
        },
    )
    Options: ClassVar[type[Options]] = FedOptOptions
    options: FedOptOptions
    state: FedOptState

    def __init__(self, options: FedOptOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        n = context.layout.learnable
        self.state = FedOptState(m=np.zeros(n), v=np.full(n, options.tau**2))

    def aggregate(
        self, server: Server, members: list[RoundUpload], shares: list[float]
    ) -> tuple[Vector, dict[str, Any]]:
        o, n, state, x = self.options, self.context.layout.learnable, self.state, server.weights
        new, _ = super().aggregate(server, members, shares)
        delta = np.zeros(n)
        for share, member in zip(shares, members, strict=True):
            delta += share * (member.weights[:n].astype(np.float64) - x[:n])
        state.m = o.beta1 * state.m + (delta if o.server == "sgd" else (1.0 - o.beta1) * delta)
        step = state.m
        if o.server != "sgd":
            state.v = second_moment(o, state.v, delta)
            step = state.m / (np.sqrt(state.v) + o.tau)
        new[:n] = x[:n] + o.eta * step
        norms = {"delta_norm": float(np.linalg.norm(delta)), "m_norm": float(np.linalg.norm(state.m))}
        return new, {"alpha": o.eta, **norms}

    @classmethod
    def audit(cls, options: FedOptOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        audit_sample_shares(event)
        if isinstance(event, Aggregated) and event.contributions:
            expect("alpha", event.numbers["alpha"], options.eta)
