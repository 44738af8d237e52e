"""A deployment that runs for an hour while its processes are killed: all honest uploads accounted for, memory flat.

Twenty devices on this machine, FedASMU on the digits, every trip asks for a fresh model. Every minute a device is
killed with SIGKILL and comes back; every fifth time it is the executor, with the trips of all devices; every tenth time
it is the server: its app, its SuperLink, or everything.

    python benchmarks/soak.py [--minutes 60] [--devices 20] [--seed 0] [--out FOLDER]

It prints a line per minute and, at the end, one JSON object. Memory is the sum over all processes of the deployment,
each counted with its share of shared pages (PSS).
"""

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kills import WAYS, events, kill, tables, wait_for_progress

from freshet.flower.running import LocalRun
from freshet.runs.audit import audit
from freshet.runs.reader import RunDirectory

#: So often it is the turn of the server, and of the executor.
SERVER_EVERY, EXECUTOR_EVERY = 10, 5
SECONDS_BETWEEN = 60.0


def descendants(root: int) -> list[int]:
    """Return the processes that this one has started, directly or not."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, waiting = [], [root]
    while waiting:
        found += (own := children.get(waiting.pop(), []))
        waiting += own
    return found


def memory_mb(processes: list[int]) -> float:
    """Return the memory of these processes, in which shared pages count once."""
    total = 0
    for process in processes:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def summary(run: Path, memory: list[float], killed: Counter[str], hours: float) -> dict[str, Any]:
    """Return what came out: every trip that began has exactly one end, or is still in flight."""
    uploads = [(event["device"], event["trip"]) for event in events(run, "upload")]
    began = {(event["device"], event["trip"]) for event in events(run, "trigger")}
    lost = [(event["device"], event["trip"]) for event in events(run, "lost")]
    found, quarter = audit(RunDirectory(run)), max(1, len(memory) // 4)
    return {
        "hours": round(hours, 2),
        "killed": dict(killed),
        "trips": len(began),
        "uploads": len(uploads),
        "uploads counted twice": len(uploads) - len(set(uploads)),
        "uploads of no trip": len(set(uploads) - began),
        "lost": len(lost),
        "neither uploaded nor lost": len(began - set(uploads) - set(lost)),
        "merges": len(events(run, "merge")),
        "rejected": [event["reason"] for event in events(run, "rejected")],
        "memory MB, first and last quarter": [
            round(statistics.median(memory[:quarter])),
            round(statistics.median(memory[-quarter:])),
        ],
        "audit": "passed" if found.passed else found.problem,
    }


def strike(local: LocalRun, number: int, rng: random.Random) -> str:
    """Kill what it is the turn of. Returns its name."""
    if number % SERVER_EVERY == 0:
        way = WAYS[number // SERVER_EVERY % len(WAYS)]
        kill(local, way)
        return way
    if number % EXECUTOR_EVERY == 0:
        local.executor.signal(signal.SIGKILL)
        return "executor"
    rng.choice(local.devices).signal(signal.SIGKILL)
    return "device"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--devices", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    root, rng = given.out or Path(tempfile.mkdtemp(prefix="freshet-soak-")), random.Random(given.seed)
    killed, memory, begin = Counter[str](), list[float](), time.monotonic()
    server = {"restarts": 10 * given.minutes}
    local = LocalRun(root / "deploy", tables(given.devices), root / "run", lambda text: print(text, flush=True), server)
    try:
        for number in range(1, given.minutes + 1):
            while time.monotonic() < begin + number * SECONDS_BETWEEN:
                if local.poll() is not None:
                    raise RuntimeError("the run has ended; see the logs of the deployment")
                time.sleep(0.5)
            memory.append(memory_mb(descendants(os.getpid())))
            what = strike(local, number, rng)
            killed[what] += 1
            uploads = len(events(root / "run", "upload"))
            print(f"minute {number}: {uploads} uploads, {memory[-1]:.0f} MB; killed: {what}", flush=True)
        wait_for_progress(local, given.devices)
    finally:
        local.stop()
    print(json.dumps(summary(root / "run", memory, killed, (time.monotonic() - begin) / 3600)))


if __name__ == "__main__":
    main()
