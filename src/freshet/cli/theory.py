"""``freshet paper theory``: Theorem 1 of the paper, checked by numbers."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from freshet.cli.screen import wide_console
from freshet.cli.util import make_writable
from freshet.compute.processes import available_cores
from freshet.errors import ConfigError
from freshet.experiments.grid import parse_seeds
from freshet.paper import theory as checks
from freshet.paper import theory as results


def theory(
    context: typer.Context,
    seeds: str,
    out: Path,
    scale: float,
    executor: str | None,
    workers: int | None,
    *,
    listing: bool = False,
    unused: Mapping[str, object],
) -> None:
    """Make the runs that are missing, then write and print the results; ``scale`` multiplies T."""
    source = context.get_parameter_source("seeds")
    if source is not None and source.name == "DEFAULT":
        seeds = "1"  # a mean over T is smooth without a second one over seeds
    jobs, folder, start = _jobs(seeds, out, scale, unused), out / "theory-runs", time.perf_counter()
    todo, at_once = checks.missing(jobs, folder), _processes(executor, workers)
    if listing:
        for job in dict.fromkeys(job.canonical() for job in jobs):
            typer.echo(f"{job.name} {'missing' if job in todo else 'finished'}")
        typer.echo(f"{len({job.canonical() for job in jobs})} runs, {len(todo)} to do, in {folder}")
        return
    make_writable(folder)
    with TheoryScreen(Console(stderr=True), len(todo)) as screen:
        done = checks.run_all(todo, folder, at_once, screen.on_done)
    if not done:
        typer.echo("interrupted; the same command goes on from here", err=True)
        raise typer.Exit(130)
    from freshet.paper.theory_figure import draw_theory

    found = results.document(jobs, folder, time.perf_counter() - start)
    files = [*results.write(found, out), *draw_theory(found, out)]
    show(wide_console(), found)
    for path in files:
        typer.echo(str(path))


def _jobs(seeds: str, out: Path, scale: float, unused: Mapping[str, object]) -> list[checks.TheoryRun]:
    """Every run that is asked for, once the options make sense."""
    for key, value in unused.items():
        if value:
            raise ConfigError(key, "means nothing to the suite theory, whose settings are fixed; leave it out")
    if not 0.0 < scale <= 1.0:
        raise ConfigError("--scale", f"must be in (0, 1], but {scale:g} was given")
    if out.exists() and not out.is_dir():
        raise ConfigError("--out", f"{out} is a file; choose a folder")
    return checks.settings(parse_seeds(seeds), max(checks.SHORTEST, round(scale * checks.VERSIONS)))


def _processes(executor: str | None, workers: int | None) -> int:
    """How many runs at a time: each trains in its own process, or all one after the other in this one."""
    if executor not in (None, "auto", "serial", "processes"):
        raise ConfigError("--executor", f"must be auto, serial or processes here, but {executor!r} was given")
    return 1 if executor == "serial" else workers or available_cores()


class TheoryScreen:
    """A bar over the runs; on a pipe one line per finished run."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("theory"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.description}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_done(self, job: checks.TheoryRun, mean: float) -> None:
        """One run is over."""
        self._bar.update(self._task, advance=1, description=job.name)
        if not self._console.is_terminal:
            self._console.print(Text(f"{job.name}: mean squared gradient {mean:.4g}"), highlight=False, soft_wrap=True)


def show(console: Console, found: dict[str, Any]) -> None:
    """The measured means beside the bounds, a line per setting."""
    problem = found["problem"]
    console.print(Text(found["title"], style="bold"))
    console.print(
        f"mu {problem['mu']:g}, L {problem['smoothness']:.3g}, F(w_1) - F* {problem['gap']:.4g}, "
        f"gradient at the optimum {problem['gradient_at_optimum']:.1e}",
        highlight=False,
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("part", "method"):
        table.add_column(heading)
    for heading in ("limit", "steps", "T", "iota0", "mean", "last tenth", "printed", "corrected", "repaired", "G^2"):
        table.add_column(heading, justify="right")
    for line in found["lines"]:
        counts = [str(line[key]) for key in ("tau", "epochs", "versions")]
        values = [line[key] for key in ("mean", "tail", "printed", "corrected", "repaired")]
        values.append(line["constants"]["second_moment"])
        shown = [f"{value:.3g}" if value < 1e4 else f"{value:.1e}" for value in values]
        table.add_row(line["part"], line["method"], *counts, f"{line['iota0']:g}", *shown)
    console.print(table)
    broken = [line for line in found["lines"] if line["mean"] > line["printed"]]
    for line in broken:
        console.print(
            f"the printed bound is broken: {line['part']}, {line['method']}: measured mean {line['mean']:.3g}, "
            f"least {line['least']:.3g}, printed {line['printed']:.3g}",
            highlight=False,
        )
