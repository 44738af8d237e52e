"""After a merge, a defence measures what training produced, which is also what is applied.

The server's own progress does not count as the device's.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.core.admission import merges_problem
from freshet.core.defence import Decision, Defence, DefenceOptions, step_of
from freshet.core.layout import Layout
from freshet.core.messages import Merge, Upload
from freshet.core.server import ActiveTrip, SentFresh
from freshet.methods.asmu.steps import write_step

N = 40
LAYOUT = Layout.build([("w", (N,), "learnable"), ("mean", (2,), "buffer"), ("count", (), "counter")])
RNG = np.random.default_rng(0)
BASE = RNG.normal(size=LAYOUT.size).astype(np.float32)
#: The server has moved far.
FRESH = (BASE + 5 * RNG.normal(size=LAYOUT.size)).astype(np.float32)
VERSION = 4
SENT = {VERSION: FRESH}
FLIGHT = ActiveTrip(1, 1, 1, 5, 0.1, sent=[SentFresh(1, VERSION, VERSION)])


def trained(produced: np.ndarray, beta: float = 0.0, **more: object) -> Upload:
    """A model that merged the fresh one with weight beta, plus a step."""
    weights = (1 - beta) * BASE.astype(np.float64) + beta * FRESH
    weights[: len(produced)] += produced
    merges = (Merge(VERSION, {"beta": beta, "n1": 1}),) if beta else ()
    return Upload(0, 1, 1, weights.astype(np.float32), 3, merges=merges, **more)


def honest(seed: int, length: float = 1.0) -> np.ndarray:
    """A common direction plus noise."""
    return length * (np.ones(N) + 0.3 * np.random.default_rng(seed).normal(size=N)) / np.sqrt(N)


def judge(defence: Defence, upload: Upload) -> Decision:
    return defence.judge(upload, FLIGHT, BASE, SENT if upload.merges else {})


def warm(rule: str) -> Defence:
    defence = Defence(DefenceOptions(rule=rule), LAYOUT)
    for seed in range(12):
        judge(defence, trained(honest(seed))._replace(device=seed))
    return defence


def applied(upload: Upload) -> np.ndarray:
    """What apply = "progress" adds to the model, by the method's own arithmetic."""
    step, beta = np.empty(N, np.float32), sum(float(merge.numbers["beta"]) for merge in upload.merges)
    write_step(step, upload.weights[:N], BASE[:N], FRESH[:N], BASE[:N], beta)
    return step.astype(np.float64)


@settings(deadline=None, max_examples=60)
@given(st.floats(0.01, 0.99), st.integers(0, 10**6))
def test_the_measured_step_is_the_applied_one(beta: float, seed: int) -> None:
    upload = trained(honest(seed), beta)
    step = step_of(upload, upload.anchor(BASE, SENT), N)
    np.testing.assert_allclose(step, applied(upload), atol=3e-6)
    np.testing.assert_allclose(step, honest(seed), atol=3e-6)


def test_an_honest_merge_is_fully_admitted_however_far_the_server_has_moved() -> None:
    for rule in ("clip", "median-distance"):
        upload = trained(honest(50, 0.95), beta=0.6)
        judged = judge(warm(rule), upload)
        assert judged.problem is None and judged.upload is upload


def test_clip_shortens_only_what_training_produced() -> None:
    defence, produced = warm("clip"), np.concatenate([honest(50, 7.0), [4.0, 4.0, 3.0]])
    vectors = {"control": np.full(N, 0.1, np.float32)}
    judged = judge(defence, trained(produced, 0.6, vectors=vectors))
    numbers, left = judged.notes[0].numbers, judged.upload
    length = np.sqrt(np.linalg.norm(honest(50, 7.0)) ** 2 + N * 0.1**2)
    assert numbers["measure"] == pytest.approx(length, rel=1e-5)
    assert numbers["share"] == pytest.approx(numbers["bound"] / length, rel=1e-5) and numbers["share"] < 0.2
    np.testing.assert_allclose(applied(left), numbers["share"] * produced[:N], atol=3e-6)
    start = 0.4 * BASE + 0.6 * FRESH
    np.testing.assert_allclose(left.weights[N:-1], start[N:-1] + 4 * numbers["share"], atol=1e-5)
    assert left.weights[-1] == np.float32(0.4 * BASE[-1] + 0.6 * FRESH[-1] + 3.0), "counters stay"


@pytest.mark.parametrize("beta", [0.5, 0.99])
def test_a_false_merge_report_cannot_undo_the_servers_progress(beta: float) -> None:
    """``u = w_o`` with a reported beta makes the server subtract ``beta (w_g - w_o)``."""
    hostile = trained(np.zeros(0))._replace(merges=(Merge(VERSION, {"beta": beta, "n1": 1}),))
    back = beta * np.linalg.norm(FRESH[:N].astype(np.float64) - BASE[:N])
    assert np.linalg.norm(applied(hostile)) == pytest.approx(back, rel=1e-5) and back > 10
    judged = judge(warm("clip"), hostile)
    bound = judged.notes[0].numbers["bound"]
    assert np.linalg.norm(applied(judged.upload)) == pytest.approx(bound, rel=1e-5) and bound < 1.5
    assert "away from other uploads" in (judge(warm("median-distance"), hostile).problem or "")


def test_a_merge_starts_between_the_two_sent_models_whatever_is_reported() -> None:
    upload = trained(honest(1))
    assert upload.anchor(BASE, SENT) is BASE, "no merge"
    for beta, expected in ((-3.0, BASE), (0.0, BASE), (1.0, FRESH), (1e300, FRESH)):
        told = upload._replace(merges=(Merge(VERSION, {"beta": beta}),))
        np.testing.assert_array_equal(told.anchor(BASE, SENT), expected)
        assert merges_problem(told.merges, SENT) is None
        assert "sent no fresh model" in (merges_problem(told.merges, {}) or ""), "it is rejected before that"
