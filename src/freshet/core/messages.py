"""Messages between server and devices. They are immutable plain data that can be logged, saved and sent.

A message may carry named vectors in addition to the model (control variates, for example). ``nbytes`` is its size on
the network: its arrays, or ``CONTROL_BYTES`` without any. The few numbers beside them are not counted. A compressed
model (``core/compression.py``) stands in a message as it is decoded, with its bytes in ``packed``.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from freshet.core.vectors import Vector

Number = float | int
Vectors = Mapping[str, Vector]
#: Bytes of a message without a model: a request for the fresh model, or the answer that there is none.
CONTROL_BYTES = 64
#: No instruction, or no report.
NOTHING: Mapping[str, Number] = MappingProxyType({})
NO_VECTORS: Vectors = MappingProxyType({})


def message_bytes(weights: Vector, vectors: Vectors, packed: int) -> int:
    """Bytes of a model and of the vectors sent with it."""
    return (packed or weights.nbytes) + sum(vector.nbytes for vector in vectors.values())


class Slot(NamedTuple):
    """The epoch at the start of which to ask for the fresh model, and what chose it (meta, q, explore, fixed)."""

    epoch: int
    by: str
    action: int = 0


class Assignment(NamedTuple):
    """Server to device: train this model. ``age`` is the t of the formulas: the version, or the round."""

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
        return message_bytes(self.weights, self.vectors, self.packed)


class Request(NamedTuple):
    """Device to server, in mid-training: is there a newer model?"""

    device: int
    trip: int
    slot: Slot

    @property
    def nbytes(self) -> int:
        return CONTROL_BYTES


class Fresh(NamedTuple):
    """Server to device, in mid-training: the current model."""

    version: int
    age: int
    weights: Vector
    vectors: Vectors = NO_VECTORS
    packed: int = 0

    @property
    def nbytes(self) -> int:
        return message_bytes(self.weights, self.vectors, self.packed)


class Upload(NamedTuple):
    """Device to server: the trained model, the number of steps, the rule's report, and the numbers of the merge."""

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
        return message_bytes(self.weights, self.vectors, self.packed)
