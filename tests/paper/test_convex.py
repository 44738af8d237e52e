"""The convex problem and Theorem 1's bounds: derivatives, worked examples, and a case that breaks the printed bound."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch.nn.functional import cross_entropy

from freshet.core.messages import Assignment
from freshet.core.method import LocalRule
from freshet.data.sources import load
from freshet.paper import convex
from freshet.paper.convex import Constants, Logistic, digits
from freshet.paper.theory import zero_model
from freshet.training.batches import FederatedData
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Trainer, TripInput


@pytest.fixture
def small():
    rng = np.random.default_rng(1)
    return Logistic.of(rng.normal(size=(12, 3)), rng.integers(4, size=12), 4, 0.2)


@pytest.fixture
def point(small):
    return np.random.default_rng(2).normal(size=small.size)


def torch_loss(problem, w):
    d, k = problem.x.shape[1] - 1, problem.classes
    x = torch.from_numpy(problem.x[:, :d])
    scores = x @ w[: k * d].reshape(k, d).T + w[k * d :]
    return cross_entropy(scores, torch.from_numpy(problem.y)) + problem.mu / 2 * w @ w


def test_loss_and_gradient_are_those_of_torch(small, point):
    w = torch.from_numpy(point).requires_grad_()
    loss = torch_loss(small, w)
    (gradient,) = torch.autograd.grad(loss, w)
    assert small.loss(point) == pytest.approx(loss.item(), rel=1e-12)
    np.testing.assert_allclose(small.gradient(point), gradient.numpy(), atol=1e-12)


def test_the_hessian_is_the_derivative_of_the_gradient(small, point):
    h = 1e-6
    columns = [(small.gradient(point + h * e) - small.gradient(point - h * e)) / (2 * h) for e in np.eye(small.size)]
    np.testing.assert_allclose(small.hessian(point), np.array(columns), atol=1e-8)


@pytest.mark.parametrize("spread", [0.0, 0.5, 5.0])
def test_every_hessian_lies_between_mu_and_the_smoothness_constant(small, spread):
    w = spread * np.random.default_rng(3).normal(size=small.size)
    eigenvalues = np.linalg.eigvalsh(small.hessian(w))
    assert small.mu - 1e-12 <= eigenvalues[0]
    assert eigenvalues[-1] <= small.smoothness()


def test_the_digits_are_bounded_by_the_same_constant_and_not_by_a_tenth_of_it():
    problem = digits(0.1)
    greatest = np.linalg.eigvalsh(problem.hessian(np.zeros(problem.size)))[-1]
    assert 0.1 * problem.smoothness() < greatest <= problem.smoothness()


@pytest.mark.parametrize("batch", [1, 2, 5, 12, 50])
def test_moments_are_the_mean_over_all_mini_batches(small, point, batch):
    size = min(batch, 12)
    subsets = combinations(range(12), size)
    gradients = np.array([small.take(np.array(subset)).gradient(point) for subset in subsets])
    mean = gradients.mean(0)
    found = small.moments(point, batch)
    np.testing.assert_allclose(found.mean, mean, atol=1e-12)
    np.testing.assert_allclose(found.mean, small.gradient(point), atol=1e-12)
    assert found.noise == pytest.approx(((gradients - mean) ** 2).sum(1).mean(), abs=1e-12)


def test_the_optimum_has_no_gradient_and_is_the_one_that_another_solver_finds():
    problem = digits(0.1)
    w = problem.optimum()
    assert np.linalg.norm(problem.gradient(w)) <= 1e-10
    other = minimize(problem.loss, np.zeros(problem.size), jac=problem.gradient, method="L-BFGS-B", tol=1e-12)
    assert problem.loss(w) <= other.fun
    np.testing.assert_allclose(w, other.x, atol=1e-3)


def test_weights_stand_for_copies_of_samples(small, point):
    index = np.array([0, 0, 0, 5, 7, 7])
    copies, weights = small.take(index), np.bincount(index, minlength=12) / 6
    assert small.loss(point, weights) == pytest.approx(copies.loss(point))
    np.testing.assert_allclose(small.gradient(point, weights), copies.gradient(point), atol=1e-12)
    np.testing.assert_allclose(small.hessian(point, weights), copies.hessian(point), atol=1e-12)
    np.testing.assert_allclose(small.optimum(weights), copies.optimum(), atol=1e-8)


def test_sgd_with_weight_decay_descends_this_objective():
    mu, lr, shard = 0.1, 0.5, np.arange(30)
    options = TrainingOptions(epochs=3, lr=lr, weight_decay=mu, batch_size=1000, device="cpu")
    trainer = Trainer(zero_model, FederatedData.of(load("digits"), [shard]), options, 0)
    start = np.random.default_rng(4).normal(size=650).astype(np.float32)
    done = trainer.train(TripInput(Assignment(0, 1, 1, 1, start, 3, lr), (), (), LocalRule(), {}))
    own, w = digits(mu).take(shard), start.astype(np.float64)
    for _ in range(3):
        w = w - lr * own.gradient(w)
    np.testing.assert_allclose(done.weights, w, atol=2e-6)


# ---- bounds


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
