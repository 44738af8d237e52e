"""Messages between server and devices. They are immutable plain data that can be logged, saved and sent.

A message may carry named vectors in addition to the model (control variates, for example). ``nbytes`` is its size on
the network: its arrays, or ``CONTROL_BYTES`` without any. The few numbers beside them are not counted. A compressed
model (``core/compression.py``) is in ``packed``. ``weights`` is then what it decodes to, or ``UNREAD``.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freshet.core.vectors import Vector, mix

Number = float | int
Vectors = Mapping[str, Vector]
#: Bytes of a message without a model: a request for the fresh model, or the answer that there is none.
CONTROL_BYTES = 64
#: An instruction: report, as ``loss``, the moving average with this decay of the mini-batch losses of the first epoch.
LOSS_DECAY = "loss_decay"
#: In a report, the names of the metrics of a device's own training loop start with this.
METRIC_PREFIX = "train_"
#: No instruction, or no report.
NOTHING: Mapping[str, Number] = MappingProxyType({})
NO_VECTORS: Vectors = MappingProxyType({})
#: The fresh models that a device was sent, by version.
FreshModels = Mapping[int, Vector]
#: In the place of the weights of a compressed model that is not decoded.
UNREAD: Vector = np.empty(0, np.float32)
UNREAD.flags.writeable = False


class Packed(NamedTuple):
    """A compressed model as it travels."""

    codec: str
    #: Digest of the weights that it is the difference to, if the receiver may hold others. Empty: it needs none.
    base: str
    #: The arrays of the codec, and ``rest``: the entries that are not learnable.
    arrays: dict[str, NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def message_bytes(weights: Vector, vectors: Vectors, packed: Packed | None) -> int:
    """Bytes of a model and of the vectors sent with it."""
    model = weights.nbytes if packed is None else packed.nbytes
    return model + sum(vector.nbytes for vector in vectors.values())


class Slot(NamedTuple):
    """The epoch at the start of which to ask for the fresh model, and what chose it.

    That is meta, q, explore, fixed, again (a further request of the trip), or push (the server sent it unasked).
    """

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
    packed: Packed | None = None

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
    packed: Packed | None = None

    @property
    def nbytes(self) -> int:
        return message_bytes(self.weights, self.vectors, self.packed)


class Merge(NamedTuple):
    """A fresh model that a device has merged in mid-training, with the rule's numbers."""

    version: int
    numbers: Mapping[str, Number] = NOTHING
    #: Whether the local model or a number was no longer finite.
    diverged: bool = False


class Upload(NamedTuple):
    """Device to server: the trained model, the number of steps, the rule's report, and the merges in their order."""

    device: int
    trip: int
    base: int
    weights: Vector
    steps: int
    report: Mapping[str, Number] = NOTHING
    merges: tuple[Merge, ...] = ()
    vectors: Vectors = NO_VECTORS
    packed: Packed | None = None

    def anchor(self, base: Vector, fresh: FreshModels) -> Vector:
        """Where the step starts: the base, with every merge applied to it: ``a <- (1 - beta) a + beta w_g``.

        ``w_i - a`` is what training produced and the merges left of it. beta is clamped to [0, 1].
        """
        start = base
        for merge in self.merges:
            beta = min(max(float(merge.numbers.get("beta", 0.0)), 0.0), 1.0)
            start = start if beta == 0.0 else mix(start, fresh[merge.version], beta)
        return start

    @property
    def nbytes(self) -> int:
        return message_bytes(self.weights, self.vectors, self.packed)
