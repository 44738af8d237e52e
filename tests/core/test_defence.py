"""Defence against poisoned updates: formulas against naive twins, what is admitted, logged and kept."""

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.core.defence import (
    MIN_AGREEMENTS,
    MIN_MEASURES,
    WINDOW,
    Decision,
    Defence,
    DefenceOptions,
    LatestByDevice,
    RecentUploads,
    admitted_share,
    audit_note,
    bounded_samples,
    byzantine_count,
    krum_scores,
    least_agreement,
    smallest,
)
from freshet.core.events import Noted
from freshet.core.layout import Layout
from freshet.core.messages import Upload
from freshet.core.method import Mismatch
from freshet.core.server import ActiveTrip

N = 40
LAYOUT = Layout.build([("w", (N,), "learnable"), ("mean", (2,), "buffer"), ("count", (), "counter")])
BASE = np.arange(LAYOUT.size, dtype=np.float32)
FLIGHT = ActiveTrip(1, 1, 1, 5, 0.1)


def upload(step: np.ndarray, device: int = 0, **more: object) -> Upload:
    weights = BASE.copy()
    weights[: len(step)] += step.astype(np.float32)
    return Upload(device, 1, 1, weights, 3, **more)


def honest(seed: int, length: float = 1.0) -> np.ndarray:
    """A common direction plus noise."""
    step = np.ones(N) / np.sqrt(N) + 0.3 * np.random.default_rng(seed).normal(size=N) / np.sqrt(N)
    return length * step


def judge(defence: Defence, step: np.ndarray, device: int | None = None) -> Decision:
    """Judge the upload of a device, by default of one that has not uploaded before."""
    return defence.judge(upload(step, next(NEW_DEVICES) if device is None else device), FLIGHT, BASE, {})


NEW_DEVICES = itertools.count(1000)


def warm(rule: str, **options: object) -> Defence:
    defence = Defence(DefenceOptions(rule=rule, **options), LAYOUT)
    for seed in range(10):
        judge(defence, honest(seed), seed)
    return defence


def values(*given: float) -> LatestByDevice:
    """The latest values of as many devices."""
    return LatestByDevice(list(range(len(given))), list(given), len(given))


def test_the_first_uploads_are_only_measured() -> None:
    for rule, first in (("clip", MIN_MEASURES), ("median-distance", MIN_MEASURES + 1)):
        defence = Defence(DefenceOptions(rule=rule), LAYOUT)
        refused = [judge(defence, honest(seed)).problem for seed in range(first + 3)]
        assert all(reason is not None and "enough uploads to compare it with" in reason for reason in refused[:first])
        assert refused[first] is None or rule == "median-distance"


def test_clip_shortens_to_the_median_length_and_keeps_the_direction() -> None:
    defence = warm("clip", factor=2.0)
    lengths = [np.linalg.norm(upload(honest(seed)).weights[:N].astype(float) - BASE[:N]) for seed in range(10)]
    step = 50 * honest(99)
    left = judge(defence, step).upload
    moved = left.weights[:N].astype(np.float64) - BASE[:N]
    assert np.linalg.norm(moved) == pytest.approx(2 * statistics.median(lengths), rel=1e-4)
    assert moved @ step / np.linalg.norm(moved) / np.linalg.norm(step) == pytest.approx(1, abs=1e-5)


def test_clip_leaves_a_short_step_unchanged_bit_for_bit() -> None:
    defence, short = warm("clip", factor=2.0), upload(honest(77))
    assert defence.judge(short, FLIGHT, BASE, {}).upload is short


def test_clip_shortens_named_vectors_too() -> None:
    step = np.concatenate([100 * honest(3), [8.0, 8.0, 5.0]])
    vectors = {"control": np.full(N, 3.0, np.float32)}
    defence = Defence(DefenceOptions(rule="clip"), LAYOUT)
    for seed in range(10):
        defence.judge(upload(honest(seed), seed, vectors={"control": np.zeros(N, np.float32)}), FLIGHT, BASE, {})
    judged = defence.judge(upload(step, vectors=vectors), FLIGHT, BASE, {})
    share = judged.notes[0].numbers["share"]
    assert 0 < share < 0.02
    assert np.allclose(judged.upload.vectors["control"], 3 * share)
    assert np.allclose(judged.upload.weights[N : N + 2] - BASE[N : N + 2], 8 * share, atol=1e-4)
    assert judged.upload.weights[-1] == BASE[-1] + 5, "counters stay"


