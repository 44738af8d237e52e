"""A run directory as plain data for a report, also while it is being written or after it was killed.

Nothing in it is trusted: a line that is damaged ends the reading of that file with a note, a value of the wrong type
counts as missing. Nothing here raises for a bad value inside a run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freshet.core.about import Curve
from freshet.errors import RunError
from freshet.methods import builtin_about
from freshet.report.discovery import Places, find
from freshet.report.log import Log, Seen
from freshet.runs.reader import ENDED, RunDirectory
from freshet.runs.records import Metric, metric_of, number, parse_line, integer
from freshet.runs.segments import LIVE
from freshet.runs.world import RunWorld, read_world

Record = dict[str, Any]
NO_WORLD = "there is no world.json; the devices' speeds, the legs of their trips and their data are not shown"


@dataclass
class RunData:
    """What a report knows of one run."""

    name: str
    status: str
    config: dict[str, Record]
    summary: Record
    metrics: list[Record]
    events: Log
    notes: list[str] = field(default_factory=list)
    #: Fleet and data, where the run directory has them.
    world: RunWorld | None = None

    @property
    def curves(self) -> Sequence[Curve]:
        """Numbers of the events that the method wants drawn; of a built-in one it is known without world.json."""
        about = builtin_about(self.method) if self.world is None else None
        return self.world.curves if self.world else about.curves if about else ()

    @property
    def metric(self) -> Metric:
        """What the run is judged by."""
        return metric_of(self.summary) if self.world is None else Metric(self.world.metric, self.world.direction)

    @property
    def finished(self) -> bool:
        """Whether the run has ended and counts. One that diverged does: leaving it out would flatter its method."""
        return self.status in ENDED

    @property
    def diverged(self) -> float | None:
        """When the model diverged, in seconds of virtual time; None if it did not."""
        return number(self.summary.get("diverged"))

    @property
    def method(self) -> str:
        named = self.config.get("method", {}).get("name", self.summary.get("method"))
        return str(named) if named is not None else "unknown"

    @property
    def seed(self) -> int | None:
        return integer(self.config.get("run", {}).get("seed", self.summary.get("seed")))

    @property
    def devices(self) -> int:
        """Devices of the fleet, or as many as the log names."""
        count = integer(self.config.get("fleet", {}).get("devices"))
        if count is not None and 0 < count <= 1_000_000:
            return count
        return self.events.devices

    @property
    def end(self) -> float:
        """Seconds to which the log reaches."""
        tested = number(self.metrics[-1].get("time")) if self.metrics else None
        return max(self.events.end, tested or 0.0)

    def setting(self, section: str, key: str) -> float | None:
        """A number of the config, or None."""
        return number(self.config.get(section, {}).get(key))

    def column(self, key: str) -> list[float | None]:
        """One column of the metrics; None where a number is missing."""
        return [number(row.get(key)) for row in self.metrics]


class Tail:
    """Reads a JSON-lines file as it grows: each call of ``read`` parses only what is new and complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Record] = []
        self.note: str | None = None
        self._offset = 0
        self._line = 0

    def read(self) -> bool:
        """Take in what has been added; True when there was something. A file that was cut back is read again."""
        try:
            size = self.path.stat().st_size
        except OSError:
            size = 0
        if size < self._offset:
            self.rows, self.note, self._offset, self._line = [], None, 0, 0
        if size == self._offset or self.note is not None:
            return False
        with self.path.open("rb") as file:
            file.seek(self._offset)
            content = file.read()
        complete = content.rfind(b"\n") + 1
        for line in content[:complete].splitlines():
            self._line += 1
            row = parse_line(line)
            if row is None:
                self.note = f"{self.path.name} is damaged at line {self._line}; what follows is not shown"
                break
            self.rows.append(row)
        self._offset += complete
        return complete > 0


class Reader:
    """Reads one run directory, once or again and again while the run goes."""

    def __init__(self, directory: str | Path) -> None:
        self.run = RunDirectory(directory)
        self.config = {key: value for key, value in self.run.config().items() if isinstance(value, dict)}
        self.events = Log(self.run.directory / LIVE)
        self._metrics = Tail(self.run.directory / "metrics.jsonl")
        self._summary: Record = {}
        self._world: RunWorld | None = None
        self._missing: str | None = NO_WORLD

    def refresh(self, seen: Seen = lambda count: None) -> bool:
        """Read what is new; True when something was."""
        grown = [self.events.read(seen), self._metrics.read(), self._read_world()]
        summary = self._read_summary()
        changed = any(grown) or summary != self._summary
        self._summary = summary
        return changed

    def _read_world(self) -> bool:
        """Fleet and data, once they are there; True when they came now."""
        if self._world is not None:
            return False
        try:
            self._world = read_world(self.run.directory)
            self._missing = None if self._world else NO_WORLD
        except RunError as problem:
            self._missing = str(problem)
        return self._world is not None

    def _read_summary(self) -> Record:
        try:
            return self.run.summary()
        except (RunError, OSError):
            return {}

    def glance(self, note: str) -> RunData:
        """What is known without the events."""
        self._metrics.read()
        self._read_world()
        self._summary = self._read_summary()
        return self.data(Log(), note)

    def data(self, events: Log | None = None, note: str | None = None) -> RunData:
        """What is known now."""
        events = self.events if events is None else events
        status = self._summary.get("status")
        status = status if isinstance(status, str) else "unfinished"
        notes = [note for note in (note, events.note, self._metrics.note, self._missing) if note]
        name = self.run.directory.name or str(self.run.directory.resolve().name)
        rows = _with_tests(_ordered(self._metrics.rows), events)
        return RunData(name, status, self.config, self._summary, rows, events, notes, self._world)


def _with_tests(rows: list[Record], events: Log) -> list[Record]:
    """Metrics, and the tests that the events know already: of a run that goes on, the two files lag differently."""
    last = float(rows[-1]["time"]) if rows else -1.0
    later = (event for event in _ordered(events.tests) if float(event["time"]) > last)
    return rows + [{key: value for key, value in event.items() if key not in ("seq", "kind")} for event in later]


def _ordered(rows: Iterable[Record]) -> list[Record]:
    """Rows with a time, in the order of their times (they are, unless somebody edited the file)."""
    timed = [row for row in rows if number(row.get("time")) is not None]
    return sorted(timed, key=lambda row: float(row["time"]))


def read(directory: str | Path, seen: Seen = lambda count: None) -> RunData:
    """Everything in a run directory."""
    reader = Reader(directory)
    reader.refresh(seen)
    return reader.data()


def read_all(directories: Places, seen: Seen = lambda count: None) -> list[RunData]:
    """Runs, or those in a folder, each once however often it is named; equal names are told apart by their parents."""
    paths = list({path.resolve(): path for path in find(directories).runs}.values())
    runs = [read(path, seen) for path in paths]
    names = [run.name for run in runs]
    for run, path in zip(runs, paths, strict=True):
        if names.count(run.name) > 1:
            run.name = f"{path.resolve().parent.name}/{run.name}"
    return runs
