"""What several asynchronous methods use: staleness discounts, mixing one upload in, and a buffer of uploads.

The papers of these methods count staleness from 0: ``tau = t - o``. Freshet's ``s = t - o + 1``, so ``tau = s - 1``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from freshet.core.admission import overflows
from freshet.core.events import Contribution
from freshet.core.layout import Layout
from freshet.core.messages import Upload
from freshet.core.method import Aggregate, MethodContext, Reject
from freshet.core.server import NOT_FINITE, ActiveTrip, Server
from freshet.core.vectors import Vector, combine, distance, mix_measured


def polynomial_discount(tau: int, a: float) -> float:
    """``(tau + 1)^-a``; 1 for a fresh upload."""
    return float((tau + 1.0) ** -a)


def hinge_discount(tau: int, a: float, b: float) -> float:
    """1 up to ``tau = b``, then ``1 / (a (tau - b) + 1)``."""
    return 1.0 if tau <= b else 1.0 / (a * (tau - b) + 1.0)


def mix_upload(server: Server, upload: Upload, trip: ActiveTrip, alpha: float, **numbers: Any) -> Aggregate | Reject:
    """``w <- (1 - alpha) w + alpha u``, float buffers included; counters take the larger of the two."""
    w, layout = server.weights, server.context.layout
    new, length = mix_measured(w, upload.weights, alpha, layout.learnable)
    layout.max_counters(new, w, upload.weights)
    if overflows(new, length):
        return Reject(NOT_FINITE)
    part = Contribution(upload.device, trip.base, server.staleness(trip), alpha)
    return Aggregate(new, [part], {"alpha": alpha, **numbers}, length)


Wide = NDArray[np.float64]


def cache_notice(title: str, context: MethodContext) -> list[str]:
    """What to tell the user about a cache of one learnable vector per device, if it is large."""
    size = 4 * context.layout.learnable * context.devices / 2**30
    return [f"{title} keeps one update per device: up to {size:.1f} GiB of memory"] if size > 1.0 else []


@dataclass
class UploadBuffer:
    """Sums over the uploads since the last step: learnable part B, statistics, largest counters.

    ``arrived`` lists (device, base, staleness) of each upload in order of arrival.
    """

    B: Wide
    statistics: Wide
    counters: Vector
    arrived: list[tuple[int, int, int]] = field(default_factory=list)

    @classmethod
    def empty(cls, layout: Layout) -> Self:
        statistics, counters = layout.floats - layout.learnable, layout.size - layout.floats
        return cls(np.zeros(layout.learnable), np.zeros(statistics), np.zeros(counters, np.float32))

    def add(self, layout: Layout, progress: Wide, u: Vector, device: int, base: int, staleness: int) -> None:
        """Add one upload: ``progress`` to B, and the upload's own statistics and counters."""
        self.B += progress
        self.statistics += u[layout.learnable : layout.floats]
        np.maximum(self.counters, u[layout.floats :], out=self.counters)
        self.arrived.append((device, base, staleness))

    def model(self, layout: Layout, learnable: Wide) -> Vector:
        """Return a model with this learnable part, the mean of the statistics and the largest counters."""
        new = np.empty(layout.size, np.float32)
        with np.errstate(over="ignore"):  # the caller refuses a model that is not finite
            new[: layout.learnable] = learnable
        new[layout.learnable : layout.floats] = self.statistics / len(self.arrived)
        new[layout.floats :] = self.counters
        return new


@dataclass(frozen=True)
class Arrival:
    """An upload that waits for a step: who, from which version, its model u, and its progress ``u - w^b``."""

    device: int
    base: int
    samples: int
    weights: Vector
    progress: Wide


def arrival_of(server: Server, upload: Upload, trip: ActiveTrip, start: Vector) -> Arrival:
    """An upload as a buffer keeps it. ``start`` is the model that the device trained from."""
    n, u = server.context.layout.learnable, upload.weights
    progress = u[:n].astype(np.float64) - start[:n]
    return Arrival(upload.device, trip.base, server.context.samples.item(upload.device), u, progress)


def stepped_model(layout: Layout, w: Vector, step: Wide, models: Sequence[Vector]) -> tuple[Vector, float]:
    """``w + step``, with the plain mean of the models' statistics and their largest counters; and the step's length."""
    n = layout.learnable
    new = combine([(1.0 / len(models), model) for model in models])
    with np.errstate(over="ignore"):  # the caller refuses a model that is not finite
        new[:n] = w[:n] + step
    layout.max_counters(new, *models)
    return new, distance(new[:n], w[:n])