def test_an_enlarged_named_vector_is_noticed() -> None:
    quiet = [{"control": np.zeros(N, np.float32)}, {"control": np.full(N, 1e6, np.float32)}]
    defence = Defence(DefenceOptions(rule="median-distance"), LAYOUT)
    for seed in range(12):
        defence.judge(upload(honest(seed), seed, vectors=quiet[0]), FLIGHT, BASE, {})
    assert defence.judge(upload(honest(50), vectors=quiet[0]), FLIGHT, BASE, {}).problem is None
    assert "away from other uploads" in (
        defence.judge(upload(honest(51), vectors=quiet[1]), FLIGHT, BASE, {}).problem or ""
    )


@pytest.mark.parametrize("poison", [-10.0, 1e3, -1e30])
def test_median_distance_rejects_far_steps_and_admits_near_ones(poison: float) -> None:
    defence = warm("median-distance")
    for seed in range(100, 160):  # one in five is poisoned
        step = poison * honest(seed) if seed % 5 == 0 else honest(seed)
        judged = judge(defence, step)
        assert (judged.problem is None) == (seed % 5 != 0)


def test_median_distance_is_the_median_of_the_distances_to_the_last_steps() -> None:
    defence = warm("median-distance")
    steps = [upload(honest(seed)).weights[:N].astype(np.float64) - BASE[:N] for seed in range(10)]
    new = upload(honest(10)).weights[:N].astype(np.float64) - BASE[:N]
    note = judge(defence, honest(10)).notes[0]
    expected = statistics.median(float(np.linalg.norm(new - other)) for other in steps)
    assert note.numbers["measure"] == pytest.approx(expected, rel=1e-5)
    measures = [statistics.median(float(np.linalg.norm(steps[i] - other)) for other in steps[:i]) for i in range(1, 10)]
    assert note.numbers["bound"] == pytest.approx(1.5 * statistics.median(measures), rel=1e-5)


def test_only_recent_uploads_count_so_no_fleet_is_locked_out() -> None:
    defence = warm("median-distance")
    taken = [judge(defence, honest(seed, length=20.0)).problem is None for seed in range(3 * WINDOW)]
    assert not taken[0] and all(taken[-WINDOW:])
    assert len(defence.recent.measures.values) == len(defence.recent.steps.values) == WINDOW


def test_an_overflowing_step_is_rejected_and_leaves_no_trace() -> None:
    for rule in ("clip", "median-distance", "multi-krum"):
        defence = warm(rule)
        before, held = list(defence.recent.measures.values), len(defence.state()["held"])
        far = Upload(0, 1, 1, np.full(LAYOUT.size, 3e38, np.float32), 1)
        judged = defence.judge(far, FLIGHT, np.full(LAYOUT.size, -3e38, np.float32), {})
        assert judged.problem is not None and not judged.notes
        assert defence.recent.measures.values == before and len(defence.state()["held"]) == held


# ---- one place per device


@pytest.mark.parametrize("rule", ["clip", "median-distance"])
def test_devices_that_answer_quickly_do_not_own_the_medians(rule: str) -> None:
    """8 of 40 devices made 60 % of the uploads, and median-distance then refused the honest ones."""
    defence, rng, taken = Defence(DefenceOptions(rule=rule), LAYOUT), np.random.default_rng(4), list[bool]()
    for turn in range(400):
        quick = rng.random() < 0.6
        device = int(rng.integers(8)) if quick else 8 + turn % 32
        step = np.full(N, -0.01) + 0.001 * rng.normal(size=N) if quick else honest(turn)
        judged = judge(defence, step, device)
        if not quick and turn > 200:
            taken.append(judged.problem is None and judged.notes[0].numbers["share"] > 0.5)
    assert np.mean(taken) > 0.9
    counts = defence.recent.measures.devices
    assert len(set(counts)) == len(counts) == WINDOW


def test_medians_are_known_after_a_window_of_uploads_where_few_devices_take_part() -> None:
    defence = Defence(DefenceOptions(rule="clip"), LAYOUT)
    refused = [judge(defence, honest(seed), seed % 2).problem is not None for seed in range(2 * WINDOW)]
    assert refused == [True] * WINDOW + [False] * WINDOW


