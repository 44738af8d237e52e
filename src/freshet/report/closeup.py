"""One run in detail: weights, controls, slots, data and the scores of single devices.

The first half extracts numbers from the log. The second half turns them into Plotly figures as plain dicts, with
colours as in ``plots``.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, NamedTuple

from freshet.report.plots import Figure, log_axis, round_all, text
from freshet.report.reading import Record, RunData, clock_of
from freshet.report.trips import TripRecord, timeline, trips_of
from freshet.runs.records import Maybe, contributors, integer, number

CHOOSER_NAMES = ("meta", "q", "explore", "fixed")
_MAX_SLOTS = 50


@dataclass(frozen=True, slots=True)
class WeightedUpload:
    """An aggregated upload."""

    device: int
    time: float
    staleness: int
    alpha: float


def weighted_uploads(run: RunData) -> list[WeightedUpload]:
    """All aggregated uploads that have a staleness and a weight."""
    return [
        WeightedUpload(each.device, float(event["time"]), each.staleness, each.weight)
        for event in run.events.of("aggregate")
        for each in contributors(event)
        if each.device is not None and each.staleness is not None and each.weight is not None
    ]


class Track:
    """The values of one device over time, in compact arrays."""

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
    """Values over time, by curve and device, for the curves that the log has numbers for."""
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
    """A control over the fleet at some times: median and extremes of the devices' latest values."""

    times: list[float]
    middle: list[float]
    low: list[float]
    high: list[float]


def bands(tracks: dict[int, Track], end: float, points: int = 120) -> Bands:
    """The bands at evenly spaced times. A device counts from its first value on."""
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


