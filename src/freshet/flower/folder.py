"""The folder of a deployment: keys, settings, the Flower app, and what a person has to type on each machine."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, ValidationError

from freshet.config import load_tables, resolve
from freshet.core.method import Options, first_problem
from freshet.errors import ConfigError, RunError
from freshet.flower import keys, texts
from freshet.protection import check_deployable

LOOPBACK = ("127.0.0.1", "localhost", "::1")
APP = "freshet_app"


class ServerFile(Options):
    """``[server]`` of server.toml."""

    bind: str = Field("127.0.0.1", description="address on which the SuperLink and the fresh-model service listen")
    host: str = Field("127.0.0.1", description="name under which devices reach the server; it is in the certificate")
    port: int = Field(18000, ge=1, le=65535, description="port of the SuperLink")
    fresh_port: int = Field(18002, ge=1, le=65535, description="port of the fresh-model service")
    fresh: Literal["side", "messages", "none"] = Field(
        "side", description="fresh models: by the service, by a second message per trip, or not at all"
    )
    out: str = Field("", description="run directory (default: run/ in the deployment's folder)")
    ttl: float = Field(600.0, gt=0, description="seconds after which a trip that has not been answered is lost")
    patience: float = Field(120.0, gt=0, description="seconds that a triggered device may be away")
    wait_for: int = Field(1, ge=1, description="devices that have to be there before the first trip starts")
    restarts: int = Field(5, ge=0, description="how often a server app that died is started again from its checkpoint")


class DeviceFile(Options):
    """``[device]`` of device.toml."""

    superlink: str = Field(description="host:port of the SuperLink")
    data: str = Field("", description="module:function, a file .npz, or empty: the configuration's data set")
    model: str = Field("", description="module:Class, or empty: the configuration's network")
    folder: str = Field("", description="where the device remembers (default: memory/ in the deployment's folder)")
    port: int = Field(0, ge=0, le=65535, description="local port of the SuperNode (0: 19100 + the node's number)")


@dataclass(frozen=True)
class Folder:
    """Where things are in a deployment's folder."""

    root: Path

    @property
    def certificates(self) -> Path:
        return self.root / "certificates"

    @property
    def app(self) -> Path:
        return self.root / "app"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def nodes(self) -> Path:
        return self.state / "nodes.json"

    @property
    def control_token(self) -> Path:
        """What ``flwr`` must show to the SuperLink: whoever has it may start apps on the devices."""
        return self.state / "control.token"

    @property
    def executor_secret(self) -> Path:
        """What the process must show that starts the server app."""
        return self.state / "executor.secret"

    def key(self, node: int) -> Path:
        return self.root / "keys" / f"node_{node}"

    def check(self) -> "Folder":
        if not (self.root / "device.toml").is_file():
            raise RunError(f"{self.root} is no deployment; make one with: freshet deploy init {self.root}")
        return self

    def server(self) -> ServerFile:
        found: ServerFile = _read(self.root / "server.toml", "server", ServerFile)
        return found

    def device(self) -> DeviceFile:
        found: DeviceFile = _read(self.root / "device.toml", "device", DeviceFile)
        return found

    def out(self) -> Path:
        return Path(self.server().out or self.root / "run").absolute()

    def registered(self) -> dict[int, int]:
        """``{device: node}`` of those whose keys the SuperLink knows."""
        if not self.nodes.is_file():
            return {}
        try:
            found = json.loads(self.nodes.read_text(encoding="utf-8"))
            return {int(device): int(node) for node, device in found.items()}
        except (ValueError, AttributeError, TypeError) as error:
            raise RunError(f"{self.nodes} cannot be read ({error})") from None


def init(
    root: Path, tables: Mapping[str, Any], hosts: Sequence[str], server: Mapping[str, Any] | None = None
) -> Folder:
    """Make a deployment's folder, or add to one what is missing: nothing that is there is written over."""
    config = resolve(tables)
    check_deployable(config)
    given = ServerFile(**(_address(hosts) | dict(server or {})))
    folder = Folder(root.absolute())
    for each in (folder.root, folder.certificates, folder.root / "keys", folder.state, folder.root / "systemd"):
        each.mkdir(parents=True, exist_ok=True)
    for private in (folder.root / "keys", folder.state, folder.certificates):
        private.chmod(0o700)
    keys.make_authority(folder.certificates)
    keys.make_server(folder.certificates, list(dict.fromkeys([given.host, *hosts, "localhost", "127.0.0.1"])))
    for node in range(config.fleet.devices):
        keys.make_node(folder.key(node))
    _add(folder.root / "federation.toml", tomli_w.dumps(config.tables()))
    _add(folder.root / "server.toml", texts.settings("server", given))
    _add(folder.root / "device.toml", texts.settings("device", DeviceFile(superlink=f"{given.host}:{given.port}")))
    _add(folder.root / "README.md", texts.readme(folder.root, given.host, given.port, given.fresh_port))
    for name, unit in texts.units(folder.root).items():
        _add(folder.root / "systemd" / name, unit)
    write_app(folder.app, config.tables())
    return folder


def write_app(root: Path, tables: Mapping[str, Any]) -> None:
    """A plain Flower app: started by ``flwr run``, on any SuperLink. Files that are there stay."""
    package = root / APP
    package.mkdir(parents=True, exist_ok=True)
    _add(root / "pyproject.toml", texts.PYPROJECT.format(package=APP))
    _add(package / "__init__.py", '"""A federation of Freshet, as a Flower app."""\n')
    _add(package / "server_app.py", texts.SERVER_APP)
    _add(package / "client_app.py", texts.CLIENT_APP)
    _add(package / "federation.toml", tomli_w.dumps(dict(tables)))


def renew_app(folder: Folder) -> dict[str, Any]:
    """Take what federation.toml says now into the app that goes to the devices; returns its tables."""
    tables = resolve(load_tables(folder.root / "federation.toml")).tables()
    (folder.app / APP / "federation.toml").write_text(tomli_w.dumps(tables), encoding="utf-8")
    return tables


def run_config(folder: Folder) -> dict[str, Any]:
    """What the server app is told, for ``flwr run --run-config``."""
    server, pems = folder.server(), folder.certificates
    return {
        "out": str(folder.out()),
        "fresh": server.fresh,
        "fresh-bind": f"{server.bind}:{server.fresh_port}",
        "fresh-address": f"{server.host}:{server.fresh_port}",
        "key": str(pems / "server.key"),
        "certificate": str(pems / "server.crt"),
        "authority": str(pems / "ca.crt"),
        "token-key": str(folder.state / "token.key"),
        "nodes": str(folder.nodes),
        "pid": str(folder.state / "server.pid"),
        "ttl": server.ttl,
        "patience": server.patience,
        "wait-for": server.wait_for,
    }


def _address(hosts: Sequence[str]) -> dict[str, Any]:
    """Loopback unless a host was named."""
    named = [host for host in hosts if host not in LOOPBACK]
    return {"host": named[0], "bind": "0.0.0.0"} if named else {}  # noqa: S104


def _add(path: Path, content: str) -> None:
    if not path.exists():
        path.write_text(content, encoding="utf-8")


def _read(path: Path, section: str, kind: type[Options]) -> Any:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), f"cannot be read as TOML ({error})") from None
    try:
        return kind(**tables.get(section, {}))
    except ValidationError as error:
        raise first_problem(section, error, kind) from None
