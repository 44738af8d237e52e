"""When to trigger devices and how many (``Trigger``), and which idle ones (``Selector``).

Triggers are plain functions of what is in flight:

``periodic``     m' devices every T seconds, if fewer than a cap are busy (the paper's Algorithm 1)
``concurrency``  after each arrival, enough devices to keep a constant number in flight
``rounds``       m' devices when the last round is over (synchronous methods)

A selector draws uniformly, in proportion to samples, or calls a user's function. Its only state is ``draws``, its place
in one long random sequence. A resumed run restores this number and continues the sequence.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freshet.core.streams import stream
from freshet.errors import ConfigError

if TYPE_CHECKING:
    from freshet.core.server import Server

TriggerKind = Literal["periodic", "concurrency", "rounds"]


@dataclass(frozen=True)
class Trigger:
    """When to trigger. ``per_round`` is m', ``period`` is T (also the polling interval if no device is available).

    ``concurrency`` keeps ``in_flight`` devices busy. ``periodic`` starts no device while ``in_flight`` are busy, and
    otherwise all m', so up to ``in_flight + m' - 1`` may be busy.
    """

    kind: TriggerKind
    per_round: int
    period: float
    in_flight: int

    def devices_to_start(self, server: "Server") -> int:
        """The number of devices to start now, if that many are idle."""
        if self.kind == "rounds":
            return 0 if server.active_trips else self.per_round
        free = self.in_flight - server.busy
        if free <= 0:
            return 0
        return free if self.kind == "concurrency" else self.per_round

    @cached_property
    def on_arrival(self) -> bool:
        """Whether an arrival may start new trips. The periodic trigger follows only its clock."""
        return self.kind != "periodic"


#: Random devices per block of the sequence.
BLOCK_SIZE = 4096
SELECTIONS = ("uniform", "by_samples")
Free = Callable[[int], bool]


class View(NamedTuple):
    """What a user's selection function may know."""

    version: int
    rounds: int
    #: Samples of each device.
    samples: NDArray[np.int64]
    #: Trips that each device has started. Devices without trips are not included.
    trips: Mapping[int, int]
    #: A random stream for this selection. Use it for all random choices, so that the run is repeatable.
    rng: np.random.Generator


#: ``function(view, count, candidates)`` returns at most ``count`` of the candidates.
Choice = Callable[[View, int, list[int]], Sequence[int]]
#: A name, or a user's function.
Selection = str | Choice
Look = Callable[[np.random.Generator], View]


class Uniform:
    """Every free device is equally likely."""

    def __init__(self, seed: int, samples: NDArray[np.int64]) -> None:
        self.seed, self.samples, self.draws = seed, samples, 0
        self._block: tuple[int, list[int]] | None = None

    def select(self, count: int, free: Free, look: Look) -> list[int]:
        """Up to ``count`` free devices with data, drawn without replacement, in ascending order.

        Drawing from all devices and skipping those that are not free is the same as drawing from the free ones.
        """
        chosen: set[int] = set()
        block, place = divmod(self.draws, BLOCK_SIZE)
        drawn, left = self._block_of_draws(block), 4 * count + 64  # enough if most devices are free
        while left and len(chosen) < count:
            if place == BLOCK_SIZE:
                block, place = block + 1, 0
                drawn = self._block_of_draws(block)
            device = drawn[place]
            place, left = place + 1, left - 1
            if device >= 0 and free(device):
                chosen.add(device)
        self.draws = block * BLOCK_SIZE + place
        if len(chosen) < count:
            rest = [d for d in candidates(self.samples, free) if d not in chosen]
            chosen.update(rest[index] for index in self._order(rest)[: count - len(chosen)])
        return sorted(chosen)

    def _block_of_draws(self, block: int) -> list[int]:
        """A block of the sequence, with -1 for devices without data. The latest block is cached."""
        if self._block is None or self._block[0] != block:
            drawn = self._draw_block(block)
            self._block = (block, np.where(self.samples[drawn] > 0, drawn, -1).tolist())
        return self._block[1]

    def _draw_block(self, block: int) -> NDArray[np.int64]:
        return stream(self.seed, "select", block).integers(len(self.samples), size=BLOCK_SIZE)

    def _order(self, rest: list[int]) -> NDArray[np.int64]:
        """The order of the remaining free devices, when too few are left to find them by drawing."""
        return stream(self.seed, "select rest", self.draws).permutation(len(rest))


class BySamples(Uniform):
    """The next device is k with probability ``n_k / sum of n``, over the free devices not yet chosen."""

    def __init__(self, seed: int, samples: NDArray[np.int64]) -> None:
        super().__init__(seed, samples)
        self._shares = np.cumsum(samples, dtype=np.float64)

    def _draw_block(self, block: int) -> NDArray[np.int64]:
        points = stream(self.seed, "select by samples", block).random(BLOCK_SIZE) * self._shares[-1]
        drawn: NDArray[np.int64] = np.searchsorted(self._shares, points, side="right")
        return drawn

    def _order(self, rest: list[int]) -> NDArray[np.int64]:
        """``E_k / n_k`` ascending, E exponential: the order of drawing without replacement."""
        waits = stream(self.seed, "select rest by samples", self.draws).exponential(size=len(rest))
        return np.argsort(waits / self.samples[rest], kind="stable")


class ByFunction:
    """Selects by a user's function. Its answer is checked."""

    def __init__(self, seed: int, samples: NDArray[np.int64], choice: Choice) -> None:
        self.seed, self.samples, self.choice, self.draws = seed, samples, choice, 0

    def select(self, count: int, free: Free, look: Look) -> list[int]:
        found = candidates(self.samples, free)
        view = look(stream(self.seed, "select by function", self.draws))
        self.draws += 1
        given = self.choice(view, count, list(found)) if found else []
        return check_selection(given, count, found)


Selector = Uniform | ByFunction


def selector(kind: Selection, seed: int, samples: NDArray[np.int64]) -> Selector:
    """The selector that ``run.selection`` names, or one that calls a user's function."""
    if callable(kind):
        return ByFunction(seed, samples, kind)
    if kind not in SELECTIONS:
        raise ConfigError(
            "run.selection", f"must be one of {', '.join(SELECTIONS)} or a function, but {kind!r} was given"
        )
    return (Uniform if kind == "uniform" else BySamples)(seed, samples)


def candidates(samples: NDArray[np.int64], free: Free) -> list[int]:
    """All free devices with data, in ascending order."""
    return [device for device in np.flatnonzero(samples > 0).tolist() if free(device)]


def check_selection(given: Any, count: int, found: Sequence[int]) -> list[int]:
    """A user's selection in ascending order. Raises a ``ConfigError`` if it is not valid."""
    try:
        numbers = np.asarray(given if hasattr(given, "__len__") else list(given))
    except (TypeError, ValueError):
        raise ConfigError("run.selection", f"must return device numbers, but returned {given!r}") from None
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
        raise ConfigError("run.selection", f"must return a list of device numbers, but returned {given!r}")
    devices = sorted(numbers.tolist())
    if len(devices) > count:
        raise ConfigError("run.selection", f"returned {len(devices)} devices, but at most {count} were requested")
    if len(set(devices)) < len(devices):
        raise ConfigError("run.selection", f"returned a device twice: {devices}")
    if unknown := set(devices) - set(found):
        raise ConfigError("run.selection", f"returned device {min(unknown)}, which is not one of the candidates")
    return devices
