"""A numerical check of Theorem 1: what the proof bounds is measured along runs of FedASMU and FedSSMU on a strongly
convex problem with a known optimum, with every constant of the bound.

Three parts. **grid**: both methods, staleness limits 5, 20, 99 and 1, 5, 10 local steps. **horizon**: the theorem's
step size ``1 / sqrt(T)`` for growing T. **witness**: two devices that upload equally often, though one holds nine
tenths of the samples; a bound that vanishes with T cannot hold there.

An epoch is one mini-batch step, as in the paper's local SGD: the sampler hands out a device's samples as one batch in
random order, and the loss takes the first ``batch`` of them, an unbiased draw, independent of all others.

``document`` has one line per setting with its constants, measured means and bounds.
"""

import csv
import io
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from freshet import (
    ActiveTrip,
    Aggregate,
    Federation,
    Local,
    LocalRule,
    Observer,
    Options,
    Server,
    Upload,
    Verdict,
    __version__,
)
from freshet.errors import RunError
from freshet.experiments.compare import run_each
from freshet.files import write_atomically
from freshet.methods.asmu.rule import ASMUOptions, FreshModelRule
from freshet.methods.fedasmu import FedASMU
from freshet.methods.fedssmu import FedSSMU, SSMUOptions
from freshet.paper import convex
from freshet.paper.convex import Constants, Floats, Indices, Logistic, digits

if TYPE_CHECKING:
    from torch import Tensor, nn


Record = dict[str, Any]
Part = Literal["grid", "horizon", "witness"]

MU, BATCH, DEVICES, PER_ROUND = 0.1, 10, 100, 10
TAUS, EPOCHS, VERSIONS = (5, 20, 99), (1, 5, 10), 1000
#: The least T that is worth a curve.
SHORTEST = 20
#: T of the horizon runs as parts of VERSIONS, and the initial iota of each line.
HORIZONS, IOTAS = (0.1, 0.4, 1.6), {"fedasmu": (0.0, 0.2), "fedssmu": (0.0,)}
#: Local steps are measured in every fourth trip of a device (in the witness in all), versions always.
EVERY = 4


# ---- the methods, with measurements


class ProblemOptions(Options):
    """The problem, and how often its local steps are measured."""

    mu: float = Field(MU, gt=0, description="L2 coefficient of the objective (training.weight_decay)")
    batch: int = Field(BATCH, ge=1, description="samples per local step")
    every: int = Field(EVERY, ge=1, description="measure the local steps of every n-th trip of a device")


class WatchedASMUOptions(ProblemOptions, ASMUOptions):
    """FedASMU's options and those of the problem."""


class WatchedSSMUOptions(ProblemOptions, SSMUOptions):
    """FedSSMU's options and those of the problem."""


@dataclass(frozen=True)
class WatchedRule(FreshModelRule):
    """The device rule unchanged, on mini-batches that are independent draws; some trips report measurements."""

    def loss(self, local: Local, x: "Tensor", y: "Tensor") -> "Tensor":
        from torch.nn.functional import cross_entropy

        o = self.options
        assert isinstance(o, ProblemOptions)
        if (local.assignment.trip - 1) % o.every == 0:
            problem = digits(o.mu)
            own = Logistic.of(x.numpy(), y.numpy(), problem.classes, problem.mu)
            record_step(local.report, problem, own, local.weights.numpy(), o.batch)
        return cross_entropy(local.model(x[: o.batch]), y[: o.batch])


def record_step(
    report: dict[str, int | float], problem: Logistic, own: Logistic, w: NDArray[np.float32], batch: int
) -> None:
    """Add one local step: ``|grad F|^2`` of the global objective, and the moments of the device's stochastic gradient.

    The report holds sums over the trip (for means) and maxima (for the G^2 and V^2 of the assumptions).
    """
    here, noisy = problem.gradient(w), own.moments(w, batch)
    apart = noisy.mean - here
    second, variance = float(noisy.mean @ noisy.mean) + noisy.noise, float(apart @ apart) + noisy.noise
    for name, value in (("path", float(here @ here)), ("second_sum", second), ("variance_sum", variance)):
        report[name] = report.get(name, 0.0) + value
    for name, value in (("second_max", second), ("variance_max", variance), ("noise_max", noisy.noise)):
        report[name] = max(report.get(name, 0.0), value)
    report["measured"] = report.get("measured", 0) + 1


