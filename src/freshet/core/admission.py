"""What an upload must pass before the method sees it: form checks, the method's own check, the norm gate, a defence.

A rejection is a reason in the log, never an exception.

The norm gate rejects uploads that are finite but far beyond what devices sent recently. The step of an upload u is its
distance from what the device was given: from its base w_o, or, if it was also sent a fresh model w_g, from the line
between the two. So the server's own progress does not count, whatever weight the device gave to its merge::

    step = min over 0 <= b <= 1 of |u - w_o - b (w_g - w_o)|        (b = 0 without a fresh model)

A step is rejected when it is longer than ``factor`` times the median of recent steps *and* longer than the model that
it started from, |w_o|. The median is over the latest steps of recent devices, one per device, so a device that uploads
often does not count for more. The second condition protects honest devices. Once most of a fleet has converged, a
device that started long ago, or has unusual data, still takes steps of many times the median, but none that could carry
the model away. The median includes rejected steps. A minority of devices cannot move it, and if most devices take such
steps (a learning rate that is too large) the run diverges and says so. Until the steps of ``MIN_DEVICES`` devices are
known, ``max(|w_o|, sqrt(n))`` replaces the median: the norm of a model with entries of size 1, or more.

The same bound applies separately to the network's buffers (initially with the factor squared, since they take on the
scale of the data at once), to the norms of vectors sent with the model, and to the number of steps. For the number of
steps, the number of samples processed replaces |w_o|.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from freshet.core import saving
from freshet.core.defence import Defence
from freshet.core.events import OWN_KEYS, Aggregated, Contribution, Merged, Noted, Rejected
from freshet.core.layout import Layout
from freshet.core.messages import FreshModels, Merge, Upload
from freshet.core.method import Aggregate, LocalRule, Method
from freshet.core.saving import saving_problem
from freshet.core.vectors import Vector, distance, distance_from_line, is_finite, norm

if TYPE_CHECKING:
    from freshet.core.compression import Links
    from freshet.core.server import ActiveTrip


FLOAT32 = np.dtype(np.float32)
NOT_FINITE = "has entries that are not finite"
#: Reports go into the log, so they hold only a few numbers with short names.
MAX_NUMBERS = 100
MAX_NAME_LENGTH = 100


# ---- form checks


def origin_problem(upload: object, device: int, trip: int, base: int) -> str | None:
    """Why this is not an upload of the given trip, or None. It may be any object."""
    if not isinstance(upload, Upload):
        return "is not an upload"
    if not (type(upload.device) is type(upload.trip) is int and upload.device == device and upload.trip == trip):
        return "names another trip than the one that it came for"
    if type(upload.base) is not int or upload.base != base:
        return f"trained from version {upload.base!r:.40}, but was given {base}"
    return None


def merges_problem(merges: object, sent: Collection[int]) -> str | None:
    """Why these are not merges of fresh models that the device was sent, in their order; or None."""
    if type(merges) is not tuple or not all(isinstance(merge, Merge) for merge in merges):
        return "does not list its merges"
    if merges and not sent:
        return "reports a merge, but was sent no fresh model"
    versions = [merge.version for merge in merges]
    if not all(type(version) is int for version in versions) or versions != [v for v in sorted(sent) if v in versions]:
        return f"reports merges of versions {versions!r:.80}, but was sent {sorted(sent)!r:.80}"
    if not all(are_numbers(merge.numbers) for merge in merges):
        return "report has something that is not a finite number"
    taken = OWN_KEYS[Merged].intersection(name for merge in merges for name in merge.numbers)
    return f"reports a merge with {sorted(taken)}, which are reserved keys of the event" if taken else None


def content_problem(upload: Upload, layout: Layout, sends: tuple[str, ...], known_finite: bool = False) -> str | None:
    """Why an upload's content is unusable, or None: a vector or number is missing, malformed or not finite."""
    if not known_finite and not is_finite(upload.weights):
        return f"model {NOT_FINITE}"
    problem = _vectors_problem(upload.vectors, layout, sends)
    if problem is not None:
        return problem
    if type(upload.steps) is not int or not 1 <= upload.steps < 2**53:
        return "number of training steps is not positive, or impossibly large"
    return None if are_numbers(upload.report) else "report has something that is not a finite number"


def _vectors_problem(vectors: object, layout: Layout, sends: tuple[str, ...]) -> str | None:
    """Why the vectors are not those that the device rule sends, or None."""
    if not isinstance(vectors, Mapping) or vectors.keys() != set(sends):
        return f"must send the vectors {sorted(sends)} with its model, and no others"
    return next(filter(None, (vector_problem(name, vectors[name], layout.learnable) for name in sends)), None)


