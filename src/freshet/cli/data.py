"""``freshet data``: list, get, check and partition data sets. ``freshet fleet``: make fleets from traces."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from freshet.errors import ConfigError, FreshetError
from freshet.files import printable

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

    from freshet.data import Skew

    Counts = np.ndarray[Any, Any]  # samples by device and class

data_app = typer.Typer(help="List, get, check and partition data sets.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of a data set; 'freshet data list' shows them.")]
#: The schemes of `freshet.data.SCHEMES`, which the help text must not import.
SCHEMES = "dirichlet, dirichlet_by_device, iid, by_label, natural"
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder with data sets. Overrides FRESHET_DATA.")]


@contextmanager
def print_errors() -> Iterator[None]:
    """Print a user's error as one sentence on stderr and exit with code 2."""
    try:
        yield
    except FreshetError as error:
        typer.echo(printable(f"freshet: {error}"), err=True)
        raise typer.Exit(2) from None


@data_app.command("list")
def list_command(data_dir: DataDir = None) -> None:
    """List the data sets and where this machine has them."""
    from freshet import data

    with print_errors():
        table = Table(title="Data sets", title_justify="left", box=None, header_style="bold", pad_edge=False)
        for column in ("name", "kind", "classes", "train", "test", "on this machine"):
            number = column in ("classes", "train", "test")
            table.add_column(column, justify="right" if number else "left", no_wrap=column == "name", overflow="fold")
        for row in data.available(data_dir):
            place = "built in" if row.built_in else f"freshet data get {row.name}"
            if row.found is not None:
                place = f"{row.found.place} ({row.found.format.title})"
            table.add_row(row.name, row.kind, str(row.classes), f"{row.train:,}", f"{row.test:,}", place)
        Console().print(table)


@data_app.command("get")
def get_command(name: Name, data_dir: DataDir = None) -> None:
    """Find a data set, or download the official archive to the cache. Then read it once."""
    from freshet import data

    with print_errors():
        dataset = data.load(name, data_dir)
        found = data.locate(name, data_dir)
        place = "built in" if found is None else f"{found.place} ({found.format.title})"
        typer.echo(
            f"{dataset.name}: {len(dataset.y_train):,} training and {len(dataset.y_test):,} test samples, {place}"
        )


@data_app.command("check")
def check_command(name: Name, data_dir: DataDir = None) -> None:
    """Compare the local copy with the published counts and checksums. Exit code 1 if it differs."""
    from freshet import data

    with print_errors():
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
    devices: Annotated[int | None, typer.Option(help="Number of devices.", show_default="40")] = None,
    scheme: Annotated[str | None, typer.Option(help=f"One of {SCHEMES}.", show_default="dirichlet")] = None,
    concentration: Annotated[
        float | None, typer.Option(help="Dirichlet concentration. Small values are skewed.", show_default="0.3")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Root seed.", show_default="0")] = None,
    min_samples: Annotated[int | None, typer.Option(help="Fewest samples per device.", show_default="5")] = None,
    shards_per_device: Annotated[
        int | None, typer.Option(help="Shards per device for by_label.", show_default="2")
    ] = None,
    out: Annotated[Path, typer.Option(help="Picture to write (.png, .svg or .pdf).")] = Path("partition.png"),
    data_dir: DataDir = None,
) -> None:
    """Partition a data set as `freshet run` does, print how skewed the result is, and draw devices x classes."""
    from freshet import data
    from freshet.config import resolve

    with print_errors():
        if out.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ConfigError("--out", f"{out.name!r} is not a picture file; allowed: .png, .svg, .pdf")
        sizes = {"min_samples": min_samples, "shards_per_device": shards_per_device}
        config = resolve(
            {
                "data": _without_none(name=name, partition=scheme, concentration=concentration, **sizes),
                "fleet": _without_none(devices=devices),
                "run": _without_none(seed=seed),
            }
        )
        dataset, options = data.load(name, data_dir), config.data
        if not dataset.has_classes:
            raise ConfigError(name, "has no class labels whose mix could be drawn; choose another data set")
        devices, seed = config.fleet.devices, config.run.seed
        parts = data.partition(
            dataset.y_train,
            devices,
            options.partition,
            seed=seed,
            concentration=options.concentration,
            min_samples=options.min_samples,
            shards_per_device=options.shards_per_device,
            groups=dataset.groups,
        )
        figures = data.skew(dataset.y_train, parts, dataset.classes)
        details = {
            "dirichlet": f", concentration {options.concentration:g}",
            "dirichlet_by_device": f", concentration {options.concentration:g}",
            "by_label": f", {options.shards_per_device} shards per device",
        }
        counts = data.label_counts(dataset.y_train, parts, dataset.classes)
        title = f"{dataset.name} over {devices:,} device{'s' if devices != 1 else ''}"
        subtitle = f"{options.partition}{details.get(options.partition, '')}, seed {seed}"
        try:
            _draw_partition(counts, dataset.class_names, title, subtitle, figures, out)
        except OSError as error:
            raise ConfigError("--out", f"{out} cannot be written ({error.strerror or error})") from error
    typer.echo(subtitle)
    _print_skew(figures)
    typer.echo(f"picture: {out}")


