"""When a device asks for the fresh model: a Q-table per device, the meta model's proposal (``meta``), or a fixed rule.

A *slot* l* is an epoch in 1..L. The device asks at the start of that epoch, before the first step.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from freshet.core.messages import Slot

Policy = Literal["rl", "h1", "h2", "h3", "last", "random", "never"]
#: How slots are learned: as the paper prints it, or with what we added (``docs/methods-appendix.md``).
Selector = Literal["printed", "shaped"]
ACTIONS = (-1, 0, 1)
Table = NDArray[np.float64]


def empty_table(epochs: int, selector: Selector) -> Table:
    """Return ``H(slot, action)``; row l-1 belongs to slot l. Untried entries are 0 (printed) or NaN (shaped)."""
    return np.full((epochs, len(ACTIONS)), 0.0 if selector == "printed" else np.nan)


def next_slot(table: Table, last: int, epsilon: float, rng: np.random.Generator) -> Slot:
    """Take an epsilon-greedy step from the last slot: minus, stay or add, kept inside 1..L.

    Untried actions (NaN) come first. Ties are broken at random, because a fixed order would drift to one end.
    """
    if rng.random() < epsilon:
        column, by = int(rng.integers(len(ACTIONS))), "explore"
    else:
        row = np.where(np.isnan(table[last - 1]), np.inf, table[last - 1])
        column, by = int(rng.choice(np.flatnonzero(row == row.max()))), "q"
    action = ACTIONS[column]
    return Slot(min(max(last + action, 1), len(table)), by, action)


def update_table(table: Table, last: int, action: int, slot: int, reward: float, phi_q: float, psi: float) -> None:
    """``H(l, a) += phi_q (R + psi max_a' H(l', a') - H(l, a))``, in place; untried entries count as 0."""
    column, known = ACTIONS.index(action), np.nan_to_num(table)
    old = known[last - 1, column]
    table[last - 1, column] = old + phi_q * (reward + psi * known[slot - 1].max() - old)


def first_slot(meta_slot: int, epochs: int, epsilon: float, rng: np.random.Generator) -> Slot:
    """Return the slot of a device's first trip: the meta model's, or with probability epsilon a random one."""
    if rng.random() < epsilon:
        return Slot(int(rng.integers(1, epochs + 1)), "explore")
    return Slot(meta_slot, "meta")


def chain_distribution(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return slot probabilities from decisions: ``P(l* = k) = p_k prod_{l<k} (1 - p_l)``, renormalised over 1..L."""
    survival = np.concatenate([[1.0], np.cumprod(1.0 - p)[:-1]])
    raw = p * survival
    total: float = raw.sum()
    return raw / total if total > 0 else np.full(len(p), 1.0 / len(p))


@dataclass
class RunningReward:
    """Running mean b and variance of the rewards: ``b <- (1 - rho) b + rho R``."""

    rho: float
    mean: float = 0.0
    variance: float = 0.0

    def add(self, reward: float) -> None:
        """Add a reward. The variance is the same running mean of ``(R - b)^2``, corrected for the change of b."""
        off = reward - self.mean
        self.mean += self.rho * off
        self.variance = (1.0 - self.rho) * (self.variance + self.rho * off * off)

    def advantage(self, reward: float) -> float:
        """``R - b``."""
        return reward - self.mean

    def scaled_advantage(self, reward: float) -> float:
        """``(R - b) / std``, or 0 while all rewards are equal."""
        return (reward - self.mean) / math.sqrt(self.variance) if self.variance > 0.0 else 0.0
