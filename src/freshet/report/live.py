"""``freshet watch``: the report page of a run that is still going, served to this machine only.

Two addresses exist: the page and its data. The page asks every second; the server reads what is new in the log, and
answers "nothing new" without work when there is none.
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
from freshet.report.reading import Reader, RunData

HOST = "127.0.0.1"
#: The log is looked at no more often than this, however many pages are open.
EVERY_SECONDS = 0.8
#: A client that has not sent a whole question after so many seconds, or takes nothing for as long, is left.
PATIENCE = 10.0
#: What is read while a page waits for it: so many new bytes, of a log of so many events.
AT_ONCE, MANY_EVENTS = 5_000_000, 20_000
#: Seconds of rest for each second that a look took.
SELDOM = 3.0


class Source:
    """The newest data of one run; a new number for each change."""

    def __init__(self, directory: str | Path) -> None:
        self._reader = Reader(directory)
        self._lock = threading.Lock()
        self._version = 0
        self._body = b""
        self._next = float("-inf")
        self._behind: threading.Thread | None = None
        _ = self._reader.events.unread  # what cannot be read for want of a library is said now, not to each page

    def answer(self, have: str) -> bytes | None:
        """The data as JSON, or None when the caller has the newest. A long log is read behind the scenes: until it is
        known, the page has what can be said without it."""
        with self._lock:
            busy = self._behind is not None and self._behind.is_alive()
            if not busy and time.monotonic() >= self._next:
                if len(self._reader.events) < MANY_EVENTS and self._reader.events.unread < AT_ONCE:
                    self._look()
                else:
                    if not self._version:
                        self._put(self._reader.glance("the log is being read; trips, weights and controls will follow"))
                    self._behind = threading.Thread(target=self._look, daemon=True)
                    self._behind.start()
            return None if have == str(self._version) else self._body

    def _look(self) -> None:
        """Read what is new and make the page of it; a page that takes long is made the more seldom."""
        started = time.monotonic()
        try:
            if self._reader.refresh() or not self._version:
                self._put(self._reader.data())
        finally:
            taken = time.monotonic() - started
            self._next = time.monotonic() + (EVERY_SECONDS if taken < 1.0 else SELDOM * taken)

    def _put(self, run: RunData) -> None:
        version = self._version + 1
        answer = {"version": str(version), "document": document([run])}
        body = json.dumps(answer, separators=(",", ":"), allow_nan=False).encode()
        self._version, self._body = version, body


class _Incoming(socket.SocketIO):
    """What a client sends, up to a moment: one that sends a byte now and then is not waited for longer than another."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, "r")
        self.connection, self.end = connection, 0.0

    def readinto(self, buffer: Any) -> int | None:
        self.connection.settimeout(max(0.001, self.end - time.monotonic()))
        return super().readinto(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: "Server"
    protocol_version = "HTTP/1.1"
    server_version = "freshet"
    sys_version = ""
    timeout = PATIENCE

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._incoming = _Incoming(self.connection)
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        self._incoming.end = time.monotonic() + self.timeout
        super().handle_one_request()

    def do_GET(self) -> None:
        self.connection.settimeout(self.timeout)
        if self.headers.get("Host") not in self.server.names:  # another site's name that points here
            self._send(HTTPStatus.FORBIDDEN, b"", "text/plain")
            return
        address = urlsplit(self.path)
        if address.path == "/":
            self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
        elif address.path == "/data.json":
            try:
                body = self.server.source.answer(parse_qs(address.query, max_num_fields=10).get("have", [""])[0])
            except (FreshetError, OSError, ValueError):  # the run was removed, say
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
        """Requests are not worth a line."""


class Server(ThreadingHTTPServer):
    """Serves one run's page on the loopback interface."""

    daemon_threads = True

    def __init__(self, directory: str | Path, port: int = 0) -> None:
        self.source = Source(directory)
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
        """A browser that goes away in the middle of an answer, or never takes it, is no error of ours."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
