"""FedOpt's four servers compared with Flower's own strategies, an independent implementation.

Two decisions differ: Flower starts with v = 0, Freshet with tau^2 (the paper's bound). Flower's FedAdam corrects its
rate for the bias of the moments, counting rounds from 2. The test applies Freshet's decisions, so all else must agree.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from freshet.core.layout import Layout
from freshet.core.vectors import Vector
from tests.methods.helpers import UNEQUAL, hold_round, server_of

flower = pytest.importorskip(
    "flwr.serverapp.strategy", reason="Flower is not installed: pip install 'freshet-fl[flower]'"
)

SIZE, ROUNDS, ETA, BETA1, BETA2, TAU = 40, 12, 0.05, 0.8, 0.95, 0.01
LAYOUT = Layout.build([("w", (SIZE,), "learnable")])
GIVEN = {"eta": ETA, "beta_1": BETA1, "beta_2": BETA2, "tau": TAU}
STRATEGIES: dict[str, Any] = {
    "fedavgm": lambda: flower.FedAvgM(server_learning_rate=ETA, server_momentum=BETA1),
    "fedadagrad": lambda: flower.FedAdagrad(eta=ETA, tau=TAU),
    "fedadam": lambda: flower.FedAdam(**GIVEN),
    "fedyogi": lambda: flower.FedYogi(**GIVEN),
}
OURS: dict[str, dict[str, float]] = {
    "fedavgm": {"eta": ETA, "beta1": BETA1},
    "fedadagrad": {"eta": ETA, "tau": TAU},
    "fedadam": {"eta": ETA, "beta1": BETA1, "beta2": BETA2, "tau": TAU},
    "fedyogi": {"eta": ETA, "beta1": BETA1, "beta2": BETA2, "tau": TAU},
}


def replies(uploads: dict[int, Vector]) -> list[Any]:
    """Return what Flower's devices would send: a model and its number of samples."""
    from flwr.app import ArrayRecord, MetricRecord, RecordDict

    def content(device: int, weights: Vector) -> RecordDict:
        metrics = MetricRecord({"num-examples": UNEQUAL[device]})
        return RecordDict({"arrays": ArrayRecord([weights]), "metrics": metrics})

    sent = (content(device, weights) for device, weights in uploads.items())
    return [SimpleNamespace(content=each, has_error=lambda: False) for each in sent]


def flower_step(strategy: Any, round_: int, w: Vector, uploads: dict[int, Vector], aligned: bool) -> Vector:
    """Return Flower's next model; ``aligned`` applies our two decisions."""
    from flwr.app import ArrayRecord

    if isinstance(strategy, flower.FedAvgM):
        strategy.current_arrays = ArrayRecord([w])
    else:
        strategy.current_arrays = {"0": w}
        if aligned and not strategy.v_t:
            strategy.v_t = {"0": np.full(SIZE, TAU**2)}
    if aligned and isinstance(strategy, flower.FedAdam):
        strategy.eta = ETA / (np.sqrt(1 - BETA2 ** (round_ + 1.0)) / (1 - BETA1 ** (round_ + 1.0)))
    arrays, _ = strategy.aggregate_train(round_, replies(uploads))
    (new,) = arrays.to_numpy_ndarrays()
    return np.asarray(new, np.float32)


def difference(name: str, aligned: bool) -> float:
    """The largest over all rounds of ``max |w - w'| / max |w - w0|``."""
    rng, found = np.random.default_rng(7), []
    w0 = 0.01 * rng.standard_normal(SIZE).astype(np.float32)
    server = server_of(name, w0, samples=UNEQUAL, layout=LAYOUT, **OURS[name])
    strategy, theirs = STRATEGIES[name](), w0
    for round_ in range(1, ROUNDS + 1):
        chosen = sorted(rng.choice(len(UNEQUAL), 4, replace=False).tolist())
        steps = {device: 0.1 * rng.standard_normal(SIZE).astype(np.float32) for device in chosen}
        theirs = flower_step(
            strategy, round_, theirs, {device: theirs + step for device, step in steps.items()}, aligned
        )
        hold_round(server, {device: server.weights + step for device, step in steps.items()})
        found.append(float(np.abs(server.weights - theirs).max() / np.abs(theirs - w0).max()))
    return max(found)


@pytest.mark.parametrize("name", STRATEGIES)
def test_same_models_as_flower(name: str) -> None:
    assert difference(name, aligned=True) < 5e-6


@pytest.mark.parametrize("name", ["fedadagrad", "fedadam", "fedyogi"])
def test_only_the_two_decisions_differ_and_they_show(name: str) -> None:
    assert difference(name, aligned=False) > 1e-3
