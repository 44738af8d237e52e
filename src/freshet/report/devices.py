"""How the devices of one run fare: their accuracy over time as bands, and at the end against speed and samples."""

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any, NamedTuple

from freshet.report.log import Record
from freshet.report.plots import Figure, rounded
from freshet.report.reading import RunData
from freshet.runs.facts import Maybe, number

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
