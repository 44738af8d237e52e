"""A small HTTP server for this machine only: loopback, GET, no logging, and no patience with slow clients."""

import io
import socket
import sys
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from freshet.errors import ConfigError

HOST = "127.0.0.1"
#: A client that takes longer to send a request, or to accept an answer, is disconnected.
CLIENT_TIMEOUT_SECONDS = 10.0


class HttpAnswer(NamedTuple):
    """What a client gets."""

    status: HTTPStatus
    body: bytes = b""
    kind: str = "text/plain"


NOT_FOUND = HttpAnswer(HTTPStatus.NOT_FOUND)


class _Incoming(socket.SocketIO):
    """The bytes that a client sends before a deadline. A client that sends slowly gets no more time than others."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, "r")
        self.connection, self.deadline = connection, 0.0

    def readinto(self, buffer: Any) -> int | None:
        self.connection.settimeout(max(0.001, self.deadline - time.monotonic()))
        return super().readinto(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: "LoopbackServer"
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
            self._send(HttpAnswer(HTTPStatus.FORBIDDEN))
            return
        address = urlsplit(self.path)
        self._send(self.server.answer(address.path, address.query))

    def _send(self, answer: HttpAnswer) -> None:
        self.send_response(answer.status)
        if answer.status is not HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


class LoopbackServer(ThreadingHTTPServer):
    """Serves what ``answer`` returns on the loopback interface."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                "--port", f"{port} cannot be used ({getattr(error, 'strerror', None) or error})"
            ) from None
        self.names = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    def answer(self, path: str, query: str) -> HttpAnswer:
        """The answer to a request from this machine."""
        return NOT_FOUND

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that closes the connection or does not read the answer."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
