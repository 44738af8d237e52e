"""What a run with noise on the devices has cost them in privacy, by Google's dp-accounting.

Each trip of a device releases at most one update (``core/privacy.py``): a Gaussian mechanism of multiplier noise / 2.
Trips compose adaptively; Renyi differential privacy gives epsilon at the asked delta. Trips count from their start,
lost ones too, since nobody knows how far their update came.
"""

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from freshet.core.privacy import PrivacyOptions
from freshet.errors import ConfigError


class Accountant:
    """Epsilon per device."""

    def __init__(self, options: PrivacyOptions) -> None:
        if find_spec("dp_accounting") is None:
            problem = "needs dp-accounting, which is not installed; install it: pip install 'freshet-fl[privacy]'"
            raise ConfigError("privacy.clip", problem)
        self.options = options

    def closing(self, trips: Mapping[int, int]) -> dict[str, Any]:
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


def sentence(found: Mapping[str, Any]) -> str:
    """What the terminal says."""
    who = f"device {found['device']}, {found['uploads']} updates"
    return f"privacy: epsilon is at most {found['epsilon']:.4g} at delta {found['delta']:g} ({who})"
