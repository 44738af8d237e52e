"""Properties of every partition scheme."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.data import SCHEMES, label_counts, partition, skew
from freshet.data.partition import raise_minimum
from freshet.errors import ConfigError


@st.composite
def requests(draw: st.DrawFn) -> dict[str, object]:
    """Any possible request, of any scheme."""
    labels = np.array(draw(st.lists(st.integers(0, 5), min_size=1, max_size=120)))
    devices = draw(st.integers(1, len(labels)))
    scheme = draw(st.sampled_from(SCHEMES))
    request: dict[str, object] = {
        "labels": labels,
        "devices": devices,
        "scheme": scheme,
        "seed": draw(st.integers(0, 2**40)),
        "concentration": draw(st.sampled_from([1e-300, 1e-6, 0.05, 0.5, 1.0, 100.0, 1e12, 1e300])),
        "min_samples": draw(st.integers(0, len(labels) // devices)),
        "shards_per_device": draw(st.integers(1, len(labels) // devices)),
    }
    if scheme == "natural":
        # every device owns at least min_samples: spread a column over exactly that many groups
        request["groups"] = np.array([f"client {i % devices}" for i in range(len(labels))])
    return request


@settings(deadline=None, max_examples=250)
@given(requests())
def test_parts_are_disjoint_cover_everything_and_honour_the_minimum(request: dict[str, object]) -> None:
    parts = partition(**request)  # type: ignore[arg-type]
    labels = request["labels"]
    assert isinstance(labels, np.ndarray)
    assert len(parts) == request["devices"]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert min(len(part) for part in parts) >= request["min_samples"]  # type: ignore[operator]
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    again = partition(**request)  # type: ignore[arg-type]
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    figures = skew(labels, parts, 6)
    assert 0 <= figures.label_distance <= 1
    assert -1e-12 <= figures.size_gini < 1


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 9), min_size=10, max_size=200), st.integers(0, 2**32), st.data())
def test_raising_the_minimum_takes_from_the_largest(owners: list[int], seed: int, data: st.DataObject) -> None:
    owner = np.array(owners)
    minimum = data.draw(st.integers(0, len(owners) // 10))
    before = np.bincount(owner, minlength=10)
    after = np.bincount(raise_minimum(owner, 10, minimum, np.random.default_rng(seed)), minlength=10)
    expected = before.copy()  # the slow twin: one sample at a time from whichever device is the largest
    while expected.min() < minimum:
        expected[np.argmin(expected)] += 1
        expected[np.argmax(expected)] -= 1
    assert np.array_equal(np.sort(after), np.sort(expected))
    assert (after[before >= minimum] <= before[before >= minimum]).all()


LABELS = np.repeat(np.arange(10), 600)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_seed_gives_another_partition(scheme: str) -> None:
    groups = np.arange(len(LABELS)) % 50
    one, two = (partition(LABELS, 20, scheme, seed=seed, groups=groups) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_concentration_orders_the_skew() -> None:
    for scheme in ("dirichlet", "dirichlet_by_device"):
        distance = [
            skew(LABELS, partition(LABELS, 50, scheme, seed=0, concentration=c), 10).label_distance
            for c in (0.05, 0.5, 5.0, 500.0)
        ]
        assert distance == sorted(distance, reverse=True)
        assert distance[0] > 0.7
        assert distance[-1] < 0.15


def test_balanced_schemes_are_balanced() -> None:
    for scheme in ("iid", "dirichlet_by_device"):
        figures = skew(LABELS, partition(LABELS, 70, scheme, seed=0, concentration=0.1), 10)
        assert figures.size_max - figures.size_min <= 1
        assert figures.size_gini < 0.01


def test_dirichlet_shares_have_the_right_spread() -> None:
    """Share of a class on a device ~ Beta(c, c (n - 1)): mean 1/n, variance (n - 1) / (n^2 (n c + 1))."""
    devices, concentration = 10, 0.5
    labels = np.repeat(np.arange(400), 500)
    counts = label_counts(labels, partition(labels, devices, seed=0, concentration=concentration), 400) / 500
    expected = (devices - 1) / (devices**2 * (devices * concentration + 1))
    assert counts.mean() == pytest.approx(1 / devices)
    assert counts.var() == pytest.approx(expected, rel=0.1)


def test_shards_by_label_give_few_classes() -> None:
    counts = label_counts(LABELS, partition(LABELS, 50, "by_label", seed=0, shards_per_device=2), 10)
    assert (counts.sum(axis=1) == 120).all()
    assert ((counts > 0).sum(axis=1) <= 2).all()


def test_natural_keeps_each_client_whole() -> None:
    groups = np.array(["b", "a", "b", "c", "a", "b"])
    parts = partition(np.arange(6) % 2, 3, "natural", seed=0, groups=groups)
    assert [part.tolist() for part in parts] == [[1, 4], [0, 2, 5], [3]]
    merged = partition(np.arange(6) % 2, 2, "natural", seed=0, groups=groups)
    assert not set(groups[merged[0]]) & set(groups[merged[1]])


def test_ten_thousand_devices_take_about_a_second() -> None:
    labels = np.repeat(np.arange(10), 6000)
    for scheme in ("dirichlet", "dirichlet_by_device"):
        for minimum in (1, 5, 6):
            start = time.process_time()
            parts = partition(labels, 10_000, scheme, seed=1, concentration=0.05, min_samples=minimum)
            assert time.process_time() - start < 3.0, scheme
            assert min(map(len, parts)) >= minimum


def test_skew_of_known_cases() -> None:
    labels = np.array([0, 0, 1, 1])
    even = skew(labels, [np.array([0, 2]), np.array([1, 3])], 2)
    assert (even.label_distance, even.size_gini, even.classes_per_device) == (0.0, 0.0, 2.0)
    apart = skew(labels, [np.array([0, 1]), np.array([2, 3]), np.array([], np.int64)], 2)
    assert (apart.label_distance, apart.classes_per_device, apart.size_min) == (0.5, 1.0, 0)
    assert apart.size_gini == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"devices": 0}, "fleet.devices"),
        ({"devices": -3}, "fleet.devices"),
        ({"devices": 6001}, "fleet.devices"),
        ({"min_samples": 601}, "data.min_samples"),
        ({"min_samples": -1}, "data.min_samples"),
        ({"concentration": 0.0}, "data.concentration"),
        ({"concentration": -1.0}, "data.concentration"),
        ({"concentration": float("nan")}, "data.concentration"),
        ({"concentration": float("inf")}, "data.concentration"),
        ({"scheme": "banana"}, "data.partition"),
        ({"scheme": "natural"}, "data.partition"),
        ({"scheme": "natural", "groups": np.arange(5)}, "data.groups"),
        ({"scheme": "natural", "groups": np.append(np.arange(5999) // 500, np.nan)}, "data.groups"),
        ({"scheme": "natural", "groups": np.arange(6000) // 3000}, "fleet.devices"),
        ({"scheme": "natural", "groups": np.minimum(np.arange(6000), 9), "min_samples": 5}, "data.min_samples"),
        ({"scheme": "by_label", "shards_per_device": 601}, "data.shards_per_device"),
        ({"scheme": "by_label", "shards_per_device": 0}, "data.shards_per_device"),
        ({"seed": -1}, "seed"),
    ],
)
def test_impossible_requests_name_their_key(change: dict[str, object], key: str) -> None:
    request: dict[str, object] = {"devices": 10, "seed": 0, **change}
    with pytest.raises(ConfigError) as caught:
        partition(LABELS, **request)  # type: ignore[arg-type]
    assert caught.value.key == key
