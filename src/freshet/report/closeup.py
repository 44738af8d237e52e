"""Plotly figures of one run, as plain dicts: weights, controls, slots and data (colours as in ``plots``).

How the devices of one run fare: their accuracy over time as bands, and at the end against speed and samples.
"""

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple

from freshet.report.extract import Shares, Track, bands, chooser_shares, controls, slot_shares, typical, weighted
from freshet.report.log import Record
from freshet.report.plots import Figure, log_axis, rounded, text
from freshet.report.reading import RunData
from freshet.report.trips import Trip, timeline, trips_of
from freshet.runs.records import Maybe, number

#: A scatter plot with more points is thinned evenly.
MOST_POINTS = 2_500
_TRACK = 150
_MOST_CELLS = 200_000
CHOOSERS = {"meta": "meta model", "q": "Q-table", "explore": "exploration", "fixed": "fixed rule"}


def closeup(run: RunData, trips: list[Trip] | None = None) -> Record:
    """Everything the page shows of one run: its timeline and its figures, absent ones as None."""
    trips = trips_of(run) if trips is None else trips
    return {
        "timeline": timeline(run, trips) if trips else None,
        "alpha": alpha_figure(run),
        "controls": control_figures(run, trips),
        "slots": shares_figure(slot_shares(run, trips), "slot"),
        "choosers": shares_figure(chooser_shares(run, trips), "who"),
        "partition": partition_figure(run),
        "devices": devices_figures(run),
    }


def alpha_figure(run: RunData) -> Figure | None:
    """Weight of an upload against its staleness, coloured by how fast the device trains."""
    points = weighted(run)
    if not points:
        return None
    shown = points[:: -(-len(points) // MOST_POINTS)]
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


def control_figures(run: RunData, trips: Sequence[Trip]) -> list[Record]:
    """One small figure per control: the fleet's median and range, and three devices."""
    tracks = controls(run)
    return [
        {"name": each.name, "symbol": each.symbol, "meaning": each.meaning, **_control(run, trips, tracks[each.name])}
        for each in run.curves
        if each.name in tracks
    ]


def _control(run: RunData, trips: Sequence[Trip], tracks: dict[int, Track]) -> Figure:
    fleet = bands(tracks, run.end)
    xs = rounded(fleet.times, 2)
    edge = {"type": "scatter", "mode": "lines", "x": xs, "line": {"width": 0, "color": "@c0"}, "hoverinfo": "skip"}
    data: list[Record] = [
        edge | {"y": rounded(fleet.low, 7)},
        edge | {"y": rounded(fleet.high, 7), "fill": "tonexty", "fillcolor": "@c0/14"},
    ]
    for device in typical(tracks, trips):
        track = list(tracks[device])[:: max(1, -(-len(tracks[device]) // _TRACK))]
        data.append({
            "type": "scatter", "mode": "lines", "name": f"device {device}",
            "x": rounded([time for time, _ in track], 2), "y": rounded([value for _, value in track], 7),
            "line": {"width": 1, "color": "@muted", "shape": "hv"},
            "hovertemplate": f"device {device}: %{{y:.6g}} at %{{x:.0f}} s<extra></extra>",
        })  # fmt: skip
    data.append({
        "type": "scatter", "mode": "lines", "name": "median", "x": xs, "y": rounded(fleet.middle, 7),
        "line": {"width": 2.25, "color": "@c0"},
        "hovertemplate": "median %{y:.6g} at %{x:.0f} s<extra></extra>",
    })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "virtual time (s)"}, "nticks": 6},
        "yaxis": {"nticks": 5, "automargin": True, "exponentformat": "none"},
        "hovermode": "closest",
        "height": 230,
    }
    return {"data": data, "layout": layout}


def shares_figure(shares: Shares | None, kind: str) -> Figure | None:
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
            "hovertemplate": f"{label}: %{{y:.0f}} % (%{{customdata}} trips)<extra></extra>",
        })  # fmt: skip
    layout = {
        "barmode": "stack", "bargap": 0, "hovermode": "closest", "showlegend": True, "height": 280,
        "xaxis": {"title": {"text": "virtual time (s)"}, "range": [0, round(shares.edges[-1], 3)]},
        "yaxis": {"title": {"text": "share of trips (%)"}, "range": [0, 100]},
    }  # fmt: skip
    return {"data": data, "layout": layout}


