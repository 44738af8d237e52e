"""``freshet paper``: the experiments of the FedASMU paper, the check of its theorem, and the results pages."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from freshet.cli.experiments import DryRun, Reference, Retry, Seeds, Settings, WorkerCount
from freshet.errors import ConfigError

if TYPE_CHECKING:
    from freshet.paper.theory import TheoryRun

paper_app = typer.Typer(
    help="Repeat the experiments of the FedASMU paper, full or scaled down, beside its published numbers.",
    no_args_is_help=True,
)

Scale = Annotated[float, typer.Option("--scale", help="Devices, samples and rounds times this, in (0, 1].")]
Methods = Annotated[str | None, typer.Option("--methods", "-m", help="Only these methods.")]
Cells = Annotated[str | None, typer.Option("--cells", help="Only these cells, with commas between.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for the runs and the results.")]
RUNS = Path("runs/paper")

#: The suites with their help texts; the commands of several cells have the option --cells.
SUITES_OF_SEVERAL_CELLS = {
    "table": """The main table: 12 cells, 12 methods.

    A later call with the same --out runs only what is missing.

    Example: freshet paper table --scale 0.1 --cells lenet-fmnist""",
    "ablation": """FedASMU without learned weights, without fresh models, and without both; 2 cells.

    Example: freshet paper ablation --scale 0.1 --seeds 3""",
}
SUITES_OF_ONE_CELL = {
    "slots": """When devices ask for the fresh model: learned, or at fixed slots.

    Example: freshet paper slots --scale 0.1""",
    "devices": """100, 200 and 250 devices.

    Example: freshet paper devices --scale 0.1 -m fedasmu,fedavg""",
    "heterogeneity": """Slowest over fastest device: 5, 110 and 440.

    Example: freshet paper heterogeneity --scale 0.1 --list""",
    "bandwidth": """Links of 1, 1/50 and 1/100 of the bandwidth.

    Example: freshet paper bandwidth --scale 0.1""",
}


def _add_suite_of_several_cells(name: str, text: str) -> None:
    @paper_app.command(name, help=text)
    def suite(
        scale: Scale = 1.0,
        seeds: Seeds = "3",
        methods: Methods = None,
        cells: Cells = None,
        reference: Reference = None,
        settings: Settings = None,
        out: Out = RUNS,
        workers: WorkerCount = None,
        retry: Retry = False,
        listing: DryRun = False,
    ) -> None:
        _run_suite(name, scale, seeds, methods, cells, reference, settings, out, workers, retry=retry, listing=listing)


def _add_suite_of_one_cell(name: str, text: str) -> None:
    @paper_app.command(name, help=text)
    def suite(
        scale: Scale = 1.0,
        seeds: Seeds = "3",
        methods: Methods = None,
        reference: Reference = None,
        settings: Settings = None,
        out: Out = RUNS,
        workers: WorkerCount = None,
        retry: Retry = False,
        listing: DryRun = False,
    ) -> None:
        _run_suite(name, scale, seeds, methods, None, reference, settings, out, workers, retry=retry, listing=listing)


for _name, _text in SUITES_OF_SEVERAL_CELLS.items():
    _add_suite_of_several_cells(_name, _text)
for _name, _text in SUITES_OF_ONE_CELL.items():
    _add_suite_of_one_cell(_name, _text)


def _run_suite(
    name: str,
    scale: float,
    seeds: str,
    methods: str | None,
    cells: str | None,
    reference: str | None,
    settings: list[str] | None,
    out: Path,
    workers: int | None,
    *,
    retry: bool,
    listing: bool,
) -> None:
    """Run what is missing of a suite, then print and write its results."""
    from freshet.cli.grids import work
    from freshet.experiments.grid import parse_seeds
    from freshet.experiments.results import Grid
    from freshet.experiments.store import Store
    from freshet.paper.suites import SUITES, plan

    assignments = [*(settings or []), *([] if workers is None else [f"run.workers={workers}"])]
    found = plan(SUITES[name], parse_seeds(seeds), scale=scale, methods=methods, cells=cells, settings=assignments)
    grid = Grid(
        found.jobs,
        Store(out),
        found.title,
        found.notes,
        found.stem,
        found.scale_record,
        found.suite.look,
        reference or "",
        found.published,
    )
    work(grid, retry=retry, listing=listing)


# ---- theory


@paper_app.command()
def theory(
    seeds: Seeds = "1",
    scale: Annotated[float, typer.Option("--scale", help="Versions T times this, in (0, 1].")] = 1.0,
    out: Out = RUNS,
    workers: WorkerCount = None,
    listing: DryRun = False,
) -> None:
    """Check the convergence theorem: measured gradients beside its bound.

    A later call with the same --out runs only what is missing.

    Example: freshet paper theory --scale 0.5
    """
    from freshet.cli.screen import wide_console
    from freshet.cli.util import make_writable
    from freshet.compute.processes import available_cores
    from freshet.experiments.grid import parse_seeds
    from freshet.paper import theory as check
    from freshet.paper.pictures import draw_theory

    if not 0.0 < scale <= 1.0:
        raise ConfigError("--scale", f"must be in (0, 1], but {scale:g} was given")
    if out.exists() and not out.is_dir():
        raise ConfigError("--out", f"{out} is a file; choose a folder")
    jobs = check.settings(parse_seeds(seeds), max(check.SHORTEST, round(scale * check.VERSIONS)))
    folder, start = out / "theory-runs", time.perf_counter()
    todo = check.missing(jobs, folder)
    if listing:
        for job in dict.fromkeys(job.canonical() for job in jobs):
            typer.echo(f"{job.name} {'missing' if job in todo else 'finished'}")
        typer.echo(f"{len({job.canonical() for job in jobs})} runs, {len(todo)} to do, in {folder}")
        return
    make_writable(folder)
    with TheoryScreen(Console(stderr=True), len(todo)) as screen:
        done = check.run_all(todo, folder, workers or available_cores(), screen.on_done)
    if not done:
        typer.echo("interrupted; run the same command again to continue", err=True)
        raise typer.Exit(130)
    found = check.document(jobs, folder, time.perf_counter() - start)
    files = [*check.write(found, out), *draw_theory(found, out)]
    print_theory(wide_console(), found)
    for path in files:
        typer.echo(str(path))


class TheoryScreen:
    """A progress bar over the runs; on a pipe, one line per finished run."""

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

    def on_done(self, job: "TheoryRun", mean: float) -> None:
        """One run is over."""
        self._bar.update(self._task, advance=1, description=job.name)
        if not self._console.is_terminal:
            self._console.print(Text(f"{job.name}: mean squared gradient {mean:.4g}"), highlight=False, soft_wrap=True)


def print_theory(console: Console, found: dict[str, Any]) -> None:
    """Print the measured means beside the bounds, a line per setting."""
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
    for line in found["lines"]:
        if line["mean"] > line["printed"]:
            console.print(
                f"the printed bound is broken: {line['part']}, {line['method']}: measured mean {line['mean']:.3g}, "
                f"least {line['least']:.3g}, printed {line['printed']:.3g}",
                highlight=False,
            )


# ---- results


@paper_app.command()
def results(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder with the archived runs.")] = Path("results"),
    page: Annotated[Path, typer.Option("--page", help="The page to write; its appendix lies beside it.")] = Path(
        "docs/results.md"
    ),
    take: Annotated[
        list[Path] | None, typer.Option("--take", help="Folder of runs to import first. Repeatable.")
    ] = None,
    cell: Annotated[
        str | None, typer.Option("--cell", help="The cell of the runs that --take imports (default: lenet-fmnist).")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            metavar="NAME[/SETTING]",
            help="Their suite, if they are not main runs: ablation, skew/Dirichlet-0.1.",
        ),
    ] = None,
) -> None:
    """Write the results pages and their pictures from archived runs; no run is made.

    Example: freshet paper results --take runs/cifar --cell lenet-cifar10
    """
    from freshet.paper.cells import find_cell
    from freshet.paper.results_page import write
    from freshet.paper.studies import STUDIES, import_runs

    if not take and (cell or suite):
        raise ConfigError("--cell" if cell else "--suite", "says where --take imports runs; give --take too")
    if page.is_dir():
        raise ConfigError("--page", f"{page} is a folder; name a file")
    if take:
        imported = import_runs(take, out, find_cell(cell or STUDIES[0].cell.name), suite)
        typer.echo(f"{len(imported)} run{'s' * (len(imported) > 1)} imported into {imported[0].parent}", err=True)
    for path in write(out, page):
        typer.echo(str(path))
