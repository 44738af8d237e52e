"""Files that ``deploy init`` and ``deploy app`` write."""

import sys
from pathlib import Path

import tomli_w

from freshet._version import __version__
from freshet.core.method import Options

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
ttl = 600.0
patience = 120.0
wait-for = 1
poll = 0.2
"""

SERVER_APP = '''\
"""The server: method, data to test on and length of the run are in federation.toml."""

from pathlib import Path

from freshet.flower.server import server_app

app = server_app(Path(__file__).with_name("federation.toml"))
'''

CLIENT_APP = '''\
"""A device. Left as it is, it trains the network and its part of the data set that federation.toml names."""

from pathlib import Path

from freshet.flower.device import Device

# ---- your model and data: uncomment and fill in
# def load(node_config):
#     return x, y                     # this device's training samples: arrays, or a torch Dataset
#
# def model():
#     return MyModule()               # a torch.nn.Module that gives one score per class
#
# app = Device(load=load, model=model).app(Path(__file__).with_name("federation.toml"))

app = Device().app(Path(__file__).with_name("federation.toml"))
'''

README = """\
# A federation

Made by Freshet {version}. Server: `{host}`, ports {port} (SuperLink) and {fresh_port} (fresh models). Settings:
`federation.toml` (method, training, data, model, length of the run), `server.toml`, `device.toml`.

## On the server

    pip install 'freshet-fl[flower]'
    freshet deploy server {root}            # or with --dry-run, to see the commands
    freshet deploy status {root}
    freshet deploy stop {root}

## On the machine of device K

It needs `certificates/ca.crt`, `keys/node_K` and `device.toml`, and nothing else of this folder:

    pip install 'freshet-fl[flower]'
    mkdir -p federation/certificates federation/keys
    scp {host}:{root}/certificates/ca.crt federation/certificates/
    scp {host}:{root}/keys/node_K federation/keys/
    scp {host}:{root}/device.toml federation/
    freshet deploy device federation --node K --data mydata:load      # module:function, or a file .npz with x and y

The private key of a node should be on its own machine only: remove `keys/node_K` (not `.pub`) here afterwards.

## As services

    cp {root}/systemd/freshet-server.service /etc/systemd/system/        # on the server
    cp freshet-device@.service /etc/systemd/system/                      # on a device
    systemctl enable --now freshet-server       # or: freshet-device@K

## To lock a device out

    freshet deploy revoke {root} --node K

`certificates/ca.key` signs server certificates: keep it off machines that do not need it.
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


def settings(section: str, values: Options) -> str:
    """A file of settings with what each means above it."""
    lines = [f"[{section}]"]
    for name, field in type(values).model_fields.items():
        lines += [f"# {field.description}", tomli_w.dumps({name: getattr(values, name)}).rstrip()]
    return "\n".join(lines) + "\n"


def readme(root: Path, host: str, port: int, fresh_port: int) -> str:
    return README.format(version=__version__, root=root, host=host, port=port, fresh_port=fresh_port)


def units(root: Path) -> dict[str, str]:
    server = UNIT.format(what="server", python=sys.executable, command=f"server {root}")
    device = UNIT.format(what="device %i", python=sys.executable, command=f"device {root} --node %i")
    return {"freshet-server.service": server, "freshet-device@.service": device}
