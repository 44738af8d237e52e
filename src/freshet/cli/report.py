"""``freshet report``, ``watch`` and ``export``: what run directories have to say, for people and for other programs."""

import webbrowser
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Annotated

import typer

from freshet.errors import ConfigError
from freshet.files import reason

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders that hold some.")]
Target = Annotated[
    float | None, typer.Option("--target", help="Accuracy, or other metric, to reach (default: the runs' own).")
]


def report(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
    target: Target = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one self-contained HTML page about some runs: tables, curves with seed bands, the fleet's timeline.

    Runs that differ only in their seed are put together; runs that have not ended are shown but not averaged.
    Of a folder made by compare, tune or paper, its experiments are shown first, with their figures and tables.
    Runs on different data or networks are not ranked with each other: they have tables of their own.

    Example: freshet report runs/demo -o report.html --open
    """
    from freshet.cli.screen import size
    from freshet.cli.util import reading_bar
    from freshet.report.discovery import find
    from freshet.report.page import PASSES
    from freshet.report.page import report as write

    with reading_bar(find(runs).runs, PASSES) as seen:
        path = write(runs, out, target, seen=seen)
    typer.echo(f"{path} ({size(path.stat().st_size)})")
    if open_:
        webbrowser.open(path.resolve().as_uri())


def watch(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, also one that is being written.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1 (0: a free one).")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Show the report of a run live while it goes, in a browser on this machine. Ctrl-C stops watching, not the run."""
    from freshet.report.live import Server

    with Server(directory, port) as server:
        try:
            typer.echo(f"watching {directory} at {server.url} (Ctrl-C to stop)")
            if open_:
                webbrowser.open(server.url)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            typer.echo("stopped watching")


def export(
    runs: Runs,
    csv: Annotated[Path | None, typer.Option("--csv", help="Tidy table of all metrics.")] = None,
    parquet: Annotated[Path | None, typer.Option("--parquet", help="The same as Parquet (needs pyarrow).")] = None,
    pdf: Annotated[Path | None, typer.Option("--pdf", help="Figures for a paper, one per page.")] = None,
    latex: Annotated[Path | None, typer.Option("--latex", help="Results table in LaTeX.")] = None,
    target: Target = None,
) -> None:
    """Write the runs' numbers for other programs: CSV, Parquet, PDF figures, a LaTeX table; several at once if asked.

    Example: freshet export runs/demo --csv metrics.csv --latex table.tex
    """
    from freshet.cli.screen import size
    from freshet.cli.util import reading_bar
    from freshet.report import export as to
    from freshet.report.discovery import runs_to
    from freshet.report.reading import read_all

    wanted: list[tuple[str, Path | None, Callable[[Path], None]]] = [
        ("--csv", csv, lambda path: to.to_csv(data, path)),
        ("--parquet", parquet, lambda path: to.to_parquet(data, path)),
        ("--pdf", pdf, lambda path: to.to_pdf(data, path, target)),
        ("--latex", latex, lambda path: to.to_latex(data, path, target)),
    ]
    places = [(option, path, write) for option, path, write in wanted if path is not None]
    if not places:
        raise ConfigError("export", "give at least one of --csv, --parquet, --pdf, --latex with a file name")
    if parquet is not None:
        to.require_pyarrow()
    for option, path, _ in places:
        _check(option, path)
    found = runs_to("export", runs)
    with reading_bar(found) as seen:
        data = read_all(found, seen)
    with TemporaryDirectory() as folder:
        for option, _, write in places:
            write(Path(folder) / option)
        for option, path, _ in places:
            _put(option, Path(folder) / option, path)
            typer.echo(f"{path} ({size(path.stat().st_size)})")


def _check(option: str, path: Path) -> None:
    """Refuse a place where no file can be, in the system's words, before anything is written."""
    try:
        with path.open("ab") if path.exists() else TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(option, f"{path} cannot be written ({reason(error)})") from None


def _put(option: str, made: Path, path: Path) -> None:
    try:
        path.write_bytes(made.read_bytes())
    except OSError as error:
        raise ConfigError(option, f"{path} cannot be written ({reason(error)})") from None
