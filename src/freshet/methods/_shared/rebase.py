"""Fresh models for the devices of any asynchronous method: ask in mid-training, carry the progress over (rebase).

Whether a device takes in a fresh model does not depend on how the server weighs its upload. At the start of epoch l*
the device asks for the current model ``w_g``. With the anchor a, which is the base ``w_o`` at first::

    w_a = w_b + (w_g - a)      a <- w_g

The device continues from the fresh model with all its progress ``w_b - a`` kept. What training has produced at the end
is ``d = w_i - a``. A server rule that adds progress takes d in place of ``w_i - w_o`` (``Server.start_of``). A server
rule that mixes models takes ``w_i`` as it is. Terms that refer to the base, such as a proximal one, refer to the anchor
after a merge.

Relatives: the same difference is applied to a model that has moved on in DaSGD (Zhou et al., arXiv 2006.00441), Delayed
Gradient Averaging (Zhu et al., NeurIPS 2021) and LOSCAR-SGD (Maziane et al., arXiv 2605.20866).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from freshet.core.events import Merged
from freshet.core.layout import Layout
from freshet.core.messages import Assignment, Fresh, Number, Slot, Upload
from freshet.core.method import ADDED, Facts, Local, LocalRule, Memory, Moves, Options, expect
from freshet.core.vectors import Vector, combine, mix
from freshet.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

#: How often a device asks in a trip.
Refresh = int | Literal["every"]


class FreshOptions(Options):
    """Options of a method whose devices may take in fresh models. None of its own options may have these names."""

    fresh: Literal["none", "rebase"] = Field(
        "none",
        description="fresh models in mid-training. none: as published. rebase: the device asks for the current model "
        "and continues from it with all its progress",
        json_schema_extra=ADDED,
    )
    slot: Literal["h1", "h2", "h3", "last", "random", "never"] | int = Field(
        "last",
        description="with fresh = rebase: when to ask. An epoch number, h1 (after the first epoch), h2 (mid-way), h3 "
        "(before the penultimate epoch), last (before the last one), random, or never",
        json_schema_extra=ADDED,
    )
    refresh: Refresh = Field(
        1,
        description="with fresh = rebase: requests per trip; the further ones come at the start of the next epochs. "
        "every: in all epochs from the slot on",
        json_schema_extra=ADDED,
    )

    @model_validator(mode="after")
    def _check_fresh(self) -> Self:
        check_refresh(self.refresh)
        return self

    def check_run(self, facts: Facts) -> None:
        check_slot(self.slot, facts.epochs)


def check_refresh(refresh: Refresh) -> None:
    """Refuse a number of requests below 1."""
    if isinstance(refresh, int) and refresh < 1:
        raise ValueError('refresh must be at least 1, or "every"')


def check_slot(slot: str | int, epochs: int) -> None:
    """Refuse a slot that is none of the epochs."""
    if isinstance(slot, int) and not 1 <= slot <= epochs:
        raise ConfigError("method.slot", f"must be an epoch in 1..{epochs} (training.epochs), but {slot} was given")


def fixed_slot(policy: str | int, epochs: int, rng: np.random.Generator) -> Slot | None:
    """Return a fixed or random slot.

    H1 is after the first epoch, H2 mid-way, H3 in the penultimate epoch (the paper's three), last in the last one.
    """
    if policy == "never":
        return None
    if policy == "random":
        return Slot(int(rng.integers(1, epochs + 1)), "fixed")
    epoch = {"h1": 2, "h2": epochs // 2 + 1, "h3": epochs - 1, "last": epochs}.get(str(policy), policy)
    return Slot(min(max(int(epoch), 1), epochs), "fixed")


def further_slots(first: Slot, epochs: int, refresh: Refresh) -> tuple[Slot, ...]:
    """Return the slots after the first: the next epochs, ``refresh - 1`` of them or all."""
    last = epochs if refresh == "every" else min(first.epoch + refresh - 1, epochs)
    return tuple(Slot(epoch, "again") for epoch in range(first.epoch + 1, last + 1))


def rebase_model(before: Vector, fresh: Vector, anchor: Vector, beta: float, layout: Layout) -> Vector:
    """``w_b + beta (w_g - a)``. Statistics are mixed instead: a difference of variances may be negative."""
    n, merged = layout.learnable, mix(before, fresh, beta)
    combine(((1.0, before[:n]), (beta, fresh[:n]), (-beta, anchor[:n])), out=merged[:n])
    layout.max_counters(merged, before, fresh)
    return merged


def merge_order_problem(upload: Upload) -> str | None:
    """Why the merges cannot have happened after as many steps as the device says, or None."""
    done = 0
    for merge in upload.merges:
        before = merge.numbers.get("n1", -1 if merge.numbers.get("beta", 0.0) else 0)
        if not (isinstance(before, int) and done <= before < upload.steps):
            return f"reports a merge after {merge.numbers.get('n1')} of {upload.steps} steps, which is impossible"
        done = before
    return None


#: What a rule declares about itself, taken over from the rule that a rebasing one wraps.
DECLARED = (
    *("sends", "remembers", "timed", "decay_first", "adjusts_gradient", "changes_loss"),
    *("personalises", "needs_own_parts", "reports_loss"),
)


@dataclass(frozen=True)
class Rebasing(LocalRule):
    """Trains by another rule. Asks for the fresh model in a fixed slot and rebases onto it."""

    inner: LocalRule
    slot: str | int
    refresh: Refresh

    def __post_init__(self) -> None:
        for name in DECLARED:
            object.__setattr__(self, name, getattr(self.inner, name))
        object.__setattr__(self, "public", (*self.inner.public, "n1", "beta"))

    @property
    def holds_out(self) -> bool:
        return self.inner.holds_out

    @property
    def anchored(self) -> bool:
        return True

    def check(self, module: "nn.Module") -> None:
        self.inner.check(module)

    def leak(self) -> str | None:
        return self.inner.leak()  # when it asks does not depend on the samples

    def plan(self, memory: Memory, assignment: Assignment, rng: np.random.Generator) -> Slot | None:
        return fixed_slot(self.slot, assignment.epochs, rng)

    def later_slots(self, first: Slot, epochs: int) -> tuple[Slot, ...]:
        return further_slots(first, epochs, self.refresh)

    def begin(self, local: Local) -> None:
        self.inner.begin(local)

    def loss(self, local: Local, x: "Tensor", y: "Tensor") -> "Tensor":
        return self.inner.loss(local, x, y)

    def adjust(self, local: Local) -> None:
        self.inner.adjust(local)

    def moves(self, local: Local) -> Moves:
        return self.inner.moves(local)

    def personal_model(self, memory: Memory, weights: Vector) -> Vector:
        return self.inner.personal_model(memory, weights)

    def merge(self, local: Local, fresh: Fresh) -> dict[str, Number]:
        local.set_weights(rebase_model(local.snapshot(), fresh.weights, local.anchor, 1.0, local.layout))
        return {"n1": local.steps, "beta": 1.0}

    def finish(self, local: Local) -> None:
        self.inner.finish(local)

    def report_problem(self, upload: Upload) -> str | None:
        weights = [merge.numbers.get("beta") for merge in upload.merges]
        if any(weight != 1.0 for weight in weights):
            return f"reports merges with weights {weights!r:.80}, but a rebase has weight 1"
        return merge_order_problem(upload) or self.inner.report_problem(upload)

    def audit_merge(self, event: Merged) -> None:
        expect("beta", event.numbers["beta"], 1.0)


def with_fresh(options: FreshOptions, rule: LocalRule) -> LocalRule:
    """Return the rule, rebasing onto fresh models if the options say so."""
    return rule if options.fresh == "none" else Rebasing(rule, options.slot, options.refresh)
