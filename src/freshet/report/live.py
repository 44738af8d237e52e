"""``freshet watch``: the report page of a run that is still going, served to this machine only.

The server has two addresses: the page and its data. The page asks every second. The server reads what is new in the
log; if nothing is, it answers so without further work.
"""

import json
import threading
import time
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs

from freshet.errors import FreshetError
from freshet.report.loopback import NOT_FOUND, HttpAnswer, LoopbackServer
from freshet.report.page import document, render
from freshet.report.reading import RunData, RunFollower

#: Shortest time between two reads of the log, however many pages are open.
REFRESH_SECONDS = 0.8
#: A page waits for the log to be read up to this many new bytes, in a log of up to this many events.
MAX_WAITING_BYTES, MAX_WAITING_EVENTS = 5_000_000, 20_000
#: Seconds of pause per second that a refresh took, if it took long.
PAUSE_FACTOR = 3.0


class LiveRun:
    """The newest data of one run, with a version that grows with each change."""

    def __init__(self, directory: str | Path) -> None:
        self.follower = RunFollower(directory)
        self._lock = threading.Lock()
        self._version = 0
        self._body = b""
        self._next = float("-inf")
        #: Reads a long log.
        self.background: threading.Thread | None = None
        _ = self.follower.events.unread  # raises now if zstandard is missing, not for each page

    def answer(self, have: str) -> bytes | None:
        """The data as JSON, or None if the caller has the newest version (``have``).

        A long log is read in the background. Until then the page shows the run without its events.
        """
        with self._lock:
            busy = self.background is not None and self.background.is_alive()
            if not busy and time.monotonic() >= self._next:
                if len(self.follower.events) < MAX_WAITING_EVENTS and self.follower.events.unread < MAX_WAITING_BYTES:
                    self._refresh()
                else:
                    if not self._version:
                        note = "the log is being read; trips, weights and controls will follow"
                        self._publish(self.follower.without_events(note))
                    self.background = threading.Thread(target=self._refresh, daemon=True)
                    self.background.start()
            return None if have == str(self._version) else self._body

    def _refresh(self) -> None:
        """Read what is new and rebuild the data. The longer this takes, the longer is the pause after it."""
        started = time.monotonic()
        try:
            if self.follower.refresh() or not self._version:
                self._publish(self.follower.data())
        finally:
            taken = time.monotonic() - started
            self._next = time.monotonic() + (REFRESH_SECONDS if taken < 1.0 else PAUSE_FACTOR * taken)

    def _publish(self, run: RunData) -> None:
        version = self._version + 1
        answer = {"version": str(version), "document": document([run])}
        body = json.dumps(answer, separators=(",", ":"), allow_nan=False).encode()
        self._version, self._body = version, body


class WatchServer(LoopbackServer):
    """Serves one run's page on the loopback interface."""

    def __init__(self, directory: str | Path, port: int = 0) -> None:
        self.run = LiveRun(directory)
        self.page = render(None).encode()
        super().__init__(port)

    def answer(self, path: str, query: str) -> HttpAnswer:
        if path == "/":
            return HttpAnswer(HTTPStatus.OK, self.page, "text/html; charset=utf-8")
        if path != "/data.json":
            return NOT_FOUND
        try:
            body = self.run.answer(parse_qs(query, max_num_fields=10).get("have", [""])[0])
        except (FreshetError, OSError, ValueError):  # for example, the run was removed
            return HttpAnswer(HTTPStatus.SERVICE_UNAVAILABLE)
        if body is None:
            return HttpAnswer(HTTPStatus.NO_CONTENT)
        return HttpAnswer(HTTPStatus.OK, body, "application/json")
