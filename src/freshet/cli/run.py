"""``freshet run``, ``resume``, ``pretrain`` and ``demo``."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from freshet.cli.util import Executor, make_writable, quick_imports, unused_name
from freshet.errors import ConfigError, RunError
from freshet.runs.reader import RunDirectory

if TYPE_CHECKING:
    from freshet.result import Result
    from freshet.runs.writer import Observer

#: Methods of the demo: the paper's two, our variant with fresh models that keep all progress, and the reference.
DEMO_METHODS = ("fedasmu", "fedasmu-fresh", "fedssmu", "fedavg")


def run(
    method: Annotated[
        str | None,
        typer.Option("--method", "-m", help="Method or variant (see [b]freshet methods[/b]), or module:Class."),
    ] = None,
    cell: Annotated[
        str | None,
        typer.Option("--cell", help="Use the settings of one of the paper's twelve cells (see [b]freshet cells[/b])."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="TOML or YAML file, such as a run's config.toml.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", help="Virtual time to simulate: 600, 600s, 10m, 2h.")] = None,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", help="End after this many rounds (asynchronous: of run.per_round uploads)."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Root of all random streams.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run directory to write (default: under runs/).")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", "-s", help="Override one setting: section.key=value. Repeatable.")
    ] = None,
    executor: Annotated[Executor | None, typer.Option("--executor", help="Where training runs (same bits).")] = None,
    workers: Annotated[int | None, typer.Option("--workers", "-w", help="Worker processes (0: one per core).")] = None,
    address: Annotated[str | None, typer.Option("--address", help="Ray cluster to use, host:port.")] = None,
    track: Annotated[
        list[str] | None,
        typer.Option("--track", help="Also report to tensorboard:DIR, mlflow:URI or wandb:PROJECT. Repeatable."),
    ] = None,
    fleet_from: Annotated[
        Path | None,
        typer.Option(
            "--fleet-from", help="Run directory of a deployment: use its devices and, by default, its settings."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the run directory.")] = False,
) -> None:
    """Run one method in virtual time and write a run directory.

    By default it trains on the built-in handwritten digits: 40 devices, Dirichlet 0.3, speed ratio 5.

    Example: freshet run -m fedasmu --until 10m --seed 1 -s fleet.ratio=20 -s training.lr=0.1
    """
    with quick_imports():
        from freshet.config import load_tables, override, resolve, seconds, with_method
        from freshet.display import LiveProgress
        from freshet.experiments.grid import with_length
        from freshet.federation import Federation
        from freshet.paper.cells import cell_settings, find_cell
        from freshet.trackers import tracker

    if method is None and config is None and fleet_from is None:
        raise ConfigError("--method", "give a method (see `freshet methods`) or a --config file")
    tables: dict[str, Any] = load_tables(config) if config else {}
    if fleet_from is not None:
        tables = _with_measured_fleet(fleet_from, tables, method)
    if method is not None:
        with_method(tables, method)
    if cell is not None:
        preset = cell_settings(find_cell(cell), tables.get("method", {}).get("name", "fedasmu"))
        tables = {name: preset.get(name, {}) | tables.get(name, {}) for name in preset | tables}
    given: dict[str, Any] = {"seed": seed, "executor": executor, "workers": workers, "address": address}
    given |= {"until": None if until is None else seconds(until), "rounds": rounds}
    tables["run"] = tables.get("run", {}) | {key: value for key, value in given.items() if value is not None}
    override(tables, settings or [])
    resolved = resolve(tables if cell is None else with_length(tables, find_cell(cell).rounds))
    watching: list[Observer] = [tracker(spec, resolved.tables(), out.name if out else None) for spec in track or []]
    federation = Federation.from_config(resolved)
    console = Console(stderr=True)
    if quiet:
        result = federation.run(out=out, observers=watching, progress=False)
    else:
        with LiveProgress(console) as progress:
            progress.begin(resolved.method_name, resolved.run.until, resolved.run.rounds)
            result = federation.run(out=out, observers=[progress, *watching], progress=False)
    _finish(result, quiet)


def _with_measured_fleet(directory: Path, tables: dict[str, Any], method: str | None) -> dict[str, Any]:
    """Add the fleet of a deployment to the settings. Without settings, use those of the deployment."""
    own = RunDirectory(directory).trusted_config(method)
    found = tables or own
    fleet = found.get("fleet", {}) | {"devices": own["fleet"]["devices"], "measured": str(directory)}
    return found | {"fleet": fleet}


def resume(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    until: Annotated[str | None, typer.Option("--until", help="New end, also for a finished run: 20m.")] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="New number of rounds, for a run that ends by rounds.")
    ] = None,
    executor: Annotated[Executor | None, typer.Option("--executor", help="Where training runs (same bits).")] = None,
    workers: Annotated[int | None, typer.Option("--workers", "-w", help="Worker processes (0: one per core).")] = None,
    address: Annotated[str | None, typer.Option("--address", help="Ray cluster to use, host:port.")] = None,
    method: Annotated[
        str | None, typer.Option("--method", "-m", help="Your own method (module:Class), if the run uses one.")
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Resume with other software than before. The run says so ever after."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the run directory.")] = False,
) -> None:
    """Resume an interrupted, killed or stopped run from its last checkpoint. The result is the same, bit for bit.

    With --until, a finished run continues too, as if that had been its end from the start.

    Example: freshet resume runs/mine --until 20m
    """
    with quick_imports():
        from freshet.config import resolve, seconds, with_added_settings
        from freshet.display import LiveProgress
        from freshet.federation import Federation

    run = RunDirectory(directory)
    if run.is_deployed():
        raise RunError(f"{directory} is the run of a deployment; resume it with: {run.resume_command()}")
    tables = run.trusted_config(method)
    given = {"executor": executor, "workers": workers, "address": address}
    if executor is not None and address is None:
        given["address"] = ""  # another executor does not use the cluster
    tables["run"] = tables.get("run", {}) | {key: value for key, value in given.items() if value is not None}
    config = resolve(with_added_settings(tables))
    federation = Federation.from_config(config)
    end = None if until is None else seconds(until)
    if quiet:
        result = federation.resume(directory, until=end, rounds=rounds, accept_changes=accept_changes, progress=False)
    else:
        with LiveProgress(Console(stderr=True)) as progress:
            progress.begin(config.method_name, end or config.run.until, rounds or config.run.rounds)
            result = federation.resume(
                directory,
                until=end,
                rounds=rounds,
                observers=[progress],
                accept_changes=accept_changes,
                progress=False,
            )
    _finish(result, quiet)


def pretrain(
    directories: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Earlier FedASMU or FedSSMU runs.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("meta.safetensors"),
    rate: Annotated[float, typer.Option("--rate", min=0.0, help="Learning rate (the paper's eta_RL).")] = 1e-3,
    passes: Annotated[int, typer.Option("--passes", min=1, help="Passes over the logs.")] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Initialisation of the meta model.")] = 0,
    selector: Annotated[
        Literal["printed", "shaped"], typer.Option("--selector", help="For runs with this method.selector.")
    ] = "printed",
) -> None:
    """Pre-train the slot selector's meta model on the logs of earlier runs: merges and unanswered requests.

    The printed update follows plain rewards, which are small; a rate of 0.05 suits it better than the paper's 0.001.

    Use it with: freshet run -m fedasmu -s method.meta_from=meta.safetensors
    """
    from freshet.config import resolve
    from freshet.methods.asmu import meta
    from freshet.methods.asmu.rule import ASMUOptions

    tables = [RunDirectory(directory).config() for directory in directories]
    configs = [resolve({"training": each.get("training", {})}) for each in tables]  # the other settings are not needed
    epochs = {config.training.epochs for config in configs}
    if len(epochs) > 1:
        raise RunError(f"these runs train {sorted(epochs)} epochs per trip; choose runs with the same training.epochs")
    model = meta.SELECTORS[selector](epochs.pop(), rate, ASMUOptions().rho, seed)
    before = model.distribution()
    events = (event for directory in directories for event in RunDirectory(directory).events())
    count = meta.pretrain(model, events, passes)
    if count == 0:
        raise RunError("these runs hold no requests to learn from")
    model.save(out)
    for name, probabilities in (("before", before), ("after", model.distribution())):
        shares = ", ".join(f"{slot}: {share:.3f}" for slot, share in enumerate(probabilities, 1))
        typer.echo(f"slot probabilities {name:>6}  {shares}")
    typer.echo(f"{out}: {passes} x {count} requests; first trips will ask at slot {model.best_slot()}")


def _finish(result: "Result", quiet: bool) -> None:
    from freshet.cli.screen import summary_table, wide_console

    if not quiet:
        console = wide_console()
        console.print(summary_table(console, [result.summary]))
    typer.echo(str(result.directory))
    if result.summary["status"] == "interrupted":
        typer.echo(f"interrupted; all progress is saved. Resume with: freshet resume {result.directory}", err=True)
        raise typer.Exit(130)
    if result.summary["status"] == "stopped":
        typer.echo(f"stopped: {result.summary['stopped']}. Resume with: freshet resume {result.directory}", err=True)


#: How to read the table of the demo.
DEMO_NOTES = (
    "fedasmu, fedssmu: the paper's methods; fedasmu-fresh: our variant; fedavg: the reference",
    "accuracy: at the last test; best: highest; to 0.8: virtual seconds until a test reached 0.8; "
    "stale: mean staleness; up, down: bytes",
)


def own_command() -> str:
    """The command as the user can type it: ``freshet``, or its path if it is not on the PATH."""
    found, own = shutil.which("freshet"), Path(sys.argv[0])
    is_found = found is not None and Path(found).resolve() == own.resolve()
    return "freshet" if is_found or own.name != "freshet" else str(own)


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the run directories and the picture.")] = Path(
        "runs/demo"
    ),
    until: Annotated[str, typer.Option("--until", help="Virtual time to simulate for each method.")] = "600s",
    seed: Annotated[int, typer.Option("--seed", help="Root of all random streams.")] = 0,
) -> None:
    """Compare four methods on the built-in handwritten digits: a table and a picture in about a minute."""
    from contextlib import closing

    from freshet.cli.screen import summary_table, wide_console
    from freshet.compute.processes import WorkerPool
    from freshet.config import resolve, seconds
    from freshet.display import LiveProgress
    from freshet.federation import Federation
    from freshet.report.figures import accuracy_figure
    from freshet.runs.audit import audit

    out = make_writable(unused_name(out))
    results: list[Result] = []
    pool = WorkerPool()
    typer.echo(f"{len(DEMO_METHODS)} methods on handwritten digits, {until} of virtual time each: about 30 s", err=True)
    with LiveProgress(Console(stderr=True)) as progress, closing(pool):
        for method in DEMO_METHODS:
            config = resolve({"method": {"name": method}, "run": {"seed": seed, "until": seconds(until)}})
            progress.begin(method, config.run.until)
            federation, own = Federation.from_config(config), [progress]
            results.append(federation.run(out=out / method, observers=own, pool=pool, progress=False))
            if results[-1].summary["status"] == "interrupted":
                break
    screen = wide_console()
    screen.print(summary_table(screen, [result.summary for result in results]))
    for note in DEMO_NOTES:
        screen.print(note, style="dim", soft_wrap=True, highlight=False)
    picture = accuracy_figure([RunDirectory(result.directory) for result in results], out / "accuracy.png")
    for result in results:
        found = audit(RunDirectory(result.directory))
        verdict = f"audit passed, {found.aggregations} weights" if found.passed else f"AUDIT FAILED: {found.problem}"
        screen.print(f"{result.directory}  [dim]{verdict}[/dim]", soft_wrap=True, highlight=False)
    screen.print(f"{picture}  [dim]accuracy over virtual time[/dim]", soft_wrap=True, highlight=False)
    if any(result.summary["status"] == "interrupted" for result in results):
        raise typer.Exit(130)
    screen.print(
        f"see the full report in a browser: {own_command()} report {out} --open", soft_wrap=True, highlight=False
    )


def warmup() -> None:
    """Compile all loops now and keep them on disk, for example when a container image is built.

    Without it, each run compiles the loops that it needs and does not find.
    """
    import time

    with quick_imports():
        from freshet.compute.host import compile_kernels

    start = time.monotonic()
    count = compile_kernels()
    typer.echo(f"{count} loops are ready ({time.monotonic() - start:.0f} s)")
