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
                     (methods that aggregate whole rounds).
    trimmed-mean     In a round, every coordinate of the steps is averaged without its k largest and k smallest values,
                     k = ``byzantine`` n, and every upload gets this step, so any mean of them moves the model by it.
                     One by one, every coordinate of d is limited to what is left of the recent steps after trimming.
    median           The same with as large a k as there can be: the median of every coordinate.
    root             The server trains on its own samples, too: step r, from the same model. The trust in an upload is
                     ``max(0, cos(d, r))``. In a round, uploads get the mean of the steps at length |r|, weighted by
                     trust. One by one, d is multiplied by its trust in units of the usual (the median of recent
                     devices, at most 1) and shortened to |r|. Without trust it is rejected.

The latest upload of each device that passed the checks counts, rejected or not, for the last ``WINDOW`` devices. So
medians hold while fewer than half of these devices are poisoned, however often they upload, and a fleet with growing
steps is not locked out. The first uploads are only measured, since
nothing is known to compare them with. The log holds every decision with its numbers (a note about "defence").

Why cosines: the step of device j is about ``d_j = - eta grad F_j``, so applying d changes its loss by about
``<grad F_j, d> = - <d_j, d> / eta``. If the median cosine is below 0, d raises the loss of most recent devices. Lengths
cannot show that: a step learned from wrong labels is about as long as an honest one. If honest devices also oppose each
other (two classes per device), 0 means nothing, and only unusual cosines are rejected.

P. Blanchard, E. M. El Mhamdi, R. Guerraoui, J. Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent", NeurIPS 2017 (multi-Krum). Clipping: Z. Sun et al., "Can You Really Backdoor Federated Learning?", 2019; here
with a bound that follows the run. D. Yin, Y. Chen, K. Ramchandran, P. Bartlett, "Byzantine-Robust Distributed Learning:
Towards Optimal Statistical Rates", ICML 2018 (trimmed mean, median). X. Cao, M. Fang, J. Liu, N. Z. Gong, "FLTrust:
Byzantine-robust Federated Learning via Trust Bootstrapping", NDSS 2021 (root, for rounds).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from freshet.core import saving
from freshet.core.events import Noted
from freshet.core.layout import Layout
from freshet.core.messages import FreshModels, Upload
from freshet.core.method import ADDED, MethodContext, Options, expect
from freshet.core.vectors import Vector, combine, distance, dot, is_finite, mix, norm

if TYPE_CHECKING:
    from freshet.core.server import ActiveTrip

#: An upload is compared with the latest ones of this many devices.
WINDOW = 32
#: The bound counts from the measures of this many devices.
MIN_MEASURES = 4
#: Directions count from this many devices: of five, two poisoned ones may be a majority of those on one side.
MIN_AGREEMENTS = 8
#: The share of recent uploads that must agree with the others for a negative cosine to be unusual.
ALIGNED_SHARE = 2 / 3
#: Otherwise, a cosine this many median deviations below the usual one is unusual.
DEVIATIONS = 2.0
NOTE_ABOUT = "defence"
#: The key in the report of a shortened upload for the share that is left of it.
SHARE = "defence.share"
Rule = Literal["none", "clip", "median-distance", "multi-krum", "trimmed-mean", "median", "root"]
#: Rules that replace the steps of a round by a common one.
REPLACING: tuple[Rule, ...] = ("trimmed-mean", "median", "root")
#: Trains on the server's own samples from a model, as a device did in a trip. Returns the step.
RootTraining = Callable[[Vector, "ActiveTrip"], Vector]
#: The root steps of this many versions are kept.
ROOT_STEPS = 8
DEFAULT_FACTORS = {"clip": 1.0, "median-distance": 1.5}


class DefenceOptions(Options):
    """Defence against poisoned updates, before the method sees them."""

    rule: Rule = Field(
        "none",
        description="none, clip (shorten), median-distance (reject), multi-krum (rounds), trimmed-mean, median (of "
        "every coordinate), root (compare with training on the server's own samples)",
    )
    factor: float | None = Field(
        None,
        gt=0,
        description="bound in medians over the last 32 devices (default: clip 1, median-distance 1.5)",
    )
    byzantine: float = Field(
        0.2, ge=0, lt=0.5, description="multi-krum, trimmed-mean: share of the uploads assumed to be poisoned"
    )
    root_samples: int = Field(
        100, ge=1, description="root: number of training samples that the server trains on", json_schema_extra=ADDED
    )
    max_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="largest share of an aggregation that a device's samples may give it (default: any in a "
        "simulation; in a deployment, where devices report them, half or four times the mean share)",
        json_schema_extra=ADDED,
    )


