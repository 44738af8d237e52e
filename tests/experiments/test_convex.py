"""The convex problem: derivatives against torch and finite differences, constants against what they bound."""

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.nn.functional import cross_entropy

from freshet.core.messages import Assignment
from freshet.core.method import LocalRule
from freshet.data.sources import load
from freshet.paper.convex import Logistic, digits
from freshet.paper.theory import zero_model
from freshet.training.batches import FederatedData
from freshet.training.options import TrainingOptions
from freshet.training.trainer import Trainer, Work


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
    done = trainer.train(Work(Assignment(0, 1, 1, 1, start, 3, lr), None, None, LocalRule(), {}))
    own, w = digits(mu).take(shard), start.astype(np.float64)
    for _ in range(3):
        w = w - lr * own.gradient(w)
    np.testing.assert_allclose(done.weights, w, atol=2e-6)
