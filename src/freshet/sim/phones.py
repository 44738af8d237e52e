"""Public traces of phones as a ``Trace``: what each can compute and send, and when it is free to train.

Capacity: FedScale's ``client_device_capacity`` (Lai et al., ICML 2022), a dict by client of ``computation``, the
milliseconds that one sample takes forwards, and ``communication`` in kbit/s. As there, training takes three times the
forward pass, and a link is equally fast both ways.

Availability: FedScale's ``client_behave_trace``, a dict by client of the lists ``active`` and ``inactive`` in seconds
and of ``finish_time``, after which it begins anew; or the phone logs of FLASH (Yang et al., WWW 2021), a dict by user
with ``messages``, lines of a time and a state: a phone is free while it charges, has wifi and is not in use.

Files are JSON, or pickles that are read as plain data and never run.
"""

import json
import math
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from freshet.data.plain_pickle import load_plain
from freshet.errors import DataError
from freshet.traces import LARGEST, LARGEST_FILE, History, Row, Trace

#: Forward and backward pass over the forward pass alone, as FedScale counts.
TRAINING_OVER_INFERENCE = 3.0
Intervals = list[tuple[float, float]]
_DAY = timedelta(days=1)


def from_phones(capacity: str | Path, availability: str | Path | None = None, devices: int = 0) -> Trace:
    """A trace of the first ``devices`` clients (0: all); client k has the k-th availability, counted around."""
    speeds = _entries(Path(capacity))
    chosen = list(speeds.items())[: devices or None]
    if devices > len(chosen):
        raise DataError(f"{capacity} has {len(chosen)} clients, but {devices} were asked for")
    times = [_times(availability, *entry) for entry in _entries(Path(availability)).items()] if availability else []
    histories = []
    for number, (client, entry) in enumerate(chosen):
        where = f"{capacity}, client {client}"
        seconds = _number(where, entry, "computation") * TRAINING_OVER_INFERENCE / 1000.0
        mbps = _number(where, entry, "communication") / 1000.0
        rows = ((0.0, True),) if not times else _switches(*times[number % len(times)])
        cycle = times[number % len(times)][1] if times else math.inf
        histories.append(History(tuple(Row(start, seconds, mbps, mbps, on) for start, on in rows), cycle))
    return Trace(tuple(str(client) for client, _ in chosen), tuple(histories))


def _entries(path: Path) -> Mapping[Any, Mapping[str, Any]]:
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise DataError(f"{path} has more than {LARGEST_FILE:,} bytes; it is refused")
        content = path.read_bytes()
        found = json.loads(content) if content.lstrip()[:1] in (b"{", b"[") else load_plain(content)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(found, dict) or not found or not all(isinstance(entry, dict) for entry in found.values()):
        raise DataError(f"{path} must hold a dict of clients, each a dict of its figures")
    return found


def _number(where: str, entry: Mapping[str, Any], key: str) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-9 <= value <= LARGEST:
        raise DataError(f"{where}: {key} must be a number above 0 and at most {LARGEST:g}, but is {str(value)[:50]!r}")
    return float(value)


def _times(path: Any, client: Any, entry: Mapping[str, Any]) -> tuple[Intervals, float]:
    """When a phone is free, and after how many seconds that begins anew."""
    where = f"{path}, client {client}"
    if "messages" in entry:
        return _logged(where, entry["messages"])
    cycle = _number(where, entry, "finish_time")
    active, inactive = entry.get("active"), entry.get("inactive")
    for key, values in (("active", active), ("inactive", inactive)):
        if not isinstance(values, list) or not all(_is_time(value) for value in values):
            raise DataError(f"{where}: {key} must be a list of seconds from 0")
    if len(active) != len(inactive):  # type: ignore[arg-type]
        raise DataError(f"{where}: active and inactive must be equally long")
    return list(zip(active, inactive, strict=True)), cycle  # type: ignore[arg-type]


def _is_time(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value <= LARGEST


def _logged(where: str, messages: Any) -> tuple[Intervals, float]:
    """From a phone's log; time 0 is the midnight before its first line, and whole days are repeated."""
    if not isinstance(messages, str):
        raise DataError(f"{where}: messages must be lines of text")
    start: datetime | None = None
    moment, since = 0.0, None
    state = {"charging": False, "wifi": False, "idle": False}
    free: Intervals = []
    for time, word in _lines(where, messages):
        if start is None:
            start = time.replace(hour=0, minute=0, second=0)
        if (time - start).total_seconds() < moment:
            raise DataError(f"{where}: {time} comes after a later time in the messages")
        moment = (time - start).total_seconds()
        _change(state, word)
        if all(state.values()) and since is None:
            since = moment
        elif not all(state.values()) and since is not None:
            free.append((since, moment))
            since = None
    if start is None:
        raise DataError(f"{where}: messages are empty")
    if since is not None:
        free.append((since, moment))
    return free, math.ceil((moment + 1.0) / _DAY.total_seconds()) * _DAY.total_seconds()


def _lines(where: str, messages: str) -> Iterator[tuple[datetime, str]]:
    for line in filter(None, (line.strip() for line in messages.splitlines())):
        time, _, word = line.partition("\t")
        try:
            yield datetime.strptime(time.strip(), "%Y-%m-%d %H:%M:%S"), word.strip().lower()
        except ValueError:
            raise DataError(f"{where}: {line[:60]!r} is not a time, a tab and a state") from None


def _change(state: dict[str, bool], word: str) -> None:
    """What a line of the log changes; battery levels and the like change nothing here."""
    if word in ("battery_charged_on", "battery_charged_off"):
        state["charging"] = word.endswith("on")
    elif word in ("screen_on", "screen_unlock", "screen_off", "screen_lock"):
        state["idle"] = word in ("screen_off", "screen_lock")
    elif word in ("wifi", "2g", "3g", "4g", "5g", "unknown"):
        state["wifi"] = word == "wifi"
    elif word == "phone_off":
        state.update(charging=False, wifi=False, idle=False)


def _switches(intervals: Intervals, cycle: float) -> tuple[tuple[float, bool], ...]:
    """Times at which a phone comes and goes within a cycle; intervals may overlap or reach beyond it."""
    merged: list[list[float]] = []
    for start, end in sorted((float(start), min(float(end), cycle)) for start, end in intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    rows: list[tuple[float, bool]] = [] if merged and merged[0][0] == 0.0 else [(0.0, False)]
    for start, end in merged:
        rows += [(start, True), (end, False)] if end < cycle else [(start, True)]
    return tuple(rows)