class Decision(NamedTuple):
    """The admitted upload (None: held back until the round ends), or why it is rejected; notes for the log."""

    upload: Upload | None
    problem: str | None = None
    notes: tuple[Noted, ...] = ()


@dataclass
class LatestByDevice:
    """The latest value of each of the last ``WINDOW`` devices. A device has one place, however often it uploads."""

    devices: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    #: Values added so far.
    uploads: int = 0

    def add(self, device: int | None, value: Any) -> None:
        """Add a value. It replaces the device's last one. Without a device (older logs) it has a place of its own."""
        self.uploads += 1
        device = -self.uploads if device is None else device
        if device in self.devices:
            place = self.devices.index(device)
            del self.devices[place], self.values[place]
        self.devices.append(device)
        self.values.append(value)
        del self.devices[:-WINDOW], self.values[:-WINDOW]

    def knows(self, devices: int) -> bool:
        """Whether this many devices are known, or a whole window of uploads where fewer take part."""
        return len(self.values) >= devices or self.uploads >= WINDOW

    @staticmethod
    def from_state(saved: Any) -> "LatestByDevice":
        """Values from a checkpoint. Older versions did not know whose they were."""
        if isinstance(saved, dict):
            return saving.rebuild(LatestByDevice, saved)
        found = LatestByDevice()
        for value in saved:
            found.add(None, np.array(value) if isinstance(value, np.ndarray) else value)
        return found


@dataclass
class RecentUploads:
    """The last uploads: their measures and, if needed, their steps and agreements."""

    measures: LatestByDevice = field(default_factory=LatestByDevice)
    steps: LatestByDevice = field(default_factory=LatestByDevice)
    agreements: LatestByDevice = field(default_factory=LatestByDevice)

    def add(self, device: int | None, measure: float | None, agreement: float | None, step: Vector | None) -> None:
        """Add one upload. A value of None is unknown or not needed."""
        for known, new in ((self.measures, measure), (self.agreements, agreement), (self.steps, step)):
            if new is not None:
                known.add(device, new)

    @staticmethod
    def from_state(tree: saving.Tree) -> "RecentUploads":
        return RecentUploads(**{name: LatestByDevice.from_state(tree[name]) for name in _PARTS})


_PARTS = ("measures", "steps", "agreements")


class HeldUpload(NamedTuple):
    """An upload that waits for the end of its round: its step, where the step starts, and the model it was given."""

    upload: Upload
    active: "ActiveTrip"
    step: Vector
    start: Vector
    base: Vector


