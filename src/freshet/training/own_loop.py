"""A trip that the user's own training loop carries out.

    def my_train(model, data, trip):
        optimiser = torch.optim.Adam(model.parameters(), lr=trip.lr)
        for _ in range(trip.epochs):
            for x, y in data.batches(16):
                optimiser.zero_grad()
                cross_entropy(model(x), y).backward()
                optimiser.step()
                if not trip.step():
                    return

The loop runs in one call. ``trip.step()`` calls back: where a slot is due, it asks for the fresh model and merges it in
place. So there is no second thread and nothing to save. A trip that must wait for another message ends the loop with an
exception, and trains from the start once the answer is there. The streams are keyed, so it takes the same course.
"""

import inspect
import math
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from freshet.core.messages import METRIC_PREFIX, Assignment, Fresh, Number, Slot
from freshet.core.method import LocalRule, Memory
from freshet.core.streams import torch_seed
from freshet.errors import ConfigError, RunError
from freshet.training.batches import RecordSamples
from freshet.training.network import FlatModel, tensor_view
from freshet.training.options import TrainingOptions
from freshet.training.trip import LocalTrip, Phase, get_random_state, set_random_state

if TYPE_CHECKING:
    from freshet.training.trainer import Trainer

#: The user's training: trains the model in place and returns a dict of metrics or None. It may be a generator.
TrainingLoop = Callable[[nn.Module, "DeviceData", "Trip"], Any]
#: Bounds on the metrics of a trip, within those that the server sets for a report.
MAX_METRICS, MAX_METRIC_NAME = 50, 50
#: Settings of the built-in loop that no other loop obeys, and their values without effect.
UNUSED_SETTINGS = {
    "steps": 0,
    "clip": 0.0,
    "weight_decay": 0.0,
    "precision": "float32",
    "micro_batch_size": 0,
    "gradient_checkpointing": False,
}


class TripPaused(BaseException):
    """Ends the user's loop because the trip cannot go on now."""


class Trip:
    """What the user's loop knows about its trip, and where it reports its progress."""

    def __init__(self, inner: "LoopTrip") -> None:
        self._inner = inner
        #: Steps that make an epoch. ``data.batches`` sets it. Set it yourself if your batches come from elsewhere.
        self.steps_per_epoch: int | None = None
        assignment = inner.assignment
        #: The number of the device, and the number of its trip, from 1.
        self.device, self.number = assignment.device, assignment.trip
        #: The number of devices.
        self.devices = inner.device_count
        #: Epochs to train, and the learning rate of this trip.
        self.epochs, self.lr = assignment.epochs, assignment.lr
        #: A seed of this trip's own, for libraries that want one. torch, numpy and random are seeded already.
        self.seed = inner.seed_for("trainer") % 2**32

    @property
    def steps(self) -> int:
        """Steps counted so far."""
        return self._inner.steps

    @property
    def batches_drawn(self) -> int:
        """Batches of ``data.batches`` since the last ``step``."""
        return self._inner.batches_drawn

    def step(self, count: int | None = None) -> bool:
        """Report ``count`` steps. The fresh model is merged here if it is time. False: stop training and return.

        Without a count, every batch of ``data.batches`` since the last call is a step; without such a batch, the call
        itself is one. An epoch is ``steps_per_epoch`` steps.
        """
        return self._inner.end_step(count, self.steps_per_epoch)

    def adjust(self) -> None:
        """Add the method's terms to the gradients. Call it after ``backward()``, before ``optimiser.step()``."""
        self._inner.adjust_gradients()


class DeviceData(Dataset[Any]):
    """The device's training samples, as a torch ``Dataset`` and as mini-batches in the trip's own random order."""

    def __init__(self, inner: "LoopTrip", trip: Trip, batch_size: int) -> None:
        self._inner, self._trip, self._batch_size = inner, trip, batch_size

    def __len__(self) -> int:
        return len(self._inner.shard)

    def __getitem__(self, place: int) -> Any:
        if not -len(self) <= place < len(self):
            raise IndexError(f"the device has {len(self)} samples")
        return self._inner.sample(self._inner.shard[place].view(1))

    def batches(self, size: int | None = None) -> "Batches":
        """Mini-batches of ``size`` samples (default: ``training.batch_size``). Each pass has a new random order."""
        found = Batches(self._inner, size or self._batch_size)
        self._trip.steps_per_epoch = len(found)
        return found


