"""Measure how far stale progress is from fresh progress: without a fresh model, mixed, rebased (docs/rebase.md).

    python scripts/rebase_error.py errors    errors of one upload and their bounds, in units of the fresh progress
    python scripts/rebase_error.py descent   uploads until F - F* is 0.1 and 0.05, each rule with its best server weight

The problem is the one of ``freshet paper theory``: logistic regression with an L2 term on the embedded digits, 100
devices, Dirichlet 0.3. Devices are equally fast, m are in flight, and each takes n full-batch steps of its own F_i. So
an upload that arrives at version t started from ``w_o`` with o = t - m, and asked after n1 steps, at version g = t - m
(n - n1) / n. Everything is exact: no mini-batches, no rounding to float32.
"""

import argparse
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from freshet import Federation
from freshet.paper.convex import Floats, Logistic, digits

MU, DEVICES, STEPS, LR = 0.1, 100, 5, 0.1
IN_FLIGHT, SLOTS, UPLOADS = (10, 30, 90), (1, 2, 3, 4), 1000
#: Server weights to choose from. Progress of m devices adds up, so they are in units of 1 / m.
WEIGHTS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)
#: Values of F - F* to reach, and how its curve is sampled and smoothed.
GAPS, STRIDE, WINDOW = (0.1, 0.05), 8, 5


@dataclass(frozen=True)
class Fresh:
    """What a device does with the fresh model: never asks, mixes it with weight beta, or rebases (beta = 1)."""

    name: str
    beta: float
    keeps: bool

    def progress(self, problem: Logistic, w_o: Floats, w_g: Floats, n1: int, n: int, lr: float) -> Floats:
        """``d = w_i - a``: what training produced, or what a mix left of it."""
        d1 = descend(problem, w_o, np.zeros_like(w_o), n1, lr)
        a = w_o + self.beta * (w_g - w_o)
        return descend(problem, a, d1 if self.keeps else (1.0 - self.beta) * d1, n - n1, lr)


NEVER, MIX, REBASE = Fresh("never", 0.0, True), Fresh("mix 0.5", 0.5, False), Fresh("rebase", 1.0, True)
RULES = (NEVER, MIX, REBASE)


def descend(problem: Logistic, start: Floats, progress: Floats, steps: int, lr: float) -> Floats:
    """Return the progress after more full-batch steps at ``start + progress``."""
    for _ in range(steps):
        progress = progress - lr * problem.gradient(start + progress)
    return progress


class Error(NamedTuple):
    """The error of one upload's progress and its bound, both in units of the length of the fresh progress."""

    measured: float
    bound: float


def error(rule: Fresh, problem: Logistic, smoothness: float, models: tuple[Floats, Floats, Floats], n1: int) -> Error:
    """Compare d with the progress d* that the same steps make from the current model ``w_t``.

    For a convex, L-smooth F_i and eta <= 2 / L a step is non-expansive, so each adds at most eta L times the distance
    between the point where the device trains and where it should; a mix also loses beta |d1|::

        |d - d*| <= eta L (n1 |w_t - w_o| + n2 |w_t - a|) + beta |d1| (mix only)
    """
    w_o, w_g, w_t = models
    fresh = descend(problem, w_t, np.zeros_like(w_t), STEPS, LR)
    d = rule.progress(problem, w_o, w_g, n1, STEPS, LR)
    a = w_o + rule.beta * (w_g - w_o)
    stale = n1 * np.linalg.norm(w_t - w_o) + (STEPS - n1) * np.linalg.norm(w_t - a)
    lost = 0.0 if rule.keeps else rule.beta * np.linalg.norm(descend(problem, w_o, np.zeros_like(w_o), n1, LR))
    size = float(np.linalg.norm(fresh))
    return Error(float(np.linalg.norm(d - fresh)) / size, float(LR * smoothness * stale + lost) / size)


@cache
def devices() -> list[Logistic]:
    """The devices' problems F_i."""
    federation = Federation(data={"name": "digits", "concentration": 0.3}, fleet={"devices": DEVICES}, method="fedavg")
    return [digits(MU).take(shard) for shard in federation.shards]


class Run(NamedTuple):
    """The versions of a run, and the device of each upload."""

    versions: list[Floats]
    senders: list[int]


