"""FedAvg by FLGo, with two worker processes (``--workers 1``: one trip after the other in this process)."""

import tempfile
import time
from pathlib import Path

from work import BATCH, DEVICES, EPOCHS, LR, PER_ROUND, lenet5, report, wanted

import flgo  # isort: skip
import flgo.algorithm.fedavg as fedavg
import flgo.benchmark.partition as partition
import synthetic_task
import torch
from flgo.utils import fmodule

ROUNDS: list[tuple[float, float]] = []


class Server(fedavg.Server):
    """FLGo's own, which notes when each round began and ended; tests of the model lie between them."""

    def iterate(self) -> object:
        begun = time.time()
        done = super().iterate()
        ROUNDS.append((begun, time.time()))
        return done


class Algorithm:
    """What FLGo takes as an algorithm."""

    Server, Client = Server, fedavg.Client


class Network(fmodule.FModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = lenet5()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


class Model:
    """What FLGo takes as a model."""

    @staticmethod
    def init_local_module(_: object) -> None:
        """Devices keep none of their own."""

    @staticmethod
    def init_global_module(holder: object) -> None:
        if "Server" in holder.__class__.__name__:
            holder.model = Network().to(holder.device)


def main() -> None:
    given = wanted()
    rounds = 1 + max(1, given.trips // PER_ROUND)
    with tempfile.TemporaryDirectory() as folder:
        task = str(Path(folder) / "task")
        flgo.gen_task_by_(synthetic_task, partition.IIDPartitioner(num_clients=DEVICES), task)
        option = {
            "num_rounds": rounds,
            "proportion": PER_ROUND / DEVICES,
            "sample": "uniform",
            "num_epochs": EPOCHS,
            "batch_size": BATCH,
            "learning_rate": LR,
            "train_holdout": 0.0,
            "eval_interval": 10**6,
            "num_parallels": given.workers,
            "parallel_type": "p",
            "torch_num_threads": 1,
            "no_log_console": True,
        }
        flgo.init(task, Algorithm, option, model=Model).run()
    seconds = sum(end - begin for begin, end in ROUNDS[1:])
    report("FLGo FedAvg", given.workers, ROUNDS[0][0], seconds, (rounds - 1) * PER_ROUND)


if __name__ == "__main__":
    main()
