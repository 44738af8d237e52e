"""Hashes of what runs give, to show that a change of structure changes no bit: record before, check after.

    python scripts/golden.py record golden.json
    python scripts/golden.py check golden.json

Every method (and FedASMU's and FedSSMU's variants) on the embedded digits, in this process and in worker processes, in
one go and interrupted and resumed. A hash holds for one machine and one version of PyTorch; keep the file to yourself.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from freshet.config import resolve
from freshet.federation import Federation
from freshet.methods import names
from freshet.runs.writer import Observer

UNTIL, STOP = 60.0, 31.0


class Crash(Exception):
    """Ends a run as a kill would, between two events."""


class Crasher(Observer):
    """Crashes a run at some virtual time."""

    def on_progress(self, time: float) -> None:
        if time >= STOP:
            raise Crash


def outcome(method: str, executor: str, interrupted: bool, folder: Path) -> dict[str, str]:
    """Hashes of the final weights and of the log."""
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
    log = hashlib.sha256((out / "events.jsonl").read_bytes()).hexdigest()
    return {"weights": result.summary["weights_sha256"], "events": log}


def outcomes() -> Iterator[tuple[str, dict[str, str]]]:
    """All hashes, by method, executor and course."""
    for method in names():
        for executor in ("serial", "processes"):
            for interrupted in (False, True):
                name = f"{method} {executor} {'resumed' if interrupted else 'plain'}"
                with tempfile.TemporaryDirectory() as folder:
                    yield name, outcome(method, executor, interrupted, Path(folder))
                print(name, file=sys.stderr)


def main(command: str, path: Path) -> int:
    found = dict(outcomes())
    if command == "record":
        path.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    kept = json.loads(path.read_text())
    changed = [name for name in kept if found.get(name) != kept[name]]
    for name in changed:
        print(f"changed: {name}: {kept[name]} -> {found.get(name)}")
    print(f"{len(kept) - len(changed)} of {len(kept)} as before")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
