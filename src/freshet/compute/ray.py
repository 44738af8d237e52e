"""Training on Ray: one actor per worker, on this machine or on a cluster.

The queue, the repeated attempts and the order are those of ``pool.py``; here is only what is Ray's. Data are put into
Ray's object store once, and the actors of a node read them there without a copy.
"""

import importlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freshet.compute.base import Setup
from freshet.compute.host import Host
from freshet.compute.pool import Pool, PoolExecutor, StartFailed, WorkerDied
from freshet.compute.processes import available_cores
from freshet.compute.share import assemble, dismantle
from freshet.errors import ConfigError, RunError

#: Seconds without any worker after which a cluster is given up.
PATIENCE = 120.0
_POLL = 0.5


@dataclass(frozen=True)
class PutSetup:
    """A setup whose large arrays lie in Ray's object store."""

    message: bytes
    blocks: Any


class RayHost(Host):
    """A worker's part, as an actor."""

    def ready(self) -> bool:
        """Answer as soon as the actor lives."""
        return True

    def install_from(
        self, number: int, drop: list[int], message: bytes, blocks: "list[NDArray[np.uint8]]"
    ) -> bytes:
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
        self._ray = _import()
        self._patience = patience
        self._owns = _connect(self._ray, workers, address)
        # with num_cpus=1 Ray itself sets OMP_NUM_THREADS=1 in the actor
        self._actor = self._ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(RayHost)
        super().__init__(workers or max(1, int(self._ray.cluster_resources().get("CPU", 1))))
        self._open()

    def _launch(self) -> RayWorker:
        try:
            actor = self._actor.remote()
        except self._ray.exceptions.RayError as error:
            raise WorkerDied(str(error)) from None
        return RayWorker(self._ray, actor, lambda: bool(self._ready), self._patience)

    def _publish(self, setup: Setup) -> PutSetup:
        parts = dismantle(setup)
        return PutSetup(parts.message, self._ray.put(parts.blocks))

    def _end(self) -> None:
        if self._owns:
            self._owns = False
            self._ray.shutdown()


class RayExecutor(PoolExecutor):
    """A federation on Ray."""


def _import() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray starts
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        problem = f"Ray is not installed ({error}); install it with: pip install 'freshet[ray]'"
        raise ConfigError("run.executor", problem) from None


def _connect(ray: Any, workers: int, address: str) -> bool:
    """Join a cluster or start one on the loopback interface; True when it is ours to shut down."""
    if ray.is_initialized():
        return False
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    address = address or os.environ.get("RAY_ADDRESS", "")
    try:
        if address:
            ray.init(address=address, **quiet)
        else:
            cores = workers or available_cores()
            ray.init("local", num_cpus=cores, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError("run.address", f"no Ray cluster answers at {address or 'this machine'} ({first})") from None
    return True
