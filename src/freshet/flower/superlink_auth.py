"""Access control of the SuperLink: devices authenticate with their keys, everything else needs the server's token.

    python -m freshet.flower.superlink_auth TOKEN_FILE [options of flower-superlink]

Flower 1.41 serves three interfaces on one port, and only the SuperNodes' interface authenticates its callers: anybody
who reaches the port could start an app on every device. Flower's extension hook puts this middleware before all three.
"""

import hmac
import ipaddress
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]

#: Open to all: SuperNodes sign every call with their keys, and the health check reveals nothing.
OPEN_TO_ALL, HEALTH = "/v1/fleet/", "/health"
#: For processes on this machine. Flower checks the executor's secret or the token of a task.
LOCAL_ONLY = "/v1/runtime/"
_HOOK = "flwr.ee.superlink.extensions"
#: Refused calls that are logged, and lines per hour of each logger that strangers can trigger.
LOGGED_REFUSALS, MAX_LINES_PER_HOUR = 100, 1000
LIMITED_LOGGERS = ("uvicorn.error", "flwr")


def may_pass(path: str, client: str, authorisation: list[bytes], token: str) -> bool:
    """Whether a call is passed on to Flower."""
    if ".." in path:
        return False
    if path.startswith(OPEN_TO_ALL) or path == HEALTH:
        return True
    if path.startswith(LOCAL_ONLY):
        return is_local(client)
    return len(authorisation) == 1 and hmac.compare_digest(authorisation[0], f"Bearer {token}".encode())


def is_local(client: str) -> bool:
    """Whether an address is a loopback address."""
    try:
        return ipaddress.ip_address(client).is_loopback
    except ValueError:
        return False


class AuthMiddleware:
    """ASGI middleware that answers 401 to unauthorised calls. The first of them are in the SuperLink's log."""

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._token = app, token
        self.refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._passes(scope)):
            await self._app(scope, receive, send)
            return
        self._count(scope)
        if scope["type"] == "http":
            head = [(b"content-type", b"text/plain"), (b"content-length", b"0"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 401, "headers": head})
            await send({"type": "http.response.body", "body": b""})

    def _count(self, scope: Scope) -> None:
        """Log the first refusals only: repeated calls must not fill the disk."""
        self.refused += 1
        if self.refused > LOGGED_REFUSALS:
            return
        client = (scope.get("client") or ("unknown",))[0]
        last = "; further ones are not logged" if self.refused == LOGGED_REFUSALS else ""
        line = f"refused: {scope.get('method', '')[:20]} {scope['path'][:100]!r} from {client}{last}"
        print(line, file=sys.stderr, flush=True)

    def _passes(self, scope: Scope) -> bool:
        client = (scope.get("client") or ("",))[0]
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return may_pass(scope["path"], client, given, self._token)


def install(token: str) -> None:
    """Make Flower's SuperLink put the middleware before its interfaces."""
    from starlette.middleware import Middleware

    hook: Any = ModuleType(_HOOK)
    hook.get_middleware = lambda: (Middleware(AuthMiddleware, token=token),)
    sys.modules[_HOOK] = hook


class _HourlyLimit(logging.Filter):
    """Passes at most MAX_LINES_PER_HOUR lines per hour."""

    def __init__(self) -> None:
        super().__init__()
        self._since, self._passed = time.monotonic(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        if time.monotonic() - self._since >= 3600:
            self._since, self._passed = time.monotonic(), 0
        self._passed += 1
        return self._passed <= MAX_LINES_PER_HOUR


def limit_logging() -> None:
    """Log no line per call, and limit lines that strangers can cause. Filters survive uvicorn's logger setup."""
    logging.getLogger("uvicorn.access").addFilter(lambda record: False)
    for name in LIMITED_LOGGERS:
        logging.getLogger(name).addFilter(_HourlyLimit())


def main() -> None:
    token_file, *options = sys.argv[1:]
    limit_logging()
    install(Path(token_file).read_text(encoding="ascii").strip())
    from flwr.superlink.cli.flower_superlink import flower_superlink

    sys.argv = ["flower-superlink", *options]
    flower_superlink()


if __name__ == "__main__":
    main()
