"""What the tuner may change, for each method: plain data, ``section.key`` to a range.

Every method is tuned over its learning rate and the few options that its authors tune; the default of each option lies
inside its range, so that the first trial can be the defaults themselves.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from freshet.methods import find


@dataclass(frozen=True)
class Range:
    """From ``low`` to ``high``, both included; on a logarithmic scale where factors matter."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def clip(self, value: float) -> float:
        """The nearest value inside."""
        return min(self.high, max(self.low, value))


Space = Mapping[str, Range]

LR = Range(1e-3, 0.5, log=True)
_PROX = Range(1e-4, 0.1, log=True)
_MERGE: dict[str, Range] = {
    "method.lambda0": Range(0.1, 20.0, log=True),
    "method.sigma0": Range(0.0, 1.5),
    "method.iota0": Range(0.0, 0.3),
    "method.gamma0": Range(0.1, 5.0, log=True),
    "method.upsilon0": Range(0.0, 1.0),
}

#: By method; the learning rate is added to each.
SPACES: dict[str, dict[str, Range]] = {
    "fedasmu": _MERGE,
    "fedssmu": _MERGE,
    "fedasync": {"method.alpha": Range(0.05, 1.0, log=True), "method.poly_a": Range(0.0, 1.5), "method.rho": _PROX},
    "port": {
        "method.K": Range(2, 20, whole=True),
        "method.alpha": Range(0.3, 10.0, log=True),
        "method.beta": Range(0.1, 10.0, log=True),
    },
    "asofed": {"method.beta": Range(1e-4, 0.1, log=True), "method.lambda_": Range(0.05, 2.0, log=True)},
    "fedbuff": {
        "method.K": Range(2, 20, whole=True),
        "method.eta_g": Range(0.1, 3.0, log=True),
        "method.exponent": Range(0.0, 1.5),
    },
    "fedsa": {
        "method.alpha": Range(0.05, 1.0, log=True),
        "method.a": Range(0.0, 1.5),
        "method.stage1_epochs": Range(1, 20, whole=True),
        "method.rho": _PROX,
    },
    "fedavg": {},
    "fedprox": {"method.mu": Range(1e-4, 1.0, log=True)},
    "moon": {"method.mu": Range(0.1, 10.0, log=True), "method.T": Range(0.1, 1.0)},
    "feddyn": {"method.alpha": Range(1e-3, 0.3, log=True)},
    "fedlws": {"method.beta": Range(3e-3, 0.3, log=True), "method.tau_max": Range(0.05, 0.5)},
}


def space_for(method: str, in_flight: int | None = None) -> dict[str, Range]:
    """The space of a method or variant; one without a declared space is tuned over the learning rate alone.

    A method cannot wait for more uploads than devices train at once, so ``in_flight`` bounds K.
    """
    space = {"training.lr": LR} | SPACES.get(find(method)[0].name, {})
    if in_flight is not None and "method.K" in space:
        whole = space["method.K"]
        space["method.K"] = Range(min(whole.low, in_flight), min(whole.high, in_flight), whole=True)
    return space
