"""Local training as a pure function: (weights, shard, rule, random stream) -> (weights, statistics).

One loop serves every method; what a method changes, it changes through its ``LocalRule``.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from freshet.core.messages import NOTHING, Fresh, Number
from freshet.core.method import LocalRule, Memory
from freshet.core.streams import stream, torch_seed
from freshet.core.trip import DeviceTrip
from freshet.core.vectors import Vector, is_finite
from freshet.errors import ConfigError
from freshet.training.batches import FederatedData
from freshet.training.flat import Factory, FlatModel, view
from freshet.training.options import TrainingOptions
from freshet.training.rewrite import faster


class Work(NamedTuple):
    """All that one local training needs: same work, same bits, wherever it runs."""

    trip: DeviceTrip
    weights: Vector
    fresh: Fresh | None
    rule: LocalRule
    memory: Memory
    instruction: Mapping[str, Number] = NOTHING
    seconds: float | None = None
    #: Stop after the merge: only its numbers are wanted.
    merge_only: bool = False


class Outcome(NamedTuple):
    """The trained model, the SGD steps taken, the rule's report, and what the device now remembers."""

    weights: Vector
    steps: int
    report: dict[str, Number]
    memory: Memory
    diverged: bool = False


class Score(NamedTuple):
    """A model on the test samples."""

    accuracy: float
    loss: float


class _Features(nn.Module):
    """Calls a network's ``features`` where ``functional_call`` would call its ``forward``."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.network.features(x)  # type: ignore[operator]
        return z


class LocalTraining:
    """One trip under way; what a ``LocalRule`` sees (see ``freshet.core.method.Local``)."""

    def __init__(self, flat: FlatModel, data: FederatedData, options: TrainingOptions, seed: int, work: Work) -> None:
        self.flat, self.data, self.options, self.rule = flat, data, options, work.rule
        self.model, self.layout, self.learnable = flat.module, flat.layout, flat.layout.learnable
        self.weights, self.gradient = flat.weights, flat.gradient
        self.trip, self.instruction, self._seconds = work.trip, work.instruction, work.seconds
        self.memory: Memory = dict(work.memory)
        self.report: dict[str, Number] = {}
        self.scratch: dict[str, Any] = {}
        flat.load(work.weights)
        self.base = self.tensor(work.weights[: self.learnable])
        self.steps = 0
        self._shard = torch.from_numpy(data.shards[work.trip.device])
        self._rng = stream(seed, "batches", work.trip.device, work.trip.trip)
        self._augment = stream(seed, "augment", work.trip.device, work.trip.trip) if options.augment else None
        self._order: Tensor | None = None
        self._velocity: Tensor | None = None

    # ---- the loop

    def epoch(self) -> None:
        """One pass over the device's samples in a new random order."""
        order, self._order = self._next_order(), None
        for index in torch.split(order, self.options.batch_size):
            x, y = self.data.train.take(index, self._augment)
            self._step(self.rule.loss(self, x, y))
        self.steps += math.ceil(len(order) / self.options.batch_size)

    def _step(self, loss: Tensor) -> None:
        """SGD as in torch: the rule's terms, weight decay, momentum, then the step; on flat vectors."""
        options = self.options
        if not (self.rule.adjusts_gradient or options.weight_decay or options.momentum):
            gradients = self.flat.gradients_of(loss)
            with torch.no_grad():
                torch._foreach_add_(self.flat.parameters, gradients, alpha=-self.trip.lr)
            return
        self.flat.collect(loss)
        with torch.no_grad():
            w, g = self.flat.learnable, self.gradient
            if options.weight_decay and self.rule.decay_first:
                g.add_(w, alpha=options.weight_decay)
            if self.rule.adjusts_gradient:
                self.rule.adjust(self)
            if options.weight_decay and not self.rule.decay_first:
                g.add_(w, alpha=options.weight_decay)
            if options.momentum:
                if self._velocity is None:
                    self._velocity = g.clone()
                else:
                    self._velocity.mul_(options.momentum).add_(g)
                g = self._velocity
            w.add_(g, alpha=-self.trip.lr)

    def _next_order(self) -> Tensor:
        if self._order is None:
            order = self._shard[torch.from_numpy(self._rng.permutation(len(self._shard)))]
            self._order = order.to(self.weights.device)
        return self._order

    # ---- for rules

    @property
    def seconds(self) -> float | None:
        """Mean duration of the device's completed trips; None before the first."""
        if not self.rule.timed:
            raise AttributeError("durations are only kept for rules that say timed = True")
        return self._seconds

    def tensor(self, array: Vector) -> Tensor:
        """A copy of an array where the model is."""
        return torch.from_numpy(array).to(self.weights.device, copy=True)

    def snapshot(self) -> Vector:
        """The local model as it is now (a copy, counters included)."""
        return self.flat.dump()

    def become(self, weights: Vector) -> None:
        """Go on from these weights."""
        self.flat.load(weights)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """The first mini-batch of the coming epoch (it will be trained on as well)."""
        return self.data.train.take(self._next_order()[: self.options.batch_size])

    def gradient_at(self, x: Tensor, y: Tensor) -> tuple[float, Vector]:
        """Plain loss and its gradient at the model as it is, without touching its statistics."""
        self.model.eval()
        loss = cross_entropy(self.model(x), y)
        self.flat.collect(loss)
        self.model.train()
        gradient: Vector = self.gradient.cpu().numpy().copy()
        return loss.item(), gradient

    def frozen(self, weights: Vector) -> Callable[[Tensor], Tensor]:
        """``features`` of another model of the same shape, in evaluation mode and without gradient."""
        tensor, network = self.tensor(weights), _Features(self.model)
        entries = (entry for entry in self.layout.entries if entry.kind != "counter")
        state = {f"network.{entry.name}": view(tensor, entry) for entry in entries}

        def features(x: Tensor) -> Tensor:
            self.model.eval()
            with torch.no_grad():
                z: Tensor = functional_call(network, state, (x,))
            self.model.train()
            return z

        return features


