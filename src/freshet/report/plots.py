"""Plotly figures that compare methods, and the panels of an experiment, as plain dicts.

Colours are names such as ``@c0`` (the first method's colour), ``@c0/18`` (the same at 18 %) or ``@ink``. The page
replaces them by colours of its light or dark theme. The ``meta`` of a trace names its group, so that the legend can
hide it.
"""

import html
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from freshet.report.columns import format_target, kind_of
from freshet.report.groups import Group, common_step, metric_of_groups
from freshet.report.palette import COLOURS, dash
from freshet.report.panels import Bar, Bars, Curves, Panel
from freshet.report.reading import Record, RunData, clock_of
from freshet.report.statistics import band, histogram, on_grid, regular_grid
from freshet.runs.records import Maybe, number

Figure = dict[str, Any]
_GRID_POINTS = 240
_MAX_STEPS = 600
WALL_KEYS = ("wall", "wall_seconds", "wall_time")


def text(value: str) -> str:
    """Text from outside, escaped: Plotly interprets some HTML in labels."""
    return html.escape(value, quote=False)


def colour(style: int, percent: int | None = None) -> str:
    """The page's name for the colour of a style."""
    return f"@c{style % COLOURS}" + ("" if percent is None else f"/{percent}")


def round_all(values: Sequence[Maybe], digits: int = 4) -> list[Maybe]:
    return [None if value is None else round(value, digits) for value in values]


# ---- accuracy


def x_time(run: RunData) -> list[Maybe]:
    return run.column("time")


def x_bytes(run: RunData) -> list[Maybe]:
    """Megabytes up and down at each test."""
    pairs = zip(run.column("bytes_up"), run.column("bytes_down"), strict=True)
    return [None if up is None or down is None else (up + down) / 1e6 for up, down in pairs]


def x_wall(run: RunData) -> list[Maybe]:
    """Seconds of real time at each test, if the log has them."""
    return [next((v for key in WALL_KEYS if (v := number(row.get(key))) is not None), None) for row in run.metrics]


def x_rounds(run: RunData) -> list[Maybe]:
    """Completed rounds at each test. For an asynchronous method, a round is a fixed number of uploads."""
    return run.column("rounds")


class Measure(NamedTuple):
    """A number of metrics.jsonl that is drawn over time: key, title, factor, digits, and hover format."""

    key: str
    title: str
    factor: float
    digits: int
    shown: str


ACCURACY = Measure("accuracy", "test accuracy (%)", 100.0, 1, "%{y:.1f} %")
LOSS = Measure("loss", "test loss", 1.0, 3, "%{y:.4g}")
AXES = {
    "time": (x_time, "{clock} (s)", "%{x:.0f} s"),
    "rounds": (x_rounds, "rounds", "round %{x:.0f}"),
    "bytes": (x_bytes, "traffic up and down (MB)", "%{x:.1f} MB"),
    "wall": (x_wall, "wall time (s)", "%{x:.1f} s"),
}


def axis_title(axis: str, groups: Sequence[Group]) -> str:
    """The title of a horizontal axis. Only the time of a simulation is virtual."""
    return AXES[axis][1].format(clock=clock_of(run for group in groups for run in group.runs))


def measure_of(groups: Sequence[Group]) -> Measure:
    """How the metric of the runs is drawn: an accuracy in per cent, any other metric unchanged."""
    name = metric_of_groups(groups).name
    return ACCURACY if name == "accuracy" else Measure(name, f"test {name}", 1.0, 4, "%{y:.4g}")


def accuracy(groups: Sequence[Group], target: Maybe, axis: str) -> Figure | None:
    """The metric of the runs over virtual time, rounds, bytes or wall time: median and band over seeds.

    Unfinished runs are dashed.
    """
    measure = measure_of(groups)
    figure = _measure_figure(groups, measure, axis)
    if figure is None:
        return None
    span: Record = {"range": [0, 100]} if measure is ACCURACY else {"rangemode": "tozero"}
    figure["layout"] |= {"yaxis": {"title": {"text": measure.title}, **span}}
    if target is not None:
        y = measure.factor * target
        note = _target_note(y, format_target(target, metric_of_groups(groups)))
        figure["layout"] |= {"shapes": [target_line(y)], "annotations": [note]}
    return figure


