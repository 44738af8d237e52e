"""Defence against poisoned updates, between the gates and the method: the same for every method.

A step is what a device's training changed, ``d = u - w_s``, with the vectors that come beside the model at its end.
Training begins at the version that the device was given, ``w_s = w_o``. Where it merged a fresh one on its way, its n1
steps a before and n2 steps b after that make ``u = (1 - beta) (w_o + a) + beta w_g + b``, so that
``w_s = w_o + beta (w_g - w_o)`` and ``d = (1 - beta) a + b``: how far the server itself has gone is no device's doing.
d is what FedASMU applies under apply = "progress", so that just this is bounded. Under "mix" it applies ``u - w``, with
``u = w_s + d``: w_s lies between two models of the server's own, whatever beta a device reports, and drawing the model
there is the method's rule, not the device's; all that the device can add to it is d again.

    clip             |d| is at most ``factor`` x the median length of the last uploads; a longer step is shortened
    median-distance  the median distance of d to the last steps is at most ``factor`` x the median of what that was for
                     them, and it does not go against them: the median of its cosines with the last steps is not below
                     0, or, where that is nothing unusual, not far below what it was for them; else it is refused
    multi-krum       of a round's n uploads the n - f are kept whose n - f - 2 nearest others are nearest (synchronous)

Every upload that passed the gates counts as one of the last ``WINDOW``, refused or not: medians hold as long as fewer
than half of them are poisoned, and a fleet whose steps grow is not locked out. The first ones are only looked at, since
there is nothing to hold them against. What was decided, and the numbers behind it, stand in the log ("defence").

Why cosines: the step of device j is about ``d_j = - eta grad F_j``, so letting in d changes its loss by about
``<grad F_j, d> = - <d_j, d> / eta``. A median cosine below 0 says that d raises the loss of most who sent something
lately. No length can tell that: a step learned from wrong labels is about as long as an honest one. Where the honest go
against each other, too (two classes for each device), 0 says nothing, and only what is unusual is refused.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent", NeurIPS 2017 (multi-Krum). Clipping: Z. Sun et al., "Can You Really Backdoor Federated Learning?", 2019; here
with a bound that follows the run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from freshet.core import saving
from freshet.core.audit import expect
from freshet.core.events import Noted
from freshet.core.layout import Layout
from freshet.core.messages import Upload
from freshet.core.method import Options
from freshet.core.vectors import Vector, combine, distance, dot, is_finite, mix, norm

if TYPE_CHECKING:
    from freshet.core.server import ActiveTrip

#: Uploads that another is held against, and of how many the figures must be known.
WINDOW = 32
MIN_MEASURES = 4
#: How many uploads must be known for their directions to count: of five, two that are poisoned may be the majority of
#: those that happen to be on one side.
MIN_AGREEMENTS = 8
#: Share of the last uploads that must go with the others for right angles to be unusual; where they do not, how far
#: below the usual agreement is unusual, in median deviations.
ALIGNED_SHARE = 2 / 3
DEVIATIONS = 2.0
NOTE_ABOUT = "defence"
#: Under which name the report of a shortened upload says how much is left of it.
SHARE = "defence.share"
Rule = Literal["none", "clip", "median-distance", "multi-krum"]
DEFAULT_FACTORS = {"clip": 1.0, "median-distance": 1.5}


class DefenceOptions(Options):
    """Defence against poisoned updates, before the method sees them."""

    rule: Rule = Field("none", description="none, clip (shorten), median-distance (refuse), multi-krum (synchronous)")
    factor: float | None = Field(
        None, gt=0, description="bound in medians of the last 32 uploads (default: clip 1, median-distance 1.5)"
    )
    byzantine: float = Field(
        0.2, ge=0, lt=0.5, description="multi-krum: share of a round's uploads that is taken for poisoned"
    )


class Decision(NamedTuple):
    """What is left of an upload (None: held back for the end of the round), or why it is refused; notes for the log."""

    upload: Upload | None
    problem: str | None = None
    notes: tuple[Noted, ...] = ()


@dataclass
class RecentUploads:
    """The last uploads: their measures, and their steps and agreements where those are needed."""

    measures: list[float] = field(default_factory=list)
    steps: list[Vector] = field(default_factory=list)
    agreements: list[float] = field(default_factory=list)

    def add(self, measure: float | None, agreement: float | None, step: Vector | None) -> None:
        """One more upload; what is None of it is not known, or not needed."""
        for known, new in ((self.measures, measure), (self.agreements, agreement), (self.steps, step)):
            if new is not None:
                known.append(new)  # type: ignore[arg-type]
            del known[:-WINDOW]


class Defence:
    """Judges uploads, one by one or a round at a time."""

    def __init__(self, options: DefenceOptions, layout: Layout) -> None:
        self.options, self.layout = options, layout
        self.factor = options.factor or DEFAULT_FACTORS.get(options.rule, 1.0)
        self.recent = RecentUploads()
        self._held: list[tuple[Upload, ActiveTrip, Vector]] = []

    def judge(self, upload: Upload, flight: "ActiveTrip", base: Vector, fresh: Vector | None = None) -> Decision:
        """What becomes of an upload that passed the gates, whose device was given ``base`` and, if it asked and there
        was one, ``fresh``."""
        start = start_of(upload, base, fresh)
        step = step_of(upload, start, self.layout.learnable)
        if not is_finite(step):
            return Decision(upload, "is farther from its base than a number can say")
        if self.options.rule == "multi-krum":
            self._held.append((upload, flight, step))
            return Decision(None)
        clips, seen = self.options.rule == "clip", self.recent
        measure = norm(step) if clips else _median_distance(step, seen.steps)
        agreement = None if clips else agreement_of(step, seen.steps)
        bound, least = bound_of(seen.measures, self.factor), least_agreement(seen.agreements)
        share = admitted_share(self.options.rule, measure, bound, agreement, least)
        seen.add(measure, agreement, None if clips else step)
        place = {"device": upload.device, "trip": upload.trip, "rule": self.options.rule, "factor": self.factor}
        figures = {"measure": measure, "bound": bound, "agreement": agreement, "least": least, "share": share}
        notes = (Noted(NOTE_ABOUT, place | figures),)
        if bound is None or measure is None:
            return Decision(upload, "comes before there are enough others to hold it against", notes)
        if share == 0.0 and measure > bound:
            return Decision(upload, f"is {measure:.4g} away from other uploads, more than {bound:.4g}", notes)
        if share == 0.0:
            return Decision(upload, f"goes against other uploads (median cosine {agreement:.4g} < {least:.4g})", notes)
        return Decision(upload if share == 1.0 else shorten(upload, start, share, self.layout), None, notes)

    def release(self) -> tuple[list[tuple[Upload, "ActiveTrip"]], tuple[Noted, ...]]:
        """The round is over: its uploads that are kept, in the order of their arrival, and a note."""
        held, self._held = self._held, []
        if not held:
            return [], ()
        steps = [step for _, _, step in held]
        f = byzantine_count(len(held), self.options.byzantine)
        scores = krum_scores(steps, f)
        chosen = smallest(scores, len(held) - f)
        devices = [upload.device for upload, _, _ in held]
        kept = [devices[place] for place in chosen]
        numbers = {"rule": "multi-krum", "devices": devices, "scores": scores, "f": f, "kept": kept}
        return [held[place][:2] for place in chosen], (Noted(NOTE_ABOUT, numbers),)

    def state(self) -> saving.Tree:
        """What it has seen, and what it holds back."""
        held = [[list(upload), saving.dump(flight), step] for upload, flight, step in self._held]
        return {"seen": saving.dump(self.recent), "held": saving.dump(held)}

    def restore(self, tree: saving.Tree) -> None:
        """The inverse of ``state``."""
        from freshet.core.server import ActiveTrip

        saving.restore(self.recent, tree["seen"])
        self._held = [(_upload(up), ActiveTrip(**flight), np.array(step)) for up, flight, step in tree["held"]]


def _upload(saved: Sequence[Any]) -> Upload:
    """An upload whose arrays are its own: the saved ones may lie in a file."""
    upload = Upload(*saved)
    vectors = {name: np.array(vector) for name, vector in upload.vectors.items()}
    return upload._replace(weights=np.array(upload.weights), vectors=vectors)


# ---- one by one


def start_of(upload: Upload, base: Vector, fresh: Vector | None) -> Vector:
    """Where what training produced begins: ``w_s = (1 - beta) w_o + beta w_g``, or w_o where nothing was merged;
    between the two, whatever is reported for beta."""
    beta = min(max(float(upload.merged.get("beta", 0.0)), 0.0), 1.0)
    return base if fresh is None or beta == 0.0 else mix(base, fresh, beta)


def step_of(upload: Upload, start: Vector, learnable: int) -> Vector:
    """``u - w_s`` of the learnable weights, then the vectors beside the model in the order of their names."""
    with np.errstate(over="ignore"):  # infinitely long is too long
        step = combine([(1.0, upload.weights[:learnable]), (-1.0, start[:learnable])])
    others = [upload.vectors[name] for name in sorted(upload.vectors)]
    return np.concatenate([step, *others]) if others else step


def _median_distance(step: Vector, others: Sequence[Vector]) -> float | None:
    return median(distance(step, other) for other in others) if others else None


def agreement_of(step: Vector, others: Sequence[Vector]) -> float | None:
    """The median of its cosines with other steps (0 where one has no length); None if there are none."""
    return median(_cosine(step, other) for other in others) if others else None


def _cosine(a: Vector, b: Vector) -> float:
    lengths = norm(a) * norm(b)
    return dot(a, b) / lengths if lengths > 0.0 else 0.0


def least_agreement(agreements: Sequence[float]) -> float | None:
    """Right angles, where ``MOSTLY`` of the last uploads went with the others; else ``SPREADS`` median deviations below
    the median of their agreements, if that is less; None while there are too few."""
    last = agreements[-WINDOW:]
    if len(last) < MIN_AGREEMENTS:
        return None
    if sum(each >= 0.0 for each in last) >= ALIGNED_SHARE * len(last):
        return 0.0
    usual = median(last)
    return min(0.0, usual - DEVIATIONS * median(abs(each - usual) for each in last))


def bound_of(measures: Sequence[float], factor: float) -> float | None:
    """``factor`` x the median of the last measures; None while there are too few."""
    return factor * median(measures[-WINDOW:]) if len(measures) >= MIN_MEASURES else None


def admitted_share(
    rule: str, measure: float | None, bound: float | None, agreement: float | None = None, least: float | None = None
) -> float:
    """How much of a step is let in: all, what brings it to the bound (clip), or nothing."""
    if bound is None or measure is None:
        return 0.0
    if agreement is not None and least is not None and agreement < least:
        return 0.0
    if measure <= bound:
        return 1.0
    return bound / measure if rule == "clip" else 0.0


def shorten(upload: Upload, start: Vector, share: float, layout: Layout) -> Upload:
    """``w_s + share (u - w_s)``, and so with all that comes beside it; counters stay. The report says so."""
    weights, n = upload.weights.copy(), layout.floats
    mix(start[:n], upload.weights[:n], share, out=weights[:n])
    vectors = {name: combine([(share, vector)]) for name, vector in upload.vectors.items()}
    return upload._replace(weights=weights, vectors=vectors, report={**upload.report, SHARE: share})


def share_of(upload: Upload) -> float:
    """How much of its step was let in. A device that reports a share itself is told no more than its own word."""
    return float(upload.report.get(SHARE, 1.0))


# ---- a round at a time


def byzantine_count(count: int, share: float) -> int:
    """f: how many of a round are taken for poisoned; Krum needs ``n >= 2 f + 3``."""
    return max(0, min(round(share * count), (count - 3) // 2))


def krum_scores(steps: Sequence[Vector], f: int) -> list[float]:
    """``s(i) = sum of |d_i - d_j|^2`` over the n - f - 2 nearest others j."""
    n = len(steps)
    squares = np.zeros((n, n))
    for i in range(n):
        for j in range(i):
            squares[i, j] = squares[j, i] = distance(steps[i], steps[j]) ** 2
    nearest = max(1, n - f - 2)
    return [float(np.sort(np.delete(squares[i], i))[:nearest].sum()) for i in range(n)]


def smallest(scores: Sequence[float], count: int) -> list[int]:
    """Places of the ``count`` smallest scores (the first of equals), in ascending order."""
    return sorted(sorted(range(len(scores)), key=lambda place: (scores[place], place))[:count])


# ---- audit


def audit_note(note: Noted, seen: RecentUploads) -> None:
    """Hold a logged decision against the formulas; ``seen`` holds the figures of the notes before it."""
    n = note.numbers
    if n["rule"] == "multi-krum":
        f, devices = n["f"], n["devices"]
        expect("f", float(f), float(min(f, max(0, (len(devices) - 3) // 2))))
        kept = [devices[place] for place in smallest(n["scores"], len(devices) - f)]
        expect("kept", float(kept == n["kept"]), 1.0)
        return
    bound, agreement, least = bound_of(seen.measures, n["factor"]), n.get("agreement"), least_agreement(seen.agreements)
    for name, logged, found in (("bound", n["bound"], bound), ("least", n.get("least"), least)):
        if logged is not None or found is not None:
            expect(name, math.nan if logged is None else logged, math.nan if found is None else found)
    expect("share", n["share"], admitted_share(n["rule"], n["measure"], bound, agreement, least))
    seen.add(n["measure"], agreement, None)
