"""The server's meta model, which proposes the first slot of each device. It needs torch; import it lazily."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save_file
from torch import Tensor, nn

from freshet.core.about import Kind
from freshet.core.streams import torch_seed
from freshet.errors import ConfigError
from freshet.files import read_regular
from freshet.methods.asmu.slots import RunningReward, Selector, chain_distribution


class _Network(nn.Module):
    """One LSTM layer over the epochs and one fully connected layer: a number per epoch."""

    def __init__(self, inputs: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden)
        self.head = nn.Linear(hidden, 1, bias=bias)

    def forward(self, steps: Tensor) -> Tensor:
        out, _ = self.lstm(steps)
        logits: Tensor = self.head(out).squeeze(-1)
        return logits


class MetaSelector:
    """The server's meta model as printed: it proposes the first slot of each device and learns by REINFORCE.

    An LSTM reads the epochs as one-hot vectors; a softmax over its outputs gives the slot probabilities. The paper
    speaks of decisions s_l, "ask after epoch l or not", given the earlier ones. Their log probabilities add up to that
    of the slot: ``sum_l log P(s_l | s_1..s_(l-1)) = log P(l*)``. As in the paper's Algorithm 2, b includes a reward
    before that reward is compared with b. The paper gives no width, input or initialisation: the width is 32, the rest
    are torch's defaults.

    There are as many slots as the longest trip has epochs. A device with fewer ``epochs`` uses only the first slots:
    its probabilities are renormalised over them.
    """

    KIND: ClassVar[Selector] = "printed"
    WIDTH = 32

    def __init__(self, epochs: int, eta_rl: float, rho: float, seed: int, epsilon: float = 0.1) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(seed, "meta"))
            self.network = self._make_network(epochs).double()
        self._steps = self._inputs(epochs).double()
        self.epochs, self.eta_rl, self.epsilon = epochs, eta_rl, epsilon
        self.rewards = RunningReward(rho)
        self._prepare()
        #: First trips learned from, and the last recorded distribution.
        self.lessons, self._recorded = 0, self.distribution()
        self._best: dict[int, int] = {}

    # ---- the policy

    def _make_network(self, epochs: int) -> _Network:
        return _Network(epochs, self.WIDTH, bias=True)

    def _inputs(self, epochs: int) -> Tensor:
        return torch.eye(epochs)

    def _prepare(self) -> None:
        """Compute what depends on the untrained network."""

    def logits(self) -> Tensor:
        """Return one logit per epoch."""
        out: Tensor = self.network(self._steps)
        return out

    def distribution(self, epochs: int | None = None) -> NDArray[np.float64]:
        """Return the slot probabilities of a device with ``epochs`` epochs (None: with all)."""
        with torch.no_grad():
            probable: NDArray[np.float64] = torch.softmax(self.logits()[:epochs], 0).numpy()
        return probable

    def log_probability(self, slot: int, epochs: int | None = None) -> Tensor:
        """``log P(l* = slot)``."""
        return torch.log_softmax(self.logits()[:epochs], 0)[slot - 1]

    def step_size(self, slot: int, reward: float, chosen_by: float | None, epochs: int | None) -> float:
        """``eta_rl (R - b)``."""
        return self.eta_rl * self.rewards.advantage(reward)

    # ---- proposing and learning

    def best_slot(self, epochs: int | None = None) -> int:
        """Return the most probable slot, cached until the model learns."""
        count = self.epochs if epochs is None else epochs
        if count not in self._best:
            self._best[count] = int(np.argmax(self.distribution(count))) + 1
        return self._best[count]

    def add_reward(self, reward: float) -> None:
        """Add a trip's reward to the running mean and variance."""
        self.rewards.add(reward)

    def reinforce(self, slot: int, reward: float, chosen_by: float | None = None, epochs: int | None = None) -> None:
        """``theta <- theta + step grad log P(l*)``; ``chosen_by`` is the probability of choosing the slot, if known."""
        step = self.step_size(slot, reward, chosen_by, epochs)
        parameters = list(self.network.parameters())
        with torch.enable_grad():
            gradients = torch.autograd.grad(self.log_probability(slot, epochs), parameters)
        with torch.no_grad():
            pairs = zip(parameters, gradients, strict=True)
            moved = [torch.add(parameter, gradient, alpha=step) for parameter, gradient in pairs]
            if all(bool(torch.isfinite(after).all()) for after in moved):  # skip a step that is not finite
                for parameter, after in zip(parameters, moved, strict=True):
                    parameter.copy_(after)
        self.lessons += 1
        self._best = {}

    def changed_distribution(self) -> dict[str, Any] | None:
        """Return the distribution for the log if a probability changed by more than 1 % since the last record."""
        now = self.distribution()
        if np.abs(now - self._recorded).max() <= 0.01:
            return None
        self._recorded = now
        return {"probabilities": now.tolist(), "first_trips": self.lessons, "b": self.rewards.mean}

    # ---- files and checkpoints

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """Return everything that decides the distribution."""
        return {name: value.numpy().copy() for name, value in self.network.state_dict().items()}

    def _set_arrays(self, arrays: dict[str, NDArray[Any]]) -> None:
        self.network.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in arrays.items()})
        self._best = {}

    def save(self, path: Path) -> None:
        """Save the model for ``method.meta_from`` of later runs."""
        save_file(self._arrays() | {"rewards": np.array([self.rewards.mean, self.rewards.variance])}, path)

    def load(self, path: Path) -> None:
        """Load a model that an earlier run saved."""
        expected = {name: value.shape for name, value in self._arrays().items()} | {"rewards": (2,)}
        try:
            tensors = load(read_regular(path))
            if {name: value.shape for name, value in tensors.items()} != expected:
                raise ValueError(f"its tensors are not those of a {self.KIND} meta model for {self.epochs} epochs")
            if not all(value.dtype == np.float64 and np.isfinite(value).all() for value in tensors.values()):
                raise ValueError("it holds numbers that are not finite")
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError("method.meta_from", f"{path} is not a pre-trained meta model ({error})") from None
        self.rewards.mean, self.rewards.variance = tensors.pop("rewards").tolist()
        self._set_arrays(tensors)
        self._recorded = self.distribution()

    def state(self) -> dict[str, Any]:
        rewards = [self.rewards.mean, self.rewards.variance]
        return {"rewards": rewards, "network": self._arrays(), "learned": self.lessons, "recorded": self._recorded}

    def restore(self, state: dict[str, Any]) -> None:
        self.rewards.mean, self.rewards.variance = (float(value) for value in state["rewards"])
        self.lessons, self._recorded = int(state["learned"]), np.array(state["recorded"])
        self._set_arrays(state["network"])


