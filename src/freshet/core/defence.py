"""Defence against poisoned updates, between the checks and the method. It is the same for every method.

A step is the change made by a device's training, ``d = u - w_s``, followed by the vectors sent with the model. Training
starts at the version that the device was given, ``w_s = w_o``. A device that merges a fresh model w_g after n1 steps a
and then takes n2 steps b has ``u = (1 - beta) (w_o + a) + beta w_g + b``, so ``w_s = w_o + beta (w_g - w_o)`` and
``d = (1 - beta) a + b``. The server's own progress does not count as the device's. d is what FedASMU applies under
apply = "progress", so exactly this is bounded. Under "mix" it applies ``u - w`` with ``u = w_s + d``. Whatever beta a
device reports, w_s lies between two of the server's own models, and moving the model there is the method's rule. A
device can add only d to it.

    clip             |d| is at most ``factor`` times the median length of recent uploads. A longer step is shortened.
    median-distance  The median distance of d to recent steps is at most ``factor`` times the median of that measure.
                     The median cosine of d with recent steps is at least 0 or, if negative values are common, not far
                     below the usual. Other uploads are rejected.
    multi-krum       Of n uploads in a round, keep the n - f that are closest to their n - f - 2 nearest neighbours
                     (synchronous methods).

Every upload that passed the checks counts among the last ``WINDOW``, rejected or not. So medians hold while fewer than
half of these are poisoned, and a fleet with growing steps is not locked out. The first uploads are only measured, since
nothing is known to compare them with. The log holds every decision with its numbers (a note about "defence").

Why cosines: the step of device j is about ``d_j = - eta grad F_j``, so applying d changes its loss by about
``<grad F_j, d> = - <d_j, d> / eta``. If the median cosine is below 0, d raises the loss of most recent devices. Lengths
cannot show that: a step learned from wrong labels is about as long as an honest one. If honest devices also oppose each
other (two classes per device), 0 means nothing, and only unusual cosines are rejected.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent", NeurIPS 2017 (multi-Krum). Clipping: Z. Sun et al., "Can You Really Backdoor Federated Learning?", 2019; here
with a bound that follows the run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from pydantic import Field

from freshet.core import saving
from freshet.core.events import Noted
from freshet.core.layout import Layout
from freshet.core.messages import FreshModels, Upload
from freshet.core.method import Options, expect
from freshet.core.vectors import Vector, combine, distance, dot, is_finite, mix, norm

if TYPE_CHECKING:
    from freshet.core.server import ActiveTrip

#: An upload is compared with this many recent ones.
WINDOW = 32
#: The bound counts from this many measures.
MIN_MEASURES = 4
#: Directions count from this many uploads: of five, two poisoned ones may be a majority of those on one side.
MIN_AGREEMENTS = 8
#: The share of recent uploads that must agree with the others for a negative cosine to be unusual.
ALIGNED_SHARE = 2 / 3
#: Otherwise, a cosine this many median deviations below the usual one is unusual.
DEVIATIONS = 2.0
NOTE_ABOUT = "defence"
#: The key in the report of a shortened upload for the share that is left of it.
SHARE = "defence.share"
Rule = Literal["none", "clip", "median-distance", "multi-krum"]
DEFAULT_FACTORS = {"clip": 1.0, "median-distance": 1.5}


class DefenceOptions(Options):
    """Defence against poisoned updates, before the method sees them."""

    rule: Rule = Field("none", description="none, clip (shorten), median-distance (reject), multi-krum (synchronous)")
    factor: float | None = Field(
        None, gt=0, description="bound in medians of the last 32 uploads (default: clip 1, median-distance 1.5)"
    )
    byzantine: float = Field(
        0.2, ge=0, lt=0.5, description="multi-krum: share of a round's uploads assumed to be poisoned"
    )


class Decision(NamedTuple):
    """The admitted upload (None: held back until the round ends), or why it is rejected; notes for the log."""

    upload: Upload | None
    problem: str | None = None
    notes: tuple[Noted, ...] = ()


@dataclass
class RecentUploads:
    """The last uploads: their measures and, if needed, their steps and agreements."""

    measures: list[float] = field(default_factory=list)
    steps: list[Vector] = field(default_factory=list)
    agreements: list[float] = field(default_factory=list)

    def add(self, measure: float | None, agreement: float | None, step: Vector | None) -> None:
        """Add one upload. A value of None is unknown or not needed."""
        for known, new in ((self.measures, measure), (self.agreements, agreement), (self.steps, step)):
            if new is not None:
                known.append(new)  # type: ignore[arg-type]
            del known[:-WINDOW]


class Defence:
    """Decides on uploads, one by one or a round at a time."""

    def __init__(self, options: DefenceOptions, layout: Layout) -> None:
        self.options, self.layout = options, layout
        self.factor = options.factor or DEFAULT_FACTORS.get(options.rule, 1.0)
        self.recent = RecentUploads()
        self._held: list[tuple[Upload, ActiveTrip, Vector]] = []

    def judge(self, upload: Upload, active: "ActiveTrip", base: Vector, fresh: FreshModels) -> Decision:
        """Decide on an upload that passed the checks.

        Its device was given ``base`` and, in mid-training, the newer models in ``fresh``.
        """
        start = upload.anchor(base, fresh)
        step = step_of(upload, start, self.layout.learnable)
        if not is_finite(step):
            return Decision(upload, "is so far from its base that the distance overflows")
        if self.options.rule == "multi-krum":
            self._held.append((upload, active, step))
            return Decision(None)
        clips, recent = self.options.rule == "clip", self.recent
        measure = norm(step) if clips else _median_distance(step, recent.steps)
        agreement = None if clips else agreement_of(step, recent.steps)
        bound, least = bound_of(recent.measures, self.factor), least_agreement(recent.agreements)
        share = admitted_share(self.options.rule, measure, bound, agreement, least)
        recent.add(measure, agreement, None if clips else step)
        place = {"device": upload.device, "trip": upload.trip, "rule": self.options.rule, "factor": self.factor}
        figures = {"measure": measure, "bound": bound, "agreement": agreement, "least": least, "share": share}
        notes = (Noted(NOTE_ABOUT, place | figures),)
        if bound is None or measure is None:
            return Decision(upload, "came before there were enough uploads to compare it with", notes)
        if share == 0.0 and measure > bound:
            return Decision(upload, f"is {measure:.4g} away from other uploads, more than {bound:.4g}", notes)
        if share == 0.0:
            return Decision(upload, f"goes against other uploads (median cosine {agreement:.4g} < {least:.4g})", notes)
        return Decision(upload if share == 1.0 else shorten(upload, start, share, self.layout), None, notes)

    def release(self) -> tuple[list[tuple[Upload, "ActiveTrip"]], tuple[Noted, ...]]:
        """At the end of a round: the uploads to keep, in the order of arrival, and a note."""
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
        """Recent uploads, and those held back."""
        held = [[saving.dump(upload), saving.dump(active), step] for upload, active, step in self._held]
        return {"seen": saving.dump(self.recent), "held": held}

    def restore(self, tree: saving.Tree) -> None:
        """The inverse of ``state``."""
        from freshet.core.server import ActiveTrip

        saving.restore(self.recent, tree["seen"])
        self._held = [
            (saving.rebuild(Upload, upload), saving.rebuild(ActiveTrip, active), np.array(step))
            for upload, active, step in tree["held"]
        ]


# ---- one by one


def step_of(upload: Upload, start: Vector, learnable: int) -> Vector:
    """``u - w_s`` of the learnable weights, followed by the named vectors in the order of their names."""
    with np.errstate(over="ignore"):  # an infinite step is rejected
        step = combine([(1.0, upload.weights[:learnable]), (-1.0, start[:learnable])])
    others = [upload.vectors[name] for name in sorted(upload.vectors)]
    return np.concatenate([step, *others]) if others else step


def _median_distance(step: Vector, others: Sequence[Vector]) -> float | None:
    return median(distance(step, other) for other in others) if others else None


def agreement_of(step: Vector, others: Sequence[Vector]) -> float | None:
    """The median cosine with the other steps (0 for a step of length 0); None without other steps."""
    return median(_cosine(step, other) for other in others) if others else None


def _cosine(a: Vector, b: Vector) -> float:
    lengths = norm(a) * norm(b)
    return dot(a, b) / lengths if lengths > 0.0 else 0.0


def least_agreement(agreements: Sequence[float]) -> float | None:
    """The least median cosine that is admitted; None while too few are known.

    It is 0 if ``ALIGNED_SHARE`` of recent uploads agree with the others. Otherwise it is the median agreement minus
    ``DEVIATIONS`` median deviations, and at most 0.
    """
    last = agreements[-WINDOW:]
    if len(last) < MIN_AGREEMENTS:
        return None
    if sum(each >= 0.0 for each in last) >= ALIGNED_SHARE * len(last):
        return 0.0
    usual = median(last)
    return min(0.0, usual - DEVIATIONS * median(abs(each - usual) for each in last))


def bound_of(measures: Sequence[float], factor: float) -> float | None:
    """``factor`` times the median of recent measures; None while too few are known."""
    return factor * median(measures[-WINDOW:]) if len(measures) >= MIN_MEASURES else None


def admitted_share(
    rule: str, measure: float | None, bound: float | None, agreement: float | None = None, least: float | None = None
) -> float:
    """The share of a step to admit: 1, what shortens it to the bound (clip), or 0."""
    if bound is None or measure is None:
        return 0.0
    if agreement is not None and least is not None and agreement < least:
        return 0.0
    if measure <= bound:
        return 1.0
    return bound / measure if rule == "clip" else 0.0


def shorten(upload: Upload, start: Vector, share: float, layout: Layout) -> Upload:
    """``w_s + share (u - w_s)``, with all vectors scaled alike. Counters stay. The report holds the share."""
    weights, n = upload.weights.copy(), layout.floats
    mix(start[:n], upload.weights[:n], share, out=weights[:n])
    vectors = {name: combine([(share, vector)]) for name, vector in upload.vectors.items()}
    return upload._replace(weights=weights, vectors=vectors, report={**upload.report, SHARE: share})


def share_of(upload: Upload) -> float:
    """The admitted share of an upload's step. A device that reports one itself only gets its own number back."""
    return float(upload.report.get(SHARE, 1.0))


