"""``freshet compare``, ``freshet tune`` and ``freshet paper``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from freshet.cli import theory
from freshet.cli.grids import GridScreen
from freshet.cli.screen import number
from freshet.cli.tables import print_results, wide_console
from freshet.config import load_tables, seconds
from freshet.errors import ConfigError
from freshet.experiments import files, results
from freshet.experiments import paper as papers
from freshet.experiments.compare import Watch, run_grid, to_do
from freshet.experiments.grid import Job, Request, World, expand, parse_entries, parse_seeds, tables_for
from freshet.experiments.presets import find_cell
from freshet.experiments.store import State, Store
from freshet.experiments.tune import Budget, Tuner, load_optuna
from freshet.report.panel_figures import draw

Cell = Annotated[str | None, typer.Option("--cell", help="One of the paper's cells, see [b]freshet cells[/b].")]
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file, for example a run's config.toml.")]
Until = Annotated[str | None, typer.Option("--until", help="Virtual time of each run: 600, 600s, 10m, 2h.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="section.key=value for all, METHOD.key=value for one. Repeatable."),
]
Seeds = Annotated[str, typer.Option("--seeds", help="How many seeds (0, 1, ...), or which: 4,7.")]
ExecutorName = Annotated[str | None, typer.Option("--executor", help="auto, serial, processes or ray (same bits).")]
WorkerCount = Annotated[int | None, typer.Option("--workers", help="Worker processes (0: as many as cores).")]
Reference = Annotated[
    str | None,
    typer.Option("--reference", help="Hold all against this method; or one asynchronous,synchronous for each kind."),
]
Retry = Annotated[bool, typer.Option("--retry", help="Try runs that crashed once more.")]
Listing = Annotated[bool, typer.Option("--list", help="Show what would run, and run nothing.")]


def compare(
    methods: Annotated[
        str,
        typer.Option("--methods", "-m", help="Methods with commas between; options with @: fedasync@alpha=0.4."),
    ],
    seeds: Seeds = "3",
    until: Until = None,
    cell: Cell = None,
    config: ConfigFile = None,
    settings: Settings = None,
    target: Annotated[float | None, typer.Option("--target", help="Accuracy whose reaching is timed.")] = None,
    reference: Reference = None,
    tuned: Annotated[
        list[Path] | None, typer.Option("--tuned", help="Folder made by [b]freshet tune[/b]. Repeatable.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the runs and the results.")] = Path(
        "runs/compare"
    ),
    executor: ExecutorName = None,
    workers: WorkerCount = None,
    retry: Retry = False,
    listing: Listing = False,
) -> None:
    """Run several methods on the same data, devices and seeds, and say which is better and how much faster.

    Finished runs are never repeated: after Ctrl-C, or with one more method or seed, only what is missing runs.

    Example: freshet compare -m fedasmu,fedasync,fedbuff,fedavg --seeds 3 --until 600s
    """
    tables = load_tables(config) if config else {}
    extra = _run_settings(until, executor, workers)
    extra += [] if target is None else [f"run.target={target}"]
    request = Request(
        tables, [load_tables(folder / "best.toml") for folder in tuned or []], [*(settings or []), *extra]
    )
    world = World(cell or "", find_cell(cell) if cell else None)
    jobs = expand(parse_entries(methods), parse_seeds(seeds), request, [world])
    notes = papers.changed(settings or []) + _tuning_notes(tuned or []) + papers.lengths(jobs)
    grid = Grid(jobs, Store(out), "comparison", notes, "comparison", reference=reference or "")
    _work(grid, retry=retry, listing=listing)


def paper(
    context: typer.Context,
    suite: Annotated[str | None, typer.Argument(metavar="SUITE", help=f"{', '.join(papers.SUITES)} or theory.")] = None,
    scale: Annotated[float, typer.Option("--scale", help="Devices, samples and rounds times this, in (0, 1].")] = 1.0,
    seeds: Seeds = "3",
    methods: Annotated[str | None, typer.Option("--methods", "-m", help="Only these methods.")] = None,
    cells: Annotated[str | None, typer.Option("--cells", help="Only these cells, with commas between.")] = None,
    reference: Reference = None,
    settings: Settings = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the runs and the results.")] = Path("runs/paper"),
    executor: ExecutorName = None,
    workers: WorkerCount = None,
    retry: Retry = False,
    listing: Listing = False,
) -> None:
    """Repeat an experiment of the FedASMU paper, full or scaled down, beside its published numbers.

    Without SUITE it lists the suites. Like compare, it goes on where it was interrupted.

    Example: freshet paper ablation --scale 0.1 --seeds 3
    """
    if suite is None:
        wide_console().print(_suites())
        return
    if suite == "theory":
        unused = {"--methods": methods, "--cells": cells, "--set": settings, "--retry": retry}
        theory.theory(context, seeds, out, scale, executor, workers, listing=listing, unused=unused)
        return
    assignments = [*(settings or []), *_run_settings(None, executor, workers)]
    plan = papers.plan(
        papers.find_suite(suite),
        parse_seeds(seeds),
        scale=scale,
        methods=methods,
        cells=cells,
        settings=assignments,
    )
    grid = Grid(plan.jobs, Store(out), plan.title, plan.notes, plan.stem, plan.scaled, plan.suite.look, reference or "")
    _work(grid, retry=retry, listing=listing)


def tune(
    method: Annotated[str, typer.Option("--method", "-m", help="Method or variant.")],
    trials: Annotated[int, typer.Option("--trials", min=1, help="Trials; the first one is the defaults.")] = 20,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds per trial.")] = 2,
    until: Until = None,
    cell: Cell = None,
    config: ConfigFile = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder (default: runs/tune/METHOD).")] = None,
    executor: ExecutorName = None,
    workers: WorkerCount = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the search.")] = 0,
) -> None:
    """Tune a method's options and learning rate on a held-out fifth of the training set; the test set is not touched.

    The result, best.toml, is for freshet run --config; its folder is for freshet compare --tuned.

    Example: freshet tune -m fedasync --trials 20 --seeds 2 --until 300s
    """
    load_optuna()
    entry = parse_entries(method)[0]
    if entry.label != method.strip() or entry.options:
        raise ConfigError("--method", f"expects one method, but {method!r} was given; fix options with --set")
    world = World(cell or "", find_cell(cell) if cell else None)
    request = Request(
        load_tables(config) if config else {},
        settings=[
            *(_for_one(setting, entry.method) for setting in settings or []),
            *_run_settings(until, executor, workers),
        ],
    )
    folder = out or Path("runs/tune") / entry.method.replace(":", ".")
    tuner = Tuner(entry.method, tables_for(entry, world, request), folder, Budget(trials, seeds), seed)
    with TuneScreen(Console(stderr=True), trials) as screen:
        done = tuner.run(screen, screen.on_trial)
    if not done:
        typer.echo("interrupted; the same command goes on from here", err=True)
        raise typer.Exit(130)
    record = json.loads((folder / "tuning.json").read_text(encoding="utf-8"))
    values = ", ".join(f"{key} {value:.4g}" for key, value in record["values"].items())
    typer.echo(f"validation accuracy {record['score']:.4f} with {values}", err=True)
    typer.echo(str(folder / "best.toml"))


# ---- shared


@dataclass(frozen=True)
class Grid:
    """What a command runs and how its results are told."""

    jobs: Sequence[Job]
    store: Store
    title: str
    notes: Sequence[str]
    stem: str
    scale: dict[str, Any] | None = None
    look: str = "curves"
    reference: str = ""


def _work(grid: Grid, *, retry: bool, listing: bool) -> None:
    """Run what is missing, then print and write the results."""
    console, jobs, store = wide_console(), grid.jobs, grid.store
    results.named_places(list(dict.fromkeys(job.entry for job in jobs)), grid.reference)
    if listing:
        _list(console, jobs, store, grid.title, grid.notes)
        return
    with GridScreen(Console(stderr=True), jobs, store) as screen:
        done = run_grid(jobs, store, watch=screen, retry=retry)
    told = {"title": grid.title, "notes": grid.notes, "scale": grid.scale, "look": grid.look, "named": grid.reference}
    found = results.document(jobs, store, **told)  # type: ignore[arg-type]
    made = [*files.write(found, store.folder, grid.stem), *draw(found, store.folder, grid.stem)]
    print_results(console, found)
    for path in made:
        typer.echo(str(path))
    states = [run["state"] for world in found["worlds"] for line in world["lines"] for run in line["runs"]]
    if not done:
        left = len(to_do(jobs, store))
        typer.echo(f"interrupted with {left} runs to do; the same command goes on from here", err=True)
        raise typer.Exit(130)
    if State.FAILED in states:
        typer.echo(f"{states.count(State.FAILED)} runs failed and are not averaged; --retry tries them again", err=True)
        raise typer.Exit(1)


def _list(console: Console, jobs: Sequence[Job], store: Store, title: str, notes: Sequence[str]) -> None:
    console.print(Text(title, style="bold"))
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("world", "method", "seed", "state", "run"):
        table.add_column(heading)
    for job in jobs:
        world, label = Text(job.world.name or job.config.data.name), Text(job.entry.title)
        table.add_row(world, label, str(job.seed), str(store.state(job.key)), job.key)
    console.print(table)
    for note in notes:
        console.print(Text(note, style="dim"), soft_wrap=True)
    typer.echo(f"{len(jobs)} runs, {len(to_do(jobs, store))} to do, in {store.folder}")


def _suites() -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("suite", "what it varies", "cells", "methods", "settings"):
        table.add_column(heading)
    for suite in papers.SUITES.values():
        cells = ", ".join(suite.cells) if len(suite.cells) < 4 else str(len(suite.cells))
        settings = ", ".join(setting.name for setting in suite.settings if setting.name) or "–"
        table.add_row(suite.name, suite.title, cells, str(len(suite.methods)), settings)
    table.add_row(*theory.ROW)
    return table


def _run_settings(until: str | None, executor: str | None, workers: int | None) -> list[str]:
    """Options of their own as settings, which win over a config file's."""
    found = [] if until is None else [f"run.until={seconds(until)}"]
    found += [] if executor is None else [f'run.executor="{executor}"']
    return found + ([] if workers is None else [f"run.workers={workers}"])


