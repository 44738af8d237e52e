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
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from operator import attrgetter, le
from typing import Any, NamedTuple

from freshet.core.layout import Layout
from freshet.core.messages import Upload
from freshet.core.vectors import Vector, distance, distance_from_line, norm

#: Times the median that a step may have: more than ten times what honest devices were seen to do (docs/reliability.md).
FACTOR = 100.0
#: Lengths that the median is taken over, and how many there must be for it to count.
WINDOW, START = 101, 8
#: What the parts of an upload are called in a refusal.
STEP, STATISTICS, STEPS = "step", "change of statistics", "number of steps"


class Excess(NamedTuple):
    """Why an upload is out of all proportion, and the figures."""

    reason: str
    numbers: Mapping[str, Any]


class Lengths:
    """The last ``WINDOW`` lengths of one kind, their median, and ``factor`` times that."""

    __slots__ = ("_factor", "_order", "_ranked", "limit", "median")

    def __init__(self, lengths: Sequence[float] = (), factor: float = FACTOR) -> None:
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
        if len(order) > WINDOW:
            gone = order.popleft()
            if gone == length:
                return  # the same lengths as before
            del ranked[bisect_left(ranked, gone)]
        insort(ranked, length)
        count = len(ranked)
        if count >= START:
            self.median = median = ranked[(count - 1) // 2]
            self.limit = self._factor * median

    def in_order(self) -> list[float]:
        return list(self._order)


_limit = attrgetter("limit")


class Kind(NamedTuple):
    """Something in an upload that has a length: whose part of the model it is held against, and how much more it may be
    than that while nothing is known of it."""

    name: str
    beside: slice
    start: float


class Proportion:
    """Remembers what was sent, and holds new uploads against it. ``sends`` names vectors beside the model."""

    def __init__(self, factor: float, layout: Layout, sends: tuple[str, ...] = ()) -> None:
        step = slice(0, layout.learnable)
        rest = [Kind(STATISTICS, slice(layout.learnable, layout.size), factor * factor)]
        self._parts = [Kind(STEP, step, factor), *(rest if layout.size > layout.learnable else [])]
        self._sent = [Kind(name, step, factor) for name in sends]
        self._kinds = [*self._parts, *self._sent, Kind(STEPS, slice(0, 0), factor)]
        self._factor, self._known = factor, [Lengths(factor=factor) for _ in self._kinds]

    def moved(self, u: Vector, base: Vector, fresh: Vector | None) -> list[float]:
        """How far the parts of an uploaded model moved; all of it is finite if these are."""
        if len(self._parts) == 1:  # the whole model: nothing to cut out
            return [distance(u, base) if fresh is None else distance_from_line(u, base, fresh)]
        if fresh is None:
            return [distance(u[part], base[part]) for _, part, _ in self._parts]
        return [distance_from_line(u[part], base[part], fresh[part]) for _, part, _ in self._parts]

    def beside(self, upload: Upload, moved: list[float]) -> list[float]:
        """What moved, with the lengths of the vectors beside the model and the number of steps at its end."""
        if self._sent:
            moved += [norm(upload.vectors[kind.name]) for kind in self._sent]
        moved.append(float(upload.steps))
        return moved

    def excess(self, lengths: Sequence[float], base: Vector, work: int) -> Excess | None:
        """What is out of all proportion in an upload, or None; ``work`` are the samples that its device went through,
        the most steps that there can be without saying."""
        if all(map(le, lengths, map(_limit, self._known))):  # as nearly always
            return None
        for kind, known, length in zip(self._kinds, self._known, lengths, strict=True):
            if not length <= known.limit:
                usual, model = known.median, base[kind.beside]
                sizes = (float(work), 1.0) if kind.name == STEPS else (norm(model), math.sqrt(len(model)))
                found = self._beyond(kind, length, usual, *sizes)
                if found is not None:
                    return found
        return None

    def _beyond(self, kind: Kind, length: float, usual: float | None, size: float, least: float) -> Excess | None:
        limit = kind.start * max(size, least) if usual is None else max(self._factor * usual, size)
        if length <= limit:
            return None
        figures = {"length": length, "limit": limit} | ({} if usual is None else {"usual": usual})
        return Excess(f"its {kind.name} is out of all proportion (run.gate)", figures)

    def seen(self, lengths: Sequence[float]) -> None:
        """Later uploads are held against these, too. A length of 0 says nothing."""
        for known, length in zip(self._known, lengths, strict=True):
            if length > 0.0:
                known.add(length)

    def state(self) -> dict[str, list[float]]:
        return {kind.name: known.in_order() for kind, known in zip(self._kinds, self._known, strict=True)}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        known = ([float(length) for length in state[kind.name]] for kind in self._kinds)
        self._known = [Lengths(lengths, self._factor) for lengths in known]
