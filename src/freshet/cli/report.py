"""``freshet report``, ``watch``, ``metrics`` and ``export``: present runs to people and to other programs."""

import time
import webbrowser
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Annotated

import typer

from freshet.errors import ConfigError
from freshet.files import reason

Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, or folders that contain some.")]
Target = Annotated[
    float | None,
    typer.Option("--target", help="Accuracy, or other metric, to reach (default: that of the runs)."),
]


def report(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
    target: Target = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write one self-contained HTML page about some runs: tables, curves with seed bands, the fleet's timeline.

    Runs that differ only in their seed form one group. Runs that have not ended are shown but not averaged.
    For a folder made by compare, tune or paper, the page begins with the experiments, their figures and tables.
    Runs on different data or networks are not ranked with each other; they are in separate tables.

    Example: freshet report runs/demo -o report.html --open
    """
    from freshet.cli.screen import size
    from freshet.cli.util import reading_bar
    from freshet.report.page import READS_PER_LOG
    from freshet.report.page import report as write
    from freshet.report.reading import find

    with reading_bar(find(runs).runs, READS_PER_LOG) as on_bytes:
        path = write(runs, out, target, on_bytes=on_bytes)
    typer.echo(f"{path} ({size(path.stat().st_size)})")
    if open_:
        webbrowser.open(path.resolve().as_uri())


def watch(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, also of a run that is going.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1 (0: a free one).")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Show the report of a run in a browser on this machine while it goes. Ctrl-C stops watching, not the run.

    A run that has not begun is waited for.
    """
    from freshet.report.live import WatchServer
    from freshet.runs.reader import is_run

    try:
        if not is_run(directory) and (not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))):
            typer.echo(f"waiting for a run in {directory} (Ctrl-C to stop)")
            while not is_run(directory):
                time.sleep(0.3)
    except KeyboardInterrupt:
        typer.echo("stopped watching")
        return
    with WatchServer(directory, port) as server:
        try:
            typer.echo(f"watching {directory} at {server.url} (Ctrl-C to stop)")
            if open_:
                webbrowser.open(server.url)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            typer.echo("stopped watching")


def metrics(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, also of a run that is going.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1 (0: a free one).")] = 9464,
) -> None:
    """Serve figures of a run to this machine in the OpenMetrics format, which Prometheus reads.

    Ctrl-C stops the endpoint, not the run. examples/dashboard.json is a dashboard for Grafana.
    """
    from freshet.report.openmetrics import MetricsServer

    with MetricsServer(directory, port) as server:
        try:
            typer.echo(f"figures of {directory} at {server.url}metrics (Ctrl-C to stop)")
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            typer.echo("stopped")


def export(
    runs: Runs,
    csv: Annotated[Path | None, typer.Option("--csv", help="Tidy table of all metrics.")] = None,
    parquet: Annotated[Path | None, typer.Option("--parquet", help="The same as Parquet (needs pyarrow).")] = None,
    pdf: Annotated[Path | None, typer.Option("--pdf", help="Figures for a paper, one per page.")] = None,
    latex: Annotated[Path | None, typer.Option("--latex", help="Results table in LaTeX.")] = None,
    unpack: Annotated[Path | None, typer.Option("--unpack", help="Folder for kept runs as run directories.")] = None,
    target: Target = None,
) -> None:
    """Export the numbers of runs: CSV, Parquet, PDF figures, a LaTeX table, or several of them at once.

    Example: freshet export runs/demo --csv metrics.csv --latex table.tex
    """
    from freshet.cli.screen import size
    from freshet.cli.util import reading_bar
    from freshet.report import export as to
    from freshet.report.reading import read_all, runs_to

    exports: list[tuple[str, Path | None, Callable[[Path], None]]] = [
        ("--csv", csv, lambda path: to.to_csv(data, path)),
        ("--parquet", parquet, lambda path: to.to_parquet(data, path)),
        ("--pdf", pdf, lambda path: to.to_pdf(data, path, target)),
        ("--latex", latex, lambda path: to.to_latex(data, path, target)),
    ]
    places = [(option, path, write) for option, path, write in exports if path is not None]
    if unpack is not None:
        _unpack(runs, unpack)
    if not places and unpack is None:
        raise ConfigError("export", "give at least one of --csv, --parquet, --pdf, --latex with a file name")
    if not places:
        return
    if parquet is not None:
        to.require_pyarrow()
    for option, path, _ in places:
        _check_writable(option, path)
    found = runs_to("export", runs)
    with reading_bar(found) as on_bytes:
        data = read_all(found, on_bytes)
    with TemporaryDirectory() as folder:
        for option, _, write in places:
            write(Path(folder) / option)
        for option, path, _ in places:
            _copy(option, Path(folder) / option, path)
            typer.echo(f"{path} ({size(path.stat().st_size)})")


def _unpack(places: list[Path], into: Path) -> None:
    """Write the kept runs of these places as run directories."""
    from freshet.report.reading import runs_to
    from freshet.runs.kept_runs import KeptRun, open_run, unpack

    found = [run for run in map(open_run, runs_to("unpack", places)) if isinstance(run, KeptRun)]
    if not found:
        raise ConfigError("--unpack", "there is no kept run; name a folder with runs.jsonl, or a run in it")
    names = [run.directory.name for run in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError("--unpack", f"two of these runs are named {twice}; name the folder of one of them")
    for path in unpack(found, into):
        typer.echo(str(path))


def _check_writable(option: str, path: Path) -> None:
    """Raise if a file cannot be written there, before anything is written."""
    try:
        with path.open("ab") if path.exists() else TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(option, f"{path} cannot be written ({reason(error)})") from None


def _copy(option: str, source: Path, path: Path) -> None:
    try:
        path.write_bytes(source.read_bytes())
    except OSError as error:
        raise ConfigError(option, f"{path} cannot be written ({reason(error)})") from None
