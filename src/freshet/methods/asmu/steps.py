"""The past steps that FedASMU's server keeps to adapt its controls: one per device, or the server's course.

Adapting a device's controls needs ``<g, step>`` with the step of its last accepted upload. ``exact`` keeps every step:
in main memory up to a budget, and beyond it in a temporary file (the least recently used ones), bit for bit. ``budget``
forgets those instead, and a device without its step skips one adaptation. ``sketch`` keeps a seeded count sketch of a
few KiB per device. Its inner product estimates the true one without bias and with a standard error of at most
``sqrt(2 / size) |g| |step|``. Steps are differences of close models in float32; products and lengths are float64.

``controls = "course"`` (not in the paper) needs no step per device. In the paper, the slope along a device's last step
comes from that device's next upload. On a device's own samples, more of its own step nearly always helps, so those
controls only grow (docs/results.md). ``Course`` learns one set of controls for all devices. The server keeps its
course, the combined effect of the last uploads, with a memory as long as uploads are stale::

    m_{v+1} = (1 - 1/s) m_v + alpha d        d what training produced, s the staleness of that upload

A device that starts from version o and trains by ``d_j`` measures the slope of its loss along the course that led
there: ``d F_j(w_o) / d eps = <grad F_j(w_o), m_o>``, with eps a common relative change of those weights and
``grad F_j ~ -d_j``. Averaged over devices, that is the slope of the whole federation's loss at that model. If devices
continue in the server's direction, the weights were too small; if they turn back, too large: ``q = -cos(d_j, m_o)``.
"""

import math
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from types import ModuleType
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freshet.core.streams import stream
from freshet.core.vectors import Vector, dot, norm
from freshet.methods.asmu.staleness import Control, PastUpload


@cache
def _kernels() -> ModuleType:
    from freshet.methods.asmu import step_kernels

    return step_kernels


def write_step(step: Vector, u: Vector, start: Vector, fresh: Vector, base: Vector, beta: float) -> float:
    """``step <- (u - start) - beta (fresh - base)``; returns ``|step|``."""
    return math.sqrt(_kernels().write_step(step, u, start, fresh, base, beta))


def next_step(
    step: Vector, old: Vector, u: Vector, start: Vector, fresh: Vector, base: Vector, beta: float, beta_measured: float
) -> tuple[float, float]:
    """``<(u - base) - beta_measured (fresh - base), old>``, and ``write_step``, in one pass."""
    product, square = _kernels().next_step(step, old, u, start, fresh, base, beta, beta_measured)
    return product, math.sqrt(square)


def move_along(w: Vector, step: Vector, alpha: float, out: Vector) -> None:
    """``out <- w + alpha step``; ``out`` may be the step itself."""
    _kernels().move_along(out, w, step, alpha)


ControlMemory = Literal["exact", "sketch", "budget"]
#: Buckets of a sketch: 4 KiB per device.
SKETCH_SIZE = 1024


class TrainedModel(NamedTuple):
    """An uploaded model, its base, and the fresh model that it merged (the base again if none)."""

    u: Vector
    base: Vector
    fresh: Vector


class StepFile:
    """Steps of one length in an unnamed temporary file. Even a kill leaves nothing behind."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._file: BinaryIO | None = None
        self._places: dict[int, int] = {}
        self._free: list[int] = []

    def __contains__(self, device: int) -> bool:
        return device in self._places

    def __len__(self) -> int:
        return len(self._places)

    def put(self, device: int, step: Vector) -> None:
        """Write a device's step to the file."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="freshet-steps-")  # noqa: SIM115  # closed with the memory
        place = self._free.pop() if self._free else len(self._places)
        self._places[device] = place
        self._file.seek(4 * self._length * place)
        self._file.write(step.view(np.uint8).data)
        self._file.flush()

    def read(self, device: int) -> Vector:
        """Return a device's step."""
        assert self._file is not None
        step = np.empty(self._length, np.float32)
        self._file.seek(4 * self._length * self._places[device])
        if self._file.readinto(step.view(np.uint8).data) != step.nbytes:  # type: ignore[attr-defined]
            raise OSError("the temporary file of steps was cut off")
        return step

    def drop(self, device: int) -> None:
        """Delete a device's step, if present."""
        if device in self._places:
            self._free.append(self._places.pop(device))

    def views(self) -> dict[int, Vector]:
        """Return all steps, read lazily; valid until the next ``put``."""
        if self._file is None or not self._places:
            return {}
        size = max(self._places.values()) + 1
        mapped = np.memmap(self._file, np.float32, "r", shape=(size, self._length))
        return {device: mapped[place] for device, place in self._places.items()}


