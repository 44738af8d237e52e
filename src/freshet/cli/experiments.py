"""``freshet compare`` and ``freshet tune``."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from freshet.cli.util import Executor, make_writable
from freshet.errors import ConfigError

Cell = Annotated[str | None, typer.Option("--cell", help="One of the paper's cells, see [b]freshet cells[/b].")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML or YAML file, such as a run's config.toml.")
]
Until = Annotated[str | None, typer.Option("--until", help="Virtual time of each run: 600, 600s, 10m, 2h.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="section.key=value for all, METHOD.key=value for one. Repeatable."),
]
Seeds = Annotated[str, typer.Option("--seeds", help="How many seeds (0, 1, ...), or which: 4,7.")]
ExecutorName = Annotated[Executor | None, typer.Option("--executor", help="Where training runs (same bits).")]
WorkerCount = Annotated[int | None, typer.Option("--workers", "-w", help="Worker processes (0: one per core).")]
Reference = Annotated[
    str | None,
    typer.Option("--reference", help="Compare all with this method, or with one of each kind: ASYNC,SYNC."),
]
Retry = Annotated[bool, typer.Option("--retry", help="Try crashed runs again.")]
DryRun = Annotated[bool, typer.Option("--list", help="List the runs and start none.")]


def compare(
    methods: Annotated[
        str,
        typer.Option("--methods", "-m", help="Methods, with commas between; options after @: fedasync@alpha=0.4."),
    ],
    seeds: Seeds = "3",
    until: Until = None,
    cell: Cell = None,
    config: ConfigFile = None,
    settings: Settings = None,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", "-g", help="section.key=value,value,...: compare under each value. Repeatable."),
    ] = None,
    target: Annotated[float | None, typer.Option("--target", help="Measure the time to this accuracy.")] = None,
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
    listing: DryRun = False,
) -> None:
    """Compare methods on the same data, devices and seeds: which is better, and how much faster.

    A later call with the same --out runs only what is missing: after Ctrl-C, or with one more method or seed.

    With --grid, every combination of values is a comparison of its own in the same tables.

    Example: freshet compare -m fedasmu,fedasync,fedbuff,fedavg --seeds 3 --until 600s

    Example: freshet compare -m fedasmu,fedavg -g fleet.ratio=1,20 -g data.concentration=0.1,1
    """
    from freshet.cli.grids import work
    from freshet.config import load_tables
    from freshet.experiments.grid import (
        Scenario,
        UserSettings,
        as_settings,
        choice_name,
        expand,
        length_notes,
        override_note,
        parse_entries,
        parse_grid,
        parse_seeds,
    )
    from freshet.experiments.results import Grid
    from freshet.experiments.store import Store
    from freshet.experiments.tune import read_tuned, tuning_notes
    from freshet.paper.cells import cell_scenario, find_cell
    from freshet.paper.published import published_numbers

    tables = load_tables(config) if config else {}
    extra = _run_settings(until, executor, workers)
    extra += [] if target is None else [f"run.target={target}"]
    entries, folders = parse_entries(methods), tuned or []
    names = list(dict.fromkeys(entry.method for entry in entries))
    found = [read_tuned(folder, names) for folder in folders]
    user = UserSettings(tables, found, [*(settings or []), *extra])
    scenario = cell_scenario(find_cell(cell)) if cell else Scenario()
    jobs = [
        job
        for choice in parse_grid(grid or [])
        for job in expand(
            entries,
            parse_seeds(seeds),
            replace(user, settings=[*user.settings, *as_settings(choice)]),
            [replace(scenario, name=choice_name(choice, scenario.name))],
        )
    ]
    notes = override_note(settings or []) + tuning_notes(folders, names) + length_notes(jobs)
    published = published_numbers(jobs)
    result = Grid(jobs, Store(out), "comparison", notes, "comparison", reference=reference or "", published=published)
    work(result, retry=retry, listing=listing)


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
    """Tune a method's options and learning rate on a held-out fifth of the training set, never on the test set.

    The result is best.toml, for freshet run --config; pass its folder to freshet compare --tuned.

    Example: freshet tune -m fedasync --trials 20 --seeds 2 --until 300s
    """
    from freshet.cli.grids import TuneScreen
    from freshet.config import load_tables
    from freshet.experiments.grid import Scenario, UserSettings, parse_entries, tables_for
    from freshet.experiments.tune import Budget, Tuner, load_optuna, score_text
    from freshet.paper.cells import cell_scenario, find_cell

    load_optuna()
    entry = parse_entries(method)[0]
    if entry.label != method.strip() or entry.options:
        raise ConfigError("--method", f"expects one method, but {method!r} was given; set options with --set")
    scenario = cell_scenario(find_cell(cell)) if cell else Scenario()
    user = UserSettings(
        load_tables(config) if config else {},
        settings=[
            *(_for_one(setting, entry.method) for setting in settings or []),
            *_run_settings(until, executor, workers),
        ],
    )
    folder = make_writable(out or Path("runs/tune") / entry.method.replace(":", "."))
    tuner = Tuner(entry.method, tables_for(entry, scenario, user), folder, Budget(trials, seeds), seed)
    with TuneScreen(Console(stderr=True), trials) as screen:
        done = tuner.run(screen, screen.on_trial)
    if not done:
        typer.echo("interrupted; run the same command again to continue", err=True)
        raise typer.Exit(130)
    record = json.loads((folder / "tuning.json").read_text(encoding="utf-8"))
    values = ", ".join(f"{key} {value:.4g}" for key, value in record["values"].items())
    typer.echo(f"validation {score_text(record)} with {values}", err=True)
    typer.echo(str(folder / "best.toml"))


def _run_settings(until: str | None, executor: str | None, workers: int | None) -> list[str]:
    """Command-line options as settings, which win over a config file."""
    from freshet.config import seconds

    found = [] if until is None else [f"run.until={seconds(until)}"]
    found += [] if executor is None else [f'run.executor="{executor}"']
    return found + ([] if workers is None else [f"run.workers={workers}"])


def _for_one(setting: str, method: str) -> str:
    """With a single method, ``method.key=value`` means that method."""
    return f"{method}.{setting.partition('.')[2]}" if setting.strip().startswith("method.") else setting
