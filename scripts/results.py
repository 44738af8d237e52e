"""Write docs/results.md and its picture from the runs under results/: ``python scripts/results.py``.

Every number comes from a run's metrics.jsonl and summary.json, counted as results/PROTOCOL.md says. To bring runs in,
each as its settings, tests, world and summary only: ``python scripts/results.py --take FOLDER ...``.
"""

import argparse
import json
import shutil
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import matplotlib
import numpy as np

from freshet.experiments.cells import CELLS
from freshet.methods import find
from freshet.report.palette import dash, paint, styles

matplotlib.use("Agg")

HOME = Path(__file__).parent.parent
RESULTS, PAGE, PICTURE = HOME / "results", HOME / "docs" / "results.md", HOME / "docs" / "images" / "results.png"
KEPT = ("config.toml", "metrics.jsonl", "summary.json", "world.json")
#: Tests that the accuracy is the mean of, and the difference below which two methods are called equal.
LAST, TIE = 5, 0.01
KINDS = {"async": ("Asynchronous", "fedasmu"), "sync": ("Synchronous", "fedssmu")}
CELL = CELLS["lenet-fmnist"]


class Run(NamedTuple):
    """One run, as far as results tell of it."""

    method: str
    seed: int
    times: list[float]
    accuracies: list[float]
    reached: float | None
    sha: str
    lr: float
    uploads: int
    staleness: float | None
    diverged: float | None

    @property
    def accuracy(self) -> float:
        return fmean(self.accuracies[-LAST:])

    @staticmethod
    def read(folder: Path) -> "Run":
        summary = json.loads((folder / "summary.json").read_text())
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        config = tomllib.loads((folder / "config.toml").read_text())
        return Run(
            summary["method"],
            summary["seed"],
            [row["time"] for row in rows],
            [row["accuracy"] for row in rows],
            summary["time_to_target"],
            summary["weights_sha256"],
            config["training"]["lr"],
            summary["uploads"],
            summary["mean_staleness"],
            summary["diverged"],
        )


def take(folders: Iterable[Path], into: Path) -> None:
    """Bring finished runs in: what draws every figure again, without logs and models."""
    for folder in folders:
        for run in sorted((folder / "runs").iterdir()):
            if (run / "summary.json").is_file():
                place = into / "runs" / run.name
                place.mkdir(parents=True, exist_ok=True)
                for name in KEPT:
                    shutil.copy(run / name, place / name)


def read(folder: Path) -> dict[str, list[Run]]:
    """Runs by method, seeds in order; only methods all of whose seeds are there."""
    found: dict[str, list[Run]] = {}
    for run in sorted(folder.glob("runs/*/")):
        one = Run.read(run)
        found.setdefault(one.method, []).append(one)
    seeds = max(len(runs) for runs in found.values())
    return {method: sorted(runs, key=lambda run: run.seed) for method, runs in found.items() if len(runs) == seeds}


def kind_of(method: str) -> str:
    return find(method)[0].about.kind


def middle(runs: Sequence[Run]) -> float:
    return median(run.accuracy for run in runs)


def time_of(runs: Sequence[Run]) -> float:
    """Median time to the target, never being later than everything."""
    return median(np.inf if run.reached is None else run.reached for run in runs)


def outcome(ours: Sequence[Run], theirs: Sequence[Run]) -> str:
    """Who wins in accuracy: the higher median with all paired differences of one sign, unless it is a tie."""
    differences = [a.accuracy - b.accuracy for a, b in zip(ours, theirs, strict=True)]
    if abs(middle(ours) - middle(theirs)) < TIE:
        return "tie"
    if all(difference > 0 for difference in differences):
        return "win"
    return "loss" if all(difference < 0 for difference in differences) else "open"


def seconds(time: float) -> str:
    return "never" if np.isinf(time) else f"{time:,.0f} s"


