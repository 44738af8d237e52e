"""Clipping and noise on the device."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.core.streams import stream
from freshet.privacy import PrivacyOptions, privatise

BASE = np.linspace(-1, 1, 500, dtype=np.float32)


def sent(weights: np.ndarray, trip: int = 1, **options: float) -> np.ndarray:
    chosen = PrivacyOptions(**({"clip": 1.0, "noise": 1.0} | options))
    return privatise(chosen, weights, BASE, stream(0, "privacy", 0, trip)).astype(np.float64)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3), st.floats(0.1, 10))
def test_without_its_noise_an_update_is_never_longer_than_the_bound(seed: int, length: float, clip: float) -> None:
    step = np.random.default_rng(seed).normal(size=500)
    step *= length / np.linalg.norm(step)
    found = sent((BASE + step).astype(np.float32), clip=clip, noise=1e-9)
    moved = found - BASE
    assert np.linalg.norm(moved) <= clip * (1 + 1e-4) + 1e-4
    if length < 0.99 * clip:
        assert np.allclose(moved, step, atol=1e-3 * length + 1e-6)


def test_the_noise_has_the_deviation_that_was_asked_for_and_does_not_depend_on_the_update() -> None:
    still = np.concatenate([sent(BASE, trip, clip=2.0, noise=1.5) - BASE for trip in range(200)])
    assert still.std() == pytest.approx(3.0, rel=0.02) and abs(still.mean()) < 0.05
    step = np.zeros(500, np.float32)
    step[0] = 1.0
    moved = sent(BASE + step, 7, clip=2.0, noise=1.5) - sent(BASE, 7, clip=2.0, noise=1.5)
    assert np.allclose(moved, step, atol=1e-5)


def test_every_trip_has_noise_of_its_own() -> None:
    assert not np.allclose(sent(BASE, 1), sent(BASE, 2))
    assert np.array_equal(sent(BASE, 1), sent(BASE, 1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_model_that_has_diverged_goes_up_as_noise(bad: float) -> None:
    weights = BASE.copy()
    weights[0] = bad
    found = sent(weights)
    assert np.isfinite(found).all()
    if bad != 3e38:
        assert np.array_equal(found, sent(BASE))
    else:
        assert np.allclose(found[1:], sent(BASE)[1:], atol=1e-5)
