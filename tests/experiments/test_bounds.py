"""Theorem 1's bounds: worked examples by hand, what vanishes with T and what does not, and a case that breaks one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freshet.paper import convex
from freshet.paper.convex import Constants

BY_HAND = Constants(
    smoothness=2.0, second_moment=3.0, variance=5.0, gap=7.0, alpha_min=0.5, tau=2, n_min=2, n_max=4, lr=0.1
)
positive = st.floats(1e-3, 1e3)
constants = st.builds(
    Constants,
    smoothness=positive,
    second_moment=positive,
    variance=positive,
    gap=positive,
    alpha_min=st.floats(1e-3, 1.0),
    tau=st.integers(1, 200),
    n_min=st.just(3),
    n_max=st.integers(3, 50),
    lr=st.floats(1e-4, 1.0),
)


def test_by_hand():
    # 2 * 7 / (0.5 * 0.1 * 10 * 2) = 14
    assert convex.transient(BY_HAND, 10) == pytest.approx(14.0)
    # (1 + 4*4)/2 * 2 * 0.1 * 3 = 5.1; (6 + 3.2 + 0.2 + 0.2) * 3 = 28.8; (5.1 + 28.8 + 5) * 4 / (10 * 2) = 7.78
    assert convex.printed_bound(BY_HAND, 10) == pytest.approx(14.0 + 7.78)
    # with eta^2: 0.51; (0.51 + 28.8 + 5) * 4 / 2 = 68.62
    assert convex.corrected_bound(BY_HAND, 10) == pytest.approx(14.0 + 68.62)
    # (5 + (2 + 0.4 + 8 + 6.4) * 3) * 2 = 110.8
    assert convex.repaired_bound(BY_HAND, 10) == pytest.approx(14.0 + 110.8)
    # (28 + 204 + 432) / 8 + (72 + 20) / 128
    assert convex.stated_bound(BY_HAND) == pytest.approx(83.0 + 0.71875)


def test_the_repaired_floor_is_the_sum_of_the_proofs_terms():
    """One upload at alpha = beta = 1: 2/eta (B + C + D) without what telescopes, plus the rest."""
    c = replace(BY_HAND, n_min=4)
    L, eta, g2, tau, n = c.smoothness, c.lr, c.second_moment, c.tau, c.n_max
    away = tau * eta * n * g2**0.5
    moved = g2**0.5 * away + L / 2 * away**2  # both F(w_o) - F(w_t) in B, and D
    local = (2 * eta + L * eta**2) / 2 * n * g2  # C
    upload = 2 / eta * (moved + local + moved) + n * (L * eta * g2 + c.variance)
    assert convex.repaired_floor(c) == pytest.approx(upload / n)


@given(constants)
def test_the_printed_bound_vanishes_with_time_and_the_corrected_ones_do_not(c):
    last = 10**18
    assert convex.printed_bound(c, last) < 1e-3 * convex.printed_bound(c, 100)
    assert convex.corrected_bound(c, last) >= convex.corrected_floor(c) > 0
    assert convex.repaired_bound(c, last) >= convex.repaired_floor(c) > 0
    assert convex.corrected_bound(c, last) == pytest.approx(convex.corrected_floor(c), rel=1e-3)


@given(constants)
def test_a_corrected_floor_never_says_more_than_the_bounded_gradients_that_it_assumes(c):
    assert convex.corrected_floor(c) > 3 * c.tau * c.second_moment
    assert convex.repaired_floor(c) > (2 + 4 * c.tau) * c.second_moment


def test_two_parabolas_break_the_printed_bound():
    """F_1 = (w - 1)^2 / 2 with nine tenths of the samples, F_2 = (w + 1)^2 / 2: taking turns holds w near 0, where
    grad F = -0.8. Every assumption holds; exact gradients, fresh uploads, eta = 1 / sqrt(T)."""
    T = 10_000
    w, alpha, eta, squares, seconds = 0.0, 0.5, T**-0.5, [], []
    for t in range(T):
        centre = 1.0 if t % 2 else -1.0
        squares.append((0.9 * (w - 1) + 0.1 * (w + 1)) ** 2)
        seconds.append((w - centre) ** 2)
        w = (1 - alpha) * w + alpha * (w - eta * (w - centre))
    c = Constants(
        smoothness=1.0,
        second_moment=max(seconds),
        variance=1.8**2,  # |grad F_2 - grad F|^2 = (0.9 * 2)^2 everywhere
        gap=0.5 - 0.18,  # F(0) - F(0.8)
        alpha_min=alpha,
        tau=1,
        n_min=1,
        n_max=1,
        lr=eta,
    )
    assert min(squares) == pytest.approx(0.64, abs=0.02)
    assert min(squares) > 10 * convex.printed_bound(c, T)
    assert sum(squares) / T < convex.corrected_bound(c, T)
    assert sum(squares) / T < convex.repaired_bound(c, T)