def vector_problem(name: str, vector: object, size: int, finite: bool = True) -> str | None:
    """Why this is not a contiguous float32 vector of ``size`` (finite) entries, or None."""
    if not isinstance(vector, np.ndarray):
        return f"{name} is not an array"
    if vector.dtype != FLOAT32 or vector.shape != (size,):
        given = "" if vector.dtype == FLOAT32 else f", not of {vector.dtype}"
        return f"{name} has shape {vector.shape}, expected ({size},) of float32{given}"
    flags = vector.flags
    if not (flags.c_contiguous and flags.aligned):
        return f"{name} is not contiguous in memory"
    return f"{name} {NOT_FINITE}" if finite and not is_finite(vector) else None


def aggregate_problem(given: Aggregate, size: int) -> str | None:
    """What is wrong with a method's answer, or None."""
    problem = vector_problem("weights", given.weights, size, finite=False)
    if problem is not None:
        return problem
    parts, numbers = given.contributions, given.numbers
    if not (isinstance(parts, list | tuple) and all(type(part) is Contribution for part in parts)):
        return "contributions are not all of freshet.core.events.Contribution"
    if not isinstance(numbers, Mapping):
        return "numbers are not a dict"
    if not all(type(note) is Noted for note in given.notes):
        return "notes are not all of freshet.core.events.Noted"
    if not all(type(device) is int for device in given.cancel):
        return "cancel does not hold devices"
    taken = OWN_KEYS[Aggregated].intersection(numbers)
    if taken:
        return f"numbers are named {sorted(taken)}, which are reserved keys of the event"
    problem = saving_problem(dict(numbers), "numbers", arrays=False)
    if problem is not None:
        return problem
    length = given.length
    return None if length is None or isinstance(length, int | float) else f"length is {length!r:.40}, not a number"


def are_numbers(report: object) -> bool:
    """Whether this is a mapping from a few short names to finite numbers."""
    if not isinstance(report, Mapping):
        return False
    try:
        return len(report) <= MAX_NUMBERS and all(
            type(name) is str
            and len(name) <= MAX_NAME_LENGTH
            and isinstance(value, int | float)
            and math.isfinite(value)
            for name, value in report.items()
        )
    except OverflowError:  # an integer beyond any float
        return False


def overflows(weights: Vector, update_norm: float) -> bool:
    """Whether a step of this length made the model non-finite.

    A finite float32 stays finite when less than 1e30 is added, so only longer steps need a look at the weights.
    """
    return not update_norm < 1e30 and not (math.isfinite(update_norm) and is_finite(weights))


# ---- the norm gate


#: How many times the median a step may be: over ten times the largest honest ratio observed (docs/reliability.md).
GATE_FACTOR = 100.0
#: The median is over the latest lengths of this many devices.
MEDIAN_WINDOW = 101
#: The median counts from this many devices, or from this many uploads if fewer devices take part.
MIN_DEVICES, MIN_UPLOADS = 8, 32
#: Names of the parts of an upload in a rejection.
STEP, STATISTICS, STEPS = "step", "change of statistics", "number of steps"


class Excess(NamedTuple):
    """Why an upload exceeds the norm gate, with the numbers."""

    reason: str
    numbers: Mapping[str, Any]


