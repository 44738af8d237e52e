"""Privacy on the device: the update is clipped and Gaussian noise is added before anything leaves it.

    d = u - w_b,   d' = d min(1, C / |d|) + N(0, (noise C)^2 I),   sent: w_b + d'

Whatever the device's samples are, the clipped d lies in a ball of radius C: exchanging them all for others moves it by
at most 2 C. So each upload is a Gaussian mechanism with a deviation of ``noise / 2`` sensitivities, and the trips of a
device compose (``runs/accountant.py``). That is a guarantee for all samples of a device together, against everybody who
sees its uploads, the server included. How many samples it has, and when it is there, counts as public.

All else that leaves the device must not depend on its samples: reports are withheld but for what a rule says is public,
a model that is not finite goes up as noise, and rules that leave no such choice are refused (``LocalRule.leak``).
"""

import math

import numpy as np
from pydantic import Field

from freshet.core.method import Options
from freshet.core.vectors import Vector, combine, is_finite, norm


class PrivacyOptions(Options):
    """Clipping and noise on each device (local differential privacy for all samples of a device together)."""

    clip: float = Field(0.0, ge=0, description="longest update that leaves a device, C (0: no clipping, no noise)")
    noise: float = Field(1.0, gt=0, description="standard deviation of the noise on each number, in units of C")
    delta: float = Field(1e-5, gt=0, lt=1, description="delta at which epsilon is reported")

    @property
    def on(self) -> bool:
        return self.clip > 0


def privatised(options: PrivacyOptions, weights: Vector, base: Vector, rng: np.random.Generator) -> Vector:
    """``w_b + d'``; all weights are learnable."""
    with np.errstate(over="ignore", invalid="ignore"):
        d = combine([(1.0, weights), (-1.0, base)])
    length = norm(d) if is_finite(d) else math.inf
    share = 0.0 if math.isinf(length) else min(1.0, options.clip / max(length, 1e-300))
    step = d.astype(np.float64) * share if share else np.zeros(len(d))
    noise = rng.standard_normal(len(d)) * (options.noise * options.clip)
    sent: Vector = (base.astype(np.float64) + step + noise).astype(np.float32)
    return sent
