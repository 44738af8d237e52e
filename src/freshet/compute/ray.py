"""Training on Ray: one actor per worker, on this machine or on a cluster.

``pool.py`` has the queue, the retries and the order of calls. Ray's object store holds the data once, and the actors of
a node read them there without a copy.
"""

import importlib
import logging
import math
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

from freshet.compute.host import Host
from freshet.compute.pool import Pool, StartFailed, WorkerDied
from freshet.compute.processes import available_cores
from freshet.compute.share import pack_setup, unpack_setup
from freshet.errors import ConfigError, RunError
from freshet.training.trainer import Setup

#: Seconds without any ready worker after which the pool gives up.
STARTUP_TIMEOUT_SECONDS = 120.0
_POLL_SECONDS = 0.5
_LOCALHOST = "127.0.0.1"
#: Prefix of Ray's folders, and the greatest length of the temporary folder's path.
_PREFIX, _MAX_TEMP_LENGTH = "freshet-ray-", 24
_QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}


@dataclass(frozen=True)
class StoredSetup:
    """A setup with its large arrays in Ray's object store."""

    message: bytes
    blocks: Any


class RayHost(Host):
    """A worker as a Ray actor."""

    def __init__(self, path: list[str]) -> None:
        sys.path += [entry for entry in path if entry not in sys.path]  # finds modules beside a user's script
        super().__init__()

    def ready(self) -> bool:
        """Answer as soon as the actor runs."""
        return True

    def install_from(self, number: int, drop: list[int], message: bytes, blocks: "list[NDArray[np.uint8]]") -> bytes:
        """Build a setup's trainer from arrays in the object store."""
        return self.install(number, drop, lambda: unpack_setup(message, [block.data for block in blocks]))


class RayWorker:
    """One actor."""

    def __init__(self, ray: Any, actor: Any, others_ready: Callable[[], bool], timeout: float) -> None:
        self._ray, self._others_ready, self._timeout = ray, others_ready, timeout
        self.actor = actor
        self._killed = False

    def wait_ready(self) -> None:
        """Wait for a free CPU in the cluster: without limit while other workers are ready, else until the timeout."""
        ready, alone_since = self.actor.ready.remote(), time.monotonic()
        while not self._ray.wait([ready], timeout=_POLL_SECONDS)[0]:
            if self._killed:
                raise WorkerDied("it was no longer needed")
            if self._others_ready():
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > self._timeout:
                raise StartFailed(f"Ray had no free CPU or GPU for {self._timeout:.0f} s; free one or add a node")
        try:
            self._ray.get(ready)
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(str(error).strip()) from None

    def alive(self) -> bool:
        return not self._killed

    def install(self, number: int, setup: StoredSetup, drop: list[int]) -> bytes:
        return bytes(self._get(self.actor.install_from.remote(number, drop, setup.message, setup.blocks)))

    def call(self, number: int, content: bytes) -> bytes:
        return bytes(self._get(self.actor.call.remote(number, content)))

    def _get(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:  # ``Host`` never raises: the node's Freshet differs
            raise RunError(f"an actor cannot run Freshet; install the same version on every node\n{error}") from None
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(str(error).strip().partition("\n")[0] or type(error).__name__) from None

    def kill(self) -> None:
        self._killed = True
        if self._ray.is_initialized():
            self._ray.kill(self.actor)

    def discard(self) -> None:
        self.kill()


class RayPool(Pool[StoredSetup]):
    """Ray actors on the cluster at ``address``, or on a local one that starts and ends with the pool.

    If this process has initialised Ray, that cluster is used. ``workers`` = 0 means one per CPU of the cluster. If the
    cluster has GPUs and ``device`` allows them, the actors share them.
    """

    def __init__(
        self, workers: int = 0, address: str = "", device: str = "auto", *, timeout: float = STARTUP_TIMEOUT_SECONDS
    ) -> None:
        self._ray, self._cluster = _connect(workers, address)
        self._timeout = timeout
        resources = self._ray.cluster_resources()
        workers = workers or max(1, int(resources.get("CPU", 1)))
        gpus = gpus_per_worker(workers, int(resources.get("GPU", 0)) if device in ("auto", "cuda") else 0)
        # with num_cpus=1 Ray sets OMP_NUM_THREADS=1 in the actor, with num_gpus CUDA_VISIBLE_DEVICES
        needs = {"num_cpus": 1} | ({"num_gpus": gpus} if gpus else {})
        self._actor = self._ray.remote(**needs, max_restarts=0, scheduling_strategy="SPREAD")(RayHost)
        super().__init__(workers)
        self._open()

    def _launch(self, index: int) -> RayWorker:
        try:
            actor = self._actor.remote(sys.path)
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(str(error)) from None
        return RayWorker(self._ray, actor, lambda: bool(self.ready), self._timeout)

    def _publish(self, setup: Setup) -> StoredSetup:
        packed = pack_setup(setup)
        return StoredSetup(packed.message, self._ray.put(packed.blocks))

    def _end(self) -> None:
        if self._cluster is not None:
            self._cluster.disconnect(self._ray)
            self._cluster = None


def gpus_per_worker(workers: int, gpus: int) -> float:
    """The part of a GPU that each worker asks for, so that ``ceil(workers / gpus)`` of them share one."""
    return 1.0 / math.ceil(workers / gpus) if gpus else 0.0


@dataclass(frozen=True)
class Cluster:
    """A connection made here, with the working folder if the cluster was started here too."""

    folder: Path | None

    def disconnect(self, ray: Any) -> None:
        """Disconnect, and remove the folder of a cluster that was started here."""
        ray.shutdown()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def make_private_folder() -> Path:
    """Make a folder that only this user can enter, for Ray's sockets, logs and objects, which Ray opens to all users.

    Folders left by killed processes are removed. The path is short, since a socket's path has at most 107 bytes.
    """
    parent = Path(tempfile.gettempdir())
    parent = parent if len(str(parent)) <= _MAX_TEMP_LENGTH else Path("/tmp")  # noqa: S108  # mkdtemp makes the name unique
    for old in parent.glob(f"{_PREFIX}*"):
        pid = old.name.removeprefix(_PREFIX).partition("-")[0]
        with suppress(OSError):
            status = old.lstat()
            if (
                stat.S_ISDIR(status.st_mode)
                and status.st_uid == os.geteuid()
                and pid.isdecimal()
                and not _is_running(pid)
            ):
                shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent))


