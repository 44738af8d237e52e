"""Records as lines of JSON: floats read back to the same bits, and what JSON cannot hold becomes null."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from freshet.core.events import Record


def plain(value: Any) -> Any:
    """What JSON can hold: a number that is not finite becomes null."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def line(record: Record) -> bytes:
    """One line of a log; floats read back to the same bits, and one that is not finite becomes null."""
    try:
        return orjson.dumps(record, _simple, orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # whole numbers beyond 64 bits, texts that are no Unicode
        return (json.dumps(plain(record), allow_nan=False) + "\n").encode()


def _simple(value: Any) -> Any:
    """What the library does not know by itself."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    raise TypeError
