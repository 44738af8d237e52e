"""The Flower server app of a federation: assembles core, log, driver and fresh-model service.

app = server_app(Path(__file__).with_name("federation.toml"))      # in a Flower server app
"""

import json
import logging
import math
import os
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from freshet.assembly import Assembly, Overrides
from freshet.config import Config, check_deployable, load_tables, resolve, with_added_settings
from freshet.core.saving import Tree
from freshet.core.vectors import load_kernels
from freshet.errors import ConfigError, FreshetError, RunError
from freshet.files import write_atomically
from freshet.flower.driver import LiveDriver, NetworkSettings, check_state
from freshet.flower.fresh import FreshService
from freshet.flower.security import Tokens
from freshet.flower.transport import FlowerTransport
from freshet.runs import checkpoint
from freshet.runs.lifecycle import OpenRun, RunOutcome, drive
from freshet.runs.reader import RunDirectory, is_run
from freshet.runs.software import accept_software
from freshet.runs.world import RunWorld, write_world
from freshet.runs.writer import Observer, RunWriter, default_directory

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerSettings:
    """The run config of the Flower app (``[tool.flwr.app.config]``, with - for _). Paths are on the server."""

    #: Run directory (empty: a new one under runs/). An unfinished run is resumed.
    out: str = ""
    #: How devices get the fresh model: side (from the service), messages (a second message per trip) or none.
    fresh: str = "side"
    #: The address on which the service listens, and the address that devices use.
    fresh_bind: str = "127.0.0.1:18002"
    fresh_address: str = "127.0.0.1:18002"
    #: Files of the service: its key and certificate, the authority that signed it, the key of the tokens.
    key: str = ""
    certificate: str = ""
    authority: str = ""
    token_key: str = ""
    #: File that says which node is which device (empty: numbered in order of appearance).
    nodes: str = ""
    #: File for the server's process id (empty: none).
    pid: str = ""
    ttl: float = 600.0
    poll: float = 0.2
    patience: float = 120.0
    #: Devices that must be online before the first trip of a run.
    wait_for: int = 1
    #: File for the status of server and devices (empty: none).
    status: str = ""
    #: Seconds at the end of a run to tell the devices that it is over (0: they are not told).
    farewell: float = 0.0
    #: Whether a run that was computed with other software is resumed.
    accept_changes: bool = False

    @staticmethod
    def read(given: Mapping[str, Any]) -> "ServerSettings":
        """Check and read a run config. Unknown keys are ignored: they belong to other apps."""
        hints, found = get_type_hints(ServerSettings), {}
        for name, kind in hints.items():
            value = given.get(name.replace("_", "-"))
            if value is None:
                continue
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if not isinstance(value, kind):
                raise ConfigError(name, f"must be {kind.__name__}, but {value!r} was given")
            found[name] = value
        settings = ServerSettings(**found)
        if settings.fresh not in ("side", "messages", "none"):
            raise ConfigError("fresh", f"must be side, messages or none, but {settings.fresh!r} was given")
        if settings.fresh == "side" and not (settings.key and settings.certificate and settings.authority):
            raise ConfigError("fresh", 'needs key, certificate and authority; give them, or set fresh = "messages"')
        return settings


def server_app(federation: str | Path, overrides: Overrides | None = None) -> Any:
    """The Flower server app of a federation. ``overrides`` replaces what its configuration names."""
    from flwr.serverapp import ServerApp

    app: Any = ServerApp()
    app.main()(lambda grid, context: _main(Path(federation), overrides or Overrides(), grid, context))
    return app


def _main(federation: Path, overrides: Overrides, grid: Any, context: Any) -> None:
    settings = ServerSettings.read(context.run_config)
    if settings.pid:
        write_atomically(Path(settings.pid), f"{os.getpid()}\n".encode())
    try:
        serve(resolve(load_tables(federation)), settings, FlowerTransport(grid), overrides)
    except Exception as error:
        if settings.pid:  # tell the supervisor why the app ended
            text = str(error) if isinstance(error, FreshetError) else traceback.format_exc()
            write_atomically(Path(settings.pid).with_suffix(".error"), text.encode())
        raise


def serve(
    config: Config,
    settings: ServerSettings,
    transport: FlowerTransport,
    overrides: Overrides,
    observers: Sequence[Observer] = (),
) -> RunOutcome:
    """Run a federation to its end, or resume one that was stopped or killed."""
    check_deployable(config)
    assembly = Assembly(config, overrides, deployed=True).check().begin()
    config = assembly.config
    directory = Path(settings.out) if settings.out else default_directory(config.method_name, config.run.seed)
    tree = _read_checkpoint(directory, config, assembly, settings.accept_changes) if is_run(directory) else None

    def open_log() -> RunWriter:
        if tree is not None:
            return RunWriter(directory, observers, tree["log"])
        return RunWriter.create(directory, config.tables(), observers, assembly.dataset.reduction_notice())

    with _open(assembly, settings, transport, open_log) as run:
        live = run.driver
        assert isinstance(live, LiveDriver)
        try:
            return drive(assembly.plan, nullcontext(run), tree)
        finally:  # only now is it known who the devices are and how fast
            write_world(directory, measured_world(assembly, live.seconds))


