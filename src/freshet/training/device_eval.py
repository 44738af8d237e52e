"""Evaluate the global model on each device, unchanged or after some local steps.

Where parts of the model stay on the devices, or a method gives each device a model of its own, a device is evaluated
with its own.

A device with its own test samples scores their mean. Any other device is scored on the common test set, reweighted to
its mix of classes. With shares ``p_k(c)`` of its training samples and scores ``s_i`` of the ``N_c`` test samples of
class c, device k scores

    S_k = sum_c p_k(c) 1/N_c sum_{i: y_i = c} s_i.

New samples of device k would score this on average if devices differ only in their mix of classes. ``p_k`` leaves out
classes that are not in the test set. A device that has only such classes has no score (NaN).
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from freshet.core.messages import Assignment
from freshet.core.method import LocalRule, Memory
from freshet.core.streams import stream, torch_seed
from freshet.core.vectors import Vector
from freshet.data.adapters import own_draws
from freshet.training.batches import TEST_RECORDS, TEST_ROWS, FederatedData, RecordSamples, Samples
from freshet.training.trip import LocalTrip, Phase, torch_states

if TYPE_CHECKING:
    from freshet.training.trainer import Trainer


Floats = NDArray[np.float64]


class DeviceEvaluation(NamedTuple):
    """A global model to score on some devices. The same evaluation gives the same bits in every worker."""

    weights: Vector
    version: int
    devices: Sequence[int]
    #: Local steps before scoring, at the learning rate ``lr`` (0: none).
    steps: int = 0
    lr: float = 0.0
    #: What each device remembers, where devices use models of their own, and the rule that knows these models.
    memories: Sequence[Memory] = ()
    rule: LocalRule = LocalRule()


class DeviceScores(NamedTuple):
    """The scores of the devices of an evaluation, in its order."""

    accuracy: Floats
    loss: Floats


class Share(NamedTuple):
    """The test samples of one device: their indices, and their weights, which sum to 1."""

    samples: NDArray[np.int64]
    weight: Floats

    def score(self, values: Floats) -> float:
        """``sum_i w_i s_i``, given the scores of these samples."""
        return float((self.weight * values).sum()) if len(self.samples) else math.nan


def score_samples(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Accuracy (0 or 1) and loss of each sample."""
    return (output.argmax(1) == y).double(), cross_entropy(output, y, reduction="none").double()


def evaluation_samples(data: FederatedData) -> Samples | RecordSamples:
    """The samples that ``Share`` indexes."""
    return data.test if data.device_tests is None else data.device_tests.samples


def device_share(data: FederatedData, device: int) -> Share:
    """A device's own test set, or the part of the common one that has its classes."""
    if data.device_tests is not None:
        own = data.device_tests.shards[device]
        return Share(own, np.full(len(own), 1.0 / max(1, len(own))))
    y = data.test.y.cpu().numpy()
    held = data.train.y.cpu().numpy()[data.shards[device]]
    classes = 1 + max(int(y.max()), int(held.max()))
    there = np.bincount(y, minlength=classes)
    mix = np.where(there > 0, np.bincount(held, minlength=classes), 0)
    index = np.flatnonzero(mix[y] > 0)
    return Share(index, (mix / np.maximum(there, 1) / max(1, mix.sum()))[y[index]])


def evaluate_devices(trainer: "Trainer", evaluation: DeviceEvaluation) -> DeviceScores:
    """Score the devices of an evaluation. Without local steps, all share one pass over the test samples."""
    data = trainer.data
    if evaluation.memories:
        pairs = zip(evaluation.devices, evaluation.memories, strict=True)
        return _stack(_evaluate_one(trainer, evaluation, device, memory) for device, memory in pairs)
    if evaluation.steps:
        return _stack(_evaluate_one(trainer, evaluation, device, {}) for device in evaluation.devices)
    trainer.trip = None
    trainer.flat.load(evaluation.weights)
    trainer.flat.load_own(None)
    trainer.flat.reset_hidden()
    everything = np.arange(len(evaluation_samples(data).y))
    accuracy, loss = _score_tests(trainer, trainer.flat.module, everything)
    shares = (device_share(data, device) for device in evaluation.devices)
    return _stack((share.score(accuracy[share.samples]), share.score(loss[share.samples])) for share in shares)


