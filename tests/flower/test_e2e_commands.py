"""The deploy commands, a plain Flower app and a federation served from Python, all with real processes."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from freshet.data.sources import load
from freshet.flower import commands
from freshet.flower.commands import QUIET, Child, Command
from freshet.flower.folder import APP, Folder
from freshet.flower.running import free_ports
from freshet.runs.reader import RunDirectory
from freshet.runs.world import read_world
from tests.flower.local_federation import (
    TIMEOUT_SECONDS,
    checkpoints,
    events_of,
    find_processes,
    freshet,
    parent_of,
    passes_audit,
    wait_for,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
SMALL = ["training.epochs=3", "data.train_samples=400", "data.test_samples=200", "run.eval_every=5", "run.period=1"]

FEDERATION = 'Path(__file__).with_name("federation.toml")'
#: A user's module: a network, and a device's own samples.
MINE = """
import torch
from freshet.data.sources import load as built_in


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
        )

    def forward(self, x):
        return self.layers(x)


def samples(start, stop):
    digits = built_in("digits")
    return digits.x_train[start:stop], digits.y_train[start:stop]


def load(node_config):
    start = 100 * node_config["partition-id"]
    return samples(start, start + 90 + node_config["partition-id"])
"""


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start commands in the background. At the end they are terminated and must leave no process behind."""
    started: list[subprocess.Popen] = []

    def command(*words: str, cwd: Path = tmp_path) -> subprocess.Popen:
        with (tmp_path / f"output_{len(started)}").open("wb") as output:
            started.append(subprocess.Popen(words, env=ENV, cwd=cwd, stdout=output, stderr=subprocess.STDOUT))
        return started[-1]

    yield command
    for each in started:
        each.send_signal(signal.SIGTERM)
    for each in started:
        each.wait(TIMEOUT_SECONDS)
    for name in ("node", "superlink_auth", "warm"):
        assert not find_processes(f"freshet.flower.{name}", str(tmp_path))


def deploy(*words: str) -> list[str]:
    return [sys.executable, "-m", "freshet", "deploy", *words]


def devices_in(run: Path, kind: str) -> list[int]:
    return [event["device"] for event in events_of(run, kind)]


def settings(words: list[str]) -> list[str]:
    return [word for each in words for word in ("-s", each)]


def machine_of(tmp_path: Path, node: int, root: Path, superlink: str) -> Path:
    """The folder on a device's machine: exactly the files that the README names."""
    machine = tmp_path / f"machine_{node}"
    for folder in ("certificates", "keys"):
        (machine / folder).mkdir(parents=True)
    (machine / "certificates" / "ca.crt").write_bytes((root / "certificates" / "ca.crt").read_bytes())
    (machine / "keys" / f"node_{node}").write_bytes((root / "keys" / f"node_{node}").read_bytes())
    given = {"superlink": superlink, "port": free_ports(1)[0]}
    (machine / "device.toml").write_text(tomli_w.dumps({"device": given}))
    return machine


def test_deploy_commands_on_several_machines(tmp_path: Path, begin: Callable[..., subprocess.Popen]) -> None:
    """Two devices bring their data, one is revoked, the server is stopped and resumed; ``watch`` shows the run."""
    root, run = tmp_path / "deploy", tmp_path / "deploy" / "run"
    length = ["run.until=100000", "run.checkpoint_every=2"]
    freshet("deploy", "init", str(root), "--devices", "2", *settings(SMALL + length), env=ENV, cwd=tmp_path)
    port, fresh_port = free_ports(2)
    (root / "server.toml").write_text(tomli_w.dumps({"server": {"port": port, "fresh_port": fresh_port}}))
    machines = [machine_of(tmp_path, node, root, f"127.0.0.1:{port}") for node in (0, 1)]
    digits = load("digits")
    np.savez(machines[0] / "mine.npz", x=digits.x_train[:150], y=digits.y_train[:150])
    (machines[1] / "mydata.py").write_text(MINE)

    server = begin(*deploy("server", str(root)))
    begin(*deploy("device", ".", "--node", "0", "--data", "mine.npz"), cwd=machines[0])
    begin(*deploy("device", ".", "--node", "1", "--data", "mydata:load"), cwd=machines[1])
    wait_for(lambda: {0, 1} <= set(devices_in(run, "upload")), "an upload of each device", lambda: alive(server))
    status = freshet("deploy", "status", str(root), env=ENV, cwd=tmp_path)
    assert ", running" in status.splitlines()[0] and "uploads" in status and "2 devices online" in status
    assert watch_shows_progress(begin, run, free_ports(1)[0])

    freshet("deploy", "revoke", str(root), "--node", "1", env=ENV, cwd=tmp_path)
    gone, before = len(devices_in(run, "trigger")), devices_in(run, "upload").count(0)
    wait_for(lambda: devices_in(run, "upload").count(0) >= before + 2, "further uploads", lambda: alive(server))
    assert devices_in(run, "trigger")[gone:].count(1) <= 1  # before the server noticed

    saved = checkpoints(run)
    wait_for(lambda: checkpoints(run) > saved, "a checkpoint", lambda: alive(server))
    freshet("deploy", "stop", str(root), env=ENV, cwd=tmp_path)
    assert server.wait(TIMEOUT_SECONDS) == 130 and RunDirectory(run).summary()["status"] == "interrupted"
    version = RunDirectory(run).summary()["versions"]
    server = begin(*deploy("server", str(root)))
    newer = lambda: [e for e in events_of(run, "aggregate") if e["version"] > version]  # noqa: E731
    wait_for(newer, "newer versions after the stop", lambda: alive(server))
    freshet("deploy", "stop", str(root), env=ENV, cwd=tmp_path)
    world = read_world(run)
    assert passes_audit(run) and world is not None and world.samples == [150, 91]


