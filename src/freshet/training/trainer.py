"""The trainer of one process. It holds a model, the data and the settings, trains trips and evaluates models."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from freshet.core.messages import Assignment, Fresh, Slot
from freshet.core.method import LocalRule, Memory
from freshet.core.streams import torch_seed
from freshet.core.vectors import Vector
from freshet.data.adapters import own_draws
from freshet.errors import ConfigError
from freshet.training.batches import FederatedData
from freshet.training.device_eval import DeviceEvaluation, DeviceScores, evaluate_devices
from freshet.training.fast import accelerate
from freshet.training.network import Factory, FlatModel, enable_checkpointing, initial_module, with_autocast
from freshet.training.optimisers import make_optimiser
from freshet.training.options import TrainingOptions
from freshet.training.outgoing import UNCHANGED, Outgoing, choose_attackers
from freshet.training.own_loop import LoopTrip, TrainingLoop
from freshet.training.task import TASKS, Score, Task
from freshet.training.trip import LocalTrip, TripOutcome


class TripInput(NamedTuple):
    """Everything that one trip needs. The same input gives the same bits in every worker."""

    assignment: Assignment
    #: When the device asks, and the answers: a newer model, or None if there was none.
    slots: tuple[Slot, ...]
    fresh: tuple[Fresh | None, ...]
    rule: LocalRule
    memory: Memory
    #: Mean duration of the device's completed trips, for rules with ``timed = True``.
    seconds: float | None = None
    #: Stop after the last answer, because only the numbers of the merges are needed.
    merge_only: bool = False


class Trainer:
    """Runs one trip at a time. Each process builds one trainer per setup."""

    def __init__(
        self,
        factory: Factory,
        data: FederatedData,
        options: TrainingOptions,
        seed: int,
        task: Task | None = None,
        outgoing: Outgoing = UNCHANGED,
        loop: TrainingLoop | None = None,
        place: int | None = None,
    ) -> None:
        self.task = TASKS[options.task] if task is None else task
        device = pick_device(options.device)
        check_precision(options.precision, device)
        if place is not None:
            deal_gpu(device, place)
        #: The user's own training loop, if there is one.
        self.loop = loop
        self._build, self._device = partial(initial_module, factory, seed), device
        self.flat = FlatModel(self._prepare(self._build(), options), device)
        self.data, self.options, self.seed = data.to(device), options, seed
        self.optimiser = make_optimiser(options)
        #: Processes a trained model before it is sent.
        self.outgoing = outgoing
        #: Devices that attack, for experiments.
        self.attackers = choose_attackers(outgoing.attack, seed, len(data.shards))
        self.classes = 1 + int(data.train.y.max()) if self.attackers and data.train.y.numel() else 0
        #: The trip that uses the module now.
        self.trip: LocalTrip | None = None

    def _prepare(self, module: nn.Module, options: TrainingOptions) -> nn.Module:
        """The module as the settings want it. The user's own loop gets it as it is."""
        if self.loop is not None:
            return module
        if options.gradient_checkpointing:
            enable_checkpointing(module)
        if options.precision == "bf16":
            return with_autocast(module, self._device)  # compiled layers compute in float32 only
        return accelerate(module) if options.fast else module

    def train(self, work: TripInput) -> TripOutcome:
        """Run a whole trip: train to each slot, merge the fresh model if there is one, finish."""
        trip = self.begin(work.assignment, work.slots, work.rule, work.memory, work.seconds)
        answers = list(work.fresh)

        def answer() -> bool:
            trip.merge(answers.pop(0))
            return bool(answers) or not work.merge_only

        return trip.finish() if trip.advance(answer) else trip.outcome()

    def begin(
        self,
        assignment: Assignment,
        slots: Sequence[Slot],
        rule: LocalRule,
        memory: Memory,
        seconds: float | None = None,
    ) -> LocalTrip:
        """A new trip: of the built-in loop, or of the user's own."""
        kind = LocalTrip if self.loop is None else LoopTrip
        return kind(self, assignment, slots, rule, memory, seconds)

    def flat_for_trip(self) -> FlatModel:
        """The model of a new trip. The user's loop gets a new module each time, since its code may leave traces."""
        return self.flat if self.loop is None else FlatModel(self._build(), self._device)

    def evaluate(self, weights: Vector) -> Score:
        """The task's metrics and the mean loss on the test samples."""
        self.trip = None
        self.flat.load(weights)
        self.flat.load_own(None)
        self.flat.reset_hidden()
        module = self.flat.module.eval()
        with torch.no_grad(), own_draws(torch_seed(self.seed, "test")):  # models and data may draw even then
            return self.task.score((self.task.output(module, x, y), y) for x, y in self.data.test.chunks())

    def evaluate_devices(self, evaluation: DeviceEvaluation) -> DeviceScores:
        """Accuracy and loss on the test samples of each device (``device_eval.py``)."""
        return evaluate_devices(self, evaluation)


def pick_device(name: str) -> str:
    """The torch device to train on. ``auto`` takes an accelerator if there is one."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(device for device, available in found.items() if available)
    if not found[name]:
        raise ConfigError("training.device", f"this machine has no {name} device; use auto or cpu")
    return name


def deal_gpu(device: str, place: int) -> None:
    """Deal workers over the machine's GPUs: worker k of this machine uses ``cuda:(k mod number)``.

    It becomes the process's current one, which ``cuda`` then means everywhere.
    """
    if device == "cuda" and torch.cuda.device_count() > 1:
        torch.cuda.set_device(place % torch.cuda.device_count())


def check_precision(precision: str, device: str) -> None:
    """Raise one sentence if a GPU has no bfloat16."""
    if precision == "bf16" and device == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError("training.precision", "this GPU cannot compute in bfloat16; use float32")


@dataclass(frozen=True)
class Setup:
    """The part of a federation that does not change. Every worker builds it once."""

    factory: Factory
    data: FederatedData
    training: TrainingOptions
    seed: int
    #: The user's task. None selects the one that ``training`` names.
    task: Task | None = None
    #: How a trained model is changed before it is sent.
    outgoing: Outgoing = UNCHANGED
    #: The user's own training loop. None selects the built-in one.
    loop: TrainingLoop | None = None

    def trainer(self, place: int | None = None) -> Trainer:
        """A trainer; ``place`` is the number of the worker that builds it, if there are several."""
        return Trainer(self.factory, self.data, self.training, self.seed, self.task, self.outgoing, self.loop, place)
