"""Writing a run directory: config.toml, events.jsonl, metrics.jsonl, summary.json, model.safetensors.

Events are written in the order in which they happened. Some numbers (a merge's losses, a test score) are computed
elsewhere and arrive later; such an event keeps its place in line until they are there.

Who watches a run.
"""

import hashlib
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import tomli_w
from numpy.typing import NDArray
from safetensors.numpy import save

from freshet.core import events
from freshet.core.events import NO_NUMBERS, Event, Record
from freshet.core.layout import Layout
from freshet.core.vectors import Vector
from freshet.errors import ConfigError, RunError, Stop
from freshet.files import open_own, read_regular, reason, write_atomically, writing
from freshet.runs import segments
from freshet.runs.lock import NAME as LOCK
from freshet.runs.lock import RunLock
from freshet.runs.records import ACCURACY, Metric, line, plain


class Observer:
    """Something that watches a run (a progress bar, a tracker). Override what you need.

    Any of it may raise ``freshet.Stop`` to end the run before its next event.
    """

    def on_event(self, event: Record) -> None:
        """An event has been written."""

    def on_metrics(self, row: Record) -> None:
        """The global model has been tested."""

    def on_message(self, message: str) -> None:
        """Something that a person should know."""

    def on_progress(self, time: float) -> None:
        """Virtual time has moved on."""

    def on_end(self, summary: Record) -> None:
        """The run is over."""


_CALLED = [name for name in vars(Observer) if name.startswith("on_")]


def checked(observers: Sequence[Observer]) -> list[Observer]:
    """These observers; raises one sentence unless each has all that a run calls."""
    if not hasattr(observers, "__iter__"):
        raise ConfigError("observers", f"must be a list, as in observers=[Mine()], but {_brief(observers)} was given")
    found = list(observers)
    for observer in found:
        if isinstance(observer, type):
            raise ConfigError("observers", f"{observer.__name__} is a class; give an object, {observer.__name__}()")
        lacks = [name for name in _CALLED if not callable(getattr(observer, name, None))]
        if lacks:
            problem = f"{_brief(observer)} has no {lacks[0]}; derive its class from freshet.Observer"
            raise ConfigError("observers", problem)
    return found


def _brief(value: object) -> str:
    return " ".join(repr(value).split())[:80]


_log = logging.getLogger(__name__)


class Pending(Protocol):
    """A result on its way."""

    def done(self) -> bool: ...

    def result(self) -> Any: ...


