"""A warm device: tasks are taken in turn, a death is reported at once, changes are noticed, nobody is left behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import uvicorn

from freshet.flower import warm
from freshet.flower.running import free_ports
from freshet.flower.warm import LocalNode, NodeTask, WarmExecutor, other_threads, pause_seconds

SECRET = b"s" * 32


def test_pause_grows_with_the_wait() -> None:
    """A task is found within a quarter of the time since the last one, and an idle device asks seldom."""
    assert [pause_seconds(waited, 0.2, 3.0) for waited in (0.0, 0.8, 4.0, 100.0)] == [0.2, 0.2, 1.0, 3.0]


# ---- the executor, with nodes and trainers that are not there


class FakeNode:
    """A SuperNode with tasks that a test puts there."""

    def __init__(self, name: str) -> None:
        self.name, self.port, self.waiting = name, 1, list[Any]()
        self.task: Any = None

    def put(self, app: str = "app") -> "FakeTask":
        self.waiting.append(FakeTask(self, app))
        return self.waiting[-1]

    def take_task(self, number: int) -> Any:
        if self.waiting:
            self.task = self.waiting.pop(0)
            self.task.number = number
        return self.task

    def release(self) -> None:
        self.task = None


class FakeTask:
    def __init__(self, node: FakeNode, app: str) -> None:
        self.node, self.number, self.pid, self.beats_at = node, -1, 0, time.monotonic()
        self.given = SimpleNamespace(run=SimpleNamespace(fab_hash=app))
        self.client = SimpleNamespace(close=lambda: None)
        self.crashes, self.wanted = list[str](), True

    def heartbeat(self) -> bool:
        return self.wanted

    def report_crash(self, reason: str) -> None:
        self.crashes.append(reason)


class FakeTrainer:
    """Keeps what it is given. ``say`` reports as a trainer would."""

    started: ClassVar[list["FakeTrainer"]] = []

    def __init__(self, threads: int, app: str = "", prepares: bool = True) -> None:
        self.app, self.prepares, self.tasks, self.ready = app, prepares, dict[int, Any](), True
        self.connection, self._theirs = Pipe()
        self.ended = False
        FakeTrainer.started.append(self)

    def give(self, task: Any) -> None:
        self.tasks[task.number] = task

    def become_ready(self) -> None:
        self.ready = True

    def say(self, kind: str, task: Any, value: int | str) -> None:
        self._theirs.send_bytes(json.dumps([kind, task.number, value]).encode())

    def die(self) -> None:
        self._theirs.close()

    def end(self) -> int:
        self.ended = True
        self.connection.close()
        return -9


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[FakeTrainer]:
    monkeypatch.setattr(warm, "TrainerProcess", FakeTrainer)
    monkeypatch.setattr(warm, "PARENT_SECONDS", 0.0)
    monkeypatch.setattr(FakeTrainer, "started", [])
    return FakeTrainer.started


def executor_of(*nodes: FakeNode, trainers: int = 2) -> WarmExecutor:
    return WarmExecutor(nodes, trainers, 1)  # type: ignore[arg-type]


def test_no_more_trips_than_trainers_and_nodes_in_turn(trainers: list[FakeTrainer]) -> None:
    """Eight devices on two cores: two processes, and nobody waits for the same neighbour twice."""
    nodes = [FakeNode(str(number)) for number in range(8)]
    first = {node.name: node.put() for node in nodes}
    for node in nodes:
        node.put()
    executor, order = executor_of(*nodes), list[str]()
    for _ in range(16):
        executor.step()
        executor.step()
        assert len(trainers[0].tasks) <= 2
        task = next(iter(trainers[0].tasks.values()))
        order.append(task.node.name)
        trainers[0].say("ended", task, 0)
        executor.step()
    assert order[:8] == [node.name for node in nodes] and sorted(order[8:]) == sorted(first)
    assert len(trainers) == 1, "all share one trainer"


def test_no_task_is_taken_before_the_trainer_can_start_it(trainers: list[FakeTrainer]) -> None:
    """A task that nobody has taken does not expire. While the trainer loads data, heartbeats go on."""
    nodes = [FakeNode("a"), FakeNode("b")]
    tasks, executor = [node.put() for node in nodes], executor_of(*nodes)
    trainers[0].ready = False
    executor.step()
    assert not trainers[0].tasks
    trainers[0].say("ready", tasks[0], 0)
    executor.step()
    executor.step()
    assert list(trainers[0].tasks.values()) == tasks[:1]
    trainers[0].ready = False
    executor.step()
    assert len(trainers[0].tasks) == 1
    trainers[0].say("started", tasks[0], 4321)
    executor.step()
    executor.step()
    assert list(trainers[0].tasks.values()) == tasks and tasks[0].pid == 4321


def test_death_of_a_trip_is_reported_and_the_node_is_free_again(trainers: list[FakeTrainer]) -> None:
    node = FakeNode("a")
    task, executor = node.put(), executor_of(node)
    executor.step()
    trainers[0].say("ended", task, -9)
    executor.step()
    assert task.crashes == ["the process of the trip ended with code -9"] and node.task is None
    good = node.put()
    executor.step()
    trainers[0].say("ended", good, 0)
    executor.step()
    assert good.crashes == []


def test_death_of_the_trainer_is_reported_for_each_trip(trainers: list[FakeTrainer]) -> None:
    nodes = [FakeNode("a"), FakeNode("b")]
    tasks, executor = [node.put() for node in nodes], executor_of(*nodes)
    executor.step()
    executor.step()
    trainers[0].die()
    executor.step()
    assert all(len(task.crashes) == 1 for task in tasks) and len(trainers) == 2
    again = nodes[0].put()
    executor.step()
    assert list(trainers[1].tasks.values()) == [again]


def test_changed_file_replaces_the_trainer_and_loses_no_task(trainers: list[FakeTrainer]) -> None:
    nodes = [FakeNode("a"), FakeNode("b")]
    old, executor = nodes[0].put(), executor_of(*nodes)
    executor.step()
    new = nodes[1].put()
    executor.step()
    trainers[0].say("changed", new, "mydata.py")
    executor.step()
    assert list(trainers[1].tasks.values()) == [new] and trainers[1].prepares and trainers[1].app == "app"
    assert not trainers[0].ended, "a trip is still in it"
    trainers[0].say("ended", old, 0)
    executor.step()
    assert trainers[0].ended and not trainers[1].ended and not (old.crashes or new.crashes)


def test_trainer_that_was_replaced_may_end_at_the_same_moment(trainers: list[FakeTrainer]) -> None:
    nodes = [FakeNode("a"), FakeNode("b")]
    old, executor = nodes[0].put(), executor_of(*nodes)
    executor.step()
    new = nodes[1].put()
    executor.step()
    trainers[0].say("changed", new, "mydata.py")
    executor.step()
    trainers[0].say("ended", old, 0)
    executor.step()
    executor._read(trainers[0])  # type: ignore[arg-type]
    assert len(trainers) == 2 and executor._trainer is trainers[1], "its end concerns nobody"  # type: ignore[comparison-overlap]


def test_threads_of_the_users_code_are_never_forked(trainers: list[FakeTrainer]) -> None:
    """A fork copies one thread only, and the locks of the others stay locked for ever."""
    node = FakeNode("a")
    task, executor = node.put(), executor_of(node)
    executor.step()
    trainers[0].say("threads", task, "tqdm")
    executor.step()
    assert trainers[0].ended and list(trainers[1].tasks.values()) == [task] and not trainers[1].prepares


def test_another_app_gets_a_trainer_of_its_own(trainers: list[FakeTrainer]) -> None:
    node = FakeNode("a")
    first, executor = node.put("app 1"), executor_of(node)
    executor.step()
    trainers[0].say("ended", first, 0)
    node.put("app 2")
    executor.step()
    executor.step()
    assert [trainer.app for trainer in trainers] == ["app 1", "app 2"] and trainers[0].ended


def test_trip_that_nobody_wants_any_more_is_killed(
    trainers: list[FakeTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its SuperNode has ended, so it must not occupy a trainer."""
    monkeypatch.setattr(warm, "HEARTBEAT_SECONDS", 0.0)
    node = FakeNode("a")
    task, executor = node.put(), executor_of(node)
    executor.step()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    trainers[0].say("started", task, process.pid)
    executor.step()
    executor.step()
    assert process.poll() is None, "its heartbeats are accepted"
    task.wanted = False
    executor.step()
    assert process.wait(60) == -signal.SIGKILL


