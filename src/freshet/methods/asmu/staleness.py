"""The formulas of FedASMU and FedSSMU: two weights, each a learned function of staleness, and their derivatives.

This module handles scalars only. ``age`` is the version t (asynchronous) or the round g (synchronous); ``s`` is the
staleness, 1 for a fresh upload. Tests compare every derivative with finite differences of a true loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Equations = Literal["corrected", "published"]
#: Upper bound of a weight before saturation. There, alpha and beta are already 1 to twelve digits.
MAX_WEIGHT = 1e12


@dataclass(frozen=True)
class Control:
    """A device's server-side control parameters."""

    lambda_: float
    sigma: float
    iota: float


@dataclass(frozen=True)
class PastUpload:
    """An aggregation that a later upload judges: its version, age p, staleness s_p, xi_p and the controls used then."""

    version: int
    p: int
    s_p: int
    xi_p: float
    control: Control
    #: Length of its step.
    length: float = 0.0


def discount(age: int, s: int, sigma: float) -> float:
    """``1 / (sqrt(age) s^sigma)``. The exponent is bounded to prevent overflow."""
    return math.exp(min(-sigma * math.log(s), 600.0)) / math.sqrt(age)


def raw_staleness_weight(control: Control, age: int, s: int) -> float:
    """``lambda / (sqrt(age) s^sigma) + iota``, before any clamp."""
    return control.lambda_ * discount(age, s, control.sigma) + control.iota


def staleness_weight(control: Control, age: int, s: int, xi_min: float) -> float:
    """``xi = lambda / (sqrt(age) s^sigma) + iota``, at least ``xi_min``."""
    return min(max(xi_min, raw_staleness_weight(control, age, s)), MAX_WEIGHT)


def saturate(mu: float, x: float) -> float:
    """``mu x / (1 + mu x)``, inside (0, 1) for x > 0: alpha from xi, beta from phi."""
    y = mu * x
    return 1.0 if math.isinf(y) else y / (1.0 + y)


def saturation_slope(mu: float, x: float) -> float:
    """``d saturate / dx = mu / (1 + mu x)^2``."""
    return mu / (1.0 + mu * x) / (1.0 + mu * x)


def gradient_step(value: float, rate: float, gradient: float) -> float:
    """``value - rate gradient``, or ``value`` if that is not finite."""
    after = value - rate * gradient
    return after if math.isfinite(after) else value


def _finite_or_zero(*gradients: float) -> tuple[float, ...]:
    return tuple(gradient if math.isfinite(gradient) else 0.0 for gradient in gradients)


def training_scale(lr: float, steps: float, before: Sequence[float], betas: Sequence[float]) -> float:
    """``eta ((1 - beta) n1 + n2)``: how far a constant unit gradient would have moved the model (erratum E6).

    n1 steps came before the merge, which shrinks their effect to ``1 - beta``; ``n2 = n - n1`` came after it. Of
    several merges, each shrinks everything before it. ``before`` counts the steps before each merge.
    """
    kept, done = 0.0, 0.0
    for steps_before, beta in zip(before, betas, strict=True):
        kept, done = (1.0 - beta) * (kept + (steps_before - done)), steps_before
    return lr * (kept + (steps - done))


def cosine(product: float, a: float, b: float) -> float:
    """``<x, y> / (|x| |y|)``, clamped to [-1, 1] (an inner product may be an estimate); 0 if either length is 0."""
    lengths = a * b
    return max(-1.0, min(1.0, product / lengths)) if lengths > 0.0 else 0.0


def control_gradients(
    q: float, mu_alpha: float, xi_min: float, past: PastUpload, equations: Equations, comes_back: bool = False
) -> tuple[float, float, float]:
    """d loss / d (lambda, sigma, iota) of the model that the judged aggregation produced.

    ``q = <g, step>`` with g the device's gradient. Erratum E2: the derivative of ``s^-sigma`` is ``-lambda ln(s)``;
    the paper prints ``-ln(sigma)`` (undefined for sigma <= 0; sigma then stays unchanged). Erratum E13: a clamped xi
    does not depend on the controls. ``comes_back`` (not in the paper) follows a slope that leads away from the clamp,
    because controls that all devices share would otherwise stay there.
    """
    c = q * saturation_slope(mu_alpha, past.xi_p)
    weight = discount(past.p, past.s_p, past.control.sigma)
    if equations == "corrected":
        raw = raw_staleness_weight(past.control, past.p, past.s_p)
        too_small, too_large = raw < xi_min, not raw <= MAX_WEIGHT
        asked_back = comes_back and (q < 0.0 if too_small else q > 0.0)
        if (too_small or too_large) and not asked_back:
            return 0.0, 0.0, 0.0
        inner = -past.control.lambda_ * math.log(past.s_p)
    else:
        inner = -math.log(past.control.sigma) if past.control.sigma > 0 else 0.0
    g_lambda, g_sigma, g_iota = _finite_or_zero(c * weight, c * weight * inner, c)
    return g_lambda, g_sigma, g_iota


def descend(control: Control, gradients: tuple[float, float, float], rates: tuple[float, float, float]) -> Control:
    """Take one gradient step on the three control parameters."""
    values = (control.lambda_, control.sigma, control.iota)
    return Control(*(gradient_step(*item) for item in zip(values, rates, gradients, strict=True)))


def distance_factor(server: float, device: float) -> float:
    """``2 |w_g - w_o| / (|w_g - w_o| + |w_b - w_o|)``, in [0, 2] (``distance``, not in the paper).

    Above 1 the server has moved farther from the common base than the device, so there is more to gain than to lose.
    """
    both = server + device
    return 2.0 * server / both if both > 0.0 else 1.0


def raw_freshness_weight(gamma: float, upsilon: float, age: int, s: int, far: float = 1.0) -> float:
    """``far gamma / sqrt(age) (1 - upsilon / sqrt(s))``, before any clamp."""
    return far * (gamma / math.sqrt(age) * (1.0 - upsilon / math.sqrt(s)))


def freshness_weight(gamma: float, upsilon: float, age: int, s: int, far: float = 1.0) -> float:
    """``phi = gamma / sqrt(age) (1 - upsilon / sqrt(s))`` with ``s = g - o + 1``, at least 0. ``far`` is 1 in
    the paper."""
    return min(max(0.0, raw_freshness_weight(gamma, upsilon, age, s, far)), MAX_WEIGHT)


def merge_gradients(
    q: float,
    mu_beta: float,
    phi: float,
    gamma: float,
    upsilon: float,
    age: int,
    s: int,
    equations: Equations,
    far: float = 1.0,
) -> tuple[float, float]:
    """d loss / d (gamma, upsilon) of the merged model, ``q = <h, w_g - w_b>``; 0 if phi is clamped (erratum E13)."""
    if equations == "corrected" and not 0.0 <= raw_freshness_weight(gamma, upsilon, age, s, far) <= MAX_WEIGHT:
        return 0.0, 0.0
    c = q * saturation_slope(mu_beta, phi) * far
    g_gamma, g_upsilon = _finite_or_zero(
        c * (1.0 - upsilon / math.sqrt(s)) / math.sqrt(age), -c * gamma / math.sqrt(age * s)
    )
    return g_gamma, g_upsilon