def _without_none(**options: Any) -> dict[str, Any]:
    """Drop the options that were not given, so that a run's defaults apply."""
    return {key: value for key, value in options.items() if value is not None}


def _print_skew(figures: "Skew") -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    sizes = f"{figures.size_min:,} / {figures.size_median:,g} / {figures.size_max:,}"
    table.add_row("samples", f"{figures.samples:,} on {figures.devices:,} devices")
    table.add_row("samples per device, fewest / median / most", sizes)
    table.add_row("classes per device, mean", f"{figures.classes_per_device:.2f}")
    table.add_row("distance to the global label mix, mean (0..1)", f"{figures.label_distance:.3f}")
    table.add_row("Gini coefficient of the sizes (0..1)", f"{figures.size_gini:.3f}")
    Console().print(table)


#: Most devices to draw. Of a larger fleet, the picture shows an even sample in order of size.
MAX_DRAWN_DEVICES = 200


def _draw_partition(
    counts: "Counts",
    class_names: tuple[str, ...],
    title: str,
    subtitle: str,
    figures: "Skew",
    out: Path,
) -> None:
    """Draw two panels over the same devices: their samples (coloured by class if there are few) and their class mix."""
    import numpy as np
    from matplotlib.figure import Figure

    from freshet.report.palette import INK, LIGHT, MUTED

    devices, classes = counts.shape
    axis = "device"
    if devices > MAX_DRAWN_DEVICES:
        order = np.argsort(-counts.sum(axis=1), kind="stable")
        counts = counts[order[np.linspace(0, devices - 1, MAX_DRAWN_DEVICES).round().astype(int)]]
        axis = f"{MAX_DRAWN_DEVICES} of {devices:,} devices, evenly chosen from the largest to the smallest"
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
    if len(counts) < devices:  # positions are not device numbers
        bottom.set_xticks([])
    else:
        bottom.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(out)


def _summary(figures: "Skew") -> str:
    sizes = f"{figures.size_min:,} to {figures.size_max:,} samples each (median {figures.size_median:,g})"
    if figures.size_min == figures.size_max:
        sizes = f"{figures.size_min:,} samples each"
    return (
        f"{sizes}   ·   {figures.classes_per_device:.1f} classes per device   ·   "
        f"label distance {figures.label_distance:.2f}"
    )


def _plain_axes(axes: "Axes") -> None:
    from freshet.report.palette import MUTED

    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0, colors=MUTED, labelsize=9)


def _draw_sizes(axes: "Axes", counts: "Counts", names: tuple[str, ...]) -> None:
    import numpy as np

    from freshet.report.palette import GRID, INK, LIGHT, MUTED

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


def _draw_mix(axes: "Axes", counts: "Counts", names: tuple[str, ...]) -> None:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    from freshet.report.palette import MUTED, RAMP

    _plain_axes(axes)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    shades = LinearSegmentedColormap.from_list("water", list(RAMP))
    top = max(
        2.5 / len(names), float(np.quantile(shares, 0.998))
    )  # so that one extreme device does not pale all others
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


fleet_app = typer.Typer(help="Make fleets from measured traces.", no_args_is_help=True)


@fleet_app.callback()
def _root() -> None:
    pass


@fleet_app.command("convert")
def convert(
    capacity: Annotated[Path, typer.Argument(metavar="CAPACITY", help="FedScale's client_device_capacity.")],
    availability: Annotated[
        Path | None,
        typer.Argument(metavar="[AVAILABILITY]", help="FedScale's client_behave_trace, or FLASH's phone logs."),
    ] = None,
    devices: Annotated[
        int, typer.Option("--devices", "-n", min=0, help="Convert only the first N devices (0: all).")
    ] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="Trace to write.")] = Path("fleet.csv"),
) -> None:
    """Convert public traces of phones into a file for fleet.trace. Pickles are read as plain data and never run.

    Example: freshet fleet convert client_device_capacity client_behave_trace -n 1000 -o phones.csv
    """
    from freshet.sim.traces import from_phones, write_trace

    if out.suffix.lower() != ".csv":
        raise ConfigError("--out", f"{out.name!r} must end in .csv")
    trace = from_phones(capacity, availability, devices)
    try:
        write_trace(trace, out)
    except OSError as error:
        raise ConfigError("--out", f"{out} cannot be written ({error.strerror or error})") from None
    typer.echo(f"{out}: {len(trace):,} devices; use it with -s fleet.trace={out}")
