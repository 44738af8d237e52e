"""What the lines of a log say: numbers that are there or not, who took part in an aggregation, when a target was met.

In one place, so that audits, reports, tables and statistics agree.

Records as lines of JSON: floats read back to the same bits, and what JSON cannot hold becomes null.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from freshet.core.events import Record


def json_safe(value: Any) -> Any:
    """What JSON can hold: a number that is not finite becomes null."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: json_safe(item) for key, item in value.items()}
    return [json_safe(item) for item in value] if isinstance(value, list | tuple) else value


def format_line(record: Record) -> bytes:
    """One line of a log; floats read back to the same bits, and one that is not finite becomes null."""
    try:
        return orjson.dumps(record, _simple, orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # whole numbers beyond 64 bits, texts that are no Unicode
        return (json.dumps(json_safe(record), allow_nan=False) + "\n").encode()


def _simple(value: Any) -> Any:
    """What the library does not know by itself."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    raise TypeError


Maybe = float | None


def parse_line(line: bytes) -> dict[str, Any] | None:
    """A line of a log, if it is one. What the quick reader refuses (a number of a hundred digits, say), the patient one
    may take."""
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
    if type(value) is float:  # nearly always
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def integer(value: Any) -> int | None:
    """A whole number of sensible size, or None."""
    return value if type(value) is int and -(2**53) < value < 2**53 else None


class Contributor(NamedTuple):
    """An upload in an aggregation; what the log does not say, or says in another type, is None."""

    device: int | None
    base: int | None
    staleness: int | None
    #: Its share of the step from the old model to the new: alpha, or alpha * weight / (sum of the weights).
    weight: float | None


def contributors(event: Mapping[str, Any]) -> list[Contributor]:
    """Who took part in a logged aggregation, be it one upload or many. Nobody else reads this from an event."""
    logged = event.get("contributions")
    parts = [part for part in logged if isinstance(part, Mapping)] if isinstance(logged, list) else []
    alpha, shares = number(event.get("alpha")), [number(part.get("weight")) for part in parts]
    total = sum(share for share in shares if share is not None)
    if alpha is not None and total > 0:
        shares = [None if share is None else alpha * (share / total) for share in shares]  # alpha itself if alone
    return [
        Contributor(integer(part.get("device")), integer(part.get("base")), integer(part.get("staleness")), share)
        for part, share in zip(parts, shares, strict=True)
    ]


class Metric(NamedTuple):
    """What a run is judged by: the name of its task's first metric, and whether more or less of it is better."""

    name: str = "accuracy"
    direction: str = "max"

    def of(self, row: Mapping[str, Any]) -> Maybe:
        """Its value in a row of metrics; None where that is not a finite number."""
        return number(row.get(self.name))

    def best(self, values: Sequence[Maybe]) -> Maybe:
        """The best of some values, if there is any."""
        there = [value for value in values if value is not None]
        return (max if self.direction == "max" else min)(there) if there else None

    def reaches(self, value: Maybe, target: float) -> bool:
        """Whether a value is as good as the target."""
        return value is not None and (value >= target if self.direction == "max" else value <= target)


ACCURACY = Metric()


def metric_of(found: Mapping[str, Any]) -> Metric:
    """The metric that a summary, a world.json or a row of metrics names; accuracy where none is named."""
    name, direction = found.get("metric"), found.get("direction")
    return Metric(name if isinstance(name, str) else "accuracy", "min" if direction == "min" else "max")


def first_crossing(
    times: Sequence[float], values: Sequence[Maybe], target: float | None, metric: Metric = ACCURACY
) -> Maybe:
    """First time with a value as good as the target; None without one."""
    if target is None:
        return None
    return next((time for time, value in zip(times, values, strict=True) if metric.reaches(value, target)), None)
