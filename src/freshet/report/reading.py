"""Find runs and read them as plain data for a report, also while a run is going or after it was killed.

Every run directory and every kept run is read through ``RunDirectory``. Nothing in a run is trusted: reading a file
ends at a damaged line with a note, and a value of the wrong type counts as missing. A bad value inside a run never
raises.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from freshet.core.about import Curve
from freshet.errors import RunError
from freshet.methods import builtin_about
from freshet.runs.kept_runs import RUNS, open_run, runs_below
from freshet.runs.reader import ENDED, EVENTS, OnBytes, RunDirectory, ignore_bytes, is_run
from freshet.runs.records import Metric, contributors, integer, metric_of, number, parse_line
from freshet.runs.segments import DamagedSegment
from freshet.runs.world import RunWorld

Record = dict[str, Any]
#: A place where runs may be, or several: run directories, or folders that contain some.
Places = str | Path | Iterable[str | Path]
#: Depth of the search for runs below a folder. ``runs / compare / runs / KEY`` has depth 3.
MAX_DEPTH = 4
#: A log with times out of order (somebody edited it) is sorted in memory if it has at most this many bytes.
MAX_SORTED_BYTES = 1 << 25
#: A progress bar is updated after this many bytes.
PROGRESS_BYTES = 1 << 18
NO_WORLD = "there is no world.json; the devices' speeds, the legs of their trips and their data are not shown"


# ---- finding runs


class Discovery(NamedTuple):
    """Run directories, and JSON files that may hold the results of a grid or of a tuning."""

    runs: list[Path]
    results: list[Path]


def find(places: Places) -> Discovery:
    """Find the runs in some places, and the files that ``compare``, ``tune`` and ``paper`` write around them.

    A place that does not exist is returned as a run, so that its reader reports it.
    """
    runs: list[Path] = []
    results: list[Path] = []
    for place in _paths(places):
        kept = runs_below(place, MAX_DEPTH)
        if is_run(place) or not (place.is_dir() or kept):
            runs.append(place)
            continue
        folders = list(_folders_below(place, MAX_DEPTH)) if place.is_dir() else []
        deeper = [path for folder in folders[1:] for path in _kept_in(folder, place)]
        inside = sorted({*(folder for folder in folders if is_run(folder)), *kept, *deeper})
        files = [path for folder in folders if not is_run(folder) for path in sorted(folder.glob("*.json"))]
        if not inside and not files:
            raise RunError(f"{place} holds no run and no results; name a run directory or a folder with some")
        runs += inside
        results += files
    return Discovery(runs, results)


def _kept_in(folder: Path, place: Path) -> list[Path]:
    """The kept runs of a folder below a place, as deep below the place as run directories are looked for."""
    depth = MAX_DEPTH - len(folder.relative_to(place).parts)
    return runs_below(folder, depth) if (folder / RUNS).is_file() else []


def runs_to(purpose: str, places: Places) -> list[Path]:
    """The runs in some places; raises if they contain only results."""
    runs = find(places).runs
    if not runs:
        raise RunError(f"there is no run to {purpose}, only results; name a folder with run directories")
    return runs


def _paths(places: Places) -> list[Path]:
    return [Path(place) for place in ([places] if isinstance(places, str | Path) else places)]


def _folders_below(folder: Path, depth: int) -> Iterator[Path]:
    """The folder and those in it, without the insides of runs, hidden folders and links."""
    yield folder
    if depth and not is_run(folder):
        for inside in sorted(folder.iterdir()):
            if inside.is_dir() and not inside.is_symlink() and not inside.name.startswith("."):
                yield from _folders_below(inside, depth - 1)


# ---- events


class Log:
    """The events of a run. They may not fit into memory, so they are read line by line, each time they are needed.

    What every report needs (last time, number of devices, events by kind) is counted once, by ``read``. Without a run
    directory the log is empty.
    """

    def __init__(self, run: RunDirectory | None = None) -> None:
        self._run = run
        self._on_bytes: OnBytes = ignore_bytes
        self._reset()

    def _reset(self) -> None:
        #: Why reading stopped, if the log is damaged.
        self.note: str | None = None
        self.kinds: Counter[str] = Counter()
        #: Time of the last event, and one more than the largest device.
        self.end, self.devices = 0.0, 0
        #: Tests of the model.
        self.tests: list[Record] = []
        #: Number of aggregated uploads by staleness.
        self.stalenesses: Counter[int] = Counter()
        self._offset, self._line, self._ordered = 0, 0, True

    def __len__(self) -> int:
        return self.kinds.total()

    @property
    def unread(self) -> int:
        """Bytes that were added since the last ``read``."""
        try:
            return 0 if self._run is None else self._run.log_size() - self._offset
        except OSError:
            return 0
        except DamagedSegment:
            return 1  # ``read`` reports it

    def read(self, on_bytes: OnBytes = ignore_bytes) -> bool:
        """Read the new, complete lines; True if there were any. A log that was truncated is read again from the start.

        ``on_bytes`` gets the bytes of each line, now and whenever the log is read again.
        """
        self._on_bytes = on_bytes
        if self.unread < 0:
            self._reset()
        if self._run is None or self.unread == 0 or self.note is not None:
            return False
        before = self._offset
        try:
            self._read_new(self._run, on_bytes)
        except DamagedSegment as problem:
            self.note = f"{problem}; what follows is not shown"
        return self._offset > before or self.note is not None

    def _read_new(self, run: RunDirectory, on_bytes: OnBytes) -> None:
        for line in run.log_lines(self._offset):
            if not line.endswith(b"\n"):
                return
            self._line += 1
            row = parse_line(line)
            if row is None:
                self.note = f"{EVENTS} is damaged at line {self._line}; what follows is not shown"
                return
            self._offset += len(line)
            self._count(row)
            on_bytes(len(line))

    def _count(self, row: Record) -> None:
        time, device = number(row.get("time")), integer(row.get("device"))
        if time is None:
            return
        self._ordered &= time >= self.end
        self.end = max(self.end, time)
        self.kinds[str(row.get("kind"))] += 1
        self.devices = max(self.devices, -1 if device is None else device + 1)
        kind = row.get("kind")
        if kind == "aggregate":
            self.stalenesses.update(each.staleness for each in contributors(row) if each.staleness is not None)
        elif kind == "evaluate":
            self.tests.append(row)

    def __iter__(self) -> Iterator[Record]:
        return self.of()

    def of(self, *kinds: str) -> Iterator[Record]:
        """The events of these kinds (default: all) that have a time, in order."""
        found = self._of(*kinds) if self.note is None else self._until_damage(*kinds)
        if not self._ordered and self._offset <= MAX_SORTED_BYTES:
            return iter(sorted(found, key=lambda row: float(row["time"])))
        return found

    def _until_damage(self, *kinds: str) -> Iterator[Record]:
        """The same for a damaged log; ``note`` reports the damage."""
        with suppress(DamagedSegment):
            yield from self._of(*kinds)

    def _of(self, *kinds: str) -> Iterator[Record]:
        if self._run is None or not self._offset or (kinds and self.kinds.keys().isdisjoint(kinds)):
            return
        names = re.compile("|".join(f'"{re.escape(kind)}"' for kind in kinds).encode())
        left, reported = self._offset, self._offset
        for line in self._run.log_lines():
            left -= len(line)
            if reported - left >= PROGRESS_BYTES or left <= 0:
                self._on_bytes(reported - left)
                reported = left
            if names.search(line):
                row = parse_line(line)
                if row is not None and number(row.get("time")) is not None and (not kinds or row.get("kind") in kinds):
                    yield row
            if left <= 0:
                return


# ---- runs


@dataclass
class RunData:
    """What a report knows about one run."""

    name: str
    status: str
    config: dict[str, Record]
    summary: Record
    metrics: list[Record]
    events: Log
    notes: list[str] = field(default_factory=list)
    #: Fleet and data, if the run directory has them.
    world: RunWorld | None = None
    #: Whether its times are those of a simulation, not of real devices.
    virtual: bool = True

    @property
    def curves(self) -> Sequence[Curve]:
        """Numbers of the events that the method wants drawn. Without world.json, those of a built-in method."""
        about = builtin_about(self.method) if self.world is None else None
        return self.world.curves if self.world else about.curves if about else ()

    @property
    def metric(self) -> Metric:
        """What the run is judged by."""
        return metric_of(self.summary) if self.world is None else Metric(self.world.metric, self.world.direction)

    @property
    def finished(self) -> bool:
        """Whether the run has ended and counts. A diverged run counts: leaving it out would flatter its method."""
        return self.status in ENDED

    @property
    def diverged_at(self) -> float | None:
        """When the model diverged, in seconds of virtual time; None if it did not."""
        return number(self.summary.get("diverged"))

    @property
    def method(self) -> str:
        name = self.config.get("method", {}).get("name", self.summary.get("method"))
        return str(name) if name is not None else "unknown"

    @property
    def seed(self) -> int | None:
        return integer(self.config.get("run", {}).get("seed", self.summary.get("seed")))

    @property
    def devices(self) -> int:
        """Number of devices in the fleet; without that setting, the number that the log names."""
        count = integer(self.config.get("fleet", {}).get("devices"))
        if count is not None and 0 < count <= 1_000_000:
            return count
        return self.events.devices

    @property
    def end(self) -> float:
        """Time of the last event or test, in seconds."""
        tested = number(self.metrics[-1].get("time")) if self.metrics else None
        return max(self.events.end, tested or 0.0)

    def setting(self, section: str, key: str) -> float | None:
        """A number of the config, or None."""
        return number(self.config.get(section, {}).get(key))

    def column(self, key: str) -> list[float | None]:
        """One column of the metrics; None for a missing number."""
        return [number(row.get(key)) for row in self.metrics]


class RunFollower:
    """Reads one run directory, once or repeatedly while the run is going."""

    def __init__(self, directory: str | Path) -> None:
        self.run = open_run(directory)
        self.config = self.run.config()
        self.events = Log(self.run)
        self._metrics = self.run.follow_metrics()
        self._summary: Record = {}
        self._world: RunWorld | None = None
        self._world_note: str | None = NO_WORLD

    def refresh(self, on_bytes: OnBytes = ignore_bytes) -> bool:
        """Read what is new; True if anything changed."""
        grown = [self.events.read(on_bytes), self._metrics.read(), self._read_world()]
        summary = self._read_summary()
        changed = any(grown) or summary != self._summary
        self._summary = summary
        return changed

    def _read_world(self) -> bool:
        """Read fleet and data, if they are new; True if they are."""
        if self._world is not None:
            return False
        try:
            self._world = self.run.world()
            self._world_note = None if self._world else NO_WORLD
        except RunError as problem:
            self._world_note = str(problem)
        return self._world is not None

    def _read_summary(self) -> Record:
        try:
            return self.run.summary()
        except (RunError, OSError):
            return {}

    def without_events(self, note: str) -> RunData:
        """The run without its events, which may take long to read."""
        self._metrics.read()
        self._read_world()
        self._summary = self._read_summary()
        return self.data(Log(), note)

    def data(self, events: Log | None = None, note: str | None = None) -> RunData:
        """The run as it was at the last ``refresh``."""
        events = self.events if events is None else events
        status = self._summary.get("status")
        status = status if isinstance(status, str) else "unfinished"
        notes = [note for note in (note, events.note, self._metrics.note, self._world_note) if note]
        name = self.run.directory.name or str(self.run.directory.resolve().name)
        rows = _with_new_tests(_sort_by_time(self._metrics.rows), events)
        virtual = self._summary.get("real_time") is not True and not self.run.is_deployed()
        return RunData(name, status, self.config, self._summary, rows, events, notes, self._world, virtual)


def _with_new_tests(rows: list[Record], events: Log) -> list[Record]:
    """The metrics, and later tests from the events: while a run is going, either file may be behind the other."""
    last = float(rows[-1]["time"]) if rows else -1.0
    later = (event for event in _sort_by_time(events.tests) if float(event["time"]) > last)
    return rows + [{key: value for key, value in event.items() if key not in ("seq", "kind")} for event in later]


def _sort_by_time(rows: Iterable[Record]) -> list[Record]:
    """The rows that have a time, by time. They are in order unless somebody edited the file."""
    timed = [row for row in rows if number(row.get("time")) is not None]
    return sorted(timed, key=lambda row: float(row["time"]))


def clock_of(runs: Iterable[RunData]) -> str:
    """What the times of some runs are: ``virtual time``, or ``time`` if real devices made one of them."""
    return "virtual time" if all(run.virtual for run in runs) else "time"


def read(directory: str | Path, on_bytes: OnBytes = ignore_bytes) -> RunData:
    """Everything in a run directory."""
    follower = RunFollower(directory)
    follower.refresh(on_bytes)
    return follower.data()


def read_all(directories: Places, on_bytes: OnBytes = ignore_bytes) -> list[RunData]:
    """Read runs, or those in folders, each once. Runs with equal names also get the names of their parent folders."""
    paths = list({path.resolve(): path for path in find(directories).runs}.values())
    runs = [read(path, on_bytes) for path in paths]
    names = [run.name for run in runs]
    for run, path in zip(runs, paths, strict=True):
        if names.count(run.name) > 1:
            run.name = f"{path.resolve().parent.name}/{run.name}"
    return runs
