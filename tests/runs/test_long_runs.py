"""The memory of a run depends on its devices, not on its length."""

import gc
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from freshet.core.coordinator import Coordinator, Effects
from freshet.core.layout import Layout
from freshet.core.messages import Assignment, Upload
from freshet.core.method import MethodContext
from freshet.core.scheduling import Trigger
from freshet.core.server import Server
from freshet.methods import class_and_preset, method_options
from freshet.training.optimisers import constant

DEVICES, UPLOADS = 8, 800
#: Where what counts is allocated.
PARTS = ("/freshet/", "/numpy/", "test_long_runs")


def long_coordinator(method: str) -> Callable[[int], None]:
    """Trips of eight devices, round after round; calling it makes so many more uploads."""
    layout = Layout.build([("w", (64,), "learnable"), ("mean", (4,), "buffer")])
    context = MethodContext(DEVICES, np.full(DEVICES, 10, np.int64), 5, 4, layout, 0)
    cls = class_and_preset(method)[0]
    server = Server(cls(method_options(method, {}), context), context, np.zeros(68, np.float32), constant(0.1))
    kind = "rounds" if server.synchronous else "concurrency"
    c = Coordinator(server, Trigger(kind, 4, 10.0, 6), deadline=5.0)
    wakes = {0.0}

    def heed(effects: Effects) -> list[Assignment]:
        wakes.update(at for at in (effects.wake_at, effects.look_at, effects.timer_at) if at is not None)
        return list(effects.assignments)

    def trip(at: float, a: Assignment) -> None:
        report = {"r": 1.0, "seconds": 0.0} if method == "asofed" else {}
        vectors = {name: np.ones(64, np.float32) for name in server.rule.sends}
        upload = Upload(a.device, a.trip, a.version, a.weights + np.float32(1e-3), 5, report, {}, vectors)
        heed(c.upload_arrived(at, a.device, a.trip, lambda: upload))

    def go_on(uploads: int) -> None:
        end = c.counts.uploads + uploads
        while c.counts.uploads < end:
            now = min(wakes)
            wakes.remove(now)
            for assignment in heed(c.tick(now, lambda device: True)):
                trip(now + 0.5, assignment)

    return go_on


def ours() -> int:
    """Bytes held by what was allocated in this file, in Freshet or in numpy; other threads have allocations, too."""
    held = tracemalloc.take_snapshot().statistics("filename")
    return sum(one.size for one in held if any(part in one.traceback[0].filename for part in PARTS))


@pytest.mark.parametrize("method", ["fedavg", "fedasync", "fedasmu-fa", "fedbuff", "ca2fl", "port", "scaffold"])
def test_memory_does_not_grow_over_the_last_half(method: str) -> None:
    go_on = long_coordinator(method)
    go_on(UPLOADS // 4)
    tracemalloc.start()
    try:
        go_on(UPLOADS // 4)
        gc.collect()
        middle = ours()
        go_on(UPLOADS // 2)
        gc.collect()
        grown = ours() - middle
    finally:
        tracemalloc.stop()
    assert grown < 20_000, f"{grown} bytes more after {UPLOADS // 2} uploads"
