"""How many uploads a run may expect, before it is run: from its fleet, its trigger and its end."""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from freshet.core.scheduling import Trigger
from freshet.errors import ConfigError
from freshet.sim.fleet import Fleet

Floats = NDArray[np.float64]
#: Tests, uploads, triggers or absences of the longest run: days of real time, and a log of many gigabytes.
MOST = 100_000_000


def trip_seconds(fleet: Fleet, size: int) -> Floats:
    """Seconds from trigger to upload of each device: model down, start, whole training, model up."""
    links = size / fleet.down_rate + size / fleet.up_rate + fleet.down_latency + fleet.up_latency
    seconds: Floats = fleet.start_seconds + fleet.train_seconds + links
    return seconds


def lightened(fleet: Fleet, size: int, sizes: tuple[int, int]) -> Fleet:
    """The fleet as if its links carried ``size`` bytes in the time that they need for those down and up."""
    down, up = sizes
    if down == up == size:
        return fleet
    return replace(fleet, down_rate=fleet.down_rate * (size / down), up_rate=fleet.up_rate * (size / up))


def expected_uploads(fleet: Fleet, trigger: Trigger, size: int, until: float, rounds: int, worth: int) -> int:
    """Uploads in a run of ``rounds`` of ``worth`` each (0: no limit) that ends at ``until`` (infinity: no limit).

    Absences are left out, and so is whatever a method does to the length of its trips.
    """
    limits = [float(rounds * worth)] if rounds else []
    if math.isfinite(until):
        trips = trip_seconds(fleet, size)
        arriving = until if trigger.kind == "rounds" else until - float(trips.mean())
        limits.append((1.0 - fleet.loss) * upload_rate(trips, trigger) * max(0.0, arriving))
    return round(min(*limits, 1e18)) if limits else 0


def upload_rate(trips: Floats, trigger: Trigger) -> float:
    """Uploads per second once the run is under way, none being lost."""
    if trigger.kind == "rounds":
        return trigger.per_round / round_seconds(trips, trigger.per_round)
    rate = uploads_per_second(trips, trigger.in_flight)
    return min(rate, trigger.per_round / trigger.period) if trigger.kind == "periodic" else rate


def check_length(fleet: Fleet, trigger: Trigger, size: int, until: float, uploads: int, eval_every: float) -> None:
    """Raise if a run would have more of anything than ``MOST``: such a run never ends, and its settings are a mistake.

    A run that ends by rounds lasts ``uploads / (uploads per second)`` seconds.
    """
    seconds = until if math.isfinite(until) else uploads / upload_rate(trip_seconds(fleet, size), trigger)
    counts = {
        "run.eval_every": (eval_every, "tests", seconds / eval_every),
        "fleet.fastest": (float(fleet.train_seconds.min()), "uploads", float(uploads)),
    }
    if trigger.kind == "periodic":
        counts["run.period"] = (trigger.period, "triggers", seconds / trigger.period)
    if fleet.on_seconds:
        absences = len(fleet) * seconds / (fleet.on_seconds + fleet.off_seconds)
        counts["fleet.on_seconds"] = (fleet.on_seconds, "absences", absences)
    for key, (value, what, count) in counts.items():
        if not count <= MOST:
            problem = f"{value:g} would make {count:.2g} {what} in {seconds:.3g} s, more than {MOST:,}; choose more"
            raise ConfigError(key, problem)


def round_seconds(trips: Floats, members: int) -> float:
    """Mean duration of a synchronous round: the longest trip of ``members`` devices drawn without replacement.

    Of n trips in ascending order, the j shortest hold all m members with probability ``P_j = P_{j+1} (j + 1 - m) /
    (j + 1)``, and ``P_n = 1``.
    """
    counts = np.arange(len(trips), 1.0, -1.0)
    within = np.append(np.cumprod(np.append(1.0, np.maximum(counts - members, 0.0) / counts)), 0.0)
    longest_first = np.sort(trips)[::-1]
    return float((within[:-1] - within[1:]) @ longest_first)


def uploads_per_second(trips: Floats, busy: int) -> float:
    """Rate at which ``busy`` devices upload when each that is done is replaced by any idle one.

    Device k trains for ``d_k`` and is then idle for W on average, the same W for all: it uploads ``1 / (d_k + W)``
    times a second, and W is such that ``sum_k d_k / (d_k + W) = busy``.
    """
    low, high = 0.0, float(trips.max()) * len(trips)
    if busy >= len(trips):
        return float((1.0 / trips).sum())
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if (trips / (trips + middle)).sum() > busy else (low, middle)
    return float((1.0 / (trips + high)).sum())