class ShapedSelector(MetaSelector):
    """The meta model with what we added, so that it learns within a run (``selector = "shaped"``).

    The logit of ``P(ask at l | not asked before)`` is a prior plus ``GAIN`` times what the network has learned since
    its start. So the untrained model equals the prior. A step of the paper's rate 0.001 with an advantage of 1 moves a
    logit by some tenths. The advantage is divided by the running deviation of the rewards.

    Slots are not drawn from P but epsilon-greedily: mu(l) = epsilon / L, plus 1 - epsilon for the most probable slot.
    So the gradient of the expected reward under P is the mean over trips of ``P / mu`` times REINFORCE's. Without that
    weight the usual slot is judged fifty times as often as any other, and a better neighbour is not found.
    """

    KIND: ClassVar[Selector] = "shaped"
    WIDTH = 16
    GAIN = 8.0
    #: Size of the one-hot inputs, large enough to learn each epoch without its neighbours.
    INPUT_SCALE = 8.0
    MAX_IMPORTANCE_WEIGHT = 10.0

    def _make_network(self, epochs: int) -> _Network:
        return _Network(1 + epochs, self.WIDTH, bias=False)  # a bias would shift all epochs equally

    def _inputs(self, epochs: int) -> Tensor:
        """Return the input of each step: the previous decision (always "not asked") and the one-hot step."""
        return torch.cat([torch.zeros(epochs, 1), self.INPUT_SCALE * torch.eye(epochs)], dim=1)

    def _prepare(self) -> None:
        self._prior = _prior_logits(self.epochs)
        with torch.no_grad():
            self._start: Tensor = self.network(self._steps)

    def logits(self) -> Tensor:
        """Return one logit per epoch: the prior plus what the network has learned."""
        total: Tensor = self._prior + self.GAIN * (self.network(self._steps) - self._start)
        return total

    def distribution(self, epochs: int | None = None) -> NDArray[np.float64]:
        with torch.no_grad():
            return chain_distribution(torch.sigmoid(self.logits()).numpy()[:epochs])

    def log_probability(self, slot: int, epochs: int | None = None) -> Tensor:
        """``sum_{l<slot} log(1 - p_l) + log p_slot``."""
        logits = self.logits()
        log = nn.functional.logsigmoid
        total: Tensor = log(-logits[: slot - 1]).sum() + log(logits[slot - 1])
        return total

    def importance_weight(self, slot: int, chosen_by: float | None = None, epochs: int | None = None) -> float:
        """``P(slot) / mu(slot)``, where mu is the probability of choosing the slot."""
        greedy, probable = 1.0 - self.epsilon if slot == self.best_slot(epochs) else 0.0, self.distribution(epochs)
        mu = greedy + self.epsilon / len(probable) if chosen_by is None else chosen_by
        return min(float(probable[slot - 1]) / mu, self.MAX_IMPORTANCE_WEIGHT) if mu > 0.0 else 1.0

    def step_size(self, slot: int, reward: float, chosen_by: float | None, epochs: int | None) -> float:
        """``eta_rl (P / mu) (R - b) / std``."""
        weight = self.importance_weight(slot, chosen_by, epochs)
        return self.eta_rl * weight * self.rewards.scaled_advantage(reward)

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return super()._arrays() | {"start": self._start.numpy().copy()}

    def _set_arrays(self, arrays: dict[str, NDArray[Any]]) -> None:
        self._start = torch.from_numpy(np.array(arrays["start"]))
        super()._set_arrays({name: value for name, value in arrays.items() if name != "start"})


