"""What several asynchronous methods use: staleness discounts, mixing one upload in, and a buffer of uploads.

The papers of these methods count staleness from 0: ``tau = t - o``. Freshet's ``s = t - o + 1``, so ``tau = s - 1``.
"""

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from freshet.core.admission import overflows
from freshet.core.events import Contribution
from freshet.core.layout import Layout
from freshet.core.messages import Upload
from freshet.core.method import Aggregate, Reject
from freshet.core.server import NOT_FINITE, ActiveTrip, Server
from freshet.core.vectors import Vector, mix_measured


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
