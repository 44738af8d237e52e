"""Figures drawn with matplotlib: of single runs, for a paper (PDF), and of an experiment (PNG and PDF)."""

import html
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from freshet.errors import RunError
from freshet.report import plots
from freshet.report.columns import format_target, kind_of
from freshet.report.groups import Group, common_step, headline, metric_of_groups
from freshet.report.palette import GRID, INK, LIGHT, MUTED, paint, styles
from freshet.report.panels import Bars, Curves, Panel, panels
from freshet.report.reading import Record, clock_of
from freshet.runs.reader import RunDirectory
from freshet.runs.records import Maybe, Metric, metric_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def accuracy_figure(runs: Sequence[RunDirectory], path: Path) -> Path:
    """The metric of the global model over virtual time, one line per run, with marks where the target is reached."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    summaries = [run.summary() for run in runs]
    metric, target = metric_of(summaries[0]), summaries[0]["target"]
    looks = styles([str(summary["method"]) for summary in summaries])
    for run, summary, style in zip(runs, summaries, looks, strict=True):
        rows, colour = run.metrics(), paint(style)
        times = [row["time"] for row in rows]
        values = [math.nan if (value := metric.of(row)) is None else value for row in rows]
        axes.plot(times, values, color=colour, lw=1.8, label=summary["method"])
        reached = summary["time_to_target"]
        if reached is not None:
            axes.plot([reached], [summary["target"]], "o", color=colour, ms=6, mec="white", mew=1, zorder=5)
    if target is not None:
        axes.axhline(target, color=MUTED, lw=0.8, ls="--", zorder=0)
        axes.annotate(f"target {target:g}", (0, target), (4, 3), textcoords="offset points", color=MUTED, fontsize=8)
    axes.set_xlabel("virtual time (s)")
    axes.set_ylabel(f"test {metric.name}")
    axes.set_xlim(left=0)
    if kind_of(metric) == "share":
        axes.set_ylim(0, 1)
    axes.grid(color=GRID, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc=_corner(metric))
    figure.savefig(path)
    return path


def _corner(metric: Metric) -> Literal["lower right", "upper right"]:
    """The corner where curves leave room for a legend."""
    return "lower right" if metric.direction == "max" else "upper right"


def with_zero(axes: "Axes") -> None:
    """Let the y axis begin at zero, or end there if all values are negative."""
    low, high = axes.dataLim.intervaly
    if low >= 0:
        axes.set_ylim(bottom=0)
    elif high <= 0:
        axes.set_ylim(top=0)


# ---- for a paper


def paper_figures(worlds: Sequence[tuple[Sequence[Group], Maybe]], path: Path) -> Path:
    """A PDF with one figure per page: the metric over time and over traffic, time to target, staleness.

    ``worlds`` holds comparable groups and their target.
    """
    from matplotlib.backends.backend_pdf import PdfPages

    with PdfPages(path, metadata={"Creator": "freshet", "CreationDate": None}) as pages:
        for groups, target in worlds:
            for figure in _figures(groups, target):
                if figure is not None:
                    pages.savefig(figure)
        if not pages.get_pagecount():
            raise RunError("these runs have nothing to draw yet")
    return path


def _figures(groups: Sequence[Group], target: Maybe) -> "Iterator[Figure | None]":
    step = common_step([run for group in groups for run in group.runs])
    lines = [headline(group, target, step, None) | {"style": group.style} for group in groups]
    yield _curves_figure(groups, target, "time")
    yield _curves_figure(groups, target, "bytes")
    yield _times_figure(groups, [line for line in lines if line["runs"]], target)
    yield _staleness_figure(groups)


def _page(width: float = 3.5, height: float = 2.5) -> "tuple[Figure, Axes]":
    """A figure as wide as one column of a paper, with thin lines and no frame at the top and right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID, lw=0.4)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=7, width=0.6, length=2.5)
    for side in ("left", "bottom"):
        axes.spines[side].set_linewidth(0.6)
    return figure, axes


def _finish(axes: "Axes", x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=8, family="serif")
    axes.set_ylabel(y, fontsize=8, family="serif")
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_fontfamily("serif")


def _of(token: str) -> str:
    """The colour on white for a colour name of the page (``@c3``)."""
    return LIGHT[int(token.removeprefix("@c"))]


def _plain(label: str) -> str:
    """A label in which matplotlib finds no mathematics."""
    return label.replace("$", r"\$")


