"""The gate of proportion: finite is not sane. What is far beyond all that devices sent lately is turned away.

The step of an upload u is how far it lies from what its device was given: from its base w_o, or, where it was sent a
fresh model w_g as well, from the line between the two. So what the server itself did in between does not count,
whatever weight the device's merge gave it::

    step = min over 0 <= b <= 1 of |u - w_o - b (w_g - w_o)|        (b = 0 without a fresh model)

It is refused when it is longer than ``factor`` times the median of the steps sent lately *and* longer than the model
that it began from, |w_o|. The second half is for the honest: when most of a fleet has converged, a device that set out
long ago, or whose data are unlike all others', still makes steps that are many times the median, but none that could
carry the model away. The median is over all that were sent, refused ones too: less than half of them cannot move it,
and where most devices take such steps (a learning rate that is too large) the run diverges and says so. Until
``START`` steps are known, ``max(|w_o|, sqrt(n))``, a model of entries of size 1 at least, stands in the median's place.

The network's buffers are held to the same on their own (at the start with the factor squared: they take the size of the
data at once), and so are vectors that go up with the model, by their lengths, and the number of steps, with the samples
that the device went through in the place of |w_o|.

The gates: what an upload must be before anybody looks at what it says. A refusal is a reason, never an exception.

What an upload has to pass before the method sees it: the gates, the method's own objection, the gate of proportion,
and a defence against poisoned updates where there is one.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from math import isfinite
from operator import attrgetter, le
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from freshet.core import saving
from freshet.core.defence import Defence
from freshet.core.events import OWN_KEYS, Aggregated, Contribution, Merged, Noted, Rejected
from freshet.core.layout import Layout
from freshet.core.messages import Upload
from freshet.core.method import Aggregate, Method, overrides
from freshet.core.saving import saving_problem
from freshet.core.vectors import Vector, distance, distance_from_line, is_finite, norm

if TYPE_CHECKING:
    from freshet.core.server import ActiveTrip


FLOAT32 = np.dtype(np.float32)
_PARTS, _NOTES = frozenset({Contribution}), frozenset({Noted})
_AGGREGATED = OWN_KEYS[Aggregated]
_ROW, _NUMBER, _KNOWN = (list, tuple), (int, float), (dict, MappingProxyType)
_SIMPLE = frozenset({bool, int, float, str, type(None)})
NOT_FINITE = "has entries that are not finite"
#: A report is a handful of numbers with short names: they go into the log.
MAX_NUMBERS = 100
MAX_NAME_LENGTH = 100


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Whether it is a mapping; a dict, which it nearly always is, is known at a glance."""
    return type(value) is dict or isinstance(value, Mapping)


def is_empty(value: object) -> bool:
    """Whether it is a mapping known to hold nothing, as most messages have it beside their model."""
    return type(value) in _KNOWN and not value


def origin_problem(upload: object, device: int, trip: int, base: int, size: int) -> str | None:
    """Why something is not an upload of the trip that it came for, with a model of the right size that was trained from
    the version that its device was given, or None: it may be anything."""
    if not isinstance(upload, Upload):
        return "is not an upload"
    if not (type(upload.device) is type(upload.trip) is int and upload.device == device and upload.trip == trip):
        return "names another trip than the one that it came for"
    if type(upload.base) is not int or upload.base != base:
        return f"trained from version {upload.base!r:.40}, but was given {base}"
    return vector_problem("model", upload.weights, size, finite=False)


def content_problem(
    upload: Upload, fresh: int | None, layout: Layout, sends: tuple[str, ...], finite: bool = False
) -> str | None:
    """Why an upload that is no stranger may not touch the model, or None: its vectors must be finite and whole, and its
    numbers numbers. ``finite``: the model is known to be."""
    if not finite and not is_finite(upload.weights):
        return f"model {NOT_FINITE}"
    _, _, _, _, steps, report, merged, vectors, _ = upload
    plain = type(vectors) is dict and type(report) is dict and type(merged) is dict
    bare = plain and not (vectors or report or merged)  # as most are
    if sends or not (bare or is_empty(vectors)):
        found = _vectors_problem(vectors, layout, sends)
        if found is not None:
            return found
    if type(steps) is not int or not 1 <= steps < 2**53:
        return "no training step was taken, or more than anybody can"
    if bare:
        return None
    if not (are_numbers(report) and are_numbers(merged)):
        return "report has something that is not a finite number"
    taken = OWN_KEYS[Merged].intersection(merged)
    if taken:
        return f"reports a merge with {sorted(taken)}, which the event has of its own"
    return "reports a merge, but was sent no fresh model" if merged and fresh is None else None


def _vectors_problem(vectors: object, layout: Layout, sends: tuple[str, ...]) -> str | None:
    """Why what came beside the model is not what the device's rule sends, or None."""
    if not is_mapping(vectors) or vectors.keys() != set(sends):
        return f"must send the vectors {sorted(sends)} with its model, and no others"
    return next(filter(None, (vector_problem(name, vectors[name], layout.learnable) for name in sends)), None)