def _stack(pairs: Iterable[tuple[float, float]]) -> DeviceScores:
    return DeviceScores(*np.array(list(pairs), dtype=np.float64).reshape(-1, 2).T.copy())


def _score_tests(trainer: "Trainer", module: nn.Module, index: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Accuracy and loss of these test samples under a model."""
    samples, task = evaluation_samples(trainer.data), trainer.task
    size = TEST_RECORDS if isinstance(samples, RecordSamples) else TEST_ROWS
    where, parts = torch.from_numpy(index).to(trainer.flat.weights.device), []
    module.eval()
    with torch.no_grad(), own_draws(torch_seed(trainer.seed, "test")):  # models and data may draw even then
        for chunk in torch.split(where, size):
            x, y = samples.take(chunk)
            rows = task.arrange(task.output(module, x, y), y)
            parts.append([values.cpu().numpy() for values in score_samples(*rows)])
    accuracy, loss = (np.concatenate(column) for column in zip(*parts, strict=True))
    return accuracy, loss


def _evaluate_one(trainer: "Trainer", evaluation: DeviceEvaluation, device: int, memory: Memory) -> tuple[float, float]:
    """Accuracy and loss of a device with its own model and parts, after the local steps if there are any."""
    share = device_share(trainer.data, device)
    if not len(share.samples):
        return math.nan, math.nan
    own = evaluation._replace(weights=evaluation.rule.personal_model(memory, evaluation.weights))
    trip = PersonalTrip(trainer, own, device, memory)
    trip.train(evaluation.steps)
    accuracy, loss = _score_tests(trainer, trip.model, share.samples)
    return share.score(accuracy), share.score(loss)


class PersonalTrip(LocalTrip):
    """Local training for an evaluation only: the plain rule, its own random streams, no memory, no upload."""

    def __init__(self, trainer: "Trainer", evaluation: DeviceEvaluation, device: int, memory: Memory) -> None:
        assignment = Assignment(device, 0, evaluation.version, 0, evaluation.weights, 1, evaluation.lr)
        super().__init__(trainer, assignment, (), LocalRule(), memory)
        seed, key = trainer.seed, (device, evaluation.version)
        self._rng = stream(seed, "rehearsal", *key)
        self._augment = stream(seed, "rehearsal augment", *key) if self.options.augment else None
        self._torch = torch_states(torch_seed(seed, "rehearsal torch", *key), self.weights.device.type)

    def train(self, steps: int) -> None:
        """Train on ``steps`` mini-batches. Each pass over the device's samples has a new random order."""
        data = self._trainer.data.train
        with self._working(Phase.TO_SLOT):
            while self.steps < steps:
                order, self._order = self._next_order(), None
                for index in torch.split(order, self.options.batch_size)[: steps - self.steps]:
                    self._train_on(*data.take(index, self._augment))
                    self.steps += 1


def summarise_scores(values: Floats) -> dict[str, float | None]:
    """Median, 10th percentile, worst, best, and Jain's fairness index ``(sum a)^2 / (n sum a^2)`` over devices.

    The index is 1 if all scores are equal (also at 0), and 1/n if one device has everything. Devices without a score
    are left out. If no device has one, all values are None.
    """
    there = values[np.isfinite(values)]
    if not len(there):
        return dict.fromkeys(("median", "p10", "worst", "best", "jain"))
    squares = float((there**2).sum())
    return {
        "median": float(np.median(there)),
        "p10": float(np.percentile(there, 10)),
        "worst": float(there.min()),
        "best": float(there.max()),
        "jain": float(there.sum()) ** 2 / (len(there) * squares) if squares else 1.0,
    }
