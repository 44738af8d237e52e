"""The slim installation of a device: what it lists, and that a device works without the packages that it leaves out."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Packages for reports, pictures, tables and the built-in data sets.
LEFT_OUT = ("pandas", "matplotlib", "pillow", "pooch", "scikit-learn")
#: How they are imported. plotly is not even a dependency.
MODULES = ("pandas", "matplotlib", "PIL", "pooch", "sklearn", "scipy", "plotly")


def test_the_list_of_a_device_is_the_project_without_what_it_does_not_need() -> None:
    wanted = [each for each in PROJECT["dependencies"] if not each.startswith(LEFT_OUT)]
    wanted += PROJECT["optional-dependencies"]["flower"]
    listed = (ROOT / "deploy" / "requirements-device.txt").read_text().splitlines()
    assert [line for line in listed if not line.startswith("#")] == wanted
    assert len(wanted) == len(PROJECT["dependencies"]) - len(LEFT_OUT) + 2


PROGRAM = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {MODULES!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import numpy as np
from torch import nn
import freshet.cli.app, freshet.flower.commands, freshet.flower.server_app
from freshet import Device, Federation

rng = np.random.default_rng(0)
samples = rng.standard_normal((40, 6)).astype(np.float32), np.arange(40) % 3
app = Device(lambda *_: samples, lambda: nn.Linear(6, 3)).app(sys.argv[1])
run = {{"per_round": 2, "period": 4.0, "in_flight": 2, "executor": "serial"}}
federation = Federation(lambda: nn.Linear(6, 3), samples, samples, devices=4, run=run, method="fedasmu")
result = federation.run(20, out=sys.argv[1])
print(result.summary["status"], sorted({{name.partition(".")[0] for name in sys.modules}} & set({MODULES!r})))
"""


def test_a_device_works_without_them(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "finished []\n"
