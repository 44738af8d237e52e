"""How a data set is dealt to devices: the numbers in a terminal, the picture in a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from freshet import data
from freshet.report.palette import GRID, INK, LIGHT, MUTED, RAMP

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def print_skew(figures: data.Skew) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    sizes = f"{figures.size_min:,} / {figures.size_median:,g} / {figures.size_max:,}"
    table.add_row("samples", f"{figures.samples:,} on {figures.devices:,} devices")
    table.add_row("samples per device, least / median / most", sizes)
    table.add_row("classes per device, mean", f"{figures.classes_per_device:.2f}")
    table.add_row("distance to the global label mix, mean (0..1)", f"{figures.label_distance:.3f}")
    table.add_row("Gini coefficient of the sizes (0..1)", f"{figures.size_gini:.3f}")
    Console().print(table)


_WIDEST = 200  # devices drawn; of more, an even sample in order of size


def draw_partition(
    counts: np.ndarray[Any, Any],
    class_names: tuple[str, ...],
    title: str,
    subtitle: str,
    figures: data.Skew,
    out: Path,
) -> None:
    """Two panels over the same devices: samples of each (coloured by class if these are few) and its class mix."""
    from matplotlib.figure import Figure

    devices, classes = counts.shape
    axis = "device"
    if devices > _WIDEST:
        order = np.argsort(-counts.sum(axis=1), kind="stable")
        counts = counts[order[np.linspace(0, devices - 1, _WIDEST).round().astype(int)]]
        axis = f"{_WIDEST} of {devices:,} devices, evenly chosen from the largest to the smallest"
    names = class_names or tuple(str(k) for k in range(classes))
    figure = Figure(figsize=(12, 7.4), dpi=150, facecolor="white")
    heights = (1.15, 1) if classes <= len(LIGHT) else (0.45, 1)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    figure.subplots_adjust(left=0.105, right=0.865, top=0.86, bottom=0.085, hspace=0.12)
    figure.text(0.02, 0.955, title, fontsize=18, fontweight="bold", color=INK)
    figure.text(0.02, 0.915, f"{subtitle}   ·   {_summary(figures)}", fontsize=10.5, color=MUTED)
    _draw_sizes(top, counts, names)
    _draw_mix(bottom, counts, names)
    bottom.set_xlabel(axis, color=MUTED)
    if len(counts) < devices:  # positions are no device numbers
        bottom.set_xticks([])
    else:
        bottom.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(out)


def _summary(figures: data.Skew) -> str:
    sizes = f"{figures.size_min:,} to {figures.size_max:,} samples each (median {figures.size_median:,g})"
    if figures.size_min == figures.size_max:
        sizes = f"{figures.size_min:,} samples each"
    return (
        f"{sizes}   ·   {figures.classes_per_device:.1f} classes per device   ·   "
        f"label distance {figures.label_distance:.2f}"
    )


def _plain_axes(axes: "Axes") -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, colors=MUTED, labelsize=9)


def _draw_sizes(axes: "Axes", counts: np.ndarray[Any, Any], names: tuple[str, ...]) -> None:
    _plain_axes(axes)
    place, width = np.arange(len(counts)), 0.86 if len(counts) <= 60 else 1.0
    edge: dict[str, Any] = {"linewidth": 0.3, "edgecolor": "white"}
    if len(names) <= len(LIGHT):
        floor = np.zeros(len(counts))
        for k, (name, colour) in enumerate(zip(names, LIGHT, strict=False)):
            axes.bar(place, counts[:, k], width, bottom=floor, color=colour, label=name, **edge)
            floor += counts[:, k]
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(
            handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False,
            fontsize=9.5, labelcolor=INK, handlelength=1.0, handleheight=1.0, labelspacing=0.55, borderaxespad=0,
        )  # fmt: skip
    else:
        axes.bar(place, counts.sum(axis=1), width, color=LIGHT[0], **edge)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_ylabel("samples", color=MUTED)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.margins(x=0)


def _draw_mix(axes: "Axes", counts: np.ndarray[Any, Any], names: tuple[str, ...]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    _plain_axes(axes)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    shades = LinearSegmentedColormap.from_list("water", list(RAMP))
    top = max(2.5 / len(names), float(np.quantile(shares, 0.998)))  # one extreme device must not pale all others
    image = axes.imshow(shares.T, aspect="auto", cmap=shades, vmin=0, vmax=top, interpolation="nearest")
    step = max(1, -(-len(names) // 12))
    shown = range(0, len(names), step)
    axes.set_yticks(list(shown), [_short(names[k]) for k in shown], fontsize=8.5)
    bar_axes = axes.inset_axes((1.02, 0.0, 0.013, 1.0))
    figure = axes.get_figure()
    if figure is not None:
        bar = figure.colorbar(
            image,
            cax=bar_axes,
            format=lambda value, _: f"{value:.0%}",
            extend="max" if shares.max() > top else "neither",
        )
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, colors=MUTED, labelsize=9)
        bar.set_label("share of the device's samples", color=MUTED, fontsize=9)


def _short(name: str) -> str:
    first = name.split(",")[0]
    return first if len(first) <= 16 else first[:15] + "…"