def _curves_figure(groups: Sequence[Group], target: Maybe, axis: str) -> "Figure | None":
    drawn = plots.accuracy(groups, target, axis)
    if drawn is None:
        return None
    figure, axes = _page()
    below: list[float | None] = []
    for trace in drawn["data"]:
        colour = _of(trace["line"]["color"])
        dash = {"solid": "-", "dash": "--", "dot": ":"}[trace["line"].get("dash", "solid")]
        if trace.get("fill") == "tonexty":
            pairs = [(x, a, b) for x, a, b in zip(trace["x"], below, trace["y"], strict=True) if None not in (a, b)]
            axes.fill_between(*zip(*pairs, strict=True), color=colour, alpha=0.16, lw=0)  # type: ignore[arg-type]
        elif trace.get("hoverinfo") == "skip":
            below = trace["y"]
        else:
            ys = [math.nan if y is None else y for y in trace["y"]]
            axes.plot(trace["x"], ys, dash, color=colour, lw=1.1, label=_plain(html.unescape(trace["name"])))
    measure, metric = plots.measure_of(groups), metric_of_groups(groups)
    if target is not None:
        axes.axhline(measure.factor * target, color=MUTED, lw=0.6, ls=":", zorder=0)
    if measure is plots.ACCURACY:
        axes.set_ylim(0, 100)
    else:
        with_zero(axes)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc=_corner(metric), prop={"family": "serif", "size": 6.5})
    _finish(axes, plots.axis_title(axis, groups), _plain(measure.title[0].upper() + measure.title[1:]))
    return figure