def asked_at(t: int, in_flight: int, n1: int) -> int:
    """The version that a device gets after ``n1`` of ``STEPS`` steps if its upload arrives at version t."""
    return t - round(in_flight * (STEPS - n1) / STEPS)


def run(rule: Fresh, in_flight: int, n1: int, alpha: float, uploads: int = UPLOADS, seed: int = 0) -> Run:
    """``w <- w + alpha d`` for each of ``uploads`` uploads, with ``in_flight`` devices in the pipeline."""
    rng, own = np.random.default_rng(seed), devices()
    senders = [int(device) for device in rng.integers(0, len(own), uploads)]
    versions = [np.zeros(digits(MU).size)]
    for t, device in enumerate(senders):
        w_o, w_g = versions[max(0, t - in_flight)], versions[max(0, asked_at(t, in_flight, n1))]
        versions.append(versions[-1] + alpha * rule.progress(own[device], w_o, w_g, n1, STEPS, LR))
    return Run(versions, senders)


def errors(uploads: int = UPLOADS) -> list[str]:
    """Errors along a run without fresh models, in its second quarter: far from the start and from the optimum."""
    rows = ["in flight | n1 | never, bound | mix 0.5, bound | rebase, bound"]
    for in_flight in IN_FLIGHT:
        done = run(NEVER, in_flight, 3, 1.0 / in_flight, uploads)
        for n1 in SLOTS:
            means = [mean_error(rule, done, in_flight, n1) for rule in RULES]
            rows.append(f"{in_flight} | {n1} | " + " | ".join(f"{e.measured:.3f}, {e.bound:.3f}" for e in means))
    return rows


def mean_error(rule: Fresh, done: Run, in_flight: int, n1: int) -> Error:
    """The mean error and bound in the second quarter of a run."""
    uploads, found = len(done.senders), []
    for t in range(uploads // 4, uploads // 2):
        device = done.senders[t]
        found.append(error(rule, devices()[device], smoothness(device), models(done, t, in_flight, n1), n1))
    return Error(*(float(mean) for mean in np.mean(found, axis=0)))


@cache
def smoothness(device: int) -> float:
    """L of a device's problem."""
    return devices()[device].smoothness()


def models(done: Run, t: int, in_flight: int, n1: int) -> tuple[Floats, Floats, Floats]:
    """``w_o``, ``w_g`` and ``w_t`` of the upload that arrives at version t."""
    v = done.versions
    return v[max(0, t - in_flight)], v[max(0, asked_at(t, in_flight, n1))], v[t]


def descent(uploads: int = UPLOADS) -> list[str]:
    """Uploads until F - F* falls to each of ``GAPS``, with the best of ``WEIGHTS`` for each rule and gap."""
    rows = ["in flight | n1 | " + " | ".join(rule.name for rule in RULES)]
    for in_flight in IN_FLIGHT:
        for n1 in SLOTS:
            rows.append(f"{in_flight} | {n1} | " + " | ".join(reached(rule, in_flight, n1, uploads) for rule in RULES))
    return rows


def reached(rule: Fresh, in_flight: int, n1: int, uploads: int) -> str:
    """For each gap: the fewest uploads, and the server weight that needs them."""
    curves = {weight: gap_curve(run(rule, in_flight, n1, weight / in_flight, uploads)) for weight in WEIGHTS}
    fewest = [min((first_below(curve, gap), weight) for weight, curve in curves.items()) for gap in GAPS]
    return ", ".join(f"{count:g} ({weight:g}/m)" for count, weight in fewest)


def gap_curve(done: Run) -> Floats:
    """F - F* at every ``STRIDE``-th version, as a running mean over ``WINDOW`` of them."""
    gaps = [digits(MU).loss(w) - least_loss() for w in done.versions[::STRIDE]]
    curve: Floats = np.convolve(gaps, np.full(WINDOW, 1.0 / WINDOW), "valid")
    return curve


@cache
def least_loss() -> float:
    """``F*``."""
    return digits(MU).loss(digits(MU).optimum())


def first_below(curve: Floats, gap: float) -> float:
    """The number of uploads after which the curve first falls to ``gap``; infinity if it never does."""
    found = np.flatnonzero(curve <= gap)
    return float(STRIDE * found[0]) if len(found) else np.inf


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("errors", "descent"))
    print("\n".join({"errors": errors, "descent": descent}[parser.parse_args().what]()))