def test_devices_of_one_machine_share_a_trainer(tmp_path: Path, begin: Callable[..., subprocess.Popen]) -> None:
    """Two devices are one command. Changed samples are loaded again. If it is killed, nobody is left."""
    root, run = tmp_path / "deploy", tmp_path / "deploy" / "run"
    words = settings([*SMALL, "run.until=100000"])
    freshet("deploy", "init", str(root), "--devices", "2", *words, env=ENV, cwd=tmp_path)
    port, fresh_port = free_ports(2)
    (root / "server.toml").write_text(tomli_w.dumps({"server": {"port": port, "fresh_port": fresh_port}}))
    (root / "device.toml").write_text(tomli_w.dumps({"device": {"superlink": f"127.0.0.1:{port}"}}))
    (tmp_path / "mydata.py").write_text(MINE)
    server = begin(*deploy("server", str(root)))
    devices = begin(*deploy("device", str(root), "--nodes", "0-1", "--data", "mydata:load"))
    wait_for(lambda: {0, 1} <= set(devices_in(run, "upload")), "an upload of each device", lambda: alive(server))
    processes = find_processes("freshet.flower.warm", str(tmp_path))
    parents = [parent_of(pid) for pid in processes]
    assert parents.count(devices.pid) == 1, "one executor"
    assert len({pid for pid, parent in zip(processes, parents, strict=True) if parent_of(parent) == devices.pid}) == 1

    (tmp_path / "mydata.py").write_text(MINE.replace("start + 90 +", "start + 50 +"))
    before = len(devices_in(run, "upload"))
    wait_for(lambda: len(devices_in(run, "upload")) >= before + 6, "trips on the new samples", lambda: alive(server))
    assert "mydata.py has changed; loading again" in (tmp_path / "output_1").read_text()
    devices.kill()
    for name in ("warm", "node"):
        wait_for(lambda name=name: not find_processes(f"freshet.flower.{name}", str(tmp_path)), "the end of all")
    freshet("deploy", "stop", str(root), env=ENV, cwd=tmp_path)
    world = read_world(run)
    assert passes_audit(run) and world is not None and sorted(world.samples) == [50, 51]


def alive(process: subprocess.Popen) -> None:
    assert process.poll() is None, "the server ended"


def watch_shows_progress(begin: Callable[..., subprocess.Popen], run: Path, port: int) -> bool:
    """Whether ``freshet watch`` serves the data of a run, and newer data after a while."""
    begin(sys.executable, "-m", "freshet", "watch", str(run), "--port", str(port))

    def data(have: str = "") -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/data.json?have={have}", timeout=10) as answer:
                return json.loads(answer.read() or b"null")
        except OSError:
            return None

    first = wait_for(data, "the data of the page")
    later = wait_for(lambda: data(first["version"]), "newer data")
    assert len(later["document"]["runs"]) == 1
    return later["version"] != first["version"]


