"""SCAFFOLD, FedNova and FedAvgM against FLGo's: the same initial model, devices, batches; do the models agree?

Freshet runs on the digits (tanh MLP 64-32-16-10, six label-skewed devices, three per round). Then FLGo's own server and
client classes go through the same rounds with the same batches. Printed is the largest over all rounds of
``max |w - w'| / max |w - w0|``, and beside it the same for FedAvg in the place of the method, to see what would show.

    pip install -c constraints.txt flgo==0.4.4 && python benchmarks/peers/agreement.py    (beside Freshet)
"""

import copy
import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from flgo.utils import fmodule
from sklearn.datasets import load_digits
from torch import Tensor, nn

from freshet import Federation
from freshet.core.server import VersionStore
from freshet.core.streams import stream
from freshet.core.vectors import Vector
from freshet.runs.reader import RunDirectory
from freshet.training.network import FlatModel

DEVICES, PER_ROUND, ROUNDS, BATCH, LR, SEED = 6, 3, 12, 20, 0.1, 5
OPTIONS: dict[str, dict[str, Any]] = {"scaffold": {"eta_g": 0.8}, "fednova": {}, "fedavgm": {"beta1": 0.5}}
#: The same in FLGo's words.
THEIRS: dict[str, dict[str, Any]] = {"scaffold": {"eta": 0.8}, "fedavgm": {"beta": 0.5}}


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 10))


class Network(fmodule.FModule):  # type: ignore[misc]
    """The same for FLGo."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)  # type: ignore[no-any-return]


def ours(method: str) -> tuple[Federation, list[Vector], list[list[tuple[int, int]]]]:
    """A run of Freshet: every version, and who took part in each round with which trip."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    federation = Federation(
        method={"name": method, **OPTIONS.get(method, {})},
        model=network,
        train=(x[:1400], y[:1400]),
        test=(x[1400:], y[1400:]),
        devices=DEVICES,
        data={"partition": "dirichlet", "concentration": 0.5, "min_samples": 20},
        training={"epochs": 2, "batch_size": BATCH, "lr": LR, "schedule": "constant"},
        run={"seed": SEED, "rounds": ROUNDS, "per_round": PER_ROUND, "eval_every": 1000.0, "executor": "serial"},
    )
    versions: list[Vector] = []
    advance = VersionStore.advance

    def noting(self: VersionStore, weights: Vector) -> int:
        versions.extend([self.weights, weights] if not versions else [weights])
        return advance(self, weights)

    VersionStore.advance = noting  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            events = list(RunDirectory(federation.run(out=Path(folder) / "run").directory).events())
    finally:
        VersionStore.advance = advance  # type: ignore[method-assign]
    rounds: list[list[tuple[int, int]]] = [[] for _ in range(ROUNDS)]
    for event in events:
        if event["kind"] == "trigger" and event["round"] <= ROUNDS:
            rounds[event["round"] - 1].append((event["device"], event["trip"]))
    return federation, versions, rounds


class Device:
    """What FLGo's clients need, with Freshet's batches."""

    def __init__(self, federation: Federation, device: int) -> None:
        self.x, self.y = federation.dataset.x_train, federation.dataset.y_train
        self.shard, self.device_number = federation.shards[device], device

    def batches(self, trip: int) -> Iterator[tuple[Tensor, Tensor]]:
        rng = stream(SEED, "batches", self.device_number, trip)
        for _ in range(2):
            order = self.shard[rng.permutation(len(self.shard))]
            for start in range(0, len(order), BATCH):
                taken = order[start : start + BATCH]
                yield torch.from_numpy(self.x[taken]), torch.from_numpy(self.y[taken]).long()

    def put_into(self, client: Any) -> None:
        """Everything but the batches."""
        client.learning_rate, client.weight_decay, client.momentum, client.clip_grad = LR, 0.0, 0.0, 0.0
        client.device, client.datavol, client.c = torch.device("cpu"), len(self.shard), None
        client.calculator = SimpleNamespace(
            get_optimizer=lambda model, lr, **_: torch.optim.SGD(model.parameters(), lr=lr),
            compute_loss=lambda model, batch: {"loss": nn.functional.cross_entropy(model(batch[0]), batch[1])},
        )

    def get_ready(self, client: Any, trip: int) -> None:
        """The batches of a trip."""
        coming = list(self.batches(trip))
        batches = iter(coming)
        client.num_steps, client.get_batch_data = len(coming), lambda: next(batches)


def theirs(method: str, federation: Federation, rounds: list[list[tuple[int, int]]], w0: Vector) -> list[Vector]:
    """The models that FLGo's server and clients make of the same rounds."""
    room = importlib.import_module(f"flgo.algorithm.{method}")
    devices = [Device(federation, device) for device in range(DEVICES)]
    clients = [object.__new__(room.Client) for _ in devices]
    for device, client in zip(devices, clients, strict=True):
        device.put_into(client)
    flat, server, made = FlatModel(network()), object.__new__(room.Server), [w0]
    flat.load(w0)
    server.model, server.clients, server.num_clients, server.device = Network(), clients, DEVICES, "cpu"
    server.model.network.load_state_dict(flat.module.state_dict())
    server.aggregation_option = "over those who take part"  # as none of its three names does: its last branch
    server.init_algo_para = lambda _: vars(server).update(THEIRS.get(method, {}))
    server.initialize()
    for members in rounds:
        _let_meet(server, clients, devices, members)
        server.iterate()
        flat.module.load_state_dict(server.model.network.state_dict())
        made.append(flat.dump())
    return made


def _let_meet(server: Any, clients: list[Any], devices: list[Device], members: list[tuple[int, int]]) -> None:
    """The server's next round is one with these devices and trips."""

    def communicate(_: object) -> dict[str, list[Any]]:
        answers = []
        for device, trip in members:
            devices[device].get_ready(clients[device], trip)
            answers.append(clients[device].reply(copy.deepcopy(server.pack(device))))
        return {name: [answer[name] for answer in answers] for name in answers[0]}

    server.sample = lambda: [device for device, _ in members]
    server.received_clients, server.communicate = server.sample(), communicate


def difference(a: list[Vector], b: list[Vector]) -> float:
    """The largest over all versions of ``max |w - w'| / max |w - w0|``."""
    return max(float(np.abs(u - v).max() / np.abs(v - b[0]).max()) for u, v in zip(a[1:], b[1:], strict=True))


def main() -> None:
    print(f"{'method':10} {'rounds':>6} {'difference':>11} {'FedAvg instead':>15}")
    for method in ("fedavg", *OPTIONS):
        federation, versions, rounds = ours(method)
        mine, other = versions, theirs(method, federation, rounds, versions[0])
        plain = theirs("fedavg", federation, rounds, versions[0])
        print(f"{method:10} {len(rounds):6} {difference(mine, other):11.1e} {difference(mine, plain):15.1e}")


if __name__ == "__main__":
    main()
