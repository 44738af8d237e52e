"""What methods share that collect uploads in a buffer and make one step of it."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from freshet.core.layout import Layout
from freshet.core.vectors import Vector

Wide = NDArray[np.float64]


@dataclass
class Sums:
    """Sums over the uploads since the last step (learnable part B, statistics, largest counters), and who they came
    from as (device, base, staleness) in order of arrival."""

    B: Wide
    statistics: Wide
    counters: Vector
    arrived: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, layout: Layout, progress: Wide, u: Vector, device: int, base: int, staleness: int) -> None:
        """Take one upload in: what it adds to B, and its statistics and counters as they are."""
        self.B += progress
        self.statistics += u[layout.learnable : layout.floats]
        np.maximum(self.counters, u[layout.floats :], out=self.counters)
        self.arrived.append((device, base, staleness))

    def model(self, layout: Layout, learnable: Wide) -> Vector:
        """A model of this learnable part, with the mean of the statistics and the largest counters."""
        new = np.empty(layout.size, np.float32)
        with np.errstate(over="ignore"):  # a model that is not finite is refused
            new[: layout.learnable] = learnable
        new[layout.learnable : layout.floats] = self.statistics / len(self.arrived)
        new[layout.floats :] = self.counters
        return new


def empty(layout: Layout) -> tuple[Wide, Wide, Vector]:
    """Nothing summed up yet: B, statistics, counters."""
    statistics, counters = layout.floats - layout.learnable, layout.size - layout.floats
    return np.zeros(layout.learnable), np.zeros(statistics), np.zeros(counters, np.float32)
