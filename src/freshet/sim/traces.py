"""Fleets from files: measured speeds, links and availability of each device.

A trace has one row per device and change. A row holds from its time until the device's next row. docs/fleets.md lists
the columns. The file is untrusted: every cell is checked and every size is bounded.

``from_phones`` converts public traces of phones. Capacity is FedScale's ``client_device_capacity`` (Lai et al., ICML
2022): a dict by client of ``computation``, the milliseconds of one sample's forward pass, and ``communication`` in
kbit/s. As in FedScale, training takes three times the forward pass, and a link is equally fast both ways.

Availability is FedScale's ``client_behave_trace``: a dict by client of the lists ``active`` and ``inactive`` in seconds
and of ``finish_time``, after which it repeats. It may also be the phone logs of FLASH (Yang et al., WWW 2021): a dict
by user with ``messages``, lines of a time and a state. A phone is available while it charges, has wifi and is not in
use. Files are JSON, or pickles that are read as plain data and never executed.
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
MAX_FILE_BYTES, MAX_ROWS, MAX_NAME_LENGTH = 1 << 30, 5_000_000, 200
#: The largest time and figure in a cell: 30,000 years of seconds.
MAX_VALUE = 1e12
KEY = "fleet.trace"
_YES, _NO = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no")
_FLAGS = dict.fromkeys(_YES, True) | dict.fromkeys(_NO, False)


class Row(NamedTuple):
    """The figures of a device from ``start`` on."""

    start: float
    seconds_per_sample: float
    up_mbps: float | None
    down_mbps: float | None
    available: bool


@dataclass(frozen=True)
class History:
    """The rows of one device by time, which repeat after ``cycle`` seconds."""

    rows: tuple[Row, ...]
    cycle: float = math.inf

    _starts: list[float] = field(init=False, repr=False)
    #: When the device leaves, within one cycle.
    _absences: list[float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        absences = [row.start for row in self.rows if not row.available]
        if self.rows[0].start > 0 and self.cycle < math.inf:
            absences.insert(0, 0.0)
        object.__setattr__(self, "_starts", [row.start for row in self.rows])
        object.__setattr__(self, "_absences", absences)

    def row_at(self, time: float) -> Row | None:
        """Return the row at this time, or None before the first row, when the device is away."""
        place = bisect_right(self._starts, time % self.cycle) - 1
        return self.rows[place] if place >= 0 else None

    def figures_at(self, time: float) -> Row:
        """As ``row_at``, but with the first row's figures before the first row."""
        return self.row_at(time) or self.rows[0]

    def available(self, time: float) -> bool:
        row = self.row_at(time)
        return row is not None and row.available

    def leave_time(self, time: float) -> float:
        """Return when a device that is here at ``time`` leaves; infinity for never."""
        within = time % self.cycle
        place = bisect_right(self._absences, within)
        if place < len(self._absences):
            leaves = time - within + self._absences[place]
        elif self._absences and self.cycle < math.inf:
            leaves = time - within + self.cycle + self._absences[0]
        else:
            return math.inf
        if self.available(leaves):  # rounding put the sum just before the change
            leaves = math.nextafter(leaves, math.inf)
        return max(leaves, math.nextafter(time, math.inf))


@dataclass(frozen=True)
class Trace:
    """The histories of all devices of a file, in the order of their first rows."""

    names: tuple[str, ...]
    histories: tuple[History, ...]

    def __len__(self) -> int:
        return len(self.histories)

    def sample(self, devices: int, seed: int) -> "Trace":
        """Return a random sample of the devices, in their order."""
        if devices > len(self):
            raise ConfigError("fleet.devices", f"is {devices}, but the trace has {len(self)} devices")
        if devices == len(self):
            return self
        chosen = np.sort(stream(seed, "trace").choice(len(self), devices, replace=False)).tolist()
        return Trace(tuple(self.names[k] for k in chosen), tuple(self.histories[k] for k in chosen))