def _prior_logits(epochs: int) -> Tensor:
    """Return the logits of P(ask | not asked before) in the untrained model: a triangle over 1..L.

    It prefers the middle. There a newer model exists for most devices, and both neighbours can be tried.
    """
    middle = epochs // 2
    triangle = np.array([epochs - abs(epoch - middle) for epoch in range(epochs)], dtype=np.float64)
    share = triangle / (triangle.sum() + 1.0)
    hazard = share / (1.0 - np.concatenate([[0.0], np.cumsum(share)[:-1]]))
    return torch.from_numpy(np.log(hazard / (1.0 - hazard)))


SELECTORS: dict[Selector, type[MetaSelector]] = {"printed": MetaSelector, "shaped": ShapedSelector}
#: The trips for which Freshet ships pre-trained models; ``scripts/meta_model.py`` makes them.
SHIPPED_EPOCHS = 5


def shipped_file(kind: Kind) -> Path:
    """The file of the shipped model for asynchronous or synchronous training."""
    return Path(__file__).with_name(f"meta{SHIPPED_EPOCHS}-{kind}.safetensors")


def load_pretrained(selector: MetaSelector, name: str, kind: Kind) -> None:
    """Load what ``method.meta_from`` names: a file, the shipped model if it fits, or none."""
    if name == "shipped":
        if selector.KIND != "printed":
            problem = 'the shipped model is for method.selector = "printed"'
            raise ConfigError("method.meta_from", f'{problem}; choose "none", or make one with `freshet pretrain`')
        if selector.epochs == SHIPPED_EPOCHS:
            selector.load(shipped_file(kind))
    elif name != "none":
        selector.load(Path(name))


def pretrain(selector: MetaSelector, events: Iterable[dict[str, Any]], passes: int = 1) -> int:
    """Learn from the requests in earlier runs' logs, in order, ``passes`` times. Return the number of requests.

    A merge has its reward; a request that found nothing newer changed no loss and counts as reward 0. (The paper does
    not say what its historical data hold.)
    """
    epochs = selector.epochs
    lessons = [lesson for event in events if (lesson := _lesson(event, epochs)) is not None]
    asked = np.bincount([slot for slot, _ in lessons], minlength=epochs + 1) / max(1, len(lessons))
    for slot, reward in passes * lessons:
        selector.add_reward(reward)
        selector.reinforce(slot, reward, chosen_by=float(asked[slot]))
    return len(lessons)


def _lesson(event: dict[str, Any], epochs: int) -> tuple[int, float] | None:
    """Return the slot and reward of a logged request; None for other events and for invalid values."""
    slot, kind = event.get("slot"), event.get("kind")
    reward = 0.0 if kind == "request" and event.get("fresh", 0) is None else event.get("reward")
    if kind not in ("request", "merge") or type(slot) is not int or not 1 <= slot <= epochs:
        return None
    return (slot, float(reward)) if isinstance(reward, int | float) and math.isfinite(reward) else None