def table(runs: dict[str, list[Run]], kind: str) -> list[str]:
    """The methods of one kind, the best first."""
    name, reference = KINDS[kind]
    mine = sorted((m for m in runs if kind_of(m) == kind), key=lambda method: -middle(runs[method]))
    lines = [
        f"### {name}",
        "",
        "| method | accuracy | seeds 0, 1, 2 | to 0.70 | staleness | uploads | learning rate | models |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method in mine:
        group = runs[method]
        each = ", ".join(f"{run.accuracy:.3f}" for run in group)
        stale = median(run.staleness or 0.0 for run in group)
        shas = " ".join(f"`{run.sha[:8]}`" for run in group)
        mark = " (diverged)" if any(run.diverged is not None for run in group) else ""
        lines.append(
            f"| {method}{mark} | **{middle(group):.3f}** | {each} | {seconds(time_of(group))} | {stale:.1f} "
            f"| {median(run.uploads for run in group):,.0f} | {group[0].lr:.3g} | {shas} |"
        )
    if reference not in runs:
        return [*lines, ""]
    return [*lines, "", *verdicts(runs, mine, reference)]


def verdicts(runs: dict[str, list[Run]], methods: Sequence[str], reference: str) -> list[str]:
    """What the paper says of its method against each rival in this cell, and what these runs say."""
    lines = [
        f"| {reference} against | accuracy, paper | here | verdict | time to 0.70, paper | here | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    ours, published = runs[reference], CELL.published
    words = {"win": "confirmed", "loss": "not confirmed", "tie": "not confirmed (tie)", "open": "cannot be told"}
    for rival in methods:
        if rival == reference:
            continue
        theirs, here = runs[rival], middle(ours) - middle(runs[rival])
        mine, printed = published[reference], published.get(rival)
        found = outcome(ours, theirs)
        faster, paper_time, speed = time_of(theirs) / time_of(ours), "–", "–"
        if printed is None:
            paper, said = "–", {"win": "ahead", "loss": "behind", "tie": "tie", "open": "cannot be told"}[found]
        else:
            paper = f"{100 * (mine.accuracy - printed.accuracy):+.1f}"
            said = words[found] if mine.accuracy > printed.accuracy else f"paper: no lead; here: {found}"
            if mine.time and printed.time:
                paper_time = f"{printed.time / mine.time:.2f}x"
                speed = "confirmed" if (faster > 1) == (printed.time > mine.time) else "not confirmed"
        shown = "–" if np.isnan(faster) else "never / never" if np.isinf(time_of(ours)) else f"{faster:.2f}x"
        speed = "cannot be told" if shown.startswith(("–", "never")) and speed != "–" else speed
        lines.append(f"| {rival} | {paper} | {100 * here:+.1f} | {said} | {paper_time} | {shown} | {speed} |")
    return [*lines, "", "Accuracies in points of a hundred. Times: how many times as long the rival takes.", ""]


def draw(runs: dict[str, list[Run]], place: Path) -> None:
    """Accuracy over virtual time, median over seeds with their range, one panel for each kind."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.6), sharey=True, layout="constrained")
    for axis, (kind, (name, _)) in zip(axes, KINDS.items(), strict=True):
        mine = sorted((m for m in runs if kind_of(m) == kind), key=lambda method: -middle(runs[method]))
        for method, style in zip(mine, styles(mine), strict=True):
            group = runs[method]
            length = min(len(run.times) for run in group)
            curves = np.array([run.accuracies[:length] for run in group])
            ours = "smu" in method
            axis.plot(
                group[0].times[:length],
                np.median(curves, axis=0),
                label=f"{method} {middle(group):.3f}",
                color=paint(style),
                linestyle={"solid": "-", "dash": "--", "dot": ":"}[dash(style)],
                linewidth=2.4 if ours else 1.2,
                zorder=3 if ours else 2,
            )
        axis.set(title=name, xlabel="virtual time, s", ylim=(0.2, 0.9))
        axis.grid(alpha=0.25)
        if mine:
            axis.legend(fontsize=8, loc="lower right")
    axes[0].set_ylabel("test accuracy, median of 3 seeds")
    figure.suptitle("LeNet5 on Fashion-MNIST, 10,000 samples on 100 devices, every method tuned with 6 trials")
    place.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(place, dpi=110)
    plt.close(figure)


HEAD = """# Results

Do fresh models in mid-training and learned staleness weights pay when every method is tuned with the same effort? This
page is made by `scripts/results.py` from the runs under `results/`, counted as `results/PROTOCOL.md` says, which was
written before the first of them. Scale: LeNet5 on 10,000 of Fashion-MNIST's 60,000 samples, 100 devices, 6,000
virtual seconds, three seeds: **a sixth of the data and a quarter of the paper's length; absolute accuracies are not
comparable with the paper's.** `freshet report results/lenet-fmnist` draws every curve again; the last column of the
tables names the final models (sha256).

![accuracy over time](images/results.png)

*Accuracy*: mean of the last five tests, median over seeds. *Verdict* on accuracy: confirmed when the median is more
than one point higher and all three seeds agree; a tie is not a confirmation.
"""


def page(runs: dict[str, list[Run]]) -> str:
    missing = [method for method in CELL.published if method not in runs]
    lines = [HEAD]
    for kind in KINDS:
        lines += table(runs, kind)
    if missing:
        lines += [f"Not run yet: {', '.join(missing)}.", ""]
    notes = RESULTS / "NOTES.md"
    return "\n".join(lines) + ("\n" + notes.read_text() if notes.is_file() else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--take", nargs="+", type=Path, default=[])
    arguments = parser.parse_args()
    folder = RESULTS / CELL.name
    take(arguments.take, folder)
    runs = read(folder)
    draw(runs, PICTURE)
    PAGE.write_text(page(runs))


if __name__ == "__main__":
    main()