def test_plain_flower_app_on_a_plain_superlink(tmp_path: Path) -> None:
    """``flwr run`` with SCAFFOLD, which sends named vectors, and with a custom network and data."""
    app, out = tmp_path / "app", tmp_path / "run"
    words = [*settings([*SMALL, "run.rounds=4", "model.name=custom"]), "-m", "scaffold", "--devices", "2"]
    freshet("deploy", "app", str(app), *words, env=ENV, cwd=tmp_path)
    (app / APP / "mytask.py").write_text(MINE)
    device, server = app / APP / "client_app.py", app / APP / "server_app.py"
    mine = "from freshet_app.mytask import Net, load\n\napp ="
    device.write_text(_with_ending(device.read_text(), f"{mine} Device(load=load, model=Net).app(PATH)"))
    own = f"from freshet.assembly import Overrides\n{mine} server_app(PATH, Overrides(factory=Net))"
    server.write_text(_with_ending(server.read_text(), own))
    port, *nodes = free_ports(3)
    home = tmp_path / "flwr"
    home.mkdir()
    connection = {"address": f"127.0.0.1:{port}", "insecure": True}
    (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": "mine", "mine": connection}}))
    where = QUIET | {"FLWR_HOME": str(home), "OMP_NUM_THREADS": "1"}
    place = ("--insecure", "--host", "127.0.0.1", "--port")
    link = Command("superlink", [commands.program("flower-superlink"), *place, str(port)], where, tmp_path / "link.log")
    children = [Child(link)]
    try:
        commands.wait_for_port(port, TIMEOUT_SECONDS, lambda: children[0].exit_code is None)
        for node, own_port in enumerate(nodes):
            config = f'partition-id={node} folder="{tmp_path / f"memory_{node}"}"'
            command = [commands.program("flower-supernode"), *place, str(own_port), "--node-config", config]
            command += ["--superlink", f"127.0.0.1:{port}"]
            children.append(Child(Command("node", command, where, tmp_path / f"node_{node}.log")))
        config = f'out="{out}" wait-for=2'
        run = [commands.program("flwr"), "run", str(app), "mine", "--format", "json", "--run-config", config]
        commands.call(Command("run", run, where))
        wait_for((out / "world.json").is_file, "the end of the run")
    finally:
        commands.stop(children)
    summary, world = RunDirectory(out).summary(), read_world(out)
    assert summary["status"] == "finished" and summary["rounds"] == 4 and summary["rejected"] == summary["lost"] == 0
    assert passes_audit(out) and world is not None and sorted(world.samples) == [90, 91]


def _with_ending(source: str, ending: str) -> str:
    """A file of the app with its last line replaced."""
    return source.rpartition("\napp = ")[0] + "\n" + ending.replace("PATH", FEDERATION) + "\n"


def test_federation_served_from_python(tmp_path: Path, begin: Callable[..., subprocess.Popen]) -> None:
    """``Federation.deploy``: network and test samples are objects of the server's script. Devices name theirs."""
    port, fresh_port, *ports = free_ports(4)
    (tmp_path / "mine.py").write_text(MINE)
    script = f"""
from freshet import Federation
from mine import Net, samples

federation = Federation(
    Net, samples(300, 500), samples(300, 500), devices=2, method="fedssmu", training={{"epochs": 3}},
    run={{"rounds": 3, "per_round": 2, "period": 1.0, "eval_every": 5.0}},
)
result = federation.deploy("deploy", server={{"port": {port}, "fresh_port": {fresh_port}, "wait_for": 2}})
print(result.summary["status"], sum(p.numel() for p in result.module().parameters()))
"""
    (tmp_path / "serve.py").write_text(script)
    server = begin(sys.executable, "serve.py")
    root = tmp_path / "deploy"
    wait_for((root / "state" / "nodes.json").is_file, "the registration of keys", lambda: alive(server))
    for node, own_port in enumerate(ports):
        text = (root / "device.toml").read_text()
        (root / "device.toml").write_text(
            tomli_w.dumps({"device": {"superlink": f"127.0.0.1:{port}", "port": own_port}})
        )
        begin(*deploy("device", str(root), "--node", str(node), "--data", "mine:load", "--model", "mine:Net"))
        wait_for(
            lambda node=node: find_processes("freshet.flower.node", str(root / "memory" / f"node_{node}")),
            "its SuperNode",
        )
        (root / "device.toml").write_text(text)
    run = Folder(root).out()
    wait_for(lambda: server.poll() is not None, "the end of the run")
    assert server.returncode == 0 and "finished 2410" in (tmp_path / "output_0").read_text()
    world = read_world(run)
    assert (
        passes_audit(run)
        and RunDirectory(run).summary()["requests"] >= 1
        and world is not None
        and world.samples == [90, 91]
    )
