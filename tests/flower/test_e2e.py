"""Real Flower processes on this machine: SuperLink, SuperNodes, server app and client apps, with TLS and keys."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from freshet.core.messages import Slot
from freshet.flower import keys, processes
from freshet.flower.folder import APP, Folder
from freshet.flower.fresh import FreshClient, Unreached
from freshet.flower.processes import Child, Command
from freshet.flower.running import LocalRun, free_ports
from freshet.runs.audit import audit
from freshet.runs.reader import Run
from freshet.runs.world import read_world

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
#: Seconds for anything that should happen; machines may be slow, and a hang must not last for ever.
PATIENCE = 400.0


def tables(method: str, devices: int, rounds: int, **run: Any) -> dict[str, Any]:
    kind = {} if method in ("fedssmu", "fedavg") else {"trigger": "concurrency"}
    common: dict[str, Any] = {"rounds": rounds, "period": 1.0, "eval_every": 5.0, "checkpoint_every": 2.0}
    return {
        "method": {"name": method},
        "fleet": {"devices": devices},
        "training": {"epochs": 3},
        "data": {"train_samples": 400, "test_samples": 200},
        "run": common | kind | run,
    }


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., LocalRun]]:
    """Starts federations and stops whatever they have started."""
    begun: list[LocalRun] = []

    def begin(*arguments: Any, **options: Any) -> LocalRun:
        begun.append(LocalRun(tmp_path / "deploy", *arguments, tmp_path / "run", print, **options))
        return begun[-1]

    yield begin
    for each in begun:
        each.stop()


def events(local: LocalRun, kind: str) -> list[dict[str, Any]]:
    path = local.server.out / "events.jsonl"
    if not path.is_file():
        return []
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    return [event for event in map(json.loads, whole) if event["kind"] == kind]


def until(local: LocalRun, happened: Callable[[], Any], what: str) -> Any:
    """Wait for something while the federation goes on."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = happened()
        if found:
            return found
        assert local.look() is None, f"the run ended before {what}"
        time.sleep(0.5)
    raise AssertionError(f"{what} did not happen")


def adds_up(local: LocalRun) -> bool:
    found = audit(Run(local.server.out))
    assert found.passed, found.problem
    return True


def finished(local: LocalRun) -> Run:
    """The run at its end: whole files, and a log that adds up."""
    assert local.wait(PATIENCE) == "finished"
    assert adds_up(local)
    for name in ("config.toml", "world.json", "events.jsonl", "metrics.jsonl", "summary.json", "model.safetensors"):
        assert (local.server.out / name).is_file()
    return Run(local.server.out)


def checkpoints(local: LocalRun) -> int:
    """How many have been written so far."""
    return max((int(path.name) for path in (local.server.out / "checkpoint").glob("[0-9]*")), default=0)


def client_processes(folder: Folder, node: int) -> list[int]:
    """Client apps of a device that train now."""
    found = []
    mark = str(folder.root / "memory" / f"node_{node}").encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes() and b"flwr-clientapp" in path.with_name("cmdline").read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_fedasmu_with_a_device_and_the_server_killed_on_the_way(start: Callable[..., LocalRun]) -> None:
    """Trips of a killed device are lost and it is triggered again; a killed server goes on from its checkpoint."""
    local = start(tables("fedasmu", 3, 0, until=1e5))
    until(local, lambda: len(events(local, "aggregate")) >= 2, "the first aggregations")
    # a stranger and a neighbour ask for the fresh model
    trip = events(local, "trigger")[-1]
    server, authority = local.folder.server(), (local.folder.certificates / "ca.crt").read_text()
    address = f"{server.host}:{server.fresh_port}"
    with pytest.raises(Unreached):
        FreshClient(address, authority, trip["device"], trip["trip"], "0" * 64).ask(Slot(2, "q"), 0, 1)
    assert until(local, lambda: events(local, "rejected"), "the refusal")
    # the device: all of its processes, at once
    until(local, lambda: client_processes(local.folder, 0), "device 0 training")
    local.devices[0].signal(signal.SIGKILL)
    lost = until(local, lambda: [e for e in events(local, "lost") if e["device"] == 0], "the loss of its trip")
    number = lost[0]["trip"]
    begun = lambda: [e for e in events(local, "trigger") if e["device"] == 0 and e["trip"] > number]  # noqa: E731
    until(local, begun, "its next trip")
    # the server app, when all of that is in a checkpoint
    saved = checkpoints(local)
    until(local, lambda: checkpoints(local) > saved + 1, "a checkpoint")
    version, pid = events(local, "aggregate")[-1]["version"], processes.server_process(local.folder)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(local, lambda: processes.server_process(local.folder) not in (None, pid), "a new server app")
    until(local, lambda: [e for e in events(local, "aggregate") if e["version"] > version], "newer versions")
    local.stop()
    summary = Run(local.server.out).summary()
    assert summary["status"] == "interrupted" and adds_up(local)
    assert summary["versions"] > version and summary["lost"] >= 1 and summary["requests"] >= 1
    assert summary["trip_seconds"]["train"] > 0
    world = read_world(local.server.out)
    assert world is not None and len(world) == 3 and max(world.train_seconds) > 0


