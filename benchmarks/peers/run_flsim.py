"""FedBuff by FLSim, whose asynchronous trainer is serial ("distributed training not supported").

FLSim 0.1.0 was written for Python 3.10 and older: its configurations are defaults of one another, which dataclasses
refuse since 3.11 unless they have a hash. `dataclasses_with_a_hash` gives them one; nothing of FLSim's own is changed.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from work import BATCH, DEVICES, EACH, EPOCHS, LR, PER_ROUND, lenet5, report, samples, wanted

import hydra  # noqa: F401  # isort: skip
import omegaconf
import opacus  # noqa: F401  # imported before, so that the change below reaches FLSim alone
import torch
from torch import Tensor, nn


@contextmanager
def dataclasses_with_a_hash() -> Iterator[None]:
    plain = dataclasses.dataclass
    dataclasses.dataclass = functools.partial(plain, unsafe_hash=True)
    try:
        yield
    finally:
        dataclasses.dataclass = plain


with dataclasses_with_a_hash():
    import flsim.configs  # noqa: F401
    from flsim.clients.base_client import ClientConfig
    from flsim.data.data_provider import FLDataProviderFromList
    from flsim.interfaces.model import IFLModel
    from flsim.optimizers.async_aggregators import FedAvgWithLRFedBuffAggregatorConfig
    from flsim.optimizers.local_optimizers import LocalOptimizerSGDConfig
    from flsim.trainers.async_trainer import AsyncTrainer, AsyncTrainerConfig
    from flsim.utils.async_trainer.training_event_generator import (
        AsyncTrainingEventGeneratorConfig,
        PoissonAsyncTrainingStartTimeDistrConfig,
    )
    from flsim.utils.simple_batch_metrics import FLBatchMetrics
    from flsim.utils.timing.training_duration_distribution import PerUserHalfNormalDurationDistributionConfig


class Ended(Exception):
    """Enough trips were made; FLSim itself ends only after one trip per device."""


class Timed(AsyncTrainer):
    """FLSim's own trainer, which notes when the first trip began and when each one ended."""

    def __init__(self, trips: int, **given: object) -> None:
        super().__init__(**given)
        self.trips, self.moments = trips, []

    def train_and_update_global_model(self, client: object) -> None:
        self.moments = self.moments or [time.time()]
        super().train_and_update_global_model(client)
        self.moments.append(time.time())
        if len(self.moments) > self.trips:
            raise Ended


class Classifier(IFLModel):
    """What FLSim asks of a model."""

    def __init__(self) -> None:
        self.network = lenet5()

    def fl_forward(self, batch: tuple[Tensor, Tensor]) -> FLBatchMetrics:
        x, y = batch
        output = self.network(x)
        loss = nn.functional.cross_entropy(output, y)
        return FLBatchMetrics(loss=loss, num_examples=len(y), predictions=output, targets=y, model_inputs=x)

    def fl_create_training_batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch

    def fl_get_module(self) -> nn.Module:
        return self.network

    def fl_cuda(self) -> None:
        raise NotImplementedError("the comparison is on the processor")

    def get_eval_metrics(self, batch: tuple[Tensor, Tensor]) -> FLBatchMetrics:
        with torch.no_grad():
            return self.fl_forward(batch)

    def get_num_examples(self, batch: tuple[Tensor, Tensor]) -> int:
        return len(batch[1])


def trainer(trips: int, model: Classifier) -> Timed:
    config = AsyncTrainerConfig(
        epochs=math.ceil(trips / DEVICES),
        do_eval=False,
        report_train_metrics=False,
        client=ClientConfig(epochs=EPOCHS, optimizer=LocalOptimizerSGDConfig(lr=LR)),
        aggregator=FedAvgWithLRFedBuffAggregatorConfig(lr=1.0, buffer_size=PER_ROUND),
        training_event_generator=AsyncTrainingEventGeneratorConfig(
            training_start_time_distribution=PoissonAsyncTrainingStartTimeDistrConfig(training_rate=PER_ROUND),
            duration_distribution_generator=PerUserHalfNormalDurationDistributionConfig(training_duration_sd=1.0),
        ),
    )
    return Timed(trips, model=model, **omegaconf.OmegaConf.structured(config))


def main() -> None:
    torch.set_num_threads(1)
    trips, model = PER_ROUND + wanted().trips, Classifier()
    x, y = samples()
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    each = EACH // BATCH
    shards = [batches[d * each : (d + 1) * each] for d in range(DEVICES)]
    running = trainer(trips, model)
    provider = FLDataProviderFromList(shards, shards[:1], shards[:1], model)
    with suppress(Ended):
        running.train(provider, metrics_reporter=None, num_total_users=DEVICES)
    moments = running.moments
    report("FLSim FedBuff", 1, moments[0], moments[-1] - moments[PER_ROUND], trips - PER_ROUND)


if __name__ == "__main__":
    main()
