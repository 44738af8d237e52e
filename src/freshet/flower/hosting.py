"""A federation served from Python: the server app runs in this process, so its objects need not be stored.

The SuperLink is a separate process as usual. It hands its one task to this process. Devices see no difference.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import tomli_w

from freshet.assembly import Overrides
from freshet.config import Config
from freshet.errors import ConfigError, RunError
from freshet.flower import commands
from freshet.flower.commands import Child
from freshet.flower.folder import Folder, init, run_config
from freshet.flower.server_app import ServerSettings, serve
from freshet.flower.transport import FlowerTransport
from freshet.runs.lifecycle import RunOutcome
from freshet.runs.lock import RunLock
from freshet.runs.writer import Observer

#: Seconds within which the SuperLink must hand over the run, and seconds between two checks that it runs.
HANDOVER_TIMEOUT_SECONDS, POLL_SECONDS = commands.FLOWER_TIMEOUT_SECONDS, 1.0


def host(
    config: Config,
    overrides: Overrides,
    root: Path,
    hosts: Sequence[str],
    server: Mapping[str, Any],
    accept_changes: bool = False,
    observers: Sequence[Observer] = (),
) -> RunOutcome:
    """Serve a federation until its run has ended. A stopped run is resumed."""
    if config.fleet.custom:
        raise ConfigError("fleet", "describes simulated devices, but a deployment has real ones; leave it out")
    folder = init(root, config.tables(), hosts, server)
    with RunLock(folder.state):  # a second server would end the run of the first
        # this configuration replaces the one of an earlier call
        (folder.root / "federation.toml").write_text(tomli_w.dumps(config.tables()), encoding="utf-8")
        with _superlink(folder), _task(folder) as grid:
            settings = ServerSettings.read(run_config(folder, accept_changes))
            return serve(config, settings, FlowerTransport(grid), overrides, observers)


@contextmanager
def _superlink(folder: Folder) -> Iterator[None]:
    """A SuperLink with one run to hand out, restarted whenever it ends."""
    children, ended = commands.start_server(folder, executor=False), threading.Event()

    def supervise() -> None:
        while not ended.wait(POLL_SECONDS):
            if children[0].exit_code is not None:
                children[0] = Child(children[0].command)

    supervisor = threading.Thread(target=supervise, daemon=True)
    try:
        commands.call(commands.run(folder))
        supervisor.start()
        yield
    finally:
        ended.set()
        if supervisor.is_alive():
            supervisor.join()
        commands.stop(children)


@contextmanager
def _task(folder: Folder) -> Iterator[Any]:
    """The grid of the run that waits at the SuperLink. Sends heartbeats meanwhile, and the status at the end."""
    from flwr.common.constant import SubStatus
    from flwr.common.serde import run_from_proto
    from flwr.proto.runtime_pb2 import PullTaskInputRequest, PushTaskOutputRequest
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.grid import HttpGrid

    authority, address = (folder.certificates / "ca.crt").read_bytes(), f"127.0.0.1:{folder.server().port}"
    token = acquire_task(folder.executor_secret.read_bytes(), authority, address)
    grid = HttpGrid(address, False, authority, token=token)
    client = grid._runtime_client
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    status, details = SubStatus.FAILED, "ended early"
    try:
        given = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
        TaskIdentity.node_id = given.context.node_id
        grid.set_run(run_from_proto(given.run))
        yield grid
        status, details = SubStatus.COMPLETED, ""
    finally:
        if heartbeat.is_running:  # an unknown answer ends it early
            heartbeat.stop()
        grid._retry_invoker.max_tries = 1
        with contextlib.suppress(httpx.HTTPError):  # the SuperLink may have ended already
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=details))
        grid.close()


def acquire_task(secret: bytes, authority: bytes, address: str) -> str:
    """Acquire the server app's task as Flower's executor does. Returns its token."""
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
    interceptors: list[Any] = [
        RuntimeVersionHttpInterceptor(component_name="SuperExec"),
        SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods),
    ]
    client = RuntimeHttpClient.from_server_address(address, False, authority, interceptors)
    end = time.monotonic() + HANDOVER_TIMEOUT_SECONDS
    try:
        while time.monotonic() < end:
            found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
            if found.token:
                return str(found.token)
            time.sleep(0.2)
    finally:
        client.close()
    raise RunError(
        f"the SuperLink did not hand over the run within {HANDOVER_TIMEOUT_SECONDS:g} s; see its log in state/logs"
    )
