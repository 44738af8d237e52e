"""The expected number of uploads of a run, from its fleet, its trigger and its end."""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from freshet.core.scheduling import Trigger
from freshet.errors import ConfigError
from freshet.sim.fleet import Fleet

Floats = NDArray[np.float64]
#: Limit of tests, uploads, triggers or absences of a run. Such a run takes days and writes many gigabytes.
MAX_EVENTS = 100_000_000


def trip_seconds(fleet: Fleet, size: int) -> Floats:
    """Seconds from trigger to upload of each device: model down, start, whole training, model up."""
    links = size / fleet.down_rate + size / fleet.up_rate + fleet.down_latency + fleet.up_latency
    seconds: Floats = fleet.start_seconds + fleet.train_seconds + links
    return seconds


def scale_links(fleet: Fleet, size: int, sizes: tuple[int, int]) -> Fleet:
    """Return the fleet with links that carry ``size`` bytes in the time of the compressed ``sizes`` down and up."""
    down, up = sizes
    if down == up == size:
        return fleet
    return replace(fleet, down_rate=fleet.down_rate * (size / down), up_rate=fleet.up_rate * (size / up))


def expected_uploads(fleet: Fleet, trigger: Trigger, size: int, until: float, rounds: int, worth: int) -> int:
    """Estimate the uploads of a run of ``rounds`` (0: no limit) of ``worth`` uploads each, which ends at ``until``.

    It ignores absences, and changes of the trip length by a method.
    """
    limits = [float(rounds * worth)] if rounds else []
    if math.isfinite(until):
        trips = trip_seconds(fleet, size)
        arriving = until if trigger.kind == "rounds" else until - float(trips.mean())
        limits.append((1.0 - fleet.loss) * upload_rate(trips, trigger) * max(0.0, arriving))
    return round(min(*limits, 1e18)) if limits else 0


def upload_rate(trips: Floats, trigger: Trigger) -> float:
    """Uploads per second in the steady state, without losses."""
    if trigger.kind == "rounds":
        return trigger.per_round / round_seconds(trips, trigger.per_round)
    rate = uploads_per_second(trips, trigger.in_flight)
    return min(rate, trigger.per_round / trigger.period) if trigger.kind == "periodic" else rate


def check_length(fleet: Fleet, trigger: Trigger, size: int, until: float, uploads: int, eval_every: float) -> None:
    """Raise if any count of a run exceeds ``MAX_EVENTS``: its settings are a mistake.

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
        if not count <= MAX_EVENTS:
            problem = (
                f"{value:g} would make {count:.2g} {what} in {seconds:.3g} s, more than {MAX_EVENTS:,}; increase it"
            )
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
    """Rate at which ``busy`` devices upload if an idle device replaces each that finishes.

    Device k trains for ``d_k`` and is then idle for W on average, with the same W for all. It uploads
    ``1 / (d_k + W)`` times a second, and W solves ``sum_k d_k / (d_k + W) = busy``.
    """
    low, high = 0.0, float(trips.max()) * len(trips)
    if busy >= len(trips):
        return float((1.0 / trips).sum())
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if (trips / (trips + middle)).sum() > busy else (low, middle)
    return float((1.0 / (trips + high)).sum())
