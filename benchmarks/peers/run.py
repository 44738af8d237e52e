"""Seconds per trip of each peer over the two-process textbook loop of ``simulator.py``, in turns, in one run.

Run it with the Python of Freshet's environment and say where the peers' environments are (see ../peers.md); a peer
that is not given is left out.

    python benchmarks/peers/run.py pfl=DIR flgo=DIR flsim=DIR [--trips N] [--repeat N]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from simulator import bare  # noqa: E402

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@dataclass
class Contender:
    """A command that prints one line of JSON last, and what its turns gave."""

    command: list[str]
    ratios: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)

    def turn(self, textbook: float) -> str:
        """Run once; gives what the contender calls itself, with the number of its workers."""
        environment = os.environ | {"PEERS_STARTED": str(time.time()), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(self.command, cwd=HERE, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(self.command)} failed:\n{done.stderr[-2000:]}")
        figures = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
        self.ratios.append(figures["seconds_per_trip"] / textbook)
        self.seconds.append(figures["seconds_per_trip"])
        self.starts.append(figures["start"])
        return f"{figures['peer']}, {figures['workers']} worker{'s' if figures['workers'] > 1 else ''}"

    def latest(self, textbook: float) -> str:
        """What the last turn gave."""
        seconds, ratio, start = self.seconds[-1], self.ratios[-1], self.starts[-1]
        return f"{seconds:.3f} s per trip / {textbook:.3f} = {ratio:.2f}, start {start:.1f} s"


def contenders(homes: dict[str, str], trips: int) -> list[Contender]:
    """The peers that have an environment, and Freshet's methods."""
    scripts = {
        "pfl": [(*TORCHRUN, "run_pfl.py")],
        "flgo": [("run_flgo.py",), ("run_flgo.py", "--workers", "1")],
        "flsim": [("run_flsim.py",)],
    }
    freshet = [[sys.executable, "run_freshet.py", "--method", name] for name in ("fedavg", "fedasmu", "fedbuff")]
    peers = [[f"{homes[name]}/bin/python", *script] for name in scripts if name in homes for script in scripts[name]]
    return [Contender([*command, "--trips", str(trips)]) for command in peers + freshet]


def middle(values: list[float]) -> str:
    spread = f" ({min(values):.2f}-{max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.2f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("homes", nargs="*", metavar="PEER=DIR", help="pfl, flgo, flsim and their environments")
    parser.add_argument("--trips", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    homes = {name: str(Path(home).absolute()) for name, _, home in (entry.partition("=") for entry in given.homes)}
    field_of = contenders(homes, given.trips)
    textbook: list[float] = []
    names: list[str] = []
    for _ in range(given.repeat):
        names.clear()
        for contender in field_of:
            textbook.append(bare("lenet-fmnist", given.trips) / given.trips)
            names.append(contender.turn(textbook[-1]))
            print(f"{names[-1]}: {contender.latest(textbook[-1])}", file=sys.stderr, flush=True)
    print("| | seconds per trip | over the textbook loop | start, s |\n|---|---|---|---|")
    print(f"| textbook loop, 2 processes | {middle(textbook)} | 1 | |")
    for name, c in zip(names, field_of, strict=True):
        print(f"| {name} | {middle(c.seconds)} | {middle(c.ratios)} | {middle(c.starts)} |")


if __name__ == "__main__":
    main()
