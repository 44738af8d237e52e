"""Trimmed mean, median and trusted root: against naive twins, in rounds and one by one."""

import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.core.defence import (
    MIN_MEASURES,
    Decision,
    Defence,
    DefenceOptions,
    RecentUploads,
    audit_note,
    limit_to_range,
    root_share,
    trimmed_count,
    trimmed_mean,
    trusted_mean,
)
from freshet.core.layout import Layout
from freshet.core.messages import Fresh, Merge, Upload
from freshet.core.method import Mismatch
from freshet.core.server import ActiveTrip

N = 30
LAYOUT = Layout.build([("w", (N,), "learnable"), ("mean", (2,), "buffer"), ("count", (), "counter")])
BASE = np.linspace(-1, 1, LAYOUT.size).astype(np.float32)
FLIGHT = ActiveTrip(1, 4, 4, 5, 0.1)
ROOT = np.concatenate([np.ones(N), np.zeros(3)]).astype(np.float32)


def upload(step: np.ndarray, device: int = 0, **more: Any) -> Upload:
    weights = BASE.copy()
    weights[: len(step)] += step.astype(np.float32)
    return Upload(device, 1, 4, weights, 3, **more)


def honest(seed: int) -> np.ndarray:
    return 1.0 + 0.3 * np.random.default_rng(seed).normal(size=N)


def defence(rule: str, rounds: bool, **options: Any) -> Defence:
    calls: list[int] = []

    def root(base: np.ndarray, active: ActiveTrip) -> np.ndarray:
        calls.append(active.base)
        assert np.array_equal(base, BASE)
        return ROOT

    made = Defence(DefenceOptions(rule=rule, **options), LAYOUT, rounds, root)
    made.calls = calls  # type: ignore[attr-defined]
    return made


def moved(found: Upload) -> np.ndarray:
    return found.weights.astype(np.float64) - BASE


# ---- formulas


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 15), st.floats(0, 0.49), st.sampled_from(["trimmed-mean", "median"]), st.integers(0, 10**6))
def test_trimmed_mean_is_that_of_the_paper(n: int, share: float, rule: str, seed: int) -> None:
    steps = np.random.default_rng(seed).normal(size=(n, 7)).astype(np.float32)
    k = trimmed_count(n, share, rule)
    assert 0 <= 2 * k < n
    found = trimmed_mean(list(steps), k)
    for place in range(7):
        column = sorted(float(value) for value in steps[:, place])
        expected = statistics.median(column) if rule == "median" else statistics.fmean(column[k : n - k])
        assert found[place] == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_number_of_trimmed_values() -> None:
    assert [trimmed_count(n, 0.2, "trimmed-mean") for n in (1, 4, 5, 10)] == [0, 0, 1, 2]
    assert trimmed_count(100, 0.29, "trimmed-mean") == 29, "0.29 * 100 is a little less in binary"
    assert [trimmed_count(n, 0.2, "median") for n in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, 2]


def test_blocks_of_a_long_vector_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list(np.random.default_rng(0).normal(size=(5, 100)).astype(np.float32))
    whole = trimmed_mean(steps, 1), limit_to_range(steps[0], steps, 1)
    monkeypatch.setattr("freshet.core.defence._BLOCK", 7)
    parts = trimmed_mean(steps, 1), limit_to_range(steps[0], steps, 1)
    assert np.array_equal(whole[0], parts[0]) and np.array_equal(whole[1], parts[1])


def test_step_is_limited_to_the_range_of_the_others() -> None:
    others = [np.array([value, -value], np.float32) for value in (1.0, 2.0, 3.0, 4.0, 100.0)]
    assert limit_to_range(np.array([50.0, -2.5], np.float32), others, 1).tolist() == [4.0, -2.5]
    assert limit_to_range(np.array([0.0, 0.0], np.float32), others, 1).tolist() == [2.0, -2.0]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 8), st.integers(0, 10**6))
