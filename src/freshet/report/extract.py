"""What one run's log says about staleness, weights, controls, slots and data: pure functions from run to numbers."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from freshet.report.reading import RunData
from freshet.report.trips import Trip
from freshet.runs.records import contributors, number, integer

WHO = ("meta", "q", "explore", "fixed")
_MOST_SLOTS = 50


def stalenesses(run: RunData) -> list[int]:
    """Staleness of every upload that entered an aggregation, in no order."""
    return [staleness for staleness in run.events.stalenesses.elements() if staleness >= 1]


@dataclass(frozen=True, slots=True)
class Weighted:
    """An aggregated upload."""

    device: int
    time: float
    staleness: int
    alpha: float


def weighted(run: RunData) -> list[Weighted]:
    """Every aggregated upload with its staleness and its weight."""
    return [
        Weighted(each.device, float(event["time"]), each.staleness, each.weight)
        for event in run.events.of("aggregate")
        for each in contributors(event)
        if each.device is not None and each.staleness is not None and each.weight is not None
    ]


class Track:
    """A value over time, of one device: many of them fit into little memory."""

    __slots__ = ("times", "values")

    def __init__(self) -> None:
        self.times, self.values = array("d"), array("d")

    def add(self, time: float, value: float) -> None:
        self.times.append(time)
        self.values.append(value)

    def __iter__(self) -> Iterator[tuple[float, float]]:
        return zip(self.times, self.values, strict=True)

    def __len__(self) -> int:
        return len(self.times)


def controls(run: RunData) -> dict[str, dict[int, Track]]:
    """For each of the run's curves that the log has numbers of: by device, its value over time."""
    found: dict[str, dict[int, Track]] = {}
    for event in run.events.of(*{curve.event for curve in run.curves}) if run.curves else ():
        device, kind = integer(event.get("device")), event.get("kind")
        for curve in run.curves:
            value = number(event.get(curve.key)) if kind == curve.event else None
            if device is not None and value is not None:
                found.setdefault(curve.name, {}).setdefault(device, Track()).add(float(event["time"]), value)
    return found


@dataclass(frozen=True)
class Bands:
    """A control over the fleet at some times: median and extremes of each device's latest value."""

    times: list[float]
    middle: list[float]
    low: list[float]
    high: list[float]


def bands(tracks: dict[int, Track], end: float, points: int = 120) -> Bands:
    """Follow all devices at once; a device counts from its first value on."""
    changes = sorted((time, device, value) for device, track in tracks.items() for time, value in track)
    latest: dict[int, float] = {}
    found, position = Bands([], [], [], []), 0
    for index in range(1, points + 1):
        time = end * index / points
        while position < len(changes) and changes[position][0] <= time + 1e-9:
            latest[changes[position][1]] = changes[position][2]
            position += 1
        if latest:
            values = list(latest.values())
            for column, value in zip(
                (found.times, found.middle, found.low, found.high),
                (time, median(values), min(values), max(values)),
                strict=True,
            ):
                column.append(value)
    return found


def typical(tracks: dict[int, Track], trips: Sequence[Trip]) -> list[int]:
    """Up to three devices worth showing: the busiest, one in the middle, the least busy of those with a track."""
    counts = dict.fromkeys(tracks, 0)
    for trip in trips:
        if trip.device in counts:
            counts[trip.device] += 1
    order = sorted(counts, key=lambda device: (-counts[device], device))
    return list(dict.fromkeys(order[place] for place in (0, len(order) // 2, len(order) - 1))) if order else []


@dataclass(frozen=True)
class Shares:
    """Counts over time: ``counts[choice][bin]``; ``edges`` has one entry more than there are bins."""

    edges: list[float]
    counts: dict[str, list[int]]


def _binned(times_and_names: Sequence[tuple[float, str]], names: Sequence[str], end: float, bins: int) -> Shares:
    width = end / bins if end > 0 else 1.0
    counts = {name: [0] * bins for name in names}
    for time, name in times_and_names:
        if name in counts:
            counts[name][min(bins - 1, max(0, int(time / width)))] += 1
    return Shares([index * width for index in range(bins + 1)], counts)


def slot_shares(run: RunData, trips: Sequence[Trip], bins: int = 24) -> Shares | None:
    """Which epoch devices chose to ask in, over the time of their triggers; None when nobody asks."""
    chosen = [(trip.start, str(trip.slot)) for trip in trips if trip.slot is not None and 0 < trip.slot <= _MOST_SLOTS]
    names = [str(slot) for slot in sorted({int(name) for _, name in chosen})]
    return _binned(chosen, names, run.end, bins) if chosen else None


def chooser_shares(run: RunData, trips: Sequence[Trip], bins: int = 24) -> Shares | None:
    """Who chose the slot: the meta model, the Q-table, exploration or a fixed rule."""
    chosen = [(trip.start, trip.slot_by) for trip in trips if trip.slot_by in WHO]
    present = [name for name in WHO if any(by == name for _, by in chosen)]
    return _binned([(time, str(by)) for time, by in chosen], present, run.end, bins) if chosen else None
