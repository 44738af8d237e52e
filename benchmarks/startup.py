"""From the command to the first trained trip, and the memory of a run: this source tree against another, in turns.

The command is ``freshet run --cell lenet-fmnist -m fedasmu --executor processes --workers 2`` on all of Fashion-MNIST.
The main process records when each stage is done, and all processes end at the first trip. CPU seconds are those of all
processes up to then. Memory is the proportional set size of all processes (shared pages counted once), sampled during
a run of some rounds. Linux only.

    python benchmarks/startup.py [--repeat N] [--other PATH/src] [--rounds N]
"""

import argparse
import functools
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

COMMAND = ["run", "--cell", "lenet-fmnist", "-m", "fedasmu", "--executor", "processes", "--workers", "2", "-q"]
HERE = Path(__file__).resolve().parents[1] / "src"
#: Stages, done when the module is loaded or the function returns for the first time: (module, function, name).
STAGES = (
    ("freshet.cli.app", None, "the command is loaded"),
    ("freshet.federation", None, "the main process has loaded its libraries"),
    ("freshet.assembly", "Assembly.check", "data are loaded and partitioned"),
    ("freshet.compute.pool", "Pool.register", "data are stored for the workers"),
    ("freshet.compute.processes", "ProcessWorker.wait_ready", "a worker is ready"),
    ("freshet.compute.processes", "ProcessWorker.install", "a worker has the data"),
)
FIRST_TRIP = "the first trip is trained"


# ---- inside the command


class StageRecorder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook that wraps the functions of the stages."""

    def __init__(self, times: dict[str, float]) -> None:
        self.times = times
        self._inner: dict[str, Any] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name not in {module for module, _, _ in STAGES}:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None, f"{name} does not exist"
        self._inner[name], spec.loader = spec.loader, self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        self._inner[module.__name__].exec_module(module)
        for name, function, stage in STAGES:
            if name == module.__name__ and function is None:
                self.times.setdefault(stage, time.monotonic())
            elif name == module.__name__ and function is not None:
                _wrap(module, function, functools.partial(self._record, stage))
        if module.__name__ == "freshet.compute.pool":
            _wrap(module, "Pool._run_call", self._after_call)

    def _record(self, stage: str, *_: Any) -> None:
        self.times.setdefault(stage, time.monotonic())

    def _after_call(self, _pool: Any, _worker: Any, call: Any, *_: Any) -> None:
        """Exit at the first answer to a training."""
        if call.name == "train":
            self._record(FIRST_TRIP)
            print(json.dumps(self.times | {"cpu": cpu_seconds(os.getpid())}), flush=True)
            os._exit(0)


def _wrap(module: ModuleType, path: str, after: Callable[..., None]) -> None:
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, module)
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        result = inner(*arguments, **named)
        after(*arguments)
        return result

    setattr(owner, name, wrapper)


def command(arguments: list[str]) -> None:
    """Run the command with the recorder."""
    sys.meta_path.insert(0, StageRecorder({}))
    sys.argv = ["freshet", *arguments]
    importlib.import_module("freshet.cli").main()


# ---- outside the command


def tree(root: int) -> Iterator[Path]:
    """A process and its descendants."""
    queue = [str(root)]
    while queue:
        folder = Path("/proc") / queue.pop()
        yield folder
        for task in (folder / "task").iterdir():
            queue += (task / "children").read_text().split()


def cpu_seconds(root: int) -> float:
    """CPU seconds so far of a process, its descendants and the children that they reaped."""
    ticks = [(folder / "stat").read_text().rpartition(")")[2].split()[11:15] for folder in tree(root)]
    return sum(int(tick) for each in ticks for tick in each) / os.sysconf("SC_CLK_TCK")


def proportional(root: int) -> float:
    """Megabytes of a process and its descendants, shared pages divided among their users."""
    total = 0
    try:
        for folder in tree(root):
            fields = dict(line.split(":") for line in (folder / "smaps_rollup").read_text().splitlines()[1:])
            total += int(fields["Pss"].split()[0])
    except (FileNotFoundError, ProcessLookupError):
        pass  # a process has just ended; the next sample counts the others
    return total / 1e3


def environment(source: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}


def start(source: Path) -> dict[str, float]:
    """Seconds from the start of the command to each stage."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, __file__, "--command", *COMMAND, "--until", "1h", "-o", f"{folder}/run"]
        begun = time.monotonic()
        done = subprocess.run(line, env=environment(source), stdout=subprocess.PIPE, check=True, text=True)
    times: dict[str, float] = json.loads(done.stdout)
    return {stage: seconds - begun if stage != "cpu" else seconds for stage, seconds in times.items()}


def peak(source: Path, rounds: int) -> float:
    """Peak megabytes of all processes during a run."""
    program = "from freshet.cli import main; main()"
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-c", program, *COMMAND, "--rounds", str(rounds), "-o", f"{folder}/run"]
        most = 0.0
        with subprocess.Popen(line, env=environment(source), stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                most = max(most, proportional(process.pid))
                time.sleep(0.1)
        assert process.returncode == 0
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--other", type=Path, help="another source tree (its folder src) to compare with")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the run for the memory figure (0: none)")
    arguments = parser.parse_args()
    sources = {"this": HERE} | ({"other": arguments.other.resolve()} if arguments.other else {})
    for source in sources.values():
        start(source)  # fills the file cache and the cache of compiled loops
    results: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    for _ in range(arguments.repeat):
        for name, source in sources.items():
            results[name].append(start(source))
    for name, runs in results.items():
        print(f"{name} ({sources[name]}), median of {len(runs)}")
        middle = {stage: statistics.median(run[stage] for run in runs) for stage in runs[0]}
        cpu = middle.pop("cpu")
        for stage, seconds in sorted(middle.items(), key=lambda item: item[1]):
            print(f"  {seconds:5.2f} s  {stage}")
        print(f"  {min(run[FIRST_TRIP] for run in runs):5.2f} s  at best;  {cpu:.2f} s of CPU until then", flush=True)
    memory = {name: peak(source, arguments.rounds) for name, source in sources.items() if arguments.rounds}
    for name, megabytes in memory.items():
        print(f"{name}: peak memory of {arguments.rounds} rounds: {megabytes:.0f} MB")
    if arguments.other:
        pairs = list(zip(results["this"], results["other"], strict=True))
        for stage in (FIRST_TRIP, "cpu"):
            ratio = statistics.median(one[stage] / two[stage] for one, two in pairs)
            print(f"this / other, {stage}: {ratio:.2f}")
        if memory:
            print(f"this / other, memory: {memory['this'] / memory['other']:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--command"]:
        command(sys.argv[2:])
    else:
        main()