class Batches:
    """The device's samples in mini-batches. The last, smaller one is kept."""

    def __init__(self, inner: "LoopTrip", size: int) -> None:
        if size < 1:
            raise ValueError(f"a batch has at least one sample, but {size} was given")
        self._inner, self._size = inner, size

    def __len__(self) -> int:
        return -(-len(self._inner.shard) // self._size)

    def __iter__(self) -> Iterator[Any]:
        for index in torch.split(self._inner.take_order(), self._size):
            self._inner.batches_drawn += 1
            yield self._inner.take(index)


class LoopTrip(LocalTrip):
    """One local training by the user's loop. The device rule sees what it sees in any trip."""

    def __init__(
        self,
        trainer: "Trainer",
        assignment: Assignment,
        slots: Sequence[Slot],
        rule: LocalRule,
        memory: Memory,
        seconds: float | None = None,
    ) -> None:
        super().__init__(trainer, assignment, slots, rule, memory, seconds)
        assert trainer.loop is not None
        self._loop: TrainingLoop = trainer.loop
        self._name = getattr(trainer.loop, "__name__", type(trainer.loop).__name__)
        #: Answers that are known before the loop runs, in the order of the slots.
        self._known: list[Fresh | None] = []
        self._answer: Callable[[], bool] | None = None
        self._paused = self._in_epochs = False
        self._adjusted, self._steps_at_merge = 0, -1
        self.batches_drawn = 0

    # ---- what drivers call

    def advance(self, answer: Callable[[], bool]) -> bool:
        """Run the loop to its end. False if an answer ended it before."""
        waiting, self._known, self._paused = iter(self._known), [], False
        self._answer = lambda: self._replay(waiting, answer)
        with self._working(Phase.TO_SLOT), self._draws_of_trip():
            metrics = self._run_loop()
        self._answer = None
        if self._paused:
            return False
        self._check_complete()
        rebind(self.flat, self._name)
        self.report |= _as_metrics(self._name, metrics)
        self.epoch, self.phase = self.epochs, Phase.FINISHING
        return True

    def _replay(self, waiting: Iterator[Fresh | None], answer: Callable[[], bool]) -> bool:
        for fresh in waiting:
            self.merge(fresh)
            return True
        return answer()

    def merge(self, fresh: Fresh | None) -> None:
        """Take the server's answer: at once while the loop runs, else when it gets there."""
        self._known.append(fresh)
        if self._answer is not None:
            super().merge(fresh)

    @property
    def asks_at(self) -> Slot:
        begun = self._answer is not None or self._paused
        return self._slots[0] if begun else self.slots[len(self._known)]

    def save(self) -> dict[str, Any]:
        """The answers so far. With them the loop takes the same course again."""
        answers = [each and each._asdict() | {"vectors": dict(each.vectors)} for each in self._known]
        return {"answers": answers}

    def restore(self, saved: dict[str, Any]) -> None:
        self._known = [each and Fresh(**each) for each in saved["answers"]]

    # ---- the loop

    def _run_loop(self) -> Any:
        """Call the user's function, or step through the user's generator."""
        trip = Trip(self)
        data = DeviceData(self, trip, self.options.batch_size)
        try:
            self._ask_where_due(0)
            found = self._loop(self.model, data, trip)
            if not inspect.isgenerator(found):
                return found
            self._in_epochs = True
            return self._run_epochs(found, trip)
        except TripPaused:
            return None

    def _run_epochs(self, epochs: Generator[Any, Any, Any], trip: Trip) -> Any:
        """Train epoch by epoch. Each ``yield`` ends one; its value, if any, is the number of its steps."""
        completed = 0
        try:
            while True:
                before, count = self.steps, next(epochs)
                completed += 1
                if self.steps == before:
                    self._count(count)
                if completed > trip.epochs:
                    problem = f"yields more often than trip.epochs = {trip.epochs} times"
                    raise RunError(f"{self._name} {problem}; yield once per epoch")
                if completed < self.epochs:
                    self._ask_where_due(completed)
                elif completed < trip.epochs:  # the server wants the model now
                    return None
        except StopIteration as end:
            if completed < trip.epochs and self.batches_drawn:  # no yield after the last epoch
                self._count(None)
            return end.value
        finally:
            epochs.close()

    def end_step(self, count: int | None, steps_per_epoch: int | None) -> bool:
        """Count steps, and ask where a slot is due. Whether to train on."""
        if self._paused:
            raise TripPaused
        if self._answer is None:
            raise RunError(f"{self._name} called trip.step() after its trip; keep no trip beyond the call")
        self._count(count)
        if self._in_epochs:
            return True
        if steps_per_epoch is None or steps_per_epoch < 1:
            problem = "trip.step() cannot know how many steps make an epoch"
            raise RunError(f"{self._name}: {problem}; draw batches with data.batches(n), or set trip.steps_per_epoch")
        completed = self.steps // steps_per_epoch
        if completed >= self.epochs:
            return False
        self._ask_where_due(completed)
        return True

    def _count(self, count: Any) -> None:
        count = self.batches_drawn or 1 if count is None else count
        if type(count) is not int or count < 1:
            raise RunError(f"{self._name} reported {count!r} steps; give a whole number from 1, or nothing")
        self.steps += count
        self.batches_drawn = 0

    def _ask_where_due(self, completed: int) -> None:
        """Ask for the fresh model in every slot that has come. End the loop if there is no answer now."""
        self.epoch = completed + 1
        while self._slots and self._slots[0].epoch - 1 <= completed:
            assert self._answer is not None
            self._move_to(Phase.TO_SLOT, Phase.ASKED)
            with self._hand_over():
                goes_on = self._answer()
            if self.phase is not Phase.ASKED:
                self.phase, self._steps_at_merge = Phase.TO_SLOT, self.steps
            if not goes_on:
                self._paused = True
                raise TripPaused

    @contextmanager
    def _hand_over(self) -> Iterator[None]:
        """Let the device rule work on the model between two steps of the user's. Modes of layers stay as they are."""
        rebind(self.flat, self._name)
        training = [module for module in self.model.modules() if module.training]
        kind = self.weights.device.type
        self._torch = get_random_state(kind)
        with torch.enable_grad():
            yield
        set_random_state(self._torch)
        self.model.eval()
        for module in training:
            module.training = True

    def _check_complete(self) -> None:
        """Raise one sentence if the loop did not do what the method needs of it."""
        device, name = self.assignment.device, self._name
        if self.steps == 0:
            raise RunError(f"{name} took no step on device {device}; call trip.step() after each step or epoch")
        if self.rule.adjusts_gradient and not self._adjusted:
            problem = "the method adds terms to the gradient of every step"
            raise RunError(f"{problem}; call trip.adjust() in {name} after backward(), before the optimiser's step")
        if self.epochs < self.assignment.epochs:  # hurried
            return
        if self._slots or self._steps_at_merge == self.steps:
            slot = self._slots[0].epoch if self._slots else self.slots[-1].epoch
            problem = f"took no step after epoch {slot - 1} on device {device}, where a fresh model is due"
            remedy = "count steps as you take them, and train trip.epochs epochs"
            raise RunError(f"{name} {problem}; {remedy}")

    @contextmanager
    def _draws_of_trip(self) -> Iterator[None]:
        """numpy's and Python's own generators in a state of this trip. The trip holds torch's."""
        before = np.random.get_state(), random.getstate()
        np.random.seed(self.seed_for("numpy") % 2**32)
        random.seed(self.seed_for("random"))
        try:
            yield
        finally:
            np.random.set_state(before[0])
            random.setstate(before[1])

    def _explain(self, error: ValueError) -> ConfigError | None:
        return None

    # ---- for the user's objects

    @property
    def shard(self) -> Tensor:
        """The indices of the device's training samples."""
        return self._shard

    @property
    def device_count(self) -> int:
        return len(self._trainer.data.shards)

    def seed_for(self, purpose: str) -> int:
        """A seed of this trip."""
        return torch_seed(self._trainer.seed, purpose, self.assignment.device, self.assignment.trip)

    def take_order(self) -> Tensor:
        """The samples of the next pass, in its random order."""
        order, self._order = self._next_order(), None
        return order

    def take(self, index: Tensor) -> Any:
        """A batch of these samples."""
        return self._trainer.data.train.take(index.to(self.weights.device), self._augment)

    def sample(self, row: Tensor) -> Any:
        """One sample: a pair of input and label or, of samples in another form, the sample as it was given."""
        data = self._trainer.data.train
        return data.sample(row) if isinstance(data, RecordSamples) else _first(self.take(row))

    def adjust_gradients(self) -> None:
        """Add the rule's terms to the gradients that the user's ``backward`` left at the parameters."""
        self._adjusted += 1
        if not self.rule.adjusts_gradient:
            return
        rebind(self.flat, self._name)
        with torch.no_grad():
            for parameter, part in zip(self.flat.parameters, self.flat.gradient_parts, strict=True):
                part.zero_() if parameter.grad is None else part.copy_(parameter.grad)
            self.rule.adjust(self)
            for parameter, part in zip(self.flat.parameters, self.flat.gradient_parts, strict=True):
                if parameter.grad is not None:
                    parameter.grad.copy_(part)


def rebind(flat: FlatModel, name: str) -> None:
    """Make the module's tensors parts of the flat vectors again, with their numbers, where a library replaced them."""
    parameters, buffers = dict(flat.module.named_parameters()), dict(flat.module.named_buffers())
    parts = ((flat.layout, flat.weights), (flat.own, flat.own_weights))
    places = [(entry, tensor_view(vector, entry)) for part, vector in parts for entry in part.entries]
    for number, (entry, place) in enumerate(each for each in places if each[0].kind == "learnable"):
        found = parameters.get(entry.name)
        if found is None or tuple(found.shape) != tuple(entry.shape):
            raise RunError(f"{name} removed or reshaped the parameter {entry.name}; train the model's own parameters")
        flat.parameters[number] = found
        _rebind_tensor(found, place)
    for entry, place in places:
        if entry.kind == "buffer" and entry.name in buffers and buffers[entry.name].dtype is torch.float32:
            _rebind_tensor(buffers[entry.name], place)


def _rebind_tensor(tensor: Tensor, place: Tensor) -> None:
    if tensor.data_ptr() != place.data_ptr():
        with torch.no_grad():
            place.copy_(tensor.detach())
        tensor.data = place


def _first(batch: Any) -> Any:
    """The only sample of a batch of one."""
    if isinstance(batch, Mapping):
        return {key: _first(value) for key, value in batch.items()}
    return tuple(map(_first, batch)) if isinstance(batch, tuple | list) else batch[0]


def _as_metrics(name: str, found: Any) -> dict[str, Number]:
    """The finite numbers that a loop returned, under the names of the log."""
    if found is None:
        return {}
    try:
        numbers = {f"{METRIC_PREFIX}{key}": float(value) for key, value in dict(found).items()}
    except (TypeError, ValueError):
        answer = " ".join(repr(found).split())[:80]
        raise RunError(f"{name} returned {answer}; return a dict of numbers, or nothing") from None
    long = max(map(len, numbers), default=0) - len(METRIC_PREFIX)
    if len(numbers) > MAX_METRICS or long > MAX_METRIC_NAME:
        problem = f"returned {len(numbers)} metrics with names of up to {long} characters"
        raise RunError(f"{name} {problem}; return at most {MAX_METRICS}, with at most {MAX_METRIC_NAME} characters")
    return {key: value for key, value in numbers.items() if math.isfinite(value)}


def check_loop(loop: TrainingLoop, options: TrainingOptions, rule: LocalRule, method: str) -> None:
    """Raise a ``ConfigError`` for what the user's loop cannot do."""
    if not callable(loop):
        raise ConfigError("trainer", f"must be a function my_train(model, data, trip), not {type(loop).__name__}")
    try:
        inspect.signature(loop).bind(None, None, None)
    except TypeError as error:
        raise ConfigError("trainer", f"must take (model, data, trip): {error}") from None
    except ValueError:  # built-in code without a signature
        pass
    for key, without in UNUSED_SETTINGS.items():
        if getattr(options, key) != without:
            raise ConfigError(f"training.{key}", "is for the built-in loop; do this in your own trainer, leave it out")
    if rule.needs_own_parts:
        problem = f"{method} trains the parts that stay on the device apart, which your own loop does not"
        raise ConfigError("trainer", f"{problem}; choose another method or the built-in loop")
    if rule.reports_loss:
        problem = f"{method} needs the training loss that the built-in loop reports"
        raise ConfigError("trainer", f"{problem}; choose another method or the built-in loop")
    if rule.changes_loss:
        problem = f"{method} changes the loss of every step, which your own loop computes itself"
        raise ConfigError("trainer", f"{problem}; choose another method or the built-in loop")
    if rule.asks and not getattr(loop, "pauses", True):
        problem = f"{method} merges fresh models in mid-training, but this trainer trains in one piece"
        remedy = "choose another method; fedasmu and fedssmu run without fresh models with adaptive_device = false"
        raise ConfigError("trainer", f"{problem}; {remedy}")
