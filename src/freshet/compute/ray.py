"""Training on Ray: one actor per worker, on this machine or on a cluster.

The queue, the repeated attempts and the order are those of ``pool.py``; here is only what is Ray's. Data are put into
Ray's object store once, and the actors of a node read them there without a copy.
"""

import importlib
import logging
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.compute.executor import Setup
from freshet.compute.host import Host
from freshet.compute.pool import Pool, StartFailed, WorkerDied
from freshet.compute.processes import available_cores
from freshet.compute.share import assemble, dismantle
from freshet.errors import ConfigError, RunError

#: Seconds without any worker after which a cluster is given up.
PATIENCE = 120.0
_POLL = 0.5
_LOCALHOST = "127.0.0.1"
_PREFIX, _SHORT = "freshet-ray-", 24
_QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}


@dataclass(frozen=True)
class PutSetup:
    """A setup whose large arrays lie in Ray's object store."""

    message: bytes
    blocks: Any


class RayHost(Host):
    """A worker's part, as an actor."""

    def __init__(self, path: list[str]) -> None:
        sys.path += [entry for entry in path if entry not in sys.path]  # for modules beside a user's script
        super().__init__()

    def ready(self) -> bool:
        """Answer as soon as the actor lives."""
        return True

    def install_from(self, number: int, drop: list[int], message: bytes, blocks: "list[NDArray[np.uint8]]") -> bytes:
        """Build a setup's trainer on the arrays of the object store."""
        return self.install(number, drop, lambda: assemble(message, [block.data for block in blocks]))


class RayWorker:
    """One actor."""

    def __init__(self, ray: Any, actor: Any, others: Callable[[], bool], patience: float) -> None:
        self._ray, self._others, self._patience = ray, others, patience
        self.actor = actor
        self._killed = False

    def wait_ready(self) -> None:
        """Wait for a free place in the cluster; for ever as long as other workers do the work, else with patience."""
        ready, alone_since = self.actor.ready.remote(), time.monotonic()
        while not self._ray.wait([ready], timeout=_POLL)[0]:
            if self._killed:
                raise WorkerDied("it was not needed any more")
            if self._others():
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > self._patience:
                raise StartFailed(f"Ray gave no place for one in {self._patience:.0f} s; is a CPU free in the cluster?")
        try:
            self._ray.get(ready)
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(str(error).strip()) from None

    def alive(self) -> bool:
        return not self._killed

    def install(self, number: int, setup: PutSetup, drop: list[int]) -> bytes:
        return bytes(self._get(self.actor.install_from.remote(number, drop, setup.message, setup.blocks)))

    def call(self, number: int, content: bytes) -> bytes:
        return bytes(self._get(self.actor.call.remote(number, content)))

    def _get(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # our own code never raises: something does not fit
            raise RunError(f"an actor cannot run Freshet; is the same version on every node?\n{error}") from None
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(str(error).strip().partition("\n")[0] or type(error).__name__) from None

    def kill(self) -> None:
        self._killed = True
        if self._ray.is_initialized():
            self._ray.kill(self.actor)

    def discard(self) -> None:
        self.kill()


class RayPool(Pool[PutSetup]):
    """Ray actors: on the cluster at ``address``, else on one that is started here and ends with the pool.

    A Ray that this process has already initialised is used as it is. ``workers`` = 0 means one per CPU of the cluster.
    """

    def __init__(self, workers: int = 0, address: str = "", *, patience: float = PATIENCE) -> None:
        self._ray, self._cluster = _connect(workers, address)
        self._patience = patience
        # with num_cpus=1 Ray itself sets OMP_NUM_THREADS=1 in the actor
        self._actor = self._ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(RayHost)
        super().__init__(workers or max(1, int(self._ray.cluster_resources().get("CPU", 1))))
        self._open()

    def _launch(self) -> RayWorker:
        try:
            actor = self._actor.remote(sys.path)
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(str(error)) from None
        return RayWorker(self._ray, actor, lambda: bool(self._ready), self._patience)

    def _publish(self, setup: Setup) -> PutSetup:
        parts = dismantle(setup)
        return PutSetup(parts.message, self._ray.put(parts.blocks))

    def _end(self) -> None:
        if self._cluster is not None:
            self._cluster.leave(self._ray)
            self._cluster = None


@dataclass(frozen=True)
class Cluster:
    """The connection that we made; with its working folder when the cluster is ours."""

    folder: Path | None

    def leave(self, ray: Any) -> None:
        """Disconnect, and end what was started here."""
        ray.shutdown()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def private_folder() -> Path:
    """A folder that only this user can enter, around Ray's own (sockets, logs, objects), which Ray opens to all.

    Folders of processes that were killed go. The place is short: the path of a socket has at most 107 bytes.
    """
    place = Path(tempfile.gettempdir())
    place = place if len(str(place)) <= _SHORT else Path("/tmp")  # noqa: S108  # mkdtemp makes a name of our own
    for old in place.glob(f"{_PREFIX}*"):
        pid = old.name.removeprefix(_PREFIX).partition("-")[0]
        with suppress(OSError):
            facts = old.lstat()
            if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and pid.isdecimal() and not _lives(pid):
                shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place))


def _lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _import() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray starts
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        problem = f"Ray is not installed ({error}); install it with: pip install 'freshet-fl[ray]'"
        raise ConfigError("run.executor", problem) from None


def _connect(workers: int, address: str) -> tuple[Any, Cluster | None]:
    """Ray itself, joined to a cluster; and the cluster when it was started here."""
    ray = _import()
    if ray.is_initialized():
        return ray, None
    address = address or os.environ.get("RAY_ADDRESS", "")
    if not address:
        with _loopback():
            return ray, _start(ray, workers or available_cores())
    try:
        _knock(address)
        ray.init(address=address, **_QUIET)
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError("run.address", f"no Ray cluster answers at {address} ({first})") from None
    return ray, Cluster(None)


def _knock(address: str) -> None:
    """Raise at once when nobody listens at ``host:port``; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "://" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _start(ray: Any, cores: int) -> Cluster:
    """A cluster of this machine alone, that nobody else can reach."""
    folder = private_folder()
    options = {"include_dashboard": False, "_node_ip_address": _LOCALHOST, "_temp_dir": str(folder / "ray")} | _QUIET
    try:
        ray.init("local", num_cpus=cores, **options)
    except Exception as error:  # Ray raises bare ones, too
        shutil.rmtree(folder, ignore_errors=True)
        raise RunError(f"Ray could not be started on this machine ({str(error).strip()})") from None
    cluster = Cluster(folder)
    if ray.nodes()[0]["NodeManagerAddress"] != _LOCALHOST:
        cluster.leave(ray)
        raise RunError("Ray would listen on all network interfaces; start a cluster yourself and give its address")
    return cluster


@contextmanager
def _loopback() -> Iterator[None]:
    """Let Ray stay on the loopback interface; otherwise, on Linux, it replaces 127.0.0.1 by the machine's address."""
    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    constants: Any = importlib.import_module("ray._private.ray_constants")  # has read the variable when it was imported
    before, enabled = os.environ.get(name), constants.ENABLE_RAY_CLUSTER
    os.environ[name], constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
