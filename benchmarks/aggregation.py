"""One FedASMU aggregation with control adaptation on ten million parameters against its least memory traffic.

Least traffic: one lerp into a vector that is already there and one dot product, by PyTorch, on float32 vectors of the
same size, one thread. What Freshet makes is a new vector, since the old version may still be held.

    python benchmarks/aggregation.py [--parameters N]
"""

import argparse
import statistics
import time

import numpy as np
import torch

from freshet.compute.memory import keep_freed_memory
from freshet.core.layout import Layout
from freshet.core.messages import Upload
from freshet.core.method import World
from freshet.core.server import Server
from freshet.methods import find, options_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--repeat", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    size, rng = arguments.parameters, np.random.default_rng(0)
    layout = Layout.build([("w", (size,), "learnable")])
    world = World(4, np.ones(4, np.int64), 1, 4, layout, 0)
    uploads = [rng.standard_normal(size, dtype=np.float32) for _ in range(2)]
    a, b = (torch.from_numpy(u) for u in uploads)
    out = torch.zeros(size)
    for apply in ("mix", "progress"):
        method = find("fedasmu")[0](options_for("fedasmu", {"apply": apply}), world)
        server = Server(method, world, rng.standard_normal(size, dtype=np.float32), 0.1, 1.0)
        ratios, ours, least = [], [], []
        for number in range(arguments.repeat + 1):
            server.trigger([0])
            flight = server.flights[0]
            upload = Upload(0, flight.trip, flight.base, uploads[number % 2], 5)
            started = time.perf_counter()
            verdict = method.receive(server, upload, flight)
            middle = time.perf_counter()
            torch.lerp(a, b, 0.3, out=out)
            torch.dot(a, b)
            ended = time.perf_counter()
            server._apply(verdict, 0, flight.trip)
            server._land(0)
            if number:  # the first has nothing to adapt
                ours.append(middle - started)
                least.append(ended - middle)
                ratios.append(ours[-1] / least[-1])
        print(
            f"aggregation ({apply}): {1e3 * statistics.median(ours):.1f} ms, lerp + dot "
            f"{1e3 * statistics.median(least):.1f} ms, ratio {statistics.median(ratios):.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
