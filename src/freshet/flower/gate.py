"""The door of the SuperLink: devices come in with their keys, everything else needs what only the server has.

    python -m freshet.flower.gate TOKEN_FILE [options of flower-superlink]

Flower 1.41 serves three interfaces on one port, and only that of the SuperNodes asks who is there: whoever reaches the
port could start an app of his own on every device. Flower's hook for extensions puts this in front of all of them.
"""

import hmac
import ipaddress
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]

#: Open to all: SuperNodes sign every call with their keys, and whether a process lives is no secret.
OPEN, HEALTH = "/v1/fleet/", "/health"
#: For processes of this machine that have the executor's secret or the token of a task.
HERE = "/v1/runtime/"
_HOOK = "flwr.ee.superlink.extensions"


def may_pass(path: str, client: str, authorisation: list[bytes], token: str) -> bool:
    """Whether a call may go on to Flower."""
    if ".." in path:
        return False
    if path.startswith(OPEN) or path == HEALTH:
        return True
    if path.startswith(HERE):
        return is_here(client)
    return len(authorisation) == 1 and hmac.compare_digest(authorisation[0], f"Bearer {token}".encode())


def is_here(client: str) -> bool:
    """Whether an address is of this machine."""
    try:
        return ipaddress.ip_address(client).is_loopback
    except ValueError:
        return False


class Gate:
    """ASGI middleware that answers 401 to whoever may not pass, and says so in the log of the SuperLink."""

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._passes(scope)):
            await self._app(scope, receive, send)
            return
        client = (scope.get("client") or ("somebody",))[0]
        print(f"refused: {scope.get('method', '')} {scope['path'][:100]!r} from {client}", file=sys.stderr, flush=True)
        if scope["type"] == "http":
            head = [(b"content-type", b"text/plain"), (b"content-length", b"0"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 401, "headers": head})
            await send({"type": "http.response.body", "body": b""})

    def _passes(self, scope: Scope) -> bool:
        client = (scope.get("client") or ("",))[0]
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return may_pass(scope["path"], client, given, self._token)


def install(token: str) -> None:
    """Have Flower's SuperLink put the gate in front of its interfaces."""
    from starlette.middleware import Middleware

    hook: Any = ModuleType(_HOOK)
    hook.get_middleware = lambda: (Middleware(Gate, token=token),)
    sys.modules[_HOOK] = hook


def main() -> None:
    token_file, *options = sys.argv[1:]
    install(Path(token_file).read_text(encoding="ascii").strip())
    from flwr.superlink.cli.flower_superlink import flower_superlink

    sys.argv = ["flower-superlink", *options]
    flower_superlink()


if __name__ == "__main__":
    main()