class Defence:
    """Decides on uploads, one by one or a round at a time.

    ``rounds`` says whether the method aggregates whole rounds. ``root`` trains on the server's own samples.
    """

    def __init__(
        self, options: DefenceOptions, layout: Layout, rounds: bool = False, root: RootTraining | None = None
    ) -> None:
        self.options, self.layout = options, layout
        self.factor = options.factor or DEFAULT_FACTORS.get(options.rule, 1.0)
        self.recent = RecentUploads()
        self._waits = options.rule == "multi-krum" or (rounds and options.rule in REPLACING)
        self._root, self._root_steps = root, dict[tuple[int, int, float], Vector]()
        self._held: list[HeldUpload] = []

    def judge(self, upload: Upload, active: "ActiveTrip", base: Vector, fresh: FreshModels) -> Decision:
        """Decide on an upload that passed the checks.

        Its device was given ``base`` and, in mid-training, the newer models in ``fresh``.
        """
        start = upload.anchor(base, fresh)
        rule = self.options.rule
        step = step_of(upload, start, self.layout.floats if rule in REPLACING else self.layout.learnable)
        if not is_finite(step):
            return Decision(upload, "is so far from its base that the distance overflows")
        if self._waits:
            self._held.append(HeldUpload(upload, active, step, start, base))
            return Decision(None)
        if rule == "root":
            return self._judge_by_root(upload, active, step, start, base)
        if rule in REPLACING:
            return self._judge_by_coordinate(upload, step, start)
        clips, recent = self.options.rule == "clip", self.recent
        others = recent.steps.values
        measure = norm(step) if clips else _median_distance(step, others)
        agreement = None if clips else agreement_of(step, others)
        bound, least = bound_of(recent.measures, self.factor), least_agreement(recent.agreements)
        share = admitted_share(self.options.rule, measure, bound, agreement, least)
        recent.add(upload.device, measure, agreement, None if clips else step)
        place = {"device": upload.device, "trip": upload.trip, "rule": self.options.rule, "factor": self.factor}
        place["seen"] = len(recent.measures.values)
        figures = {"measure": measure, "bound": bound, "agreement": agreement, "least": least, "share": share}
        notes = (Noted(NOTE_ABOUT, place | figures),)
        if bound is None or measure is None:
            return Decision(upload, "came before there were enough uploads to compare it with", notes)
        if share == 0.0 and measure > bound:
            return Decision(upload, f"is {measure:.4g} away from other uploads, more than {bound:.4g}", notes)
        if share == 0.0:
            return Decision(upload, f"goes against other uploads (median cosine {agreement:.4g} < {least:.4g})", notes)
        return Decision(upload if share == 1.0 else shorten(upload, start, share, self.layout), None, notes)

    def _judge_by_coordinate(self, upload: Upload, step: Vector, start: Vector) -> Decision:
        """Limit every coordinate of a step to the range of recent ones, without their extremes."""
        rule, byzantine, recent = self.options.rule, self.options.byzantine, self.recent.steps
        recent.add(upload.device, step)
        seen = len(recent.values)
        k = trimmed_count(seen, byzantine, rule)
        numbers = {"device": upload.device, "trip": upload.trip, "rule": rule, "byzantine": byzantine}
        numbers |= {"seen": seen, "trimmed": k}
        if not recent.knows(MIN_MEASURES + 1):
            problem = "came before there were enough uploads to compare it with"
            return Decision(upload, problem, (Noted(NOTE_ABOUT, numbers),))
        left = trimmed_mean(recent.values, k) if rule == "median" else limit_to_range(step, recent.values, k)
        numbers |= {"length": norm(step), "left": norm(left)}
        return Decision(with_step(upload, start, left, self.layout), None, (Noted(NOTE_ABOUT, numbers),))

    def _judge_by_root(
        self, upload: Upload, active: "ActiveTrip", step: Vector, start: Vector, base: Vector
    ) -> Decision:
        """Multiply a step by the trust in it, and shorten it to the length of the root step."""
        root, n = self._root_step(active, base), self.layout.learnable
        cosine, length = _cosine(step[:n], root), norm(step[:n])
        usual = usual_trust(self.recent, upload.device, cosine)
        share = root_share(cosine, usual, length, norm(root))
        numbers = {"device": upload.device, "trip": upload.trip, "rule": "root", "cosine": cosine, "usual": usual}
        notes = (Noted(NOTE_ABOUT, numbers | {"length": length, "root": norm(root), "share": share}),)
        if share == 0.0:
            return Decision(upload, f"goes against the server's own training (cosine {cosine:.4g})", notes)
        return Decision(upload if share == 1.0 else shorten(upload, start, share, self.layout), None, notes)

    def _root_step(self, active: "ActiveTrip", base: Vector) -> Vector:
        """The step of the server's own training, as long as the trip's. It follows from the key, so it is not saved."""
        assert self._root is not None
        key = active.base, active.epochs, active.lr
        if key not in self._root_steps:
            self._root_steps[key] = self._root(base, active)[: self.layout.learnable]
            for old in list(self._root_steps)[:-ROOT_STEPS]:
                del self._root_steps[old]
        return self._root_steps[key]

    def release(self) -> tuple[list[tuple[Upload, "ActiveTrip"]], tuple[Noted, ...]]:
        """At the end of a round: the uploads to keep, in the order of arrival, and a note."""
        held, self._held = self._held, []
        if not held:
            return [], ()
        if self.options.rule in REPLACING:
            return self._release_replaced(held)
        steps = [each.step for each in held]
        f = byzantine_count(len(held), self.options.byzantine)
        scores = krum_scores(steps, f)
        chosen = smallest(scores, len(held) - f)
        devices = [each.upload.device for each in held]
        kept = [devices[place] for place in chosen]
        numbers = {"rule": "multi-krum", "devices": devices, "scores": scores, "f": f, "kept": kept}
        return [held[place][:2] for place in chosen], (Noted(NOTE_ABOUT, numbers),)

    def _release_replaced(self, held: list[HeldUpload]) -> tuple[list[tuple[Upload, "ActiveTrip"]], tuple[Noted, ...]]:
        """Give the common step of the round to every upload that is kept."""
        rule, byzantine, steps = self.options.rule, self.options.byzantine, [each.step for each in held]
        devices = [each.upload.device for each in held]
        if rule == "root":
            root, n = self._root_step(held[0].active, held[0].base), self.layout.learnable
            cosines, lengths = [_cosine(step[:n], root) for step in steps], [norm(step[:n]) for step in steps]
            common = trusted_mean(steps, cosines, lengths, norm(root))
            kept = [each for each, cosine in zip(held, cosines, strict=True) if cosine > 0.0]
            numbers = {"rule": rule, "devices": devices, "cosines": cosines, "lengths": lengths, "root": norm(root)}
        else:
            k, kept = trimmed_count(len(steps), byzantine, rule), held
            common = trimmed_mean(steps, k)
            numbers = {"rule": rule, "devices": devices, "byzantine": byzantine, "trimmed": k}
        numbers |= {"kept": [each.upload.device for each in kept], "left": norm(common)}
        replaced = [(with_step(each.upload, each.start, common, self.layout), each.active) for each in kept]
        return replaced, (Noted(NOTE_ABOUT, numbers),)

    def state(self) -> saving.Tree:
        """Recent uploads, and those held back."""
        held = [[saving.dump(upload), saving.dump(active), *rest] for upload, active, *rest in self._held]
        return {"seen": saving.dump(self.recent), "held": held}

    def restore(self, tree: saving.Tree) -> None:
        """The inverse of ``state``."""
        from freshet.core.server import ActiveTrip

        self.recent = RecentUploads.from_state(tree["seen"])
        self._held = []
        for upload, active, step, *more in tree["held"]:
            start, base = more or (step, step)  # older versions know multi-krum only, which uses neither
            made = saving.rebuild(Upload, upload), saving.rebuild(ActiveTrip, active)
            self._held.append(HeldUpload(*made, np.array(step), np.array(start), np.array(base)))


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


