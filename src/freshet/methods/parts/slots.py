"""When a device asks for the fresh model: a Q-table per device, a meta model on the server, or a fixed rule.

A *slot* l* is an epoch in 1..L; the device asks at its start, before its first step.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from freshet.core.messages import Slot
from freshet.core.streams import torch_seed
from freshet.errors import ConfigError

Policy = Literal["rl", "h1", "h2", "h3", "random", "never"]
#: Rewards over their running deviation, or as they are (the paper's).
Advantage = Literal["scaled", "raw"]
ACTIONS = (-1, 0, 1)
Table = NDArray[np.float64]


def fixed_slot(policy: str | int, epochs: int, rng: np.random.Generator) -> Slot | None:
    """Slots that are not learned: H1 after the first epoch, H2 mid-way, H3 in the penultimate epoch, or a number."""
    if policy == "never":
        return None
    if policy == "random":
        return Slot(int(rng.integers(1, epochs + 1)), "fixed")
    wanted = {"h1": 2, "h2": epochs // 2 + 1, "h3": epochs - 1}.get(str(policy), policy)
    return Slot(min(max(int(wanted), 1), epochs), "fixed")


def empty_table(epochs: int, advantage: Advantage) -> Table:
    """``H(slot, action)``; row l-1 belongs to slot l. Zero (raw), or not a number where nothing was tried (scaled)."""
    return np.full((epochs, len(ACTIONS)), 0.0 if advantage == "raw" else np.nan)


def next_slot(table: Table, last: int, epsilon: float, rng: np.random.Generator) -> Slot:
    """Epsilon-greedy step from the last slot: minus, stay or add, kept inside 1..L.

    What was never tried comes first. Ties are broken at random: a fixed order would drift to one end.
    """
    if rng.random() < epsilon:
        column, by = int(rng.integers(len(ACTIONS))), "explore"
    else:
        row = np.where(np.isnan(table[last - 1]), np.inf, table[last - 1])
        column, by = int(rng.choice(np.flatnonzero(row == row.max()))), "q"
    action = ACTIONS[column]
    return Slot(min(max(last + action, 1), len(table)), by, action)


def learn(table: Table, last: int, action: int, slot: int, reward: float, phi_q: float, psi: float) -> None:
    """``H(l, a) += phi_q (R + psi max_a' H(l', a') - H(l, a))``, in place; what was never tried counts as 0."""
    column, known = ACTIONS.index(action), np.nan_to_num(table)
    old = known[last - 1, column]
    table[last - 1, column] = old + phi_q * (reward + psi * known[slot - 1].max() - old)


def first_slot(meta_slot: int, epochs: int, epsilon: float, rng: np.random.Generator) -> Slot:
    """A device's first trip: the meta model's slot, or with probability epsilon any slot."""
    if rng.random() < epsilon:
        return Slot(int(rng.integers(1, epochs + 1)), "explore")
    return Slot(meta_slot, "meta")


def slot_distribution(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """``P(l* = k) = p_k prod_{l<k} (1 - p_l)``, renormalised over 1..L."""
    survival = np.concatenate([[1.0], np.cumprod(1.0 - p)[:-1]])
    raw = p * survival
    total: float = raw.sum()
    return raw / total if total > 0 else np.full(len(p), 1.0 / len(p))


@dataclass
class RunningReward:
    """Mean b and deviation of the rewards seen lately: ``b <- (1 - rho) b + rho R``."""

    rho: float
    mean: float = 0.0
    variance: float = 0.0

    def note(self, reward: float) -> None:
        """Take a reward in; the variance is the same running mean of ``(R - b)^2``, corrected for b having moved."""
        off = reward - self.mean
        self.mean += self.rho * off
        self.variance = (1.0 - self.rho) * (self.variance + self.rho * off * off)

    def advantage(self, reward: float, kind: Advantage) -> float:
        """``R - b``, over the deviation if scaled (0 while all rewards are equal)."""
        off = reward - self.mean
        if kind == "raw":
            return off
        return off / math.sqrt(self.variance) if self.variance > 0.0 else 0.0


class _Network(nn.Module):
    """LSTM with a linear head: one number per epoch. No bias at the end, which would move all epochs alike."""

    def __init__(self, epochs: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1 + epochs, hidden)
        self.head = nn.Linear(hidden, 1, bias=False)

    def forward(self, steps: Tensor) -> Tensor:
        out, _ = self.lstm(steps)
        logits: Tensor = self.head(out).squeeze(-1)
        return logits


def _prior_logits(epochs: int) -> Tensor:
    """Logits with which the untrained meta model prefers the middle: a triangle over 1..L, as P(ask | not asked).

    It starts where something newer is there for most devices, and where both neighbours can be tried.
    """
    middle = epochs // 2
    triangle = np.array([epochs - abs(epoch - middle) for epoch in range(epochs)], dtype=np.float64)
    share = triangle / (triangle.sum() + 1.0)
    hazard = share / (1.0 - np.concatenate([[0.0], np.cumsum(share)[:-1]]))
    return torch.from_numpy(np.log(hazard / (1.0 - hazard)))


class MetaSelector:
    """The server's meta model: proposes the first slot of each device and learns from its reward (REINFORCE).

    The logit of ``P(ask at l | not asked before)`` is a prior plus ``GAIN`` times what the network has learned since
    its start. So the untrained model is the prior itself, and a step of the paper's rate 0.001 with an advantage of 1
    moves a logit by some tenths. As in the paper's Algorithm 2, b takes a reward in before that is measured against it.

    Slots are not drawn from P but epsilon-greedily: mu(l) = epsilon / L, and 1 - epsilon more for the most probable.
    So the gradient of the expected reward under P is the mean over trips of ``P / mu`` times REINFORCE's. Without that
    weight the usual slot is judged fifty times as often as any other, and a better one next to it is not found. With
    raw advantages, as published, there is none.
    """

    GAIN = 8.0
    #: Size of the inputs that tell one epoch from another, so that each can be learned without its neighbours.
    INPUT = 8.0
    LARGEST_WEIGHT = 10.0

    def __init__(
        self,
        epochs: int,
        eta_rl: float,
        rho: float,
        seed: int,
        advantage: Advantage = "scaled",
        epsilon: float = 0.1,
        hidden: int = 16,
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(seed, "meta"))
            self.network = _Network(epochs, hidden).double()
        # Input of step l: the decision before it (always "not asked"), and which step it is.
        self._steps = torch.cat([torch.zeros(epochs, 1), self.INPUT * torch.eye(epochs)], dim=1).double()
        self._prior = _prior_logits(epochs)
        with torch.no_grad():
            self._start = self.network(self._steps)
        self.eta_rl, self.advantage, self.epsilon = eta_rl, advantage, epsilon
        self.rewards = RunningReward(rho)
        #: First trips learned from, and the distribution that was last put on record.
        self.learned, self._recorded = 0, self.distribution()
        self._best: int | None = None

    def logits(self) -> Tensor:
        """One per epoch: the prior, and what the network has learned on top of it."""
        total: Tensor = self._prior + self.GAIN * (self.network(self._steps) - self._start)
        return total

    def distribution(self) -> NDArray[np.float64]:
        """Slot probabilities now."""
        with torch.no_grad():
            return slot_distribution(torch.sigmoid(self.logits()).numpy())

    def best(self) -> int:
        """The most probable slot (computed anew only after the model has learned)."""
        if self._best is None:
            self._best = int(np.argmax(self.distribution())) + 1
        return self._best

    def note(self, reward: float) -> None:
        """A trip's reward joins those that others are measured against."""
        self.rewards.note(reward)

    def log_probability(self, slot: int) -> Tensor:
        """``sum_{l<slot} log(1 - p_l) + log p_slot``."""
        logits = self.logits()
        log = nn.functional.logsigmoid
        total: Tensor = log(-logits[: slot - 1]).sum() + log(logits[slot - 1])
        return total

    def weight(self, slot: int, chosen_by: float | None = None) -> float:
        """``P(slot) / mu(slot)``, mu the probability with which the slot was chosen; 1 with raw advantages."""
        if self.advantage == "raw":
            return 1.0
        greedy = 1.0 - self.epsilon if slot == self.best() else 0.0
        mu = greedy + self.epsilon / len(self._steps) if chosen_by is None else chosen_by
        return min(float(self.distribution()[slot - 1]) / mu, self.LARGEST_WEIGHT) if mu > 0.0 else 1.0

    def reinforce(self, slot: int, reward: float, chosen_by: float | None = None) -> None:
        """``theta <- theta + eta_rl (P / mu) grad log P(decisions) A`` with the advantage ``A = R - b``."""
        step = self.eta_rl * self.weight(slot, chosen_by) * self.rewards.advantage(reward, self.advantage)
        parameters = list(self.network.parameters())
        with torch.enable_grad():
            gradients = torch.autograd.grad(self.log_probability(slot), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.add_(gradient, alpha=step)
        self.learned += 1
        self._best = None

    def news(self) -> dict[str, Any] | None:
        """What to put on record when some slot's probability has changed by more than 1 % since the last time."""
        now = self.distribution()
        if np.abs(now - self._recorded).max() <= 0.01:
            return None
        self._recorded = now
        return {"probabilities": now.tolist(), "first_trips": self.learned, "b": self.rewards.mean}

    def save(self, path: Path) -> None:
        """Store what was learned, for ``method.meta_from`` of later runs."""
        rewards = np.array([self.rewards.mean, self.rewards.variance])
        save_file(self._weights() | {"rewards": rewards, "start": self._start.numpy()}, path)

    def load(self, path: Path) -> None:
        """Begin with what an earlier run has learned."""
        expected = {name: value.shape for name, value in self._weights().items()}
        expected |= {"rewards": (2,), "start": tuple(self._start.shape)}
        try:
            tensors = load_file(path)
            if {name: value.shape for name, value in tensors.items()} != expected:
                raise ValueError(f"it holds other tensors than those of a meta model for {len(self._steps)} epochs")
            if not all(value.dtype == np.float64 and np.isfinite(value).all() for value in tensors.values()):
                raise ValueError("it holds numbers that are not finite")
        except (OSError, SafetensorError, ValueError) as error:
            raise ConfigError("method.meta_from", f"{path} is not a pre-trained meta model ({error})") from None
        self._start = torch.from_numpy(tensors.pop("start"))
        self.rewards.mean, self.rewards.variance = tensors.pop("rewards").tolist()
        self._set_weights(tensors)
        self._recorded = self.distribution()

    def state(self) -> dict[str, Any]:
        rewards = [self.rewards.mean, self.rewards.variance]
        recorded = {"learned": self.learned, "recorded": self._recorded}
        return {"rewards": rewards, "network": self._weights(), "start": self._start.numpy(), **recorded}

    def restore(self, state: dict[str, Any]) -> None:
        self.rewards.mean, self.rewards.variance = (float(value) for value in state["rewards"])
        self.learned, self._recorded = int(state["learned"]), np.array(state["recorded"])
        self._start = torch.from_numpy(np.array(state["start"]))
        self._set_weights(state["network"])

    def _weights(self) -> dict[str, NDArray[Any]]:
        return {name: value.numpy().copy() for name, value in self.network.state_dict().items()}

    def _set_weights(self, weights: dict[str, NDArray[Any]]) -> None:
        self.network.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in weights.items()})
        self._best = None


def pretrain(selector: MetaSelector, events: Iterable[dict[str, Any]], passes: int = 1) -> int:
    """Learn from the requests of earlier runs' logs, in order, so many times; returns how many there were.

    A merge has its reward; a request that found nothing newer counts as reward 0.
    """
    epochs = len(selector.distribution())
    lessons = [lesson for event in events if (lesson := _lesson(event, epochs)) is not None]
    asked = np.bincount([slot for slot, _ in lessons], minlength=epochs + 1) / max(1, len(lessons))
    for slot, reward in passes * lessons:
        selector.note(reward)
        selector.reinforce(slot, reward, chosen_by=float(asked[slot]))
    return len(lessons)


def _lesson(event: dict[str, Any], epochs: int) -> tuple[int, float] | None:
    """The slot and the reward of a logged request, or None for other events (and for what makes no sense)."""
    slot, kind = event.get("slot"), event.get("kind")
    reward = 0.0 if kind == "request" and event.get("fresh", 0) is None else event.get("reward")
    if kind not in ("request", "merge") or type(slot) is not int or not 1 <= slot <= epochs:
        return None
    return (slot, float(reward)) if isinstance(reward, int | float) and math.isfinite(reward) else None
