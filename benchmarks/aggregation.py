"""One FedASMU aggregation with control adaptation on ten million parameters, compared with its least memory traffic.

Least traffic: one lerp into an existing vector and one dot product, by PyTorch, on float32 vectors of the same size, in
one thread. Freshet writes a new vector, since the old version may still be held. Two uploads are timed: a fresh one
(trained from the current version), and a stale one that merged a fresh model, so that four different models are read.
The time of the admission checks (size, numbers, distance moved) is printed separately.

    python benchmarks/aggregation.py [--parameters N]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from freshet.compute.host import keep_freed_memory
from freshet.core.layout import Layout
from freshet.core.messages import Merge, Request, Slot, Upload
from freshet.core.method import MethodContext
from freshet.core.server import Server
from freshet.methods import class_and_preset, method_options
from freshet.training.optimisers import constant

MERGED = {"beta": 0.2, "n1": 0}


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(apply: str, stale: bool, size: int, repeat: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of the rule, of the checks and of the least traffic, measured in turn."""
    rng = np.random.default_rng(0)
    context = MethodContext(2, np.ones(2, np.int64), 1, 2, Layout.build([("w", (size,), "learnable")]), 0)
    method = class_and_preset("fedasmu")[0](method_options("fedasmu", {"apply": apply}), context)
    server = Server(method, context, rng.standard_normal(size, dtype=np.float32), constant(0.1))
    models = [rng.standard_normal(size, dtype=np.float32) for _ in range(2)]
    a, b, out = torch.from_numpy(models[0]), torch.from_numpy(models[1]), torch.zeros(size)

    def other_device() -> None:
        server.trigger([1])
        server.upload(Upload(1, server.active_trips[1].trip, server.active_trips[1].base, models[1], 5))

    def least() -> None:
        torch.lerp(a, b, 0.3, out=out)
        torch.dot(a, b)

    rules, gating, leasts = [], [], []
    for number in range(repeat + 1):
        server.trigger([0])
        active = server.active_trips[0]
        if stale:
            other_device()
            server.request(Request(0, active.trip, Slot(1, "fixed")))
            other_device()
        merges = tuple(Merge(sent.version, MERGED) for sent in active.sent)
        upload = Upload(0, active.trip, active.base, models[number % 2], 5, merges=merges)
        base, fresh = (
            server.store.get(active.base),
            {sent.version: server.store.get(sent.version) for sent in active.sent},
        )
        gate = seconds(lambda: server.admission.rejection(upload, 0, active, base, fresh))  # noqa: B023
        started = time.perf_counter()
        verdict = method.receive(server, upload, active)
        rule = time.perf_counter() - started
        server._apply(verdict, 0, active)
        server._end_trip(0)
        del verdict
        if number:  # the first upload has nothing to adapt
            rules.append(rule)
            gating.append(gate)
            leasts.append(seconds(least))
    return rules, gating, leasts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--repeat", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for apply in ("mix", "progress"):
        for stale in (False, True):
            rules, gating, leasts = measure(apply, stale, arguments.parameters, arguments.repeat)
            ratio = statistics.median(rule / least for rule, least in zip(rules, leasts, strict=True))
            rule, gate, least = (1e3 * statistics.median(times) for times in (rules, gating, leasts))
            kind = "stale, merged" if stale else "fresh"
            print(
                f"aggregation ({apply}, {kind}): {rule:.1f} ms, lerp + dot {least:.1f} ms, ratio {ratio:.2f} "
                f"(checks: {gate:.1f} ms more)",
                flush=True,
            )


if __name__ == "__main__":
    main()
