"""A strongly convex problem with known constants, and the bounds of Theorem 1.

The problem is multinomial logistic regression with an L2 term:

    F(w) = mean_j [ logsumexp(z_j) - z_{j, y_j} ] + mu/2 |w|^2,     z_j = W x_j + b,     w = (W, b) as one flat vector

The bias is regularised too, so F is mu-strongly convex in all of w. Its Hessian is ``mean_j (diag(p_j) - p_j p_j^T) (x)
x_j x_j^T + mu I`` with x_j extended by a 1; ``diag(p) - p p^T <= I/2`` (Bohning 1992) bounds it for every w. Everything
is float64.

The bounds come as printed, as corrected (E11), and with every slip repaired. For one accepted upload of n local steps
the proof bounds ``sum_l E|grad F(w_l)|^2`` by ``2 E[F(w_t) - F(w_{t+1})] / (alpha eta)`` plus terms that are the same
for every upload. Summed over T uploads and divided by ``sum_t n_t >= T n_min``, the first part telescopes and falls
like 1/T. The other terms are summed T times too, so they stay. The paper divides them by T nevertheless (erratum E11).
See docs/theory.md.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freshet.data.sources import load
from freshet.errors import RunError

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


class GradientMoments(NamedTuple):
    """Moments of a mini-batch gradient g at some w: ``mean = E g`` and ``noise = E |g - E g|^2``."""

    mean: Floats
    noise: float


@dataclass(frozen=True, eq=False)
class Logistic:
    """Samples (each extended by a 1 for the bias), labels, and the L2 coefficient mu."""

    x: Floats
    y: Indices
    classes: int
    mu: float

    @staticmethod
    def of(x: ArrayLike, y: ArrayLike, classes: int, mu: float) -> "Logistic":
        rows = np.asarray(x, np.float64).reshape(len(np.asarray(y)), -1)
        return Logistic(np.column_stack([rows, np.ones(len(rows))]), np.asarray(y, np.int64), classes, mu)

    @property
    def size(self) -> int:
        """Number of parameters in w."""
        return self.classes * int(self.x.shape[1])

    def take(self, index: Indices) -> "Logistic":
        """The problem on some of the samples: a device's F_i."""
        return Logistic(self.x[index], self.y[index], self.classes, self.mu)

    # ---- values and derivatives

    def loss(self, w: ArrayLike, weights: Floats | None = None) -> float:
        """F(w); ``weights`` (summing to 1) replace the plain mean over samples."""
        flat = np.asarray(w, np.float64)
        z, rows = self._scores(flat), np.arange(len(self.y))
        top = z.max(1)
        each = top + np.log(np.exp(z - top[:, None]).sum(1)) - z[rows, self.y]
        return float(np.average(each, weights=weights) + 0.5 * self.mu * flat @ flat)

    def gradient(self, w: ArrayLike, weights: Floats | None = None) -> Floats:
        """``grad F(w)``, flat."""
        flat = np.asarray(w, np.float64)
        r = self._residuals(flat)
        r *= 1.0 / len(r) if weights is None else weights[:, None]
        return self._flat(r.T @ self.x) + self.mu * flat

    def hessian(self, w: ArrayLike, weights: Floats | None = None) -> Floats:
        """The Hessian in the order of the flat vector."""
        p, d, k = self._probabilities(np.asarray(w, np.float64)), self.x.shape[1], self.classes
        share = np.full(len(p), 1.0 / len(p)) if weights is None else weights
        blocks = np.empty((k, d, k, d))
        for a in range(k):
            for b in range(a, k):
                c = share * p[:, a] * (float(a == b) - p[:, b])
                blocks[a, :, b] = blocks[b, :, a] = (self.x * c[:, None]).T @ self.x
        order = np.concatenate([np.arange(k * d).reshape(k, d)[:, :-1].ravel(), np.arange(k) * d + d - 1])
        full: Floats = blocks.reshape(k * d, k * d)[np.ix_(order, order)] + self.mu * np.eye(k * d)
        return full

    def moments(self, w: ArrayLike, batch: int) -> GradientMoments:
        """Exact moments of the gradient of ``batch`` samples drawn without replacement.

        A sample's gradient is an outer product, so ``|g_j|^2 = |p_j - y_j|^2 |x_j|^2``; the noise is
        ``(n - b) / (b (n - 1))`` times their variance.
        """
        flat, n = np.asarray(w, np.float64), len(self.y)
        r = self._residuals(flat)
        mean = self._flat(r.T @ self.x) / n
        spread = float(((r**2).sum(1) * (self.x**2).sum(1)).mean() - mean @ mean)
        b = min(batch, n)
        return GradientMoments(mean + self.mu * flat, max(0.0, spread) * (n - b) / (b * max(1, n - 1)))

    # ---- constants

    def smoothness(self) -> float:
        """An L that holds for every w: half the greatest eigenvalue of ``mean_j x_j x_j^T``, plus mu."""
        return float(0.5 * np.linalg.eigvalsh(self.x.T @ self.x / len(self.x))[-1] + self.mu)

    def optimum(self, weights: Floats | None = None, tolerance: float = 1e-10) -> Floats:
        """The minimiser by Newton's method with step halving, to ``|grad F| <= tolerance``."""
        w = np.zeros(self.size)
        for _ in range(100):
            g = self.gradient(w, weights)
            if np.linalg.norm(g) <= tolerance:
                return w
            step, here, t = np.linalg.solve(self.hessian(w, weights), g), self.loss(w, weights), 1.0
            while self.loss(w - t * step, weights) > here and t > 1e-6:
                t /= 2
            w = w - t * step
        raise RunError(f"Newton's method did not bring the gradient below {tolerance:g}")

    # ---- helpers

    def _scores(self, flat: Floats) -> Floats:
        d = self.x.shape[1] - 1
        table = np.empty((self.classes, d + 1))
        table[:, :d] = flat[: self.classes * d].reshape(self.classes, d)
        table[:, d] = flat[self.classes * d :]
        return self.x @ table.T

    def _probabilities(self, flat: Floats) -> Floats:
        z = self._scores(flat)
        z -= z.max(1, keepdims=True)
        np.exp(z, out=z)
        z /= z.sum(1, keepdims=True)
        return z

    def _residuals(self, flat: Floats) -> Floats:
        """``p_j - onehot(y_j)``: the derivative of the loss by the scores."""
        r = self._probabilities(flat)
        r[np.arange(len(r)), self.y] -= 1.0
        return r

    def _flat(self, table: Floats) -> Floats:
        """(classes, features + 1) in the order of a torch Linear: all of W, then b."""
        return np.concatenate([table[:, :-1].ravel(), table[:, -1]])


