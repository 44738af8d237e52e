"""scripts/rebase_error.py: its bounds hold, and its pipeline is the one that it describes."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "rebase_error.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_errors_stay_within_their_bounds(script: dict[str, Any]) -> None:
    done = script["run"](script["NEVER"], 10, 3, 0.1, 60)
    measured = []
    for t in range(20, 60):
        device = done.senders[t]
        for n1 in script["SLOTS"]:
            models = script["models"](done, t, 10, n1)
            found = [
                script["error"](rule, script["devices"]()[device], script["smoothness"](device), models, n1)
                for rule in script["RULES"]
            ]
            assert all(0.0 < error.measured <= error.bound for error in found)
            measured.append([error.measured for error in found])
    never, mixed, rebased = np.mean(measured, axis=0)
    assert rebased < never < mixed


def test_progress_of_each_rule_is_that_of_its_formula(script: dict[str, Any]) -> None:
    """Two steps, one before the merge: d1 at the base, d2 at the merged model."""
    problem, rng = script["devices"]()[0], np.random.default_rng(0)
    w_o, w_g = rng.normal(size=(2, problem.size)) * 0.1
    d1 = -0.1 * problem.gradient(w_o)
    rebased = d1 - 0.1 * problem.gradient(w_g + d1)
    mixed = 0.5 * d1 - 0.1 * problem.gradient(0.5 * (w_o + d1) + 0.5 * w_g)
    never = d1 - 0.1 * problem.gradient(w_o + d1)
    for rule, expected in zip(script["RULES"], (never, mixed, rebased), strict=True):
        np.testing.assert_allclose(rule.progress(problem, w_o, w_g, 1, 2, 0.1), expected, atol=1e-12)


def test_first_below_counts_uploads(script: dict[str, Any]) -> None:
    curve = np.array([0.5, 0.2, 0.09, 0.2, 0.04])
    assert script["first_below"](curve, 0.1) == 2 * script["STRIDE"]
    assert script["first_below"](curve, 0.01) == np.inf
