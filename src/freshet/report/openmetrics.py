"""``freshet metrics``: figures of a run in the OpenMetrics text format, for Prometheus and its like.

The figures come from the run directory alone. So the endpoint works for simulations and deployments, needs no change of
a run that is going, and can be started, stopped and restarted at any time. It answers on the loopback interface.

A device is *training* from its trigger to its upload, *lost* from the loss of a trip to its next trigger, and otherwise
*idle*, or *unseen* before its first trip.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from freshet.errors import FreshetError
from freshet.report.loopback import NOT_FOUND, HttpAnswer, LoopbackServer
from freshet.runs.reader import RunDirectory
from freshet.runs.records import contributors, integer, metric_of, number, parse_line

#: The media type of an answer.
KIND = "application/openmetrics-text; version=1.0.0; charset=utf-8"
#: Counted events: the name of the counter, and its help.
COUNTED = {
    "trigger": ("trips", "Local trainings started"),
    "request": ("requests", "Requests for the fresh model"),
    "push": ("pushes", "Fresh models sent unasked"),
    "merge": ("merges", "Fresh models merged"),
    "upload": ("uploads", "Models uploaded"),
    "aggregate": ("aggregations", "Aggregations"),
    "discard": ("discarded", "Uploads discarded by the method"),
    "rejected": ("rejected", "Uploads rejected by the checks"),
    "lost": ("lost", "Trips lost"),
}
STATES = ("training", "idle", "lost", "unseen")
#: Upper bounds of the histogram of staleness.
BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500)


@dataclass
class RunFigures:
    """What the events so far say."""

    counts: Counter[str] = field(default_factory=Counter)
    bytes_up: int = 0
    version: int = 1
    time: float = 0.0
    #: The state of each device that had a trip.
    states: dict[int, str] = field(default_factory=dict)
    staleness: Counter[int] = field(default_factory=Counter)
    test: Mapping[str, Any] = field(default_factory=dict)

    def add(self, event: Mapping[str, Any]) -> None:
        """Count one event. Events come from a file, so anything may be missing."""
        kind, device = event.get("kind"), integer(event.get("device"))
        self.time = number(event.get("time")) or self.time
        if kind in COUNTED:
            self.counts[str(kind)] += 1
        if kind == "upload":
            self.bytes_up += integer(event.get("bytes")) or 0
        elif kind == "aggregate":
            self.version = (integer(event.get("version")) or 0) + 1
            self.staleness.update(part.staleness for part in contributors(event) if part.staleness is not None)
        elif kind == "evaluate":
            self.test = event
        state = {"trigger": "training", "upload": "idle", "lost": "lost"}.get(str(kind))
        if state is not None and device is not None:
            self.states[device] = state

    def devices(self, fleet: int) -> dict[str, int]:
        """The number of devices in each state."""
        counted = Counter(self.states.values())
        return {state: counted[state] for state in STATES[:-1]} | {"unseen": max(0, fleet - len(self.states))}


class FiguresFollower:
    """The figures of a run directory, kept up to date as its log grows."""

    def __init__(self, directory: str | Path) -> None:
        self.run = RunDirectory(directory)
        self.config = self.run.config()
        self._lock = threading.Lock()
        self._start_again()

    def _start_again(self) -> None:
        self.figures, self._offset, self._seq = RunFigures(), 0, 0

    def read(self) -> RunFigures:
        """Read what is new in the log. A log that was cut back, as a resumed run does, is read from its start."""
        with self._lock:
            if self.run.log_size() < self._offset or not self._read_lines():
                self._start_again()
                self._read_lines()
            return self.figures

    def _read_lines(self) -> bool:
        """Read the complete lines after the last one. False if they do not follow it."""
        for line in self.run.log_lines(self._offset):
            event = parse_line(line) if line.endswith(b"\n") else None
            if event is None:
                break
            if integer(event.get("seq")) != self._seq + 1:
                return self._seq == 0
            self.figures.add(event)
            self._offset, self._seq = self._offset + len(line), self._seq + 1
        return True

    def text(self) -> str:
        """All figures in the OpenMetrics text format."""
        return exposition(self.read(), self.config, self._ended())

    def _ended(self) -> bool:
        try:
            return bool(self.run.summary())
        except (FreshetError, OSError):
            return False


def exposition(figures: RunFigures, config: Mapping[str, Any], ended: bool) -> str:
    """The figures in the OpenMetrics text format."""
    lines: list[str] = []

    def family(name: str, kind: str, help_: str, samples: Iterable[tuple[str, float]]) -> None:
        lines.extend((f"# TYPE freshet_{name} {kind}", f"# HELP freshet_{name} {help_}."))
        lines.extend(f"freshet_{name}{suffix} {value:.17g}" for suffix, value in samples)

    method, fleet = config.get("method", {}), config.get("fleet", {})
    name = _escape(str(method.get("name", "")))
    family("run", "info", "The run", [(f'_info{{method="{name}"}}', 1)])
    for kind, (counter, help_) in COUNTED.items():
        family(counter, "counter", help_, [("_total", figures.counts[kind])])
    family("upload_bytes", "counter", "Bytes of uploaded models", [("_total", figures.bytes_up)])
    devices = figures.devices(integer(fleet.get("devices")) or 0)
    family("devices", "gauge", "Devices by state", [(f'{{state="{state}"}}', devices[state]) for state in STATES])
    family("version", "gauge", "Version of the global model", [("", figures.version)])
    family("time_seconds", "gauge", "Time of the last event since the start of the run", [("", figures.time)])
    family("ended", "gauge", "Whether the run has ended", [("", int(ended))])
    family("staleness", "histogram", "Staleness of aggregated uploads", _histogram(figures.staleness))
    metric = metric_of(figures.test).name if figures.test else None
    for key in dict.fromkeys(each for each in (metric, "loss") if each):
        value = number(figures.test.get(key))
        if value is not None:
            family(f"test_{_identifier(key)}", "gauge", f"{key} at the last test".capitalize(), [("", value)])
    return "\n".join([*lines, "# EOF", ""])


def _histogram(values: Counter[int]) -> list[tuple[str, float]]:
    """The samples of a histogram: cumulative buckets, count and sum."""
    bounds = [*((f"{bound}.0", bound) for bound in BUCKETS), ("+Inf", float("inf"))]
    buckets = [
        (f'_bucket{{le="{label}"}}', sum(count for value, count in values.items() if value <= bound))
        for label, bound in bounds
    ]
    return [*buckets, ("_count", values.total()), ("_sum", sum(value * count for value, count in values.items()))]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _identifier(text: str) -> str:
    return "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in text)


class MetricsServer(LoopbackServer):
    """Serves one run's figures at ``/metrics`` on the loopback interface."""

    def __init__(self, directory: str | Path, port: int = 0) -> None:
        self.figures = FiguresFollower(directory)
        super().__init__(port)

    def answer(self, path: str, query: str) -> HttpAnswer:
        if path != "/metrics":
            return NOT_FOUND
        try:
            return HttpAnswer(HTTPStatus.OK, self.figures.text().encode(), KIND)
        except (FreshetError, OSError, ValueError):  # for example, the run was removed
            return HttpAnswer(HTTPStatus.SERVICE_UNAVAILABLE)
