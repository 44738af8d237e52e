"""What the check of Theorem 1 found: one line per setting with its constants, measured means and bounds."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from freshet._version import __version__
from freshet.errors import RunError
from freshet.experiments import bounds
from freshet.experiments.bounds import Constants
from freshet.experiments.convex import Floats, digits
from freshet.experiments.theory import BATCH, DEVICES, EVERY, MU, PER_ROUND, Setting, load
from freshet.runs.writer import write_atomically

Record = dict[str, Any]
CURVE = ("mean", "printed", "corrected", "repaired")


def document(jobs: Sequence[Setting], folder: Path, seconds: float) -> Record:
    """All results as plain values: what ``theory.json`` holds."""
    problem = problem_facts()
    lines = [line(group, folder, problem["gap"]) for group in groups(jobs)]
    runs = [load(job, folder) for job in {job.computed() for job in jobs}]
    return {
        "title": "Theorem 1 of the FedASMU paper, checked on a strongly convex problem",
        "freshet": __version__,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(sum(run["cpu_seconds"] for run in runs if run is not None), 1),
        "problem": problem,
        "lines": lines,
    }


def problem_facts() -> Record:
    """The objective: its size, its optimum, and how exactly that is known."""
    problem = digits(MU)
    w = problem.optimum()
    start, best = problem.loss(np.zeros(problem.size)), problem.loss(w)
    return {
        "samples": len(problem.y),
        "parameters": problem.size,
        "mu": MU,
        "smoothness": problem.smoothness(),
        "loss_at_start": start,
        "loss_at_optimum": best,
        "gap": start - best,
        "gradient_at_optimum": float(np.linalg.norm(problem.gradient(w))),
        "gradient_sq_at_start": float(np.sum(problem.gradient(np.zeros(problem.size)) ** 2)),
        "batch": BATCH,
        "devices": DEVICES,
        "per_round": PER_ROUND,
        "local_steps_measured_every": EVERY,
    }


def groups(jobs: Sequence[Setting]) -> list[list[Setting]]:
    """The runs of each line: the same setting under its seeds."""
    found: dict[Setting, list[Setting]] = {}
    for job in jobs:
        found.setdefault(job.line, []).append(job)
    return list(found.values())


def line(group: Sequence[Setting], folder: Path, gap: float) -> Record:
    """One setting over its seeds: means of what is measured, the worst of what the assumptions bound."""
    setting, runs = group[0], []
    for job in group:
        outcome = load(job.computed(), folder)
        if outcome is None:
            raise RunError(f"{folder} does not hold {job.computed().name}; give the same command again")
        runs.append(outcome)
    constants = Constants(
        smoothness=_most(runs, "smoothness"),
        second_moment=_most(runs, "second_moment"),
        variance=_most(runs, "variance"),
        gap=gap,
        alpha_min=min(run["alpha_min"] for run in runs),
        tau=setting.tau,
        n_min=min(run["n_min"] for run in runs),
        n_max=max(run["n_max"] for run in runs),
        lr=setting.lr,
    )
    squares: Floats = np.mean([run["gradient_sq"] for run in runs], axis=0)
    means = np.cumsum(squares) / np.arange(1, len(squares) + 1)
    T, tail = setting.versions, max(1, setting.versions // 10)
    facts = {key: value for key, value in asdict(setting).items() if key != "seed"}
    return facts | {
        "lr": setting.lr,
        "seeds": [job.seed for job in group],
        "constants": asdict(constants),
        "mean": float(means[-1]),
        "weighted_mean": float(np.mean([np.average(run["gradient_sq"], weights=run["alpha"]) for run in runs])),
        "tail": float(squares[-tail:].mean()),
        "least": float(squares.min()),
        "path_mean": _mean(runs, "path_mean"),
        "participation_floor": _mean(runs, "participation_floor"),
        "second_mean": _mean(runs, "second_mean"),
        "variance_mean": _mean(runs, "variance_mean"),
        "noise": _most(runs, "noise"),
        "alpha_max": _most(runs, "alpha_max"),
        "beta_max": _most(runs, "beta_max"),
        "staleness_mean": _mean(runs, "staleness_mean"),
        "staleness_max": _most(runs, "staleness_max"),
        "discards": _mean(runs, "discards"),
        "drift_share": _most(runs, "drift") / setting.tau,
        "printed": bounds.printed(constants, T),
        "corrected": bounds.corrected(constants, T),
        "repaired": bounds.repaired(constants, T),
        "stated": bounds.stated(constants),
        "curve": curve(means, constants),
    }


def curve(means: Floats, constants: Constants) -> list[Record]:
    """The running mean and the bounds at some fifty T, evenly spaced in their logarithms."""
    last = len(means)
    points = sorted({round(x) for x in np.geomspace(1, last, 50)})
    return [
        {
            "T": T,
            "mean": float(means[T - 1]),
            "printed": bounds.printed(constants, T),
            "corrected": bounds.corrected(constants, T),
            "repaired": bounds.repaired(constants, T),
        }
        for T in points
    ]


def write(found: Record, folder: Path) -> list[Path]:
    """``theory.json`` with everything and ``theory.csv`` with the curves, a row per setting and T."""
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    keys = ("part", "method", "tau", "epochs", "versions", "iota0", "lr")
    table = csv.writer(text, lineterminator="\n")
    table.writerow([*keys, "T", *CURVE])
    for row in found["lines"]:
        for point in row["curve"]:
            table.writerow([*(row[key] for key in keys), point["T"], *(f"{point[key]:.8g}" for key in CURVE)])
    files = [folder / "theory.json", folder / "theory.csv"]
    write_atomically(files[0], (json.dumps(found, indent=1, allow_nan=False) + "\n").encode())
    write_atomically(files[1], text.getvalue().encode())
    return files


def _mean(runs: Sequence[Record], key: str) -> float:
    return float(np.mean([run[key] for run in runs]))


def _most(runs: Sequence[Record], key: str) -> float:
    return float(max(run[key] for run in runs))
