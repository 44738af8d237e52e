"""The fresh-model service over TLS on loopback: authorised requests, answers and refusals."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from freshet.core.messages import Fresh, Slot
from freshet.core.server import RequestRefused
from freshet.flower import security
from freshet.flower.fresh import MAX_REQUEST_BYTES, SERVICE, FreshClient, FreshService, NoFreshAnswer

WEIGHTS = np.arange(5, dtype=np.float32)


class OneTrip:
    """Accepts one trip: device 1, trip 2, token ``good``."""

    def __init__(self) -> None:
        self.newer = True

    def answer(self, device: int, trip: int, token: str, slot: Slot) -> Fresh | None:
        if (device, trip, token) != (1, 2, "good"):
            raise RequestRefused("not yours")
        return Fresh(4, 4, WEIGHTS, {"control": WEIGHTS[:3]}) if self.newer else None

    def is_urgent(self, device: int, trip: int, token: str) -> bool:
        return token == "good"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("keys")
    security.make_authority(made)
    security.make_server(made, ["localhost", "127.0.0.1"])
    return made


@pytest.fixture
def service(folder: Path) -> Iterator[tuple[FreshService, OneTrip]]:
    answers = OneTrip()
    key, certificate = (folder / "server.key").read_bytes(), (folder / "server.crt").read_bytes()
    serving = FreshService(answers, "127.0.0.1:0", key, certificate)
    yield serving, answers
    serving.close()


def client(folder: Path, port: int, token: str = "good") -> FreshClient:
    return FreshClient(f"127.0.0.1:{port}", (folder / "ca.crt").read_text(), 1, 2, token)


def test_fresh_model_or_nothing_newer(folder: Path, service: tuple) -> None:
    serving, answers = service
    fresh = client(folder, serving.port).ask(Slot(2, "q"), 3, 5)
    assert fresh is not None and fresh[:2] == (4, 4) and np.array_equal(fresh.weights, WEIGHTS)
    assert np.array_equal(fresh.vectors["control"], WEIGHTS[:3])
    answers.newer = False
    assert client(folder, serving.port).ask(Slot(2, "q"), 3, 5) is None
    # a late answer counts as no
    assert any(client(folder, serving.port).is_urgent() for _ in range(10))
    assert not client(folder, serving.port, "bad").is_urgent()


def test_wrong_token_is_refused(folder: Path, service: tuple) -> None:
    with pytest.raises(NoFreshAnswer, match="not yours"):
        client(folder, service[0].port, "bad").ask(Slot(2, "q"), 3, 5)


def test_model_that_is_not_newer_or_has_another_size_is_refused(folder: Path, service: tuple) -> None:
    for base, size in ((4, 5), (3, 6)):
        with pytest.raises(NoFreshAnswer, match="not newer, or has another size"):
            client(folder, service[0].port).ask(Slot(2, "q"), base, size)


def test_other_authority_and_plain_text_get_no_answer(tmp_path: Path, service: tuple) -> None:
    security.make_authority(tmp_path)
    with pytest.raises(NoFreshAnswer, match="unavailable"):
        client(tmp_path, service[0].port).ask(Slot(2, "q"), 3, 5, seconds=60, tries=1)
    with pytest.raises(grpc.RpcError), grpc.insecure_channel(f"127.0.0.1:{service[0].port}") as plain:
        plain.unary_unary(f"/{SERVICE}/ask")(b"{}", timeout=60)


def test_missing_service_is_reported(folder: Path) -> None:
    with pytest.raises(NoFreshAnswer, match="unavailable"):
        client(folder, 1).ask(Slot(2, "q"), 3, 5, seconds=60, tries=2)


@pytest.mark.parametrize(
    "sent", [b"", b"[]", b'{"device": "1"}', b"\x80\x04", b'{"device": 1e400}', b"x" * 2 * MAX_REQUEST_BYTES]
)
def test_invalid_request_is_refused(folder: Path, service: tuple, sent: bytes) -> None:
    credentials = grpc.ssl_channel_credentials((folder / "ca.crt").read_bytes())
    with (
        grpc.secure_channel(f"127.0.0.1:{service[0].port}", credentials) as channel,
        pytest.raises(grpc.RpcError) as found,
    ):
        channel.unary_unary(f"/{SERVICE}/ask")(sent, timeout=60)
    assert found.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


#: A service with few descriptors, in a process that writes files like a run writes its checkpoints.
CROWDED = """
import resource, sys, time
from pathlib import Path
from freshet.flower.fresh import FreshService
folder, soft, hard = Path(sys.argv[1]), *map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
service = FreshService(None, "127.0.0.1:0", (folder / "server.key").read_bytes(), (folder / "server.crt").read_bytes())
print(service.port, flush=True)
sys.stdin.readline()
for number in range(40):
    (Path(sys.argv[1]) / "checkpoint").write_bytes(b"whole")
    time.sleep(0.05)
print("written", resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
"""


@pytest.mark.parametrize(("soft", "hard"), [(200, 200), (200, 2000)])
@pytest.mark.timeout(300)
def test_idle_connections_leave_descriptors_for_the_run(folder: Path, soft: int, hard: int) -> None:
    """300 silent connections to a process that may open 200 files, or 2,000 after raising its limit."""
    command = [sys.executable, "-c", CROWDED, str(folder), str(soft), str(hard)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdin is not None and serving.stdout is not None
        port = int(serving.stdout.readline())
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
        time.sleep(1.0)
        assert serving.communicate("go\n", timeout=120)[0] == f"written {hard}\n"
        for each in idle:
            each.close()


@pytest.mark.timeout(300)
def test_silent_connection_is_closed_and_others_are_served(folder: Path, service: tuple) -> None:
    with socket.create_connection(("127.0.0.1", service[0].port)) as silent:
        silent.settimeout(60)
        assert client(folder, service[0].port).ask(Slot(2, "q"), 3, 5) is not None
        assert silent.recv(1) == b"", "the service closes it"