class StepMemory:
    """Steps by device. ``learnable`` is the length of a step, ``budget`` a number of bytes."""

    def __init__(self, kind: ControlMemory, learnable: int, budget: int, seed: int) -> None:
        self._kind, self._learnable = kind, learnable
        #: Number of steps that main memory holds; None for sketches, which are small.
        self.limit = None if kind == "sketch" else max(1, budget // (4 * learnable))
        self._steps: OrderedDict[int, Vector] = OrderedDict()  # least recently used first
        self._spilled = StepFile(learnable)
        self._sketch = CountSketch(learnable, seed) if kind == "sketch" else None
        self._spare: Vector | None = None

    def __contains__(self, device: int) -> bool:
        return device in self._steps or device in self._spilled

    @property
    def bytes(self) -> int:
        """Return the size of the steps in main memory."""
        return sum(step.nbytes for step in self._steps.values())

    @property
    def spilled_count(self) -> int:
        """Return the number of steps in the file."""
        return len(self._spilled)

    def measure(
        self, device: int, trained: TrainedModel, start: Vector, beta: float, beta_measured: float
    ) -> tuple[float | None, Vector, float]:
        """Measure an upload's progress along the device's last step. ``remember`` stores the new step.

        Returns ``<(u - base) - beta_measured (fresh - base), last step>`` or its estimate (None without a last step),
        the new step ``(u - start) - beta (fresh - base)`` and its length. The step belongs to the memory and is valid
        until the next call.
        """
        old, n = self._recall(device), self._learnable
        u, base, fresh, start = trained.u[:n], trained.base[:n], trained.fresh[:n], start[:n]
        product = None
        step = self._spare = np.empty(n, np.float32) if self._spare is None else self._spare
        if old is not None and self._sketch is None:
            product, length = next_step(step, old, u, start, fresh, base, beta, beta_measured)
        else:
            if old is not None and self._sketch is not None:
                write_step(step, u, base, fresh, base, beta_measured)
                product = dot(self._sketch(step), old)
            length = write_step(step, u, start, fresh, base, beta)
        return product, step, length

    def remember(self, device: int, step: Vector) -> None:
        """Store this as the device's step. The array of the replaced step is reused."""
        if self._sketch is not None:
            self._keep(device, self._sketch(step))
            return
        if step is self._spare:
            self._spare = self._steps.get(device)
        self._keep(device, step)

    def _keep(self, device: int, kept: Vector) -> None:
        self._spilled.drop(device)
        self._steps[device] = kept
        self._steps.move_to_end(device)
        if self.limit is not None and len(self._steps) > self.limit:
            oldest, unused = self._steps.popitem(last=False)
            if self._kind == "exact":
                self._spilled.put(oldest, unused)

    def _recall(self, device: int) -> Vector | None:
        return self._spilled.read(device) if device in self._spilled else self._steps.get(device)

    def state(self) -> list[Any]:
        """Return device and step, least recently used first. Steps in the file are read lazily."""
        return [[device, step] for device, step in (self._spilled.views() | self._steps).items()]

    def restore(self, state: list[Any]) -> None:
        """The inverse of ``state``, one step at a time."""
        self._steps, self._spilled = OrderedDict(), StepFile(self._learnable)
        for device, step in state:
            self._keep(int(device), np.array(step))


class CountSketch:
    """A random linear map to few numbers that preserves inner products: each entry gets a random sign and bucket."""

    def __init__(self, length: int, seed: int, size: int = SKETCH_SIZE) -> None:
        rng = stream(seed, "sketch")
        self._size = size
        self._bucket: NDArray[np.int64] = rng.integers(size, size=length)
        self._sign = (2 * rng.integers(2, size=length) - 1).astype(np.float32)

    def __call__(self, vector: Vector) -> Vector:
        return np.bincount(self._bucket, weights=vector * self._sign, minlength=self._size).astype(np.float32)


@dataclass(frozen=True)
class VersionMaker:
    """The device whose upload made a version, the numbers of that aggregation, and its step."""

    device: int
    past: PastUpload
    step: Vector


@dataclass
class Makers:
    """Who made each version from which a device may have started (``judge = "base"``)."""

    made: dict[int, VersionMaker] = field(default_factory=dict)

    def add(self, device: int, past: PastUpload, step: Vector, held: Callable[[int], bool]) -> None:
        """Record the maker of the next version. Drop the versions that nobody trains from."""
        self.made = {version: maker for version, maker in self.made.items() if held(version)}
        self.made[past.version + 1] = VersionMaker(device, past, step)


@dataclass(frozen=True)
class VersionOrigin:
    """The upload that made a version (its ``length`` is that of the course), and the course at that version."""

    past: PastUpload
    course: Vector


@dataclass
class Course:
    """The shared controls, and the course at each version from which a device may have started."""

    control: Control
    made: dict[int, VersionOrigin] = field(default_factory=dict)

    def measure(self, base: int, step: Vector) -> tuple[float | None, PastUpload | None]:
        """Return ``<step, m>`` with the course at version ``base``, and the upload that made it (None: none did)."""
        origin = self.made.get(base)
        return (None, None) if origin is None else (dot(step, origin.course), origin.past)

    def advance(self, past: PastUpload, alpha: float, step: Vector, held: Callable[[int], bool]) -> float:
        """Record the course at the version that an upload made, and return its length. Drop unused versions."""
        new, before = np.float32(alpha) * step, self.made.get(past.version)
        with np.errstate(over="ignore"):
            course = new if before is None else new + np.float32(1.0 - 1.0 / past.s_p) * before.course
        length, version = norm(course), past.version + 1
        if not math.isfinite(length):  # on overflow the course starts again
            course, length = new, norm(new)
        self.made = {v: origin for v, origin in self.made.items() if held(v)}
        self.made[version] = VersionOrigin(replace(past, length=length), course)
        self.control = past.control
        return length
