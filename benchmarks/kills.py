"""Kill the server of a real deployment at random moments: nothing honest is lost, and the audit passes.

Four devices on this machine, FedASMU on the digits, every trip asks for a fresh model. Each time one of three things is
killed with SIGKILL: the server app, the SuperLink, or everything that belongs to the server. Devices are left alone.

    python benchmarks/kills.py [--kills 50] [--seed 0] [--out FOLDER]
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from freshet.flower import commands
from freshet.flower.running import LocalRun
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory

WAYS = ("app", "superlink", "everything")
#: Seconds that a restarted server may take to aggregate again.
PATIENCE = 600.0


def tables(devices: int) -> dict[str, Any]:
    return {
        "method": {"name": "fedasmu", "slot": 2},
        "fleet": {"devices": devices},
        "training": {"epochs": 3},
        "data": {"train_samples": 400, "test_samples": 200},
        "run": {"until": 1e6, "period": 1.0, "eval_every": 10.0, "checkpoint_every": 20.0, "trigger": "concurrency"},
    }


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    lines = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.is_file() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def kill(local: LocalRun, way: str) -> None:
    pid = commands.server_process(local.folder)
    if way in ("app", "everything") and pid is not None:
        os.kill(pid, signal.SIGKILL)
    if way in ("superlink", "everything"):
        local.server.children[0].signal(signal.SIGKILL)
    if way == "everything":
        local.server.children[1].signal(signal.SIGKILL)


def wait_for_progress(local: LocalRun, more: int) -> None:
    """Wait until this many uploads have come since the newest one in the log."""
    end, goal = time.monotonic() + PATIENCE, len(events(local.server.out, "upload")) + more
    while len(events(local.server.out, "upload")) < goal:
        if local.poll() is not None or time.monotonic() > end:
            raise RuntimeError("the run has ended or stands still; see the logs of the deployment")
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    root, rng = given.out or Path(tempfile.mkdtemp(prefix="freshet-kills-")), random.Random(given.seed)
    killed: Counter[str] = Counter()
    begin, server = time.monotonic(), {"restarts": 10 * given.kills}
    local = LocalRun(root / "deploy", tables(given.devices), root / "run", lambda text: print(text, flush=True), server)
    try:
        for number in range(given.kills):
            wait_for_progress(local, 2)
            time.sleep(rng.uniform(0.0, 8.0))
            way = WAYS[number % len(WAYS)]
            kill(local, way)
            killed[way] += 1
        wait_for_progress(local, 2 * given.devices)
    finally:
        local.stop()
    uploads = [(event["device"], event["trip"]) for event in events(root / "run", "upload")]
    found = audit(RunDirectory(root / "run"))
    result = {
        "killed": dict(killed),
        "hours": round((time.monotonic() - begin) / 3600, 2),
        "uploads": len(uploads),
        "uploads counted twice": len(uploads) - len(set(uploads)),
        "merges": len(events(root / "run", "merge")),
        "rejected": [event["reason"] for event in events(root / "run", "rejected")],
        "lost": [event["reason"] for event in events(root / "run", "lost")],
        "audit": "passed" if found.passed else found.problem,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
