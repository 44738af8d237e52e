"""The Flower commands of a deployment, and the processes that they start."""

import base64
import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import tomli_w

from freshet.errors import RunError
from freshet.files import open_many, write_atomically
from freshet.flower import NEEDS_FLOWER, OVER_FILE, warm
from freshet.flower.device_keys import AHEAD_SECONDS, BEHIND_SECONDS, add_line
from freshet.flower.folder import Folder, run_config, update_app
from freshet.flower.security import write_secret
from freshet.flower.warm import PARENT

CONNECTION = "freshet"
#: No telemetry, no update check, no automatic installation of packages.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
#: Seconds that a process has to end after SIGTERM.
STOP_TIMEOUT_SECONDS = 10.0
#: Seconds that a Flower command may take.
FLOWER_TIMEOUT_SECONDS = 300.0


@dataclass
class Command:
    """A command, its extra environment variables, and the file for its output."""

    name: str
    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    log: Path | None = None

    def __str__(self) -> str:
        before = [f"{key}={shlex.quote(value)}" for key, value in self.environment.items()]
        return " ".join([*before, *map(shlex.quote, self.words)])


class Child:
    """A running command in its own process group."""

    def __init__(self, command: Command) -> None:
        self.command = command
        output: Any = None
        if command.log is not None:
            command.log.parent.mkdir(parents=True, exist_ok=True)
            output = command.log.open("ab")
        self.process = subprocess.Popen(  # noqa: S603
            command.words,
            env=full_environment(command) | {PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            start_new_session=True,
        )
        if output is not None:
            output.close()

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self.process.poll()

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def stop(children: Sequence[Child]) -> None:
    """Terminate all children, then kill those that remain."""
    for child in children:
        child.signal(signal.SIGTERM)
    end = time.monotonic() + STOP_TIMEOUT_SECONDS
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.1, end - time.monotonic()))
    for child in children:
        child.signal(signal.SIGKILL)
        child.process.wait()


# ---- commands


def program(name: str) -> str:
    """Find a program of Flower: beside this Python, or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise RunError(NEEDS_FLOWER)
    return found


def full_environment(command: Command) -> dict[str, str]:
    """The whole environment of a command. Flower looks for its other programs on the path.

    Modules are compiled once, even if this process does not write what it compiles.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | {"PATH": path} | command.environment


def flower_environment(folder: Folder) -> dict[str, str]:
    return QUIET | {"FLWR_HOME": str(folder.state / "flwr")}


def superlink(folder: Folder) -> list[Command]:
    """The SuperLink with access control, and the executor that starts the server app and survives the SuperLink."""
    server, pems, variables = folder.server(), folder.certificates, flower_environment(folder)
    secret = ("--superexec-auth-secret-file", str(folder.executor_secret))
    link = [
        *(sys.executable, "-m", "freshet.flower.superlink_auth"),
        *(str(folder.control_token), str(folder.root / "keys"), str(folder.access_log)),
        *("--host", server.bind, "--port", str(server.port), *secret),
        *("--ssl-ca-certfile", str(pems / "ca.crt")),
        *("--ssl-certfile", str(pems / "server.crt"), "--ssl-keyfile", str(pems / "server.key")),
        *("--enable-supernode-auth", "--database", str(folder.state / "superlink.db")),
        *("--isolation", "process", "--disable-runtime-dependency-installation"),
    ]
    executor = [
        *(program("flower-superexec"), "--runtime-api-address", f"127.0.0.1:{server.port}"),
        *("--root-certificates", str(pems / "ca.crt"), *secret),
    ]
    logs = folder.state / "logs"
    return [
        Command("superlink", link, variables, logs / "superlink.log"),
        Command("superexec", executor, variables, logs / "server.log"),
    ]


def register(folder: Folder, node: int) -> Command:
    words = [program("flwr"), "supernode", "register", f"{folder.key(node)}.pub", CONNECTION, "--format", "json"]
    return Command(f"register {node}", words, flower_environment(folder))