REPORTED = ("path", "second_sum", "variance_sum", "second_max", "variance_max", "noise_max", "measured")


class WatchedFedASMU(FedASMU):
    """FedASMU that also logs the gradient at the current version with each aggregation."""

    Options: ClassVar[type[Options]] = WatchedASMUOptions

    @classmethod
    def rule(cls, options: ASMUOptions) -> LocalRule:
        return WatchedRule(options)

    def receive(self, server: Server, upload: Upload, trip: ActiveTrip) -> Verdict:
        verdict = super().receive(server, upload, trip)
        if not isinstance(verdict, Aggregate):
            return verdict
        assert isinstance(self.options, ProblemOptions)
        w, base = server.weights.astype(np.float64), server.store.get(trip.base)
        gradient = digits(self.options.mu).gradient(w)
        seen: Record = {"gradient_sq": float(gradient @ gradient), "drift": float(np.linalg.norm(w - base))}
        beta, before = sum(float(merge.numbers["beta"]) for merge in upload.merges), (trip.slot or 1) - 1  # one merge
        seen |= {"beta": beta, "fresh": trip.newest if beta else trip.base, "own_steps": upload.steps}
        seen |= {"kept": 1.0 - beta * before / trip.epochs}  # share of the earlier steps left by the merge
        seen |= {name: upload.report[name] for name in REPORTED if name in upload.report}
        return verdict._replace(numbers={**verdict.numbers, **seen})


class WatchedFedSSMU(WatchedFedASMU, FedSSMU):
    """FedSSMU with the same measurements."""

    Options: ClassVar[type[Options]] = WatchedSSMUOptions


WATCHED = {"fedasmu": WatchedFedASMU, "fedssmu": WatchedFedSSMU}


def zero_model() -> "nn.Module":
    """Logistic regression that starts at w = 0, so that F = ln 10 for every seed."""
    from torch import nn

    linear = nn.Linear(64, 10)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


# ---- the settings


@dataclass(frozen=True)
class TheoryRun:
    """One run: ``versions`` is T, ``tau`` the staleness limit, ``epochs`` the local steps."""

    part: Part
    method: str
    tau: int
    epochs: int
    versions: int
    seed: int = 0
    iota0: float = 0.0

    @property
    def lr(self) -> float:
        """The theorem's step size."""
        return 1.0 / math.sqrt(self.versions)

    @property
    def line(self) -> "TheoryRun":
        """The line of the results for all seeds of this run."""
        return replace(self, seed=0)

    def canonical(self) -> "TheoryRun":
        """The run to make: a round has PER_ROUND uploads, so every limit above that gives the same run."""
        sync = self.method == "fedssmu"
        return replace(self, tau=min(self.tau, PER_ROUND)) if sync else self

    @property
    def name(self) -> str:
        iota = f"-iota{self.iota0:g}" if self.iota0 else ""
        parts = f"{self.part}-{self.method}-tau{self.tau}-n{self.epochs}-T{self.versions}{iota}"
        return f"{parts}-seed{self.seed}"


def settings(seeds: Sequence[int], versions: int = VERSIONS) -> list[TheoryRun]:
    """All runs of the three parts."""
    found = [TheoryRun("grid", m, tau, n, versions, s) for s in seeds for m in WATCHED for tau in TAUS for n in EPOCHS]
    for seed in seeds:
        for method, iotas in IOTAS.items():
            for iota in iotas:
                steps = [max(2, round(share * versions)) for share in HORIZONS]
                found += [TheoryRun("horizon", method, max(TAUS), 1, T, seed, iota) for T in steps]
        found.append(TheoryRun("witness", "fedasmu", 2, 1, versions, seed, 1.0))
    return found


def federation(setting: TheoryRun) -> Federation:
    """The paper's world (100 devices, ten at a time, ratio 5, Dirichlet), or the witness's two devices."""
    two = setting.part == "witness"
    fleet: Record = {"devices": 2, "ratio": 1.0} if two else {"devices": DEVICES}
    fleet["time"] = "trip"
    method = {"name": f"{__name__}:{WATCHED[setting.method].__name__}", "apply": "mix", "equations": "corrected"}
    return Federation(
        model=zero_model,
        data="digits",
        shards=unequal_pair() if two else None,
        method=method | {"tau_max": setting.tau, "iota0": setting.iota0, "every": 1 if two else EVERY},
        fleet=fleet,
        training={
            "epochs": setting.epochs,
            "lr": setting.lr,
            "lr_decay": 1.0,
            "weight_decay": MU,
            "batch_size": 1_000_000,  # a device's samples at once: WatchedRule takes its mini-batch from them
            "device": "cpu",
        },
        run={"seed": setting.seed, "until": 1e7, "eval_every": 1e9, "executor": "serial", "checkpoint_minutes": 0.0}
        | ({} if two else {"per_round": PER_ROUND}),
    )


