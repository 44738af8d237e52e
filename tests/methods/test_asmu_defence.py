"""FedASMU with a defence: the bound on an upload that merged a fresh model applies to what the server uses."""

from typing import Any

import numpy as np
import pytest

from freshet.core.defence import Defence, DefenceOptions
from freshet.core.events import Aggregated, Event, Noted
from freshet.core.server import Server
from tests.methods.asmu_helpers import ask, plain_layout, server_of, trigger, upload

N, HONEST = 40, 11
DIRECTION = np.ones(N) / np.sqrt(N)


def moved_on(method: str) -> tuple[Server, np.ndarray, np.ndarray]:
    """Return a clipping server after honest steps of length 1, and the base and fresh model of a last device.

    That device started first and asks now.
    """
    rng, layout = np.random.default_rng(0), plain_layout(N)
    server = server_of(method, rng.normal(size=N), layout, devices=HONEST + 1)
    server.admission.defence = Defence(DefenceOptions(rule="clip"), layout)
    for device in range(HONEST + 1):
        trigger(server, device)
    base = server.weights.astype(np.float64)
    for device in range(HONEST):
        upload(server, device, base + DIRECTION + 0.3 * rng.normal(size=N) / np.sqrt(N))
    fresh = ask(server, HONEST)
    assert fresh is not None
    return server, base, fresh.weights.astype(np.float64)


def figures(events: list[Event]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the numbers of the aggregation and those of the defence."""
    made, note = (next(e for e in events if isinstance(e, kind)) for kind in (Aggregated, Noted))
    return dict(made.numbers), dict(note.numbers)


def test_false_merge_report_cannot_undo_the_servers_progress() -> None:
    server, base, fresh = moved_on("fedasmu-progress")
    made, note = figures(upload(server, HONEST, base, 10, beta=0.99, n1=1))
    assert note["measure"] == pytest.approx(0.99 * np.linalg.norm(fresh - base), rel=1e-4)
    assert np.linalg.norm(server.weights - fresh) <= 1.001 * made["alpha"] * note["bound"]


def test_clipped_merge_applies_its_shortened_training() -> None:
    server, base, fresh = moved_on("fedasmu-progress")
    produced = 7 * DIRECTION[::-1] * np.sign(np.arange(N) % 3 - 0.5)
    made, note = figures(upload(server, HONEST, base + 0.6 * (fresh - base) + produced, 10, beta=0.6, n1=1))
    assert note["measure"] == pytest.approx(7.0, rel=1e-4) and note["share"] < 0.2
    np.testing.assert_allclose(server.weights - fresh, made["alpha"] * note["share"] * produced, atol=1e-5)


def test_mixing_moves_towards_server_models_by_at_most_the_bound() -> None:
    server, base, fresh = moved_on("fedasmu")
    produced = 7 * DIRECTION
    made, note = figures(upload(server, HONEST, base + 0.6 * (fresh - base) + produced, 10, beta=0.6, n1=1))
    towards = base + 0.6 * (fresh - base) + note["share"] * produced
    np.testing.assert_allclose(server.weights, fresh + made["alpha"] * (towards - fresh), atol=1e-5)