def test_checkpoint_and_log_of_an_older_version_count_every_upload() -> None:
    lengths = [float(place) for place in range(1, 11)]
    defence = Defence(DefenceOptions(rule="clip"), LAYOUT)
    defence.restore({"seen": {"measures": lengths, "steps": [], "agreements": []}, "held": []})
    assert judge(defence, honest(1), 0).notes[0].numbers["bound"] == 5.5
    old, seen = (
        {"rule": "clip", "factor": 1.0, "agreement": None, "least": None, "device": 3, "trip": 1},
        RecentUploads(),
    )
    for place in range(8):
        bound = statistics.median([float(each) for each in range(place)]) if place >= 4 else None
        share = 0.0 if bound is None else min(1.0, bound / place)
        audit_note(Noted("defence", old | {"measure": float(place), "bound": bound, "share": share}), seen)


# ---- directions


def test_a_step_against_the_others_is_rejected_at_ordinary_length() -> None:
    defence = warm("median-distance", factor=100.0)  # distances never reject
    for seed in range(100, 160):  # one in five is poisoned
        step = -honest(seed) if seed % 5 == 0 else honest(seed)
        problem = judge(defence, step).problem
        assert (problem is None) == (seed % 5 != 0)
        assert problem is None or problem.startswith("goes against other uploads (median cosine -0.")


def test_directions_do_not_count_with_few_steps() -> None:
    defence = Defence(DefenceOptions(rule="median-distance", factor=100.0), LAYOUT)
    for seed in range(20):
        note = judge(defence, honest(seed)).notes[0]
        assert (note.numbers["least"] is None) == (seed < MIN_AGREEMENTS + 1)


def test_a_step_of_length_0_opposes_no_other() -> None:
    assert judge(warm("median-distance", factor=100.0), np.zeros(N)).problem is None


def test_most_honest_uploads_pass_even_if_they_oppose_each_other() -> None:
    """Each device has two of ten classes, and learning them harms the others."""
    defence, refused = Defence(DefenceOptions(rule="median-distance"), LAYOUT), 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        step = np.full(N, -0.25) + 0.1 * rng.normal(size=N)
        for label in rng.choice(10, 2, replace=False):
            step[4 * label : 4 * label + 4] += 1.0
        judged = judge(defence, step)
        refused += "goes against" in (judged.problem or "")
    agreements = defence.recent.agreements.values
    assert statistics.median(agreements) < 0 and refused < 20


@pytest.mark.parametrize(
    ("agreements", "least"),
    [
        ([0.5] * 7, None),
        ([0.5] * 8, 0.0),
        ([0.1, 0.2, -0.3, 0.3] * 2, 0.0),
        ([0.1, -0.2, -0.3, 0.3] * 2, -0.45),
        ([-0.1, -0.3, -0.2, 0.0, -0.5] * 2, -0.4),
    ],
)
def test_the_least_agreement_by_hand(agreements: list[float], least: float | None) -> None:
    found = least_agreement(values(*agreements))
    assert found == least if least is None else found == pytest.approx(least)


# ---- multi-Krum


def naive_krum(steps: list[list[float]], f: int) -> list[float]:
    """As printed: the sum of squared distances to the n - f - 2 closest vectors."""
    scores = []
    for i, a in enumerate(steps):
        squares = [sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) for j, b in enumerate(steps) if j != i]
        scores.append(sum(sorted(squares)[: len(steps) - f - 2]))
    return scores


