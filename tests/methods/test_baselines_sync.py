"""Properties of each synchronous baseline's server, on random models."""

import numpy as np
import pytest

from freshet.core.server import Server
from freshet.errors import ConfigError
from freshet.methods import method_options
from freshet.methods.fedlws import shrink_factor
from tests.methods.helpers import (
    LEARNABLE,
    MODELS,
    UNEQUAL,
    close,
    column,
    fedavg,
    hold_round,
    same,
    send,
    server_of,
    vector,
)

# ---- FedProx


def test_fedprox_partial_work_is_aggregated_with_its_full_weight() -> None:
    for drop, slow in ((0.0, 0), (0.25, 1), (0.5, 2), (1.0, 4)):
        server = server_of("fedprox", samples=UNEQUAL, epochs=5, drop=drop)
        for _ in range(6):
            event = hold_round(server, MODELS)
            close(column(event, "weight"), [n / sum(UNEQUAL[:4]) for n in UNEQUAL[:4]], 1e-12)
            epochs = _epochs(server)
            assert sum(e < 5 for e in epochs) == slow
            assert all(1 <= e <= 5 for e in epochs)
    assert _epochs(server_of("fedprox", epochs=1, drop=1.0)) == [1, 1, 1, 1]


def _epochs(server: Server) -> list[int]:
    epochs = [assignment.epochs for assignment in server.trigger([0, 1, 2, 3])]
    for device in range(4):
        send(server, device, vector(device))
    return epochs


# ---- FedDyn


@pytest.mark.parametrize("devices", [4, 10])
def test_feddyn_first_round_and_evaluated_model(devices: int) -> None:
    server = server_of("feddyn", devices=devices)
    theta, n = server.weights, LEARNABLE
    same(server.method.evaluation_model(server), theta)
    hold_round(server, MODELS)
    mean = np.mean([u.astype(np.float64) for u in MODELS.values()], axis=0)
    close(server.weights[:n], (mean + 4 / devices * (mean - theta))[:n], 1e-6)
    close(server.method.evaluation_model(server)[:-2], mean[:-2], 1e-6)
    if devices == 4:
        close(server.weights[:n], (2 * mean - theta)[:n], 1e-6)
    close(server.weights[n:-2], mean[n:-2], 1e-6)  # buffers: the plain mean, never the dual
    G, sent = server.method.state.G.copy(), server.weights
    hold_round(server, dict.fromkeys(range(4), sent))
    same(server.method.state.G, G)
    close(server.weights[:n], sent[:n] + G, 1e-6)


def test_feddyn_alpha_follows_the_share_of_samples() -> None:
    server = server_of("feddyn", samples=[10, 30], alpha=0.1)
    assert [a.instruction["alpha_k"] for a in server.trigger([0, 1])] == pytest.approx([0.2, 0.1 / 1.5])
    assert server_of("feddyn", alpha=0.0).trigger([0])[0].instruction == {}


# ---- FedLWS


def test_fedlws_shrinks_by_a_bounded_factor() -> None:
    server = server_of("fedlws", samples=UNEQUAL)
    event = hold_round(server, MODELS)
    for w_norm, move, tau, gamma in zip(*(event[k] for k in ("w_norm", "move_norm", "tau", "gamma")), strict=True):
        assert 0.01 <= tau <= 0.2
        assert w_norm / (w_norm + 0.2 * move) <= gamma < 1.0
    close(server.weights[LEARNABLE:], fedavg(MODELS, UNEQUAL)[LEARNABLE:], 1e-7)  # buffers are not shrunk


def test_fedlws_edge_cases() -> None:
    identical = hold_round(server_of("fedlws"), dict.fromkeys(range(3), vector(2)))
    alone = hold_round(server_of("fedlws"), {0: vector(2)})
    for event in (identical, alone):
        assert event["tau"] == [0.01, 0.01]
        assert all(gamma < 1.0 for gamma in event["gamma"])
    zero = server_of("fedlws", np.zeros_like(vector(1)))
    assert hold_round(zero, {0: vector(2)})["gamma"] == [1.0, 1.0]
    same(zero.weights, vector(2))
    gammas = [shrink_factor(1.0, 0.1, move) for move in (0.0, 0.1, 1.0, 10.0)]
    assert gammas[0] == 1.0
    assert gammas == sorted(gammas, reverse=True)
    with pytest.raises(ConfigError, match="tau_min must be at most tau_max"):
        method_options("fedlws", {"tau_min": 0.5})
