"""``freshet fleet``: fleets from traces."""

from pathlib import Path
from typing import Annotated

import typer

from freshet.errors import ConfigError

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
