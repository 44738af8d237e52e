"""``freshet data``: list, get and check the data sets, and see how they are dealt to devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from freshet import data
from freshet.errors import ConfigError, FreshetError
from freshet.report.palette import GRID, INK, LIGHT, MUTED, RAMP

if TYPE_CHECKING:
    from matplotlib.axes import Axes

data_app = typer.Typer(help="List, get, check and partition data sets.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of a data set; 'freshet data list' shows them.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder with data sets, before FRESHET_DATA.")]


@contextmanager
def sentences() -> Iterator[None]:
    """Print an error that the user can mend as one sentence on stderr and leave with code 2."""
    try:
        yield
    except FreshetError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


@data_app.command("list")
def list_command(data_dir: DataDir = None) -> None:
    """Show the data sets and where each is found on this machine."""
    with sentences():
        table = Table(title="Data sets", title_justify="left", box=None, header_style="bold", pad_edge=False)
        for column in ("name", "kind", "classes", "train", "test", "on this machine"):
            number = column in ("classes", "train", "test")
            table.add_column(column, justify="right" if number else "left", no_wrap=column == "name", overflow="fold")
        for row in data.available(data_dir):
            place = f"{row.found.place} ({row.found.format.title})" if row.found else f"freshet data get {row.name}"
            place = "built in" if row.name == "digits" else place
            table.add_row(row.name, row.kind, str(row.classes), f"{row.train:,}", f"{row.test:,}", place)
        Console().print(table)


@data_app.command("get")
def get_command(name: Name, data_dir: DataDir = None) -> None:
    """Find the data set, or download the official archive to the user's cache, and read it once."""
    with sentences():
        dataset = data.load(name, data_dir)
        found = data.locate(name, data_dir)
        place = "built in" if found is None else f"{found.place} ({found.format.title})"
        typer.echo(
            f"{dataset.name}: {len(dataset.y_train):,} training and {len(dataset.y_test):,} test samples, {place}"
        )


@data_app.command("check")
def check_command(name: Name, data_dir: DataDir = None) -> None:
    """Compare the local copy with the published counts and checksums; exit code 1 if it differs."""
    with sentences():
        rows = data.verify(name, data_dir)
    table = Table(title=f"Check of {name}", title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in ("what", "published", "here", ""):
        table.add_column(column, overflow="fold")
    for row in rows:
        mark = "[green]ok[/green]" if row.ok else "[bold red]differs[/bold red]"
        table.add_row(row.item, row.expected, row.found, mark)
    Console().print(table)
    if not all(row.ok for row in rows):
        typer.echo(f"{name} is not the published data set; get it again", err=True)
        raise typer.Exit(1)


@data_app.command("partition")
def partition_command(
    name: Name,
    devices: Annotated[int, typer.Option(help="Number of devices.")] = 100,
    scheme: Annotated[str, typer.Option(help=f"One of {', '.join(data.SCHEMES)}.")] = "dirichlet",
    concentration: Annotated[float, typer.Option(help="Dirichlet concentration; small is skewed.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Root seed.")] = 0,
    min_samples: Annotated[int, typer.Option(help="Least samples per device.")] = 1,
    shards_per_device: Annotated[int, typer.Option(help="Shards per device for by_label.")] = 2,
    out: Annotated[Path, typer.Option(help="Picture to write (.png, .svg or .pdf).")] = Path("partition.png"),
    data_dir: DataDir = None,
) -> None:
    """Deal a data set to devices, print how skewed the result is and draw it (devices x classes)."""
    with sentences():
        if out.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ConfigError("--out", f"{out.name!r} is no picture file; allowed: .png, .svg, .pdf")
        dataset = data.load(name, data_dir)
        parts = data.partition(
            dataset.y_train,
            devices,
            scheme,
            seed=seed,
            concentration=concentration,
            min_samples=min_samples,
            shards_per_device=shards_per_device,
            groups=dataset.groups,
        )
        figures = data.skew(dataset.y_train, parts, dataset.classes)
        details = {
            "dirichlet": f", concentration {concentration:g}",
            "dirichlet_by_device": f", concentration {concentration:g}",
            "by_label": f", {shards_per_device} shards per device",
        }
        counts = data.label_counts(dataset.y_train, parts, dataset.classes)
        title = f"{dataset.name} over {devices:,} device{'s' if devices != 1 else ''}"
        try:
            draw_partition(
                counts, dataset.class_names, title, f"{scheme}{details.get(scheme, '')}, seed {seed}", figures, out
            )
        except OSError as error:
            raise ConfigError("--out", f"{out} cannot be written ({error.strerror or error})") from error
    _print_skew(figures)
    typer.echo(f"picture: {out}")


def _print_skew(figures: data.Skew) -> None:
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


def _plain_axes(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, colors=MUTED, labelsize=9)


def _draw_sizes(axes: Axes, counts: np.ndarray[Any, Any], names: tuple[str, ...]) -> None:
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


def _draw_mix(axes: Axes, counts: np.ndarray[Any, Any], names: tuple[str, ...]) -> None:
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
