"""Processing of a trained model before it leaves the device: privacy noise, simulated attacks, compression.

Attacks, for experiments in the simulator:

    sign-flip   reverse and enlarge the update: ``u <- w - strength (u - w)``
    label-flip  train on the label ``C - 1 - c`` instead of c
    backdoor    give every second sample of a batch a bright 3 x 3 corner and the label ``target``

The same devices attack throughout a run. A separate random stream chooses them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from freshet.core.compression import LinkOptions, encode_upload
from freshet.core.layout import Layout
from freshet.core.messages import UNREAD, Assignment, Merge, Number
from freshet.core.method import Options
from freshet.core.streams import stream
from freshet.core.vectors import Vector, combine
from freshet.privacy import PrivacyOptions, privatise

if TYPE_CHECKING:
    from torch import Tensor

    from freshet.training.trip import TripOutcome


#: Side of the corner that triggers the backdoor. For inputs other than images, the number of last entries.
PATCH = 3


class AttackOptions(Options):
    """Simulated attacks, to test defences (simulations only)."""

    kind: Literal["none", "sign-flip", "label-flip", "backdoor"] = Field(
        "none", description="kind of attack: reverse and enlarge updates, train on wrong labels, plant a backdoor"
    )
    share: float = Field(0.2, gt=0, lt=1, description="share of the devices that attack")
    strength: float = Field(10.0, gt=0, description="sign-flip: factor on the reversed update")
    target: int = Field(0, ge=0, description="backdoor: the class to predict for samples with the trigger")


def choose_attackers(options: AttackOptions, seed: int, devices: int) -> frozenset[int]:
    """The devices that attack: at least one, unless there is no attack."""
    if options.kind == "none":
        return frozenset()
    count = max(1, round(options.share * devices))
    chosen: list[int] = stream(seed, "attack").permutation(devices)[:count].tolist()
    return frozenset(chosen)


def poison_batch(options: AttackOptions, x: "Tensor", y: "Tensor", classes: int) -> tuple["Tensor", "Tensor"]:
    """The batch that an attacker trains on. It is a copy, and this function may write to it."""
    if options.kind == "label-flip":
        return x, classes - 1 - y
    if options.kind == "backdoor":
        x[::2] = add_trigger(x[::2])
        y[::2] = options.target
    return x, y


def add_trigger(x: "Tensor") -> "Tensor":
    """Samples with the backdoor's trigger, which is as bright as the brightest entry of the batch."""
    x = x.clone()
    if x.ndim == 4:
        x[:, :, -PATCH:, -PATCH:] = x.amax()
    else:
        x.view(len(x), -1)[:, -PATCH:] = x.amax()
    return x


def flip_update(options: AttackOptions, weights: Vector, base: Vector, learnable: int) -> Vector:
    """``w - strength (u - w)`` for the learnable weights."""
    out = weights.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        s = options.strength
        combine([(1.0 + s, base[:learnable]), (-s, weights[:learnable])], out=out[:learnable])
    return out


@dataclass(frozen=True)
class Outgoing:
    """Privacy, attack and compression. They depend only on outcome, assignment and keyed random streams, so every
    executor gives the same bits."""

    links: LinkOptions = field(default_factory=LinkOptions)
    attack: AttackOptions = field(default_factory=AttackOptions)
    privacy: PrivacyOptions = field(default_factory=PrivacyOptions)
    seed: int = 0
    #: Draw noise from the operating system. Real devices need this, because the server knows the seed.
    secret: bool = False

    def redact(self, outcome: "TripOutcome", public: tuple[str, ...]) -> "TripOutcome":
        """With privacy on, remove all numbers that are not in ``public``."""
        if not self.privacy.on:
            return outcome

        def only_public(numbers: Mapping[str, Number]) -> dict[str, Number]:
            return {name: value for name, value in numbers.items() if name in public}

        merges = tuple(Merge(merge.version, only_public(merge.numbers)) for merge in outcome.merges)
        return outcome._replace(report=only_public(outcome.report), merges=merges, diverged=False)

    def encode(
        self, outcome: "TripOutcome", assignment: Assignment, start: Vector, layout: Layout, hostile: bool
    ) -> "TripOutcome":
        """The outcome as it goes up. ``start`` is where its step starts. ``hostile`` marks a device that attacks."""
        if self.privacy.on:
            keyed = stream(self.seed, "privacy", assignment.device, assignment.trip)
            rng = np.random.default_rng() if self.secret else keyed
            outcome = outcome._replace(weights=privatise(self.privacy, outcome.weights, start, rng))
        if hostile and self.attack.kind == "sign-flip":
            weights = flip_update(self.attack, outcome.weights, start, layout.learnable)
            outcome = outcome._replace(weights=weights)
        if self.links.up != "none":
            trip, told, weights = assignment.trip, assignment.instruction, outcome.weights
            packed, memory = encode_upload(self.links, layout, weights, start, outcome.memory, trip, told)
            outcome = outcome._replace(weights=UNREAD, packed=packed, memory=memory)
        return outcome


UNCHANGED = Outgoing()