def test_trusted_mean_is_that_of_the_paper(n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, root = rng.normal(size=(n, 6)).astype(np.float32), rng.normal(size=6)
    cosines = [float(d @ root / np.linalg.norm(d) / np.linalg.norm(root)) for d in steps.astype(float)]
    lengths = [float(np.linalg.norm(d)) for d in steps.astype(float)]
    found = trusted_mean(list(steps), cosines, lengths, float(np.linalg.norm(root)))
    trust = [max(0.0, cosine) for cosine in cosines]
    expected = sum(t * np.linalg.norm(root) / length * d for t, length, d in zip(trust, lengths, steps, strict=True))
    expected = expected / sum(trust) if sum(trust) else np.zeros(6)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_root_share() -> None:
    assert root_share(-0.5, 0.5, 1.0, 1.0) == 0.0
    assert root_share(0.5, 0.5, 4.0, 2.0) == 0.5
    assert root_share(0.2, 0.4, 1.0, 2.0) == 0.5, "a short step is not made longer"
    assert root_share(0.9, 0.3, 1.0, 2.0) == 1.0, "more trust than usual does not count for more"
    assert root_share(0.0, 0.5, 0.0, 2.0) == 0.0
    assert (root_share(0.1, 0.0, 1.0, 1.0), root_share(0.0, 0.0, 1.0, 1.0)) == (1.0, 0.0)


# ---- rounds


def released(made: Defence, uploads: list[Upload]) -> tuple[list[Upload], dict[str, Any]]:
    for each in uploads:
        assert made.judge(each, FLIGHT, BASE, {}) == Decision(None)
    kept, (note,) = made.release()
    audit_note(note, RecentUploads())
    return [found for found, _ in kept], dict(note.numbers)


@pytest.mark.parametrize("rule", ["trimmed-mean", "median"])
def test_every_upload_of_a_round_gets_the_robust_step(rule: str) -> None:
    """So any weighted mean of them, whatever the method, is the robust one."""
    steps = [honest(seed) if seed not in (2, 7) else -50 * honest(seed) for seed in range(10)]
    found, numbers = released(defence(rule, True), [upload(step, k) for k, step in enumerate(steps)])
    assert [each.device for each in found] == numbers["kept"] == list(range(10))
    k = 2 if rule == "trimmed-mean" else 4
    expected = np.sort(np.stack(steps), axis=0)[k : 10 - k].mean(axis=0)
    for each in found:
        np.testing.assert_allclose(moved(each)[:N], expected, atol=1e-5)
    assert numbers["trimmed"] == k and 0.8 < moved(found[0])[:N].mean() < 1.2


def test_buffers_and_named_vectors_are_robust_and_counters_stay() -> None:
    def sent(device: int, size: float) -> Upload:
        step = np.concatenate([honest(device), [size, size, float(device)]])
        return upload(step, device, vectors={"c": np.full(N, size, np.float32)})

    found, _ = released(defence("median", True), [sent(k, 1e6 if k == 4 else 1.0) for k in range(5)])
    for device, each in enumerate(found):
        np.testing.assert_allclose(moved(each)[N : N + 2], 1.0, atol=1e-5)
        assert moved(each)[-1] == device
        np.testing.assert_allclose(each.vectors["c"], 1.0)


def test_step_of_a_merged_upload_starts_at_its_anchor() -> None:
    fresh = BASE + 100.0
    made = defence("median", True)
    for device in range(3):
        merged = upload(np.concatenate([honest(device), [0, 0, 0]]) + 50.0, device, merges=(Merge(6, {"beta": 0.5}),))
        made.judge(merged, FLIGHT, BASE, {6: fresh})
    kept, _ = made.release()
    expected = 50.0 + np.median([honest(device) for device in range(3)], axis=0)
    np.testing.assert_allclose(moved(kept[0][0])[:N], expected, atol=1e-4)
    assert Fresh(6, 6, fresh).version == 6


def test_root_leaves_out_what_goes_against_it_and_bounds_the_length() -> None:
    steps = [honest(seed) for seed in range(6)] + [-honest(8), 1e4 * honest(9)]
    made = defence("root", True)
    found, numbers = released(made, [upload(step, k) for k, step in enumerate(steps)])
    assert numbers["kept"] == [0, 1, 2, 3, 4, 5, 7] and made.calls == [4]  # type: ignore[attr-defined]
    for each in found:
        assert np.linalg.norm(moved(each)[:N]) <= math.sqrt(N) + 1e-4, "the length of the root step"
    assert np.linalg.norm(moved(found[0])[:N]) > 0.9 * math.sqrt(N)


def test_round_without_any_trust_keeps_nothing() -> None:
    found, numbers = released(defence("root", True), [upload(-honest(k), k) for k in range(3)])
    assert found == [] == numbers["kept"] and numbers["left"] == 0.0


# ---- one by one


@pytest.mark.parametrize("rule", ["trimmed-mean", "median"])
def test_first_uploads_are_only_measured(rule: str) -> None:
    made = defence(rule, False)
    problems = [made.judge(upload(honest(k), k), FLIGHT, BASE, {}).problem for k in range(MIN_MEASURES + 3)]
    assert [problem is not None for problem in problems] == [True] * MIN_MEASURES + [False] * 3


@pytest.mark.parametrize("rule", ["trimmed-mean", "median"])
@pytest.mark.parametrize("poison", [-50.0, 1e4])
def test_poisoned_step_is_limited_one_by_one(rule: str, poison: float) -> None:
    made, sums = defence(rule, False), np.zeros(N)
    for turn in range(60):
        device, bad = turn % 10, turn % 10 in (3, 6)
        judged = made.judge(upload(honest(turn) * (poison if bad else 1.0), device), FLIGHT, BASE, {})
        audit_note(judged.notes[0], RecentUploads())
        if turn >= 20:
            assert judged.problem is None and judged.upload is not None
            step = moved(judged.upload)[:N]
            assert step.min() > 0.0 and step.max() < 2.5, "within what honest devices send"
            sums += step
    assert 0.7 < sums.mean() / 40 < 1.4


def test_honest_step_passes_nearly_unchanged_by_trimming() -> None:
    made = defence("trimmed-mean", False, byzantine=0.1)
    changed = []
    for turn in range(80):
        step = honest(turn)
        judged = made.judge(upload(step, turn % 20), FLIGHT, BASE, {})
        if turn >= 40 and judged.upload is not None:
            changed.append(np.mean(np.abs(moved(judged.upload)[:N] - step) > 1e-5))
    assert np.mean(changed) < 0.35


def test_root_one_by_one() -> None:
    made = defence("root", False)
    good = made.judge(upload(honest(1)), FLIGHT, BASE, {})
    assert good.problem is None and good.upload is not None
    numbers = good.notes[0].numbers
    np.testing.assert_allclose(moved(good.upload)[:N], numbers["share"] * honest(1), atol=1e-4)
    far = made.judge(upload(1e3 * honest(2)), FLIGHT, BASE, {})
    assert far.upload is not None and np.linalg.norm(moved(far.upload)[:N]) <= math.sqrt(N) * 1.001
    bad = made.judge(upload(-honest(3)), FLIGHT, BASE, {})
    assert bad.problem is not None and "goes against the server's own training" in bad.problem
    seen = RecentUploads()
    for judged in (good, far, bad):
        audit_note(judged.notes[0], seen)
    assert numbers["share"] > 0.9, "an honest step counts whole"
    spoilt = good.notes[0]._replace(numbers=dict(numbers) | {"share": 0.5})
    with pytest.raises(Mismatch, match="share"):
        audit_note(spoilt, RecentUploads())
    assert made.calls == [4], "one training per version"  # type: ignore[attr-defined]


@pytest.mark.parametrize("rule", ["trimmed-mean", "median", "root"])
@pytest.mark.parametrize("rounds", [True, False])
def test_restored_defence_continues_the_same_way(rule: str, rounds: bool) -> None:
    one, other = defence(rule, rounds), defence(rule, rounds)
    for k in range(8):
        one.judge(upload(honest(k), k), FLIGHT, BASE, {})
    other.restore(one.state())
    found = [each.judge(upload(honest(50), 3), FLIGHT, BASE, {}) for each in (one, other)]
    assert found[0].notes == found[1].notes
    for (a, _), (b, _) in zip(one.release()[0], other.release()[0], strict=True):
        assert np.array_equal(a.weights, b.weights)