def unequal_pair() -> list[Indices]:
    """Digits 0 to 8 on one device, all nines (a tenth of the samples) on the other."""
    nine = digits(MU).y == 9
    return [np.flatnonzero(~nine), np.flatnonzero(nine)]


# ---- one run


class EnoughVersions(Exception):
    """The run has made T aggregations."""


class AggregationTrace(Observer):
    """Collect the aggregations and end the run after the T-th."""

    def __init__(self, versions: int) -> None:
        self.versions, self.rows, self.discards = versions, list[Record](), 0

    def on_event(self, event: Record) -> None:
        if len(self.rows) >= self.versions:
            return  # events that were queued behind the last one
        if event["kind"] == "discard":
            self.discards += 1
        elif event["kind"] == "aggregate":
            (part,) = event["contributions"]
            self.rows.append(event | part)
            if len(self.rows) >= self.versions:
                raise EnoughVersions


def perform(setting: TheoryRun, scratch: Path) -> Record | None:
    """Run one setting in a scratch folder and reduce its log to numbers; None when interrupted."""
    start, built, trace = time.process_time(), federation(setting), AggregationTrace(setting.versions)
    try:
        built.run(out=scratch / setting.name, observers=[trace])
    except EnoughVersions:
        return reduce(setting, trace, built.shards) | {"cpu_seconds": time.process_time() - start}
    return None  # the run has no other end: the user pressed Ctrl-C


def reduce(setting: TheoryRun, trace: AggregationTrace, shards: Sequence[Indices]) -> Record:
    """Reduce a run's log to the numbers of the results."""
    rows = trace.rows
    stepped = [row for row in rows if "measured" in row]
    measured = sum(row["measured"] for row in stepped)
    second = max(row["second_max"] for row in stepped)
    reach = max(row["drift"] / (setting.lr * row["alpha"] * setting.epochs) for row in rows)
    smooth = max(digits(MU).take(shard).smoothness() for shard in shards)
    return {
        "setting": asdict(setting),
        "freshet": __version__,
        "gradient_sq": [row["gradient_sq"] for row in rows],
        "alpha": [row["alpha"] for row in rows],
        "discards": trace.discards,
        "staleness_mean": float(np.mean([row["staleness"] for row in rows])),
        "staleness_max": max(row["staleness"] for row in rows),
        "alpha_min": min(row["alpha"] for row in rows),
        "alpha_max": max(row["alpha"] for row in rows),
        "beta_max": max(row["beta"] for row in rows),
        "n_min": min(row["own_steps"] for row in rows),
        "n_max": max(row["own_steps"] for row in rows),
        "smoothness": smooth,
        "second_moment": second,
        "variance": max(row["variance_max"] for row in stepped),
        "noise": max(row["noise_max"] for row in stepped),
        "path_mean": sum(row["path"] for row in stepped) / measured,
        "second_mean": sum(row["second_sum"] for row in stepped) / measured,
        "variance_mean": sum(row["variance_sum"] for row in stepped) / measured,
        "drift": reach / math.sqrt(second),  # |w_o - w_t| in units of eta alpha n G; the proof says at most tau
        "participation_floor": participation_floor(rows, shards),
    }


