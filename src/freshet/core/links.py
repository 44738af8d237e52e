"""Thin links: models that travel as differences in fewer bytes (``core/codecs.py``).

Down, the server knows what each device holds, since it sent it: ``h_k``. A model w goes down as ``q = Q(w - h_k)`` and
the device then holds ``h_k + q``, so that what this message lacks is in the next one's difference: error feedback
without a further vector. The fresh model in mid-training goes the same way. A device that is heard of for the first
time, or whose last trip was lost, holds nothing that is known: it gets the whole model (int8: ``Q(w)``).

Up, a device that trained ``h_k`` to u sends ``q = Q(u - h_k + r_k)`` and keeps the rest as r_k; the server takes
``w_o + q`` for its model, with w_o the version that it was given. So what the way down lacked is no part of an update.

Only learnable weights are encoded. Running statistics and counters travel as they are (an error could turn a variance
negative), and so do vectors by name.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from pydantic import Field

from freshet.core import saving
from freshet.core.codecs import Codec, coded_bytes, decode, encode, with_feedback
from freshet.core.layout import Layout
from freshet.core.messages import Assignment, Fresh, Upload
from freshet.core.method import Memory, Options
from freshet.core.vectors import Vector, combine, is_finite

#: Where a device keeps what its last upload lacked.
RESIDUAL = "links.residual"


class LinkOptions(Options):
    """How models travel: as they are, or as differences in fewer bytes with error feedback."""

    down: Codec = Field("none", description="models to devices: none (float32), int8, topk (the largest differences)")
    up: Codec = Field("none", description="models from devices: none (float32), int8, topk (the largest differences)")
    keep: float = Field(0.1, gt=0, le=1, description="topk: share of the numbers that is sent")

    @property
    def plain(self) -> bool:
        """Whether everything travels as it is."""
        return self.down == self.up == "none"


@dataclass
class Held:
    """What a device was last sent: the learnable weights as they arrived there, their version, the message's bytes."""

    weights: Vector
    version: int
    size: int


@dataclass
class Holdings:
    """What each device holds, by its number."""

    by_device: dict[int, Held] = field(default_factory=dict)


class Links:
    """The server's side of thin links."""

    def __init__(self, options: LinkOptions, layout: Layout) -> None:
        self.options, self.layout = options, layout
        self.holdings = Holdings()

    def assigned(self, assignment: Assignment) -> Assignment:
        """The assignment as it arrives, with what it weighed."""
        if self.options.down == "none":
            return assignment
        weights, size = self._send(assignment.device, assignment.version, assignment.weights)
        return assignment._replace(weights=weights, packed=size)

    def freshened(self, device: int, fresh: Fresh) -> Fresh:
        """The fresh model as it arrives; asked for again, it is the same."""
        if self.options.down == "none":
            return fresh
        held = self.holdings.by_device.get(device)
        if held is not None and held.version == fresh.version:
            weights = fresh.weights.copy()
            weights[: self.layout.learnable] = held.weights
            return fresh._replace(weights=weights, packed=held.size)
        weights, size = self._send(device, fresh.version, fresh.weights)
        return fresh._replace(weights=weights, packed=size)

    def _send(self, device: int, version: int, weights: Vector) -> tuple[Vector, int]:
        n, held = self.layout.learnable, self.holdings.by_device.get(device)
        codec = "none" if held is None and self.options.down == "topk" else self.options.down
        base = np.zeros(n, np.float32) if held is None else held.weights
        difference = _difference(weights[:n], base)
        if not is_finite(difference):  # farther apart than a float32 can say
            codec, base, difference = "none", np.zeros(n, np.float32), weights[:n]
        arrays = encode(codec, difference, self.options.keep)
        arrived = weights.copy()
        combine([(1.0, base), (1.0, decode(codec, arrays, n, self.options.keep))], out=arrived[:n])
        size = sum(array.nbytes for array in arrays.values()) + self._rest
        self.holdings.by_device[device] = Held(arrived[:n].copy(), version, size)
        return arrived, size

    def lost(self, device: int) -> None:
        """Nobody knows any more what this device holds."""
        self.holdings.by_device.pop(device, None)

    def opened(self, upload: Upload, base: Vector) -> Upload:
        """An upload whose learnable weights are a difference, as a model: ``w_o + q``."""
        if self.options.up == "none":
            return upload
        n, weights = self.layout.learnable, upload.weights.copy()
        with np.errstate(over="ignore", invalid="ignore"):  # a model that is not finite does not pass the gates
            combine([(1.0, base[:n]), (1.0, weights[:n])], out=weights[:n])
        return upload._replace(weights=weights)

    @property
    def _rest(self) -> int:
        """Bytes of what is not learnable."""
        return 4 * (self.layout.size - self.layout.learnable)

    @property
    def remembers(self) -> bool:
        """Whether devices keep a residual of what they sent."""
        return self.options.up != "none"

    def sizes(self) -> tuple[int, int]:
        """Bytes of a model down (to a device that holds one) and up."""
        return down_and_up(self.options, self.layout)

    def state(self) -> saving.Tree:
        """What every device holds."""
        tree: saving.Tree = saving.dump(self.holdings)
        return tree

    def restore(self, tree: saving.Tree) -> None:
        """The inverse of ``state``; raises ``ValueError`` for models of another size."""
        saving.restore(self.holdings, tree)
        n = self.layout.learnable
        if not all(h.weights.shape == (n,) and h.weights.dtype == np.float32 for h in self.holdings.by_device.values()):
            raise ValueError(f"what devices hold is not of {n} numbers")


def down_and_up(options: LinkOptions, layout: Layout) -> tuple[int, int]:
    """Bytes of a model down and up."""
    rest = 4 * (layout.size - layout.learnable)
    down, up = (rest + coded_bytes(codec, layout.learnable, options.keep) for codec in (options.down, options.up))
    return down, up


class Packed(NamedTuple):
    """What a device sends in the place of its model: the decoded difference, its bytes, and its memory after that."""

    weights: Vector
    size: int
    memory: Memory


def packed(options: LinkOptions, layout: Layout, weights: Vector, base: Vector, memory: Memory) -> Packed:
    """The device's side: the difference to what it was given, encoded, with error feedback."""
    n, size, out = layout.learnable, down_and_up(options, layout)[1], weights.copy()
    out[:n] = _difference(weights[:n], base[:n])
    if not is_finite(out[:n]):  # it has diverged, and will be refused
        return Packed(out, size, memory)
    sent = with_feedback(options.up, out[:n], memory.get(RESIDUAL), options.keep)
    out[:n] = sent.decoded
    return Packed(out, size, memory | {RESIDUAL: sent.residual})


def _difference(a: Vector, b: Vector) -> Vector:
    with np.errstate(over="ignore", invalid="ignore"):
        return combine([(1.0, a), (-1.0, b)])