@cache
def digits(mu: float) -> Logistic:
    """The problem on Freshet's embedded digits (1,438 training samples of 64 pixels, 10 classes)."""
    dataset = load("digits")
    return Logistic.of(np.asarray(dataset.x_train), dataset.y_train, dataset.classes, mu)


@dataclass(frozen=True)
class Constants:
    """The constants of the bounds; n counts local SGD steps, which the paper calls epochs."""

    smoothness: float
    #: G^2: E of the squared norm of a device's stochastic gradient.
    second_moment: float
    #: V^2: E of its squared distance to the gradient of the *global* objective.
    variance: float
    #: F(w_1) - F*.
    gap: float
    alpha_min: float
    tau: int
    n_min: int
    n_max: int
    lr: float


def transient(c: Constants, T: int) -> float:
    """``2 (F(w_1) - F*) / (alpha_min eta T n_min)``: the part that all versions share."""
    return 2.0 * c.gap / (c.alpha_min * c.lr * T * c.n_min)


def printed_bound(c: Constants, T: int) -> float:
    """The inequality "after T global rounds" as the appendix prints it, for any step size: every term has a 1/T."""
    L, eta, g2, tau, n = c.smoothness, c.lr, c.second_moment, c.tau, c.n_max
    quadratic = (1 + tau**2 * n) / 2 * L * eta * g2
    linear = (3 * tau + L * tau**2 * eta * n + 2 * eta + L * eta) * g2
    return transient(c, T) + (quadratic + linear + c.variance) * n / (T * c.n_min)


def corrected_floor(c: Constants) -> float:
    """The rest of the line before, summed T times and divided by T: it does not depend on T."""
    L, eta, g2, tau, n = c.smoothness, c.lr, c.second_moment, c.tau, c.n_max
    quadratic = (1 + tau**2 * n) / 2 * L * eta**2 * g2
    linear = (3 * tau + L * tau**2 * eta * n + 2 * eta + L * eta) * g2
    return (quadratic + linear + c.variance) * n / c.n_min


def corrected_bound(c: Constants, T: int) -> float:
    """The printed line per upload with the correct sum over T (E11); everything else as printed."""
    return transient(c, T) + corrected_floor(c)


def repaired_floor(c: Constants) -> float:
    """``n_max/n_min [V^2 + (2 + 2 L eta + 4 tau + 2 L eta tau^2 n_max) G^2]``.

    This restores the factor 2/eta of the merge terms, which the print lost; alpha and beta are at most 1. It assumes
    the printed bound on ``|w_o - w_t|``.
    """
    L, eta, tau, n = c.smoothness, c.lr, c.tau, c.n_max
    factor = 2 + 2 * L * eta + 4 * tau + 2 * L * eta * tau**2 * n
    return (c.variance + factor * c.second_moment) * n / c.n_min


def repaired_bound(c: Constants, T: int) -> float:
    """What the proof shows, for the mean weighted by alpha (without these weights the sum does not telescope)."""
    return transient(c, T) + repaired_floor(c)


def stated_bound(c: Constants) -> float:
    """The theorem's last line, with the constants inside its O(): ``eta = 1/sqrt(T)`` and ``T = n_min^6``."""
    L, g2, tau, n, least = c.smoothness, c.second_moment, c.tau, c.n_max, c.n_min
    cubic = 2 * c.gap / c.alpha_min + (1 + tau**2 * n) / 2 * L * n * g2 + (L * tau**2 * n + 2 + L) * n * g2
    return cubic / least**3 + (3 * tau * n * g2 + n * c.variance) / least**7
