"""The command's entry point: sub-commands put together, and every known error turned into one sentence.

The modules with commands are loaded by every command. So they import what is slow to load (torch, numpy, pydantic and
whatever needs them) inside the functions that use it.
"""

import gc
import sys
from typing import Annotated

import typer

from freshet import __version__
from freshet.cli import experiments, inspect, report, run
from freshet.cli.data import data_app
from freshet.cli.deploy import deploy_app
from freshet.cli.fleet import fleet_app
from freshet.errors import FreshetError

app = typer.Typer(
    name="freshet",
    help="Federated learning over unequal devices: twelve methods in virtual time, with every decision on record.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"freshet {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("run")(run.run)
app.command("resume")(run.resume)
app.command("pretrain")(run.pretrain)
app.command("demo")(run.demo)
app.command("compare")(experiments.compare)
app.command("tune")(experiments.tune)
app.command("paper")(experiments.paper)
app.command("report")(report.report)
app.command("watch")(report.watch)
app.command("export")(report.export)
app.command("methods")(inspect.methods)
app.command("models")(inspect.models)
app.command("cells")(inspect.cells)
app.command("show")(inspect.show)
app.command("audit")(inspect.audit)
app.add_typer(data_app, name="data")
app.add_typer(fleet_app, name="fleet")
app.add_typer(deploy_app, name="deploy")


def main() -> None:
    """Run the command; a user's mistake ends in one sentence and exit code 2."""
    gc.set_threshold(50_000)  # loading modules makes many objects and no garbage
    try:
        app()
    except FreshetError as error:
        from rich.console import Console

        Console(stderr=True, soft_wrap=True, highlight=False).print(f"freshet: {error}", markup=False)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(0)
