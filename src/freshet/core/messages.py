"""What server and devices say to each other. Plain data that never change: they can be logged, saved and sent.

Beside the model a message may carry further vectors by name (control variates, for example). ``nbytes`` is what it
weighs on a link: its arrays, or ``CONTROL_BYTES`` when there are none; the few numbers beside them are not counted.
A model that travels in fewer bytes (``core/compression.py``) stands in a message as it arrives, with its bytes in
``packed``.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from freshet.core.vectors import Vector

Number = float | int
Vectors = Mapping[str, Vector]
#: Bytes of a message without a model: a request for the fresh model, or the answer "nothing newer".
CONTROL_BYTES = 64
#: No instruction, or no report.
NOTHING: Mapping[str, Number] = MappingProxyType({})
NO_VECTORS: Vectors = MappingProxyType({})


def message_bytes(weights: Vector, vectors: Vectors, packed: int) -> int:
    """Bytes of a model and of what travels with it."""
    model = packed or weights.nbytes
    return model + sum(vector.nbytes for vector in vectors.values()) if vectors else model


class Slot(NamedTuple):
    """At the start of which epoch to ask for the fresh model, and who chose it (meta, q, explore, fixed)."""

    epoch: int
    by: str
    action: int = 0


class Assignment(NamedTuple):
    """Server to device: train this model. ``age`` is what the formulas take the root of: version, or round."""

    device: int
    trip: int
    version: int
    age: int
    weights: Vector
    epochs: int
    lr: float
    instruction: Mapping[str, Number] = NOTHING
    vectors: Vectors = NO_VECTORS
    packed: int = 0

    @property
    def nbytes(self) -> int:
        if self.packed or self.vectors:
            return message_bytes(self.weights, self.vectors, self.packed)
        return self.weights.nbytes


class Request(NamedTuple):
    """Device to server, in the middle of a trip: is there a newer model?"""

    device: int
    trip: int
    slot: Slot

    @property
    def nbytes(self) -> int:
        return CONTROL_BYTES


class Fresh(NamedTuple):
    """Server to device, in the middle of a trip: the model is now this one."""

    version: int
    age: int
    weights: Vector
    vectors: Vectors = NO_VECTORS
    packed: int = 0

    @property
    def nbytes(self) -> int:
        if self.packed or self.vectors:
            return message_bytes(self.weights, self.vectors, self.packed)
        return self.weights.nbytes


class Upload(NamedTuple):
    """Device to server: the trained model, the steps it took, what its rule reports, and the numbers of its merge."""

    device: int
    trip: int
    base: int
    weights: Vector
    steps: int
    report: Mapping[str, Number] = NOTHING
    merged: Mapping[str, Number] = NOTHING
    vectors: Vectors = NO_VECTORS
    packed: int = 0

    @property
    def nbytes(self) -> int:
        if self.packed or self.vectors:
            return message_bytes(self.weights, self.vectors, self.packed)
        return self.weights.nbytes
