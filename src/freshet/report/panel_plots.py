"""The figure of an experiment for the page: each panel as a Plotly figure (colours as in ``plots``)."""

from freshet.report.columns import kind_of
from freshet.report.log import Record
from freshet.report.panels import Bar, Bars, Curves, Panel
from freshet.report.plots import Figure, colour, rounded, target_line, text


def panel_figure(panel: Panel) -> Figure:
    """One panel, with its title beside it."""
    drawn = _curves(panel) if isinstance(panel, Curves) else _bars(panel)
    return drawn | {"title": panel.title}


def _curves(panel: Curves) -> Figure:
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


def _bars(panel: Bars) -> Figure:
    single = len(panel.groups) == 1
    data = []
    for bar in panel.bars:
        more = [None if h is None or m is None else h - m for h, m in zip(bar.high, bar.median, strict=True)]
        less = [None if low is None or m is None else m - low for low, m in zip(bar.low, bar.median, strict=True)]
        pairs = zip(bar.median, _marks(bar), strict=True)
        words = ["– not reached" if m is None else f"{panel.shown(m)} {mark}".strip() for m, mark in pairs]
        data.append({
            "type": "bar", "name": text(bar.name), "x": [text(bar.name)] if single else list(map(text, panel.groups)),
            "y": [0 if m is None else m for m in rounded(bar.median, 5)],
            "marker": {"color": colour(bar.style), "cornerradius": 3},
            "text": words if single else _marks(bar),
            "textposition": ["inside" if single and m is not None else "outside" for m in bar.median],
            "textfont": {"color": ["@paper" if single and m is not None else "@muted" for m in bar.median]},
            "insidetextanchor": "start", "cliponaxis": False, "customdata": words,
            "error_y": {"type": "data", "symmetric": False, "array": rounded(more, 5), "arrayminus": rounded(less, 5),
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
    """A dash where the target was not reached, a cross where a run diverged."""
    return ["–" if m is None else "✕" if bad else "" for m, bad in zip(bar.median, bar.diverged, strict=True)]
