"""Compare the simulator with reality: federations of real processes, and the same fleets in virtual time.

For each seed: ``freshet deploy local`` on this machine, then ``freshet run --fleet-from`` that run, which gives every
device the medians of its measured trips. One figure shows the curves and the staleness of both, and the script prints
their differences. Seconds are real: a run takes as long as ``--until`` says.

    python benchmarks/reality.py [--out runs/reality] [--seeds 3] [--until 300] [--devices 4] [--png FILE]
"""

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from freshet.runs.reader import RunDirectory

REAL, VIRTUAL = "#1f77b4", "#d95f02"
SEEDS = ("#0072b2", "#cc79a7", "#009e73", "#e69f00", "#56b4e9", "#d55e00")


class Course(NamedTuple):
    """The tests of a run, and the staleness of every contribution."""

    times: list[float]
    accuracies: list[float]
    staleness: list[int]
    uploads: int


def course(directory: Path) -> Course:
    run = RunDirectory(directory)
    rows = [row for row in run.metrics() if row.get("accuracy") is not None]
    events = list(run.events())
    staleness = [part["staleness"] for e in events if e["kind"] == "aggregate" for part in e["contributions"]]
    uploads = sum(e["kind"] == "upload" for e in events)
    return Course([row["time"] for row in rows], [row["accuracy"] for row in rows], staleness, uploads)


def freshet(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "freshet", *words], check=True)


def pair(out: Path, seed: int, until: float, devices: int) -> tuple[Course, Course]:
    """A real run and its twin in virtual time. Existing runs are reused."""
    real, virtual = out / f"real-{seed}", out / f"virtual-{seed}"
    if not (real / "world.json").is_file():
        length = ["--until", f"{until:g}s", "--seed", str(seed), "--devices", str(devices)]
        freshet("deploy", "local", *length, "--out", str(real), "-s", "run.eval_every=5")
    if not (virtual / "summary.json").is_file():
        freshet("run", "--fleet-from", str(real), "--executor", "serial", "--out", str(virtual), "-q")
    return course(real), course(virtual)


def differences(real: Course, virtual: Course, until: float) -> dict[str, float]:
    """Compare accuracy over time and the staleness of contributions."""
    grid = np.linspace(0.0, until, 200)
    curves = [np.interp(grid, each.times, each.accuracies) for each in (real, virtual)]
    return {
        "accuracy, mean |difference|": float(np.abs(curves[0] - curves[1]).mean()),
        "accuracy at the end, real": real.accuracies[-1],
        "accuracy at the end, virtual": virtual.accuracies[-1],
        "uploads, real": real.uploads,
        "uploads, virtual": virtual.uploads,
        "staleness, mean, real": float(np.mean(real.staleness)),
        "staleness, mean, virtual": float(np.mean(virtual.staleness)),
        "staleness, total variation": total_variation(real.staleness, virtual.staleness),
    }


def total_variation(a: Sequence[int], b: Sequence[int]) -> float:
    """``sum_s |p_a(s) - p_b(s)| / 2``: 0 for equal distributions, 1 for disjoint ones."""
    counts = Counter(a), Counter(b)
    return 0.5 * sum(abs(counts[0][s] / len(a) - counts[1][s] / len(b)) for s in {*a, *b})


def draw(pairs: Sequence[tuple[Course, Course]], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for seed, (real, virtual) in enumerate(pairs):
        colour = SEEDS[seed % len(SEEDS)]
        left.plot(real.times, real.accuracies, color=colour)
        left.plot(virtual.times, virtual.accuracies, color=colour, linestyle="--")
    left.plot([], [], color="black", label="real processes")
    left.plot([], [], color="black", linestyle="--", label="virtual time")
    title = f"FedASMU on the digits, {len(pairs)} seeds (colours)"
    left.set(xlabel="seconds", ylabel="test accuracy", ylim=(0, 1), title=title)
    left.legend(loc="lower right", frameon=False)
    sides = [[s for both in pairs for s in both[k].staleness] for k in (0, 1)]
    values = np.arange(1, max(max(side) for side in sides) + 1)
    for k, (side, colour, name) in enumerate(zip(sides, (REAL, VIRTUAL), ("real", "virtual"), strict=True)):
        shares = [side.count(value) / len(side) for value in values.tolist()]
        right.bar(values + 0.4 * (k - 0.5), shares, 0.4, color=colour, label=f"{name} ({len(side)} uploads)")
    right.set(xlabel="staleness of an upload", ylabel="share of uploads", title="all seeds together")
    right.set_xticks(values[:: max(1, len(values) // 12)])
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/reality"))
    parser.add_argument("--png", type=Path, default=None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--until", type=float, default=300.0)
    parser.add_argument("--devices", type=int, default=4)
    given = parser.parse_args()
    pairs = [pair(given.out, seed, given.until, given.devices) for seed in range(given.seeds)]
    rows = [differences(*each, given.until) for each in pairs]
    for name in rows[0]:
        print(f"{name:32s}", "  ".join(f"{each[name]:8.3f}" for each in rows))
    draw(pairs, given.png or given.out / "reality.png")
    print(given.png or given.out / "reality.png")


if __name__ == "__main__":
    main()
