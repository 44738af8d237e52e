"""``freshet data``: list, get and check the data sets, and see how they are dealt to devices.

``freshet fleet``: fleets from traces.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from freshet.errors import ConfigError, FreshetError
from freshet.files import printable

data_app = typer.Typer(help="List, get, check and partition data sets.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of a data set; 'freshet data list' shows them.")]
#: Ways to deal (`freshet.data.SCHEMES`, which is not loaded to print a help text).
SCHEMES = "dirichlet, dirichlet_by_device, iid, by_label, natural"
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Folder with data sets, before FRESHET_DATA.")]


@contextmanager
def print_errors() -> Iterator[None]:
    """Print an error that the user can mend as one sentence on stderr and leave with code 2."""
    try:
        yield
    except FreshetError as error:
        typer.echo(printable(f"freshet: {error}"), err=True)
        raise typer.Exit(2) from None


@data_app.command("list")
def list_command(data_dir: DataDir = None) -> None:
    """Show the data sets and where each is found on this machine."""
    from freshet import data

    with print_errors():
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
    """Compare the local copy with the published counts and checksums; exit code 1 if it differs."""
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
        float | None, typer.Option(help="Dirichlet concentration; small is skewed.", show_default="0.3")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Root seed.", show_default="0")] = None,
    min_samples: Annotated[int | None, typer.Option(help="Least samples per device.", show_default="5")] = None,
    shards_per_device: Annotated[
        int | None, typer.Option(help="Shards per device for by_label.", show_default="2")
    ] = None,
    out: Annotated[Path, typer.Option(help="Picture to write (.png, .svg or .pdf).")] = Path("partition.png"),
    data_dir: DataDir = None,
) -> None:
    """Deal a data set as `freshet run` would, print how skewed the result is and draw it (devices x classes)."""
    from freshet import data
    from freshet.cli.partition import draw_partition, print_skew
    from freshet.config import resolve

    with print_errors():
        if out.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ConfigError("--out", f"{out.name!r} is no picture file; allowed: .png, .svg, .pdf")
        sizes = {"min_samples": min_samples, "shards_per_device": shards_per_device}
        config = resolve(
            {
                "data": _without_none(name=name, partition=scheme, concentration=concentration, **sizes),
                "fleet": _without_none(devices=devices),
                "run": _without_none(seed=seed),
            }
        )
        dataset, dealt, devices, seed = data.load(name, data_dir), config.data, config.fleet.devices, config.run.seed
        parts = data.partition(
            dataset.y_train,
            devices,
            dealt.partition,
            seed=seed,
            concentration=dealt.concentration,
            min_samples=dealt.min_samples,
            shards_per_device=dealt.shards_per_device,
            groups=dataset.groups,
        )
        figures = data.skew(dataset.y_train, parts, dataset.classes)
        details = {
            "dirichlet": f", concentration {dealt.concentration:g}",
            "dirichlet_by_device": f", concentration {dealt.concentration:g}",
            "by_label": f", {dealt.shards_per_device} shards per device",
        }
        counts = data.label_counts(dataset.y_train, parts, dataset.classes)
        title = f"{dataset.name} over {devices:,} device{'s' if devices != 1 else ''}"
        subtitle = f"{dealt.partition}{details.get(dealt.partition, '')}, seed {seed}"
        try:
            draw_partition(counts, dataset.class_names, title, subtitle, figures, out)
        except OSError as error:
            raise ConfigError("--out", f"{out} cannot be written ({error.strerror or error})") from error
    typer.echo(subtitle)
    print_skew(figures)
    typer.echo(f"picture: {out}")


def _without_none(**options: Any) -> dict[str, Any]:
    """The options that were given; the others have the defaults of a run."""
    return {key: value for key, value in options.items() if value is not None}


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
    devices: Annotated[int, typer.Option("--devices", "-n", min=0, help="Only the first so many (0: all).")] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="Trace to write.")] = Path("fleet.csv"),
) -> None:
    """Turn public traces of phones into a file for fleet.trace. Pickles are read as plain data and never run.

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
