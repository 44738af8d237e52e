"""Strangers and hostile devices, with real processes: each is refused, and the run continues."""

import shutil
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from freshet.errors import RunError
from freshet.flower import commands, security
from freshet.flower.commands import Child, Command
from freshet.flower.folder import APP, Folder
from freshet.flower.hosting import acquire_task
from freshet.flower.running import LocalRun, free_ports
from tests.flower.local_federation import TIMEOUT_SECONDS, events, passes_audit, tables, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

HOSTILE = """
from pathlib import Path
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp
from freshet.flower.device import Device

honest = Device().app(Path(__file__).with_name("federation.toml"))
app = ClientApp()

@app.train()
def train(message, context):
    reply = honest(message, context)
    weights, node = reply.content["model"]["weights"].numpy(), context.node_config["partition-id"]
    if node == 1:
        weights = np.full_like(weights, np.nan)
    if node == 2:
        weights = weights[:-1].copy()
    if node == 3:
        weights = np.zeros(8_000_000, np.float32)
    reply.content["model"] = ArrayRecord({"weights": Array(weights)})
    if node == 4:
        pickled = b"\\x80\\x04cos\\nsystem\\n"
        reply.content["model"] = ArrayRecord({"weights": Array("float32", (3,), "numpy.ndarray", pickled)})
    if node == 5:  # repeats its first upload
        first = Path(context.node_config["folder"]) / "first"
        if not first.exists():
            first.write_text(reply.content["answer"]["ticket"])
        reply.content["answer"] = ConfigRecord(dict(reply.content["answer"]) | {"ticket": first.read_text()})
    return reply
"""
REASONS = {1: "not finite", 2: "shape", 3: "shape", 4: "flat array", 5: "another trip"}


def test_hostile_uploads_and_an_unreachable_service(start: Callable[..., LocalRun], tmp_path: Path) -> None:
    """NaN, too few and too many numbers, a pickle and a repeated upload are refused, each with a reason. The honest
    device trains without merging, because it cannot reach the fresh-model service."""
    package = tmp_path / "deploy" / "app" / APP
    package.mkdir(parents=True)
    (package / "client_app.py").write_text(HOSTILE)
    local = start(tables("fedasmu", 6, 0, until=1e5), server={"host": "nowhere.invalid"}, devices=_on_loopback)

    def refused(device: int) -> bool:
        found = [e["reason"] for e in events(local, "rejected", "lost") if e.get("device") == device]
        return any(REASONS[device] in reason for reason in found)

    for device, reason in REASONS.items():
        wait_until(local, lambda device=device: refused(device), f"the refusal of device {device}: {reason}")
    wait_until(local, lambda: any(_by(e, 0) for e in events(local, "aggregate")), "an aggregation")
    wait_until(local, lambda: trained_without_fresh(local), "a note that a device trained without the fresh model")
    local.stop()
    replayed = [e for e in events(local, "aggregate") if _by(e, 5)]
    assert len(replayed) <= 1 and not any(_by(e, k) for e in events(local, "aggregate") for k in (1, 2, 3, 4))
    assert not events(local, "merge") and passes_audit(local.server.out)


def trained_without_fresh(local: LocalRun) -> list[dict]:
    return [e for e in events(local, "note") if e["about"] == "trained on without the fresh model"]


def _by(event: dict, device: int) -> bool:
    return any(part["device"] == device for part in event["contributions"])


def _on_loopback(folder: Folder, node: int) -> Command:
    """A device that reaches the SuperLink but not the fresh-model service."""
    command = commands.supernode(folder, node)
    words = [f"127.0.0.1:{folder.server().port}" if "nowhere" in word else word for word in command.words]
    return Command(command.name, words, command.environment)


STRANGERS = {
    "unregistered key": "SuperNode terminated gracefully",
    "no key": "SuperNode terminated gracefully",
    "another authority": "CERTIFICATE_VERIFY_FAILED",
}