def _for_one(setting: str, method: str) -> str:
    """With a single method, ``method.key=value`` is clear enough."""
    return f"{method}.{setting.partition('.')[2]}" if setting.strip().startswith("method.") else setting


def _tuning_notes(folders: Sequence[Path]) -> list[str]:
    """Which methods were tuned, and a warning when their budgets were not equal."""
    budgets: dict[str, Mapping[str, Any]] = {}
    for folder in folders:
        try:
            record = json.loads((folder / "tuning.json").read_text(encoding="utf-8"))
            budgets[record["method"]] = record["budget"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError("--tuned", f"{folder} has no tuning.json made by `freshet tune`") from None
    said = [f"{name} {b['trials']} trials x {b['seeds']} seeds of {b['until']:g} s" for name, b in budgets.items()]
    unequal = len({json.dumps(budget, sort_keys=True) for budget in budgets.values()}) > 1
    return [f"tuned: {', '.join(said)}{'; UNEQUAL BUDGETS' if unequal else ''}"] if said else []


class TuneScreen(Watch):
    """A bar for the run under way, and a line for each trial."""

    def __init__(self, console: Console, trials: int) -> None:
        self._console, self._trials, self._best = console, trials, -1.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("accuracy [bold]{task.fields[accuracy]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task("tuning", total=1.0, accuracy="–", visible=console.is_terminal)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_begin(self, job: Job, state: State) -> None:
        self._bar.reset(self._task, total=job.config.run.until, description=f"seed {job.seed}", accuracy="–")

    def on_progress(self, time: float) -> None:
        self._bar.update(self._task, completed=time)

    def on_metrics(self, row: dict[str, Any]) -> None:
        self._bar.update(self._task, accuracy=number(row["accuracy"]))

    def on_trial(self, record: Mapping[str, Any], count: int) -> None:
        """One trial is over."""
        self._best = max(self._best, record["value"] if record["value"] is not None else -1.0)
        values = ", ".join(f"{key.partition('.')[2]} {value:.4g}" for key, value in record["values"].items())
        result = record["error"] or (record["state"] if record["value"] is None else f"{record['value']:.4f}")
        best = f"best {self._best:.4f}" if self._best >= 0 else "nothing yet"
        line = f"trial {count}/{self._trials}: {result} ({best}) {values}"
        self._bar.console.print(Text(line), highlight=False, soft_wrap=True)
