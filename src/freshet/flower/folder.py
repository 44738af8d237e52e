"""The folder of a deployment, as ``deploy init`` and ``deploy app`` write it: keys, settings, Flower app and README."""

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, ValidationError

from freshet._version import __version__
from freshet.config import check_deployable, load_tables, resolve
from freshet.core.method import Options, first_problem
from freshet.errors import ConfigError, RunError
from freshet.flower import security
from freshet.flower.status import STATUS_FILE

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "freshet-app"
version = "1.0.0"
description = "A federation of Freshet"
license = "Apache-2.0"
dependencies = ["freshet-fl[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["{package}"]

[tool.flwr.app]
publisher = "freshet"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

# Paths are on the server. `freshet deploy server` fills these in from server.toml.
[tool.flwr.app.config]
out = ""
fresh = "messages"
fresh-bind = "127.0.0.1:18002"
fresh-address = "127.0.0.1:18002"
key = ""
certificate = ""
authority = ""
token-key = ""
nodes = ""
pid = ""
status = ""
ttl = 600.0
patience = 120.0
wait-for = 1
farewell = 0.0
poll = 0.2
accept-changes = false
"""

SERVER_APP = '''\
"""The server. federation.toml names the method, the test data and the length of the run."""

from pathlib import Path

from freshet.flower.server_app import server_app

app = server_app(Path(__file__).with_name("federation.toml"))
'''

CLIENT_APP = '''\
"""A device. Unchanged, it trains the network that federation.toml names on its part of the data set named there."""

from pathlib import Path

from freshet.flower.device import Device

# ---- your model and data: uncomment and complete
# def load(node_config):
#     return x, y                     # this device's training samples: arrays, or a torch Dataset
#
# def model():
#     return MyModule()               # a torch.nn.Module that gives one score per class
#
# app = Device(load=load, model=model).app(Path(__file__).with_name("federation.toml"))

app = Device().app(Path(__file__).with_name("federation.toml"))
'''

#: The two apps of a federation that a function of the user's makes, which lies in a folder of this machine.
MADE_SERVER_APP = '''\
"""The server of the federation that {module}.{name}() makes."""

import sys
from pathlib import Path

from freshet.flower.server_app import server_app

sys.path.insert(0, {folder!r})
from {module} import {name}  # noqa: E402

app = server_app(Path(__file__).with_name("federation.toml"), {name}().assembly.overrides)
'''
MADE_CLIENT_APP = '''\
"""A device with its part of the samples of the federation that {module}.{name}() makes."""

import sys
from pathlib import Path

from freshet.flower.device import Device

sys.path.insert(0, {folder!r})
from {module} import {name}  # noqa: E402

app = Device(overrides=lambda: {name}().assembly.overrides).app(Path(__file__).with_name("federation.toml"))
'''

README = """\
# A federation

Made by Freshet {version}. Server: `{host}`, ports {port} (SuperLink) and {fresh_port} (fresh models). Settings are in
`federation.toml` (method, training, data, model, length of the run), `server.toml` and `device.toml`.

## On the server

    pip install 'freshet-fl[flower]'
    freshet deploy server {root}            # --dry-run prints the commands
    freshet deploy status {root}
    freshet deploy stop {root}

## On the machine of device K

It needs `certificates/ca.crt`, `keys/node_K` and `device.toml` from this folder, and nothing else:

    pip install 'freshet-fl[flower]'
    mkdir -p federation/certificates federation/keys
    scp {host}:{root}/certificates/ca.crt federation/certificates/
    scp {host}:{root}/keys/node_K federation/keys/
    scp {host}:{root}/device.toml federation/
    freshet deploy device federation --node K --data mydata:load      # module:function, or a file .npz with x and y

Keep the private key of a node on its own machine only: afterwards, remove `keys/node_K` (not `.pub`) here.

## As services

    cp {root}/systemd/freshet-server.service /etc/systemd/system/        # on the server
    cp freshet-device@.service /etc/systemd/system/                      # on a device
    systemctl enable --now freshet-server       # or: freshet-device@K

## Lock out a device

    freshet deploy revoke {root} --node K

`certificates/ca.key` signs server certificates. Keep it off machines that do not need it.
"""

UNIT = """\
[Unit]
Description=Freshet {what}
After=network-online.target
Wants=network-online.target

[Service]
ExecStart={python} -m freshet deploy {command}
Restart=on-failure
RestartSec=10
NoNewPrivileges=true
PrivateTmp=true

[Install]
WantedBy=multi-user.target
"""


def settings_file(section: str, values: Options) -> str:
    """A file of settings, each with its description above it."""
    lines = [f"[{section}]"]
    for name, field in type(values).model_fields.items():
        lines += [f"# {field.description}", tomli_w.dumps({name: getattr(values, name)}).rstrip()]
    return "\n".join(lines) + "\n"


def readme(root: Path, host: str, port: int, fresh_port: int) -> str:
    return README.format(version=__version__, root=root, host=host, port=port, fresh_port=fresh_port)


def units(root: Path) -> dict[str, str]:
    server = UNIT.format(what="server", python=sys.executable, command=f"server {root}")
    device = UNIT.format(what="device %i", python=sys.executable, command=f"device {root} --node %i --stay")
    return {"freshet-server.service": server, "freshet-device@.service": device}


LOOPBACK = ("127.0.0.1", "localhost", "::1")
APP = "freshet_app"


class ServerFile(Options):
    """``[server]`` of server.toml."""

    bind: str = Field("127.0.0.1", description="address on which SuperLink and fresh-model service listen")
    host: str = Field("127.0.0.1", description="name of the server for devices, as in its certificate")
    port: int = Field(18000, ge=1, le=65535, description="port of the SuperLink")
    fresh_port: int = Field(18002, ge=1, le=65535, description="port of the fresh-model service")
    fresh: Literal["side", "messages", "none"] = Field(
        "side", description="fresh models: from the service, by a second message per trip, or none"
    )
    out: str = Field("", description="run directory (default: run/ in the deployment's folder)")
    ttl: float = Field(600.0, gt=0, description="seconds after which an unanswered trip is lost")
    patience: float = Field(120.0, gt=0, description="seconds that a triggered device may be offline")
    wait_for: int = Field(1, ge=1, description="devices that must be online before the first trip starts")
    restarts: int = Field(5, ge=0, description="how often a dead process of the server is restarted")
    farewell: float = Field(60.0, ge=0, description="most seconds at the end of a run to tell devices that it is over")


class DeviceFile(Options):
    """``[device]`` of device.toml."""

    superlink: str = Field(description="host:port of the SuperLink")
    data: str = Field("", description="module:function, a file .npz, or empty: the configuration's data set")
    model: str = Field("", description="module:Class, or empty: the configuration's network")
    trainer: str = Field("", description="module:function, or empty: the built-in training loop")
    folder: str = Field("", description="memory of the device (default: memory/ in the deployment's folder)")
    port: int = Field(0, ge=0, le=65535, description="local port of the SuperNode (0: 19100 + the node's number)")


@dataclass(frozen=True)
class Folder:
    """The paths in a deployment's folder."""

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
        """The token that ``flwr`` presents to the SuperLink. Its owner may start apps on the devices."""
        return self.state / "control.token"

    @property
    def executor_secret(self) -> Path:
        """The secret of the process that starts the server app."""
        return self.state / "executor.secret"

    @property
    def status(self) -> Path:
        """What the server says about itself and its devices."""
        return self.state / STATUS_FILE

    @property
    def access_log(self) -> Path:
        """Logins, refusals and revocations, a line each."""
        return self.state / "logs" / "access.log"

    def key(self, node: int) -> Path:
        return self.root / "keys" / f"node_{node}"

    def check(self) -> "Folder":
        if not (self.root / "device.toml").is_file():
            raise RunError(f"{self.root} is not a deployment; make one with: freshet deploy init {self.root}")
        return self

    def server(self) -> ServerFile:
        found: ServerFile = _read(self.root / "server.toml", "server", ServerFile)
        return found

    def device(self) -> DeviceFile:
        found: DeviceFile = _read(self.root / "device.toml", "device", DeviceFile)
        return found

    def out(self) -> Path:
        return Path(self.server().out or self.root / "run").absolute()

    def registered_nodes(self) -> dict[int, int]:
        """``{device: node}`` of the devices with keys registered at the SuperLink."""
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
    """Make a deployment's folder, or add missing files to one. Existing files are never overwritten."""
    config = resolve(tables)
    check_deployable(config)
    given = ServerFile(**(_address(hosts) | dict(server or {})))
    folder = Folder(root.absolute())
    for each in (folder.root, folder.certificates, folder.root / "keys", folder.state, folder.root / "systemd"):
        each.mkdir(parents=True, exist_ok=True)
    for private in (folder.root / "keys", folder.state, folder.certificates):
        private.chmod(0o700)
    security.make_authority(folder.certificates)
    security.make_server(folder.certificates, list(dict.fromkeys([given.host, *hosts, "localhost", "127.0.0.1"])))
    for node in range(config.fleet.devices):
        security.make_node(folder.key(node))
    _write_missing(folder.root / "federation.toml", tomli_w.dumps(config.tables()))
    _write_missing(folder.root / "server.toml", settings_file("server", given))
    _write_missing(
        folder.root / "device.toml", settings_file("device", DeviceFile(superlink=f"{given.host}:{given.port}"))
    )
    _write_missing(folder.root / "README.md", readme(folder.root, given.host, given.port, given.fresh_port))
    for name, unit in units(folder.root).items():
        _write_missing(folder.root / "systemd" / name, unit)
    write_app(folder.app, config.tables())
    return folder


def write_app(root: Path, tables: Mapping[str, Any]) -> None:
    """Write a plain Flower app for ``flwr run`` on any SuperLink. Existing files stay."""
    package = root / APP
    package.mkdir(parents=True, exist_ok=True)
    _write_missing(root / "pyproject.toml", PYPROJECT.format(package=APP))
    _write_missing(package / "__init__.py", '"""A federation of Freshet, as a Flower app."""\n')
    _write_missing(package / "server_app.py", SERVER_APP)
    _write_missing(package / "client_app.py", CLIENT_APP)
    _write_missing(package / "federation.toml", tomli_w.dumps(dict(tables)))


def write_made_app(root: Path, made_by: str, folder: Path) -> None:
    """Write the server and the device of a federation that ``module:function`` in a folder makes."""
    module, _, name = made_by.partition(":")
    package = root / APP
    package.mkdir(parents=True, exist_ok=True)
    for file, text in (("server_app.py", MADE_SERVER_APP), ("client_app.py", MADE_CLIENT_APP)):
        _write_missing(package / file, text.format(module=module, name=name, folder=str(folder)))


def update_app(folder: Folder) -> dict[str, Any]:
    """Copy the current federation.toml into the app that devices get. Returns its tables."""
    tables = resolve(load_tables(folder.root / "federation.toml")).tables()
    (folder.app / APP / "federation.toml").write_text(tomli_w.dumps(tables), encoding="utf-8")
    return tables


def run_config(folder: Folder, accept_changes: bool = False) -> dict[str, Any]:
    """The settings of the server app, for ``flwr run --run-config``."""
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
        "status": str(folder.status),
        "ttl": server.ttl,
        "patience": server.patience,
        "wait-for": server.wait_for,
        "farewell": server.farewell,
        "accept-changes": accept_changes,
    }


def _address(hosts: Sequence[str]) -> dict[str, Any]:
    """Listen on loopback unless a host is named."""
    named = [host for host in hosts if host not in LOOPBACK]
    return {"host": named[0], "bind": "0.0.0.0"} if named else {}  # noqa: S104


def _write_missing(path: Path, content: str) -> None:
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
