"""What a run with noise on the devices has cost them in privacy, by Google's dp-accounting.

Each trip of a device releases at most one update (``privacy.py``): a Gaussian mechanism of multiplier noise / 2.
Trips compose adaptively; Renyi differential privacy gives epsilon at the asked delta. Trips count from their start,
lost ones too, since nobody knows how far their update came.

Privacy on the device: the update is clipped and Gaussian noise is added before anything leaves it.

    d = u - w_b,   d' = d min(1, C / |d|) + N(0, (noise C)^2 I),   sent: w_b + d'

Whatever the device's samples are, the clipped d lies in a ball of radius C: exchanging them all for others moves it by
at most 2 C. So each upload is a Gaussian mechanism with a deviation of ``noise / 2`` sensitivities, and the trips of a
device compose (``privacy.py``). That is a guarantee for all samples of a device together, against everybody who
sees its uploads, the server included. How many samples it has, and when it is there, counts as public.

All else that leaves the device must not depend on its samples: reports are withheld but for what a rule says is public,
a model that is not finite goes up as noise, and rules that leave no such choice are refused (``LocalRule.leak``).
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
    """Clipping and noise on each device (local differential privacy for all samples of a device together)."""

    clip: float = Field(0.0, ge=0, description="longest update that leaves a device, C (0: no clipping, no noise)")
    noise: float = Field(1.0, gt=0, description="standard deviation of the noise on each number, in units of C")
    delta: float = Field(1e-5, gt=0, lt=1, description="delta at which epsilon is reported")

    @property
    def on(self) -> bool:
        return self.clip > 0


def privatise(options: PrivacyOptions, weights: Vector, base: Vector, rng: np.random.Generator) -> Vector:
    """``w_b + d'``; all weights are learnable."""
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
        """For the summary: the largest epsilon, whose it is, and every device's."""
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
    """Epsilon at delta of so many updates of one device, each with noise of ``noise`` clipping lengths."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier=noise / 2.0), uploads)
    return float(accountant.get_epsilon(delta))


def describe(found: Mapping[str, Any]) -> str:
    """What the terminal says."""
    who = f"device {found['device']}, {found['uploads']} updates"
    return f"privacy: epsilon is at most {found['epsilon']:.4g} at delta {found['delta']:g} ({who})"
