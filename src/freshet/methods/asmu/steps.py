"""The steps that FedASMU's server remembers, one model per device ever aggregated, within bounds.

Adapting a device's controls needs ``<g, step>`` with the step of its last accepted upload. ``exact`` keeps every step:
in main memory up to a budget, the longest unused ones beyond it in a temporary file, from which they come back bit for
bit. ``budget`` forgets those instead (a device whose step was dropped skips one adaptation); ``sketch`` keeps a seeded
count sketch of a few KiB per device, whose inner product estimates the true one without bias and with a standard error
of at most ``sqrt(2 / size) |g| |step|``.

Arithmetic on FedASMU's steps: differences of close models in float32, their products and lengths in float64.
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
    """An uploaded model and those it came from: the base, and the fresh model that was merged (else the base again)."""

    u: Vector
    base: Vector
    fresh: Vector


class StepFile:
    """Steps outside main memory, all of one length, in a file that has no name: even a kill leaves nothing behind."""

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
        """Move a step here."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="freshet-steps-")  # noqa: SIM115  # closed with the memory
        place = self._free.pop() if self._free else len(self._places)
        self._places[device] = place
        self._file.seek(4 * self._length * place)
        self._file.write(step.view(np.uint8).data)
        self._file.flush()

    def read(self, device: int) -> Vector:
        """A step that lies here."""
        assert self._file is not None
        step = np.empty(self._length, np.float32)
        self._file.seek(4 * self._length * self._places[device])
        if self._file.readinto(step.view(np.uint8).data) != step.nbytes:  # type: ignore[attr-defined]
            raise OSError("the temporary file of steps was cut off")
        return step

    def drop(self, device: int) -> None:
        """Forget a step, if it is here."""
        if device in self._places:
            self._free.append(self._places.pop(device))

    def views(self) -> dict[int, Vector]:
        """All steps, read when they are looked at; valid until the next ``put``."""
        if self._file is None or not self._places:
            return {}
        size = max(self._places.values()) + 1
        mapped = np.memmap(self._file, np.float32, "r", shape=(size, self._length))
        return {device: mapped[place] for device, place in self._places.items()}


class StepMemory:
    """Steps by device. ``learnable`` is the length of a step, ``budget`` counts bytes."""

    def __init__(self, kind: ControlMemory, learnable: int, budget: int, seed: int) -> None:
        self._kind, self._learnable = kind, learnable
        #: How many steps main memory holds; None for sketches, which are small.
        self.limit = None if kind == "sketch" else max(1, budget // (4 * learnable))
        self._steps: OrderedDict[int, Vector] = OrderedDict()  # the longest unused first
        self._spilled = StepFile(learnable)
        self._sketch = CountSketch(learnable, seed) if kind == "sketch" else None
        self._spare: Vector | None = None

    def __contains__(self, device: int) -> bool:
        return device in self._steps or device in self._spilled

    @property
    def bytes(self) -> int:
        """What the remembered steps take in main memory."""
        return sum(step.nbytes for step in self._steps.values())

    @property
    def spilled_count(self) -> int:
        """Steps that lie in the file."""
        return len(self._spilled)

    def measure(
        self, device: int, trained: TrainedModel, start: Vector, beta: float, beta_measured: float
    ) -> tuple[float | None, Vector, float]:
        """Measure an upload's progress along the device's last step; nothing is kept of it before ``remember``.

        Returns ``<(u - base) - beta_measured (fresh - base), last step>`` or its estimate (None when there is no last
        step), the new step ``(u - start) - beta (fresh - base)`` and its length. The step belongs to the memory and is
        only valid until the next is measured.
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
        """Keep this as the device's step; the one that it replaces makes room for the next."""
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
        """Device and step, the longest unused first; steps in the file stay there until they are looked at."""
        return [[device, step] for device, step in (self._spilled.views() | self._steps).items()]

    def restore(self, state: list[Any]) -> None:
        """The inverse of ``state``, one step at a time."""
        self._steps, self._spilled = OrderedDict(), StepFile(self._learnable)
        for device, step in state:
            self._keep(int(device), np.array(step))


class CountSketch:
    """A random linear map to few numbers that keeps inner products: each entry, with a random sign, in one bucket."""

    def __init__(self, length: int, seed: int, size: int = SKETCH_SIZE) -> None:
        rng = stream(seed, "sketch")
        self._size = size
        self._bucket: NDArray[np.int64] = rng.integers(size, size=length)
        self._sign = (2 * rng.integers(2, size=length) - 1).astype(np.float32)

    def __call__(self, vector: Vector) -> Vector:
        return np.bincount(self._bucket, weights=vector * self._sign, minlength=self._size).astype(np.float32)


@dataclass(frozen=True)
class VersionOrigin:
    """How a version came about: the numbers of its last upload (``length``: that of the course), and the course."""

    past: PastUpload
    course: Vector


@dataclass
class Course:
    """The controls of all devices, and the course at each version that a device may have started from."""

    control: Control
    made: dict[int, VersionOrigin] = field(default_factory=dict)

    def measure(self, base: int, step: Vector) -> tuple[float | None, PastUpload | None]:
        """``<step, m>`` with the course at a version, and that version's past (None: it is the first one)."""
        made = self.made.get(base)
        return (None, None) if made is None else (dot(step, made.course), made.past)

    def advance(self, past: PastUpload, alpha: float, step: Vector, held: Callable[[int], bool]) -> float:
        """An upload was taken in: the course at the version that it made, and its length; versions that nobody holds
        are forgotten."""
        new, before = np.float32(alpha) * step, self.made.get(past.version)
        with np.errstate(over="ignore"):
            course = new if before is None else new + np.float32(1.0 - 1.0 / past.s_p) * before.course
        length, version = norm(course), past.version + 1
        if not math.isfinite(length):  # beside the largest numbers it begins anew
            course, length = new, norm(new)
        self.made = {v: made for v, made in self.made.items() if held(v)}
        self.made[version] = VersionOrigin(replace(past, length=length), course)
        self.control = past.control
        return length