#: ``flwr supernode register`` for several keys in one process, because imports take most of its time.
_REGISTER = """
import sys
from flwr.cli.app import app
for key in sys.argv[2:]:
    app(["supernode", "register", key, sys.argv[1], "--format", "json"], standalone_mode=False)
"""


def register_several(folder: Folder, nodes: Sequence[int]) -> Command:
    public = [f"{folder.key(node)}.pub" for node in nodes]
    return Command("register", [sys.executable, "-c", _REGISTER, CONNECTION, *public], flower_environment(folder))


def unregister(folder: Folder, node_id: int) -> Command:
    words = [program("flwr"), "supernode", "unregister", str(node_id), CONNECTION, "--format", "json"]
    return Command(f"unregister {node_id}", words, flower_environment(folder))


def run(folder: Folder, accept_changes: bool = False) -> Command:
    settings = " ".join(f"{key}={json.dumps(value)}" for key, value in run_config(folder, accept_changes).items())
    words = [program("flwr"), "run", str(folder.app), CONNECTION, "--format", "json", "--run-config", settings]
    return Command("run", words, flower_environment(folder))


def list_nodes(folder: Folder) -> Command:
    return Command("list", [program("flwr"), "supernode", "list", CONNECTION], flower_environment(folder))


def device_home(folder: Folder, node: int) -> Path:
    """The folder of a device's memory."""
    return Path(folder.device().folder or folder.root / "memory" / f"node_{node}").absolute()


def over_file(folder: Folder, node: int) -> Path:
    """The file that says that a device's run is over."""
    return device_home(folder, node) / OVER_FILE


def node_port(folder: Folder, node: int) -> int:
    """The local port of a device's SuperNode."""
    return folder.device().port or 19100 + node


def task_secret(folder: Folder, node: int) -> Path:
    """The file with the secret that a device's SuperNode and its executor share."""
    return device_home(folder, node) / "executor.secret"


def executor(folder: Folder, ports: Mapping[int, int], trainers: int, threads: int) -> Command:
    """The executor of this machine's devices, ``{node: local port}`` of which are given."""
    words = [sys.executable, "-m", warm.MODULE, "executor", str(trainers), str(threads)]
    words += [f"{port}={task_secret(folder, node)}" for node, port in ports.items()]
    return Command("executor", words, _device_environment(folder, next(iter(ports))))