@settings(deadline=None, max_examples=60)
@given(st.integers(3, 12), st.integers(0, 5), st.integers(0, 10**6))
def test_krum_scores_are_those_of_the_paper(n: int, f: int, seed: int) -> None:
    f = min(f, (n - 3) // 2)
    steps = np.random.default_rng(seed).normal(size=(n, 7)).astype(np.float32)
    assert krum_scores(list(steps), f) == pytest.approx(naive_krum(steps.astype(float).tolist(), f), rel=1e-9)


@given(st.integers(0, 200), st.floats(0, 0.49))
def test_krum_never_assumes_more_attackers_than_it_tolerates(n: int, share: float) -> None:
    f = byzantine_count(n, share)
    assert f >= 0 and (f == 0 or n >= 2 * f + 3)


def test_multi_krum_leaves_out_poisoned_uploads() -> None:
    defence = Defence(DefenceOptions(rule="multi-krum", byzantine=0.2), LAYOUT)
    for device in range(10):
        step = -10 * honest(device) if device in (3, 7) else honest(device)
        assert defence.judge(upload(step, device), FLIGHT, BASE, {}) == Decision(None)
    kept, (note,) = defence.release()
    assert [up.device for up, _ in kept] == note.numbers["kept"] == [0, 1, 2, 4, 5, 6, 8, 9]
    assert note.numbers["f"] == 2
    assert defence.release() == ([], ())


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_small_rounds_are_kept_whole(count: int) -> None:
    defence = Defence(DefenceOptions(rule="multi-krum", byzantine=0.4), LAYOUT)
    for device in range(count):
        defence.judge(upload(honest(device), device), FLIGHT, BASE, {})
    assert len(defence.release()[0]) == count


def test_equal_scores_are_kept_in_the_order_of_arrival() -> None:
    assert smallest([1.0, 0.5, 1.0, 0.5], 3) == [0, 1, 3]


# ---- log and checkpoint


def notes_of(rule: str) -> list[Noted]:
    defence, notes = Defence(DefenceOptions(rule=rule), LAYOUT), []
    for seed in range(50):
        notes += judge(defence, honest(seed) * (-10 if seed % 5 == 0 else 1)).notes
    return notes


@pytest.mark.parametrize("rule", ["clip", "median-distance"])
def test_every_decision_can_be_recomputed_from_the_log(rule: str) -> None:
    notes, seen = notes_of(rule), RecentUploads()
    for note in notes:
        audit_note(note, seen)
    spoilt = notes[30]._replace(numbers=notes[30].numbers | {"share": 0.123})
    seen = RecentUploads()
    with pytest.raises(Mismatch, match="share"):
        for note in [*notes[:30], spoilt]:
            audit_note(note, seen)
    moved = notes[30]._replace(numbers=notes[30].numbers | {"bound": 99.0})
    seen = RecentUploads()
    with pytest.raises(Mismatch, match="bound"):
        for note in [*notes[:30], moved]:
            audit_note(note, seen)


def test_an_audit_finds_a_krum_choice_that_contradicts_its_scores() -> None:
    numbers = {"rule": "multi-krum", "devices": [4, 5, 6, 7, 8], "scores": [1.0, 9.0, 2.0, 3.0, 4.0], "f": 1}
    audit_note(Noted("defence", numbers | {"kept": [4, 6, 7, 8]}), RecentUploads())
    with pytest.raises(Mismatch, match="kept"):
        audit_note(Noted("defence", numbers | {"kept": [4, 5, 6, 7]}), RecentUploads())
    with pytest.raises(Mismatch, match="f is"):
        audit_note(Noted("defence", numbers | {"f": 3, "kept": [4, 6]}), RecentUploads())


@pytest.mark.parametrize("rule", ["clip", "median-distance", "multi-krum"])
def test_a_restored_defence_continues_the_same_way(rule: str) -> None:
    defence = warm(rule)
    other = Defence(defence.options, LAYOUT)
    other.restore(defence.state())
    assert judge(other, 5 * honest(33), 3).notes == judge(defence, 5 * honest(33), 3).notes
    assert [(up.device, active) for up, active in other.release()[0]] == [
        (up.device, active) for up, active in defence.release()[0]
    ]


def test_shares() -> None:
    assert admitted_share("clip", 4.0, 1.0) == 0.25
    assert admitted_share("median-distance", 4.0, 1.0) == 0.0
    assert admitted_share("clip", 1.0, 1.0) == admitted_share("median-distance", 1.0, 1.0) == 1.0
    assert admitted_share("clip", None, 1.0) == admitted_share("clip", 1.0, None) == 0.0


# ---- samples


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 10**6) | st.just(2**31 - 1), min_size=1, max_size=30), st.floats(0.01, 1.0))
def test_no_device_has_more_than_its_share_of_the_samples(samples: list[int], limit: float) -> None:
    counted = bounded_samples(samples, limit)
    cap = max(counted)
    assert counted == [min(n, cap) for n in samples] and min(counted) >= 1
    if limit * len(samples) <= 1.0:
        assert len(set(counted)) == 1, "equal shares are the nearest"
        return
    if cap > 10 / limit:  # rounding to whole samples matters for fewer
        assert cap <= limit * sum(counted) * (1 + 1e-9)
    if cap < max(samples):  # and the bound is not lower than it needs to be
        raised = [min(n, cap + 2) for n in samples]
        assert max(raised) > limit * sum(raised)
    else:
        assert counted == samples


@pytest.mark.parametrize(
    ("samples", "limit", "counted"),
    [
        ([100, 100, 2**31 - 1], 0.5, [100, 100, 200]),
        ([100, 100, 100], 0.5, [100, 100, 100]),
        ([100, 2**31 - 1], 0.5, [100, 100]),
        ([10, 10, 10, 900, 900], 0.3, [10, 10, 10, 22, 22]),
        ([7], 0.5, [7]),
    ],
)
def test_bounded_samples_by_hand(samples: list[int], limit: float, counted: list[int]) -> None:
    assert bounded_samples(samples, limit) == counted
