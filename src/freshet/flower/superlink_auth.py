"""Access control of the SuperLink: devices authenticate with their keys, everything else needs the server's token.

    python -m freshet.flower.superlink_auth TOKEN_FILE KEYS ACCESS_LOG [options of flower-superlink]

Flower 1.41 serves three interfaces on one port, and only the SuperNodes' interface authenticates its callers: anybody
who reaches the port could start an app on every device. And it reads a whole call before it looks at the signature:
strangers could fill its memory. Flower's extension hook puts this middleware before all three interfaces.
"""

import asyncio
import functools
import hmac
import ipaddress
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from freshet.flower.device_keys import AccessLog, DeviceKeys, HourlyLimit

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]

#: For SuperNodes, which sign every call with their keys.
DEVICES, LOGIN = "/v1/fleet/", "/v1/fleet/activate-node"
#: Open to all: the health check reveals nothing.
HEALTH = "/health"
#: For processes on this machine. Flower checks the executor's secret or the token of a task.
LOCAL_ONLY = "/v1/runtime/"
_HOOK = "flwr.ee.superlink.extensions"
#: Refused calls that are logged.
LOGGED_REFUSALS = 100
LIMITED_LOGGERS = ("uvicorn.error", "flwr")
#: The most bytes of a call. Flower sends arrays in parts of 5 MiB.
MAX_CALL_BYTES = 8 << 20
#: Seconds within which the next part of a call must arrive.
CALL_PART_SECONDS = 60.0
#: The most connections, and seconds after which one without a complete head of a call is closed.
MAX_CONNECTIONS, SILENT_SECONDS = 4096, 20.0
TOO_LARGE = 413


def may_pass(path: str, client: str, authorisation: list[bytes], token: str) -> bool:
    """Whether a call that no device signs is passed on to Flower."""
    if ".." in path:
        return False
    if path == HEALTH:
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


def body_limit(path: str) -> int | None:
    """The most bytes of a call, or None if its sender has the server's token."""
    if path == HEALTH:
        return 0
    return MAX_CALL_BYTES if path.startswith((DEVICES, LOCAL_ONLY)) else None


class AuthMiddleware:
    """ASGI middleware that answers 401 to unauthorised calls and 413 to long ones, without reading them."""

    def __init__(self, app: Any, token: str, keys: Path, access_log: Path) -> None:
        self._app, self._token, self._keys, self._log = app, token, DeviceKeys(keys), AccessLog(access_log)
        self.refused = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http" or not self._passes(scope):
            self._count(scope)
            if scope["type"] == "http":
                await _refuse(send, 401)
        elif (limit := body_limit(scope["path"])) is None:
            await self._app(scope, receive, send)
        elif _declared_length(scope) > limit:
            await _refuse(send, TOO_LARGE)
        else:
            await _Bounded(receive, send, limit).run(self._app, scope)

    def _passes(self, scope: Scope) -> bool:
        client, path = _client(scope), scope["path"]
        if path.startswith(DEVICES) and ".." not in path:
            caller = self._keys.identify(scope["headers"])
            if caller.problem:
                self._log.write(f"refused: {caller.problem}, from {client}")
                return False
            self._log.record_call(caller.name, client, path == LOGIN)
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return may_pass(path, client, given, self._token)

    def _count(self, scope: Scope) -> None:
        """Log the first refusals only: repeated calls must not fill the disk."""
        self.refused += 1
        if self.refused > LOGGED_REFUSALS:
            return
        last = "; further ones are not logged" if self.refused == LOGGED_REFUSALS else ""
        line = f"refused: {scope.get('method', '')[:20]} {scope['path'][:100]!r} from {_client(scope)}{last}"
        print(line, file=sys.stderr, flush=True)


class _Bounded:
    """A call whose body is cut off at a limit, or when its next part does not come in time."""

    def __init__(self, receive: Receive, send: Send, limit: int) -> None:
        self._receive, self._send, self._left = receive, send, limit
        self._complete = self._cut = self._answered = False

    async def run(self, app: Any, scope: Scope) -> None:
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            if not self._cut:
                raise
        if self._cut and not self._answered:
            await _refuse(self._send, TOO_LARGE)

    async def receive(self) -> Mapping[str, Any]:
        """The next part. After the limit the app is told that its caller is gone."""
        if self._complete:
            return await self._receive()
        try:
            message = {} if self._cut else await asyncio.wait_for(self._receive(), CALL_PART_SECONDS)
        except TimeoutError:
            message = {}
        if message.get("type") == "http.request":
            self._left -= len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
        if self._left < 0 or not message:
            self._cut, self._complete = True, False
            return {"type": "http.disconnect"}
        return message

    async def send(self, message: Mapping[str, Any]) -> None:
        if not self._cut:
            self._answered = True
            await self._send(message)


def _client(scope: Scope) -> str:
    return str((scope.get("client") or ("unknown",))[0])


def _declared_length(scope: Scope) -> int:
    """The length that the head of a call declares: 0 if there is none."""
    given = [value for name, value in scope["headers"] if name == b"content-length"]
    return max((int(value) if value.isdigit() else sys.maxsize for value in given), default=0)


async def _refuse(send: Send, status: int) -> None:
    head = [(b"content-type", b"text/plain"), (b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": b""})


def install(token: str, keys: Path, access_log: Path) -> None:
    """Make Flower's SuperLink put the middleware before its interfaces."""
    from starlette.middleware import Middleware

    hook: Any = ModuleType(_HOOK)
    hook.get_middleware = lambda: (Middleware(AuthMiddleware, token=token, keys=keys, access_log=access_log),)
    sys.modules[_HOOK] = hook


def without_silent_connections(base: type[Any]) -> type[Any]:
    """Uvicorn's protocol, which closes connections that send no complete head of a call, and surplus ones."""

    class Guarded(base):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > MAX_CONNECTIONS:
                transport.abort()
                return
            self._watch()

        def _watch(self) -> None:
            self._watched = self.cycle
            self._timer = self.loop.call_later(SILENT_SECONDS, self._close_if_silent)

        def _close_if_silent(self) -> None:
            same = self.cycle is self._watched  # no new call since the last look
            if same and (self.cycle is None or self.cycle.response_complete):
                self.transport.abort()
            elif not self.transport.is_closing():
                self._watch()

        def connection_lost(self, problem: Exception | None) -> None:
            if hasattr(self, "_timer"):
                self._timer.cancel()
            super().connection_lost(problem)

    return Guarded


def limit_connections() -> None:
    """Make Flower's SuperLink close silent and surplus connections."""
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    uvicorn.run = functools.partial(uvicorn.run, http=without_silent_connections(AutoHTTPProtocol))


class _HourlyFilter(logging.Filter):
    """Passes a limited number of lines per hour."""

    def __init__(self) -> None:
        super().__init__()
        self._limit = HourlyLimit()

    def filter(self, record: logging.LogRecord) -> bool:
        return self._limit.allows_another()


def limit_logging() -> None:
    """Log no line per call, and limit lines that strangers can cause. Filters survive uvicorn's logger setup."""
    logging.getLogger("uvicorn.access").addFilter(lambda record: False)
    for name in LIMITED_LOGGERS:
        logging.getLogger(name).addFilter(_HourlyFilter())


def main() -> None:
    token_file, keys, access_log, *options = sys.argv[1:]
    limit_logging()
    limit_connections()
    install(Path(token_file).read_text(encoding="ascii").strip(), Path(keys), Path(access_log))
    from flwr.superlink.cli.flower_superlink import flower_superlink

    sys.argv = ["flower-superlink", *options]
    flower_superlink()


if __name__ == "__main__":
    main()