def _is_running(pid: str) -> bool:
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
    """Return Ray, connected to a cluster, and the connection if it was made here."""
    ray = _import()
    if ray.is_initialized():
        return ray, None
    address = address or os.environ.get("RAY_ADDRESS", "")
    if not address:
        with _loopback():
            return ray, _start(ray, workers or available_cores())
    try:
        _check_reachable(address)
        ray.init(address=address, **_QUIET)
    except (OSError, ValueError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError("run.address", f"no Ray cluster answers at {address} ({first})") from None
    return ray, Cluster(None)


def _check_reachable(address: str) -> None:
    """Raise at once when nothing listens at ``host:port``. Ray would retry for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "://" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _start(ray: Any, cores: int) -> Cluster:
    """Start a cluster on this machine only, on the loopback interface."""
    folder = make_private_folder()
    options = {"include_dashboard": False, "_node_ip_address": _LOCALHOST, "_temp_dir": str(folder / "ray")} | _QUIET
    try:
        ray.init("local", num_cpus=cores, **options)
    except Exception as error:  # Ray raises plain exceptions too
        shutil.rmtree(folder, ignore_errors=True)
        raise RunError(f"Ray could not start on this machine ({str(error).strip()})") from None
    cluster = Cluster(folder)
    if ray.nodes()[0]["NodeManagerAddress"] != _LOCALHOST:
        cluster.disconnect(ray)
        raise RunError("Ray would listen on all network interfaces; start a cluster yourself and give its address")
    return cluster


@contextmanager
def _loopback() -> Iterator[None]:
    """Keep Ray on the loopback interface. Otherwise, on Linux, it replaces 127.0.0.1 by the machine's address."""
    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    constants: Any = importlib.import_module("ray._private.ray_constants")  # read the variable on import
    before, enabled = os.environ.get(name), constants.ENABLE_RAY_CLUSTER
    os.environ[name], constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
