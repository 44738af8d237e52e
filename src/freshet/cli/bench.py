"""``freshet bench``: the benchmark of asynchronous federated learning."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from freshet.cli.experiments import DryRun, Retry, Settings, WorkerCount
from freshet.errors import ConfigError

if TYPE_CHECKING:
    import click

    from freshet.experiments.bench import BenchRun, BenchWorld, Plan
    from freshet.experiments.grid import Entry
    from freshet.experiments.tune import Tuner


class RunByDefault(TyperGroup):
    """``freshet bench --budget quick`` means ``freshet bench run --budget quick``."""

    def parse_args(self, ctx: "click.Context", args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


bench_app = typer.Typer(
    cls=RunByDefault,
    help="The benchmark: fixed worlds, equal budgets, kept results; without a command it means [b]run[/b].",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Kept = Annotated[Path, typer.Option("--kept", help="Folder with the kept results.")]
Worlds = Annotated[str | None, typer.Option("--worlds", help="Only these worlds, with commas between.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for the runs and the results.")]
BudgetOption = Annotated[str, typer.Option("--budget", "-b", help="quick, standard or full.")]
KEPT, RUNS = Path("results/bench-1"), Path("runs/bench-1")


@bench_app.command()
def run(
    budget: BudgetOption = "quick",
    worlds: Worlds = None,
    methods: Annotated[
        str | None, typer.Option("--methods", "-m", help="Only these methods, with commas between (default: all).")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option("--method", help="Your method (mine.py:Mine), placed beside the kept results of the others."),
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="Other seeds than the budget's.")] = None,
    settings: Settings = None,
    out: Out = RUNS,
    kept: Kept = KEPT,
    again: Annotated[bool, typer.Option("--again", help="Run what is kept, too.")] = False,
    workers: WorkerCount = None,
    retry: Retry = False,
    listing: DryRun = False,
) -> None:
    """Run what is missing of the benchmark, then print and write scores and ranks.

    A later call with the same --out runs only what is missing. Kept runs are not made again.

    Example: freshet bench run --budget quick --worlds image,phones -m fedasmu,fedasync,fedavg

    Example: freshet bench run --method mine.py:Mine
    """
    from freshet.cli.screen import clock, wide_console
    from freshet.cli.util import make_writable
    from freshet.experiments import bench
    from freshet.experiments.compare import to_do
    from freshet.experiments.grid import parse_entries, parse_seeds
    from freshet.experiments.store import Store

    if budget not in bench.BUDGETS:
        raise ConfigError("--budget", f"must be one of {', '.join(bench.BUDGETS)}, but {budget!r} was given")
    if method is not None and methods is not None:
        raise ConfigError("--method", "places one method beside kept results; --methods runs several: give one of them")
    _check_settings(settings or [])
    chosen = bench.choose_worlds(worlds)
    bench.check_data(chosen, budget)
    entries = parse_entries(method or methods or ",".join(bench.all_methods()))
    present, notes = ([], []) if again else bench.read_kept(kept, chosen, budget)
    plan = bench.Plan(
        entries,
        chosen,
        budget,
        Store(out / budget),
        parse_seeds(seeds or str(bench.BUDGETS[budget].seeds)),
        [*(settings or []), *([] if workers is None else [f"run.workers={workers}"])],
        frozenset((each.world, each.method, each.seed) for each in present),
    )
    console = wide_console()
    todo, expected = to_do(plan.jobs(), plan.store, retry=retry), bench.expected_seconds(plan, present, retry=retry)
    said = "not known before the first runs" if expected is None else f"about {clock(expected)} of one core"
    studies = f" and {len(plan.studies())} studies" if plan.studies() else ""
    typer.echo(f"{len(todo)} runs{studies} to do, {said}; {len(present)} runs are kept", err=True)
    if listing:
        for job in plan.jobs():
            typer.echo(f"{job.scenario.name} {job.key} {plan.store.state(job.key)}")
        return
    make_writable(plan.store.folder)
    done = _work(plan, retry)
    _show(console, plan, present, notes, only_entries=method is None and methods is not None)
    if not done:
        typer.echo("interrupted; run the same command again to continue", err=True)
        raise typer.Exit(130)


def _check_settings(settings: list[str]) -> None:
    """Only settings that change no result: a world is fixed."""
    from freshet.config import SECTIONS, non_semantic_keys

    free = non_semantic_keys(SECTIONS)
    for setting in settings:
        if setting.partition("=")[0].strip() not in free:
            problem = f"{setting!r} would change the world; options of a method go after its name: NAME@option=value"
            raise ConfigError("--set", problem)


def _work(plan: "Plan", retry: bool) -> bool:
    """Tune, then run with a live table; return False at Ctrl-C."""
    from freshet.cli.grids import GridScreen, TuneScreen
    from freshet.experiments.bench import BUDGETS, run_studies
    from freshet.experiments.compare import run_grid
    from freshet.experiments.tune import load_optuna

    console, begun = Console(stderr=True), time.monotonic()
    if plan.studies():
        load_optuna()

    def study(entry: "Entry", world: "BenchWorld", tuner: "Tuner") -> bool:
        console.print(Text(f"tuning {entry.label} in {world.name}"), highlight=False)
        with TuneScreen(console, BUDGETS[plan.budget].trials) as screen:
            return tuner.run(screen, screen.on_trial)

    done = run_studies(plan, study)
    if done:
        jobs = plan.jobs()
        with GridScreen(console, jobs, plan.store) as screen:
            done = run_grid(jobs, plan.store, watch=screen, retry=retry)
    console.print(Text(f"{time.monotonic() - begun:,.0f} s"), style="dim", highlight=False)
    return done


def _show(console: Console, plan: "Plan", kept: "list[BenchRun]", notes: list[str], *, only_entries: bool) -> None:
    """Print and write the results: those of the plan, and kept ones of the same worlds."""
    from freshet.experiments import bench
    from freshet.experiments.leaderboard import board, write_board

    mine = bench.runs_in_store(plan)
    labels = {entry.label for entry in plan.entries}
    made = {(run.world, run.method, run.seed) for run in mine}
    others = [run for run in kept if (run.world, run.method, run.seed) not in made]
    others = [run for run in others if run.seed in plan.seeds and (run.method in labels or not only_entries)]
    failures = bench.crashes(plan)
    found = board(plan.worlds, plan.budget, [*mine, *others], failures, notes)
    print_board(console, found)
    for path in write_board(found, plan.store.folder):
        typer.echo(str(path))


def print_board(console: Console, found: dict[str, Any]) -> None:
    """Print ranks over worlds and the scores of each world."""
    from freshet.experiments.leaderboard import RANKED

    for world in found["worlds"]:
        first, second = (f"{100 * target:g} %" for target in world["targets"])
        table = Table(box=None, header_style="bold", pad_edge=False, title=world["title"], title_justify="left")
        table.add_column("method")
        for heading in ("rank", "over run", "at the end", f"to {first}", f"to {second}", "MB", "worst decile"):
            table.add_column(heading, justify="right")
        for line in world["lines"]:
            times = [_number(each["median"], ",.0f") for each in line["times"]]
            sent = line["bytes"][0]["median"]
            shares = [_number(line[key]["median"], ".3f") for key in ("area", "accuracy", "worst_decile")]
            mega = _number(None if sent is None else sent / 1e6, ",.1f")
            name = Text(line["method"] + "".join(f" [{mark}]" for mark in line["marks"]))
            table.add_row(name, f"{line['rank']['area']['median']:g}", *shares[:2], *times, mega, shares[2])
        console.print(table)
        for line in world["lines"]:
            for failure in line["failures"]:
                console.print(Text(f"{line['method']}: {failure}", style="red"), soft_wrap=True)
    ranks = found["ranks"]["area"]
    if len(found["worlds"]) > 1 and ranks["methods"]:
        pairs = [f"{name} {mean:.2f}" for name, mean in zip(ranks["methods"], ranks["mean"], strict=True)]
        console.print(Text(f"mean rank by {RANKED['area']}: {', '.join(pairs)}"), soft_wrap=True)
    if ranks["critical_difference"] is not None:
        test = f"critical difference {ranks['critical_difference']:.2f}, Friedman p {ranks['p']:.2g}"
        console.print(Text(test, style="dim"))
    for note in found["notes"]:
        console.print(Text(note, style="dim"), soft_wrap=True)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


@bench_app.command()
def keep(
    folder: Annotated[Path, typer.Argument(help="Folder of a benchmark, as in runs/bench-1/quick.")] = RUNS / "quick",
    kept: Kept = KEPT,
) -> None:
    """Keep the finished runs of a benchmark, without logs and models. Then write the page with [b]page[/b].

    Example: freshet bench keep runs/bench-1/quick
    """
    from freshet.experiments.bench import keep_bench

    counts = keep_bench(folder, kept)
    if not counts:
        raise ConfigError("FOLDER", f"{folder} has no finished run of a benchmark; give --out of run and its budget")
    for place, count in counts.items():
        typer.echo(f"{count} runs kept in {kept / place}")


@bench_app.command()
def page(
    kept: Kept = KEPT,
    path: Annotated[Path, typer.Option("--page", help="The page to fill.")] = Path("docs/benchmark.md"),
) -> None:
    """Write worlds and kept results into the page, with its JSON and picture beside it; no run is made.

    The page shows the largest budget with runs of every world, else the one with most runs.
    """
    from freshet.experiments import bench, leaderboard

    chosen = list(bench.worlds().values())
    found: list[BenchRun] = []
    budget = "quick"
    for name in bench.BUDGETS:
        runs, _ = bench.read_kept(kept, chosen, name)
        if len({run.world for run in runs}) >= len({run.world for run in found}) and runs:
            found, budget = runs, name
    result = leaderboard.board(chosen, budget, found)
    picture = leaderboard.draw_ranks(result, path.parent / "images" / leaderboard.PICTURE)
    parts = {"worlds": leaderboard.worlds_text(chosen), "results": leaderboard.page_results(result, bool(picture))}
    leaderboard.fill_page(path, parts)
    leaderboard.write_json(result, path.with_suffix(".json"))
    for each in (path, path.with_suffix(".json"), *picture):
        typer.echo(str(each))


@bench_app.command("worlds")
def show_worlds(budget: BudgetOption = "quick") -> None:
    """List the worlds and what they need."""
    from freshet.experiments.bench import BUDGETS, VERSION, choose_worlds

    if budget not in BUDGETS:
        raise ConfigError("--budget", f"must be one of {', '.join(BUDGETS)}, but {budget!r} was given")
    table = Table(box=None, header_style="bold", pad_edge=False, title=f"{VERSION}, {budget}", title_justify="left")
    for heading in ("world", "data", "network", "devices", "in flight", "slowest / fastest", "seconds", "targets"):
        table.add_column(heading)
    for world in choose_worlds(None):
        tables = world.tables(budget)
        fleet, runs = tables["fleet"], tables["run"]
        numbers = [f"{fleet['devices']:,}", str(runs["in_flight"]), f"{fleet['ratio']:g}", f"{runs['until']:,g}"]
        targets = ", ".join(f"{100 * target:g} %" for target in world.targets(budget))
        table.add_row(world.name, tables["data"]["name"], tables["model"]["name"], *numbers, targets)
    Console().print(table)


@bench_app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="A submission: a folder of run directories with their logs.")],
    method: Annotated[
        str | None, typer.Option("--method", help="Import this method (mine.py:Mine) for its runs: it is code.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Which trips are drawn (default: at random).")] = None,
) -> None:
    """Audit each run of a submission and repeat it to the arrival of a random trip. Exit code 1 if one differs.

    Example: freshet bench check runs/bench-1/quick
    """
    import secrets

    from freshet.experiments.submission import check_run
    from freshet.report.reading import runs_to

    drawn = secrets.randbelow(2**31) if seed is None else seed
    runs = runs_to("check", folder)
    failed = 0
    for place, path in enumerate(runs):
        found = check_run(path, method, drawn + place)
        failed += found.problem is not None
        where = f" ({found.method} in {found.world}, {found.budget})" if found.world else ""
        typer.echo(f"{path.name}{where}: {'; '.join(found.done) if found.problem is None else found.problem}")
    typer.echo(f"{len(runs) - failed} of {len(runs)} runs pass; trips drawn with --seed {drawn}", err=True)
    if failed:
        raise typer.Exit(1)