class Trainer:
    """A model, the data and the settings, built once per process; trains trips and scores models."""

    def __init__(self, factory: Factory, data: FederatedData, options: TrainingOptions, seed: int) -> None:
        device = chosen_device(options.device)
        self.flat = FlatModel(faster(_initial(factory, seed)), device)
        self.data, self.options, self.seed = data.to(device), options, seed

    def train(self, work: Work) -> Outcome:
        """Run a whole trip: train to the slot, merge the fresh model if there is one, train on."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(self.seed, "torch", work.trip.device, work.trip.trip))
            work.rule.check(self.flat.module)
            self.flat.reset_hidden()
            self.flat.module.train()
            local = LocalTraining(self.flat, self.data, self.options, self.seed, work)
            work.rule.begin(local)
            for epoch in range(1, work.trip.epochs + 1):
                if work.fresh is not None and work.trip.slot is not None and epoch == work.trip.slot.epoch:
                    work.rule.merge(local, work.trip, work.fresh)
                    if work.merge_only:
                        break
                local.epoch()
            work.rule.finish(local)
        weights = self.flat.dump()
        if is_finite(weights) and all(math.isfinite(value) for value in local.report.values()):
            return Outcome(weights, local.steps, local.report, local.memory)
        return Outcome(weights, local.steps, local.report, work.memory, diverged=True)  # teaches the device nothing

    def evaluate(self, weights: Vector) -> Score:
        """Accuracy and mean loss on the test samples."""
        self.flat.load(weights)
        self.flat.reset_hidden()
        self.flat.module.eval()
        right, total = 0, 0.0
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(self.seed, "test"))  # for models that draw random numbers even then
            for x, y in self.data.test.chunks(500):
                logits = self.flat.module(x)
                right += int((logits.argmax(1) == y).sum())
                total += float(cross_entropy(logits, y, reduction="sum"))
        count = len(self.data.test.y)
        return Score(right / count, total / count)


def chosen_device(wish: str) -> str:
    """The torch device to train on; ``auto`` takes an accelerator if there is one."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wish == "auto":
        return next(name for name, there in found.items() if there)
    if not found[wish]:
        raise ConfigError("training.device", f"there is no {wish} device here; use auto or cpu")
    return wish


def initial_weights(factory: Factory, seed: int) -> Vector:
    """The first global model: the factory's own initialisation under a keyed seed."""
    return FlatModel(_initial(factory, seed)).dump()


def _initial(factory: Factory, seed: int) -> nn.Module:
    """A module with the same numbers in every process, those outside its saved state included."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(seed, "model"))
        return factory()