def typical(tracks: dict[int, Track], trips: Sequence[TripRecord]) -> list[int]:
    """Up to three devices to show: of those with a track, the busiest, the median and the least busy."""
    counts = dict.fromkeys(tracks, 0)
    for trip in trips:
        if trip.device in counts:
            counts[trip.device] += 1
    order = sorted(counts, key=lambda device: (-counts[device], device))
    return list(dict.fromkeys(order[place] for place in (0, len(order) // 2, len(order) - 1))) if order else []


@dataclass(frozen=True)
class Shares:
    """Counts over time, ``counts[choice][bin]``; ``edges`` has one entry more than there are bins."""

    edges: list[float]
    counts: dict[str, list[int]]


def _count_per_bin(times_and_names: Sequence[tuple[float, str]], names: Sequence[str], end: float, bins: int) -> Shares:
    width = end / bins if end > 0 else 1.0
    counts = {name: [0] * bins for name in names}
    for time, name in times_and_names:
        if name in counts:
            counts[name][min(bins - 1, max(0, int(time / width)))] += 1
    return Shares([index * width for index in range(bins + 1)], counts)


def slot_shares(run: RunData, trips: Sequence[TripRecord], bins: int = 24, pushed: bool = False) -> Shares | None:
    """The epochs before which devices request a fresh model, by trigger time; None if no device requests one.

    ``pushed``: the epochs before which they merge what the server pushed.
    """
    slots = [
        (trip.start, fresh.slot)
        for trip in trips
        for fresh in trip.fresh
        if fresh.pushed == pushed and fresh.slot is not None and 0 < fresh.slot <= _MAX_SLOTS
    ]
    names = [str(slot) for slot in sorted({slot for _, slot in slots})]
    return _count_per_bin([(time, str(slot)) for time, slot in slots], names, run.end, bins) if slots else None


def chooser_shares(run: RunData, trips: Sequence[TripRecord], bins: int = 24) -> Shares | None:
    """What chose the first slot of a trip: the meta model, the Q-table, exploration or a fixed rule.

    Further requests of a trip follow one epoch after another and are not chosen.
    """
    chosen = [(trip.start, fresh.slot_by) for trip in trips for fresh in trip.fresh if fresh.slot_by in CHOOSER_NAMES]
    present = [name for name in CHOOSER_NAMES if any(by == name for _, by in chosen)]
    return _count_per_bin([(time, str(by)) for time, by in chosen], present, run.end, bins) if chosen else None


# ---- figures

#: A scatter plot with more points is thinned evenly.
MAX_POINTS = 2_500
_MAX_TRACK_POINTS = 150
#: A control whose values all lie within this share of their size hardly moves.
STILL = 1e-3
_MAX_CELLS = 200_000
CHOOSERS = {"meta": "meta model", "q": "Q-table", "explore": "exploration", "fixed": "fixed rule"}


def closeup(run: RunData, trips: list[TripRecord] | None = None) -> Record:
    """The timeline and the figures of one run; None for a figure without data."""
    trips = trips_of(run) if trips is None else trips
    return {
        "timeline": timeline(run, trips) if trips else None,
        "alpha": alpha_figure(run),
        "controls": control_figures(run, trips),
        "slots": slots_figure(run, trips),
        "choosers": shares_figure(chooser_shares(run, trips), "who", "trips", clock_of([run])),
        "clock": clock_of([run]),
        "partition": partition_figure(run),
        "devices": devices_figures(run),
    }


def alpha_figure(run: RunData) -> Figure | None:
    """Weight of an upload over its staleness, coloured by the training time of the device."""
    points = weighted_uploads(run)
    if not points:
        return None
    shown = points[:: -(-len(points) // MAX_POINTS)]
    seconds = run.world.train_seconds if run.world is not None else []
    known = all(0 <= point.device < len(seconds) for point in shown)
    shade = [round(seconds[point.device], 1) if known else point.device for point in shown]
    title = "training time (s)" if known else "device"
    bar = {"title": {"text": title, "side": "right"}, "thickness": 10, "outlinewidth": 0, "len": 0.9, "ticks": ""}
    marker = {"size": 6, "opacity": 0.72, "color": shade, "colorscale": "@scale", "showscale": True, "colorbar": bar}
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [point.staleness for point in shown],
        "y": [float(f"{point.alpha:.4g}") for point in shown],
        "customdata": [[point.device, round(point.time, 1)] for point in shown],
        "marker": marker | {"line": {"width": 0}},
        "hovertemplate": "device %{customdata[0]} at %{customdata[1]} s<br>α %{y:.4f}, staleness %{x}<extra></extra>",
    }
    low, high = min(point.alpha for point in shown), max(point.alpha for point in shown)
    scale = log_axis(low, high) if 0 < 20 * low < high else {"rangemode": "tozero"}
    layout = {
        "xaxis": {"title": {"text": "staleness (versions; 1 is fresh)"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "α, weight of the upload"}, **scale},
        "hovermode": "closest",
    }
    left_out = f"{len(shown):,} of {len(points):,} uploads, evenly chosen" if len(shown) < len(points) else ""
    return {"data": [trace], "layout": layout, "note": left_out}


def control_figures(run: RunData, trips: Sequence[TripRecord]) -> list[Record]:
    """One small figure per control: median and range over the fleet, and three devices."""
    tracks = controls(run)
    return [
        {"name": each.name, "symbol": each.symbol, "meaning": each.meaning, **_control(run, trips, tracks[each.name])}
        for each in run.curves
        if each.name in tracks
    ]


def _control(run: RunData, trips: Sequence[TripRecord], tracks: dict[int, Track]) -> Figure:
    fleet = bands(tracks, run.end)
    xs = round_all(fleet.times, 2)
    edge = {"type": "scatter", "mode": "lines", "x": xs, "line": {"width": 0, "color": "@c0"}, "hoverinfo": "skip"}
    data: list[Record] = [
        edge | {"y": round_all(fleet.low, 7)},
        edge | {"y": round_all(fleet.high, 7), "fill": "tonexty", "fillcolor": "@c0/14"},
    ]
    for device in typical(tracks, trips):
        track = list(tracks[device])[:: max(1, -(-len(tracks[device]) // _MAX_TRACK_POINTS))]
        data.append({
            "type": "scatter", "mode": "lines", "name": f"device {device}",
            "x": round_all([time for time, _ in track], 2), "y": round_all([value for _, value in track], 7),
            "line": {"width": 1, "color": "@muted", "shape": "hv"},
            "hovertemplate": f"device {device}: %{{y:.6g}} at %{{x:.0f}} s<extra></extra>",
        })  # fmt: skip
    data.append({
        "type": "scatter", "mode": "lines", "name": "median", "x": xs, "y": round_all(fleet.middle, 7),
        "line": {"width": 2.25, "color": "@c0"},
        "hovertemplate": "median %{y:.6g} at %{x:.0f} s<extra></extra>",
    })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": f"{clock_of([run])} (s)"}, "nticks": 6},
        "yaxis": {"nticks": 5, "automargin": True, "exponentformat": "none"},
        "hovermode": "closest",
        "height": 230,
    }
    values = [value for track in tracks.values() for _, value in track]
    return {"data": data, "layout": _with_still_axis(layout, min(values), max(values))}


def _with_still_axis(layout: Record, low: float, high: float) -> Record:
    """The layout; for values that hardly move, with a wider axis and a note that says so."""
    size = max(abs(low), abs(high))
    if high - low >= STILL * size and size > 0:
        return layout
    middle, room = (low + high) / 2, 0.05 * size or 1.0
    said = f"always {low:.6g}" if low == high else f"hardly moves: {low:.7g} to {high:.7g}"
    note = {
        "xref": "paper", "x": 0.5, "yref": "paper", "y": 0.94, "yanchor": "top", "text": said, "showarrow": False,
        "font": {"color": "@muted", "size": 12},
    }  # fmt: skip
    axis = layout["yaxis"] | {"range": [middle - room, middle + room]}
    return layout | {"yaxis": axis, "annotations": [note]}


def slots_figure(run: RunData, trips: Sequence[TripRecord]) -> Figure | None:
    """When devices ask for fresh models or, if they ask for none, when they merge what the server pushed."""
    clock = clock_of([run])
    asked = shares_figure(slot_shares(run, trips), "slot", "requests", clock)
    if asked is not None:
        told = {"title": "When devices ask", "note": "Epoch before which a device asks for a fresh model."}
        return asked | told
    pushed = shares_figure(slot_shares(run, trips, pushed=True), "slot", "merges", clock)
    told = {"title": "When pushed models are merged", "note": "Epoch before which a device merges a pushed model."}
    return None if pushed is None else pushed | told


def shares_figure(shares: Shares | None, kind: str, counted: str, clock: str = "virtual time") -> Figure | None:
    """Stacked shares over time: slots in shades from light to dark, choosers in distinct colours."""
    if shares is None:
        return None
    totals = [max(1, sum(column)) for column in zip(*shares.counts.values(), strict=True)]
    width = shares.edges[1] - shares.edges[0]
    middles = [round(edge + width / 2, 3) for edge in shares.edges[:-1]]
    names, data = list(shares.counts), []
    for place, (name, counts) in enumerate(shares.counts.items()):
        label = f"epoch {name}" if kind == "slot" else CHOOSERS.get(name, text(name))
        shade = f"@ramp/{round(100 * (place + 0.5) / len(names))}" if kind == "slot" else f"@c{place}"
        data.append({
            "type": "bar", "name": label, "x": middles, "width": width,
            "y": [round(100 * count / total, 2) for count, total in zip(counts, totals, strict=True)],
            "customdata": counts, "marker": {"color": shade, "line": {"width": 0.6, "color": "@paper"}},
            "hovertemplate": f"{label}: %{{y:.0f}} % (%{{customdata}} {counted})<extra></extra>",
        })  # fmt: skip
    layout = {
        "barmode": "stack", "bargap": 0, "hovermode": "closest", "showlegend": True, "height": 280,
        "xaxis": {"title": {"text": f"{clock} (s)"}, "range": [0, round(shares.edges[-1], 3)]},
        "yaxis": {"title": {"text": f"share of {counted} (%)"}, "range": [0, 100]},
    }  # fmt: skip
    return {"data": data, "layout": layout}


def partition_figure(run: RunData) -> Figure | None:
    """Samples of each class on each device."""
    world = run.world
    if world is None or not 0 < len(world) * len(world.classes) <= _MAX_CELLS:
        return None
    by_class = [list(column) for column in zip(*world.label_counts, strict=True)]
    trace = {
        "type": "heatmap", "z": by_class, "colorscale": "@ramp", "xgap": 1 if len(world) <= 120 else 0, "ygap": 1,
        "colorbar": {"title": {"text": "samples", "side": "right"}, "thickness": 10, "outlinewidth": 0, "len": 0.95,
                     "ticks": ""},
        "hovertemplate": "device %{x}, class %{y}: %{z} samples<extra></extra>",
    }  # fmt: skip
    places = list(range(len(world.classes)))
    step = -(-len(places) // 20)
    layout = {
        "xaxis": {"title": {"text": "device"}, "showgrid": False, "zeroline": False},
        "yaxis": {
            "title": {"text": "class"}, "showgrid": False, "zeroline": False, "autorange": "reversed",
            "tickvals": places[::step], "ticktext": [text(name) for name in world.classes[::step]],
        },
        "hovermode": "closest", "height": min(620, 110 + 20 * min(len(places), 25)),
    }  # fmt: skip
    return {"data": [trace], "layout": layout}


#: Device evaluations with longer lists are ignored.
_MAX_DEVICES = 100_000
_PERSONAL = "personal_accuracy"


class DeviceAccuracies(NamedTuple):
    """One evaluation on the devices: when, and the accuracy on each (None: no score)."""

    time: float
    plain: list[Maybe]
    #: Accuracy after local steps; empty if personalisation was not evaluated.
    personal: list[Maybe]


def device_accuracies(run: RunData) -> list[DeviceAccuracies]:
    """The device evaluations in the log that have scores. A value of the wrong type counts as missing."""
    events = run.events.of("devices")
    found = [
        DeviceAccuracies(float(e["time"]), _numbers(e.get("accuracy")), _numbers(e.get(_PERSONAL))) for e in events
    ]
    return [test for test in found if any(value is not None for value in test.plain)]


def _numbers(value: Any) -> list[Maybe]:
    return [number(each) for each in value] if isinstance(value, list) and len(value) <= _MAX_DEVICES else []


def devices_figures(run: RunData) -> Record | None:
    """Bands over time and two scatter plots; None for a run without device evaluations."""
    tests = device_accuracies(run)
    if not tests:
        return None
    seconds = run.world.train_seconds if run.world is not None else []
    samples = run.world.samples if run.world is not None else []
    return {
        "time": tests[-1].time,
        "band": band_figure(tests, clock_of([run])),
        "speed": scatter_figure(tests[-1], seconds, "training time (s)", "%{x:.1f} s", samples, "samples"),
        "samples": scatter_figure(tests[-1], samples, "samples", "%{x} samples", seconds, "training time (s)"),
    }


def band_figure(tests: Sequence[DeviceAccuracies], clock: str = "virtual time") -> Figure:
    """Worst to best in pale, 10th to 90th percentile darker, the median as a line, personalised scores dashed."""
    xs = round_all([test.time for test in tests], 3)
    parts = [_five_numbers([value for value in test.plain if value is not None]) for test in tests]
    worst, low, middle, high, best = (round_all([100 * part[place] for part in parts], 2) for place in range(5))
    edge = {"type": "scatter", "mode": "lines", "x": xs, "line": {"width": 0, "color": "@c0"}, "hoverinfo": "skip"}
    data: list[Record] = [
        edge | {"y": worst, "showlegend": False},
        edge | {"y": best, "fill": "tonexty", "fillcolor": "@c0/12", "name": "worst to best"},
        edge | {"y": low, "showlegend": False},
        edge | {"y": high, "fill": "tonexty", "fillcolor": "@c0/26", "name": "10th to 90th percentile"},
        {
            "type": "scatter", "mode": "lines+markers", "name": "median device", "x": xs, "y": middle,
            "line": {"width": 2.25, "color": "@c0"}, "marker": {"size": 4},
            "customdata": [list(row) for row in zip(worst, low, high, best, strict=True)],
            "hovertemplate": "median %{y:.1f} % at %{x:.0f} s<br>10th to 90th percentile %{customdata[1]:.1f} to "
            "%{customdata[2]:.1f}<br>worst %{customdata[0]:.1f}, best %{customdata[3]:.1f}<extra></extra>",
        },
    ]  # fmt: skip
    scored = [(test.time, [value for value in test.personal if value is not None]) for test in tests]
    personal = [(time, _five_numbers(values)) for time, values in scored if values]
    for place, name, dash in ((2, "median, personalised", "dash"), (0, "worst, personalised", "dot")):
        if personal:
            data.append({
                "type": "scatter", "mode": "lines", "name": name, "x": round_all([time for time, _ in personal], 3),
                "y": round_all([100 * part[place] for _, part in personal], 2),
                "line": {"width": 1.75, "color": "@c1", "dash": dash},
                "hovertemplate": f"{name}: %{{y:.1f}} % at %{{x:.0f}} s<extra></extra>",
            })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": f"{clock} (s)"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "accuracy on the device (%)"}, "range": [0, 100]},
        "hovermode": "closest", "showlegend": True,
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _five_numbers(values: Sequence[float]) -> tuple[float, float, float, float, float]:
    """Least, 10th percentile, median, 90th percentile, greatest."""
    tenths = quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return min(values), tenths[0], median(values), tenths[-1], max(values)


def scatter_figure(
    test: DeviceAccuracies, xs: Sequence[float], title: str, shown: str, shades: Sequence[float], shade: str
) -> Figure | None:
    """One point per device, coloured by ``shades``; personalised scores hollow. None if the fleet is not known."""
    if len(xs) != len(test.plain) or len(shades) != len(xs):
        return None
    bar = {"title": {"text": shade, "side": "right"}, "thickness": 10, "outlinewidth": 0, "len": 0.9, "ticks": ""}
    look = {"size": 7, "opacity": 0.85, "colorscale": "@scale"}
    data: list[Record] = []
    for values, name, symbol in (
        (test.plain, "global model", "circle"),
        (test.personal, "personalised", "circle-open"),
    ):
        there = [device for device, value in enumerate(values) if value is not None]
        if not there:
            continue
        colours = {"color": [round(shades[device], 3) for device in there], "showscale": not data, "colorbar": bar}
        data.append({
            "type": "scatter", "mode": "markers", "name": name, "x": [round(xs[device], 3) for device in there],
            "y": round_all([100 * (values[device] or 0.0) for device in there], 2), "customdata": there,
            "marker": look | colours | {"symbol": symbol},
            "hovertemplate": f"device %{{customdata}}, {name}: %{{y:.1f}} %<br>{shown}<extra></extra>",
        })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "accuracy on the device (%)"}, "range": [-3, 103]},
        "hovermode": "closest", "showlegend": len(data) > 1,
    }  # fmt: skip
    return {"data": data, "layout": layout}