# ---- the executor and a SuperNode's interface


@pytest.fixture
def supernode() -> Iterator[tuple[int, Any]]:
    """The local interface of a SuperNode with a secret, and its state."""
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supernode.main import create_app
    from flwr.supernode.nodestate import NodeStateFactory

    factory = NodeStateFactory(objectstore_factory=ObjectStoreFactory())
    [port] = free_ports(1)
    app = create_app(state_factory=factory, superexec_auth_secret=SECRET)
    server = uvicorn.Server(uvicorn.Config(app, port=port, ws="none", log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield port, factory.state()
    server.should_exit = True
    thread.join()


def put_message(state: Any) -> None:
    """Store a message and its task, as a SuperNode does."""
    from flwr.app import ConfigRecord, Context, RecordDict
    from flwr.app.message.message import make_message
    from flwr.app.metadata import Metadata
    from flwr.supercore.constant import TaskType
    from flwr.supercore.fab import Fab
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
    from flwr.supercore.run import Run

    run = Run.create_empty(5)
    run.fab_hash = state.store_fab(Fab("", b"archive", {}))
    state.set_node_id(7)
    state.store_run(run)
    state.set_run_series_context(run.series_id, Context(5, 7, {"partition-id": 1}, RecordDict(), {}))
    content = RecordDict({"x": ConfigRecord({"a": 1})})
    metadata = Metadata(5, "", 1, 7, "", "", time.time(), 600.0, "train")
    message = make_message(metadata, content)
    metadata.__dict__["_message_id"] = message.object_id
    state.create_task(task_type=TaskType.CLIENT_APP, run_id=5, fab_hash=run.fab_hash)
    state.object_store.preregister(5, get_object_tree(message))
    for number, part in get_all_nested_objects(message).items():
        state.object_store.put(number, part.deflate())
    state.store_message(message)


def taken(node: LocalNode) -> NodeTask | None:
    end = time.monotonic() + 60
    while (task := node.take_task(0)) is None and time.monotonic() < end:
        time.sleep(0.02)
    return task


@pytest.mark.timeout(180)
def test_crash_is_reported_to_the_supernode_once(supernode: tuple[int, Any]) -> None:
    """Flower alone notices after 51 seconds."""
    port, state = supernode
    put_message(state)
    task = taken(LocalNode(port, SECRET))
    assert task is not None and task.given.context.node_config["partition-id"].sint64 == 1
    assert task.heartbeat(), "the SuperNode waits for the answer"
    task.report_crash("killed")
    [reply] = state.get_messages_legacy(is_reply=True)
    assert reply.has_error() and reply.error.code == 8
    assert reply.metadata.reply_to_message_id == task.found.messages_list[0].metadata.message_id
    assert not task.heartbeat(), "the task is over"
    task.report_crash("again")
    assert not state.get_messages_legacy(is_reply=True)


@pytest.mark.timeout(180)
def test_executor_without_the_secret_gets_no_task(
    supernode: tuple[int, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    port, state = supernode
    put_message(state)
    stranger = LocalNode(port, b"x" * 32)
    assert stranger.take_task(0) is None and "401" in capsys.readouterr().out
    assert taken(LocalNode(port, SECRET)) is not None


def test_supernode_that_is_not_there_gives_no_task() -> None:
    assert LocalNode(free_ports(1)[0], SECRET).take_task(0) is None


# ---- the trainer and its forks

#: A trainer whose trips do what the token says. It loads neither torch nor an app.
TRAINER = """
import os, sys, time
from multiprocessing.connection import Connection
from freshet.flower import warm

def answer(address, token, given, found, app):
    print(f"trip {os.getpid()} {address} {token}", flush=True)
    if token == "exit":
        sys.exit(3)
    if token == "fail":
        raise ValueError("mine")
    time.sleep(600 if token == "stay" else 0)

warm.answer_task, warm._begin_computing = answer, lambda threads: None
warm.ForkingTrainer(Connection(int(sys.argv[1])), 1, prepares=False).run(os.getppid())
"""


class RealTrainer:
    """The process of a trainer, and this end of its connection."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            words = [sys.executable, "-c", TRAINER, str(theirs.fileno())]
            self.process = subprocess.Popen(words, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True)

    def start(self, number: int, token: str) -> int:
        head = {"number": number, "port": 1234, "token": token, "taken_at": time.time()}
        for part in (json.dumps(head).encode(), b"", b""):
            self.connection.send_bytes(part)
        kind, same, pid = self.hear()
        if kind == "ready":
            kind, same, pid = self.hear()
        assert (kind, same) == ("started", number)
        return int(pid)

    def hear(self) -> list[Any]:
        assert self.connection.poll(120)
        found: list[Any] = json.loads(self.connection.recv_bytes())
        return found


@pytest.fixture
def trainer() -> Iterator[RealTrainer]:
    made = RealTrainer()
    yield made
    made.connection.close()
    made.process.kill()
    made.process.wait()


def ends(pid: int) -> bool:
    """Whether a process that is not a child of this one ends soon."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")


@linux
@pytest.mark.timeout(300)
def test_trainer_tells_how_each_trip_ended(trainer: RealTrainer) -> None:
    for number, (token, code) in enumerate((("done", 0), ("exit", 3), ("fail", 1))):
        trainer.start(number, token)
        assert trainer.hear() == ["ended", number, code]
    stays = trainer.start(7, "stay")
    trainer.start(8, "done")
    assert trainer.hear() == ["ended", 8, 0], "one trip does not wait for another"
    os.kill(stays, signal.SIGKILL)
    assert trainer.hear() == ["ended", 7, -signal.SIGKILL]


@linux
@pytest.mark.timeout(300)
def test_killed_trainer_leaves_no_trip_behind(trainer: RealTrainer) -> None:
    pid = trainer.start(0, "stay")
    trainer.process.kill()
    assert ends(pid)


@linux
@pytest.mark.timeout(300)
def test_trainer_and_trip_end_with_the_executor(trainer: RealTrainer) -> None:
    pid = trainer.start(0, "stay")
    trainer.connection.close()
    trainer.process.wait(60)
    assert ends(pid)


ORPHAN = """
import os, subprocess, sys, time
from freshet.flower import warm
os.environ[warm.PARENT] = str(os.getpid())
inner = [sys.executable, "-m", *sys.argv[1:]]
print(subprocess.Popen(inner, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid, flush=True)
time.sleep(600)
"""


@linux
@pytest.mark.timeout(300)
@pytest.mark.parametrize("module", ["node", "warm"])
def test_supernode_and_executor_end_with_their_supervisor(module: str, tmp_path: Path) -> None:
    """A supervisor that is killed cannot stop its children."""
    port = str(free_ports(1)[0])
    (tmp_path / "secret").write_bytes(SECRET)
    options = {
        "node": ["--insecure", "--superlink", "127.0.0.1:1", "--port", port],
        "warm": ["executor", "1", "1", f"{port}={tmp_path / 'secret'}"],
    }[module]
    words = [sys.executable, "-c", ORPHAN, f"freshet.flower.{module}", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        children = Path(f"/proc/{pid}/task/{pid}/children")
        found = list[int]()
        end = time.monotonic() + 120
        while module == "warm" and not found and time.monotonic() < end:  # its trainer has started
            found = [int(child) for child in children.read_text().split()]
            time.sleep(0.05)
        assert len(found) == (module == "warm")
        supervisor.kill()
    assert ends(pid) and all(map(ends, found))


@linux
def test_threads_are_seen() -> None:
    before, stop = len(other_threads()), threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert len(other_threads()) == before + 1
    stop.set()
    thread.join()


PREPARED = """
import sys
from types import SimpleNamespace
from freshet.flower import warm

calls = []
class App:
    def prepare(self, node):
        calls.append(node)
        open(sys.argv[1]).read()
        if len(calls) == 2:
            raise SystemExit("the user's code ends")

trainer = warm.ForkingTrainer(None, 1, prepares=True)
trainer._app = App()
from flwr.app import Context, RecordDict
from flwr.common.serde import context_to_proto
given = SimpleNamespace(context=context_to_proto(Context(1, 7, {"partition-id": 4}, RecordDict(), {})))
trainer._prepare(given)
trainer._prepare(given)
print(calls, trainer._files.first_change() == "")
open(sys.argv[1], "w").write("other")
print(trainer._files.first_change() == sys.argv[1])
given = SimpleNamespace(context=context_to_proto(Context(1, 7, {"partition-id": 5}, RecordDict(), {})))
trainer._prepare(given)
print(len(calls), trainer._loaded)
"""


@linux
@pytest.mark.timeout(120)
def test_trainer_notices_changed_data_and_survives_the_users_code(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("some")
    words = [sys.executable, "-c", PREPARED, str(tmp_path / "data")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.splitlines() == ["[{'partition-id': 4}] True", "True", "2 [{'partition-id': 4}]"], done.stderr


def test_task_is_packed_without_pickle() -> None:
    """A trainer reads JSON and Flower's own messages."""
    message = SimpleNamespace(SerializeToString=lambda: b"proto")
    task = NodeTask(3, SimpleNamespace(port=9), "t", None, message, message, 1.5)  # type: ignore[arg-type]
    head, *rest = task.parts()
    assert json.loads(head) == {"number": 3, "port": 9, "token": "t", "taken_at": 1.5} and rest == [b"proto"] * 2
