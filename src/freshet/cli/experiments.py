"""``freshet compare``, ``freshet tune`` and ``freshet paper``."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from freshet.cli.util import make_writable
from freshet.errors import ConfigError

#: What `freshet paper` says about the suite theory: name, title, cells, methods, settings.
THEORY = ("theory", "convergence theorem against measured gradients", "digits, convex", "2", "tau_max, local steps")
#: The same about results, which runs nothing.
RESULTS = ("results", "docs/results.md and its pictures, from the runs that were kept", "12", "–", "–")
_OF_RESULTS = "Only with results"

Cell = Annotated[str | None, typer.Option("--cell", help="One of the paper's cells, see [b]freshet cells[/b].")]
ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="TOML file, for example a run's config.toml.")]
Until = Annotated[str | None, typer.Option("--until", help="Virtual time of each run: 600, 600s, 10m, 2h.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="section.key=value for all, METHOD.key=value for one. Repeatable."),
]
Seeds = Annotated[str, typer.Option("--seeds", help="How many seeds (0, 1, ...), or which: 4,7.")]
ExecutorName = Annotated[str | None, typer.Option("--executor", help="auto, serial, processes or ray (same bits).")]
WorkerCount = Annotated[int | None, typer.Option("--workers", "-w", help="Worker processes (0: as many as cores).")]
Reference = Annotated[
    str | None,
    typer.Option("--reference", help="Hold all against this method; or one asynchronous,synchronous for each kind."),
]
Retry = Annotated[bool, typer.Option("--retry", help="Try runs that crashed once more.")]
Listing = Annotated[bool, typer.Option("--list", help="Show what would run, and run nothing.")]

Page = Annotated[Path, typer.Option("--page", help="The page that results writes.", rich_help_panel=_OF_RESULTS)]
Take = Annotated[
    list[Path] | None,
    typer.Option("--take", help="Folder of runs to bring in first. Repeatable.", rich_help_panel=_OF_RESULTS),
]
TakenCell = Annotated[
    str | None,
    typer.Option("--cell", help="Whose runs --take brings in (else lenet-fmnist's).", rich_help_panel=_OF_RESULTS),
]
TakenSuite = Annotated[
    str | None,
    typer.Option(
        "--suite",
        metavar="NAME[/SETTING]",
        help="The suite that they belong to, if they are not main runs: ablation, skew/Dirichlet-0.1.",
        rich_help_panel=_OF_RESULTS,
    ),
]
#: Parameters of `freshet paper` that results takes, those that nothing else takes last.
_FOR_RESULTS = ("suite", "out", "page", "take", "cell", "part")


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
    from freshet.cli.grids import work
    from freshet.config import load_tables
    from freshet.experiments.grid import Scenario, UserSettings, expand, parse_entries, parse_seeds
    from freshet.experiments.results import Grid
    from freshet.experiments.store import Store
    from freshet.experiments.tune import read_tuned, tuning_notes
    from freshet.paper import suites as papers
    from freshet.paper.cells import find_cell

    tables = load_tables(config) if config else {}
    extra = _run_settings(until, executor, workers)
    extra += [] if target is None else [f"run.target={target}"]
    entries, folders = parse_entries(methods), tuned or []
    names = list(dict.fromkeys(entry.method for entry in entries))
    found = [read_tuned(folder, names) for folder in folders]
    request = UserSettings(tables, found, [*(settings or []), *extra])
    world = Scenario(cell or "", find_cell(cell) if cell else None)
    jobs = expand(entries, parse_seeds(seeds), request, [world])
    notes = papers.override_note(settings or []) + tuning_notes(folders, names) + papers.length_notes(jobs)
    grid = Grid(jobs, Store(out), "comparison", notes, "comparison", reference=reference or "")
    work(grid, retry=retry, listing=listing)


def paper(
    context: typer.Context,
    suite: Annotated[str | None, typer.Argument(metavar="SUITE", help="Which; without it they are listed.")] = None,
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
    page: Page = Path("docs/results.md"),
    take: Take = None,
    cell: TakenCell = None,
    part: TakenSuite = None,
) -> None:
    """Repeat an experiment of the FedASMU paper, full or scaled down, beside its published numbers.

    Without SUITE it lists the suites. Like compare, it goes on where it was interrupted.

    The suite results runs nothing: it writes the page of results from the runs that are kept in --out (here: results).

    Example: freshet paper ablation --scale 0.1 --seeds 3
    """
    given = _given(context)
    if suite == "results":
        from freshet.cli import findings

        folder = out if "out" in given else Path("results")
        others = [option for name, option in given.items() if name not in _FOR_RESULTS]
        findings.results(folder, page, take or [], cell, part, others)
        return
    for name in _FOR_RESULTS[2:]:
        if name in given:
            raise ConfigError(given[name], "is for freshet paper results; leave it out")
    if suite is None:
        from freshet.cli.screen import wide_console

        wide_console().print(_suites())
        return
    from freshet.cli import theory
    from freshet.cli.grids import work
    from freshet.experiments.grid import parse_seeds
    from freshet.experiments.results import Grid
    from freshet.experiments.store import Store
    from freshet.paper import suites as papers

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
    grid = Grid(plan.jobs, Store(out), plan.title, plan.notes, plan.stem, plan.scale_record, plan.suite.look, reference or "")
    work(grid, retry=retry, listing=listing)


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
    from freshet.cli.grids import TuneScreen
    from freshet.config import load_tables
    from freshet.experiments.grid import Scenario, UserSettings, parse_entries, tables_for
    from freshet.experiments.tune import Budget, Tuner, score_text, load_optuna
    from freshet.paper.cells import find_cell

    load_optuna()
    entry = parse_entries(method)[0]
    if entry.label != method.strip() or entry.options:
        raise ConfigError("--method", f"expects one method, but {method!r} was given; fix options with --set")
    world = Scenario(cell or "", find_cell(cell) if cell else None)
    request = UserSettings(
        load_tables(config) if config else {},
        settings=[
            *(_for_one(setting, entry.method) for setting in settings or []),
            *_run_settings(until, executor, workers),
        ],
    )
    folder = make_writable(out or Path("runs/tune") / entry.method.replace(":", "."))
    tuner = Tuner(entry.method, tables_for(entry, world, request), folder, Budget(trials, seeds), seed)
    with TuneScreen(Console(stderr=True), trials) as screen:
        done = tuner.run(screen, screen.on_trial)
    if not done:
        typer.echo("interrupted; the same command goes on from here", err=True)
        raise typer.Exit(130)
    record = json.loads((folder / "tuning.json").read_text(encoding="utf-8"))
    values = ", ".join(f"{key} {value:.4g}" for key, value in record["values"].items())
    typer.echo(f"validation {score_text(record)} with {values}", err=True)
    typer.echo(str(folder / "best.toml"))


def _suites() -> Table:
    from freshet.paper.suites import SUITES

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("suite", "what it varies", "cells", "methods", "settings"):
        table.add_column(heading)
    for suite in SUITES.values():
        cells = ", ".join(suite.cells) if len(suite.cells) < 4 else str(len(suite.cells))
        settings = ", ".join(setting.name for setting in suite.settings if setting.name) or "–"
        table.add_row(suite.name, suite.title, cells, str(len(suite.methods)), settings)
    table.add_row(*THEORY)
    table.add_row(*RESULTS)
    return table


def _given(context: typer.Context) -> dict[str, str]:
    """Parameters that stand on the command line, with what they are called there."""
    names = {each.name or "": each.opts[0] for each in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in names}
    return {name: names[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def _run_settings(until: str | None, executor: str | None, workers: int | None) -> list[str]:
    """Options of their own as settings, which win over a config file's."""
    from freshet.config import seconds

    found = [] if until is None else [f"run.until={seconds(until)}"]
    found += [] if executor is None else [f'run.executor="{executor}"']
    return found + ([] if workers is None else [f"run.workers={workers}"])


def _for_one(setting: str, method: str) -> str:
    """With a single method, ``method.key=value`` is clear enough."""
    return f"{method}.{setting.partition('.')[2]}" if setting.strip().startswith("method.") else setting
