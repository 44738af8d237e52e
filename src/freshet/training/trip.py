r"""One local training that can pause: train to a slot, merge the fresh model, train on to the next one or the end.

    TO_SLOT --to_slot--> ASKED --merge--> FINISHING --finish--> DONE
       |  \________________/ (more slots)     /
       \____________to_slot (no more slots)__/

The simulator runs a trip in one go, a real device step by step. A trip is a function of (weights, shard, rule,
optimiser, random streams): the same input gives the same bits, however often the trip pauses.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from freshet.core.events import OWN_KEYS, Merged
from freshet.core.messages import LOSS_DECAY, Assignment, Fresh, Merge, Number, Packed, Slot, Upload
from freshet.core.method import OWN_PARTS, LocalRule, Memory, TaskLoss
from freshet.core.streams import stream, torch_seed
from freshet.core.vectors import Vector, is_finite, mix
from freshet.data.adapters import own_draws, seed_generators
from freshet.errors import ConfigError, RunError
from freshet.training.batches import Batch, Indices, batch_length, split_batch
from freshet.training.network import tensor_view
from freshet.training.outgoing import poison_batch
from freshet.training.task import CountingLoss

if TYPE_CHECKING:
    from freshet.training.trainer import Trainer


class TripOutcome(NamedTuple):
    """The result of one trip: the trained model, the steps taken, the rule's report, its merges, vectors
    to send with the model, and the device's new memory."""

    weights: Vector
    steps: int
    report: dict[str, Number]
    merges: tuple[Merge, ...]
    vectors: dict[str, Vector]
    memory: Memory
    diverged: bool = False
    #: The model if it goes up as a compressed difference (``core/compression.py``). Then ``weights`` is ``UNREAD``.
    packed: Packed | None = None

    def upload(self, assignment: Assignment) -> Upload:
        """The message to the server. The memory stays on the device."""
        return Upload(
            device=assignment.device,
            trip=assignment.trip,
            base=assignment.version,
            weights=self.weights,
            steps=self.steps,
            report=self.report,
            merges=self.merges,
            vectors=self.vectors,
            packed=self.packed,
        )


class Phase(StrEnum):
    """The phase of a trip."""

    TO_SLOT = "to_slot"
    ASKED = "asked"
    FINISHING = "finishing"
    DONE = "done"


