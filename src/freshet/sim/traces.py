"""A fleet from a file: how fast each device trains, what its links carry and when it is there, as it was measured.

A trace has one row per device and change: what it says holds from its time until the device's next row. The columns
are in docs/fleets.md. The file comes from outside, so everything in it is checked and every size is bounded.

Public traces of phones as a ``Trace``: what each can compute and send, and when it is free to train.

Capacity: FedScale's ``client_device_capacity`` (Lai et al., ICML 2022), a dict by client of ``computation``, the
milliseconds that one sample takes forwards, and ``communication`` in kbit/s. As there, training takes three times the
forward pass, and a link is equally fast both ways.

Availability: FedScale's ``client_behave_trace``, a dict by client of the lists ``active`` and ``inactive`` in seconds
and of ``finish_time``, after which it begins anew; or the phone logs of FLASH (Yang et al., WWW 2021), a dict by user
with ``messages``, lines of a time and a state: a phone is free while it charges, has wifi and is not in use.

Files are JSON, or pickles that are read as plain data and never run.
"""

import csv
import json
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freshet.core.streams import stream
from freshet.data.plain_pickle import load_plain
from freshet.errors import ConfigError, DataError

Floats = NDArray[np.float64]

COLUMNS = ("device", "from", "seconds_per_sample", "up_mbps", "down_mbps", "available", "cycle")
LARGEST_FILE, MOST_ROWS, LONGEST_NAME = 1 << 30, 5_000_000, 200
#: The longest time and the largest figure that a cell may hold: 30,000 years of seconds.
LARGEST = 1e12
KEY = "fleet.trace"
_YES, _NO = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no")
_TRUTHS = dict.fromkeys(_YES, True) | dict.fromkeys(_NO, False)


class Row(NamedTuple):
    """From this time on these figures hold."""

    start: float
    seconds_per_sample: float
    up_mbps: float | None
    down_mbps: float | None
    available: bool


