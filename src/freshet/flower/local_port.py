"""The SuperNode's local port, closed to other users of the machine.

Flower's processes on a device talk to each other over a port of the loopback interface. Whoever asks there first gets
the device's task, with the model in it and the right to answer. The kernel knows which user a local connection belongs
to, so this middleware admits only the SuperNode's own user, and root.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: The kernel's table of TCP connections. It exists on Linux only.
CONNECTIONS = Path("/proc/net/tcp")
#: The state of an open connection. The kernel shows a closed one as root's, whoever had it.
ESTABLISHED = "01"


def owner(client: tuple[str, int], server: tuple[str, int], table: Iterable[str]) -> int | None:
    """The user id of the client's end of a local connection, or None if the kernel's table does not list it."""
    ends = (_end(*client), _end(*server))
    for line in table:
        fields = line.split()
        if len(fields) > 7 and (fields[1], fields[2]) == ends and fields[3] == ESTABLISHED and fields[7].isdigit():
            return int(fields[7])
    return None


def _end(host: str, port: int) -> str:
    """An IPv4 address and port as the kernel writes them."""
    numbers = bytes(map(int, host.split(".")))
    return f"{int.from_bytes(numbers, 'little'):08X}:{port:04X}"


class OwnUserOnly:
    """ASGI middleware that answers 403 to calls of other users."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or self._admits(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            head = [(b"content-length", b"0"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 403, "headers": head})
            await send({"type": "http.response.body", "body": b""})

    def _admits(self, scope: Any) -> bool:
        if not CONNECTIONS.exists():  # not Linux: see SECURITY.md
            return True
        try:
            with CONNECTIONS.open(encoding="ascii") as table:
                return owner(tuple(scope["client"]), tuple(scope["server"]), table) in (os.getuid(), 0)
        except (TypeError, ValueError):  # no address, or not of IPv4
            return False


def close_to_other_users() -> None:
    """Make Flower's SuperNode put the middleware before its local interface."""
    import flwr.supernode.main as flower

    create_app: Any = flower.create_app

    def create_guarded_app(*arguments: Any, **options: Any) -> Any:
        app = create_app(*arguments, **options)
        app.add_middleware(OwnUserOnly)
        return app

    flower.create_app = create_guarded_app