@contextmanager
def _open(
    assembly: Assembly, settings: ServerSettings, transport: FlowerTransport, open_log: Callable[[], RunWriter]
) -> Iterator[OpenRun]:
    """Server, driver and log. The fresh-model service listens while they are in use."""
    config, coordinator = assembly.config, assembly.coordinator
    trainer = assembly.setup().trainer()
    load_kernels(_log.info)
    tokens = Tokens.load(Path(settings.token_key) if settings.token_key else None)
    side = settings.fresh == "side"
    authority = Path(settings.authority).read_text(encoding="ascii") if side else ""
    if coordinator.server.rule.push_after and not side:
        raise ConfigError("method.push_after", 'devices fetch pushed models from the service; set fresh = "side"')
    if not 1 <= settings.wait_for <= config.fleet.devices:
        raise ConfigError("wait_for", f"must be 1 to {config.fleet.devices}, the number of devices")
    network = NetworkSettings(
        settings.fresh,
        settings.fresh_address,
        authority,
        settings.ttl,
        settings.poll,
        settings.patience,
        settings.wait_for,
        status=settings.status,
        farewell=settings.farewell,
    )
    live = LiveDriver(
        coordinator,
        transport,
        open_log(),
        trainer.evaluate,
        tokens,
        network,
        nodes=read_nodes(Path(settings.nodes), config.fleet.devices) if settings.nodes else {},
        eval_every=config.run.eval_every,
        stop_diverged=config.run.diverged == "stop",
    )
    service = None
    if side:
        key, certificate = (Path(path).read_bytes() for path in (settings.key, settings.certificate))
        service = FreshService(live, settings.fresh_bind, key, certificate)
    try:
        yield OpenRun(live, coordinator.server, live.writer)
    finally:
        transport.close()
        if service is not None:
            service.close()


def _read_checkpoint(directory: Path, config: Config, assembly: Assembly, accept_changes: bool) -> Tree:
    """Read the checkpoint of a run to resume."""
    run = RunDirectory(directory)
    check_not_ended(directory)
    if resolve(with_added_settings(run.config())).identity() != config.identity():
        raise RunError(f"{directory} was made with another configuration; choose another run directory")
    found = checkpoint.read(directory)
    try:
        check_state(found.tree)
    except ValueError as error:
        raise RunError(f"{directory} has a checkpoint of another kind ({error})") from None
    remedy = "deploy server --accept-changes, or accept-changes in the app's run config"
    accept_software(found.tree, assembly.plan.software, accept_changes, directory, remedy)
    found.remove_damaged()
    for problem in found.problems:
        _log.warning(problem)
    return found.tree


def check_not_ended(directory: Path) -> None:
    """Raise if the run in this directory has ended: a server resumes runs, but does not repeat them."""
    run = RunDirectory(directory) if is_run(directory) else None
    status = run.summary().get("status") if run is not None and run.has_summary() else ""
    if status in ("finished", "diverged"):
        remedy = "for another one, move that folder away, or name a new one as out in server.toml"
        raise RunError(f"the run in {directory} has ended ({status}); {remedy}")


def read_nodes(path: Path, devices: int) -> dict[int, int]:
    """Read ``{node: device}`` from nodes.json."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        nodes = {int(node): int(device) for node, device in found.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise RunError(f"{path} is not a valid list of nodes ({error})") from None
    if not all(0 <= device < devices for device in nodes.values()):
        raise RunError(f"{path} names a device outside 0..{devices - 1}")
    return nodes


def measured_world(assembly: Assembly, seconds: Mapping[int, Mapping[str, Sequence[float]]]) -> RunWorld:
    """world.json: the medians of each device's trips, in the terms of a simulated fleet (0 for a device without trips).

    A device starts to train after ``down + start + import + load``. A fresh model takes the downlink latency. The rest
    of a trip is its upload, ``model_bytes / up_rate``.
    """
    assumed, devices = assembly.run_world, assembly.config.fleet.devices

    def of(device: int, *phases: str) -> float:
        return sum(_median(seconds.get(device, {}).get(phase, [])) for phase in phases)

    latency = _median([s for by in seconds.values() for s in by.get("fresh", [])])
    before = [of(device, "down", "start", "import", "load") for device in range(devices)]
    up = [of(device, "up") for device in range(devices)]
    samples = [int(count) for count in assembly.context.samples]
    if samples != assumed.samples:  # devices brought their own samples and keep their labels secret
        assumed = replace(assumed, classes=["samples"], label_counts=[[count] for count in samples])
    return replace(
        assumed,
        train_seconds=[of(device, "train") for device in range(devices)],
        start_seconds=[max(0.0, each - latency) for each in before],
        up_rate=[assumed.model_bytes / each if each > 0 else math.inf for each in up],
        down_rate=[math.inf] * devices,
        up_latency=0.0,
        down_latency=latency,
        on_seconds=0.0,
        off_seconds=0.0,
        loss=0.0,
        samples=samples,
    )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
