"""The place of each tensor of a model in its one flat float32 vector.

The order is: learnable parameters, float buffers (BatchNorm statistics), integer counters. So norms and inner products
run over ``w[:layout.learnable]``, and ``w[:layout.floats]`` may be averaged.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from freshet.core.vectors import Vector

Kind = Literal["learnable", "buffer", "counter"]


@dataclass(frozen=True)
class TensorPlace:
    """One tensor: its name in the module's state, its shape, and its place in the flat vector."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    start: int
    size: int
    #: Convolution kernels are stored as (out, height, width, in), the fastest order.
    channels_last: bool = False

    def array(self, vector: Vector) -> Vector:
        """A view of this tensor's part of a flat vector, in the tensor's shape."""
        part = vector[self.span]
        if self.channels_last:
            out, inner, *sides = self.shape
            return part.reshape(out, *sides, inner).transpose(0, 3, 1, 2)
        return part.reshape(self.shape)

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class Layout:
    """The layout of a flat vector. ``groups`` holds the spans of each layer's learnable tensors."""

    entries: tuple[TensorPlace, ...]
    learnable: int
    floats: int
    size: int
    groups: tuple[tuple[tuple[int, int], ...], ...] = ()

    @staticmethod
    def build(
        tensors: Iterable[tuple[str, tuple[int, ...], Kind]], groups: Iterable[Iterable[str]] | None = None
    ) -> "Layout":
        """Lay out named tensors. ``groups`` names the learnable tensors of each layer (default: one tensor each)."""
        order: dict[Kind, int] = {"learnable": 0, "buffer": 1, "counter": 2}
        entries: list[TensorPlace] = []
        start = 0
        ends: dict[Kind, int] = {"learnable": 0, "buffer": 0, "counter": 0}
        for name, shape, kind in sorted(tensors, key=lambda tensor: order[tensor[2]]):
            size = 1
            for side in shape:
                size *= side
            entries.append(TensorPlace(name, tuple(shape), kind, start, size, kind == "learnable" and len(shape) == 4))
            start += size
            ends[kind] = start
        learnable = ends["learnable"]
        floats = max(learnable, ends["buffer"])
        spans = {e.name: (e.start, e.start + e.size) for e in entries if e.kind == "learnable"}
        if groups is None:
            groups = [[name] for name in spans]
        kept = (tuple(spans[name] for name in group if name in spans) for group in groups)
        return Layout(tuple(entries), learnable, floats, start, tuple(group for group in kept if group))

    def max_counters(self, out: Vector, *models: Vector) -> None:
        """Set the integer counters of ``out`` to the largest among ``models``. Counters cannot be averaged."""
        if self.floats < self.size:
            out[self.floats :] = np.maximum.reduce([model[self.floats :] for model in models])
