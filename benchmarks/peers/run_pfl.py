"""FedAvg by pfl; two workers with ``python -m torch.distributed.run --standalone --nproc_per_node 2 run_pfl.py``."""

import time

from work import BATCH, DEVICES, EACH, EPOCHS, LR, PER_ROUND, lenet5, report, samples, wanted

import torch  # isort: skip
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Classifier(nn.Module):
    """What pfl asks of a module: its loss and its metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.network = lenet5()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return nn.functional.cross_entropy(self.network(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        self.eval()
        return {"loss": Weighted(nn.functional.cross_entropy(self.network(x), y, reduction="sum").item(), len(y))}


class Clock(TrainingProcessCallback):
    """When the training began and when each round ended."""

    def __init__(self) -> None:
        self.first, self.ends = 0.0, []

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.first = time.time()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.ends.append(time.time())
        return False, Metrics()


def main() -> None:
    torch.set_num_threads(1)
    rounds = 1 + max(1, wanted().trips // PER_ROUND)
    x, y = samples()
    shards = {d: [x[d * EACH : (d + 1) * EACH], y[d * EACH : (d + 1) * EACH]] for d in range(DEVICES)}
    network, clock = Classifier(), Clock()
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    devices = FederatedDataset(lambda d: Dataset(shards[d]), get_user_sampler("random", list(shards)))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**6, train_cohort_size=PER_ROUND, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=devices, val_data=devices),
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=EPOCHS, local_learning_rate=LR, local_batch_size=BATCH),
        model_eval_params=NNEvalHyperParams(local_batch_size=BATCH),
        callbacks=[clock],
    )
    workers = get_framework_module().distributed
    if workers.global_rank == 0:
        seconds = clock.ends[-1] - clock.ends[0]
        report("pfl FedAvg", workers.world_size, clock.first, seconds, (rounds - 1) * PER_ROUND)


if __name__ == "__main__":
    main()
