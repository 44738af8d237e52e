"""The records of a log as lines of JSON, and what they say: numbers, contributors of an aggregation, metrics.

Audits, reports, tables and statistics all read records through these functions, so they agree.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from freshet.core.events import Record


def _is_numpy_scalar(value: Any) -> bool:
    """Whether a value is numpy's. Where numpy was never loaded, none is."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def json_safe(value: Any) -> Any:
    """A value that JSON can hold: a number that is not finite becomes null."""
    if _is_numpy_scalar(value):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: json_safe(item) for key, item in value.items()}
    return [json_safe(item) for item in value] if isinstance(value, list | tuple) else value


def format_line(record: Record) -> bytes:
    """A record as a line of a log. Floats read back to the same bits; one that is not finite becomes null."""
    try:
        return orjson.dumps(record, _simple, orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # integers beyond 64 bits, texts that are not Unicode
        return (json.dumps(json_safe(record), allow_nan=False) + "\n").encode()


def _simple(value: Any) -> Any:
    """Convert the types that orjson does not know."""
    if _is_numpy_scalar(value):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    raise TypeError


Maybe = float | None


def parse_line(line: bytes) -> dict[str, Any] | None:
    """A line of a log as a record, or None if it is not a JSON object.

    The json module reads some lines that orjson rejects, such as one with an integer of a hundred digits.
    """
    try:
        value = orjson.loads(line)
    except ValueError:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if type(value) is float:  # the common case
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def integer(value: Any) -> int | None:
    """An integer below 2^53 in size, or None."""
    return value if type(value) is int and -(2**53) < value < 2**53 else None


class Contributor(NamedTuple):
    """An upload in an aggregation. A value that is missing or of the wrong type is None."""

    device: int | None
    base: int | None
    staleness: int | None
    #: Share of the step from the old model to the new: alpha, or alpha * weight / (sum of the weights).
    weight: float | None


def contributors(event: Mapping[str, Any]) -> list[Contributor]:
    """The uploads in a logged aggregation, one or many. All readers of contributions use this function."""
    logged = event.get("contributions")
    parts = [part for part in logged if isinstance(part, Mapping)] if isinstance(logged, list) else []
    alpha, shares = number(event.get("alpha")), [number(part.get("weight")) for part in parts]
    total = sum(share for share in shares if share is not None)
    if alpha is not None and total > 0:
        shares = [
            None if share is None else alpha * (share / total) for share in shares
        ]  # exactly alpha for one upload
    return [
        Contributor(integer(part.get("device")), integer(part.get("base")), integer(part.get("staleness")), share)
        for part, share in zip(parts, shares, strict=True)
    ]


class Metric(NamedTuple):
    """What a run is judged by: the name of its task's first metric, and whether "max" or "min" is better."""

    name: str = "accuracy"
    direction: str = "max"

    def of(self, row: Mapping[str, Any]) -> Maybe:
        """Its value in a row of metrics; None if that is not a finite number."""
        return number(row.get(self.name))

    def best(self, values: Sequence[Maybe]) -> Maybe:
        """The best of some values, or None."""
        numbers = [value for value in values if value is not None]
        return (max if self.direction == "max" else min)(numbers) if numbers else None

    def reaches(self, value: Maybe, target: float) -> bool:
        """Whether a value is at least as good as the target."""
        return value is not None and (value >= target if self.direction == "max" else value <= target)


ACCURACY = Metric()


def metric_of(found: Mapping[str, Any]) -> Metric:
    """The metric that a summary, a world.json or a row of metrics names; accuracy if it names none."""
    name, direction = found.get("metric"), found.get("direction")
    return Metric(name if isinstance(name, str) else "accuracy", "min" if direction == "min" else "max")


def first_crossing(
    times: Sequence[float], values: Sequence[Maybe], target: float | None, metric: Metric = ACCURACY
) -> Maybe:
    """First time with a value that reaches the target, or None."""
    if target is None:
        return None
    return next((time for time, value in zip(times, values, strict=True) if metric.reaches(value, target)), None)