def partition_figure(run: RunData) -> Figure | None:
    """Samples of each class on each device."""
    world = run.world
    if world is None or not 0 < len(world) * len(world.classes) <= _MOST_CELLS:
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


#: Events with lists longer than this are not looked at.
_MOST_DEVICES = 100_000
_PERSONAL = "personal_accuracy"


class Sounding(NamedTuple):
    """One test on the devices: when, and what each scores (None: no score)."""

    time: float
    plain: list[Maybe]
    #: After local steps; empty where that was not asked for.
    personal: list[Maybe]


def soundings(run: RunData) -> list[Sounding]:
    """The tests on the devices that are in the log, as long as their lists are; a value of another type is none."""
    events = run.events.of("devices")
    found = [Sounding(float(e["time"]), _numbers(e.get("accuracy")), _numbers(e.get(_PERSONAL))) for e in events]
    return [test for test in found if any(value is not None for value in test.plain)]


def _numbers(value: Any) -> list[Maybe]:
    return [number(each) for each in value] if isinstance(value, list) and len(value) <= _MOST_DEVICES else []


def devices_figures(run: RunData) -> Record | None:
    """Bands over time and two scatters; None for a run without such tests."""
    tests = soundings(run)
    if not tests:
        return None
    seconds = run.world.train_seconds if run.world is not None else []
    samples = run.world.samples if run.world is not None else []
    return {
        "time": tests[-1].time,
        "band": band_figure(tests),
        "speed": scatter(tests[-1], seconds, "training time (s)", "%{x:.1f} s", samples, "samples"),
        "samples": scatter(tests[-1], samples, "samples", "%{x} samples", seconds, "training time (s)"),
    }


def band_figure(tests: Sequence[Sounding]) -> Figure:
    """Worst to best in pale, 10th to 90th percentile darker, the median as a line; personalised dashed."""
    xs = rounded([test.time for test in tests], 3)
    parts = [_five([value for value in test.plain if value is not None]) for test in tests]
    worst, low, middle, high, best = (rounded([100 * part[place] for part in parts], 2) for place in range(5))
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
    personal = [(test.time, _five(there)) for test in tests if (there := [v for v in test.personal if v is not None])]
    for place, name, dash in ((2, "median, personalised", "dash"), (0, "worst, personalised", "dot")):
        if personal:
            data.append({
                "type": "scatter", "mode": "lines", "name": name, "x": rounded([time for time, _ in personal], 3),
                "y": rounded([100 * part[place] for _, part in personal], 2),
                "line": {"width": 1.75, "color": "@c1", "dash": dash},
                "hovertemplate": f"{name}: %{{y:.1f}} % at %{{x:.0f}} s<extra></extra>",
            })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "virtual time (s)"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "accuracy on the device (%)"}, "range": [0, 100]},
        "hovermode": "closest", "showlegend": True,
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _five(values: Sequence[float]) -> tuple[float, float, float, float, float]:
    """Least, 10th percentile, median, 90th percentile, greatest."""
    tenths = quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return min(values), tenths[0], median(values), tenths[-1], max(values)


def scatter(
    test: Sounding, xs: Sequence[float], title: str, shown: str, shades: Sequence[float], shade: str
) -> Figure | None:
    """A point per device, coloured by the other figure; hollow ones are personalised. None without the fleet's."""
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
            "y": rounded([100 * (values[device] or 0.0) for device in there], 2), "customdata": there,
            "marker": look | colours | {"symbol": symbol},
            "hovertemplate": f"device %{{customdata}}, {name}: %{{y:.1f}} %<br>{shown}<extra></extra>",
        })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "accuracy on the device (%)"}, "range": [-3, 103]},
        "hovermode": "closest", "showlegend": len(data) > 1,
    }  # fmt: skip
    return {"data": data, "layout": layout}