def test_fedssmu_by_messages(start: Callable[..., LocalRun]) -> None:
    """The fallback needs no port but the SuperLink's."""
    local = start(tables("fedssmu", 2, 2), server={"fresh": "messages"})
    summary = finished(local).summary()
    assert summary["rounds"] == 2 and summary["requests"] >= 1


HOSTILE = """
from pathlib import Path
import numpy as np
from flwr.app import Array, ArrayRecord
from freshet.flower.device import Device

device = Device()
honest = device._on_message

def on_message(federation, message, context):
    reply = honest(federation, message, context)
    weights, node = reply.content["model"]["weights"].numpy(), context.node_config["partition-id"]
    if node == 1:
        weights = np.full_like(weights, np.nan)
    if node == 2:
        weights = weights[:-1].copy()
    reply.content["model"] = ArrayRecord({"weights": Array(weights)})
    if node == 3:
        pickled = b"\\x80\\x04cos\\nsystem\\n"
        reply.content["model"] = ArrayRecord({"weights": Array("float32", (3,), "numpy.ndarray", pickled)})
    return reply

device._on_message = on_message
app = device.app(Path(__file__).with_name("federation.toml"))
"""


def test_hostile_uploads_and_an_unreachable_service(start: Callable[..., LocalRun], tmp_path: Path) -> None:
    """NaN, a wrong size and a pickle are refused, each with a reason; the honest device trains without merging."""
    package = tmp_path / "deploy" / "app" / APP
    package.mkdir(parents=True)
    (package / "client_app.py").write_text(HOSTILE)
    local = start(tables("fedasmu", 4, 0, until=1e5), server={"host": "nowhere.invalid"}, devices=_on_loopback)

    def reasons() -> dict[int, str]:
        return {e["device"]: e["reason"] for e in events(local, "rejected") + events(local, "lost") if "device" in e}

    until(local, lambda: reasons().keys() >= {1, 2, 3}, "three refusals")
    until(local, lambda: events(local, "aggregate"), "an aggregation")
    until(local, lambda: events(local, "note"), "the honest device saying that it trained on")
    assert "not finite" in reasons()[1] and "shape" in reasons()[2] and "flat array" in reasons()[3]
    assert all(part["device"] == 0 for e in events(local, "aggregate") for part in e["contributions"])
    notes = [e for e in events(local, "note") if e["about"] == "trained on without the fresh model"]
    assert notes and not events(local, "merge") and adds_up(local)


def _on_loopback(folder: Folder, node: int) -> Command:
    """A device that reaches the SuperLink, but not the address under which the fresh models are."""
    command = processes.supernode(folder, node)
    words = [f"127.0.0.1:{folder.server().port}" if "nowhere" in word else word for word in command.words]
    return Command(command.name, words, command.environment)


STRANGERS = {
    "unregistered key": "Failed to activate SuperNode",
    "no key": "SuperNodes must be registered",
    "another authority": "CERTIFICATE_VERIFY_FAILED",
}


def test_nobody_is_let_in_without_a_registered_key(tmp_path: Path, start: Callable[..., LocalRun]) -> None:
    """Unregistered key, no key, another authority, plain HTTP: each is refused, none gets a node number, and the run
    goes on."""
    local = start(tables("fedavg", 1, 0, until=1e5))
    base = local.command(0)
    keys.make_node(tmp_path / "stranger")
    keys.make_authority(tmp_path)

    def changed(name: str, option: str, value: str | None) -> Command:
        words = list(base.words)
        place = words.index(option)
        words[place : place + 2] = [] if value is None else [option, value]
        words[words.index("--port") + 1] = str(free_ports(1)[0])
        return Command(name, words, base.environment, tmp_path / f"{name}.log")

    key, root = "--auth-supernode-private-key", "--root-certificates"
    attempts = [
        changed("unregistered key", key, str(tmp_path / "stranger")),
        changed("no key", key, None),
        changed("another authority", root, str(tmp_path / "ca.crt")),
    ]
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{local.folder.server().port}/", timeout=10.0, trust_env=False)
    children = [Child(command) for command in attempts]
    try:
        for name, sign in STRANGERS.items():
            until(local, lambda name=name, sign=sign: sign in said(tmp_path, name), f"the refusal of {name}")
    finally:
        processes.stop(children)
    assert not any("SuperNode ID" in said(tmp_path, name) for name in STRANGERS)
    before = len(events(local, "aggregate"))
    until(local, lambda: len(events(local, "aggregate")) > before, "the next round")
    assert adds_up(local)


def said(folder: Path, name: str) -> str:
    path = folder / f"{name}.log"
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