def test_nobody_connects_without_a_registered_key(tmp_path: Path, start: Callable[..., LocalRun]) -> None:
    """An unregistered key, no key, another authority and plain HTTP are refused, and get no node id. Nobody starts an
    app without the server's token. The run continues."""
    local = start(tables("fedavg", 1, 0, until=1e5))
    base = local.command(0)
    security.make_node(tmp_path / "stranger")
    security.make_authority(tmp_path)

    def variant(name: str, option: str, value: str | None) -> Command:
        words = list(base.words)
        place = words.index(option)
        words[place : place + 2] = [] if value is None else [option, value]
        words[words.index("--port") + 1] = str(free_ports(1)[0])
        return Command(name, words, base.environment, tmp_path / f"{name}.log")

    key, root = "--auth-supernode-private-key", "--root-certificates"
    attempts = [
        variant("unregistered key", key, str(tmp_path / "stranger")),
        variant("no key", key, None),
        variant("another authority", root, str(tmp_path / "ca.crt")),
    ]
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{local.folder.server().port}/", timeout=10.0, trust_env=False)
    children = [Child(command) for command in attempts]
    try:
        assert_starts_no_app(local, tmp_path)
        for name, sign in STRANGERS.items():
            wait_until(local, lambda name=name, sign=sign: sign in log_text(tmp_path, name), f"the refusal of {name}")
        wait_until(local, lambda: "SuperNode ID" in logs(local), "the connection of the registered device")
    finally:
        commands.stop(children)
    assert not any("SuperNode ID" in log_text(tmp_path, name) for name in STRANGERS)
    access = local.folder.access_log.read_text()
    assert "device 0: login from 127.0.0.1" in access and "refused: an unknown key, from 127.0.0.1" in access
    secrets = [path.read_text() for path in (local.folder.control_token, local.folder.executor_secret)]
    assert not any(secret in logs(local) for secret in secrets)
    before = len(events(local, "aggregate"))
    wait_until(local, lambda: len(events(local, "aggregate")) > before, "the next round")
    local.stop()
    assert passes_audit(local.server.out)


def assert_starts_no_app(local: LocalRun, tmp_path: Path) -> None:
    """Flower's control interface and its documentation need the server's token, even for a ``flwr run`` that knows the
    address and the authority. A local process without the executor's secret gets no server app."""
    address = f"https://127.0.0.1:{local.folder.server().port}"
    trust = ssl.create_default_context(cafile=str(local.folder.certificates / "ca.crt"))
    with httpx.Client(verify=trust, timeout=TIMEOUT_SECONDS, trust_env=False) as client:
        for path in ("/v1/control/start-run", "/v1/control/register-node", "/docs", "/openapi.json"):
            for token in ({}, {"authorization": "Bearer " + "0" * 64}):
                assert client.post(address + path, headers=token).status_code == 401
    with pytest.raises(httpx.HTTPStatusError) as refused:
        acquire_task(
            b"another secret", (local.folder.certificates / "ca.crt").read_bytes(), address.removeprefix("https://")
        )
    assert refused.value.response.status_code in (401, 403)
    command = commands.run(local.folder)
    elsewhere = tmp_path / "flwr"
    elsewhere.mkdir()
    shutil.copy(local.folder.state / "flwr" / "config.toml", elsewhere / "config.toml")
    with pytest.raises(RunError):
        commands.call(Command("run", command.words, command.environment | {"FLWR_HOME": str(elsewhere)}))
    assert "refused: POST '/v1/control/start-run'" in log_text(local.folder.state / "logs", "superlink")


def logs(local: LocalRun) -> str:
    """The logs of all processes of a federation."""
    return "".join(log_text(path.parent, path.stem) for path in (local.folder.state / "logs").glob("*.log"))


def log_text(folder: Path, name: str) -> str:
    path = folder / f"{name}.log"
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