# ---- a round at a time


def byzantine_count(count: int, share: float) -> int:
    """f, the number of a round's uploads assumed to be poisoned. Krum needs ``n >= 2 f + 3``."""
    return max(0, min(round(share * count), (count - 3) // 2))


def krum_scores(steps: Sequence[Vector], f: int) -> list[float]:
    """``s(i) = sum of |d_i - d_j|^2`` over the n - f - 2 nearest neighbours j."""
    n = len(steps)
    squares = np.zeros((n, n))
    for i in range(n):
        for j in range(i):
            squares[i, j] = squares[j, i] = distance(steps[i], steps[j]) ** 2
    nearest = max(1, n - f - 2)
    return [float(np.sort(np.delete(squares[i], i))[:nearest].sum()) for i in range(n)]


def smallest(scores: Sequence[float], count: int) -> list[int]:
    """Positions of the ``count`` smallest scores (the first of equals), in ascending order."""
    return sorted(sorted(range(len(scores)), key=lambda place: (scores[place], place))[:count])


# ---- audit


def audit_note(note: Noted, recent: RecentUploads) -> None:
    """Check a logged decision against the formulas. ``recent`` holds the numbers of earlier notes."""
    n = note.numbers
    if n["rule"] == "multi-krum":
        f, devices = n["f"], n["devices"]
        expect("f", float(f), float(min(f, max(0, (len(devices) - 3) // 2))))
        kept = [devices[place] for place in smallest(n["scores"], len(devices) - f)]
        expect("kept", float(kept == n["kept"]), 1.0)
        return
    bound, least = bound_of(recent.measures, n["factor"]), least_agreement(recent.agreements)
    agreement = n.get("agreement")
    for name, logged, found in (("bound", n["bound"], bound), ("least", n.get("least"), least)):
        if logged is not None or found is not None:
            expect(name, math.nan if logged is None else logged, math.nan if found is None else found)
    expect("share", n["share"], admitted_share(n["rule"], n["measure"], bound, agreement, least))
    recent.add(n["measure"], agreement, None)
