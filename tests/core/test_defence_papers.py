"""Robust aggregation through a whole round of FedAvg, against naive twins written from the papers' definitions.

The twins know nothing of the code: plain loops in float64 over all uploads of the round.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from freshet.core.defence import Defence, DefenceOptions
from freshet.core.layout import Layout
from freshet.core.messages import Upload
from freshet.core.method import MethodContext
from freshet.core.server import ActiveTrip, Server
from freshet.methods import class_and_preset, method_options
from freshet.training.optimisers import constant

SIZE, DEVICES = 9, 10
START = np.linspace(-1, 1, SIZE).astype(np.float32)
#: Unequal, to show that robust rules do not weigh by them.
SAMPLES = np.array([5, 20, 1, 7, 11, 3, 40, 13, 2, 9])
Steps = list[np.ndarray]


def steps_of(seed: int, poisoned: int) -> Steps:
    rng = np.random.default_rng(seed)
    honest = [np.linspace(0.5, 1.5, SIZE) + 0.4 * rng.normal(size=SIZE) for _ in range(DEVICES)]
    return [-30 * step if k < poisoned else step for k, step in enumerate(honest)]


def root_of(seed: int) -> np.ndarray:
    return np.linspace(0.4, 1.6, SIZE) + 0.1 * np.random.default_rng(1000 + seed).normal(size=SIZE)


def trimmed(steps: Steps, beta: float) -> np.ndarray:
    """Yin et al., definition 2: of every coordinate, drop the share beta of largest and of smallest values."""
    drop, out = int(beta * len(steps)), []
    for j in range(SIZE):
        values = [float(step[j]) for step in steps]
        for _ in range(drop):
            values.remove(max(values))
            values.remove(min(values))
        out.append(math.fsum(values) / len(values))
    return np.array(out)


def coordinate_median(steps: Steps) -> np.ndarray:
    """Yin et al., definition 1: half of the values are at most this, and half at least."""
    out = []
    for j in range(SIZE):
        values = sorted(float(step[j]) for step in steps)
        low, high = values[(len(values) - 1) // 2], values[len(values) // 2]
        out.append((low + high) / 2)
    return np.array(out)


def multi_krum(steps: Steps, f: int) -> set[int]:
    """Blanchard et al., section 4: the n - f uploads with the least sum of squares to their n - f - 2 closest."""
    n, scores = len(steps), []
    for i in range(n):
        squares = sorted(float(np.sum((steps[i] - steps[j]) ** 2)) for j in range(n) if j != i)
        scores.append((sum(squares[: n - f - 2]), i))
    return {i for _, i in sorted(scores)[: n - f]}


def trusting(steps: Steps, root: np.ndarray) -> np.ndarray:
    """Cao et al., algorithm 2: rectified cosines as trust, every update at the root update's length."""
    size, total, trusts = float(np.sqrt(np.sum(root**2))), np.zeros(SIZE), 0.0
    for step in steps:
        own = float(np.sqrt(np.sum(step**2)))
        trust = max(0.0, float(np.dot(step, root)) / (own * size))
        total += trust * (size / own) * step
        trusts += trust
    return total / trusts


def move_of(rule: str, steps: Steps, root: np.ndarray, byzantine: float) -> np.ndarray:
    """How far one round of FedAvg behind this defence moves the model."""
    layout = Layout.build([("w", (SIZE,), "learnable")])
    context = MethodContext(DEVICES, SAMPLES.copy(), 5, DEVICES, layout, 0)

    def train_root(base: np.ndarray, active: ActiveTrip) -> np.ndarray:
        assert np.array_equal(base, START)
        return root.astype(np.float32)

    defence = Defence(DefenceOptions(rule=rule, byzantine=byzantine), layout, True, train_root)
    method = class_and_preset("fedavg")[0](method_options("fedavg", {}), context)
    server = Server(method, context, START.copy(), constant(0.1), gate=None, defence=defence)
    for device, assignment in enumerate(server.trigger(list(range(DEVICES)))):
        weights = (START + steps[device]).astype(np.float32)
        server.upload(Upload(device, assignment.trip, 1, weights, 3))
    assert server.version == 2
    return server.weights.astype(np.float64) - START


@pytest.mark.parametrize(("seed", "poisoned"), list(itertools.product(range(4), (0, 2, 3))))
def test_round_moves_as_the_papers_say(seed: int, poisoned: int) -> None:
    steps, root = steps_of(seed, poisoned), root_of(seed)
    twins: dict[str, Callable[[], np.ndarray]] = {
        "trimmed-mean": lambda: trimmed(steps, 0.3),
        "median": lambda: coordinate_median(steps),
        "root": lambda: trusting(steps, root),
    }
    for rule, twin in twins.items():
        np.testing.assert_allclose(move_of(rule, steps, root, 0.3), twin(), atol=2e-5, err_msg=rule)
    kept = multi_krum(steps, 3)
    mean = sum(SAMPLES[k] * steps[k] for k in kept) / sum(SAMPLES[k] for k in kept)
    np.testing.assert_allclose(move_of("multi-krum", steps, root, 0.3), mean, atol=2e-5)


def test_more_attackers_than_assumed_break_rules_that_count_them() -> None:
    """Three of ten attack and two are assumed, as chance makes it in a third of rounds of 10 of 40 with 8 attackers."""
    steps, root, honest = steps_of(0, 3), root_of(0), np.linspace(0.5, 1.5, SIZE)
    for rule, assumed, is_close in (
        ("trimmed-mean", 0.2, False),
        ("trimmed-mean", 0.3, True),
        ("multi-krum", 0.2, False),
        ("multi-krum", 0.3, True),
        ("median", 0.2, True),
        ("root", 0.2, True),
    ):
        away = float(np.abs(move_of(rule, steps, root, assumed) - honest).max())
        assert (away < 1.0) is is_close, (rule, assumed, away)