def read_trace(path: str | Path) -> Trace:
    """Read a trace from a .csv or .json file. An error names the row and the column."""
    file = Path(path).expanduser()
    if file.suffix.lower() not in (".csv", ".json"):
        raise ConfigError(KEY, f"{file} must be a .csv or a .json file")
    try:
        facts = file.stat()
        if facts.st_size > MAX_FILE_BYTES:
            raise ConfigError(KEY, f"{file} has more than {MAX_FILE_BYTES:,} bytes; use fewer devices or rows")
        return _read(file, facts.st_mtime_ns)
    except ConfigError:
        raise
    except FileNotFoundError:
        raise ConfigError(KEY, f"{file} does not exist") from None
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        raise ConfigError(KEY, f"{file} cannot be read ({str(error).splitlines()[0]})") from None


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace as .csv for ``read_trace``."""
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
    """Yield each row with its place in words. Empty cells are left out."""
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
def _read(path: Path, changed: int) -> Trace:
    """Read the trace of a file once per modification time: configuration and federation both need it."""
    rows = (_csv_rows if path.suffix.lower() == ".csv" else _json_rows)(path)
    rows_of: dict[str, list[Row]] = {}
    cycles: dict[str, float] = {}
    for count, (where, cells) in enumerate(rows, 1):
        if count > MAX_ROWS:
            raise ConfigError(KEY, f"{path} has more than {MAX_ROWS:,} rows")
        name = _parse_name(where, cells.get("device"))
        earlier = rows_of.setdefault(name, [])
        if not earlier or "cycle" in cells:
            cycle = _parse_number(where, "cycle", cells.get("cycle", math.inf), positive=True, infinite=True)
            if cycles.setdefault(name, cycle) != cycle:
                raise ConfigError(
                    KEY, f"{where}, column cycle: device {name} has {cycles[name]:g} before, now {cycle:g}"
                )
        row = _parse_row(where, cells, earlier[-1] if earlier else None)
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
    if not rows_of:
        raise ConfigError(KEY, f"{path} has no devices; add a row for each")
    histories = tuple(History(tuple(rows), cycles[name]) for name, rows in rows_of.items())
    return Trace(tuple(rows_of), histories)


def _parse_name(where: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or not 0 < len(str(value)) <= MAX_NAME_LENGTH:
        raise ConfigError(KEY, f"{where}, column device: must be a name or number, but {str(value)[:50]!r} is there")
    return str(value)


def _parse_row(where: str, cells: Mapping[str, Any], before: Row | None) -> Row:
    """Parse a row. A missing cell keeps the value of the device's row before."""
    start = _parse_number(where, "from", cells.get("from", 0.0))
    if "seconds_per_sample" not in cells and before is None:
        raise ConfigError(KEY, f"{where}, column seconds_per_sample: the first row of a device must have it")
    figures: dict[str, Any] = {}
    for name in ("seconds_per_sample", "up_mbps", "down_mbps"):
        figures[name] = getattr(before, name, None)
        if name in cells:
            figures[name] = _parse_number(where, name, cells[name], positive=True)
    available = True if before is None else before.available
    return Row(
        start, available=_parse_flag(where, cells["available"]) if "available" in cells else available, **figures
    )


def _parse_number(where: str, column: str, value: Any, *, positive: bool = False, infinite: bool = False) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if infinite and number == math.inf:
        return number
    if not 0 <= number <= MAX_VALUE or (positive and number < 1 / MAX_VALUE):
        required = f"a number above 0 and at most {MAX_VALUE:g}" if positive else f"a number in 0..{MAX_VALUE:g}"
        raise ConfigError(KEY, f"{where}, column {column}: must be {required}, but {str(value)[:50]!r} is there")
    return number


def _parse_flag(where: str, value: Any) -> bool:
    text = str(value).lower()
    if text not in _FLAGS:
        raise ConfigError(KEY, f"{where}, column available: must be 1 or 0, but {text[:50]!r} is there")
    return _FLAGS[text]


#: Forward and backward pass over the forward pass alone, as in FedScale.
TRAINING_OVER_INFERENCE = 3.0
Intervals = list[tuple[float, float]]
_DAY = timedelta(days=1)