def least_agreement(agreements: LatestByDevice) -> float | None:
    """The least median cosine that is admitted; None while too few are known.

    It is 0 if ``ALIGNED_SHARE`` of recent uploads agree with the others. Otherwise it is the median agreement minus
    ``DEVIATIONS`` median deviations, and at most 0.
    """
    last: list[float] = agreements.values
    if not agreements.knows(MIN_AGREEMENTS):
        return None
    if sum(each >= 0.0 for each in last) >= ALIGNED_SHARE * len(last):
        return 0.0
    usual = median(last)
    return min(0.0, usual - DEVIATIONS * median(abs(each - usual) for each in last))


def bound_of(measures: LatestByDevice, factor: float) -> float | None:
    """``factor`` times the median of recent measures; None while too few are known."""
    return factor * float(median(measures.values)) if measures.knows(MIN_MEASURES) else None


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


def usual_trust(recent: RecentUploads, device: int, cosine: float) -> float:
    """The median trust in the latest uploads of recent devices, this one included."""
    recent.measures.add(device, max(0.0, cosine))
    return float(median(recent.measures.values))


def root_share(cosine: float, usual: float, length: float, root: float) -> float:
    """The share of a step to admit: its trust in units of the usual, at most 1, times ``min(1, |r| / |d|)``."""
    trust = max(0.0, cosine)
    relative = min(1.0, trust / usual) if usual > 0.0 else float(trust > 0.0)
    return relative * (min(1.0, root / length) if length > 0.0 else 1.0)


def limit_to_range(step: Vector, others: Sequence[Vector], k: int) -> Vector:
    """A step with every coordinate limited to the range of the others', without their k largest and k smallest."""
    out = np.empty_like(step)
    for part in _blocks(len(step)):
        ranked = np.sort(np.stack([other[part] for other in others]), axis=0)
        out[part] = np.clip(step[part], ranked[k], ranked[-1 - k])
    return out


def with_step(upload: Upload, start: Vector, step: Vector, layout: Layout) -> Upload:
    """An upload with another step: ``w_s + step``, and the named vectors that follow it. Counters stay."""
    weights, n = upload.weights.copy(), layout.floats
    combine([(1.0, start[:n]), (1.0, step[:n])], out=weights[:n])
    vectors, at = dict[str, Vector](), n
    for name in sorted(upload.vectors):
        size = len(upload.vectors[name])
        vectors[name], at = step[at : at + size].copy(), at + size
    return upload._replace(weights=weights, vectors=vectors)


def share_of(upload: Upload) -> float:
    """The admitted share of an upload's step. A device that reports one itself only gets its own number back."""
    return float(upload.report.get(SHARE, 1.0))


# ---- a round at a time


