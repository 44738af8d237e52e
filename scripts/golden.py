"""Record hashes of finished runs before a refactoring and check them after it.

    python scripts/golden.py record golden.json
    python scripts/golden.py check golden.json [METHOD...]

The runs: every method and variant on the embedded digits, serial and in worker processes, in one go and interrupted and
resumed; then two of the paper's cells, where their data are installed (FRESHET_DATA). Each run gives two hashes: the
final weights, and the canonical log (every number and key of every event; wording may change). A hash holds for one
machine and one version of PyTorch, so the file is not committed.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from freshet.config import resolve
from freshet.federation import Federation
from freshet.methods import method_names
from freshet.runs.writer import Observer

UNTIL, STOP = 60.0, 31.0


class Crash(Exception):
    """Ends a run as a kill would, between two events."""


class Crasher(Observer):
    """Crashes a run at some virtual time."""

    def on_progress(self, time: float) -> None:
        if time >= STOP:
            raise Crash


def canonical(value: Any) -> Any:
    """An event without its wording: texts become empty, except the kind of event."""
    if isinstance(value, dict):
        return {key: item if key == "kind" else canonical(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [canonical(item) for item in value]
    return "" if isinstance(value, str) else value


def hashes(out: Path, weights: str) -> dict[str, str]:
    """Hashes of the final weights and of the canonical log."""
    events = [canonical(json.loads(line)) for line in (out / "events.jsonl").read_text().splitlines()]
    return {"weights": weights, "events": hashlib.sha256(json.dumps(events).encode()).hexdigest()}


def digits_run(method: str, executor: str, interrupted: bool, folder: Path) -> dict[str, str]:
    """Hashes of one run on the digits."""
    run: dict[str, Any] = {"until": UNTIL, "eval_every": 20.0, "executor": executor, "workers": 2}
    run |= {"checkpoint_every": 10.0, "seed": 1, "per_round": 5}
    tables = {
        "method": {"name": method},
        "fleet": {"devices": 16, "time": "trip"},
        "data": {"train_samples": 300},
        "run": run,
    }
    federation, out = Federation.from_config(resolve(tables)), folder / "run"
    if interrupted:
        with suppress(Crash):
            federation.run(out=out, observers=[Crasher()])
        result = federation.resume(out)
    else:
        result = federation.run(out=out)
    return hashes(out, result.summary["weights_sha256"])


def cell_run(cell: str, method: str, folder: Path) -> dict[str, str]:
    """Hashes of a short run of one of the paper's cells, on a part of its data."""
    command = ["run", "--cell", cell, "-m", method, "--until", "100", "--seed", "3", "--executor", "serial", "-q"]
    command += ["-s", "data.train_samples=2000", "-s", "data.test_samples=500", "-o", str(folder / "run")]
    subprocess.run([sys.executable, "-m", "freshet", *command], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return hashes(folder / "run", summary["weights_sha256"])


def jobs(methods: list[str]) -> Iterator[tuple[str, Callable[[Path], dict[str, str]]]]:
    """Name and function of every run: of these methods only, if some are named."""
    for method in methods or method_names():
        for executor in ("serial", "processes"):
            for interrupted in (False, True):
                name = f"{method} {executor} {'resumed' if interrupted else 'plain'}"
                yield name, partial(digits_run, method, executor, interrupted)
    if not methods and os.environ.get("FRESHET_DATA"):
        yield "cell lenet-fmnist fedasmu-course", partial(cell_run, "lenet-fmnist", "fedasmu-course")
        yield "cell cnn-cifar10 fedssmu", partial(cell_run, "cnn-cifar10", "fedssmu")


def main(command: str, path: Path, methods: list[str]) -> int:
    found = {}
    for name, job in jobs(methods):
        with tempfile.TemporaryDirectory() as folder:
            found[name] = job(Path(folder))
        print(name, file=sys.stderr)
    if command == "record":
        path.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    kept = {name: kept for name, kept in json.loads(path.read_text()).items() if not methods or name in found}
    changed = [name for name in kept if found.get(name) != kept[name]]
    for name in changed:
        print(f"changed: {name}: {kept[name]} -> {found.get(name)}")
    print(f"{len(kept) - len(changed)} of {len(kept)} as before")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