def participation_floor(rows: Sequence[Record], shards: Sequence[Indices]) -> float:
    """``|grad F|^2`` at the minimiser of ``sum_i q_i F_i``, the limit of small steps.

    q_i is the device's share of the model in the second half of the run. The floor is 0 only if each device counts in
    proportion to its samples.
    """
    problem, weights = digits(MU), np.zeros(len(digits(MU).y))
    for row, share in list(zip(rows, influence(rows), strict=True))[len(rows) // 2 :]:
        shard = shards[row["device"]]
        weights[shard] += share / len(shard)
    gradient: Floats = problem.gradient(problem.optimum(weights / weights.sum()))
    return float(gradient @ gradient)


def influence(rows: Sequence[Record]) -> Floats:
    """The weight c_t of each upload's own training in the last model, which is linear: ``w_1 + sum_t c_t d_t``.

    An upload is ``(1 - beta) w_o + beta w_g + d``, and mixing it in replaces an equal share of w_t. The loop runs
    backwards: ``a_v``, the last model's share of version v, is complete after all later aggregations.
    """
    last = len(rows) + 1
    a, c = np.zeros(last + 1), np.zeros(len(rows))
    a[last] = 1.0
    for t in range(last - 1, 0, -1):
        row = rows[t - 1]
        through = a[t + 1] * row["alpha"]
        a[t] += a[t + 1] - through
        a[row["base"]] += through * (1.0 - row["beta"])
        a[row["fresh"]] += through * row["beta"]
        c[t - 1] = through * row["kept"]
    return c


# ---- all runs


def missing(jobs: Sequence[TheoryRun], folder: Path) -> list[TheoryRun]:
    """The runs that are missing in ``folder``, long ones first."""
    found = [job for job in dict.fromkeys(job.canonical() for job in jobs) if load(job, folder) is None]
    return sorted(found, key=lambda job: -job.versions * job.epochs * (3 if job.tau == min(TAUS) else 1))


def run_all(todo: Sequence[TheoryRun], folder: Path, workers: int, on_done: Callable[[TheoryRun, float], None]) -> bool:
    """Make these runs, several at a time, and keep the outcome of each; False when interrupted."""
    folder.mkdir(parents=True, exist_ok=True)

    def keep(setting: TheoryRun, outcome: Record) -> None:
        write_atomically(folder / f"{setting.name}.json", json.dumps(outcome, allow_nan=False).encode())
        on_done(setting, float(np.mean(outcome["gradient_sq"])))

    with tempfile.TemporaryDirectory(prefix="freshet-theory-") as scratch:
        return run_each(partial(_perform_in, Path(scratch)), todo, workers, keep)


def _perform_in(scratch: Path, setting: TheoryRun) -> Record | None:
    return perform(setting, scratch)


def load(setting: TheoryRun, folder: Path) -> Record | None:
    """The outcome of an earlier run with the same settings and version, or None."""
    try:
        found = json.loads((folder / f"{setting.name}.json").read_text(encoding="utf-8"))
        same = found["setting"] == asdict(setting) and found["freshet"] == __version__
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if same else None


# ---- the results

CURVE = ("mean", "printed", "corrected", "repaired")


def document(jobs: Sequence[TheoryRun], folder: Path, seconds: float) -> Record:
    """All results as plain values: the content of ``theory.json``."""
    problem = problem_facts()
    lines = [line(group, folder, problem["gap"]) for group in groups(jobs)]
    runs = [load(job, folder) for job in {job.canonical() for job in jobs}]
    return {
        "title": "Theorem 1 of the FedASMU paper, checked on a strongly convex problem",
        "freshet": __version__,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(sum(run["cpu_seconds"] for run in runs if run is not None), 1),
        "problem": problem,
        "lines": lines,
    }


def problem_facts() -> Record:
    """The objective: its size, its optimum, and the accuracy of the optimum."""
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


def groups(jobs: Sequence[TheoryRun]) -> list[list[TheoryRun]]:
    """The runs of each line: one setting, all seeds."""
    found: dict[TheoryRun, list[TheoryRun]] = {}
    for job in jobs:
        found.setdefault(job.line, []).append(job)
    return list(found.values())


def line(group: Sequence[TheoryRun], folder: Path, gap: float) -> Record:
    """One setting over its seeds: means of the measurements, maxima of what the assumptions bound."""
    setting, runs = group[0], []
    for job in group:
        outcome = load(job.canonical(), folder)
        if outcome is None:
            raise RunError(f"{folder} does not hold {job.canonical().name}; give the same command again")
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
        "printed": convex.printed_bound(constants, T),
        "corrected": convex.corrected_bound(constants, T),
        "repaired": convex.repaired_bound(constants, T),
        "stated": convex.stated_bound(constants),
        "curve": curve(means, constants),
    }


def curve(means: Floats, constants: Constants) -> list[Record]:
    """The running mean and the bounds at about fifty values of T, evenly spaced on a log scale."""
    last = len(means)
    points = sorted({round(x) for x in np.geomspace(1, last, 50)})
    return [
        {
            "T": T,
            "mean": float(means[T - 1]),
            "printed": convex.printed_bound(constants, T),
            "corrected": convex.corrected_bound(constants, T),
            "repaired": convex.repaired_bound(constants, T),
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
