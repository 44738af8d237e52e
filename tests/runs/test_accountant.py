"""Epsilon per device, by dp-accounting."""

import math

import pytest

from freshet import privacy
from freshet.errors import ConfigError
from freshet.privacy import Accountant, PrivacyOptions, epsilon, describe

needs_library = pytest.mark.skipif(privacy.find_spec("dp_accounting") is None, reason="needs dp-accounting")


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_epsilon_is_below_the_bound_of_the_textbook_and_not_by_much(noise: float, uploads: int) -> None:
    ours, bound = epsilon(noise, uploads, 1e-5), by_hand(noise, uploads, 1e-5)
    assert 0.75 * bound < ours <= bound * 1.001


@needs_library
def test_epsilon_grows_with_uploads_and_falls_with_noise() -> None:
    assert epsilon(10.0, 1, 1e-5) < epsilon(10.0, 5, 1e-5) < epsilon(10.0, 50, 1e-5)
    assert epsilon(20.0, 5, 1e-5) < epsilon(10.0, 5, 1e-5)


@needs_library
def test_the_summary_names_the_device_that_paid_most() -> None:
    found = Accountant(PrivacyOptions(clip=1.0, noise=8.0)).summary({3: 2, 5: 9, 1: 4})
    assert found["device"] == 5 and found["uploads"] == 9
    assert found["epsilon"] == found["by_device"]["5"] == max(found["by_device"].values())
    assert describe(found).startswith("privacy: epsilon is at most ") and "delta 1e-05" in describe(found)
    assert Accountant(PrivacyOptions(clip=1.0)).summary({})["epsilon"] == 0.0
