"""A long run: 200,000 uploads without training. Measures how memory grows, and what it costs to read the log.

python benchmarks/long_run.py [--method fedasmu-fa] [--uploads 200000] [--out RUN]

The run writes all its files: log, metrics, checkpoints, summary. With --out it is kept, and each command that reads a
log is run on it in a separate process that reports its peak memory.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from idle import NoTraining, resident

from freshet import Federation
from freshet.runs.lifecycle import OpenRun, drive
from freshet.runs.world import write_world
from freshet.runs.writer import Observer, RunWriter
from freshet.sim.driver import Simulation

IN_FLIGHT, POINTS = 100, 40
COMMANDS = (
    ("show", ["show", "{run}"]),
    ("audit", ["audit", "{run}"]),
    ("report", ["report", "{run}", "--out", "{out}.html"]),
    ("export --csv", ["export", "{run}", "--csv", "{out}.csv"]),
    ("export --pdf", ["export", "{run}", "--pdf", "{out}.pdf"]),
)


@dataclass
class Growth(Observer):
    """Measures memory at regular intervals of a run, counted in uploads."""

    uploads: int
    seen: int = 0
    points: list[int] = field(default_factory=list)

    def on_event(self, event: dict[str, Any]) -> None:
        self.seen += event["kind"] == "upload"
        if self.seen * POINTS >= self.uploads * (len(self.points) + 1):
            self.points.append(resident())

    @property
    def last_half(self) -> float:
        """Growth of memory from the middle to the end, as a share."""
        middle = self.points[len(self.points) // 2]
        return self.points[-1] / middle - 1.0


def long_run(method: str, uploads: int, out: Path) -> tuple[Growth, dict[str, Any]]:
    """Run the given number of uploads and write all files."""
    growth = Growth(uploads)
    federation = Federation(
        method=method,
        fleet={"devices": 2 * IN_FLIGHT, "time": "trip"},
        data={"min_samples": 2},
        run={"rounds": uploads // IN_FLIGHT, "per_round": IN_FLIGHT, "in_flight": IN_FLIGHT, "eval_every": 1000.0}
        | ({} if method in ("fedavg", "feddyn") else {"trigger": "concurrency"}),
    )
    assembly = federation.assembly.begin()
    config = assembly.config

    @contextmanager
    def opened() -> Iterator[OpenRun]:
        writer = RunWriter.create(out, config.tables(), [growth])
        write_world(out, assembly.run_world)
        yield OpenRun(
            Simulation(
                assembly.coordinator, federation.fleet, NoTraining(move=1e-3), writer, eval_every=config.run.eval_every
            ),
            assembly.server,
            writer,
        )

    return growth, drive(assembly.plan, opened()).summary


def peak_of(arguments: list[str]) -> tuple[float, float, int]:
    """Seconds, peak memory in MB, and whether a freshet command failed."""
    code = (
        "import sys\n"
        "from freshet.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    failed = bool(end.code)\n"
        "else:\n    failed = False\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(peak.split()[1], int(failed), file=sys.stderr)\n"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    kilobytes, failed = done.stderr.split()[-2:]
    return time.perf_counter() - started, int(kilobytes) / 1000, int(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="fedasmu-fa")
    parser.add_argument("--uploads", type=int, default=200_000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = arguments.out or Path(folder) / "run"
        started = time.perf_counter()
        growth, summary = long_run(arguments.method, arguments.uploads, run)
        log = (run / "events.jsonl").stat().st_size
        print(
            f"{arguments.method}: {summary['uploads']:,} uploads in {time.perf_counter() - started:.0f} s, log "
            f"{log / 1e6:.0f} MB; memory {growth.points[-1] / 1e6:.0f} MB, {100 * growth.last_half:+.1f} % over the "
            "last half",
            flush=True,
        )
        for name, command in COMMANDS if arguments.out else ():
            given = [part.format(run=run, out=Path(folder) / "out") for part in command]
            seconds, megabytes, failed = peak_of(given)
            print(f"{name:14} {seconds:6.1f} s {megabytes:7.0f} MB{' FAILED' if failed else ''}", flush=True)


if __name__ == "__main__":
    main()
