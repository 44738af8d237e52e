"""A refused aggregation leaves no trace, neither in the method's state nor in later results."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freshet.core import saving
from freshet.core.admission import GATE_FACTOR
from freshet.core.events import Aggregated, Event, Rejected
from freshet.core.messages import Merge, Request, Slot, Upload
from freshet.core.server import NOT_FINITE, Server
from freshet.methods import method_names
from tests.methods.helpers import REPORTS, SIZE, server_of
from tests.methods.test_baselines_properties import BUFFERED, waiting_for

#: Every method and variant, and settings that keep more state than the defaults do. A buffer holds one round here, so
#: that nothing is being collected between two rounds.
BUFFERS = {name: waiting_for(3, name) for name in BUFFERED}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, BUFFERS.get(name, {})) for name in method_names()},
    "fedbuff with momentum": ("fedbuff", {"beta": 0.9, "K": 3}),
    "fedasmu, sketches": ("fedasmu", {"control_memory": "sketch"}),
    "fedasmu, budget": ("fedasmu", {"control_memory": "budget"}),
    "feddyn, no dual": ("feddyn", {"alpha": 0.0}),
    "port, impatient": ("port", {"K": 3, "omega": 0}),
}


@contextmanager
def refusing() -> Iterator[None]:
    """Make every overflow check report an overflow."""
    asking = [m for name, m in sys.modules.items() if name.startswith("freshet.") and hasattr(m, "overflows")]
    with pytest.MonkeyPatch.context() as patch:
        for module in asking:
            patch.setattr(module, "overflows", lambda weights, length: True)
        yield


def upload(server: Server, device: int, rng: np.random.Generator) -> Upload:
    """Return an honest upload: a small step, a report, control variates, and the numbers of a merge."""
    active, n = server.active_trips[device], server.context.layout.learnable
    report: dict[str, float] = dict(REPORTS.get(server.method.about.name, {}))
    merges: tuple[Merge, ...] = ()
    if server.rule.asks:
        fresh = server.request(Request(device, active.trip, Slot(1, "meta")))
        report |= {"reward": float(rng.normal()), "first": 1, "slot": 1}
        merges = () if fresh is None else (Merge(fresh.version, {"beta": 0.3, "n1": 1}),)
    weights = (server.store.get(active.base) + 0.01 * rng.standard_normal(SIZE)).astype(np.float32)
    vectors = {name: (0.1 * rng.standard_normal(n)).astype(np.float32) for name in server.rule.sends}
    return Upload(device, active.trip, active.base, weights, 3, report, merges, vectors)


def one_round(server: Server, rng: np.random.Generator) -> list[Event]:
    """Let three devices train from one model and upload one after the other."""
    idle = [d for d in range(server.context.devices) if d not in server.active_trips and d not in server.waiting]
    chosen = [int(d) for d in rng.choice(idle, min(3, len(idle)), replace=False)]
    server.trigger(chosen)
    return [event for device in chosen for event in server.upload(upload(server, device, rng))]


def until_step(server: Server, rng: np.random.Generator) -> None:
    """Continue until an upload has made a step, so the buffer is empty."""
    for _ in range(50):
        events = one_round(server, rng)
        if events and isinstance(events[-1], Aggregated):
            return
    raise AssertionError("no step in fifty rounds")


def saved_state(server: Server) -> Any:
    return deepcopy(saving.dump(server.method.state))


def same(one: Any, two: Any) -> bool:
    """Return whether two trees have the same bits."""
    if isinstance(one, np.ndarray):
        return isinstance(two, np.ndarray) and one.dtype == two.dtype and one.tobytes() == two.tobytes()
    if isinstance(one, dict):
        return isinstance(two, dict) and list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list):
        return isinstance(two, list) and len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


@pytest.mark.parametrize("setting", SETTINGS)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10**6), steps=st.integers(0, 3))
def test_refused_aggregation_keeps_the_state_bit_for_bit(setting: str, seed: int, steps: int) -> None:
    name, options = SETTINGS[setting]
    server, rng = server_of(name, devices=12, epochs=2, norm_gate=GATE_FACTOR, **options), np.random.default_rng(seed)
    for _ in range(steps):
        until_step(server, rng)
    other = server_of(name, devices=12, epochs=2, norm_gate=GATE_FACTOR, **options)
    other.restore(deepcopy(server.state()))
    before, weights, version = saved_state(server), server.weights.tobytes(), server.version
    with refusing():
        refused = [event for event in _until_refused(server, rng) if isinstance(event, Rejected)]
    assert {event.reason for event in refused} == {NOT_FINITE}
    assert same(saved_state(server), before)
    assert (server.weights.tobytes(), server.version, server.waiting, server.active_trips) == (
        weights,
        version,
        set(),
        {},
    )
    other.round = server.round  # a round that was refused counts
    for each in (server, other):
        honest = np.random.default_rng(seed + 1)
        for _ in range(3):
            until_step(each, honest)
    assert same(_but_for_trips(saved_state(server)), _but_for_trips(saved_state(other)))
    assert server.weights.tobytes() == other.weights.tobytes(), "later results do not change"


def _until_refused(server: Server, rng: np.random.Generator) -> list[Event]:
    """Run rounds until the last upload of one is refused."""
    seen: list[Event] = []
    for _ in range(50):
        seen += one_round(server, rng)
        if isinstance(seen[-1], Rejected) if seen else False:
            return seen
    raise AssertionError("nothing was refused in fifty rounds")


def _but_for_trips(state: Any) -> Any:
    """Drop SCAFFOLD's record of trips: a refused upload still counts as a trip."""
    return {key: value for key, value in state.items() if key != "heard"}
