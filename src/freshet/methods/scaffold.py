"""SCAFFOLD: control variates on server and devices remove the drift of local training.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, "SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning", ICML 2020.

Device i, from x, with its control c_i and the server's c (zero at first), K steps on mini-batch gradients g_i::

    y <- y - eta_l (g_i(y) - c_i + c)      c_i^+ = c_i - c + (x - y_i) / (K eta_l)      (the paper's Option II)

Server, S the devices that uploaded and N all devices::

    x <- x + eta_g / |S| sum_S (y_i - x)       c <- c + 1/N sum_S (c_i^+ - c_i)

c goes down with the model and ``c_i^+ - c_i`` comes up with it, so messages are twice as large as FedAvg's.

Decisions [D]: Option II is the mean of the g_i along the path, since ``(x - y_i) / (K eta_l)`` is the mean of
``g_i - c_i + c``. We sum the g_i. That is the same for plain SGD and remains a gradient under momentum, Adam or a
changing rate. g_i includes weight decay (as f_i does in Option II). The correction joins the gradient before momentum.
All devices have equal weight, as in the paper, whatever their samples. Buffers of the network take the plain mean;
eta_g does not apply to them. **A lost upload leaves no trace:** a device adopts its c_i^+ only when the server tells
it, at its next trip, that the upload of that trip was aggregated. So c is the mean of all c_i even when uploads are
lost or refused. If a defence accepts only a share of the change, the device adopts that share.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from freshet.core.about import About, Range
from freshet.core.events import Aggregated, Event
from freshet.core.messages import Number, Vectors
from freshet.core.method import Local, LocalRule, MethodContext, Options, expect
from freshet.core.server import Server
from freshet.core.vectors import Vector, combine, is_finite, mix, norm
from freshet.methods._shared.rounds import (
    PartialUpload,
    Round,
    RoundMethod,
    RoundUpload,
    accepted_share,
    accepted_share_instruction,
    with_partial_uploads,
)


class SCAFFOLDOptions(Options):
    """Hyper-parameters with the paper's symbols."""

    eta_g: float = Field(1.0, gt=0, description="server learning rate")


@dataclass
class SCAFFOLDState(Round):
    """The server's control c and, per device, the last trip that changed c, fully or by a share."""

    c: Vector = field(default_factory=lambda: np.zeros(0, np.float32))
    heard: dict[int, int] = field(default_factory=dict)
    shortened: dict[int, PartialUpload] = field(default_factory=dict)


class SCAFFOLD(RoundMethod):
    """The server's part."""

    about = About(
        "scaffold",
        "sync",
        "SCAFFOLD",
        "Karimireddy et al., SCAFFOLD, ICML 2020",
        space={"eta_g": Range(0.1, 3.0, log=True)},
    )
    Options: ClassVar[type[Options]] = SCAFFOLDOptions
    options: SCAFFOLDOptions
    state: SCAFFOLDState

    def __init__(self, options: SCAFFOLDOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.state = SCAFFOLDState(c=np.zeros(context.layout.learnable, np.float32))

    @classmethod
    def rule(cls, options: SCAFFOLDOptions) -> LocalRule:
        return ControlledRule()

    def instruct(self, server: Server, device: int) -> dict[str, Number]:
        return {"heard": self.state.heard.get(device, 0), **accepted_share_instruction(self.state.shortened, device)}

    def vectors(self, server: Server, device: int) -> Vectors:
        return {"c": self.state.c}

    def shares(self, members: list[RoundUpload]) -> list[float]:
        return [self.options.eta_g / len(members)] * len(members)

    def aggregate(
        self, server: Server, members: list[RoundUpload], shares: list[float]
    ) -> tuple[Vector, dict[str, Any]]:
        n, N, state, x = self.context.layout.learnable, self.context.devices, self.state, server.weights
        new = combine([(1.0 / len(members), member.weights) for member in members])
        step = [(share, member.weights[:n]) for share, member in zip(shares, members, strict=True)]
        combine([*step, (1.0 - self.options.eta_g, x[:n])], out=new[:n])
        state.c = combine([(1.0, state.c), *((1.0 / N, member.vectors["change"]) for member in members)])
        state.heard = state.heard | {member.device: member.trip for member in members}
        state.shortened = with_partial_uploads(state.shortened, members)
        numbers = {"alpha": self.options.eta_g, "N": N, "c_share": 1.0 / N, "c_norm": norm(state.c)}
        return new, numbers

    def is_sane(self) -> bool:
        return is_finite(self.state.c)

    @classmethod
    def audit(cls, options: SCAFFOLDOptions, event: Event, time: float, memory: dict[Any, Any]) -> None:
        if isinstance(event, Aggregated) and event.contributions:
            for part in event.contributions:
                expect(f"weight of device {part.device}", part.weight, options.eta_g / len(event.contributions))
            expect("alpha", event.numbers["alpha"], options.eta_g)
            expect("c_share", event.numbers["c_share"], 1.0 / event.numbers["N"])


@dataclass(frozen=True)
class ControlledRule(LocalRule):
    """The device's part. Its memory: the control before its last trip, the control after it, and the trip's number.

    A trip with a lost upload changes no control, so it need not be computed (``remembers`` stays False).
    """

    sends: ClassVar[tuple[str, ...]] = ("change",)
    decay_first: ClassVar[bool] = True

    def begin(self, local: Local) -> None:
        memory, instruction, zeros = local.memory, local.assignment.instruction, local.base.new_zeros(local.base.shape)
        confirmed, share = memory.get("trip") == instruction["heard"], accepted_share(instruction, memory)
        c_i = memory.get("next" if confirmed else "c")
        if confirmed and share != 1.0:
            c_i = mix(memory["c"], memory["next"], share)
        local.scratch["c_i"] = zeros if c_i is None else local.tensor(c_i)
        local.scratch["correction"] = local.tensor(local.assignment.vectors["c"]) - local.scratch["c_i"]
        local.scratch["sum"] = zeros.clone()

    def adjust(self, local: Local) -> None:
        local.scratch["sum"].add_(local.gradient)
        local.gradient.add_(local.scratch["correction"])

    def finish(self, local: Local) -> None:
        c_i: Vector = local.scratch["c_i"].cpu().numpy()
        following: Vector = (local.scratch["sum"] / local.steps).cpu().numpy()
        local.vectors["change"] = combine([(1.0, following), (-1.0, c_i)])
        local.memory |= {"c": c_i, "next": following, "trip": local.assignment.trip}
