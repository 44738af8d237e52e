"""The work that every peer does, without Freshet, which their environments do not have.

The network and the shapes are those of ``benchmarks/simulator.py``; a peer's script prints one line of JSON by
`report`.
"""

import os
import time

STARTED = float(os.environ.get("PEERS_STARTED", time.time()))  # before torch is imported: that belongs to the start

import argparse  # noqa: E402
import json  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

DEVICES, EACH, EPOCHS, BATCH, LR, CLASSES = 100, 600, 5, 50, 0.03, 10
PER_ROUND = 10  # devices of a synchronous round; uploads that an asynchronous server waits for
PARAMETERS = 61_706


def lenet5() -> nn.Sequential:
    """The LeNet5 of Freshet for one channel of 28 x 28."""
    torch.manual_seed(1)
    network = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(1),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, CLASSES),
    )
    assert sum(p.numel() for p in network.parameters()) == PARAMETERS, "not the network of the other contenders"
    return network


def samples(count: int = DEVICES * EACH) -> tuple[Tensor, Tensor]:
    """Images and labels, normalised; device d has samples d * EACH to (d + 1) * EACH."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 256, (count, 1, 28, 28), dtype=np.uint8))
    return (x.float() / 255 - 0.5) / 0.5, torch.from_numpy(rng.integers(0, CLASSES, count))


def wanted() -> argparse.Namespace:
    """From the command line: how many trips to measure (a first round is trained besides and not counted), workers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trips", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2, help="where the script starts them itself")
    parser.add_argument("--method", default="fedavg", help="of Freshet")
    return parser.parse_args()


def report(peer: str, workers: int, first: float, seconds: float, trips: int) -> None:
    """One line: ``first`` is the time of day when the first trip began, ``seconds`` what ``trips`` trips took."""
    figures = {"trips": trips, "seconds_per_trip": seconds / trips, "start": first - STARTED}
    print(json.dumps({"peer": peer, "workers": workers} | figures), flush=True)
