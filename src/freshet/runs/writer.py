"""Write a run directory, and notify the observers of the run.

Events are written in the order in which they happen. Some numbers of an event (a merge's losses, a test score) are
computed elsewhere and arrive later. Such an event and all events after it wait in a queue until the numbers arrive.
"""

import hashlib
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
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
from freshet.runs.lock import LOCK, RunLock
from freshet.runs.reader import BEST, CONFIG, EVENTS, METRICS, MODEL, SUMMARY
from freshet.runs.records import ACCURACY, Metric, format_line, json_safe


class Observer:
    """Watches a run, like a progress bar or a tracker does. Override the methods that you need.

    Each of them may raise ``freshet.Stop`` to end the run before its next event.
    """

    def on_event(self, event: Record) -> None:
        """An event was written."""

    def on_metrics(self, row: Record) -> None:
        """The global model was tested."""

    def on_message(self, message: str) -> None:
        """The run has a message for the user."""

    def on_progress(self, time: float) -> None:
        """Virtual time has advanced."""

    def on_end(self, summary: Record) -> None:
        """The run has ended."""


_HOOKS = [name for name in vars(Observer) if name.startswith("on_")]


def check_observers(observers: Sequence[Observer]) -> list[Observer]:
    """The observers as a list; raises if one lacks a method that the run calls."""
    if not hasattr(observers, "__iter__"):
        raise ConfigError("observers", f"must be a list, as in observers=[Mine()], but {_brief(observers)} was given")
    checked = list(observers)
    for observer in checked:
        if isinstance(observer, type):
            raise ConfigError("observers", f"{observer.__name__} is a class; give an object, {observer.__name__}()")
        missing = [name for name in _HOOKS if not callable(getattr(observer, name, None))]
        if missing:
            problem = f"{_brief(observer)} has no {missing[0]}; derive its class from freshet.Observer"
            raise ConfigError("observers", problem)
    return checked


def _brief(value: object) -> str:
    return " ".join(repr(value).split())[:80]


_log = logging.getLogger(__name__)


class Pending(Protocol):
    """A result that is still being computed."""

    def done(self) -> bool: ...

    def result(self) -> Any: ...


def default_directory(method: str, seed: int) -> Path:
    """Create ``runs/<time>-<method>-seed<n>``, with a number added if the name is taken."""
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
    """SHA-256 of a flat float32 vector, little-endian."""
    return hashlib.sha256(weights.astype("<f4", copy=False).tobytes()).hexdigest()


def to_safetensors(layout: Layout, weights: Vector, frozen: Mapping[str, NDArray[Any]] = NO_NUMBERS) -> bytes:
    """A safetensors file of the tensors in a flat vector and of the frozen ones.

    Its metadata key ``order`` lists the tensors of the vector in order, each with whether its channels come last.
    """
    order = json.dumps([[entry.name, entry.channels_last] for entry in layout.entries])
    tensors = {entry.name: np.ascontiguousarray(entry.array(weights)) for entry in layout.entries}
    return save(tensors | dict(frozen), metadata={"order": order})


def write_config(directory: Path, tables: Mapping[str, Any], note: str | None = None) -> None:
    """Write ``config.toml`` atomically; a note becomes its first line."""
    heading = f"# {' '.join(note.split())}\n" if note else ""
    write_atomically(directory / CONFIG, (heading + tomli_w.dumps(tables)).encode())


class _Queued(NamedTuple):
    """An event that waits to be written."""

    record: Record
    pending: Pending | None
    fill: Callable[[Any], Record] | None
    row: Record | None
    model: Vector | None = None


@dataclass
class BestModel:
    """The model of the best test so far. A later test must be better, not as good."""

    value: float | None = None
    time: float = 0.0
    version: int = 0
    weights: Vector | None = None

    def offer(self, row: Record, metric: Metric, weights: Vector) -> None:
        """Keep this model if its test is the best."""
        value = metric.of(row)
        if value is not None and (self.value is None or metric.best([value, self.value]) != self.value):
            self.value, self.time, self.version, self.weights = value, row["time"], row["version"], weights

    def summary(self) -> Record:
        """When and at which version it was."""
        return {"best_time": self.time, "best_version": self.version} if self.weights is not None else {}

    def state(self) -> list[Any]:
        return [self.value, self.time, self.version, self.weights]