def shared_executor(folder: Folder, nodes: Sequence[int]) -> Command:
    """The executor of devices that share this machine's cores: at most one trip per core, and its share of threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    trainers, wanted = min(len(nodes), cores), os.environ.get("OMP_NUM_THREADS", "")
    threads = int(wanted) if wanted.isdecimal() and int(wanted) else cores // trainers
    return executor(folder, {node: node_port(folder, node) for node in nodes}, trainers, threads)


def make_task_secrets(folder: Folder, nodes: Iterable[int]) -> None:
    """Write the missing secrets of devices."""
    for node in nodes:
        path = task_secret(folder, node)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_secret(path, secrets.token_hex(32).encode())


def _device_environment(folder: Folder, node: int) -> dict[str, str]:
    modules = [str(Path.cwd()), str(folder.root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return QUIET | {"FLWR_HOME": str(device_home(folder, node) / "flwr"), "PYTHONPATH": os.pathsep.join(modules)}


def supernode(folder: Folder, node: int, data: str = "", model: str = "", trainer: str = "") -> Command:
    """The SuperNode of a device. Its node config says where its data, network, training loop and memory are."""
    device, home = folder.device(), device_home(folder, node)
    node_config: dict[str, Any] = {"partition-id": node, "folder": str(home)}
    node_config |= {"data": data or device.data, "model": model or device.model}
    node_config |= {"trainer": trainer or device.trainer}
    words = [
        *(sys.executable, "-m", "freshet.flower.node", "--superlink", device.superlink),
        *("--root-certificates", str(folder.certificates / "ca.crt")),
        *("--auth-supernode-private-key", str(folder.key(node))),
        *("--host", "127.0.0.1", "--port", str(node_port(folder, node))),
        *("--isolation", "process", "--superexec-auth-secret-file", str(task_secret(folder, node))),
        *("--node-config", " ".join(f"{key}={json.dumps(value)}" for key, value in node_config.items())),
    ]
    return Command(f"device {node}", words, _device_environment(folder, node))


# ---- starting and stopping


def call(command: Command) -> list[dict[str, Any]]:
    """Run a Flower command that answers in JSON. Returns its answers, at least one."""
    try:
        done = subprocess.run(  # noqa: S603
            command.words,
            env=full_environment(command),
            capture_output=True,
            text=True,
            check=False,
            timeout=FLOWER_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"Flower did not answer `{command.name}` within {FLOWER_TIMEOUT_SECONDS:g} s") from None
    found = _json_objects(done.stdout)
    if done.returncode or not found or not all(each.get("success") for each in found):
        message = next((str(each["error-message"]) for each in found if each.get("error-message")), "")
        lines = (message or done.stderr or done.stdout).strip().splitlines()
        raise RunError(f"Flower refused `{command.name}`: {lines[-1] if lines else 'no reason given'}")
    return found


def _json_objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects in the output of a command."""
    found: list[dict[str, Any]] = []
    decoder, place = json.JSONDecoder(), text.find("{")
    while place >= 0:
        try:
            document, place = decoder.raw_decode(text, place)
        except ValueError:
            place += 1
        else:
            found.append(document)
        place = text.find("{", place)
    return found


def connect(folder: Folder) -> None:
    """Write the address of the SuperLink and the access token where ``flwr`` looks for them, as after a login."""
    home, address = folder.state / "flwr", f"127.0.0.1:{folder.server().port}"
    home.mkdir(parents=True, exist_ok=True)
    connection = {"address": address, "root-certificates": str(folder.certificates / "ca.crt")}
    tables = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    write_atomically(home / "config.toml", tomli_w.dumps(tables).encode())
    for path in (folder.control_token, folder.executor_secret):
        if not path.exists():
            write_secret(path, secrets.token_hex(32).encode())
    token = folder.control_token.read_text(encoding="ascii")
    credentials = {"authn-type": "oidc", "oidc-access-token": token, "oidc-refresh-token": token}
    stored = {f"flower.account-auth.{address}.{key}": _base64(value) for key, value in credentials.items()}
    (home / "credentials.yaml").unlink(missing_ok=True)
    write_secret(home / "credentials.yaml", json.dumps(stored).encode())


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def check_auth(folder: Folder) -> None:
    """Raise unless the SuperLink refuses a call to its control interface without the token."""
    trust = ssl.create_default_context(cafile=str(folder.certificates / "ca.crt"))
    address = f"https://127.0.0.1:{folder.server().port}/v1/control/list-runs"
    try:
        answer = httpx.post(address, verify=trust, timeout=FLOWER_TIMEOUT_SECONDS, trust_env=False)
    except httpx.HTTPError as problem:
        raise RunError(f"the SuperLink does not answer ({problem}); see state/logs/superlink.log") from None
    if answer.status_code != httpx.codes.UNAUTHORIZED:
        raise RunError("the SuperLink lets strangers start apps; install the supported version of Flower, 1.41.0")


def check_clock(folder: Folder) -> None:
    """Raise if the server's clock shows that this machine's clock is wrong. A server that is down shows nothing."""
    trust, sent = ssl.create_default_context(cafile=str(folder.certificates / "ca.crt")), datetime.now(UTC)
    try:
        answer = httpx.get(f"https://{folder.device().superlink}/health", verify=trust, timeout=10.0, trust_env=False)
        server = parsedate_to_datetime(answer.headers["date"])
    except (httpx.HTTPError, KeyError, ValueError):
        return
    ahead = (sent - server).total_seconds() - 1.0  # whole seconds are sent, and the answer may have taken long
    behind = (server - datetime.now(UTC)).total_seconds()
    if ahead > AHEAD_SECONDS or behind > BEHIND_SECONDS:
        side = f"{ahead:.0f} s ahead of" if ahead > 0 else f"{behind:.0f} s behind"
        raise RunError(f"the clock of this machine is {side} the server's, which would refuse its calls; set the clock")


