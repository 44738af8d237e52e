"""Faults of real processes: whatever dies, stalls, comes late or leaves is logged, and the run continues."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from freshet.core.messages import Slot
from freshet.flower import commands
from freshet.flower.fresh import FreshClient, NoFreshAnswer
from freshet.flower.running import LocalRun, free_ports
from freshet.runs.reader import RunDirectory
from freshet.runs.world import read_world
from tests.flower.local_federation import (
    StallableProxy,
    checkpoints,
    events,
    find_processes,
    install_stalling_app,
    parent_of,
    passes_audit,
    start_on_demand,
    tables,
    wait_until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
#: Seconds after which a trip is lost: longer than a normal trip on a slow machine.
TTL = 160.0


@pytest.fixture
def network() -> Iterator[tuple[StallableProxy, list[int]]]:
    ports = free_ports(2)
    made = StallableProxy(*ports)
    yield made, ports
    made.close()


def uploads(local: LocalRun, device: int, after: int = 0) -> list[dict]:
    return [e for e in events(local, "upload", device=device) if e["trip"] > after]


def test_federation_survives_faults_of_its_devices(tmp_path: Path, start: Callable[..., LocalRun]) -> None:
    """Device 0 is killed before it requests the fresh model, 1 after. 2 exceeds the time of a trip. 3 comes late and
    leaves for good. 4 is undisturbed."""
    holds, doors = tmp_path / "holds", tmp_path / "doors"
    doors.mkdir()
    for node in (0, 1):
        (doors / str(node)).touch()
    install_stalling_app(tmp_path / "deploy", holds, "before_0", "after_1", "after_2")
    server = {"ttl": TTL, "patience": 20.0}
    local = start(tables("fedasmu", 5, 0, until=1e5), server=server, devices=start_on_demand(doors))

    def kill(node: int) -> None:
        (doors / str(node)).unlink()  # keeps it from returning before the server notices
        local.devices[node].signal(signal.SIGKILL)

    # kill early: the server must notice before the trip expires
    wait_until(local, lambda: list(holds.glob("stalls_0_*")), "device 0 training")
    kill(0)
    wait_until(local, lambda: events(local, "request", device=1), "device 1 asking")
    kill(1)
    assert not events(local, "request", device=0)

    for node in (2, 4):
        (doors / str(node)).touch()
    wait_until(local, lambda: uploads(local, 4), "the first upload")
    assert not events(local, "trigger", device=3)
    (doors / "3").touch()
    wait_until(local, lambda: uploads(local, 3), "an upload of the device that came late")

    for node in (0, 1):
        lost = wait_until(
            local, lambda node=node: events(local, "lost", device=node), f"the loss of the trip of {node}"
        )[0]
        assert lost["trip"] == 1 and "gone" in lost["reason"] and "expired" not in lost["reason"]
        (holds / ("before_0", "after_1")[node]).unlink()
        (doors / str(node)).touch()
    for node in (0, 1):
        wait_until(local, lambda node=node: uploads(local, node, after=1), f"an upload of device {node}, which is back")

    late = wait_until(local, lambda: events(local, "lost", device=2), "the loss of the slow trip")[0]
    assert "expired" in late["reason"]
    (holds / "after_2").unlink()
    wait_until(local, lambda: uploads(local, 2, after=late["trip"]), "the next upload of the slow device")
    assert not [e for e in uploads(local, 2) if e["trip"] == late["trip"]]

    (holds / "before_3").touch()
    [trip] = wait_until(local, lambda: list(holds.glob("stalls_3_*")), "a trip of device 3 that will not end")
    (doors / "3").unlink()
    local.devices[3].signal(signal.SIGTERM)
    count = len(uploads(local, 4))
    wait_until(local, lambda: len(uploads(local, 4)) >= count + 3, "further uploads without device 3")
    last = int(trip.name.rpartition("_")[2])
    assert events(local, "trigger", device=3)[-1]["trip"] <= last + 1  # at most once more, before the server notices
    local.stop()
    summary = RunDirectory(local.server.out).summary()
    assert passes_audit(local.server.out) and summary["lost"] >= 3 and summary["messages"] >= summary["uploads"]


def test_killed_trip_is_lost_at_once_and_the_device_trains_on(tmp_path: Path, start: Callable[..., LocalRun]) -> None:
    """The process of a trip is killed, then the trainer of all devices with the trips in it."""
    holds = tmp_path / "holds"
    install_stalling_app(tmp_path / "deploy", holds, "before_0_1", "before_0_2")
    local = start(tables("fedasmu", 2, 0, until=1e5))

    def processes(trip: int) -> tuple[int, int]:
        """The trainer, and the process of device 0's trip, which is the trainer's only one that stalls."""
        stalls = holds / f"stalls_0_{trip}"
        wait_until(local, stalls.exists, f"trip {trip} of device 0")
        found = find_processes("freshet.flower.warm", str(local.folder.root))
        parents = {pid: parent_of(pid) for pid in found}
        [trainer] = {parent for pid, parent in parents.items() if parent in found and parents[parent] in found}
        return trainer, int(stalls.read_text())

    _, trip = processes(1)
    os.kill(trip, signal.SIGKILL)
    killed = time.monotonic()
    [lost] = wait_until(local, lambda: events(local, "lost", device=0), "the loss of the trip")
    assert lost["trip"] == 1 and "crashed" in lost["reason"] and time.monotonic() - killed < 40  # 51 by Flower
    trainer, _ = processes(2)
    os.kill(trainer, signal.SIGKILL)
    wait_until(local, lambda: len(events(local, "lost", device=0)) == 2, "the loss of the next trip")
    wait_until(local, lambda: uploads(local, 0, after=2), "an upload by another trainer")
    local.stop()
    assert passes_audit(local.server.out) and not find_processes("freshet.flower.warm", str(local.folder.root))


def test_federation_survives_a_killed_superlink_and_a_stalled_network(
    start: Callable[..., LocalRun], network: tuple[StallableProxy, list[int]]
) -> None:
    net, (port, fresh_port) = network
    server = {"host": net.HOST, "port": port, "fresh_port": fresh_port, "ttl": TTL, "patience": 20.0}
    local = start(tables("fedasmu", 2, 0, until=1e5), server=server)

    def both_upload(more: int, when: str) -> None:
        before = {node: len(uploads(local, node)) for node in (0, 1)}
        for node, count in before.items():
            there = lambda node=node, count=count: len(uploads(local, node)) >= count + more  # noqa: E731
            wait_until(local, there, f"an upload of device {node} {when}")

    both_upload(1, "at all")
    link = local.server.children[0]
    link.signal(signal.SIGKILL)
    wait_until(local, lambda: local.server.children[0] is not link, "a new SuperLink")
    both_upload(1, "by the new SuperLink")
    net.stall(20.0, lambda: local.poll())
    both_upload(2, "after the stall")
    local.stop()
    assert passes_audit(local.server.out)


def test_killed_server_resumes_from_its_checkpoint(start: Callable[..., LocalRun]) -> None:
    """Versions continue. A stranger's request for the fresh model is refused."""
    local = start(tables("fedasmu", 2, 0, until=1e5))
    wait_until(local, lambda: len(events(local, "aggregate")) >= 2, "the first aggregations")
    trip = events(local, "trigger")[-1]
    server, authority = local.folder.server(), (local.folder.certificates / "ca.crt").read_text()
    with pytest.raises(NoFreshAnswer):
        client = FreshClient(f"{server.host}:{server.fresh_port}", authority, trip["device"], trip["trip"], "0" * 64)
        client.ask(Slot(2, "q"), 0, 1)
    assert wait_until(local, lambda: events(local, "refused"), "the refusal")
    saved = checkpoints(local.server.out)
    wait_until(local, lambda: checkpoints(local.server.out) > saved + 1, "a checkpoint")
    version, pid = events(local, "aggregate")[-1]["version"], commands.server_process(local.folder)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(local, lambda: commands.server_process(local.folder) not in (None, pid), "a new server app")
    wait_until(local, lambda: [e for e in events(local, "aggregate") if e["version"] > version + 1], "newer versions")
    local.stop()
    summary, world = RunDirectory(local.server.out).summary(), read_world(local.server.out)
    assert summary["status"] == "interrupted" and passes_audit(local.server.out)
    assert summary["versions"] > version and summary["requests"] >= 1 and summary["trip_seconds"]["train"] > 0
    assert world is not None and len(world) == 2 and max(world.train_seconds) > 0 and max(world.start_seconds) > 0
