"""Processing of a trained model before it leaves the device: privacy noise, simulated attacks, compression.

Attacks, for experiments in the simulator:

    sign-flip   reverse and enlarge the update: ``u <- w - strength (u - w)``
    label-flip  train on the label ``C - 1 - c`` instead of c
    backdoor    give every second sample of a batch a bright 3 x 3 corner and the label ``target``
    free-rider  send the model back as it came

Two attacks need to know what honest devices do (``Collusion``). With the mean m and the standard deviation s of every
coordinate over the latest steps of all honest devices, attackers send the step

    little-is-enough   ``m - strength s``   (G. Baruch, M. Baruch, Y. Goldberg, "A Little Is Enough", NeurIPS 2019)
    inner-product      ``- strength m``     (C. Xie, O. Koyejo, I. Gupta, "Fall of Empires", UAI 2019)

The same devices attack throughout a run. A separate random stream chooses them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from freshet.core.compression import LinkOptions, encode_upload
from freshet.core.layout import Layout
from freshet.core.messages import UNREAD, Assignment, Merge, Number, Upload
from freshet.core.method import ConditionalDefaults, Options
from freshet.core.saving import Tree
from freshet.core.streams import stream
from freshet.core.vectors import Vector, combine, is_finite
from freshet.privacy import PrivacyOptions, privatise

if TYPE_CHECKING:
    from torch import Tensor

    from freshet.training.trip import TripOutcome


#: Side of the corner that triggers the backdoor. For inputs other than images, the number of last entries.
PATCH = 3


class AttackOptions(Options):
    """Simulated attacks, to test defences (simulations only)."""

    conditional_defaults: ClassVar[ConditionalDefaults] = {
        ("kind", "little-is-enough"): {"strength": 1.5},
        ("kind", "inner-product"): {"strength": 0.5},
    }

    kind: Literal["none", "sign-flip", "label-flip", "backdoor", "little-is-enough", "inner-product", "free-rider"] = (
        Field(
            "none",
            description="kind of attack: reverse and enlarge updates, train on wrong labels, plant a backdoor, stay a "
            "little off the honest mean, reverse the honest mean, send the model back",
        )
    )
    share: float = Field(0.2, gt=0, lt=1, description="share of the devices that attack")
    strength: float = Field(
        10.0,
        gt=0,
        description="sign-flip: factor on the reversed update; little-is-enough: standard deviations from the honest "
        "mean (default 1.5); inner-product: factor on the reversed honest mean (default 0.5)",
    )
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


#: Attacks whose devices know the honest ones.
COLLUDING = ("little-is-enough", "inner-product")


class Collusion:
    """Attackers who know the latest step of every honest device. They are honest until two of these are known."""

    def __init__(self, options: AttackOptions, attackers: frozenset[int], learnable: int) -> None:
        self.options, self.attackers, self.learnable = options, attackers, learnable
        self.latest: dict[int, Vector] = {}

    @classmethod
    def from_options(cls, options: AttackOptions, seed: int, devices: int, learnable: int) -> Self | None:
        """None for attacks that need no such knowledge."""
        knows = options.kind in COLLUDING
        return cls(options, choose_attackers(options, seed, devices), learnable) if knows else None

    def forge(self, upload: Upload, start: Vector) -> Upload:
        """The upload that arrives. ``start`` is where its step starts."""
        n, steps = self.learnable, list(self.latest.values())
        if upload.device not in self.attackers:
            if is_finite(upload.weights):
                self.latest[upload.device] = combine([(1.0, upload.weights[:n]), (-1.0, start[:n])])
            return upload
        if len(steps) < 2:
            return upload
        weights = upload.weights.copy()
        weights[:n] = start[:n] + self._step(np.stack(steps))
        return upload._replace(weights=weights)

    def _step(self, honest: NDArray[np.float32]) -> NDArray[np.float64]:
        mean: NDArray[np.float64] = honest.mean(axis=0, dtype=np.float64)
        if self.options.kind == "inner-product":
            return -self.options.strength * mean
        deviation: NDArray[np.float64] = honest.std(axis=0, dtype=np.float64)
        return mean - self.options.strength * deviation

    def state(self) -> Tree:
        return {str(device): step for device, step in self.latest.items()}

    def restore(self, tree: Tree) -> None:
        """The inverse of ``state``."""
        self.latest = {int(device): np.array(step) for device, step in tree.items()}


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
        if self.privacy.on_devices:
            keyed = stream(self.seed, "privacy", assignment.device, assignment.trip)
            rng = np.random.default_rng() if self.secret else keyed
            outcome = outcome._replace(weights=privatise(self.privacy, outcome.weights, start, rng))
        if hostile and self.attack.kind == "sign-flip":
            weights = flip_update(self.attack, outcome.weights, start, layout.learnable)
            outcome = outcome._replace(weights=weights)
        if hostile and self.attack.kind == "free-rider":
            outcome = outcome._replace(weights=start.copy())
        if self.links.up != "none":
            trip, told, weights = assignment.trip, assignment.instruction, outcome.weights
            packed, memory = encode_upload(self.links, layout, weights, start, outcome.memory, trip, told)
            outcome = outcome._replace(weights=UNREAD, packed=packed, memory=memory)
        return outcome


UNCHANGED = Outgoing()
