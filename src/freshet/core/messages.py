"""What server and devices say to each other. Plain data that never change: they can be logged, saved and sent."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from freshet.core.vectors import Vector

Number = float | int
#: Bytes of a message without a model: a request for the fresh model, or the answer "nothing newer".
CONTROL_BYTES = 64
#: No instruction, or no report.
NOTHING: Mapping[str, Number] = MappingProxyType({})


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


class Fresh(NamedTuple):
    """Server to device, in the middle of a trip: the model is now this one."""

    version: int
    age: int
    weights: Vector


class Upload(NamedTuple):
    """Device to server: the trained model, the SGD steps it took, and what the device's rule reports."""

    device: int
    trip: int
    base: int
    weights: Vector
    steps: int
    report: Mapping[str, Number] = NOTHING
