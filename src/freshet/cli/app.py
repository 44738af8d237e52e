"""The entry point: registers the sub-commands and turns every known error into one sentence.

Every command loads all modules with commands. So these modules import whatever is slow to load (torch, numpy, pydantic
and their users) inside functions.
"""

import gc
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from freshet import __version__
from freshet.cli import experiments, inspect, report, run
from freshet.cli.bench import bench_app
from freshet.cli.data import data_app, fleet_app
from freshet.cli.deploy import deploy_app
from freshet.cli.paper import paper_app
from freshet.errors import FreshetError
from freshet.files import printable, reason

app = typer.Typer(
    name="freshet",
    help="Federated learning over unequal devices: asynchronous and synchronous methods, simulated or deployed, every "
    "decision on record.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
_DEBUG = "--debug"
#: Torch's message when memory runs out.
_NO_MEMORY = "can't allocate memory"


def _version(show: bool) -> None:
    if show:
        typer.echo(f"freshet {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option(_DEBUG, help="Show the traceback of an error. Allowed anywhere on the line.")
    ] = False,
) -> None:
    pass


#: The commands by what a user wants to do, in the order of the help.
GROUPS: dict[str, dict[str, Callable[..., None] | typer.Typer]] = {
    "Run": {
        "demo": run.demo,
        "run": run.run,
        "resume": run.resume,
        "pretrain": run.pretrain,
        "warmup": run.warmup,
    },
    "Look": {
        "show": inspect.show,
        "report": report.report,
        "watch": report.watch,
        "audit": inspect.audit,
        "export": report.export,
        "metrics": report.metrics,
    },
    "Compare": {"compare": experiments.compare, "tune": experiments.tune, "bench": bench_app},
    "What there is": {
        "methods": inspect.methods,
        "settings": inspect.settings,
        "models": inspect.models,
        "data": data_app,
        "fleet": fleet_app,
    },
    "Deploy": {"deploy": deploy_app},
    "The paper": {"paper": paper_app, "cells": inspect.cells},
}
for _group, _commands in GROUPS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_group)
        else:
            app.command(_name, rich_help_panel=_group)(_command)


def main() -> None:
    """Run the command. A user's mistake or a failure of the machine ends in one sentence and exit code 2.

    A traceback means an error in code: Freshet's, or that of a user's method or model.
    """
    gc.set_threshold(50_000)  # loading modules makes many objects and no garbage
    arguments = sys.argv[1:]
    debug = _DEBUG in arguments
    try:
        app([argument for argument in arguments if argument != _DEBUG])
    except BrokenPipeError:
        sys.exit(0)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # the reader closed the pipe; click and rich exit with 1
            sys.exit(0)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a Rust library out of memory raises a BaseException
        if debug or not (isinstance(error, FreshetError | OSError | RecursionError) or is_out_of_memory(error)):
            raise
        _print(error_sentence(error))
        sys.exit(2)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether memory ran out anywhere in the chain of errors. Torch says so only in its message."""
    while error is not None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or _NO_MEMORY in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def error_sentence(error: BaseException) -> str:
    """Return one sentence that says what is wrong."""
    if isinstance(error, FreshetError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if isinstance(error.filename, str) else ""
        problem = f"{where}{reason(error)}"
    elif isinstance(error, RecursionError):
        problem = "the input is nested too deeply"
    else:
        detail = str(error).splitlines()[0][:160] if isinstance(error, MemoryError) and str(error) else ""
        problem = "there is not enough memory" + (f" ({detail})" if detail else "")
    return f"{problem} ({_DEBUG} shows the traceback)"


def _print(text: str) -> None:
    from rich.console import Console

    Console(stderr=True, soft_wrap=True, highlight=False).print(printable(f"freshet: {text}"), markup=False)