class RecentLengths:
    """The latest length of each of the last ``MEDIAN_WINDOW`` devices, their median, and ``factor`` times the median.

    A device has one place, however often it uploads.
    """

    __slots__ = ("_factor", "_latest", "_ranked", "limit", "median", "uploads")

    def __init__(
        self, latest: Iterable[tuple[int, float]] = (), factor: float = GATE_FACTOR, uploads: int | None = None
    ) -> None:
        self._factor = factor
        self._latest: dict[int, float] = {}
        self._ranked: list[float] = []
        #: The lower median; None while too few devices and uploads are known.
        self.median: float | None = None
        #: Lengths up to this pass at once.
        self.limit = -math.inf
        #: Lengths added so far.
        known = tuple(latest)
        self.uploads = 0 if uploads is None else uploads - len(known)
        for device, length in known:
            self.add(device, length)

    def add(self, device: int, length: float) -> None:
        """Add one length. It replaces the device's last one, or that of the device not heard from for longest."""
        latest, ranked = self._latest, self._ranked
        old = latest.pop(device, None)
        if old is None and len(latest) == MEDIAN_WINDOW:
            old = latest.pop(next(iter(latest)))
        if old is not None:
            del ranked[bisect_left(ranked, old)]
        latest[device] = length
        insort(ranked, length)
        self.uploads += 1
        if len(ranked) >= MIN_DEVICES or self.uploads >= MIN_UPLOADS:
            self.median = ranked[(len(ranked) - 1) // 2]
            self.limit = self._factor * self.median

    def in_order(self) -> list[tuple[int, float]]:
        """Devices with their lengths, in the order of arrival."""
        return list(self._latest.items())


class LengthKind(NamedTuple):
    """A measured part of an upload.

    ``part`` is the slice of the model that it is compared with, ``start_factor`` the bound while no median is known.
    """

    name: str
    part: slice
    start_factor: float


class NormGate:
    """Remembers the lengths of recent uploads and compares new ones with them.

    ``sends`` names the vectors that come with the model.
    """

    def __init__(self, factor: float, layout: Layout, sends: tuple[str, ...] = ()) -> None:
        step = slice(0, layout.learnable)
        rest = [LengthKind(STATISTICS, slice(layout.learnable, layout.size), factor * factor)]
        self._parts = [LengthKind(STEP, step, factor), *(rest if layout.size > layout.learnable else [])]
        self._sent = [LengthKind(name, step, factor) for name in sends]
        self._kinds = [*self._parts, *self._sent, LengthKind(STEPS, slice(0, 0), factor)]
        self._factor, self._known = factor, [RecentLengths(factor=factor) for _ in self._kinds]

    def step_lengths(self, upload: Upload, base: Vector, fresh: FreshModels) -> list[float]:
        """How far each part of the uploaded model moved. The model is finite if these are.

        After one fresh model, the distance is that from the line to it, whatever the device says about its merge. After
        several, it is that from the anchor, which lies between models that the server sent.
        """
        parts, u = [kind.part for kind in self._parts], upload.weights
        if len(fresh) == 1:
            (only,) = fresh.values()
            return [distance_from_line(u[part], base[part], only[part]) for part in parts]
        start = upload.anchor(base, fresh)
        return [distance(u[part], start[part]) for part in parts]

    def all_lengths(self, upload: Upload, step_lengths: list[float]) -> list[float]:
        """The step lengths, then the norms of the vectors sent with the model, then the number of steps."""
        return [*step_lengths, *(norm(upload.vectors[kind.name]) for kind in self._sent), float(upload.steps)]

    def find_excess(self, lengths: Sequence[float], base: Vector, samples: int) -> Excess | None:
        """The first length beyond its bound, or None. ``samples`` counts those that the device processed."""
        for kind, known, length in zip(self._kinds, self._known, lengths, strict=True):
            if not length <= known.limit:
                model = base[kind.part]
                sizes = (float(samples), 1.0) if kind.name == STEPS else (norm(model), math.sqrt(len(model)))
                found = self._excess(kind, length, known.median, *sizes)
                if found is not None:
                    return found
        return None

    def _excess(self, kind: LengthKind, length: float, usual: float | None, size: float, least: float) -> Excess | None:
        limit = kind.start_factor * max(size, least) if usual is None else max(self._factor * usual, size)
        if length <= limit:
            return None
        numbers = {"length": length, "limit": limit} | ({} if usual is None else {"usual": usual})
        return Excess(f"its {kind.name} exceeds the bound of the norm gate (run.gate)", numbers)

    def remember(self, device: int, lengths: Sequence[float]) -> None:
        """Compare later uploads with these, too. A length of 0 carries no information."""
        for known, length in zip(self._known, lengths, strict=True):
            if length > 0.0:
                known.add(device, length)

    def state(self) -> saving.Tree:
        return {
            kind.name: {"latest": [list(item) for item in known.in_order()], "uploads": known.uploads}
            for kind, known in zip(self._kinds, self._known, strict=True)
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._known = [_lengths_from(state[kind.name], self._factor) for kind in self._kinds]


def _lengths_from(saved: Any, factor: float) -> RecentLengths:
    """Lengths from a checkpoint. Older versions did not know whose they were: each is that of an unknown device."""
    if isinstance(saved, list):
        saved = {"latest": [(-place, length) for place, length in enumerate(saved, 1)], "uploads": len(saved)}
    latest = [(int(device), float(length)) for device, length in saved["latest"]]
    return RecentLengths(latest, factor, saved["uploads"])


# ---- all of it


class SumNoise(Protocol):
    """Differential privacy by a trusted server (``freshet.privacy.NoisedSum``)."""

    def clip_upload(self, upload: Upload, start: Vector) -> tuple[Upload, Noted]: ...

    def release(
        self, total: NDArray[np.float64], parts: Sequence[Contribution], version: int
    ) -> NDArray[np.float64]: ...

    def take_note(self) -> Noted | None: ...

    def state(self) -> saving.Tree: ...

    def restore(self, tree: saving.Tree) -> None: ...


class Admitted(NamedTuple):
    """What the method gets to see of an upload (None: nothing yet), or why it is rejected; notes for the log."""

    upload: Upload | None
    rejection: Rejected | None = None
    notes: tuple[Noted, ...] = ()


class Admission:
    """Checks uploads of active trips.

    ``gate`` is the factor of the norm gate (None disables it). ``links`` decode compressed models.
    """

    def __init__(
        self,
        method: Method,
        rule: LocalRule,
        gate: float | None,
        defence: Defence | None,
        links: "Links | None" = None,
        noise: SumNoise | None = None,
    ) -> None:
        context = method.context
        self.method, self.rule, self.samples, self.layout = method, rule, context.samples, context.layout
        self.gate = None if gate is None else NormGate(gate, context.layout, rule.sends)
        self.defence, self.links, self.noise = defence, links, noise

    def admit(self, upload: Upload, device: int, active: "ActiveTrip", base: Vector, fresh: FreshModels) -> Admitted:
        """Decide on an upload. Its device was given ``base`` and, in mid-training, the newer models in ``fresh``."""
        try:
            upload = self._decode(upload, device, active, base, fresh)
        except ValueError as problem:
            return Admitted(None, Rejected(str(problem), device, active.trip))
        notes: tuple[Noted, ...] = ()
        if self.noise is not None and self._form_problem(upload, device, active, fresh) is None:
            start = upload.anchor(base, fresh) if self.rule.anchored else base
            upload, note = self.noise.clip_upload(upload, start)
            notes = (note,)
        rejection = self.rejection(upload, device, active, base, fresh)
        if rejection is not None or self.defence is None:
            return Admitted(upload, rejection, notes)
        decision = self.defence.judge(upload, active, base, fresh)
        if decision.problem is not None:
            rejection = Rejected(decision.problem, device, active.trip)
        return Admitted(decision.upload, rejection, decision.notes)

    def _decode(self, upload: Upload, device: int, active: "ActiveTrip", base: Vector, fresh: FreshModels) -> Upload:
        """The upload with its model. Raises ``ValueError`` if it cannot be decoded."""
        if self.links is None:
            return upload
        problem = origin_problem(upload, device, active.trip, active.base) or merges_problem(
            upload.merges, fresh.keys()
        )
        if problem is not None:
            raise ValueError(problem)
        return self.links.decode_upload(upload, lambda: upload.anchor(base, fresh) if self.rule.anchored else base)

    def rejection(
        self, upload: Upload, device: int, active: "ActiveTrip", base: Vector, fresh: FreshModels
    ) -> Rejected | None:
        """Why the upload fails the checks or the norm gate, or None."""
        gate, trip = self.gate, active.trip
        problem = self._form_problem(upload, device, active, fresh)
        if problem is not None:
            return Rejected(problem, device, trip)
        moved = [] if gate is None else gate.step_lengths(upload, base, fresh)
        known_finite = gate is not None and all(map(math.isfinite, moved))
        problem = content_problem(upload, self.layout, self.rule.sends, known_finite)
        problem = problem or self.rule.report_problem(upload) or self.method.validate_report(upload, active)
        if problem is not None:
            return Rejected(problem, device, trip)
        if gate is None:
            return None
        lengths = gate.all_lengths(upload, moved)
        excess = gate.find_excess(lengths, base, active.epochs * self.samples.item(device))
        gate.remember(device, lengths)
        return None if excess is None else Rejected(excess.reason, device, trip, excess.numbers)

    def _form_problem(self, upload: Upload, device: int, active: "ActiveTrip", fresh: FreshModels) -> str | None:
        """Why this is not an upload of the trip, with a model of the right size and merges of models it was sent."""
        problem = origin_problem(upload, device, active.trip, active.base)
        problem = problem or vector_problem("model", upload.weights, self.layout.size, finite=False)
        return problem or merges_problem(upload.merges, fresh.keys())

    def release(self) -> tuple[list[tuple[Upload, "ActiveTrip"]], tuple[Noted, ...]]:
        """The round is over: return the uploads that the defence held back and keeps, and notes for the log."""
        return ([], ()) if self.defence is None else self.defence.release()

    def state(self) -> saving.Tree:
        gate, defence = self.gate, self.defence
        return {
            "gate": {} if gate is None else gate.state(),
            "defence": {} if defence is None else defence.state(),
        }

    def restore(self, tree: saving.Tree) -> None:
        """The inverse of ``state``."""
        if self.gate is not None:
            self.gate.restore(tree["gate"])
        if self.defence is not None:
            self.defence.restore(tree["defence"])
