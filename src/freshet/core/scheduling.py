"""When to trigger devices and how many (``Trigger``), and which idle ones (``Selector``).

Triggers are plain functions of what is in flight:

``periodic``     m' devices every T seconds, if fewer than a cap are busy (the paper's Algorithm 1)
``concurrency``  after each arrival, enough devices to keep a constant number in flight
``rounds``       m' devices when the last round is over (synchronous methods)

A selector draws uniformly, in proportion to samples, by the losses that devices report (Power-of-Choice, Oort), or
calls a user's or a method's function. ``draws`` is its place in one long random sequence. A resumed run restores this
number and continues the sequence. Selectors by losses have more ``state``.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

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
SELECTIONS = ("uniform", "by_samples", "power_of_choice", "oort")
#: Those that need the losses of the devices.
BY_LOSSES = ("power_of_choice", "oort")
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
    #: Seconds since the start of the run.
    now: float = 0.0


#: ``function(view, count, candidates)`` returns at most ``count`` of the candidates.
Choice = Callable[[View, int, list[int]], Sequence[int]]
#: A name, or a user's function.
Selection = str | Choice
Look = Callable[[np.random.Generator], View]


class Uniform:
    """Every free device is equally likely."""

    #: Devices report the moving average of their losses with this decay; None if the selector does not use it.
    loss_decay: ClassVar[float | None] = None
    #: What else a resumed run needs, as one dataclass.
    state: Any = None

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
    """Selects by a user's function, or by a method's, which decides the order too. Its answer is checked."""

    loss_decay: ClassVar[float | None] = None
    state: Any = None

    def __init__(self, seed: int, samples: NDArray[np.int64], choice: Choice, keeps_order: bool = False) -> None:
        self.seed, self.samples, self.choice, self.draws = seed, samples, choice, 0
        self.keeps_order = keeps_order

    def select(self, count: int, free: Free, look: Look) -> list[int]:
        found = candidates(self.samples, free)
        view = look(stream(self.seed, "select by function", self.draws))
        self.draws += 1
        given = self.choice(view, count, list(found)) if found else []
        checked = check_selection(given, count, found)
        return [int(device) for device in given] if self.keeps_order else checked


class LastReport(NamedTuple):
    """What a device's last upload told: its loss, in which round, and the seconds of its trip."""

    loss: float
    round: int
    seconds: float


@dataclass
class Reports:
    """The last report of every device."""

    last: dict[int, LastReport] = field(default_factory=dict)


class PowerOfChoice:
    """Of twice as many candidates as wanted, drawn in proportion to their samples, those with the largest losses start.

    Y. J. Cho, J. Wang, G. Joshi, "Towards Understanding Biased Client Selection in Federated Learning", AISTATS 2022,
    in the form that asks nobody: a device's loss is the one that it last reported, infinite before its first upload.
    """

    loss_decay: ClassVar[float | None] = 0.2
    state: Reports

    def __init__(self, seed: int, samples: NDArray[np.int64]) -> None:
        self.seed, self.samples, self.draws = seed, samples, 0
        self.state = Reports()

    def record(self, device: int, report: LastReport) -> None:
        """An upload of this device was accepted."""
        self.state.last[device] = report

    def select(self, count: int, free: Free, look: Look) -> list[int]:
        found = candidates(self.samples, free)
        view = look(stream(self.seed, "select by losses", self.draws))
        self.draws += 1
        return sorted(self.choose(view, count, found)) if found else []

    def choose(self, view: View, count: int, found: list[int]) -> list[int]:
        drawn = draw_weighted(view.rng, found, self.samples[found].astype(np.float64), 2 * count)
        last = self.state.last
        return sorted(drawn, key=lambda each: -last[each].loss if each in last else -math.inf)[:count]


@dataclass
class OortState(Reports):
    """The share epsilon that explores, the percentile rho of durations, the round and whom it exploits, and the mean
    utility of those in each round before."""

    epsilon: float = 0.9
    rho: float = 10.0
    round: int = 0
    exploited: list[int] = field(default_factory=list)
    utilities: list[float] = field(default_factory=list)