def _listens(port: int) -> bool:
    """Whether a process listens on a port of this machine."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def wait_for_port(port: int, seconds: float, alive: Callable[[], bool]) -> None:
    """Wait until a process listens on the port."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and alive():
        if _listens(port):
            return
        time.sleep(0.1)
    raise RunError(f"the SuperLink does not listen on port {port}; see state/logs/superlink.log")


def register_all(folder: Folder, devices: int) -> None:
    """Register the keys that are new to the SuperLink, and write which node is which device."""
    known = folder.registered_nodes()
    new = [node for node in range(devices) if node not in known and Path(f"{folder.key(node)}.pub").is_file()]
    if new:
        answers = call(register_several(folder, new))
        write_nodes(folder, known | {node: int(each["node-id"]) for node, each in zip(new, answers, strict=True)})


def write_nodes(folder: Folder, known: Mapping[int, int]) -> None:
    write_atomically(folder.nodes, json.dumps({str(node): device for device, node in known.items()}).encode())


def start_server(folder: Folder, *, executor: bool = True) -> list[Child]:
    """Start the SuperLink, register the keys, and start the executor unless the server app runs elsewhere."""
    open_many()  # inherited by the children, because idle connections of strangers take descriptors
    tables = update_app(folder)
    connect(folder)
    link, starter = superlink(folder)
    children = [Child(link)]
    try:
        wait_for_port(folder.server().port, FLOWER_TIMEOUT_SECONDS, lambda: children[0].exit_code is None)
        check_auth(folder)
        if executor:
            children.append(Child(starter))
        register_all(folder, int(tables["fleet"]["devices"]))
    except BaseException:
        stop(children)
        raise
    return children


def revoke(folder: Folder, node: int) -> None:
    """Lock out a device, whether or not the server runs.

    The SuperLink's access control refuses a revoked key at once. A running SuperLink also forgets the node.
    """
    public, known = Path(f"{folder.key(node)}.pub"), folder.registered_nodes()
    if public.is_file():
        public.rename(public.with_suffix(".revoked"))
    node_id = known.pop(node, None)
    write_nodes(folder, known)
    add_line(folder.access_log, f"device {node}: its key was revoked")
    if node_id is not None and _listens(folder.server().port):
        call(unregister(folder, node_id))


def server_process(folder: Folder) -> int | None:
    """The process id of the server app, or None if it does not run."""
    return _live_process(folder.state / "server.pid", b"flwr-serverapp")


def deploy_process(folder: Folder) -> int | None:
    """The process id of ``deploy server``, or None if it does not run."""
    return _live_process(folder.state / "deploy.pid", b"deploy")


def _live_process(path: Path, word: bytes) -> int | None:
    """The process id in a file, or None if that process has ended or the id now belongs to another one."""
    try:
        pid = int(path.read_text(encoding="ascii"))
        if Path("/proc/self").exists():
            return pid if word in Path(f"/proc/{pid}/cmdline").read_bytes() else None
        os.kill(pid, 0)
    except (OSError, ValueError):
        return None
    return pid


def stop_deploy_server(folder: Folder, seconds: float = 12 * STOP_TIMEOUT_SECONDS) -> None:
    """Terminate the process of ``deploy server``, and wait for it."""
    pid = deploy_process(folder)
    if pid is None:
        return
    os.kill(pid, signal.SIGTERM)
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if deploy_process(folder) != pid:
            return
        time.sleep(0.2)
    raise RunError(f"process {pid} did not end within {seconds:g} s")
