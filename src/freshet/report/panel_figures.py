"""The figure of an experiment with matplotlib, as PNG and PDF, in the layout of the paper."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freshet.report.figures import with_zero
from freshet.report.log import Record
from freshet.report.palette import GRID, INK, MUTED, paint
from freshet.report.panels import Bars, Curves, Panel, panels
from freshet.runs.facts import Maybe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SMALL = 7.5
#: With more curves than this the bands of the seeds are faint.
_CLEAR = 5


def draw(results: Record, folder: Path, stem: str) -> list[Path]:
    """``stem.png`` and ``stem.pdf`` of a grid's results; nothing where no run has ended."""
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
        frameon=False, fontsize=_SMALL, title=note, title_fontsize=6.5,
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


def _plain(label: str) -> str:
    """A label without matplotlib's own mathematics in it."""
    return label.replace("$", r"\$")


def _numbers(values: Sequence[Maybe]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _curves(axes: "Axes", panel: Curves) -> dict[str, Any]:
    handles: dict[str, Any] = {}
    faint = 0.13 if len(panel.series) <= _CLEAR else 0.05
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
    axes.set_xlabel("virtual time (s)", fontsize=_SMALL)
    axes.set_ylabel(_plain(f"test {panel.metric.name}"), fontsize=_SMALL)
    return handles


def _bars(axes: "Axes", panel: Bars) -> dict[str, Any]:
    """Groups of bars; the names stand below the bars where there is one group, else in the legend."""
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
    axes.set_ylabel(_plain(panel.scale), fontsize=_SMALL)
    return handles


def _bar(axes: "Axes", panel: Bars, bar: Any, group: int, x: float, slot: float, colour: str) -> None:
    """One bar with its whisker and value, or a dash where the target was not reached."""
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
        words = panel.shown(median) if single else ""
        words += " ✕" if bar.diverged[group] else ""
        axes.annotate(
            words.strip(), (x, top), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=6.5, color=INK
        )


def _patch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, lw=0)
