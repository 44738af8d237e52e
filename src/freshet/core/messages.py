"""What server and devices say to each other. Frozen plain data: it can be logged, saved, compared and sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from freshet.core.vectors import Vector

Number = float | int
#: Bytes of a message without a model: a request for the fresh model, or the answer "nothing newer".
CONTROL_BYTES = 64


@dataclass(frozen=True, slots=True)
class Assignment:
    """Server to device: train this model. ``age`` is what the formulas take the root of: version, or round."""

    device: int
    trip: int
    version: int
    age: int
    weights: Vector
    epochs: int
    lr: float
    instruction: Mapping[str, Number] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fresh:
    """Server to device, in the middle of a trip: the model is now this one."""

    version: int
    age: int
    weights: Vector


@dataclass(frozen=True, slots=True)
class Upload:
    """Device to server: the trained model, the SGD steps it took, and what the device's rule reports."""

    device: int
    trip: int
    base: int
    weights: Vector
    steps: int
    report: Mapping[str, Number] = field(default_factory=dict)
