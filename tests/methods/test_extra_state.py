"""A refused step leaves no trace in the state of a method: SCAFFOLD, FedOpt, CA2FL, FADAS and the newer rivals."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from freshet.core import saving
from freshet.core.server import NOT_FINITE, Server
from tests.methods.helpers import LEARNABLE, UNEQUAL, same, server_of, upload_of, vector

#: Options under which models of 3e38 lead beyond all floats.
STEPS: dict[str, dict[str, Any]] = {
    "scaffold": {"eta_g": 3.0},
    "fedavgm": {"eta": 3.0},
    "fedadam": {"eta": 1e39},
    "fedyogi": {"eta": 1e39},
    "fedadagrad": {"eta": 1e39},
    "feddyn": {},
    "ca2fl": {"M": 4, "eta": 3.0},
    "fadas": {"M": 4, "eta": 1e39},
    "fedbuff": {"K": 4, "eta_g": 3.0, "beta": 0.5},
    "fedacg": {"lambda_": 0.9},
    "ace": {"eta": 20.0},
    "asyncfeded": {"lambda_": 3.0},
}
#: Methods for which every step overflows.
NEVER = ("fedadam", "fedyogi", "fedadagrad", "fadas")


def play(server: Server, models: list[Any]) -> list[Any]:
    """Let four devices start from one model and upload. Return the events of the last upload."""
    server.trigger(list(range(4)))
    events: list[Any] = []
    for device, u in enumerate(models):
        change = {name: u[:LEARNABLE].copy() for name in server.rule.sends}
        events = server.upload(upload_of(server, device, u, vectors=change))
    return events


def huge() -> list[Any]:
    """Return finite models near the largest float, all of the same sign."""
    return [np.full_like(vector(1), 3e38) for _ in range(4)]


@pytest.mark.parametrize("name", STEPS)
def test_overflowing_step_leaves_no_trace(name: str) -> None:
    server = server_of(name, samples=UNEQUAL, **STEPS[name])
    if name not in NEVER:
        play(server, [vector(10 + device) for device in range(4)])
    before, w = deepcopy(saving.dump(server.method.state)), server.weights
    events = play(server, huge())
    assert [(type(event).__name__, event.reason) for event in events] == [("Rejected", NOT_FINITE)]
    same(server.weights, w)
    _same_tree(saving.dump(server.method.state), before)


def _same_tree(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _same_tree(one[key], other[key])
    elif isinstance(one, np.ndarray):
        same(one, other)
    else:
        assert one == other


def test_buffer_that_never_fills_leaves_the_cache_empty() -> None:
    server = server_of("ca2fl", M=5)
    play(server, [vector(10 + device) for device in range(4)])
    assert server.method.state.h_i == {} and not server.method.state.h.any()


def test_ca2fl_reports_the_size_of_its_cache() -> None:
    server = server_of("ca2fl")
    assert server.method.notices() == []
    object.__setattr__(server.method.context, "devices", 2**24)
    assert server.method.notices() == ["CA2FL keeps one update per device: up to 1.1 GiB of memory"]