def vector_problem(name: str, vector: object, size: int, finite: bool = True) -> str | None:
    """Why something is not a whole vector of so many numbers, or None."""
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
    """What is wrong with a method's answer, or None; its author may have misread the contract."""
    weights, contributions, numbers, length, notes = given
    problem = vector_problem("weights", weights, size, finite=False)
    if problem is not None:
        return problem
    if not (isinstance(contributions, _ROW) and _PARTS.issuperset(map(type, contributions))):
        return "contributions are not all of freshet.core.events.Contribution"
    if not is_mapping(numbers) or (notes and not _NOTES.issuperset(map(type, notes))):
        return "numbers are not a dict, or whose notes are not of freshet.core.events.Noted"
    if not _AGGREGATED.isdisjoint(numbers):
        return f"numbers are named {sorted(_AGGREGATED.intersection(numbers))} like keys that the event has of its own"
    if not _SIMPLE.issuperset(map(type, numbers.values())):
        problem = saving_problem(dict(numbers), "numbers", arrays=False)
        if problem is not None:
            return problem
    return None if length is None or isinstance(length, _NUMBER) else f"length is {length!r:.40}, not a number"


def are_numbers(report: object) -> bool:
    """Whether something from outside is a mapping of a few names to finite numbers."""
    if is_empty(report):
        return True
    if not is_mapping(report):
        return False
    try:
        return len(report) <= MAX_NUMBERS and all(
            type(name) is str and len(name) <= MAX_NAME_LENGTH and isinstance(value, _NUMBER) and math.isfinite(value)
            for name, value in report.items()
        )
    except OverflowError:  # a whole number beyond any float
        return False


def overflows(weights: Vector, update_norm: float) -> bool:
    """Whether a step of this length has led to numbers that are not finite.

    A finite float32 stays finite when less than 1e30 is added, so only longer steps have to be looked at.
    """
    return not update_norm < 1e30 and not (math.isfinite(update_norm) and is_finite(weights))


#: Times the median that a step may have: more than ten times what honest devices were seen to do (docs/reliability.md).
GATE_FACTOR = 100.0
#: Lengths that the median is taken over, and how many there must be for it to count.
MEDIAN_WINDOW = 101
MIN_LENGTHS = 8
#: What the parts of an upload are called in a refusal.
STEP, STATISTICS, STEPS = "step", "change of statistics", "number of steps"


class Excess(NamedTuple):
    """Why an upload is out of all proportion, and the figures."""

    reason: str
    numbers: Mapping[str, Any]