def from_phones(capacity: str | Path, availability: str | Path | None = None, devices: int = 0) -> Trace:
    """Build a trace of the first ``devices`` clients (0: all). Client k gets availability k modulo their number."""
    speeds = _read_clients(Path(capacity))
    chosen = list(speeds.items())[: devices or None]
    if devices > len(chosen):
        raise DataError(f"{capacity} has {len(chosen)} clients, but {devices} were asked for")
    times = (
        [_phone_availability(availability, *entry) for entry in _read_clients(Path(availability)).items()]
        if availability
        else []
    )
    histories = []
    for number, (client, entry) in enumerate(chosen):
        where = f"{capacity}, client {client}"
        seconds = _phone_number(where, entry, "computation") * TRAINING_OVER_INFERENCE / 1000.0
        mbps = _phone_number(where, entry, "communication") / 1000.0
        rows = ((0.0, True),) if not times else _switches(*times[number % len(times)])
        cycle = times[number % len(times)][1] if times else math.inf
        histories.append(History(tuple(Row(start, seconds, mbps, mbps, on) for start, on in rows), cycle))
    return Trace(tuple(str(client) for client, _ in chosen), tuple(histories))


def _read_clients(path: Path) -> Mapping[Any, Mapping[str, Any]]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataError(f"{path} has more than {MAX_FILE_BYTES:,} bytes; use a smaller one")
        content = path.read_bytes()
        clients = json.loads(content) if content.lstrip()[:1] in (b"{", b"[") else load_plain(content)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(clients, dict) or not clients or not all(isinstance(each, dict) for each in clients.values()):
        raise DataError(f"{path} must hold a dict of clients, each a dict of its figures")
    return clients


def _phone_number(where: str, entry: Mapping[str, Any], key: str) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-9 <= value <= MAX_VALUE:
        raise DataError(
            f"{where}: {key} must be a number above 0 and at most {MAX_VALUE:g}, but is {str(value)[:50]!r}"
        )
    return float(value)


def _phone_availability(path: Any, client: Any, entry: Mapping[str, Any]) -> tuple[Intervals, float]:
    """Return when a phone is available, and after how many seconds this repeats."""
    where = f"{path}, client {client}"
    if "messages" in entry:
        return _parse_phone_log(where, entry["messages"])
    cycle = _phone_number(where, entry, "finish_time")
    active, inactive = entry.get("active"), entry.get("inactive")
    for key, values in (("active", active), ("inactive", inactive)):
        if not isinstance(values, list) or not all(_is_time(value) for value in values):
            raise DataError(f"{where}: {key} must be a list of seconds from 0")
    if len(active) != len(inactive):  # type: ignore[arg-type]
        raise DataError(f"{where}: active and inactive must be equally long")
    return list(zip(active, inactive, strict=True)), cycle  # type: ignore[arg-type]


def _is_time(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value <= MAX_VALUE


def _parse_phone_log(where: str, messages: Any) -> tuple[Intervals, float]:
    """Parse a phone's log. Time 0 is the midnight before its first line, and whole days repeat."""
    if not isinstance(messages, str):
        raise DataError(f"{where}: messages must be lines of text")
    start: datetime | None = None
    moment, since = 0.0, None
    state = {"charging": False, "wifi": False, "idle": False}
    free: Intervals = []
    for time, word in _log_lines(where, messages):
        if start is None:
            start = time.replace(hour=0, minute=0, second=0)
        if (time - start).total_seconds() < moment:
            raise DataError(f"{where}: {time} comes after a later time in the messages")
        moment = (time - start).total_seconds()
        _update_state(state, word)
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


def _log_lines(where: str, messages: str) -> Iterator[tuple[datetime, str]]:
    for line in filter(None, (line.strip() for line in messages.splitlines())):
        time, _, word = line.partition("\t")
        try:
            yield datetime.strptime(time.strip(), "%Y-%m-%d %H:%M:%S"), word.strip().lower()
        except ValueError:
            raise DataError(f"{where}: {line[:60]!r} is not a time, a tab and a state") from None


def _update_state(state: dict[str, bool], word: str) -> None:
    """Apply a line of the log. Battery levels and other words change nothing."""
    if word in ("battery_charged_on", "battery_charged_off"):
        state["charging"] = word.endswith("on")
    elif word in ("screen_on", "screen_unlock", "screen_off", "screen_lock"):
        state["idle"] = word in ("screen_off", "screen_lock")
    elif word in ("wifi", "2g", "3g", "4g", "5g", "unknown"):
        state["wifi"] = word == "wifi"
    elif word == "phone_off":
        state.update(charging=False, wifi=False, idle=False)


def _switches(intervals: Intervals, cycle: float) -> tuple[tuple[float, bool], ...]:
    """Return when a phone comes and goes within a cycle. Intervals may overlap or reach beyond it."""
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