@dataclass(frozen=True)
class History:
    """The rows of one device, by time; with a cycle they begin anew after so many seconds."""

    rows: tuple[Row, ...]
    cycle: float = math.inf

    _starts: list[float] = field(init=False, repr=False)
    #: When the device goes away, within one cycle.
    _absences: list[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        absences = [row.start for row in self.rows if not row.available]
        if self.rows[0].start > 0 and self.cycle < math.inf:
            absences.insert(0, 0.0)
        object.__setattr__(self, "_starts", [row.start for row in self.rows])
        object.__setattr__(self, "_absences", absences)

    def at(self, time: float) -> Row | None:
        """What holds at this time; None before the first row, when the device is away."""
        place = bisect_right(self._starts, time % self.cycle) - 1
        return self.rows[place] if place >= 0 else None

    def figures(self, time: float) -> Row:
        """As ``at``, but before the first row the first row's figures hold."""
        return self.at(time) or self.rows[0]

    def available(self, time: float) -> bool:
        row = self.at(time)
        return row is not None and row.available

    def leaves(self, time: float) -> float:
        """When a device that is here now goes away; infinity if it never does."""
        within = time % self.cycle
        place = bisect_right(self._absences, within)
        if place < len(self._absences):
            leaves = time - within + self._absences[place]
        elif self._absences and self.cycle < math.inf:
            leaves = time - within + self.cycle + self._absences[0]
        else:
            return math.inf
        if self.available(leaves):  # the sum was rounded to just before the change
            leaves = math.nextafter(leaves, math.inf)
        return max(leaves, math.nextafter(time, math.inf))


@dataclass(frozen=True)
class Trace:
    """The histories of all devices of a file, in the order of their first rows."""

    names: tuple[str, ...]
    histories: tuple[History, ...]

    def __len__(self) -> int:
        return len(self.histories)

    def part(self, devices: int, seed: int) -> "Trace":
        """All devices, or so many drawn at random, which keep their order."""
        if devices > len(self):
            raise ConfigError("fleet.devices", f"is {devices}, but the trace has {len(self)} devices")
        if devices == len(self):
            return self
        chosen = np.sort(stream(seed, "trace").choice(len(self), devices, replace=False)).tolist()
        return Trace(tuple(self.names[k] for k in chosen), tuple(self.histories[k] for k in chosen))


def read_trace(path: str | Path) -> Trace:
    """The trace in a .csv or .json file; one sentence with the row and the column if something is wrong with it."""
    file = Path(path).expanduser()
    if file.suffix.lower() not in (".csv", ".json"):
        raise ConfigError(KEY, f"{file} must be a .csv or a .json file")
    try:
        facts = file.stat()
        if facts.st_size > LARGEST_FILE:
            raise ConfigError(KEY, f"{file} has more than {LARGEST_FILE:,} bytes; use fewer devices or rows")
        return _collect(file, facts.st_mtime_ns)
    except ConfigError:
        raise
    except FileNotFoundError:
        raise ConfigError(KEY, f"{file} does not exist") from None
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        raise ConfigError(KEY, f"{file} cannot be read ({str(error).splitlines()[0]})") from None


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace as .csv; ``read_trace`` gives it back."""
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for name, history in zip(trace.names, trace.histories, strict=True):
            cycle = "" if history.cycle == math.inf else repr(history.cycle)
            for row in history.rows:
                rates = ("" if rate is None else repr(rate) for rate in (row.up_mbps, row.down_mbps))
                writer.writerow(
                    (name, repr(row.start), repr(row.seconds_per_sample), *rates, int(row.available), cycle)
                )


def _csv_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each row with the words that name its place; an empty cell is one that is not there."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file)
        header = [name.strip() for name in next(lines, [])]
        _check_columns(path, header)
        for cells in lines:
            if not any(cell.strip() for cell in cells):
                continue
            where = f"{path}, line {lines.line_num}"
            if len(cells) != len(header):
                raise ConfigError(KEY, f"{where} has {len(cells)} cells, but there are {len(header)} columns")
            yield where, {name: cell.strip() for name, cell in zip(header, cells, strict=True) if cell.strip()}


def _check_columns(path: Path, header: list[str]) -> None:
    unknown = [name for name in header if name not in COLUMNS]
    if unknown or len(set(header)) < len(header):
        problem = f"the unknown column {unknown[0]!r}" if unknown else "a column twice"
        raise ConfigError(KEY, f"{path}, line 1 has {problem}; known: {', '.join(COLUMNS)}")
    for name in ("device", "seconds_per_sample"):
        if name not in header:
            raise ConfigError(KEY, f"{path}, line 1 lacks the column {name}")


def _json_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, list):
        raise ConfigError(KEY, f"{path} must hold a list of rows, but it holds a {type(content).__name__}")
    for number, row in enumerate(content, 1):
        where = f"{path}, row {number}"
        if not isinstance(row, dict):
            raise ConfigError(
                KEY, f"{where} must be an object with keys such as device, but {str(row)[:50]!r} is there"
            )
        if unknown := [key for key in row if key not in COLUMNS]:
            raise ConfigError(KEY, f"{where} has the unknown key {unknown[0][:50]!r}; known: {', '.join(COLUMNS)}")
        yield where, {key: value for key, value in row.items() if value is not None}


@lru_cache(maxsize=1)
def _collect(path: Path, changed: int) -> Trace:
    """The trace of a file that was last changed at that time; read once, asked for by configuration and federation."""
    rows = (_csv_rows if path.suffix.lower() == ".csv" else _json_rows)(path)
    found: dict[str, list[Row]] = {}
    cycles: dict[str, float] = {}
    for count, (where, cells) in enumerate(rows, 1):
        if count > MOST_ROWS:
            raise ConfigError(KEY, f"{path} has more than {MOST_ROWS:,} rows")
        name = _name(where, cells.get("device"))
        earlier = found.setdefault(name, [])
        if not earlier or "cycle" in cells:
            cycle = _number(where, "cycle", cells.get("cycle", math.inf), positive=True, endless=True)
            if cycles.setdefault(name, cycle) != cycle:
                raise ConfigError(
                    KEY, f"{where}, column cycle: device {name} has {cycles[name]:g} before, now {cycle:g}"
                )
        row = _row(where, cells, earlier[-1] if earlier else None)
        if earlier and row.start <= earlier[-1].start:
            raise ConfigError(
                KEY,
                f"{where}, column from: {row.start:g} is not after {earlier[-1].start:g}, device {name}'s row before",
            )
        if row.start >= cycles[name]:
            raise ConfigError(
                KEY, f"{where}, column from: {row.start:g} is not before the cycle's end {cycles[name]:g}"
            )
        earlier.append(row)
    if not found:
        raise ConfigError(KEY, f"{path} has no devices; there must be a row for each")
    histories = tuple(History(tuple(rows), cycles[name]) for name, rows in found.items())
    return Trace(tuple(found), histories)


def _name(where: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or not 0 < len(str(value)) <= LONGEST_NAME:
        raise ConfigError(KEY, f"{where}, column device: must be a name or number, but {str(value)[:50]!r} is there")
    return str(value)


def _row(where: str, cells: Mapping[str, Any], before: Row | None) -> Row:
    """A row; what it leaves out is as in the device's row before."""
    start = _number(where, "from", cells.get("from", 0.0))
    if "seconds_per_sample" not in cells and before is None:
        raise ConfigError(KEY, f"{where}, column seconds_per_sample: the first row of a device must have it")
    figures: dict[str, Any] = {}
    for name in ("seconds_per_sample", "up_mbps", "down_mbps"):
        figures[name] = getattr(before, name, None)
        if name in cells:
            figures[name] = _number(where, name, cells[name], positive=True)
    available = True if before is None else before.available
    return Row(start, available=_truth(where, cells["available"]) if "available" in cells else available, **figures)


def _number(where: str, column: str, value: Any, *, positive: bool = False, endless: bool = False) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if endless and number == math.inf:
        return number
    if not 0 <= number <= LARGEST or (positive and number < 1 / LARGEST):
        wanted = f"a number above 0 and at most {LARGEST:g}" if positive else f"a number in 0..{LARGEST:g}"
        raise ConfigError(KEY, f"{where}, column {column}: must be {wanted}, but {str(value)[:50]!r} is there")
    return number


def _truth(where: str, value: Any) -> bool:
    text = str(value).lower()
    if text not in _TRUTHS:
        raise ConfigError(KEY, f"{where}, column available: must be 1 or 0, but {text[:50]!r} is there")
    return _TRUTHS[text]


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
        seconds = _phone_number(where, entry, "computation") * TRAINING_OVER_INFERENCE / 1000.0
        mbps = _phone_number(where, entry, "communication") / 1000.0
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


def _phone_number(where: str, entry: Mapping[str, Any], key: str) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-9 <= value <= LARGEST:
        raise DataError(f"{where}: {key} must be a number above 0 and at most {LARGEST:g}, but is {str(value)[:50]!r}")
    return float(value)


def _times(path: Any, client: Any, entry: Mapping[str, Any]) -> tuple[Intervals, float]:
    """When a phone is free, and after how many seconds that begins anew."""
    where = f"{path}, client {client}"
    if "messages" in entry:
        return _logged(where, entry["messages"])
    cycle = _phone_number(where, entry, "finish_time")
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
