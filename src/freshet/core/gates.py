"""The gates: what an upload must be before anybody looks at what it says. A refusal is a reason, never an exception."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeGuard

import numpy as np

from freshet.core.events import OWN_KEYS, Aggregated, Contribution, Merged, Noted
from freshet.core.layout import Layout
from freshet.core.messages import Upload
from freshet.core.method import Aggregate
from freshet.core.saving import unsavable
from freshet.core.vectors import Vector, is_finite

FLOAT32 = np.dtype(np.float32)
_PARTS, _NOTES = frozenset({Contribution}), frozenset({Noted})
_AGGREGATED = OWN_KEYS[Aggregated]
_ROW, _NUMBER, _KNOWN = (list, tuple), (int, float), (dict, MappingProxyType)
_SIMPLE = frozenset({bool, int, float, str, type(None)})
NOT_FINITE = "has entries that are not finite"
#: A report is a handful of numbers with short names: they go into the log.
MOST_NUMBERS, LONGEST_NAME = 100, 100


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Whether it is a mapping; a dict, which it nearly always is, is known at a glance."""
    return type(value) is dict or isinstance(value, Mapping)


def is_empty(value: object) -> bool:
    """Whether it is a mapping known to hold nothing, as most messages have it beside their model."""
    return type(value) in _KNOWN and not value


def stranger(upload: object, device: int, trip: int, base: int, size: int) -> str | None:
    """Why something is not an upload of the trip that it came for, with a model of the right size that was trained from
    the version that its device was given, or None: it may be anything."""
    if not isinstance(upload, Upload):
        return "is not an upload"
    if not (type(upload.device) is type(upload.trip) is int and upload.device == device and upload.trip == trip):
        return "names another trip than the one that it came for"
    if type(upload.base) is not int or upload.base != base:
        return f"trained from version {upload.base!r:.40}, but was given {base}"
    return vector_problem("model", upload.weights, size, finite=False)


def problem(
    upload: Upload, fresh: int | None, layout: Layout, sends: tuple[str, ...], finite: bool = False
) -> str | None:
    """Why an upload that is no stranger may not touch the model, or None: its vectors must be finite and whole, and its
    numbers numbers. ``finite``: the model is known to be."""
    if not finite and not is_finite(upload.weights):
        return f"model {NOT_FINITE}"
    _, _, _, _, steps, report, merged, vectors, _ = upload
    plain = type(vectors) is dict and type(report) is dict and type(merged) is dict
    bare = plain and not (vectors or report or merged)  # as most are
    if sends or not (bare or is_empty(vectors)):
        found = _vectors_problem(vectors, layout, sends)
        if found is not None:
            return found
    if type(steps) is not int or not 1 <= steps < 2**53:
        return "no training step was taken, or more than anybody can"
    if bare:
        return None
    if not (are_numbers(report) and are_numbers(merged)):
        return "report has something that is not a finite number"
    taken = OWN_KEYS[Merged].intersection(merged)
    if taken:
        return f"reports a merge with {sorted(taken)}, which the event has of its own"
    return "reports a merge, but was sent no fresh model" if merged and fresh is None else None


def _vectors_problem(vectors: object, layout: Layout, sends: tuple[str, ...]) -> str | None:
    """Why what came beside the model is not what the device's rule sends, or None."""
    if not is_mapping(vectors) or vectors.keys() != set(sends):
        return f"must send the vectors {sorted(sends)} with its model, and no others"
    return next(filter(None, (vector_problem(name, vectors[name], layout.learnable) for name in sends)), None)


def vector_problem(name: str, vector: object, size: int, finite: bool = True) -> str | None:
    """Why something is not a whole vector of so many numbers, or None."""
    if not isinstance(vector, np.ndarray):
        return f"{name} is not an array"
    if vector.dtype != FLOAT32 or vector.shape != (size,):
        given = "" if vector.dtype == FLOAT32 else f", not of {vector.dtype}"
        return f"{name} has shape {vector.shape}, expected ({size},) of float32{given}"
    flags = vector.flags
    if not (flags.c_contiguous and flags.aligned):
        return f"{name} is not contiguous in memory"
    return f"{name} {NOT_FINITE}" if finite and not is_finite(vector) else None


def aggregate_problem(given: Aggregate, size: int) -> str | None:
    """What is wrong with a method's answer, or None; its author may have misread the contract."""
    weights, contributions, numbers, length, notes = given
    problem = vector_problem("weights", weights, size, finite=False)
    if problem is not None:
        return problem
    if not (isinstance(contributions, _ROW) and _PARTS.issuperset(map(type, contributions))):
        return "contributions are not all of freshet.core.events.Contribution"
    if not is_mapping(numbers) or (notes and not _NOTES.issuperset(map(type, notes))):
        return "numbers are not a dict, or whose notes are not of freshet.core.events.Noted"
    if not _AGGREGATED.isdisjoint(numbers):
        return f"numbers are named {sorted(_AGGREGATED.intersection(numbers))} like keys that the event has of its own"
    if not _SIMPLE.issuperset(map(type, numbers.values())):
        problem = unsavable(dict(numbers), "numbers", arrays=False)
        if problem is not None:
            return problem
    return None if length is None or isinstance(length, _NUMBER) else f"length is {length!r:.40}, not a number"


def are_numbers(report: object) -> bool:
    """Whether something from outside is a mapping of a few names to finite numbers."""
    if is_empty(report):
        return True
    if not is_mapping(report):
        return False
    try:
        return len(report) <= MOST_NUMBERS and all(
            type(name) is str and len(name) <= LONGEST_NAME and isinstance(value, _NUMBER) and math.isfinite(value)
            for name, value in report.items()
        )
    except OverflowError:  # a whole number beyond any float
        return False


def overflows(weights: Vector, update_norm: float) -> bool:
    """Whether a step of this length has led to numbers that are not finite.

    A finite float32 stays finite when less than 1e30 is added, so only longer steps have to be looked at.
    """
    return not update_norm < 1e30 and not (math.isfinite(update_norm) and is_finite(weights))