def default_directory(method: str, seed: int) -> Path:
    """``runs/<time>-<method>-seed<n>``, made now, with a number added if that is taken."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{method.rpartition('/')[2].replace(':', '.')}-seed{seed}"
    for number in range(10_000):
        path = Path("runs") / (stem if number == 0 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            problem = f"the folder runs/ cannot be written ({error.strerror}); give another with --out or out="
            raise ConfigError("run.out", problem) from None
        return path
    raise ConfigError("run.out", f"no free name like runs/{stem}; give one with --out")


def weights_sha256(weights: Vector) -> str:
    """The hash of a flat float32 vector, little-endian."""
    return hashlib.sha256(weights.astype("<f4", copy=False).tobytes()).hexdigest()


def to_safetensors(layout: Layout, weights: Vector, frozen: Mapping[str, NDArray[Any]] = NO_NUMBERS) -> bytes:
    """Named tensors of a flat vector, and those that are not in it.

    ``order`` tells how the former lay there: their names, and whether a kernel's channels came last.
    """
    order = json.dumps([[entry.name, entry.channels_last] for entry in layout.entries])
    tensors = {entry.name: np.ascontiguousarray(entry.array(weights)) for entry in layout.entries}
    return save(tensors | dict(frozen), metadata={"order": order})


def write_config(directory: Path, tables: Mapping[str, Any], note: str | None = None) -> None:
    """Put ``config.toml`` into a run directory, as a whole; a note becomes its first line."""
    heading = f"# {' '.join(note.split())}\n" if note else ""
    write_atomically(directory / "config.toml", (heading + tomli_w.dumps(tables)).encode())


class _Line(NamedTuple):
    """An event in line to be written."""

    record: Record
    pending: Pending | None
    fill: Callable[[Any], Record] | None
    row: Record | None


class RunWriter:
    """Appends events in order; the files of a run that is resumed are first cut back to where its checkpoint was."""

    def __init__(
        self,
        directory: Path,
        observers: Sequence[Observer] = (),
        resume: Record | None = None,
        lock: RunLock | None = None,
    ) -> None:
        self.directory, self.observers = directory, checked(observers)
        #: Nobody else writes here meanwhile; who resumes has locked the directory before looking at it.
        self.lock = lock or RunLock(directory)
        self.seq = 0
        #: A hash of the settings that decide the run, for its checkpoints.
        self.settings = ""
        #: Seconds of real time so far, for the metrics.
        self.elapsed: Callable[[], float] = lambda: 0.0
        self.metrics: list[Record] = []
        self._judged: Record = {}
        self._queue: deque[_Line] = deque()
        #: What was cut off when the run was resumed, in words.
        self.cuts: list[str] = []
        #: Why the run shall end before its time, once somebody has asked for it.
        self.stopped: str | None = None
        #: Bytes of the log after which it is rotated (0: never), and where in the whole log the live file begins.
        self.rotate_bytes, self._begins = 0, 0
        #: Where in the log the newest checkpoint is; no checkpoint that is kept lies before ``_sure``.
        self.saved_at: int | None = None
        self._sure = 0
        if resume is None:
            self._events, self._metrics = (self._open(directory / f"{n}.jsonl", 0) for n in ("events", "metrics"))
            return
        self.seq, self.saved_at = resume["seq"], resume["events"]
        with writing(directory / segments.LIVE, "nothing was cut off"):
            segments.mend(directory / segments.LIVE)
            self._begins = segments.begins(directory / segments.LIVE)
        self.metrics = self._kept(directory / "metrics.jsonl", resume["metrics"])
        places = {"events": resume["events"] - self._begins, "metrics": resume["metrics"]}
        self._events, self._metrics = (
            self._open(directory / f"{n}.jsonl", place, create=False) for n, place in places.items()
        )
        (directory / "summary.json").unlink(missing_ok=True)

    @staticmethod
    def _kept(path: Path, length: int) -> list[Record]:
        """The rows of metrics up to the checkpoint."""
        try:
            rows = [json.loads(line) for line in read_regular(path, 1 << 32)[:length].splitlines()]
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"{path} cannot be read ({error}); the run cannot be resumed") from None
        if not all(isinstance(row, dict) and {"time", "loss"} <= row.keys() for row in rows):
            raise RunError(f"{path} holds lines that are no metrics; the run cannot be resumed")
        return rows

    def _open(self, path: Path, length: int, *, create: bool = True) -> BinaryIO:
        """Open a log where its checkpoint left it (0: at its start); what came later is computed again."""
        with writing(path, "nothing was changed"):
            file = open_own(path, create=create)
        extra = os.fstat(file.fileno()).st_size - length
        if extra < 0:
            file.close()
            raise RunError(f"{path} is shorter than its checkpoint says; it cannot be resumed")
        if extra:
            file.seek(length)
            tail = file.read()
            partial = "" if tail.endswith(b"\n") else " (the last one incomplete)"
            lines = len(tail.splitlines())
            self.cuts.append(f"{path.name}: {lines} lines after the checkpoint{partial} cut off, to be written again")
            file.truncate(length)
        file.seek(length)
        return file

    def judge_by(self, metric: Metric) -> None:
        """What the run is judged by; rows of metrics say so where it is not the accuracy."""
        self._judged = {} if metric == ACCURACY else {"metric": metric.name, "direction": metric.direction}

    def say(self, message: str) -> None:
        """Tell those who watch; if nobody does, the log of the process."""
        if not self.observers:
            _log.warning(message)
        self._tell(lambda observer: observer.on_message(message))

    def progress(self, time: float) -> None:
        """Tell those who watch that time has moved on."""
        self._tell(lambda observer: observer.on_progress(time))

    def _tell(self, what: Callable[[Observer], None]) -> None:
        """Tell those who watch; one that raises ``Stop`` is heeded between two events, not in the midst of one."""
        for observer in self.observers:
            try:
                what(observer)
            except Stop as stop:
                self.stopped = self.stopped or str(stop) or "an observer asked for it"

    @staticmethod
    def create(
        directory: Path, config: Mapping[str, Any], observers: Sequence[Observer] = (), note: str | None = None
    ) -> "RunWriter":
        """Begin a new run directory; a note becomes the first line of its config.toml."""
        RunWriter.check(directory)
        observers = checked(observers)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = RunLock(directory)
            RunWriter.check(directory)  # now that nobody else can begin here
            write_config(directory, config, note)
            return RunWriter(directory, observers, lock=lock)
        except OSError as error:
            raise ConfigError("run.out", f"{directory} cannot be written ({reason(error)})") from None

    @staticmethod
    def check(directory: Path) -> None:
        """Raise unless the directory is empty or not there yet."""
        try:
            taken = directory.exists() and any(path.name != LOCK for path in directory.iterdir())
        except NotADirectoryError:
            raise ConfigError("run.out", f"{directory} is a file; choose a folder") from None
        except OSError as error:
            raise ConfigError("run.out", f"{directory} cannot be read ({error.strerror})") from None
        if taken:
            raise ConfigError("run.out", f"{directory} is not empty; choose another folder or remove it")

    def position(self) -> Record:
        """Where the log ends now, for a checkpoint; what no checkpoint can cut off any more is compressed first."""
        self.flush()
        with self._logging():
            self._rotate(self._sure)
        ends = {"events": self.end, "metrics": self._metrics.tell()}
        return {"seq": self.seq, **ends, "settings": self.settings}

    @property
    def end(self) -> int:
        """Where the whole log ends now."""
        return self._begins + self._events.tell()

    def saved(self, place: int) -> None:
        """A checkpoint of this place is on the disk; the one before it is kept, those before that one are gone."""
        self._sure, self.saved_at = self.saved_at or 0, place

    def _rotate(self, sure: int) -> None:
        """Compress what can never be cut off again, once it is enough."""
        if not self.rotate_bytes or sure - self._begins <= self.rotate_bytes:
            return
        path = self.directory / segments.LIVE
        self.lock.check()
        if segments.rotate(path, sure - self._begins):
            self._events.close()
            self._events, self._begins = open_own(path), sure
            self._events.seek(0, os.SEEK_END)

    def _rotate_at_the_end(self, sure: int) -> None:
        """Compress once more. The run is over and its log whole: a disk too full for that is worth a word, no error."""
        try:
            self._rotate(sure)
        except OSError as error:
            self.say(f"the end of the log stays uncompressed ({reason(error)})")
            self.lock.check()
            with suppress(OSError, RunError):
                segments.mend(self.directory / segments.LIVE)

    def event(
        self,
        time: float,
        event: Event,
        pending: Pending | None = None,
        fill: Callable[[Any], Record] | None = None,
        row: Record | None = None,
    ) -> None:
        """An event at this time; with ``pending``, ``fill`` turns its result into the numbers still missing.

        ``row`` is the rest of the row of metrics that a test of the model adds.
        """
        self.seq += 1
        record = events.record(event, seq=self.seq, time=time)
        if pending is None and row is None and not self._queue:
            self._write(record, None)
        else:
            self._queue.append(_Line(record, pending, fill, row))
            self.drain()

    def events(self, time: float, happened: Sequence[Event]) -> None:
        """Events at this time of which nothing is missing, in one go where nobody waits or watches."""
        if self._queue or self.observers:
            for event in happened:
                self.event(time, event)
            return
        numbered = enumerate(happened, self.seq + 1)
        lines = [line(events.record(event, seq=seq, time=time)) for seq, event in numbered]
        self._append(b"".join(lines))
        self.seq += len(lines)

    def drain(self, wait: bool = False) -> None:
        """Write what is complete, in order; with ``wait``, everything."""
        while self._queue:
            record, pending, fill, row = self._queue[0]
            if pending is not None and fill is not None:
                if not (wait or pending.done()):
                    return
                record |= fill(pending.result())  # may fail: then the event is still in line
            self._queue.popleft()
            self._write(record, row)

    def await_tests(self) -> None:
        """Wait for the results of the tests that have begun, if there are any."""
        if any(line.row is not None for line in self._queue):
            self.drain(wait=True)

    def _write(self, record: Record, row: Record | None) -> None:
        written = line(record)
        self._append(written)
        if self.observers:
            logged = json.loads(written)
            self._tell(lambda observer: observer.on_event(logged))
        if row is not None:
            row = {"wall_seconds": round(self.elapsed(), 3)} | row
            scores = {key: value for key, value in record.items() if key not in ("seq", "kind")}
            row = plain(row | scores | self._judged)
            self.metrics.append(row)
            self.lock.check()
            with self._logging():
                self._metrics.write(line(row))
                self._metrics.flush()
            self._tell(lambda observer: observer.on_metrics(row))

    def _append(self, lines: bytes) -> None:
        try:
            self._events.write(lines)
        except OSError as error:  # entering a context for each line would cost a third of it
            with self._logging():
                raise error

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""
        self.lock.check()
        with self._logging():
            for file in (self._events, self._metrics):
                file.flush()
                os.fsync(file.fileno())

    def _logging(self) -> AbstractContextManager[None]:
        return writing(self.directory, f"mend that, then: freshet resume {self.directory}")

    def abandon(self, wait: bool) -> None:
        """Give up on an event whose numbers never arrive, and on those after it: the log stays whole up to there.

        With ``wait``, numbers that are still on their way are waited for, so that how much is written does not depend
        on which worker was faster.
        """
        with suppress(Exception, KeyboardInterrupt):  # what failed is known already
            self.drain(wait)
        self.seq -= len(self._queue)
        self._queue.clear()

    def close(
        self,
        summary: Record,
        layout: Layout,
        weights: Vector,
        frozen: Mapping[str, NDArray[Any]] = NO_NUMBERS,
        sure: int = 0,
        tidy: Callable[[], None] | None = None,
    ) -> None:
        """Finish the run: logs closed, final model and summary written, tidied up, the directory free for others. From
        now on the log is never cut off before ``sure``."""
        try:
            with self._logging(), self._metrics, self._events:
                pass
            self.lock.check()
            with self._logging():
                write_atomically(self.directory / "model.safetensors", to_safetensors(layout, weights, frozen))
                text = json.dumps(plain(summary), indent=2) + "\n"
                write_atomically(self.directory / "summary.json", text.encode())
            self._rotate_at_the_end(sure)
            self._events.close()
            if tidy is not None:
                tidy()
        finally:
            self.lock.release()
        self._tell(lambda observer: observer.on_end(summary))