class RecentLengths:
    """The last ``WINDOW`` lengths of one kind, their median, and ``factor`` times that."""

    __slots__ = ("_factor", "_order", "_ranked", "limit", "median")

    def __init__(self, lengths: Sequence[float] = (), factor: float = GATE_FACTOR) -> None:
        self._factor = factor
        self._order: deque[float] = deque()
        self._ranked: list[float] = []
        #: The middle one (the lower of two); None while there are too few.
        self.median: float | None = None
        #: What is not longer is in proportion; while that cannot be said, nothing is.
        self.limit = -math.inf
        for length in lengths:
            self.add(length)

    def add(self, length: float) -> None:
        """One more, in the place of the oldest where there are enough."""
        order, ranked = self._order, self._ranked
        order.append(length)
        if len(order) > MEDIAN_WINDOW:
            gone = order.popleft()
            if gone == length:
                return  # the same lengths as before
            del ranked[bisect_left(ranked, gone)]
        insort(ranked, length)
        count = len(ranked)
        if count >= MIN_LENGTHS:
            self.median = median = ranked[(count - 1) // 2]
            self.limit = self._factor * median

    def in_order(self) -> list[float]:
        return list(self._order)


_limit = attrgetter("limit")


class LengthKind(NamedTuple):
    """Something in an upload that has a length: whose part of the model it is held against, and how much more it may be
    than that while nothing is known of it."""

    name: str
    part: slice
    start_factor: float


class NormGate:
    """Remembers what was sent, and holds new uploads against it. ``sends`` names vectors beside the model."""

    def __init__(self, factor: float, layout: Layout, sends: tuple[str, ...] = ()) -> None:
        step = slice(0, layout.learnable)
        rest = [LengthKind(STATISTICS, slice(layout.learnable, layout.size), factor * factor)]
        self._parts = [LengthKind(STEP, step, factor), *(rest if layout.size > layout.learnable else [])]
        self._sent = [LengthKind(name, step, factor) for name in sends]
        self._kinds = [*self._parts, *self._sent, LengthKind(STEPS, slice(0, 0), factor)]
        self._factor, self._known = factor, [RecentLengths(factor=factor) for _ in self._kinds]

    def step_lengths(self, u: Vector, base: Vector, fresh: Vector | None) -> list[float]:
        """How far the parts of an uploaded model moved; all of it is finite if these are."""
        if len(self._parts) == 1:  # the whole model: nothing to cut out
            return [distance(u, base) if fresh is None else distance_from_line(u, base, fresh)]
        if fresh is None:
            return [distance(u[part], base[part]) for _, part, _ in self._parts]
        return [distance_from_line(u[part], base[part], fresh[part]) for _, part, _ in self._parts]

    def all_lengths(self, upload: Upload, moved: list[float]) -> list[float]:
        """What moved, with the lengths of the vectors beside the model and the number of steps at its end."""
        if self._sent:
            moved += [norm(upload.vectors[kind.name]) for kind in self._sent]
        moved.append(float(upload.steps))
        return moved

    def find_excess(self, lengths: Sequence[float], base: Vector, work: int) -> Excess | None:
        """What is out of all proportion in an upload, or None; ``work`` are the samples that its device went through,
        the most steps that there can be without saying."""
        if all(map(le, lengths, map(_limit, self._known))):  # as nearly always
            return None
        for kind, known, length in zip(self._kinds, self._known, lengths, strict=True):
            if not length <= known.limit:
                usual, model = known.median, base[kind.part]
                sizes = (float(work), 1.0) if kind.name == STEPS else (norm(model), math.sqrt(len(model)))
                found = self._beyond(kind, length, usual, *sizes)
                if found is not None:
                    return found
        return None

    def _beyond(self, kind: LengthKind, length: float, usual: float | None, size: float, least: float) -> Excess | None:
        limit = kind.start_factor * max(size, least) if usual is None else max(self._factor * usual, size)
        if length <= limit:
            return None
        figures = {"length": length, "limit": limit} | ({} if usual is None else {"usual": usual})
        return Excess(f"its {kind.name} is out of all proportion (run.gate)", figures)

    def remember(self, lengths: Sequence[float]) -> None:
        """Later uploads are held against these, too. A length of 0 says nothing."""
        for known, length in zip(self._known, lengths, strict=True):
            if length > 0.0:
                known.add(length)

    def state(self) -> dict[str, list[float]]:
        return {kind.name: known.in_order() for kind, known in zip(self._kinds, self._known, strict=True)}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        known = ([float(length) for length in state[kind.name]] for kind in self._kinds)
        self._known = [RecentLengths(lengths, self._factor) for lengths in known]


class Judgement(NamedTuple):
    """What a defence leaves of an upload (None: nothing yet), why it is refused, and what the log should say."""

    upload: Upload | None
    refusal: Rejected | None = None
    notes: tuple[Noted, ...] = ()


class Admission:
    """Judges uploads of trips that are in flight. ``gate`` is the factor of the gate of proportion (None: there is
    none), ``sends`` names the vectors that come beside the model."""

    def __init__(self, method: Method, sends: tuple[str, ...], gate: float | None, defence: Defence | None) -> None:
        self.method, self.samples, self.layout, self.sends = (
            method,
            method.context.samples,
            method.context.layout,
            sends,
        )
        self.gate = None if gate is None else NormGate(gate, method.context.layout, sends)
        self.defence = defence
        self._objects = overrides(type(method), Method, "validate_report")

    def rejection(
        self, upload: Upload, device: int, flight: "ActiveTrip", base: Vector, fresh: Vector | None
    ) -> Rejected | None:
        """Why an upload for this flight, whose device was given ``base`` and, if it asked and there was one, ``fresh``,
        does not pass the gates, or None. A model that moved by a finite length is finite: only where that cannot be
        said is it looked at once more."""
        gate, layout, trip = self.gate, self.layout, flight.trip
        problem = origin_problem(upload, device, trip, flight.base, layout.size)
        if problem is not None:
            return Rejected(problem, device, trip)
        moved = [] if gate is None else gate.step_lengths(upload.weights, base, fresh)
        finite = gate is not None and all(map(isfinite, moved))
        problem = content_problem(upload, flight.fresh, layout, self.sends, finite)
        if problem is None and self._objects:
            problem = self.method.validate_report(upload, flight)
        if problem is not None:
            return Rejected(problem, device, trip)
        if gate is None:
            return None
        lengths = gate.all_lengths(upload, moved)
        excess = gate.find_excess(lengths, base, flight.epochs * self.samples.item(device))
        gate.remember(lengths)
        return None if excess is None else Rejected(excess.reason, device, trip, excess.numbers)

    def defended(
        self, defence: Defence, upload: Upload, device: int, flight: "ActiveTrip", base: Vector, fresh: Vector | None
    ) -> Judgement:
        """What a defence says of an upload that passed the gates."""
        left, problem, notes = defence.judge(upload, flight, base, fresh)
        return Judgement(left, None if problem is None else Rejected(problem, device, flight.trip), notes)

    def release(self) -> tuple[list[tuple[Upload, "ActiveTrip"]], tuple[Noted, ...]]:
        """The round is over: uploads that were held back until now, and what the log should say."""
        return ([], ()) if self.defence is None else self.defence.release()

    def state(self) -> saving.Tree:
        """What it has seen."""
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
