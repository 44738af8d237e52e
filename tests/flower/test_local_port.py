"""The SuperNode's local port: no other user of the machine gets the device's task."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from freshet.flower import local_port
from freshet.flower.local_port import OwnUserOnly, close_to_other_users, owner
from freshet.flower.running import free_ports

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LINE = "   7: 0100007F:C350 0100007F:4A9C 01 00000000:00000000 02:0005 00000000  1001        0 9991 2 0 20 4 30 10 -1\n"
BACK = "   8: 0100007F:4A9C 0100007F:C350 01 00000000:00000000 02:0005 00000000     0        0 9992 2 0 20 4 30 10 -1\n"


def test_owner_is_that_of_the_callers_end() -> None:
    table = [HEAD, BACK, LINE]
    assert owner(("127.0.0.1", 50000), ("127.0.0.1", 19100), table) == 1001
    assert owner(("127.0.0.1", 50001), ("127.0.0.1", 19100), table) is None
    closed = LINE.replace(" 01 ", " 05 ", 1).replace("1001", "   0")
    assert owner(("127.0.0.1", 50000), ("127.0.0.1", 19100), [HEAD, closed]) is None, "nobody's, not root's"


@pytest.mark.skipif(not local_port.CONNECTIONS.exists(), reason="needs Linux")
def test_owner_of_an_own_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        table = local_port.CONNECTIONS.read_text().splitlines()
        assert owner(client.getsockname(), server.getsockname(), table) == os.getuid()


@pytest.fixture
def supernode_port() -> Iterator[int]:
    """The local interface of a SuperNode, as ``freshet.flower.node`` starts it."""
    import flwr.supernode.main as flower
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supernode.nodestate import NodeStateFactory

    before = flower.create_app
    close_to_other_users()
    app = flower.create_app(state_factory=NodeStateFactory(objectstore_factory=ObjectStoreFactory()))
    flower.create_app = before
    [port] = free_ports(1)
    server = uvicorn.Server(uvicorn.Config(app, port=port, ws="none", log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield port
    server.should_exit = True
    thread.join()


ASK = """
import os, socket, sys
"x".encode("idna")  # another user may not be able to load it later
if len(sys.argv) > 2:
    os.setuid(int(sys.argv[2]))
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 30) as connection:
    connection.sendall(b"POST /v1/runtime/acquire-task HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: 0\\r\\n\\r\\n")
    print(connection.recv(4096).split()[1].decode())
"""


def ask(port: int, *user: int) -> int:
    line = [sys.executable, "-c", ASK, str(port), *map(str, user)]
    return int(subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout)


@pytest.mark.timeout(120)
def test_own_user_reaches_flower(supernode_port: int) -> None:
    assert ask(supernode_port) not in (401, 403)


@pytest.mark.timeout(120)
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_user_gets_no_task(supernode_port: int) -> None:
    """Any local user got the task and its token."""
    assert ask(supernode_port, 65534) == 403


def test_call_without_an_address_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_port, "CONNECTIONS", tmp_path / "table")
    (tmp_path / "table").write_text(HEAD + LINE)
    gate = OwnUserOnly(None)
    for client, server in ((None, ("127.0.0.1", 1)), (("::1", 5), ("::1", 1)), (("127.0.0.1", 5), ("127.0.0.1", 1))):
        assert not gate._admits({"client": client, "server": server})