class LocalTrip:
    """One local training. A ``LocalRule`` sees it as ``freshet.core.method.Local``.

    A trainer has one module, so its next trip may begin only when this one is done or saved.
    """

    def __init__(
        self,
        trainer: "Trainer",
        assignment: Assignment,
        slots: Sequence[Slot],
        rule: LocalRule,
        memory: Memory,
        seconds: float | None = None,
    ) -> None:
        self._trainer, self.rule, self.options = trainer, rule, trainer.options
        self._counting = CountingLoss(trainer.task) if self.options.micro_batch_size else None
        self.task: TaskLoss = self._counting or trainer.task
        self.flat = flat = trainer.flat_for_trip()
        self.model, self.layout, self.learnable = flat.module, flat.layout, flat.layout.learnable
        self.weights, self.gradient = flat.weights, flat.gradient
        self.assignment, self._seconds = assignment, seconds
        #: All slots, those still to come, and the first one unless its request had no answer.
        self.slots, self._slots, self.slot = tuple(slots), list(slots), slots[0] if slots else None
        self.memory: Memory = dict(memory)
        self._memory_at_merge, self.anchor = memory, assignment.weights
        self.report: dict[str, Number] = {}
        self.merges: list[Merge] = []
        self.vectors: dict[str, Vector] = {}
        self.scratch: dict[str, Any] = {}
        self.phase, self.epochs, self.epoch, self.steps = Phase.TO_SLOT, assignment.epochs, 0, 0
        device, trip, seed = assignment.device, assignment.trip, trainer.seed
        self._shard, self._held_out = _split_held_out(trainer.data.shards[device], rule, seed, device)
        self._hostile = device in trainer.attackers
        self._rng = stream(seed, "batches", device, trip)
        self._augment = stream(seed, "augment", device, trip) if self.options.augment else None
        self._torch = torch_states(torch_seed(seed, "torch", device, trip), self.weights.device.type)
        self._order: Tensor | None = None
        trainer.trip = self
        flat.load(assignment.weights)
        flat.load_own(memory.get(OWN_PARTS))
        flat.reset_hidden()
        self.base = self.tensor(assignment.weights[: self.learnable])
        self._optimiser = trainer.optimiser.init(flat.learnable)
        self._own_optimiser = trainer.optimiser.init(flat.own_learnable)
        with self._working(Phase.TO_SLOT):
            rule.begin(self)

    # ---- the trip

    def to_slot(self) -> bool:
        """Train up to the next slot. True if the device now asks for the fresh model, False if it asks no more."""
        if not self._slots:
            self._move_to(Phase.TO_SLOT, Phase.FINISHING)
            return False
        with self._working(Phase.TO_SLOT):
            while self.epoch < min(self._slots[0].epoch - 1, self.epochs):
                self._train_epoch()
        self._move_to(Phase.TO_SLOT, Phase.ASKED)
        return True

    def advance(self, answer: Callable[[], bool]) -> bool:
        """Train until only ``finish`` is left. At each slot ``answer`` merges the server's answer.

        It returns False to stop there, and so does this method.
        """
        while self.phase is not Phase.FINISHING and self.to_slot():
            if not answer():
                return False
        return True

    @property
    def asks_at(self) -> Slot:
        """The next slot."""
        return self._slots[0]

    @property
    def newest(self) -> int:
        """The newest version that the device has: its base or, after a merge, the fresh one."""
        return self.merges[-1].version if self.merges else self.assignment.version

    def merge(self, fresh: Fresh | None) -> None:
        """Take the server's answer: a newer model, or None if it has none."""
        if fresh is not None and fresh.version <= self.newest:
            raise ValueError(f"fresh version {fresh.version} is not newer than {self.newest}, which the device has")
        with self._working(Phase.ASKED):
            if fresh is not None:
                numbers = _check_merge_numbers(self.rule, self.rule.merge(self, fresh))
                self.merges.append(Merge(fresh.version, numbers))
                if self.rule.anchored:
                    self._set_anchor(mix(self.anchor, fresh.weights, float(numbers["beta"])))
                if self._is_finite(self.flat.dump()):
                    self._memory_at_merge = dict(self.memory)
                else:
                    self.merges[-1] = Merge(fresh.version, numbers, diverged=True)
        self._leave_slot()

    def _set_anchor(self, anchor: Vector) -> None:
        self.anchor, self.base = anchor, self.tensor(anchor[: self.learnable])

    def continue_unanswered(self) -> None:
        """Continue as if the device had not asked, since no answer came. The rule learns nothing about when to ask."""
        self.slot = self.slot if self.merges else None
        self._leave_slot()

    def _leave_slot(self) -> None:
        self._move_to(Phase.ASKED, Phase.TO_SLOT if self._slots[1:] else Phase.FINISHING)
        del self._slots[0]

    def finish(self) -> TripOutcome:
        """Train the remaining epochs and return the outcome as it goes up."""
        with self._working(Phase.FINISHING):
            while self.epoch < self.epochs:
                self._train_epoch()
            self.rule.finish(self)
        if self.flat.own.size:
            self.memory[OWN_PARTS] = self.flat.dump_own()
        self._move_to(Phase.FINISHING, Phase.DONE)
        return self._trainer.outgoing.encode(self.outcome(), self.assignment, self.anchor, self.layout, self._hostile)

    def hurry(self) -> None:
        """The server wants the model soon: make the current epoch the last, or the first if none has begun."""
        self.epochs = min(self.epochs, max(1, self.epoch))

    def outcome(self) -> TripOutcome:
        """The outcome so far. After divergence, keep only the memory from before or at the last sound merge.

        The log has the merge's numbers even if the trip is given up, so its memory must count, too.
        """
        weights = self.flat.dump()
        finite = self._is_finite(weights)
        memory = self.memory if finite else self._memory_at_merge
        outcome = TripOutcome(
            weights,
            self.steps,
            self.report,
            tuple(self.merges),
            self.vectors,
            memory,
            diverged=not finite,
        )
        return self._trainer.outgoing.redact(outcome, self.rule.public)

    def _is_finite(self, weights: Vector) -> bool:
        """Whether weights and numbers are finite: the trip has not diverged."""
        numbers = chain(self.report.values(), *(merge.numbers.values() for merge in self.merges))
        sound = is_finite(weights) and is_finite(self.flat.own_weights.cpu().numpy())
        return sound and all(math.isfinite(value) for value in numbers)

    def _move_to(self, expected: Phase, to: Phase) -> None:
        if self.phase is not expected:
            trip = self.assignment
            raise ValueError(f"trip {trip.trip} of device {trip.device} is {self.phase}, not {expected}")
        self.phase = to

    @contextmanager
    def _working(self, phase: Phase) -> Iterator[None]:
        """Use the trip's random state, with the module in training mode and no other trip on it."""
        self._move_to(phase, phase)
        if self._trainer.trip is not self:
            raise ValueError("another trip has begun on this trainer; save a trip before the next one, then restore it")
        with own_draws() if self._trainer.data.train.draws else nullcontext():
            yield from self._with_own_state()

    def _with_own_state(self) -> Iterator[None]:
        outside = get_random_state(self.weights.device.type)
        set_random_state(self._torch)
        self._seed_transforms()
        self.flat.train_mode()
        try:
            yield
        except ValueError as error:
            known = self._explain(error)
            if known is None:
                raise
            raise known from None
        finally:
            self._torch = get_random_state(self.weights.device.type)
            set_random_state(outside)

    def _explain(self, error: ValueError) -> ConfigError | None:
        if str(error).startswith(_TORCH_MESSAGE) and self.options.micro_batch_size:
            problem = "leaves a part of one sample, but BatchNorm needs two or more"
            remedy = 'choose another, or take a norm without batch statistics (model.norm = "group")'
            return ConfigError("training.micro_batch_size", f"{self.options.micro_batch_size} {problem}; {remedy}")
        sizes = (len(shard) - _held_out_count(shard, self.rule) for shard in self._trainer.data.shards)
        return explain_batch_of_one(error, self.assignment.device, len(self._shard), self.options.batch_size, sizes)

    # ---- the loop

    def _train_epoch(self) -> None:
        """Train on all samples in a new random order, or on this epoch's share of ``training.steps`` batches."""
        self._seed_transforms()
        self.epoch += 1
        data = self._trainer.data.train
        batches = self._batches_of_share() if self.options.steps else self._batches_of_epoch()
        for index in batches:
            loss = self._train_on(*self._as_trained_on(data.take(index, self._augment)))
            if self.epoch == 1 and LOSS_DECAY in self.assignment.instruction:
                self._average_loss(loss.item())
        self.steps += len(batches)

    def _train_on(self, x: Batch, y: Batch) -> Tensor:
        """Take one step on a batch. Returns its loss. Plain SGD is one call."""
        if self._counting is None and self._is_plain_step():
            loss = self.rule.loss(self, x, y)
            gradients = self.flat.gradients_of(loss)
            with torch.no_grad():
                torch._foreach_add_(self.flat.parameters, gradients, alpha=-self.assignment.lr)
            return loss
        loss = self._collect(self._rule_loss, x, y)
        self._step()
        return loss

    def _rule_loss(self, x: Batch, y: Batch) -> Tensor:
        return self.rule.loss(self, x, y)

    def _collect(self, loss_of: Callable[[Batch, Batch], Tensor], x: Batch, y: Batch) -> Tensor:
        """Write the gradient of a batch's loss into the gradient vector. Returns the loss.

        With micro-batches whose means are over n_k samples or tokens, both are ``sum_k n_k a_k / sum_k n_k``.
        """
        if self._counting is None:
            loss = loss_of(x, y)
            self.flat.collect(loss)
            return loss
        self.flat.clear_gradient()
        total, summed = 0, torch.zeros((), device=self.weights.device)
        for part in split_batch(x, y, self.options.micro_batch_size):
            loss, count = self._counted_loss(loss_of, *part)
            if count:  # the mean over nothing is not a number
                self.flat.add_gradient(loss, count)
                total, summed = total + count, summed + loss.detach() * count
        self.flat.divide_gradient(max(1, total))
        return summed / max(1, total)

    def _counted_loss(self, loss_of: Callable[[Batch, Batch], Tensor], x: Batch, y: Batch) -> tuple[Tensor, int]:
        """The loss of a part, and what its mean is over: samples, if the rule does not ask the task."""
        assert self._counting is not None
        self._counting.count = None
        loss, count = loss_of(x, y), self._counting.count
        return loss, batch_length(y) if count is None else count

    def _is_plain_step(self) -> bool:
        """Whether a step is ``w <- w - lr g`` for all parameters, and nothing else."""
        moves, options = self.rule.moves(self), self.options
        extras = self.rule.adjusts_gradient or options.weight_decay or options.clip
        return self._trainer.optimiser.plain and all(moves) and not extras

    def _seed_transforms(self) -> None:
        """Let transforms that draw from numpy's or Python's generator draw anew in each epoch, from the trip's stream.

        Those that draw from torch's use the trip's own state of it.
        """
        if self._trainer.data.train.draws:
            trip = self.assignment
            seed_generators(torch_seed(self._trainer.seed, "transforms", trip.device, trip.trip, self.epoch))

    def _average_loss(self, loss: float) -> None:
        """Update the reported loss, which starts with the first mini-batch's."""
        decay, before = float(self.assignment.instruction[LOSS_DECAY]), self.report.get("loss", loss)
        self.report["loss"] = (1.0 - decay) * before + decay * loss

    def _batches_of_epoch(self) -> list[Tensor]:
        order, self._order = self._next_order(), None
        return list(torch.split(order, self.options.batch_size))

    def _batches_of_share(self) -> list[Tensor]:
        """This epoch's share of ``training.steps`` batches: ``training.epochs`` epochs make all of them. Passes over
        the samples follow one another without a gap."""
        whole, parts, batches = self.options.steps, self.options.epochs, list[Tensor]()
        for _ in range(whole * self.epoch // parts - whole * (self.epoch - 1) // parts):
            order = self._next_order()
            batches.append(order[: self.options.batch_size])
            rest = order[self.options.batch_size :]
            self._order = rest if len(rest) else None
        return batches

    def _step(self) -> None:
        """Apply the rule's terms, clipping, weight decay and the optimiser to flat vectors."""
        optimiser, decay, lr = self._trainer.optimiser, self.options.weight_decay, self.assignment.lr
        moves = self.rule.moves(self)
        with torch.no_grad():
            w, g, coupled = self.flat.learnable, self.gradient, decay and optimiser.couples_decay
            if coupled and self.rule.decay_first:
                g.add_(w, alpha=decay)
            if self.rule.adjusts_gradient:
                self.rule.adjust(self)
            if self.options.clip:
                self._clip_gradient()
            if coupled and not self.rule.decay_first:
                g.add_(w, alpha=decay)
            if moves.shared:
                optimiser.update(w, g, self._optimiser, lr)
            if moves.own and self.flat.own.size:
                own, own_gradient = self.flat.own_learnable, self.flat.own_gradient
                if coupled:
                    own_gradient.add_(own, alpha=decay)
                optimiser.update(own, own_gradient, self._own_optimiser, lr)

    def _clip_gradient(self) -> None:
        """Shorten the whole gradient, that of the device's own parts included."""
        g, own = self.gradient, self.flat.own_gradient
        norm = torch.hypot(g.norm(), own.norm()) if len(own) else g.norm()
        factor = torch.clamp(self.options.clip / norm.clamp_min(1e-30), max=1.0)
        g.mul_(factor)
        own.mul_(factor)

    def _next_order(self) -> Tensor:
        if self._order is None:
            order = self._shard[torch.from_numpy(self._rng.permutation(len(self._shard)))]
            self._order = order.to(self.weights.device)
        return self._order

    def _as_trained_on(self, batch: tuple[Batch, Batch]) -> tuple[Batch, Batch]:
        """The batch that the device trains on, poisoned if the device attacks."""
        return poison_batch(self._trainer.outgoing.attack, *batch, self._trainer.classes) if self._hostile else batch

    # ---- for rules

    @property
    def seconds(self) -> float | None:
        """Mean duration of the device's completed trips, or None before the first."""
        if not self.rule.timed:
            raise AttributeError("durations are kept only for rules with timed = True")
        return self._seconds

    def tensor(self, array: Vector) -> Tensor:
        """A copy of an array on the model's device."""
        return torch.from_numpy(array).to(self.weights.device, copy=True)

    def snapshot(self) -> Vector:
        """A copy of the current local model, counters included."""
        return self.flat.dump()

    def set_weights(self, weights: Vector) -> None:
        """Continue from these weights."""
        self.flat.load(weights)

    def next_batch(self) -> tuple[Batch, Batch]:
        """The first mini-batch of the next epoch, which is trained on as well."""
        return self._as_trained_on(self._trainer.data.train.take(self._next_order()[: self.options.batch_size]))

    def held_out(self) -> tuple[Batch, Batch]:
        """The device's held-out samples, or the next mini-batch if the device has too few samples."""
        if not len(self._held_out):
            return self.next_batch()
        return self._as_trained_on(self._trainer.data.train.take(self._held_out.to(self.weights.device)))

    def further_pass(self) -> Iterator[None]:
        """One more pass over the device's samples, with the gradient of each mini-batch's loss in ``gradient``."""
        self._order = None  # under ``training.steps`` the trip may have ended within a pass
        for index in self._batches_of_epoch():
            self._collect(self._task_loss, *self._as_trained_on(self._trainer.data.train.take(index, self._augment)))
            yield

    def _task_loss(self, x: Batch, y: Batch) -> Tensor:
        return self.task.batch_loss(self.model, x, y)

    def loss_at(self, x: Batch, y: Batch) -> float:
        """The plain loss of the current model. BatchNorm statistics stay the same."""
        with torch.no_grad(), self._evaluating():
            if self._counting is None:
                return self._task_loss(x, y).item()
            parts = split_batch(x, y, self.options.micro_batch_size)
            losses = [(float(loss), count) for loss, count in (self._counted_loss(self._task_loss, *p) for p in parts)]
            return sum(loss * count for loss, count in losses if count) / max(1, sum(count for _, count in losses))

    def gradient_at(self, x: Batch, y: Batch) -> tuple[float, Vector]:
        """The plain loss of the current model and its gradient."""
        with self._evaluating():
            loss = self._collect(self._task_loss, x, y)
        gradient: Vector = self.gradient.cpu().numpy().copy()
        return loss.item(), gradient

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode, in which BatchNorm statistics stay the same and dropout is off."""
        self.model.eval()
        yield
        self.flat.train_mode()

    def frozen_features(self, weights: Vector) -> Callable[[Batch], Tensor]:
        """``features`` of another model of the same shape, in evaluation mode and without gradient.

        Parts that stay on the device are as they are now.
        """
        network, own = _Features(self.model), self.flat.own_weights.clone()
        parts = ((self.layout, self.tensor(weights)), (self.flat.own, own))
        state = {
            f"network.{entry.name}": tensor_view(vector, entry)
            for layout, vector in parts
            for entry in layout.entries
            if entry.kind != "counter"
        }

        def features(x: Batch) -> Tensor:
            self.model.eval()
            with torch.no_grad():
                z: Tensor = functional_call(network, state, (x,))
            self.flat.train_mode()
            return z

        return features

    # ---- saving a paused trip

    def save(self) -> dict[str, Any]:
        """The state of a paused trip besides its arguments, as plain values and arrays."""
        return {
            "phase": str(self.phase),
            "epoch": self.epoch,
            "epochs": self.epochs,
            "steps": self.steps,
            "weights": self.flat.dump(),
            "own": [self.flat.dump_own(), _arrays(self._own_optimiser)] if self.flat.own.size else None,
            "hidden": self.flat.hidden_state(),
            "memory": self.memory,
            "report": self.report,
            "merges": [[merge.version, dict(merge.numbers), merge.diverged] for merge in self.merges],
            "slots": [list(slot) for slot in self._slots],
            "asked": self.slot is not None,
            "anchor": self.anchor if self.rule.anchored and self.merges else None,
            "scratch": _arrays({key: value for key, value in self.scratch.items() if not callable(value)}),
            "optimiser": _arrays(self._optimiser),
            "order": None if self._order is None else self._order.cpu().numpy(),
            "batches": self._rng.bit_generator.state,
            "augment": None if self._augment is None else self._augment.bit_generator.state,
            "torch": {kind: state.numpy() for kind, state in self._torch.items()},
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Bring a new trip with the same arguments to a saved state."""
        self.phase, self.epoch, self.steps = Phase(saved["phase"]), saved["epoch"], saved["steps"]
        self.epochs, self.memory = saved["epochs"], dict(saved["memory"])
        self.report = dict(saved["report"])
        self.merges = [Merge(version, dict(numbers), diverged) for version, numbers, diverged in saved["merges"]]
        if saved["anchor"] is not None:
            self._set_anchor(np.array(saved["anchor"]))
        self._slots, self.slot = [Slot(*slot) for slot in saved["slots"]], self.slot if saved["asked"] else None
        self.flat.load(np.array(saved["weights"]))
        if saved.get("own") is not None:
            self.flat.load_own(np.array(saved["own"][0]))
            self._own_optimiser = self._tensors(saved["own"][1])
        self.flat.set_hidden_state(saved["hidden"])
        self.scratch |= self._tensors(saved["scratch"])
        self._optimiser = self._tensors(saved["optimiser"])
        self._order = None if saved["order"] is None else self.tensor(saved["order"])
        self._rng.bit_generator.state = saved["batches"]
        if self._augment is not None:
            self._augment.bit_generator.state = saved["augment"]
        self._torch = {kind: torch.from_numpy(np.array(state)) for kind, state in saved["torch"].items()}

    def _tensors(self, saved: dict[str, Any]) -> dict[str, Any]:
        return {key: self.tensor(value) if isinstance(value, np.ndarray) else value for key, value in saved.items()}


def _split_held_out(shard: Indices, rule: LocalRule, seed: int, device: int) -> tuple[Tensor, Tensor]:
    """A device's training samples, and the held-out tenth if the rule wants one. It is the same tenth in every trip."""
    if not rule.holds_out:
        return torch.from_numpy(shard), torch.empty(0, dtype=torch.int64)
    mixed = shard[stream(seed, "held out", device).permutation(len(shard))]
    apart = _held_out_count(shard, rule)
    return torch.from_numpy(mixed[apart:]), torch.from_numpy(mixed[:apart])


def _held_out_count(shard: Indices, rule: LocalRule) -> int:
    return len(shard) // 10 if rule.holds_out else 0


def _check_merge_numbers(rule: LocalRule, numbers: object) -> dict[str, Number]:
    """Return the numbers of a merge, or raise one sentence if the rule returned anything else."""
    if not isinstance(numbers, dict) or OWN_KEYS[Merged].intersection(numbers):
        own, name = ", ".join(sorted(OWN_KEYS[Merged])), type(rule).__name__
        answer = " ".join(repr(numbers).split())[:80]
        raise RunError(f"{name}.merge returned {answer}; it must return a dict of numbers, none of them named {own}")
    return numbers


class _Features(nn.Module):
    """Calls a network's ``features`` where ``functional_call`` would call its ``forward``."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Batch) -> Tensor:
        z: Tensor = self.network.features(x)  # type: ignore[operator]
        return z


def _arrays(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value.cpu().numpy().copy() if isinstance(value, Tensor) else value for key, value in values.items()}


def torch_states(seed: int, kind: str) -> dict[str, Tensor]:
    """The states of torch's generators after ``torch.manual_seed``: the CPU's, and the accelerator's if any."""
    return {where: torch.Generator(where).manual_seed(seed).get_state() for where in {"cpu", kind}}


def get_random_state(kind: str) -> dict[str, Tensor]:
    """The states of torch's generators."""
    here = {"cpu": torch.get_rng_state()}
    return here if kind == "cpu" else here | {kind: torch.get_device_module(kind).get_rng_state()}


def set_random_state(states: dict[str, Tensor]) -> None:
    """The inverse of ``get_random_state``."""
    for kind, state in states.items():
        torch.set_rng_state(state) if kind == "cpu" else torch.get_device_module(kind).set_rng_state(state)


# ---- BatchNorm and a batch of one sample

#: The start of torch's error message.
_TORCH_MESSAGE = "Expected more than 1 value per channel when training"


def explain_batch_of_one(
    error: ValueError, device: int, samples: int, batch_size: int, shards: Iterable[int]
) -> ConfigError | None:
    """Explain torch's error in one sentence that names the setting to change. None for any other error.

    ``samples`` counts the device's training samples, ``shards`` those of every device.
    """
    if not str(error).startswith(_TORCH_MESSAGE) or not _leaves_batch_of_one(samples, batch_size):
        return None
    other = 'take a norm without batch statistics (model.norm = "group"; nn.GroupNorm in a model of your own)'
    if samples == 1:
        problem = f"device {device} trains on a single sample, but BatchNorm needs two or more in a batch"
        return ConfigError("data.min_samples", f"{problem}; give every device at least two, or {other}")
    problem = f"{batch_size} leaves device {device} ({samples} samples) a batch of one, but BatchNorm needs two or more"
    choice = f"choose one that leaves no device a single sample, such as {_next_batch_size(batch_size, shards)}"
    return ConfigError("training.batch_size", f"{problem}; {choice}, or {other}")


def _leaves_batch_of_one(samples: int, batch_size: int) -> bool:
    return batch_size == 1 or samples % batch_size == 1


def _next_batch_size(batch_size: int, shards: Iterable[int]) -> int:
    """The next larger batch size that leaves no device a batch of one. The size of the largest shard always works."""
    sizes = {size for size in shards if size > 1}
    larger = range(batch_size + 1, max(sizes) + 2)
    return next(size for size in larger if not any(_leaves_batch_of_one(samples, size) for samples in sizes))
