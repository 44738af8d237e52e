"""When a device asks for the fresh model: a Q-table per device, a meta model on the server, or a fixed rule.

A *slot* l* is an epoch in 1..L; the device asks at its start, before its first step.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from freshet.core.streams import torch_seed
from freshet.core.trip import Slot
from freshet.errors import ConfigError

Policy = Literal["rl", "h1", "h2", "h3", "random", "never"]
ACTIONS = (-1, 0, 1)
#: Ties in the Q-table: stay first, then minus, then add.
_PREFERENCE = (1, 0, 2)
Table = NDArray[np.float64]


def fixed_slot(policy: str | int, epochs: int, rng: np.random.Generator) -> Slot | None:
    """Slots that are not learned: H1 after the first epoch, H2 mid-way, H3 in the penultimate epoch, or a number."""
    if policy == "never":
        return None
    if policy == "random":
        return Slot(int(rng.integers(1, epochs + 1)), "fixed")
    wanted = {"h1": 2, "h2": epochs // 2 + 1, "h3": epochs - 1}.get(str(policy), policy)
    return Slot(min(max(int(wanted), 1), epochs), "fixed")


def empty_table(epochs: int) -> Table:
    """``H(slot, action)``, all zero; row l-1 belongs to slot l."""
    return np.zeros((epochs, len(ACTIONS)))


def next_slot(table: Table, last: int, epsilon: float, rng: np.random.Generator) -> Slot:
    """Epsilon-greedy step from the last slot: minus, stay or add, kept inside 1..L."""
    if rng.random() < epsilon:
        action, by = ACTIONS[int(rng.integers(len(ACTIONS)))], "explore"
    else:
        row = table[last - 1]
        action, by = ACTIONS[max(_PREFERENCE, key=lambda column: (row[column], -_PREFERENCE.index(column)))], "q"
    return Slot(min(max(last + action, 1), len(table)), by, action)


def learn(table: Table, last: int, action: int, slot: int, reward: float, phi_q: float, psi: float) -> None:
    """``H(l, a) += phi_q (R + psi max_a' H(l', a') - H(l, a))``, in place."""
    column = ACTIONS.index(action)
    old = table[last - 1, column]
    table[last - 1, column] = old + phi_q * (reward + psi * table[slot - 1].max() - old)


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


class _Network(nn.Module):
    """LSTM with a linear head: one logit per epoch, P(ask now | not asked before)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, hidden)
        self.head = nn.Linear(hidden, 1)

    def forward(self, steps: Tensor) -> Tensor:
        out, _ = self.lstm(steps)
        logits: Tensor = self.head(out).squeeze(-1)
        return logits


def _prior_logits(epochs: int) -> Tensor:
    """Logits with which the untrained meta model prefers the middle: a triangle over 1..L, as P(ask | not asked).

    Without it the first slot would win, where nothing newer is there yet and so nothing can ever be learned.
    """
    middle = epochs // 2
    triangle = np.array([epochs - abs(epoch - middle) for epoch in range(epochs)], dtype=np.float64)
    share = triangle / (triangle.sum() + 1.0)
    hazard = share / (1.0 - np.concatenate([[0.0], np.cumsum(share)[:-1]]))
    return torch.from_numpy(np.log(hazard / (1.0 - hazard)))


class MetaSelector:
    """The server's meta model: proposes the first slot of each device and learns from its reward (REINFORCE).

    As in the paper's Algorithm 2, the running mean b takes a reward in before that reward is measured against it.
    """

    def __init__(self, epochs: int, eta_rl: float, rho: float, seed: int, hidden: int = 16) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(seed, "meta"))
            self.network = _Network(hidden).double()
        # Input of step l: the decision before it (always "not asked") and how far the trip is.
        self._steps = torch.tensor([[0.0, epoch / epochs] for epoch in range(1, epochs + 1)], dtype=torch.float64)
        self._prior = _prior_logits(epochs)
        self.eta_rl, self.rho = eta_rl, rho
        self.baseline = 0.0
        self._best: int | None = None

    def logits(self) -> Tensor:
        """One per epoch: the network's, on top of the prior."""
        total: Tensor = self.network(self._steps) + self._prior
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
        """``b <- (1 - rho) b + rho R``: the running mean that rewards are measured against."""
        self.baseline = (1.0 - self.rho) * self.baseline + self.rho * reward

    def log_probability(self, slot: int) -> Tensor:
        """``sum_{l<slot} log(1 - p_l) + log p_slot``."""
        logits = self.logits()
        log = nn.functional.logsigmoid
        total: Tensor = log(-logits[: slot - 1]).sum() + log(logits[slot - 1])
        return total

    def reinforce(self, slot: int, reward: float) -> None:
        """``theta <- theta + eta_rl grad log P(decisions) (R - b)``."""
        parameters = list(self.network.parameters())
        with torch.enable_grad():
            gradients = torch.autograd.grad(self.log_probability(slot), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.add_(gradient, alpha=self.eta_rl * (reward - self.baseline))
        self._best = None

    def save(self, path: Path) -> None:
        """Store what was learned, for ``method.meta_from`` of later runs."""
        state = self.state()
        save_file(state["network"] | {"baseline": np.array([self.baseline])}, path)

    def load(self, path: Path) -> None:
        """Begin with what an earlier run has learned."""
        try:
            tensors = load_file(path)
            baseline = float(tensors.pop("baseline")[0])
            expected = {name: tuple(value.shape) for name, value in self.network.state_dict().items()}
            if {name: value.shape for name, value in tensors.items()} != expected:
                raise ValueError("it holds other tensors than the meta model's")
            if not (np.isfinite(baseline) and all(np.isfinite(value).all() for value in tensors.values())):
                raise ValueError("it holds numbers that are not finite")
        except (OSError, SafetensorError, KeyError, IndexError, ValueError) as error:
            raise ConfigError("method.meta_from", f"{path} is not a pre-trained meta model ({error})") from None
        self.restore({"baseline": baseline, "network": tensors})

    def state(self) -> dict[str, Any]:
        network = {name: value.numpy().copy() for name, value in self.network.state_dict().items()}
        return {"baseline": self.baseline, "network": network}

    def restore(self, state: dict[str, Any]) -> None:
        self.baseline = float(state["baseline"])
        self.network.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in state["network"].items()})
        self._best = None


def pretrain(selector: MetaSelector, merges: Iterable[dict[str, Any]]) -> int:
    """Learn from the merges of earlier runs' logs, in order; returns how many there were."""
    count = 0
    for merge in merges:
        slot, reward = merge.get("slot"), merge.get("reward")
        if merge.get("kind") == "merge" and isinstance(reward, int | float) and isinstance(slot, int):
            selector.note(float(reward))
            selector.reinforce(slot, float(reward))
            count += 1
    return count
