"""What becomes of a trained model before it leaves the device: made private, turned into an attack, encoded."""

from dataclasses import dataclass, field

import numpy as np

from freshet.core.layout import Layout
from freshet.core.links import LinkOptions, packed
from freshet.core.messages import Assignment
from freshet.core.privacy import PrivacyOptions, privatised
from freshet.core.streams import stream
from freshet.training.attacks import AttackOptions, reversed_update
from freshet.training.outcome import Outcome


@dataclass(frozen=True)
class Outgoing:
    """A function of the outcome, the assignment and keyed random streams: same bits on every executor."""

    links: LinkOptions = field(default_factory=LinkOptions)
    attack: AttackOptions = field(default_factory=AttackOptions)
    privacy: PrivacyOptions = field(default_factory=PrivacyOptions)
    seed: int = 0
    #: Noise from the operating system's entropy: of real devices, whose server knows the seed.
    secret: bool = False

    def told(self, outcome: Outcome, public: tuple[str, ...]) -> Outcome:
        """The outcome with those numbers only that may be told."""
        if not self.privacy.on:
            return outcome
        report, merged = ({k: v for k, v in n.items() if k in public} for n in (outcome.report, outcome.merged))
        return outcome._replace(report=report, merged=merged, diverged=False, lost_at_merge=False)

    def sent(self, outcome: Outcome, assignment: Assignment, layout: Layout, hostile: bool) -> Outcome:
        """The outcome as it goes up; ``hostile`` for a device that attacks."""
        if self.privacy.on:
            keyed = stream(self.seed, "privacy", assignment.device, assignment.trip)
            rng = np.random.default_rng() if self.secret else keyed
            outcome = outcome._replace(weights=privatised(self.privacy, outcome.weights, assignment.weights, rng))
        if hostile and self.attack.kind == "sign-flip":
            weights = reversed_update(self.attack, outcome.weights, assignment.weights, layout.learnable)
            outcome = outcome._replace(weights=weights)
        if self.links.up != "none":
            weights, size, memory = packed(self.links, layout, outcome.weights, assignment.weights, outcome.memory)
            outcome = outcome._replace(weights=weights, packed=size, memory=memory)
        return outcome


AS_IT_IS = Outgoing()
