"""The steps that FedASMU's server remembers, one model per device ever aggregated, within bounds.

Adapting a device's controls needs ``<g, step>`` with the step of its last accepted upload. ``exact`` keeps every step;
``budget`` keeps the most recent ones up to a number of bytes (a device whose step was dropped skips one adaptation);
``sketch`` keeps a seeded count sketch of a few KiB per device, whose inner product estimates the true one without bias
and with a standard error of at most ``sqrt(2 / size) |g| |step|``.
"""

from collections import OrderedDict
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freshet.core.streams import stream
from freshet.core.vectors import Vector, dot, replace_step, write_step

ControlMemory = Literal["exact", "sketch", "budget"]
#: Buckets of a sketch: 4 KiB per device.
SKETCH_SIZE = 1024


class Trained(NamedTuple):
    """An uploaded model and those it came from: the base, and the fresh model that was merged (else the base again)."""

    u: Vector
    base: Vector
    fresh: Vector


class StepMemory:
    """Steps by device. ``learnable`` is the length of a step, ``budget`` counts bytes."""

    def __init__(self, kind: ControlMemory, learnable: int, budget: int, seed: int) -> None:
        self._kind, self._learnable = kind, learnable
        self._limit = max(1, budget // (4 * learnable)) if kind == "budget" else None
        self._steps: OrderedDict[int, Vector] = OrderedDict()
        self._sketch = CountSketch(learnable, seed) if kind == "sketch" else None

    def __contains__(self, device: int) -> bool:
        return device in self._steps

    @property
    def bytes(self) -> int:
        """What the remembered steps take."""
        return sum(step.nbytes for step in self._steps.values())

    def exchange(
        self, device: int, trained: Trained, start: Vector, beta: float, beta_measured: float
    ) -> tuple[float | None, Vector, float]:
        """Measure an upload's progress along the device's last step, then keep ``(u - start) - beta (fresh - base)``.

        Returns ``<(u - base) - beta_measured (fresh - base), last step>`` or its estimate (None when there is no last
        step), the new step and its length. The step belongs to the memory and is only valid until the device's next.
        """
        old, n = self._steps.get(device), self._learnable
        u, base, fresh, start = trained.u[:n], trained.base[:n], trained.fresh[:n], start[:n]
        product = None
        if old is not None and self._sketch is None:
            step = old
            product, length = replace_step(step, u, start, fresh, base, beta, beta_measured)
        else:
            step = np.empty(n, np.float32)
            if old is not None and self._sketch is not None:
                write_step(step, u, base, fresh, base, beta_measured)
                product = dot(self._sketch(step), old)
            length = write_step(step, u, start, fresh, base, beta)
        self.remember(device, step)
        return product, step, length

    def forget(self, device: int) -> None:
        """Drop the device's step."""
        self._steps.pop(device, None)

    def remember(self, device: int, step: Vector) -> None:
        """Keep this as the device's step."""
        self._steps[device] = step if self._sketch is None else self._sketch(step)
        self._steps.move_to_end(device)
        if self._limit is not None and len(self._steps) > self._limit:
            self._steps.popitem(last=False)

    def state(self) -> list[Any]:
        return [[device, step] for device, step in self._steps.items()]

    def restore(self, state: list[Any]) -> None:
        self._steps = OrderedDict((int(device), step) for device, step in state)


class CountSketch:
    """A random linear map to few numbers that keeps inner products: each entry, with a random sign, in one bucket."""

    def __init__(self, length: int, seed: int, size: int = SKETCH_SIZE) -> None:
        rng = stream(seed, "sketch")
        self._size = size
        self._bucket: NDArray[np.int64] = rng.integers(size, size=length)
        self._sign = (2 * rng.integers(2, size=length) - 1).astype(np.float32)

    def __call__(self, vector: Vector) -> Vector:
        return np.bincount(self._bucket, weights=vector * self._sign, minlength=self._size).astype(np.float32)
