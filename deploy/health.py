"""Whether a container is healthy: the port of its server or device answers. Exit code 0 or 1.

With FRESHET_NODE this is that device, and its SuperNode listens on loopback. Without it this is the server, whose
SuperLink must complete a TLS handshake with a certificate of the deployment's own authority. Standard library only.
"""

import os
import socket
import ssl
import sys
import tomllib
from pathlib import Path

TIMEOUT_SECONDS = 5.0


def check_server(folder: Path) -> None:
    """Shake hands with the SuperLink. Raises OSError."""
    port = _settings(folder / "server.toml", "server").get("port", 18000)
    trust = ssl.create_default_context(cafile=str(folder / "certificates" / "ca.crt"))
    with (
        socket.create_connection(("127.0.0.1", port), TIMEOUT_SECONDS) as plain,
        trust.wrap_socket(plain, server_hostname="localhost"),
    ):
        pass


def check_device(folder: Path, node: int) -> None:
    """Connect to the SuperNode. Raises OSError."""
    port = _settings(folder / "device.toml", "device").get("port") or 19100 + node
    socket.create_connection(("127.0.0.1", port), TIMEOUT_SECONDS).close()


def _settings(path: Path, section: str) -> dict[str, int]:
    found: dict[str, int] = tomllib.loads(path.read_text(encoding="utf-8")).get(section, {})
    return found


def main() -> int:
    folder, node = Path(os.environ.get("FRESHET_FOLDER", "/federation")), os.environ.get("FRESHET_NODE")
    try:
        check_device(folder, int(node)) if node else check_server(folder)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