def byzantine_count(count: int, share: float) -> int:
    """f, the number of a round's uploads assumed to be poisoned. Krum needs ``n >= 2 f + 3``."""
    return max(0, min(round(share * count), (count - 3) // 2))


def trimmed_count(count: int, share: float, rule: str) -> int:
    """k, the number of largest and of smallest values to leave out. The median leaves one or two in the middle."""
    most = max(0, (count - 1) // 2)
    return most if rule == "median" else min(math.floor(share * count + 1e-9), most)  # 0.29 * 100 < 29 in binary


def trimmed_mean(steps: Sequence[Vector], k: int) -> Vector:
    """The mean of every coordinate without its k largest and k smallest values."""
    out = np.empty_like(steps[0])
    for part in _blocks(len(out)):
        ranked = np.sort(np.stack([step[part] for step in steps]), axis=0)
        out[part] = ranked[k : len(steps) - k].mean(axis=0, dtype=np.float64)
    return out


def trusted_mean(steps: Sequence[Vector], cosines: Sequence[float], lengths: Sequence[float], root: float) -> Vector:
    """``sum of t_i |r| / |d_i| d_i`` over ``sum of t_i`` with trust ``t_i = max(0, cos_i)``; 0 without any trust."""
    total = sum(max(0.0, cosine) for cosine in cosines)
    rows = zip(cosines, lengths, steps, strict=True)
    terms = [(cosine / total * root / length, step) for cosine, length, step in rows if cosine > 0.0]
    return combine(terms) if terms else np.zeros_like(steps[0])


def _blocks(size: int) -> Iterator[slice]:
    """Parts of a vector that fit into the cache, so that ranking them takes little memory."""
    return (slice(at, min(at + _BLOCK, size)) for at in range(0, size, _BLOCK))


_BLOCK = 1 << 14


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


# ---- samples


#: What a note about samples that count less than a device reports is about.
SAMPLES_NOTE = "samples"


def bounded_samples(samples: Sequence[int], limit: float) -> list[int]:
    """Numbers of samples of which none is more than ``limit`` of their sum: ``min(n_k, c)`` with the largest such c.

    If the largest k are cut off at c and the others sum to R, then ``c = limit (k c + R)``.
    """
    order, least = sorted(samples, reverse=True), max(1, min(samples, default=1))
    for k, largest in enumerate(order):
        rest = sum(order[k:])
        cap = limit * rest / (1.0 - limit * k) if limit * k < 1.0 else 0.0
        if largest <= cap:
            return [min(n, math.floor(cap)) for n in samples] if k else list(samples)
    return [least] * len(samples)  # no such c: equal shares are the nearest


def counted_samples(context: MethodContext) -> NDArray[np.int64]:
    """The samples of every device as they count, for methods that weigh by the share of all devices' samples."""
    limit = context.share_limit(context.devices)
    return context.samples if limit == 1.0 else np.array(bounded_samples(context.samples.tolist(), limit), np.int64)


def bounded_notes(devices: Sequence[int], claimed: Sequence[int], counted: Sequence[int]) -> tuple[Noted, ...]:
    """A note for each device whose samples do not all count."""
    rows = zip(devices, claimed, counted, strict=True)
    numbers = ({"device": device, "claimed": n, "counted": c} for device, n, c in rows if c < n)
    return tuple(Noted(SAMPLES_NOTE, each) for each in numbers)


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
    if n["rule"] in REPLACING:
        _audit_replacing(n, recent)
        return
    bound, least = bound_of(recent.measures, n["factor"]), least_agreement(recent.agreements)
    agreement = n.get("agreement")
    for name, logged, found in (("bound", n["bound"], bound), ("least", n.get("least"), least)):
        if logged is not None or found is not None:
            expect(name, math.nan if logged is None else logged, math.nan if found is None else found)
    expect("share", n["share"], admitted_share(n["rule"], n["measure"], bound, agreement, least))
    device = n["device"] if "seen" in n else None  # older logs count every upload
    recent.add(device, n["measure"], agreement, None)


def _audit_replacing(n: Mapping[str, Any], recent: RecentUploads) -> None:
    """Check the numbers of a rule that replaces steps. The steps themselves are not in the log."""
    if n["rule"] != "root":
        count = n["seen"] if "seen" in n else len(n["devices"])
        expect("trimmed", float(n["trimmed"]), float(trimmed_count(count, n["byzantine"], n["rule"])))
    elif "share" in n:
        expect("usual", n["usual"], usual_trust(recent, n["device"], n["cosine"]))
        expect("share", n["share"], root_share(n["cosine"], n["usual"], n["length"], n["root"]))
    else:
        kept = [device for device, cosine in zip(n["devices"], n["cosines"], strict=True) if cosine > 0.0]
        expect("kept", float(kept == n["kept"]), 1.0)
