"""``freshet watch``: the report page of a run that is still going, served to this machine only.

The server has two addresses: the page and its data. The page asks every second. The server reads what is new in the
log; if nothing is, it answers so without further work.
"""

import io
import json
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from freshet.errors import ConfigError, FreshetError
from freshet.report.page import document, render
from freshet.report.reading import RunData, RunFollower

HOST = "127.0.0.1"
#: Shortest time between two reads of the log, however many pages are open.
REFRESH_SECONDS = 0.8
#: A client that takes longer to send a request, or to accept an answer, is disconnected.
CLIENT_TIMEOUT_SECONDS = 10.0
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


class _Incoming(socket.SocketIO):
    """The bytes that a client sends before a deadline. A client that sends slowly gets no more time than others."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, "r")
        self.connection, self.deadline = connection, 0.0

    def readinto(self, buffer: Any) -> int | None:
        self.connection.settimeout(max(0.001, self.deadline - time.monotonic()))
        return super().readinto(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: "WatchServer"
    protocol_version = "HTTP/1.1"
    server_version = "freshet"
    sys_version = ""
    timeout = CLIENT_TIMEOUT_SECONDS

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._incoming = _Incoming(self.connection)
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        self._incoming.deadline = time.monotonic() + self.timeout
        super().handle_one_request()

    def do_GET(self) -> None:
        self.connection.settimeout(self.timeout)
        if self.headers.get("Host") not in self.server.names:  # DNS rebinding: another site's name that points here
            self._send(HTTPStatus.FORBIDDEN, b"", "text/plain")
            return
        address = urlsplit(self.path)
        if address.path == "/":
            self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
        elif address.path == "/data.json":
            try:
                body = self.server.run.answer(parse_qs(address.query, max_num_fields=10).get("have", [""])[0])
            except (FreshetError, OSError, ValueError):  # for example, the run was removed
                self._send(HTTPStatus.SERVICE_UNAVAILABLE, b"", "text/plain")
                return
            if body is None:
                self._send(HTTPStatus.NO_CONTENT, b"", "application/json")
            else:
                self._send(HTTPStatus.OK, body, "application/json")
        else:
            self._send(HTTPStatus.NOT_FOUND, b"", "text/plain")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        if status is not HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


class WatchServer(ThreadingHTTPServer):
    """Serves one run's page on the loopback interface."""

    daemon_threads = True

    def __init__(self, directory: str | Path, port: int = 0) -> None:
        self.run = LiveRun(directory)
        self.page = render(None).encode()
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                "--port", f"{port} cannot be used ({getattr(error, 'strerror', None) or error})"
            ) from None
        self.names = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that closes the connection or does not read the answer."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
