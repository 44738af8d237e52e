"""``freshet deploy``: the same methods on machines that own their data, over Flower."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from freshet.errors import ConfigError, RunError

if TYPE_CHECKING:
    from freshet.flower.folder import Folder

deploy_app = typer.Typer(help="Run a federation on real machines over Flower.", no_args_is_help=True)

Dir = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the deployment.")]
#: Devices of a deployment, if neither options nor files name a number.
FEW_DEVICES = 4
Method = Annotated[
    str | None,
    typer.Option(
        "--method", "-m", help="Method or variant, see [b]freshet methods[/b]. Default: the file's, else fedasmu."
    ),
]
Cell = Annotated[str | None, typer.Option("--cell", help="Use the settings of one of the paper's cells.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML or YAML file, such as a run's config.toml.")
]
Devices = Annotated[
    int | None,
    typer.Option("--devices", "-d", min=1, help="Number of devices. Default: the file's or the cell's, else 4."),
]
Settings = Annotated[list[str] | None, typer.Option("--set", "-s", help="Override: section.key=value. Repeatable.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the commands and start nothing.")]
Trainer = Annotated[
    str, typer.Option("--trainer", help="module:function of your own training loop (default: the built-in one).")
]
Node = Annotated[int, typer.Option("--node", "-n", min=0, help="Number of the device.")]


def _needs_flower() -> None:
    if find_spec("flwr") is None:
        from freshet.flower import NEEDS_FLOWER

        raise RunError(NEEDS_FLOWER)


def _folder(directory: Path) -> "Folder":
    _needs_flower()
    from freshet.flower.folder import Folder

    return Folder(directory.absolute()).check()


def _say(text: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(text, markup=False)


def _check_certificates(*paths: Path) -> None:
    """Raise if a certificate is not valid by this machine's clock. Tell 30 days ahead that it will end."""
    from freshet.flower.security import check_validity

    for path in paths:
        if path.is_file() and (notice := check_validity(path)):
            _say(notice)


def _tables(
    method: str | None,
    cell: str | None,
    config: Path | None,
    devices: int | None,
    settings: list[str] | None,
    made_by: str = "",
) -> dict[str, Any]:
    """The settings. By default a device that returns is triggered at once: real devices rarely return together."""
    from freshet.config import load_tables, override, with_method
    from freshet.methods import class_and_preset
    from freshet.paper.cells import cell_settings, find_cell

    tables: dict[str, Any] = load_tables(config) if config else _made_tables(made_by) if made_by else {}
    if method is not None:
        with_method(tables, method)
    name = tables.setdefault("method", {}).setdefault("name", "fedasmu")
    if cell is not None:
        preset = cell_settings(find_cell(cell), name)
        del preset["training"]["schedule_by"]  # nobody knows yet how long a round of real devices takes
        tables = {section: preset.get(section, {}) | tables.get(section, {}) for section in preset | tables}
    run = tables.setdefault("run", {})
    if class_and_preset(name)[0].about.kind != "sync":
        run.setdefault("trigger", "concurrency")
    run.setdefault("period", 2.0)
    run.setdefault("checkpoint_every", 30.0)
    fleet = tables.setdefault("fleet", {})
    fleet["devices"] = fleet.get("devices", FEW_DEVICES) if devices is None else devices
    override(tables, settings or [])
    return tables


#: Settings of a simulation that a deployment decides for itself.
OF_SIMULATIONS = (
    "trigger",
    "per_round",
    "in_flight",
    "until",
    "rounds",
    "eval_every",
    "executor",
    "workers",
    "address",
)


def _made_tables(made_by: str) -> dict[str, Any]:
    """The settings of the federation that a user's function makes, without those of its simulation."""
    import sys

    from freshet.federation import Federation
    from freshet.flower.device import import_name

    sys.path.insert(0, str(Path.cwd()))
    made = import_name("--federation", made_by, "module:function")()
    if not isinstance(made, Federation):
        raise ConfigError("--federation", f"{made_by} returns {type(made).__name__}; return a Federation")
    if made.config.fleet.custom:
        raise ConfigError("fleet", "describes simulated devices, but a deployment has real ones; leave it out")
    tables: dict[str, Any] = made.config.tables()
    tables["run"] = {key: value for key, value in tables["run"].items() if key not in OF_SIMULATIONS}
    return tables | {"fleet": {"devices": made.config.fleet.devices}}


@deploy_app.command("init")
def init(
    directory: Dir,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address of the server. Devices use the first one. Default: loopback."),
    ] = None,
    method: Method = None,
    devices: Devices = None,
    cell: Cell = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Make the folder of a deployment: certificates, keys, settings, services, and a README with the commands.

    Existing files are never overwritten.
    """
    _needs_flower()
    from freshet.flower.folder import init as make

    folder = make(directory, _tables(method, cell, config, devices, settings), host or [])
    typer.echo(f"{folder.root}: ready; see {folder.root / 'README.md'} for the commands of each machine")


@deploy_app.command("app")
def app(
    directory: Dir,
    method: Method = None,
    devices: Devices = None,
    cell: Cell = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Write a plain Flower app. Start it with `flwr run DIR` on your own SuperLink."""
    _needs_flower()
    from freshet.config import resolve
    from freshet.flower.folder import write_app

    write_app(directory, resolve(_tables(method, cell, config, devices, settings)).tables())
    typer.echo(
        f"{directory}: start it with: flwr run {directory}; your model and data go into freshet_app/client_app.py"
    )


