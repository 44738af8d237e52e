"""A Flower app with your own model and data: Freshet's methods on your own SuperLink.

python examples/flower_app.py [DIR]          needs: pip install 'freshet-fl[flower]'

It writes the app (`freshet deploy app DIR`) and puts your model and data into its two files. Start the app with
`flwr run DIR`. docs/deployment.md explains what runs where, and how it is secured.
"""

import subprocess
import sys
from pathlib import Path

TASK = '''"""Your code: a network, and each device's samples."""

from torch import nn


def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def load(node_config):
    """This device's samples; `partition-id` comes from `flower-supernode --node-config`."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    mine = slice(int(node_config["partition-id"]), 1438, 4)
    return (x[mine] / 16).astype("float32").reshape(-1, 1, 8, 8), y[mine]
'''
CLIENT = '''"""A device."""

from pathlib import Path

from freshet.flower.device import Device

from freshet_app.task import build, load

app = Device(load=load, model=build).app(Path(__file__).with_name("federation.toml"))
'''
SERVER = '''"""The server, which also needs the model."""

from pathlib import Path

from freshet.assembly import Overrides
from freshet.flower.server_app import server_app

from freshet_app.task import build

app = server_app(Path(__file__).with_name("federation.toml"), Overrides(factory=build))
'''

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "flower-app")
settings = ["-m", "fedasmu", "-s", "model.name=custom"]
subprocess.run([sys.executable, "-m", "freshet", "deploy", "app", str(folder), *settings], check=True)
package = folder / "freshet_app"
(package / "task.py").write_text(TASK)
(package / "client_app.py").write_text(CLIENT)
(package / "server_app.py").write_text(SERVER)
print(f"{folder}: a Flower app with your own model and data; start it with: flwr run {folder}")