class Oort(PowerOfChoice):
    """Exploits devices with a large statistical utility that are fast enough, and explores others.

    F. Lai, X. Zhu, H. Madhyastha, M. Chowdhury, "Oort: Efficient Federated Learning via Guided Participant Selection",
    OSDI 2021. ``U_k = n_k sqrt(l_k)``. The score of a device that was heard, in round t, last heard in t_k::

        (min(U_k, clip) - U_min) / range + sqrt(0.1 ln t / t_k),      times (T / D_k)^2 if its trip took D_k > T seconds

    U_min is 0.999 of the least U, clip the entry at 98 % of all U in order, range their difference (at least 1e-4), T
    the entry at rho % of all durations in order. Of N devices, N (1 - epsilon) are drawn in proportion to their
    scores, among those with at least 0.7 of the score at the next rank; the rest, in proportion to n_k, among the 5
    times as many new ones with the largest n_k; then anybody. Each round epsilon falls by 5 %, to 0.2 at the least.
    Every 20 rounds rho grows by 5 if the utility of the chosen changed by at most a tenth, and falls by 5 if it
    changed fivefold.

    Decisions [D]: N (1 - epsilon) is rounded up or down at random, so that one device at a time may be exploited too.
    Durations are the measured ones. Rounds of an asynchronous method are those of its learning rate.
    """

    state: OortState
    CLIP, LEAST_RANGE, CUT, PENALTY = 0.98, 1e-4, 0.7, 2.0
    EPSILON_DECAY, LEAST_EPSILON, PACER_ROUNDS, PACER_STEP = 0.95, 0.2, 20, 5.0

    def __init__(self, seed: int, samples: NDArray[np.int64]) -> None:
        super().__init__(seed, samples)
        self.state = OortState()

    def utility(self, device: int) -> float:
        """``U_k`` of a device that was heard."""
        return float(self.samples[device]) * math.sqrt(self.state.last[device].loss)

    def limit(self) -> float:
        """``T``: seconds that a trip may take without a penalty."""
        durations, rho = sorted(each.seconds for each in self.state.last.values()), self.state.rho
        if rho >= 100.0 or not durations:
            return math.inf
        return durations[min(int(len(durations) * rho / 100.0), len(durations) - 1)]

    def scores(self, devices: Sequence[int], t: int, limit: float) -> list[float]:
        """The scores of devices that were heard."""
        utilities = sorted(self.utility(each) for each in self.state.last)
        least = 0.999 * utilities[0]
        clip = utilities[min(int(len(utilities) * self.CLIP), len(utilities) - 1)]
        spread, found = max(clip - least, self.LEAST_RANGE), []
        for device in devices:
            last = self.state.last[device]
            score = (min(self.utility(device), clip) - least) / spread
            score += math.sqrt(0.1 * math.log(max(t, 1)) / max(last.round, 1))
            found.append(score * (limit / last.seconds) ** self.PENALTY if last.seconds > limit else score)
        return found

    def choose(self, view: View, count: int, found: list[int]) -> list[int]:
        t, rng, state = view.rounds + 1, view.rng, self.state
        if t > state.round:
            self._begin_round(t)
        known, new = [k for k in found if k in state.last], [k for k in found if k not in state.last]
        wanted = int(count * (1.0 - state.epsilon) + rng.random())
        chosen = self._exploit(rng, known, min(wanted, len(known)), t)
        state.exploited = [*state.exploited, *chosen]
        largest = sorted(new, key=lambda each: (-int(self.samples[each]), each))[: 5 * (count - len(chosen))]
        chosen += draw_weighted(rng, largest, self.samples[largest].astype(np.float64), count - len(chosen))
        rest = [k for k in found if k not in set(chosen)]
        return [*chosen, *rng.permutation(rest)[: count - len(chosen)].tolist()]

    def _exploit(self, rng: np.random.Generator, known: list[int], count: int, t: int) -> list[int]:
        if not count:
            return []
        scores = np.array(self.scores(known, t, self.limit()))
        bar = self.CUT * np.sort(scores)[::-1][min(count, len(scores) - 1)]
        good = np.flatnonzero(scores >= bar)
        return draw_weighted(rng, [known[place] for place in good], np.maximum(scores[good], 1e-12), count)

    def _begin_round(self, t: int) -> None:
        """A new round: less exploration, and a look at the pace of those before."""
        state, span = self.state, self.PACER_ROUNDS
        found = [self.utility(each) for each in state.exploited if state.last[each].round >= state.round]
        state.utilities = [*state.utilities, sum(found) / max(1, len(found))][-2 * span :]
        state.round, state.epsilon = t, max(self.EPSILON_DECAY * state.epsilon, self.LEAST_EPSILON)
        state.exploited = []
        if t % span or len(state.utilities) < 2 * span:
            return
        before, after = sum(state.utilities[:span]), sum(state.utilities[span:])
        if abs(after - before) <= 0.1 * before:
            state.rho = min(100.0, state.rho + self.PACER_STEP)
        elif abs(after - before) >= 5.0 * before:
            state.rho = max(self.PACER_STEP, state.rho - self.PACER_STEP)


def draw_weighted(
    rng: np.random.Generator, devices: Sequence[int], weights: NDArray[np.float64], count: int
) -> list[int]:
    """Up to ``count`` devices without replacement, the next with a probability in proportion to its weight."""
    if count <= 0 or not len(devices):
        return []
    order = np.argsort(rng.exponential(size=len(devices)) / weights, kind="stable")
    return [int(devices[place]) for place in order[:count]]


Selector = Uniform | ByFunction | PowerOfChoice


def selector(kind: Selection, seed: int, samples: NDArray[np.int64], keeps_order: bool = False) -> Selector:
    """The selector that ``run.selection`` names, or one that calls a user's or a method's function."""
    if callable(kind):
        return ByFunction(seed, samples, kind, keeps_order)
    if kind not in SELECTIONS:
        raise ConfigError(
            "run.selection", f"must be one of {', '.join(SELECTIONS)} or a function, but {kind!r} was given"
        )
    kinds: dict[str, type[Uniform | PowerOfChoice]] = {
        "uniform": Uniform,
        "by_samples": BySamples,
        "power_of_choice": PowerOfChoice,
        "oort": Oort,
    }
    return kinds[kind](seed, samples)


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