@deploy_app.command("server")
def server(
    directory: Dir,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Resume with other software than before. The run says so ever after."),
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Start the server of a deployment and its run. A stopped run is resumed."""
    folder = _folder(directory)
    from freshet.config import load_tables, resolve
    from freshet.flower import commands
    from freshet.flower.running import run_server

    if not dry_run:
        from freshet.flower.server_app import check_not_ended

        check_not_ended(folder.out())
    devices = resolve(load_tables(folder.root / "federation.toml")).fleet.devices
    link, executor = commands.superlink(folder)
    new = [node for node in range(devices) if node not in folder.registered_nodes()]
    _check_certificates(folder.certificates / "ca.crt", folder.certificates / "server.crt")
    for command in [
        link,
        executor,
        *(commands.register(folder, node) for node in new),
        commands.run(folder, accept_changes),
    ]:
        typer.echo(str(command), err=not dry_run)
    if not dry_run:
        _finish(folder.out(), run_server(folder, _say, accept_changes))


@deploy_app.command("device")
def device(
    directory: Dir,
    node: Annotated[int | None, typer.Option("--node", "-n", min=0, help="Number of the device.")] = None,
    nodes: Annotated[
        str, typer.Option("--nodes", help="Numbers of several devices that train in turn on this machine: 1-8, or 1,3.")
    ] = "",
    data: Annotated[
        str,
        typer.Option("--data", help="module:function that returns its samples, or a .npz file with x and y."),
    ] = "",
    model: Annotated[
        str, typer.Option("--model", help="module:Class of its network, if the server uses a custom one.")
    ] = "",
    trainer: Trainer = "",
    check: Annotated[
        bool, typer.Option("--check", help="Check key, clock, data and model, and start nothing.")
    ] = False,
    stay: Annotated[bool, typer.Option("--stay", help="Wait for the next run when a run is over.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Start device K on this machine until the run is over. Its SuperNode is restarted whenever it ends.

    Its key, its clock, its data and its model are checked before it connects. Several devices share one loaded copy
    of torch, network and data set, and at most one of them per core trains at a time.
    """
    folder = _folder(directory)
    from freshet.flower import commands
    from freshet.flower.running import run_devices

    numbers = _numbers(node, nodes)
    for each in numbers:
        if not folder.key(each).is_file():
            raise RunError(
                f"{folder.key(each)} is missing; copy the key of device {each} here, see {folder.root}/README.md"
            )
    if len(numbers) > 1 and (folder.device().folder or folder.device().port):
        raise ConfigError("--nodes", "device.toml names the folder or port of one device; remove both to start several")
    absolute = str(Path(data).absolute()) if data.endswith(".npz") else data
    supernodes = [commands.supernode(folder, each, absolute, model, trainer) for each in numbers]
    executor = commands.shared_executor(folder, numbers)
    if dry_run:
        for command in (*supernodes, executor):
            typer.echo(str(command))
        return
    _check_certificates(folder.certificates / "ca.crt")
    commands.check_clock(folder)
    for each in numbers:
        for line in _check_sources(folder, each, absolute, model, trainer):
            typer.echo(line if len(numbers) == 1 else f"device {each}: {line}", err=not check)
    if check:
        return
    for command in (*supernodes, executor):
        typer.echo(str(command), err=True)
    commands.make_task_secrets(folder, numbers)
    run_devices(supernodes, executor, _say, () if stay else [commands.over_file(folder, each) for each in numbers])


def _numbers(node: int | None, nodes: str) -> list[int]:
    """The devices that ``--node`` or ``--nodes`` names."""
    if (node is None) == (not nodes):
        raise ConfigError("--node", "give the number of a device, or with --nodes those of several")
    if node is not None:
        return [node]
    found = list[int]()
    for part in nodes.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError("--nodes", f"must be numbers such as 1-8 or 1,3,5-7, not {nodes!r}")
        found += range(int(first), int(last if dash else first) + 1)
    return sorted(set(found))


def _check_sources(folder: "Folder", node: int, data: str, model: str, trainer: str) -> list[str]:
    """Load the device's data, model and training loop as its trips will."""
    import sys

    from freshet.flower.device import check_sources

    device, federation = folder.device(), folder.root / "federation.toml"
    sys.path[:0] = [str(Path.cwd()), str(folder.root)]  # where its trips look for modules
    known = federation if federation.is_file() else None
    own = {"partition-id": node, "trainer": trainer or device.trainer}
    return check_sources(data or device.data, model or device.model, own, known)


@deploy_app.command("status")
def status(
    directory: Dir,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Show whether the server runs, how far the run is, and the state of every device."""
    folder = _folder(directory)
    import json
    import time

    from freshet.flower import commands
    from freshet.flower.status import lines, read

    if dry_run:
        typer.echo(str(commands.list_nodes(folder)))
        return
    found = read(folder.status)
    if as_json:
        typer.echo(json.dumps((found or {"running": False, "devices": []}) | {"out": str(folder.out())}))
        return
    if found is None:
        typer.echo(f"server: has not run yet; start it with: freshet deploy server {folder.root}")
    for line in [] if found is None else lines(found, time.time()):
        typer.echo(line)
    typer.echo(f"{folder.out()}")


@deploy_app.command("stop")
def stop(directory: Dir, dry_run: DryRun = False) -> None:
    """Stop the server of a deployment on this machine. The run can be resumed."""
    folder = _folder(directory)
    from freshet.flower import commands

    pid = commands.deploy_process(folder)
    if pid is None:
        raise RunError(f"no server of {folder.root} runs on this machine")
    if dry_run:
        typer.echo(f"kill -TERM {pid}")
        return
    commands.stop_deploy_server(folder)
    typer.echo(f"stopped; resume with: freshet deploy server {folder.root}")


@deploy_app.command("revoke")
def revoke(directory: Dir, node: Node, dry_run: DryRun = False) -> None:
    """Lock out a device. Its key is refused at once, or from the next start of the server."""
    folder = _folder(directory)
    from freshet.flower import commands

    known, public = folder.registered_nodes(), Path(f"{folder.key(node)}.pub")
    if node not in known and not public.is_file():
        raise ConfigError("--node", f"device {node} has no key here; registered devices: {sorted(known)}")
    if dry_run:
        typer.echo(f"mv {public} {public.with_suffix('.revoked')}")
        if node in known:
            typer.echo(str(commands.unregister(folder, known[node])))
        return
    commands.revoke(folder, node)
    typer.echo(f"device {node} is locked out; its trip in flight is lost")


@deploy_app.command("local")
def local(
    devices: Devices = None,
    method: Method = None,
    cell: Cell = None,
    config: ConfigFile = None,
    until: Annotated[str | None, typer.Option("--until", help="Real time to run: 90, 90s, 10m.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Number of rounds.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Root of all random streams.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run directory (default: under runs/).")] = None,
    fresh: Annotated[str, typer.Option("--fresh", help="Fresh models: side, messages or none.")] = "side",
    keep: Annotated[Path | None, typer.Option("--keep", help="Keep keys, settings and logs in this folder.")] = None,
    trainer: Trainer = "",
    federation: Annotated[
        str,
        typer.Option("--federation", help="module:function that returns your Federation, with its model and data."),
    ] = "",
    settings: Settings = None,
    dry_run: DryRun = False,
) -> None:
    """Run a whole federation on this machine, with SuperLink, SuperNodes, TLS and authentication.

    Example: freshet deploy local --devices 4 --until 90s
    """
    _needs_flower()
    from freshet.config import resolve, seconds
    from freshet.flower.running import run_local

    tables = _tables(method, cell, config, devices, settings, federation)
    given: dict[str, Any] = {"seed": seed, "rounds": rounds, "until": None if until is None else seconds(until)}
    tables["run"] |= {key: value for key, value in given.items() if value is not None}
    if not (tables["run"].get("until") or tables["run"].get("rounds")):
        tables["run"]["until"] = 90.0
    tables["run"].setdefault("eval_every", 5.0)
    if trainer:
        tables["training"] = tables.get("training", {}) | {"trainer": "custom"}
    resolve(tables)
    directory, state = run_local(tables, out, keep, {"fresh": fresh}, dry_run, _say, trainer, federation)
    if directory is not None:
        _finish(directory, state)


def _finish(out: Path, status: str) -> None:
    """Print the table that a simulation ends with, and a trip's seconds by phase."""
    from freshet.cli.screen import summary_table, wide_console
    from freshet.runs.reader import SUMMARY, RunDirectory

    if not (out / SUMMARY).is_file():
        raise typer.Exit(130)
    summary = RunDirectory(out).summary()
    console = wide_console()
    console.print(summary_table(console, [summary]))
    for line in trip_cost_lines(summary):
        typer.echo(line)
    typer.echo(str(out))
    if status == "interrupted":
        raise typer.Exit(130)
    if status == "failed":
        raise RunError(f"the run failed; see {out} and the logs in state/logs of the deployment")


#: The phases of a trip. ``messages`` is ``down`` plus ``up``.
PHASES = {
    "down": "message to the device, until it is fetched",
    "start": "start of the device's process",
    "import": "imports, and the model from the SuperNode",
    "load": "data and model",
    "train": "training",
    "fresh": "waiting for the fresh model",
    "up": "message to the server, until it is fetched",
    "whole": "whole trip",
}


def trip_cost_lines(summary: dict[str, Any]) -> list[str]:
    """A trip's median seconds by phase, and the number of messages."""
    phases = summary.get("trip_seconds") or {}
    lines = [f"  {phases[name]:6.2f} s  {name:7s} {text}" for name, text in PHASES.items() if name in phases]
    if lines:
        counts = f"{summary['uploads']} uploads; {summary['messages']} messages for {summary['trips']} trips"
        lines.insert(0, f"seconds of a trip (medians of {counts}):")
    return lines