def target_line(y: float) -> Record:
    """A horizontal line across the figure, behind the curves."""
    line = {"color": "@muted", "width": 1, "dash": "dot"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line, "layer": "below"}


def loss(groups: Sequence[Group], axis: str) -> Figure | None:
    """The same for the test loss, on a logarithmic axis if it spans more than a factor of 20."""
    figure = _measure_figure(groups, LOSS, axis)
    if figure is None:
        return None
    values = [y for trace in figure["data"] for y in trace["y"] if y is not None and y > 0]
    wide = bool(values) and max(values) > 20 * min(values)
    scale = log_axis(min(values), max(values)) if wide else {"rangemode": "tozero"}
    figure["layout"]["yaxis"] = {"title": {"text": LOSS.title}, **scale}
    return figure


def log_axis(low: float, high: float) -> Record:
    """A logarithmic axis with plain labels: 0.01, 0.02, 0.05, ..."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{digit}e{decade}") for decade in decades for digit in ((1, 2, 5) if len(decades) < 5 else (1,))]
    ticks = ticks[:: -(-len(ticks) // 12)]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def _measure_figure(groups: Sequence[Group], measure: Measure, axis: str) -> Figure | None:
    """The curves of one measure for all groups; None if there are none."""
    step = common_step([run for group in groups for run in group.runs]) if axis == "time" else None
    data = [trace for index, group in enumerate(groups) for trace in _curves(group, index, measure, axis, step)]
    layout = {
        "xaxis": {"title": {"text": axis_title(axis, groups)}, "rangemode": "tozero"},
        "hovermode": "x unified" if axis == "time" else "closest",
    }
    return {"data": data, "layout": layout} if data else None


def _target_note(y: float, target: str) -> Record:
    return {
        "xref": "paper", "x": 0, "xanchor": "left", "y": y, "yanchor": "bottom", "xshift": 6,
        "text": f"target {target}", "showarrow": False, "font": {"color": "@muted", "size": 11},
    }  # fmt: skip


def _curves(group: Group, index: int, measure: Measure, axis: str, step: float | None) -> list[Record]:
    get, _, shown_x = AXES[axis]
    key, factor, digits = measure.key, measure.factor, measure.digits
    traces: list[Record] = []
    tested = [(run, _curve(get(run), run.column(key))) for run in group.ended_runs]
    tested = [(run, curve) for run, curve in tested if any(y is not None for y in curve[1])]
    curves = [curve for _, curve in tested]
    look = (index, group.style)
    if len(curves) == 1:
        xs, ys = curves[0]
        traces.append(_line(group.label, look, xs, _scale(ys, measure)))
    elif curves:
        grid = _grid(_last(tested), step)
        points = band([on_grid(xs, ys, grid) for xs, ys in curves])
        there = [(x, point) for x, point in zip(grid, points, strict=True) if point.median is not None]
        xs = [x for x, _ in there]
        low, high, middle = (
            _scale([getattr(p, part) for _, p in there], measure) for part in ("low", "high", "median")
        )
        traces += _ribbon(look, xs, low, high)
        line = _line(group.label, look, xs, middle)
        line["customdata"] = [round_all([factor * (p.low or 0), factor * (p.high or 0)], digits) for _, p in there]
        traces.append(line)
    for run in group.runs:
        if not run.finished:
            xs, ys = _curve(get(run), run.column(key))
            if xs:
                name = f"{run.name} ({run.status})"
                traces.append(_line(name, look, xs, _scale(ys, measure), unfinished=True))
    for trace in traces:
        if trace.get("hoverinfo") != "skip":
            spread = (
                f" (%{{customdata[0]:.{digits}f}} to %{{customdata[1]:.{digits}f}})" if "customdata" in trace else ""
            )
            where = "" if axis == "time" else f" at {shown_x}"
            trace["hovertemplate"] = f"{measure.shown}{spread}{where}"
    return traces


def _scale(ys: Sequence[Maybe], measure: Measure) -> list[Maybe]:
    """Values in the unit of the measure. A loss keeps five significant digits."""
    if measure.factor == 100.0:
        return round_all([None if y is None else 100.0 * y for y in ys], 2)
    return [None if y is None else float(f"{y * measure.factor:.5g}") for y in ys]


def _curve(xs: Sequence[Maybe], ys: Sequence[Maybe]) -> tuple[list[float], list[Maybe]]:
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _last(tested: Sequence[tuple[RunData, tuple[list[float], list[Maybe]]]]) -> float:
    """End of the common curve: as far as all runs reach. A diverged run keeps its last value and does not count."""
    going = [xs[-1] for run, (xs, _) in tested if run.diverged_at is None]
    return min(going) if going else max(xs[-1] for _, (xs, _) in tested)


def _grid(last: float, step: float | None) -> list[float]:
    """Multiples of ``step``, or evenly spaced points if they are too many or there is no step."""
    if step is not None and last / step <= _MAX_STEPS:
        grid = regular_grid(step, last)
        return grid if not grid or last - grid[-1] < 1e-9 * max(1.0, last) else [*grid, last]
    return [last * point / _GRID_POINTS for point in range(_GRID_POINTS + 1)]


Look = tuple[int, int]
"""Index of a group, and its style."""


def _line(name: str, look: Look, xs: Sequence[float], ys: Sequence[Maybe], unfinished: bool = False) -> Record:
    index, style = look
    return {
        "type": "scatter",
        "mode": "lines",
        "name": text(name),
        "x": round_all(xs, 3),
        "y": list(ys),
        "line": {
            "color": colour(style),
            "width": 1.5 if unfinished else 2.25,
            "dash": "dash" if unfinished else dash(style),
        },
        "meta": {"group": index},
    }


def _ribbon(look: Look, xs: Sequence[float], low: Sequence[Maybe], high: Sequence[Maybe]) -> list[Record]:
    index, style = look
    edge: Record = {"type": "scatter", "mode": "lines", "x": round_all(xs, 3)}
    edge["line"] = {"width": 0, "color": colour(style)}
    edge |= {"hoverinfo": "skip", "showlegend": False, "meta": {"group": index}}
    return [edge | {"y": list(low)}, edge | {"y": list(high), "fill": "tonexty", "fillcolor": colour(style, 16)}]


# ---- time to target


def time_to_target(lines: Sequence[Record], clock: str = "virtual time") -> Figure | None:
    """Bars per method: raw first crossing and the crossing of the 5-point mean, with the spread over seeds."""
    if not any(line[key]["count"] for line in lines for key in ("time_raw", "time_mean")):
        return None
    labels = [_short_label(line["label"]) for line in lines]
    data = [_bars(lines, key, name, percent) for key, name, percent in _KINDS]
    notes = [note for row, line in enumerate(lines) for note in _dashes(line, row)]
    layout = {
        "barmode": "group", "bargap": 0.34, "bargroupgap": 0.12,
        "xaxis": {"title": {"text": f"{clock} to the target (s)"}, "rangemode": "tozero"},
        "yaxis": {"range": [len(lines) - 0.5, -0.5], "showgrid": False, "automargin": True, "ticklabelstandoff": 6,
                  "tickvals": list(range(len(lines))), "ticktext": labels},
        "annotations": notes, "hovermode": "closest", "height": 84 + 58 * len(lines),
    }  # fmt: skip
    return {"data": data, "layout": layout}


_KINDS = (("time_raw", "first crossing", 100), ("time_mean", "5-point mean", 48))


def _bars(lines: Sequence[Record], key: str, name: str, percent: int) -> Record:
    middle = [line[key]["median"] for line in lines]
    spreads = [line[key] for line in lines]
    whiskers = [_whiskers(spread) for spread in spreads]
    return {
        "type": "bar", "orientation": "h", "name": name, "y": list(range(len(lines))), "x": round_all(middle, 3),
        "marker": {"color": [colour(line["style"], percent) for line in lines], "cornerradius": 3},
        "error_x": {"type": "data", "symmetric": False, "array": round_all([more for more, _ in whiskers]),
                    "arrayminus": round_all([less for _, less in whiskers]),
                    "color": "@ink/70", "thickness": 1.4, "width": 4},
        "customdata": [[name, f"{s['count']} of {s['of']} seeds reach it"] for s in spreads],
        "hovertemplate": "%{customdata[0]}: %{x:.0f} s<br>%{customdata[1]}<extra></extra>",
        "showlegend": False,
    }  # fmt: skip


def _whiskers(spread: Record) -> tuple[Maybe, Maybe]:
    """Lengths of the whiskers up and down. Up only if all seeds reach the target; none for a single run."""
    if spread["median"] is None or spread["of"] < 2:
        return None, None
    more = spread["high"] - spread["median"] if spread["count"] == spread["of"] else None
    return more, spread["median"] - spread["low"]


def _dashes(line: Record, row: int) -> list[Record]:
    """A dash if the median run does not reach the target."""
    missing = [name for key, name, _ in _KINDS if line[key]["median"] is None]
    if not missing:
        return []
    reached = line["time_raw"]["count"]
    what = "not reached" if len(missing) == len(_KINDS) else f"{missing[0]} not reached"
    if reached and len(missing) == len(_KINDS):
        what = f"reached by {reached} of {line['time_raw']['of']} seeds"
    place = {"x": 0, "xanchor": "left", "xshift": 6, "yshift": 0 if len(missing) == len(_KINDS) else -11}
    note = {"xref": "x", "y": row, "text": f"— {what}", "showarrow": False, "font": {"color": "@muted", "size": 12}}
    return [note | place]


def _short_label(label: str, most: int = 28) -> str:
    return text(label if len(label) <= most else label[: most - 1] + "…")


# ---- staleness


def stalenesses(run: RunData) -> list[int]:
    """Staleness of every aggregated upload, in no order."""
    return [staleness for staleness in run.events.stalenesses.elements() if staleness >= 1]


def staleness(groups: Sequence[Group]) -> Figure | None:
    """Share of aggregated uploads by staleness, over all finished runs of a group."""
    pooled = [[s for run in (group.ended_runs or group.runs) for s in stalenesses(run)] for group in groups]
    highest = max((value for values in pooled for value in values), default=0)
    if not highest:
        return None
    constant = [len(set(values)) == 1 for values in pooled]
    noted = [] if highest == 1 else [index for index, same in enumerate(constant) if same]
    note = " ".join(f"{groups[index].label}: always {pooled[index][0]}." for index in noted)
    width = max(1, -(-highest // 50))
    data = []
    for index, (group, values) in enumerate(zip(groups, pooled, strict=True)):
        bins = histogram(values, width)
        if not bins or index in noted:
            continue
        shares = [0.0, *(round(100 * share, 2) for _, share in bins), 0.0]
        xs = [bins[0][0] - width, *(first for first, _ in bins), bins[-1][0] + width]
        style = group.style
        line = {"color": colour(style), "width": 1.75, "shape": "hvh", "dash": dash(style)}
        data.append({
            "type": "scatter", "mode": "lines", "name": text(group.label), "x": [x + (width - 1) / 2 for x in xs],
            "y": shares, "line": line, "fill": "tozeroy", "fillcolor": colour(style, 12 if len(groups) < 5 else 4),
            "meta": {"group": index},
            "hovertemplate": "%{y:.1f} % of uploads",
        })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "staleness (versions; 1 is fresh)"}, "range": [0.5, highest + width]},
        "yaxis": {"title": {"text": "share of uploads (%)"}, "rangemode": "tozero"},
        "hovermode": "x unified",
        "showlegend": len(data) > 1,
    }
    return {"data": data, "layout": layout, "note": note}


def panel_figure(panel: Panel) -> Figure:
    """A panel as a figure, with its title as a separate key."""
    drawn = _panel_curves(panel) if isinstance(panel, Curves) else _panel_bars(panel)
    return drawn | {"title": panel.title}


def _panel_curves(panel: Curves) -> Figure:
    data: list[Record] = []
    for series in panel.series:
        line = {"color": colour(series.style), "width": 2, "dash": "dash" if series.dashed else "solid"}
        edge = {"type": "scatter", "mode": "lines", "x": series.time, "hoverinfo": "skip", "showlegend": False}
        if series.low != series.high:
            data.append(edge | {"y": series.low, "line": {"width": 0, "color": colour(series.style)}})
            fill = {"fill": "tonexty", "fillcolor": colour(series.style, 13)}
            data.append(edge | fill | {"y": series.high, "line": {"width": 0, "color": colour(series.style)}})
        data.append({
            "type": "scatter", "mode": "lines", "name": text(series.name), "x": series.time, "y": series.median,
            "line": line, "hovertemplate": "%{y:.3f}" if kind_of(panel.metric) == "share" else "%{y:.4g}",
        })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "virtual time (s)"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": text(f"test {panel.metric.name}")}, "rangemode": "tozero"},
        "shapes": [] if panel.target is None else [target_line(panel.target)],
        "hovermode": "x unified",
        "height": 300,
    }
    return {"data": data, "layout": layout}


def _panel_bars(panel: Bars) -> Figure:
    single = len(panel.groups) == 1
    data = []
    for bar in panel.bars:
        more = [None if h is None or m is None else h - m for h, m in zip(bar.high, bar.median, strict=True)]
        less = [None if low is None or m is None else m - low for low, m in zip(bar.low, bar.median, strict=True)]
        pairs = zip(bar.median, _marks(bar), strict=True)
        words = ["– not reached" if m is None else f"{panel.format_value(m)} {mark}".strip() for m, mark in pairs]
        data.append({
            "type": "bar", "name": text(bar.name), "x": [text(bar.name)] if single else list(map(text, panel.groups)),
            "y": [0 if m is None else m for m in round_all(bar.median, 5)],
            "marker": {"color": colour(bar.style), "cornerradius": 3},
            "text": words if single else _marks(bar),
            "textposition": ["inside" if single and m is not None else "outside" for m in bar.median],
            "textfont": {"color": ["@paper" if single and m is not None else "@muted" for m in bar.median]},
            "insidetextanchor": "start", "cliponaxis": False, "customdata": words,
            "error_y": {"type": "data", "symmetric": False,
                        "array": round_all(more, 5), "arrayminus": round_all(less, 5),
                        "color": "@ink/70", "thickness": 1.2, "width": 3,
                        "visible": not single or None not in bar.median},
            "hovertemplate": f"{text(bar.name)}: %{{customdata}}<extra></extra>",
        })  # fmt: skip
    layout = {
        "barmode": "overlay" if single else "group", "bargap": 0.3 if single else 0.16,
        "hovermode": "closest", "height": 280, "xaxis": {"showgrid": False}, "yaxis": {
            "title": {"text": text(panel.scale)}, "rangemode": "tozero",
        },
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _marks(bar: Bar) -> list[str]:
    """A dash if the target was not reached, a cross if a run diverged."""
    return ["–" if m is None else "✕" if bad else "" for m, bad in zip(bar.median, bar.diverged, strict=True)]
