"""Clipping and noise on the device, and the epsilon that dp-accounting computes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet import privacy
from freshet.core.streams import stream
from freshet.errors import ConfigError
from freshet.privacy import Accountant, PrivacyOptions, describe, epsilon, privatise

BASE = np.linspace(-1, 1, 500, dtype=np.float32)


def sent(weights: np.ndarray, trip: int = 1, **options: float) -> np.ndarray:
    chosen = PrivacyOptions(**({"clip": 1.0, "noise": 1.0} | options))
    return privatise(chosen, weights, BASE, stream(0, "privacy", 0, trip)).astype(np.float64)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3), st.floats(0.1, 10))
def test_a_clipped_update_is_never_longer_than_the_bound(seed: int, length: float, clip: float) -> None:
    step = np.random.default_rng(seed).normal(size=500)
    step *= length / np.linalg.norm(step)
    found = sent((BASE + step).astype(np.float32), clip=clip, noise=1e-9)
    moved = found - BASE
    assert np.linalg.norm(moved) <= clip * (1 + 1e-4) + 1e-4
    if length < 0.99 * clip:
        assert np.allclose(moved, step, atol=1e-3 * length + 1e-6)


def test_the_noise_has_the_given_deviation_and_does_not_depend_on_the_update() -> None:
    still = np.concatenate([sent(BASE, trip, clip=2.0, noise=1.5) - BASE for trip in range(200)])
    assert still.std() == pytest.approx(3.0, rel=0.02) and abs(still.mean()) < 0.05
    step = np.zeros(500, np.float32)
    step[0] = 1.0
    moved = sent(BASE + step, 7, clip=2.0, noise=1.5) - sent(BASE, 7, clip=2.0, noise=1.5)
    assert np.allclose(moved, step, atol=1e-5)


def test_every_trip_has_its_own_noise() -> None:
    assert not np.allclose(sent(BASE, 1), sent(BASE, 2))
    assert np.array_equal(sent(BASE, 1), sent(BASE, 1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_diverged_model_is_sent_as_noise(bad: float) -> None:
    weights = BASE.copy()
    weights[0] = bad
    found = sent(weights)
    assert np.isfinite(found).all()
    if bad != 3e38:
        assert np.array_equal(found, sent(BASE))
    else:
        assert np.allclose(found[1:], sent(BASE)[1:], atol=1e-5)


needs_library = pytest.mark.skipif(privacy.find_spec("dp_accounting") is None, reason="needs dp-accounting")


def test_a_missing_library_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"privacy.clip: needs dp-accounting.*freshet-fl\[privacy\]"):
        Accountant(PrivacyOptions(clip=1.0))


def by_hand(noise: float, uploads: int, delta: float) -> float:
    """Mironov 2017: T Gaussian mechanisms of sensitivity 2 C and deviation noise C have RDP(a) = T a (2 / noise)^2 / 2,
    and epsilon <= RDP(a) + ln(1 / delta) / (a - 1) for every a > 1."""
    orders = [1 + 10 ** (k / 200) for k in range(-400, 800)]
    return min(uploads * a * (2 / noise) ** 2 / 2 + math.log(1 / delta) / (a - 1) for a in orders)


@needs_library
@pytest.mark.parametrize(("noise", "uploads"), [(4.0, 1), (10.0, 5), (20.0, 30), (3.0, 12)])
def test_epsilon_is_slightly_below_the_textbook_bound(noise: float, uploads: int) -> None:
    ours, bound = epsilon(noise, uploads, 1e-5), by_hand(noise, uploads, 1e-5)
    assert 0.75 * bound < ours <= bound * 1.001


@needs_library
def test_epsilon_grows_with_uploads_and_falls_with_noise() -> None:
    assert epsilon(10.0, 1, 1e-5) < epsilon(10.0, 5, 1e-5) < epsilon(10.0, 50, 1e-5)
    assert epsilon(20.0, 5, 1e-5) < epsilon(10.0, 5, 1e-5)


@needs_library
def test_the_summary_names_the_device_with_the_largest_epsilon() -> None:
    found = Accountant(PrivacyOptions(clip=1.0, noise=8.0)).summary({3: 2, 5: 9, 1: 4})
    assert found["device"] == 5 and found["uploads"] == 9
    assert found["epsilon"] == found["by_device"]["5"] == max(found["by_device"].values())
    assert describe(found).startswith("privacy: epsilon is at most ") and "delta 1e-05" in describe(found)
    assert Accountant(PrivacyOptions(clip=1.0)).summary({})["epsilon"] == 0.0