def _times_figure(groups: Sequence[Group], lines: Sequence[Record], target: Maybe) -> "Figure | None":
    if target is None or plots.time_to_target(lines) is None:
        return None
    figure, axes = _page(height=0.7 + 0.42 * len(lines))
    for row, line in enumerate(lines):
        for offset, key, opacity in ((-0.19, "time_raw", 1.0), (0.19, "time_mean", 0.45)):
            spread, colour = line[key], paint(line["style"])
            if spread["median"] is None:
                axes.text(0, row + offset, " — not reached", fontsize=6, va="center", color=MUTED, family="serif")
                continue
            axes.barh(row + offset, spread["median"], 0.34, color=colour, alpha=opacity, lw=0)
            high = spread["high"] if spread["count"] == spread["of"] else spread["median"]
            axes.plot([spread["low"], high], [row + offset] * 2, color=INK, lw=0.8)
    axes.set_yticks(range(len(lines)), [_plain(line["label"]) for line in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    clock = clock_of(run for group in groups for run in group.runs).capitalize()
    _finish(axes, f"{clock} to {format_target(target, metric_of_groups(groups))} (s); pale: 5-point mean", "")
    return figure


def _staleness_figure(groups: Sequence[Group]) -> "Figure | None":
    drawn = plots.staleness(groups)
    if drawn is None or not drawn["data"]:
        return None
    figure, axes = _page()
    for trace in drawn["data"]:
        colour = _of(trace["line"]["color"])
        name = _plain(html.unescape(trace["name"]))
        axes.plot(trace["x"], trace["y"], color=colour, lw=1.0, drawstyle="steps-mid", label=name)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, prop={"family": "serif", "size": 6.5})
    _finish(axes, "Staleness (versions)", "Share of uploads (%)")
    return figure


_LABEL_SIZE = 7.5
#: With more curves than this the bands over seeds are fainter.
_MAX_CLEAR_CURVES = 5


def draw(results: Record, folder: Path, stem: str) -> list[Path]:
    """Draw ``stem.png`` and ``stem.pdf`` from the results of a grid; nothing if no run has ended."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    rows = panels(results)
    if not rows:
        return []
    figure = experiment_figure(rows, str(results["title"]), footnote(rows, len(results["seeds"])))
    FigureCanvasAgg(figure)
    paths = [folder / f"{stem}.png", folder / f"{stem}.pdf"]
    figure.savefig(paths[0], dpi=160)
    figure.savefig(paths[1], metadata={"Creator": "freshet", "CreationDate": None})
    return paths


def footnote(rows: Sequence[Sequence[Panel]], seeds: int) -> str:
    """How to read the figure."""
    flat = [panel for row in rows for panel in row]
    parts = [f"Median over {seeds} seeds; {'bands' if isinstance(flat[0], Curves) else 'whiskers'}: least to greatest."]
    if isinstance(flat[0], Curves):
        parts.append("Dashed: synchronous methods.")
    if any(v is None for p in flat if isinstance(p, Bars) and p.what == "time" for b in p.bars for v in b.median):
        parts.append("– : the target was not reached.")
    if _diverged(flat):
        parts.append("✕ : a run diverged.")
    return " ".join(parts)


def _diverged(flat: Sequence[Panel]) -> bool:
    return any(
        any(s.diverged for s in panel.series) if isinstance(panel, Curves) else any(any(b.diverged) for b in panel.bars)
        for panel in flat
    )


def experiment_figure(rows: Sequence[Sequence[Panel]], title: str, note: str) -> "Figure":
    """All panels with one legend below them."""
    from matplotlib.figure import Figure

    columns = max(len(row) for row in rows)
    named = any(isinstance(panel, Bars) and len(panel.groups) == 1 for row in rows for panel in row)
    width = max(4.6, (3.3 if named else 3.6) * columns)
    figure = Figure(figsize=(width, 2.55 * len(rows) + (0.6 if named else 1.1)), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    handles: dict[str, Any] = {}
    for row, found in zip(axes, rows, strict=True):
        for place, place_axes in enumerate(row):
            if place >= len(found):
                place_axes.set_axis_off()
                continue
            panel = found[place]
            _prepare(place_axes, panel.title)
            drawn = _curves(place_axes, panel) if isinstance(panel, Curves) else _bars(place_axes, panel)
            handles |= {name: handle for name, handle in drawn.items() if name not in handles}
    figure.suptitle(_plain(title), fontsize=10, color=INK)
    if named:
        figure.supxlabel(note, fontsize=6.5, color=MUTED)
        return figure
    legend = figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=min(6, len(handles)),
        frameon=False, fontsize=_LABEL_SIZE, title=note, title_fontsize=6.5,
    )  # fmt: skip
    legend.get_title().set_color(MUTED)
    return figure


def _prepare(axes: "Axes", title: str) -> None:
    axes.set_title(_plain(title), fontsize=8.5, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID, lw=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=7, width=0.6, length=2.5)
    for side in ("left", "bottom"):
        axes.spines[side].set_linewidth(0.6)


def _numbers(values: Sequence[Maybe]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _curves(axes: "Axes", panel: Curves) -> dict[str, Any]:
    handles: dict[str, Any] = {}
    faint = 0.13 if len(panel.series) <= _MAX_CLEAR_CURVES else 0.05
    for series in panel.series:
        colour, dash = paint(series.style), "--" if series.dashed else "-"
        if series.low != series.high:
            axes.fill_between(series.time, _numbers(series.low), _numbers(series.high), color=colour, alpha=faint, lw=0)
        (handles[_plain(series.name)],) = axes.plot(series.time, _numbers(series.median), dash, color=colour, lw=1.25)
        for time in series.diverged:
            near = min(range(len(series.time)), key=lambda place: abs(series.time[place] - time))
            axes.plot([series.time[near]], _numbers([series.median[near]]), "x", color=colour, ms=5, mew=1.4)
    if panel.target is not None:
        axes.axhline(panel.target, color=MUTED, lw=0.7, ls=":", zorder=0)
    axes.set_xlim(left=0)
    with_zero(axes)
    axes.set_xlabel("virtual time (s)", fontsize=_LABEL_SIZE)
    axes.set_ylabel(_plain(f"test {panel.metric.name}"), fontsize=_LABEL_SIZE)
    return handles


def _bars(axes: "Axes", panel: Bars) -> dict[str, Any]:
    """Groups of bars. Names are below the bars if there is one group, otherwise in the legend."""
    count = len(panel.bars)
    slot = 1.0 if len(panel.groups) == 1 else 0.84 / count
    handles: dict[str, Any] = {}
    for place, bar in enumerate(panel.bars):
        colour = paint(bar.style)
        for group in range(len(panel.groups)):
            x = place if len(panel.groups) == 1 else group + (place - (count - 1) / 2) * slot
            _bar(axes, panel, bar, group, x, slot, colour)
        handles[_plain(bar.name)] = _patch(colour)
    if len(panel.groups) == 1:
        long = max(len(bar.name) for bar in panel.bars) > 8
        axes.set_xticks(range(count), [_plain(bar.name) for bar in panel.bars], rotation=20 if long else 0)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right" if long else "center")
    else:
        axes.set_xticks(range(len(panel.groups)), [_plain(group) for group in panel.groups])
    places = count if len(panel.groups) == 1 else len(panel.groups)
    axes.set_xlim(-0.55, places - 0.45)
    axes.grid(axis="x", visible=False)
    axes.margins(y=0.14)
    with_zero(axes)
    if all(value is None for bar in panel.bars for value in bar.median):
        axes.set_yticks([])
    axes.set_ylabel(_plain(panel.scale), fontsize=_LABEL_SIZE)
    return handles


def _bar(axes: "Axes", panel: Bars, bar: Any, group: int, x: float, slot: float, colour: str) -> None:
    """One bar with its whisker and value, or a dash if the target was not reached."""
    median, low, high = bar.median[group], bar.low[group], bar.high[group]
    single = len(panel.groups) == 1
    if median is None:
        axes.annotate(
            "–",
            (x, 0),
            xytext=(0, 1),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=11,
            fontweight="bold",
            color=colour,
        )
        return
    axes.bar(x, median, (0.62 if single else 0.9) * slot, color=colour, lw=0)
    top = median
    if low is not None and (high if high is not None else median) > low:
        top = median if high is None else high
        axes.plot([x, x], [low, top], color=INK, lw=0.9)
    if single or bar.diverged[group]:
        words = panel.format_value(median) if single else ""
        words += " ✕" if bar.diverged[group] else ""
        axes.annotate(
            words.strip(), (x, top), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=6.5, color=INK
        )


def _patch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, lw=0)
