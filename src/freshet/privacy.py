"""Local differential privacy: clip the update and add Gaussian noise on the device, and account for what it costs.

    d = u - w_b,   d' = d min(1, C / |d|) + N(0, (noise C)^2 I),   sent: w_b + d'

The clipped d lies in a ball of radius C whatever the device's samples are, so exchanging them all moves it by at most
2 C. Each upload is therefore a Gaussian mechanism with noise multiplier ``noise / 2``. The guarantee covers all samples
of a device together, against everybody who sees its uploads, including the server. The number of samples and the times
of availability count as public.

Nothing else that leaves the device may depend on its samples. Reports are withheld except for what a rule declares
public. A model that is not finite is sent as noise. Rules that leak otherwise are refused (``LocalRule.leak``).

The trips of a device compose adaptively. Google's dp-accounting computes epsilon at the given delta with Renyi
differential privacy. A trip counts from its start, even if it is lost, since its update may have been seen.
"""

import math
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from pydantic import Field

from freshet.core.method import Options
from freshet.core.vectors import Vector, combine, is_finite, norm
from freshet.errors import ConfigError


class PrivacyOptions(Options):
    """Clipping and noise on each device: local differential privacy for all samples of a device together."""

    clip: float = Field(0.0, ge=0, description="C, the largest norm of an update (0: no clipping, no noise)")
    noise: float = Field(1.0, gt=0, description="standard deviation of the noise on each number, in units of C")
    delta: float = Field(1e-5, gt=0, lt=1, description="delta at which epsilon is reported")

    @property
    def on(self) -> bool:
        return self.clip > 0


def privatise(options: PrivacyOptions, weights: Vector, base: Vector, rng: np.random.Generator) -> Vector:
    """``w_b + d'``. All weights must be learnable."""
    with np.errstate(over="ignore", invalid="ignore"):
        d = combine([(1.0, weights), (-1.0, base)])
    length = norm(d) if is_finite(d) else math.inf
    share = 0.0 if math.isinf(length) else min(1.0, options.clip / max(length, 1e-300))
    step = d.astype(np.float64) * share if share else np.zeros(len(d))
    noise = rng.standard_normal(len(d)) * (options.noise * options.clip)
    sent: Vector = (base.astype(np.float64) + step + noise).astype(np.float32)
    return sent


class Accountant:
    """Epsilon per device."""

    def __init__(self, options: PrivacyOptions) -> None:
        if find_spec("dp_accounting") is None:
            problem = "needs dp-accounting, which is not installed; install it: pip install 'freshet-fl[privacy]'"
            raise ConfigError("privacy.clip", problem)
        self.options = options

    def summary(self, trips: Mapping[int, int]) -> dict[str, Any]:
        """Entries of the summary: the largest epsilon, its device, and the epsilon of every device."""
        noise, delta = self.options.noise, self.options.delta
        by_device = {str(device): epsilon(noise, count, delta) for device, count in sorted(trips.items())}
        largest = max(by_device, key=lambda device: by_device[device], default=None)
        return {
            "epsilon": 0.0 if largest is None else by_device[largest],
            "delta": delta,
            "device": None if largest is None else int(largest),
            "uploads": 0 if largest is None else trips[int(largest)],
            "by_device": by_device,
        }


@cache
def epsilon(noise: float, uploads: int, delta: float) -> float:
    """Epsilon at ``delta`` of ``uploads`` updates of one device, with noise in units of the clipping norm."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier=noise / 2.0), uploads)
    return float(accountant.get_epsilon(delta))


def describe(found: Mapping[str, Any]) -> str:
    """The sentence for the terminal."""
    who = f"device {found['device']}, {found['uploads']} updates"
    return f"privacy: epsilon is at most {found['epsilon']:.4g} at delta {found['delta']:g} ({who})"
