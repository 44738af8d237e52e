"""Theorem 1 of the FedASMU paper as formulas: the bound as printed, as corrected (E11), and with every slip repaired.

The proof bounds, for one accepted upload of n local steps, ``sum_l E|grad F(w_l)|^2`` by
``2 E[F(w_t) - F(w_{t+1})] / (alpha eta)`` plus terms that are the same for every upload. Summed over T uploads and
divided by ``sum_t n_t >= T n_min``, the first part telescopes and falls like 1/T; the others were summed T times too,
so they stay. The paper divides them by T nevertheless (erratum E11). See docs/theory.md.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """What the bounds are made of; n counts local SGD steps, which the paper calls epochs."""

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
    """``2 (F(w_1) - F*) / (alpha_min eta T n_min)``: the part that all readings share."""
    return 2.0 * c.gap / (c.alpha_min * c.lr * T * c.n_min)


def printed(c: Constants, T: int) -> float:
    """The inequality "after T global rounds" as the appendix prints it, for any step size: every term has a 1/T."""
    L, eta, g2, tau, n = c.smoothness, c.lr, c.second_moment, c.tau, c.n_max
    quadratic = (1 + tau**2 * n) / 2 * L * eta * g2
    linear = (3 * tau + L * tau**2 * eta * n + 2 * eta + L * eta) * g2
    return transient(c, T) + (quadratic + linear + c.variance) * n / (T * c.n_min)


def corrected_floor(c: Constants) -> float:
    """What is left of the line before, summed T times and divided by T: it has no T in it."""
    L, eta, g2, tau, n = c.smoothness, c.lr, c.second_moment, c.tau, c.n_max
    quadratic = (1 + tau**2 * n) / 2 * L * eta**2 * g2
    linear = (3 * tau + L * tau**2 * eta * n + 2 * eta + L * eta) * g2
    return (quadratic + linear + c.variance) * n / c.n_min


def corrected(c: Constants, T: int) -> float:
    """The printed line per upload with its sum over T done right (E11), all else as printed."""
    return transient(c, T) + corrected_floor(c)


def repaired_floor(c: Constants) -> float:
    """``n_max/n_min [V^2 + (2 + 2 L eta + 4 tau + 2 L eta tau^2 n_max) G^2]``.

    The factor 2/eta of the merge terms, lost in print, is back; alpha and beta are at most 1. The printed bound on
    ``|w_o - w_t|`` is granted.
    """
    L, eta, tau, n = c.smoothness, c.lr, c.tau, c.n_max
    factor = 2 + 2 * L * eta + 4 * tau + 2 * L * eta * tau**2 * n
    return (c.variance + factor * c.second_moment) * n / c.n_min


def repaired(c: Constants, T: int) -> float:
    """What the proof does show, for the mean weighted by alpha (without these weights its sum does not telescope)."""
    return transient(c, T) + repaired_floor(c)


def stated(c: Constants) -> float:
    """The theorem's last line, with the constants inside its O(): ``eta = 1/sqrt(T)`` and ``T = n_min^6``."""
    L, g2, tau, n, least = c.smoothness, c.second_moment, c.tau, c.n_max, c.n_min
    cubic = 2 * c.gap / c.alpha_min + (1 + tau**2 * n) / 2 * L * n * g2 + (L * tau**2 * n + 2 + L) * n * g2
    return cubic / least**3 + (3 * tau * n * g2 + n * c.variance) / least**7