class RunWriter:
    """Writes the files of one run, events in order.

    To resume, it first truncates the logs to where they ended at the checkpoint (``resume``, from ``position``).
    """

    def __init__(
        self,
        directory: Path,
        observers: Sequence[Observer] = (),
        resume: Record | None = None,
        lock: RunLock | None = None,
        config_sha256: str = "",
    ) -> None:
        self.directory, self.observers = directory, check_observers(observers)
        #: Nobody else writes here. A caller that resumes takes the lock before it reads the directory.
        self.lock = lock or RunLock(directory)
        self.seq = 0
        self.metrics: list[Record] = []
        #: What was truncated on resume, one sentence per file.
        self.cuts: list[str] = []
        self._config_sha256 = config_sha256
        self._stop_reason: str | None = None
        self._elapsed: Callable[[], float] = lambda: 0.0
        self._metric_labels: Record = {}
        self._metric = ACCURACY
        #: The model of the best test, if it is kept.
        self.best: BestModel | None = None
        self._resumed_best = list((resume or {}).get("best") or ())
        self._queue: deque[_Queued] = deque()
        self._rotate_bytes = 0
        #: Where in the whole log the live file begins.
        self._live_start = 0
        #: Where in the log the newest checkpoint is. Every checkpoint that is kept lies at or after ``_committed``.
        self.checkpoint_end: int | None = None
        self._committed = 0
        if resume is None:
            self._events, self._metrics = (self._open(directory / name, 0) for name in (EVENTS, METRICS))
            return
        self.seq, self.checkpoint_end = resume["seq"], resume["events"]
        with writing(directory / EVENTS, "nothing was cut off"):
            segments.repair(directory / EVENTS)
            self._live_start = segments.live_start(directory / EVENTS)
        self.metrics = self._read_rows(directory / METRICS, resume["metrics"])
        ends = {EVENTS: resume["events"] - self._live_start, METRICS: resume["metrics"]}
        self._events, self._metrics = (self._open(directory / name, end, create=False) for name, end in ends.items())
        (directory / SUMMARY).unlink(missing_ok=True)

    def configure(
        self,
        metric: Metric = ACCURACY,
        elapsed: Callable[[], float] = lambda: 0.0,
        rotate_bytes: int = 0,
        keep_best: bool = False,
    ) -> None:
        """Set the run's metric, its clock of real time, the bytes of log per segment, and whether to keep the best.

        Rows of metrics name the metric if it is not the accuracy. With 0 bytes the log is never compressed.
        """
        self._metric = metric
        if keep_best:
            value, time, version, weights = self._resumed_best or (None, 0.0, 0, None)
            self.best = BestModel(value, time, version, None if weights is None else np.array(weights))
        self._metric_labels = {} if metric == ACCURACY else {"metric": metric.name, "direction": metric.direction}
        self._elapsed, self._rotate_bytes = elapsed, rotate_bytes

    @property
    def stop_reason(self) -> str | None:
        """Why the run shall end early, if somebody asked for that."""
        return self._stop_reason

    def request_stop(self, reason: str) -> None:
        """Ask the run to end before its next event. The first reason counts."""
        self._stop_reason = self._stop_reason or reason

    @staticmethod
    def _read_rows(path: Path, length: int) -> list[Record]:
        """The rows of metrics up to the checkpoint, ``length`` bytes."""
        try:
            rows = [json.loads(line) for line in read_regular(path, 1 << 32)[:length].splitlines()]
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"{path} cannot be read ({error}); the run cannot be resumed") from None
        if not all(isinstance(row, dict) and {"time", "loss"} <= row.keys() for row in rows):
            raise RunError(f"{path} holds lines that are not metrics; the run cannot be resumed")
        return rows

    def _open(self, path: Path, length: int, *, create: bool = True) -> BinaryIO:
        """Open a log and truncate it to ``length`` bytes. A resumed run computes the rest again."""
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
            lines = f"{len(tail.splitlines())} lines after the checkpoint{partial}"
            self.cuts.append(f"{path.name}: cut off {lines}; they are computed again")
            file.truncate(length)
        file.seek(length)
        return file

    def say(self, message: str) -> None:
        """Send a message to the observers; without any, to the log of the process."""
        if not self.observers:
            _log.warning(message)
        self._notify(lambda observer: observer.on_message(message))

    def progress(self, time: float) -> None:
        """Tell the observers that time has advanced."""
        self._notify(lambda observer: observer.on_progress(time))

    def _notify(self, call: Callable[[Observer], None]) -> None:
        """Call every observer. One that raises ``Stop`` ends the run between two events, not within one."""
        for observer in self.observers:
            try:
                call(observer)
            except Stop as stop:
                self.request_stop(str(stop) or "an observer asked for it")

    @staticmethod
    def create(
        directory: Path,
        config: Mapping[str, Any],
        observers: Sequence[Observer] = (),
        note: str | None = None,
        config_sha256: str = "",
    ) -> "RunWriter":
        """Begin a new run directory; a note becomes the first line of its config.toml.

        Checkpoints hold ``config_sha256``, so that a resume notices a changed config.toml.
        """
        RunWriter.check_empty(directory)
        observers = check_observers(observers)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = RunLock(directory)
            RunWriter.check_empty(directory)  # again, now that no other process can begin here
            write_config(directory, config, note)
            return RunWriter(directory, observers, lock=lock, config_sha256=config_sha256)
        except OSError as error:
            raise ConfigError("run.out", f"{directory} cannot be written ({reason(error)})") from None

    @staticmethod
    def check_empty(directory: Path) -> None:
        """Raise unless the directory is empty or does not exist yet."""
        try:
            taken = directory.exists() and any(path.name != LOCK for path in directory.iterdir())
        except NotADirectoryError:
            raise ConfigError("run.out", f"{directory} is a file; choose a folder") from None
        except OSError as error:
            raise ConfigError("run.out", f"{directory} cannot be read ({error.strerror})") from None
        if taken:
            raise ConfigError("run.out", f"{directory} is not empty; choose another folder or remove it")

    def position(self) -> Record:
        """Where the logs end now, for a checkpoint. Compresses first what no resume can truncate any more."""
        self.flush()
        with self._write_errors():
            self._rotate(self._committed)
        ends = {"events": self.log_end, "metrics": self._metrics.tell()}
        best = {} if self.best is None else {"best": self.best.state()}
        return {"seq": self.seq, **ends, "settings": self._config_sha256, **best}

    @property
    def log_end(self) -> int:
        """Bytes of the whole log so far, uncompressed."""
        return self._live_start + self._events.tell()

    def record_checkpoint(self, end: int) -> None:
        """Note that a checkpoint of the log up to ``end`` is on disk. It and the one before it are kept."""
        self._committed, self.checkpoint_end = self.checkpoint_end or 0, end

    def _rotate(self, committed: int) -> None:
        """Compress the live file up to ``committed``, the part that no resume can truncate, if it is long enough."""
        if not self._rotate_bytes or committed - self._live_start <= self._rotate_bytes:
            return
        path = self.directory / EVENTS
        self.lock.check()
        if segments.rotate(path, committed - self._live_start):
            self._events.close()
            self._events, self._live_start = open_own(path), committed
            self._events.seek(0, os.SEEK_END)

    def _rotate_at_the_end(self, committed: int) -> None:
        """Compress once more. The log is complete, so a full disk is worth a message but not an error."""
        try:
            self._rotate(committed)
        except OSError as error:
            self.say(f"the end of the log stays uncompressed ({reason(error)})")
            self.lock.check()
            with suppress(OSError, RunError):
                segments.repair(self.directory / EVENTS)

    def event(
        self,
        time: float,
        event: Event,
        pending: Pending | None = None,
        fill: Callable[[Any], Record] | None = None,
        row: Record | None = None,
        model: Vector | None = None,
    ) -> None:
        """Log an event. With ``pending``, ``fill`` turns its result into the numbers that are still missing.

        A test of a model also adds a row of metrics; ``row`` holds what the event does not. The ``model`` is kept if it
        is the best and the run wants that; None for one that was tested before.
        """
        self.seq += 1
        record = events.record(event, seq=self.seq, time=time)
        if pending is None and row is None and not self._queue:
            self._write(record, None)
        else:
            self._queue.append(_Queued(record, pending, fill, row, None if self.best is None else model))
            self.drain()

    def events(self, time: float, complete: Sequence[Event]) -> None:
        """Log complete events; in one write if no event waits and there is no observer."""
        if self._queue or self.observers:
            for event in complete:
                self.event(time, event)
            return
        numbered = enumerate(complete, self.seq + 1)
        lines = [format_line(events.record(event, seq=seq, time=time)) for seq, event in numbered]
        self._append(b"".join(lines))
        self.seq += len(lines)

    def drain(self, wait: bool = False) -> None:
        """Write the events that are complete, in order; with ``wait``, all events."""
        while self._queue:
            record, pending, fill, row, model = self._queue[0]
            if pending is not None and fill is not None:
                if not (wait or pending.done()):
                    return
                record |= fill(pending.result())  # if this raises, the event stays in the queue
            self._queue.popleft()
            self._write(record, row, model)

    def await_tests(self) -> None:
        """Wait for the results of tests that have begun."""
        if any(queued.row is not None for queued in self._queue):
            self.drain(wait=True)

    def _write(self, record: Record, row: Record | None, model: Vector | None = None) -> None:
        written = format_line(record)
        self._append(written)
        if self.observers:
            logged = json.loads(written)
            self._notify(lambda observer: observer.on_event(logged))
        if row is not None:
            row = {"wall_seconds": round(self._elapsed(), 3)} | row
            scores = {key: value for key, value in record.items() if key not in ("seq", "kind")}
            row = json_safe(row | scores | self._metric_labels)
            self.metrics.append(row)
            if self.best is not None and model is not None:
                self.best.offer(row, self._metric, model)
            self.lock.check()
            with self._write_errors():
                self._metrics.write(format_line(row))
                self._metrics.flush()
            self._notify(lambda observer: observer.on_metrics(row))

    def _append(self, lines: bytes) -> None:
        try:
            self._events.write(lines)
        except OSError as error:  # a context per line would make writing a third slower
            with self._write_errors():
                raise error

    def flush(self) -> None:
        """Bring everything written so far to the disk."""
        self.lock.check()
        with self._write_errors():
            for file in (self._events, self._metrics):
                file.flush()
                os.fsync(file.fileno())

    def _write_errors(self) -> AbstractContextManager[None]:
        """Turn an ``OSError`` into one sentence with a remedy."""
        return writing(self.directory, f"fix this, then run: freshet resume {self.directory}")

    def abandon(self, wait: bool) -> None:
        """Drop the first event that cannot be completed, and all events after it. The log is complete up to there.

        With ``wait``, wait for numbers that are still being computed. How much is written then does not depend on which
        worker was faster.
        """
        with suppress(Exception, KeyboardInterrupt):  # the failure was reported already
            self.drain(wait)
        self.seq -= len(self._queue)
        self._queue.clear()

    def close(
        self,
        summary: Record,
        layout: Layout,
        weights: Vector,
        frozen: Mapping[str, NDArray[Any]] = NO_NUMBERS,
        committed: int = 0,
        cleanup: Callable[[], None] | None = None,
    ) -> None:
        """End the run: close the logs, write the final model and the summary, clean up, release the directory.

        From now on no resume truncates the log before ``committed``.
        """
        try:
            with self._write_errors(), self._metrics, self._events:
                pass
            self.lock.check()
            with self._write_errors():
                write_atomically(self.directory / MODEL, to_safetensors(layout, weights, frozen))
                if self.best is not None and self.best.weights is not None:
                    write_atomically(self.directory / BEST, to_safetensors(layout, self.best.weights, frozen))
                text = json.dumps(json_safe(summary), indent=2) + "\n"
                write_atomically(self.directory / SUMMARY, text.encode())
            self._rotate_at_the_end(committed)
            self._events.close()
            if cleanup is not None:
                cleanup()
        finally:
            self.lock.release()
        self._notify(lambda observer: observer.on_end(summary))
