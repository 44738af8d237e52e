"""What the asynchronous baselines share: discounts of staleness, mixing one upload in, and the numbers to log.

Their papers count staleness from 0: ``tau = t - o``, so ``tau = s - 1`` with our ``s = t - o + 1``.
"""

from typing import Any

from freshet.core.admission import overflows
from freshet.core.events import make_contribution
from freshet.core.messages import Upload
from freshet.core.method import Aggregate, Reject, make_aggregate
from freshet.core.server import NOT_FINITE, Flight, Server
from freshet.core.vectors import mix_measured


def polynomial(tau: int, a: float) -> float:
    """``(tau + 1)^-a``; 1 for a fresh upload."""
    return float((tau + 1.0) ** -a)


def hinge(tau: int, a: float, b: float) -> float:
    """1 up to ``tau = b``, then ``1 / (a (tau - b) + 1)``."""
    return 1.0 if tau <= b else 1.0 / (a * (tau - b) + 1.0)


def mixed(server: Server, upload: Upload, flight: Flight, alpha: float, **numbers: Any) -> Aggregate | Reject:
    """``w <- (1 - alpha) w + alpha u``, float buffers alike; counters take the larger of the two."""
    w, layout = server.weights, server.world.layout
    new, length = mix_measured(w, upload.weights, alpha, layout.learnable)
    layout.max_counters(new, w, upload.weights)
    if overflows(new, length):
        return Reject(NOT_FINITE)
    part = make_contribution((upload.device, flight.base, server.staleness(flight), alpha))
    return make_aggregate((new, (part,), {"alpha": alpha, **numbers}, length, ()))
