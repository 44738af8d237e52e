"""A user's script without a ``__main__`` guard, ended in the middle by a signal: no worker and no file stays behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .helpers import LIMIT, begun, eventually, gone

SCRIPT = """
import sys
from pathlib import Path
from torch import nn
from freshet.compute.pool import PoolExecutor
from freshet.compute.processes import WorkerPool
from freshet.core.method import LocalRule
from tests.compute.helpers import Patient, make_setup, make_work, same

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        return self.layer(x)

class Rule(LocalRule):
    def begin(self, local):
        local.weights.mul_(0.5)

pool = WorkerPool(1)
setup = make_setup(lambda: Net())
executor = PoolExecutor(setup, pool, owns_pool=True)
work = make_work(setup, rule=Rule())
assert same(executor.train(work, 0.0).result(), setup.trainer().train(work))
try:
    executor.train(make_work(setup, rule=Patient(Path(sys.argv[1]))), 0.0).result()
finally:
    executor.close()
"""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """One script per signal, started side by side: process, folder of its training, folder for temporary files."""
    started = {}
    for number in SIGNALS:
        folder = tmp_path_factory.mktemp(number.name)
        training, temporary = folder / "training", folder / "tmp"
        training.mkdir()
        temporary.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        root = Path(__file__).parents[2]
        process = subprocess.Popen(
            [sys.executable, folder / "script.py", training],
            env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        started[number] = (process, training, temporary)
    yield started
    for process, _, _ in started.values():
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize("number", SIGNALS)
def test_nothing_outlives_the_script(scripts, number):
    process, training, temporary = scripts[number]
    eventually(lambda: list(training.iterdir()) or process.poll() is not None)
    assert process.poll() is None, process.stderr.read().decode()
    (worker,) = begun(training)
    os.killpg(process.pid, number)  # as a terminal does with Ctrl-C
    assert process.wait(timeout=LIMIT) in (-number, 130)
    eventually(lambda: gone(worker))
    assert list(temporary.iterdir()) == []
