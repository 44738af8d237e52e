"""Calls to the SuperLink's port: nothing of an unsigned call is read, and the access log says who came."""

import asyncio
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from freshet.flower import superlink_auth
from freshet.flower.device_keys import ADDRESS_SECONDS, MAX_LINES_PER_HOUR, AccessLog, DeviceKeys
from freshet.flower.running import free_ports
from freshet.flower.security import make_node
from freshet.flower.superlink_auth import MAX_CALL_BYTES, AuthMiddleware, without_silent_connections

Headers = list[tuple[bytes, bytes]]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    for node in (0, 3):
        make_node(folder / f"node_{node}")
    return folder


def signed(key: Path, at: datetime | None = None) -> Headers:
    """The headers of a SuperNode's call."""
    private = serialization.load_ssh_private_key(key.read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public = private.public_key().public_bytes(serialization.Encoding.PEM, form)
    stamp = (at or datetime.now(UTC)).isoformat().encode()
    signature = private.sign(stamp, ec.ECDSA(hashes.SHA256()))
    return [
        (b"flwr-public-key", b64encode(public)),
        (b"flwr-signature", b64encode(signature)),
        (b"flwr-timestamp", stamp),
    ]


def test_headers_are_those_that_flower_sends() -> None:
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER

    from freshet.flower import device_keys

    names = (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)
    assert tuple(n.encode() for n in names) == (
        device_keys.KEY_HEADER,
        device_keys.SIGNATURE_HEADER,
        device_keys.TIME_HEADER,
    )
    assert device_keys.AHEAD_SECONDS == SYSTEM_TIME_TOLERANCE
    assert device_keys.BEHIND_SECONDS == TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE


def test_array_parts_fit_into_a_call() -> None:
    from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE

    assert FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE + (1 << 20) <= MAX_CALL_BYTES


def test_device_is_known_by_its_signature(keys: Path) -> None:
    assert DeviceKeys(keys).identify(signed(keys / "node_3")) == ("device 3", "")


def test_stranger_is_refused_with_a_reason(tmp_path: Path, keys: Path) -> None:
    known, good = DeviceKeys(keys), signed(keys / "node_3")
    make_node(tmp_path / "stranger")
    assert known.identify([]).problem == known.identify(good[:2]).problem == "a call without a signature"
    assert known.identify(good + good).problem == "a call without a signature"
    assert known.identify([*good[:2], (b"flwr-timestamp", b"now")]).problem == "a call without a signature"
    assert known.identify(signed(tmp_path / "stranger")).problem == "an unknown key"
    other = [good[0], *signed(keys / "node_0")[1:]]
    assert known.identify(other).problem == "a wrong signature for the key of device 3"


def test_wrong_clock_is_named(keys: Path) -> None:
    day = timedelta(days=1)
    behind = DeviceKeys(keys).identify(signed(keys / "node_3", datetime.now(UTC) - day)).problem
    ahead = DeviceKeys(keys).identify(signed(keys / "node_3", datetime.now(UTC) + day)).problem
    assert behind == "device 3, whose clock is 86400 s behind the server's"
    assert ahead.startswith("device 3, whose clock is 8") and ahead.endswith(" s ahead of the server's")


def test_revoked_key_is_refused_at_once(keys: Path) -> None:
    known, call = DeviceKeys(keys), signed(keys / "node_3")
    assert not known.identify(call).problem
    (keys / "node_3.pub").rename(keys / "node_3.revoked")
    assert known.identify(call).problem == "the revoked key of device 3"


def lines(path: Path) -> list[str]:
    return [line.partition(" ")[2] for line in path.read_text().splitlines()]


def test_access_log_tells_logins_and_a_key_that_is_used_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AccessLog(tmp_path / "access.log")
    log.record_call("device 3", "10.0.0.5", login=True)
    for _ in range(5):
        log.record_call("device 3", "10.0.0.5", login=False)
    log.record_call("device 3", "10.9.9.9", login=True)
    later = time.monotonic() + ADDRESS_SECONDS + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    log.record_call("device 3", "10.0.0.7", login=True)  # it has moved
    assert lines(tmp_path / "access.log") == [
        "device 3: login from 10.0.0.5",
        "device 3: its key is used at 10.9.9.9, and a moment ago at 10.0.0.5",
        "device 3: login from 10.0.0.7",
    ]


def test_access_log_cannot_be_flooded(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "access.log")
    for _ in range(MAX_LINES_PER_HOUR + 20):
        log.write("refused: an unknown key, from 10.0.0.9")
    assert len(lines(tmp_path / "access.log")) == MAX_LINES_PER_HOUR


# ---- what is read of a call


class Call:
    """A call that counts how often its body is read."""

    def __init__(self, headers: Headers, parts: list[bytes], path: str = "/v1/fleet/push-object") -> None:
        client = ("10.0.0.5", 1)
        self.scope = {"type": "http", "method": "POST", "path": path, "client": client, "headers": headers}
        self.parts, self.reads, self.sent, self.body = parts, 0, list[Any](), b""

    async def receive(self) -> dict[str, Any]:
        self.reads += 1
        if self.reads > len(self.parts):
            await asyncio.sleep(60.0)
        return {
            "type": "http.request",
            "body": self.parts[self.reads - 1],
            "more_body": self.reads < len(self.parts) or len(self.parts) > 1,
        }

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Reads the whole body, as Flower does."""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionError("the caller is gone")
            self.body += message["body"]
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def run(self, keys: Path) -> int:
        gate = AuthMiddleware(self.app, "t" * 64, keys, keys.parent / "access.log")
        asyncio.run(gate(self.scope, self.receive, self.send))
        return int(self.sent[0]["status"])


FOUR_GB = [(b"content-length", b"4294967296")]


def test_unsigned_call_of_4_gb_is_refused_unread(keys: Path) -> None:
    call = Call(FOUR_GB, [b"x" * 1000])
    assert call.run(keys) == 401 and call.reads == 0
    assert lines(keys.parent / "access.log") == ["refused: a call without a signature, from 10.0.0.5"]


def test_signed_call_that_declares_too_much_is_refused_unread(keys: Path) -> None:
    call = Call(signed(keys / "node_0") + FOUR_GB, [b"x" * 1000])
    assert call.run(keys) == 413 and call.reads == 0


def test_signed_call_that_declares_nothing_is_cut_off(keys: Path) -> None:
    part = b"x" * (1 << 20)
    call = Call(signed(keys / "node_0"), [part] * 100)
    assert call.run(keys) == 413 and len(call.body) == MAX_CALL_BYTES and call.reads == 9


def test_call_that_stalls_is_cut_off(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink_auth, "CALL_PART_SECONDS", 0.1)
    call = Call(signed(keys / "node_0"), [b"a", b"b"])
    assert call.run(keys) == 413 and call.body == b"ab"


def test_signed_call_passes_whole(keys: Path) -> None:
    call = Call(signed(keys / "node_0"), [b"x" * MAX_CALL_BYTES], "/v1/fleet/activate-node")
    assert call.run(keys) == 200 and len(call.body) == MAX_CALL_BYTES
    assert lines(keys.parent / "access.log") == ["device 0: login from 10.0.0.5"]


# ---- connections, with a real listener


@pytest.fixture
def port(keys: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(superlink_auth, "SILENT_SECONDS", 0.5)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

    [number] = free_ports(1)
    gate = AuthMiddleware(app, "t" * 64, keys, keys.parent / "access.log")
    http = without_silent_connections(AutoHTTPProtocol)
    server = uvicorn.Server(
        uvicorn.Config(gate, port=number, http=http, ws="none", log_level="critical", lifespan="off")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield number
    server.should_exit = True
    thread.join()


HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("sent", [b"", b"POST /v1/fleet/push-object HTTP/1.1\r\nhost:", HEALTH + b"GET /hea"])
def test_connection_without_a_complete_call_is_closed(port: int, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), 30.0) as connection:
        connection.sendall(sent)
        answer = b""
        while part := _received(connection):
            answer += part
        assert answer.count(b"200 OK") == sent.count(HEALTH)


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except ConnectionResetError:
        return b""


@pytest.mark.timeout(60)
def test_working_connection_stays_open(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 30.0) as connection:
        for _ in range(8):
            connection.sendall(HEALTH)
            assert b"200 OK" in connection.recv(4096)
            time.sleep(0.3)


@pytest.mark.timeout(60)
def test_surplus_connections_are_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink_auth, "MAX_CONNECTIONS", 1)
    with (
        socket.create_connection(("127.0.0.1", port), 30.0) as first,
        socket.create_connection(("127.0.0.1", port), 30.0) as second,
    ):
        assert _received(second) == b""
        first.sendall(HEALTH)
        assert b"200 OK" in first.recv(4096)
