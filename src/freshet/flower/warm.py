"""Warm devices: an executor in the place of Flower's, whose trainer forks a process per message.

    python -m freshet.flower.warm executor TRAINERS THREADS PORT=SECRET_FILE ...

Flower starts a new process for each message, which imports torch and loads the data. In Flower's mode
``--isolation process`` a SuperNode leaves that to others. Here three kinds of processes do it:

- The **executor** takes tasks from the SuperNodes of this machine, sends their heartbeats, and reports a death at once.
  It runs no code of the user.
- The **trainer** has torch, the app and the devices' data loaded, and only forks. It is replaced when a file that it
  has read has changed, when another app arrives, and when it dies. It uses one thread, because a fork copies only one.
- The **process of a trip** is a fork of the trainer. It fetches the model from the SuperNode, trains and answers, with
  Flower's own code. At most ``TRAINERS`` run at once, with ``THREADS`` threads of torch each.

Executor and trainer talk over a socket pair, in JSON and Flower's protobuf messages. A process ends with its parent.
"""

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from freshet import flower
from freshet.files import WatchedFiles

#: Whether libraries may be loaded before a fork. On macOS they do not survive it, and each trip loads them itself.
PRELOADS = sys.platform.startswith("linux")
#: One thread in numerical libraries: a fork copies no others.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
#: Threads of libraries that survive a fork (pyarrow's allocator starts one).
HARMLESS_THREADS = {"jemalloc_bg_thd"}
#: Seconds between a task's heartbeats, and between two checks that the parent lives.
HEARTBEAT_SECONDS, PARENT_SECONDS = 5.0, 1.0
#: Seconds between two questions for a task: a quarter of the time since the last one, within these bounds.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 0.5
#: Seconds that a SuperNode may take to answer, and to store the message of a task that it has announced.
CALL_SECONDS, MESSAGE_SECONDS = 10.0, 10.0
#: Seconds before the next question to a SuperNode that has refused one.
REFUSED_SECONDS = 5.0
#: What every trip imports, some of it late. The last two hold compiled kernels.
MODULES = (
    "flwr.supernode.runtime.run_clientapp",
    "freshet.flower.device",
    "freshet.flower.fresh",
    "freshet.core.kernels",
    "freshet.training.fast.layer_kernels",
)
#: Of Linux' prctl.
PR_SET_PDEATHSIG = 1
#: This module, for commands.
MODULE = "freshet.flower.warm"
#: The environment variable with the process id of the supervisor with which a process ends.
PARENT = "FRESHET_PARENT"


def pause_seconds(waited: float, shortest: float, longest: float) -> float:
    """How long to wait before the next question, after ``waited`` seconds without a task."""
    return min(max(waited / 4, shortest), longest)


def exit_with_parent(parent: int) -> None:
    """End this process within a second of its parent, even while it trains."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def die_with_parent() -> None:
    """Let Linux kill this process with its parent. This needs no thread, and works while a user's code runs."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# ---- the executor


class LocalNode:
    """A SuperNode of this machine, as its executor sees it."""

    def __init__(self, port: int, secret: bytes) -> None:
        from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

        self.port = port
        methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
        self._door = self._client(SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods))
        self.task: NodeTask | None = None
        self._free_since = self._asks_at = time.monotonic()

    def _client(self, interceptor: Any) -> Any:
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient

        both = [RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), interceptor]
        return RuntimeHttpClient(f"http://127.0.0.1:{self.port}", interceptors=both, timeout=CALL_SECONDS)

    def take_task(self, number: int) -> "NodeTask | None":
        """Take the task that waits, if it is time to ask and one waits."""
        import httpx

        now = time.monotonic()
        if now < self._asks_at:
            return None
        self._asks_at = now + pause_seconds(now - self._free_since, SHORTEST_PAUSE, LONGEST_PAUSE)
        try:
            self.task = self._ask(number)
        except httpx.ConnectError:  # the SuperNode starts, or has ended and will be restarted
            return None
        except Exception as error:  # a refusal, or a broken connection
            print(f"the SuperNode on port {self.port} gives no task ({error})", flush=True)
            self._asks_at = now + REFUSED_SECONDS
        return self.task

    def _ask(self, number: int) -> "NodeTask | None":
        from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullAppMessagesRequest, PullTaskInputRequest
        from flwr.supercore.constant import TaskType
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor

        got = self._door.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        if not (got.HasField("task") and got.token):
            return None
        taken_at, client = time.time(), self._client(RuntimeTokenHttpInterceptor(got.token))
        given, end = client.PullTaskInput(PullTaskInputRequest()), time.monotonic() + MESSAGE_SECONDS
        while not (found := client.PullMessages(PullAppMessagesRequest())).messages_list:
            if time.monotonic() > end:  # Flower announces a task shortly before it stores the message
                raise RuntimeError("a task came without a message")
            time.sleep(SHORTEST_PAUSE)
        return NodeTask(number, self, str(got.token), client, given, found, taken_at)

    def release(self) -> None:
        """Note that the task has ended."""
        self.task, self._free_since = None, time.monotonic()
        self._asks_at = self._free_since


@dataclass(eq=False)
class NodeTask:
    """A task in flight: its token, its input without the model, and the process that works on it."""

    number: int
    node: LocalNode
    token: str
    client: Any
    given: Any
    found: Any
    taken_at: float
    pid: int = 0
    beats_at: float = field(default_factory=time.monotonic)

    def parts(self) -> list[bytes]:
        """The task as a trainer reads it."""
        head = {"number": self.number, "port": self.node.port, "token": self.token, "taken_at": self.taken_at}
        return [json.dumps(head).encode(), self.given.SerializeToString(), self.found.SerializeToString()]

    def heartbeat(self) -> bool:
        """Tell the SuperNode that the task is worked on. Returns whether it still wants the answer."""
        import httpx
        from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

        try:
            return bool(self.client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success)
        except (httpx.ConnectError, httpx.HTTPStatusError):  # the SuperNode has ended, or was restarted
            return False
        except httpx.HTTPError:  # it is slow
            return True

    def report_crash(self, reason: str) -> None:
        """Answer the message with an error, so that the server need not wait for a timeout."""
        from flwr.app import Message
        from flwr.app.error import Error
        from flwr.common.constant import ErrorCode, SubStatus
        from flwr.common.serde import context_from_proto, message_from_proto
        from flwr.supercore.task_identity import TaskIdentity
        from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

        TaskIdentity.task_id, TaskIdentity.run_id = self.given.task_id, self.given.run.run_id
        TaskIdentity.node_id = self.given.context.node_id
        try:
            message = message_from_proto(self.found.messages_list[0])
            message.metadata.__dict__["_message_id"] = self.found.message_object_trees[0].object_id
            reply = Message(Error(code=ErrorCode.CLIENT_APP_CRASHED, reason=reason), reply_to=message)
            push_message(self.client, reply, context_from_proto(self.given.context))
            push_task_output(self.client, None, SubStatus.FAILED, reason)
        except Exception as error:  # it has answered before it died, or the SuperNode is gone
            print(f"the SuperNode takes no report of it ({type(error).__name__})", flush=True)


class TrainerProcess:
    """A trainer and the tasks given to it. ``app`` is the hash of its app, once one is chosen.

    It reads a task when it has loaded its libraries and started the task before. Until then it is not ``ready``, and
    the executor must not wait for it, because heartbeats are due.
    """

    def __init__(self, threads: int, app: str = "", prepares: bool = True) -> None:
        self.app, self.tasks, self.ready = app, dict[int, NodeTask](), False
        self._queue: list[NodeTask] = []
        self.connection, theirs = Pipe()
        words = [sys.executable, "-m", MODULE, "trainer", str(theirs.fileno()), str(threads), str(int(prepares))]
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603  (this interpreter, this module)
                words, pass_fds=[theirs.fileno()], env=os.environ | ONE_THREAD | {PARENT: str(os.getpid())}
            )

    def give(self, task: NodeTask) -> None:
        """Send a task as soon as the trainer is ready."""
        self.tasks[task.number] = task
        self._queue.append(task)
        self._send()

    def become_ready(self) -> None:
        self.ready = True
        self._send()

    def _send(self) -> None:
        if self.ready and self._queue:
            self.ready = False
            with contextlib.suppress(OSError):  # it has died; the end of the connection says so
                for part in self._queue.pop(0).parts():
                    self.connection.send_bytes(part)

    def end(self) -> int:
        """Kill the process. Returns how it ended."""
        self.connection.close()
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()


class WarmExecutor:
    """Takes tasks from SuperNodes while a trainer is free, and follows each until it has ended."""

    def __init__(self, nodes: Sequence[LocalNode], trainers: int, threads: int) -> None:
        self._nodes, self._most, self._threads = list(nodes), trainers, threads
        self._count = 0
        self._trainer = TrainerProcess(threads)  # loads its libraries while the SuperNodes connect
        self._old: list[TrainerProcess] = []

    def step(self) -> None:
        """Ask for tasks, send heartbeats, and read what the trainers report for a moment."""
        self._take_tasks()
        for trainer in self._all():
            for task in list(trainer.tasks.values()):
                if time.monotonic() >= task.beats_at + HEARTBEAT_SECONDS:
                    task.beats_at = time.monotonic()
                    if not task.heartbeat() and task.pid:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(task.pid, signal.SIGKILL)
        watched = {trainer.connection.fileno(): trainer for trainer in self._all()}
        ready, _, _ = select.select(list(watched), [], [], SHORTEST_PAUSE)
        for descriptor in ready:
            self._read(watched[descriptor])

    def _all(self) -> list[TrainerProcess]:
        return [self._trainer, *self._old]

    def _take_tasks(self) -> None:
        """Take a task if the trainer can start one. The node that was served last is asked last."""
        if not self._trainer.ready or sum(len(trainer.tasks) for trainer in self._all()) >= self._most:
            return
        for node in list(self._nodes):
            if node.task is None and (task := node.take_task(self._count)) is not None:
                self._count += 1
                self._nodes.remove(node)
                self._nodes.append(node)
                self._give(task)
                return

    def _give(self, task: NodeTask) -> None:
        app = str(task.given.run.fab_hash)
        if self._trainer.app not in ("", app):
            self._replace(app)
        self._trainer.app = app
        self._trainer.give(task)

    def _replace(self, app: str, prepares: bool = True) -> None:
        """Start another trainer. The old one ends when its last task has ended."""
        self._old.append(self._trainer)
        self._trainer = TrainerProcess(self._threads, app, prepares)
        self._end_idle()

    def _end_idle(self) -> None:
        for trainer in [each for each in self._old if not each.tasks]:
            self._old.remove(trainer)
            trainer.end()

    def _read(self, trainer: TrainerProcess) -> None:
        try:
            kind, number, value = json.loads(trainer.connection.recv_bytes())
        except (EOFError, OSError):
            self._on_death(trainer)
            return
        if kind == "ready":
            trainer.become_ready()
            return
        task = trainer.tasks[number]
        if kind == "started":
            task.pid = value
            trainer.become_ready()
        elif kind == "ended":
            self._on_end(trainer, task, value)
        else:  # "changed": a file; "threads": what the data's loader has left running
            what = f"{value} has changed" if kind == "changed" else f"the app leaves threads running ({value})"
            print(f"{what}; {'loading again' if kind == 'changed' else 'every trip loads its data'}", flush=True)
            del trainer.tasks[number]
            if trainer is self._trainer:
                self._replace(trainer.app, prepares=kind == "changed")
            self._trainer.give(task)
            self._end_idle()

    def _on_end(self, trainer: TrainerProcess, task: NodeTask, code: int) -> None:
        del trainer.tasks[task.number]
        if code:
            print(f"the process of a trip ended with code {code}", flush=True)
            task.report_crash(f"the process of the trip ended with code {code}")
        task.client.close()
        task.node.release()
        self._end_idle()

    def _on_death(self, trainer: TrainerProcess) -> None:
        """Report the tasks of a trainer that has died, and start another."""
        code = trainer.end()
        for task in list(trainer.tasks.values()):
            self._on_end(trainer, task, code or 1)
        if trainer in self._old:
            self._old.remove(trainer)
        elif trainer is self._trainer:
            print(f"the trainer ended with code {code}; starting another", flush=True)
            time.sleep(PARENT_SECONDS)  # one that dies at once must not keep the machine busy
            self._trainer = TrainerProcess(self._threads)


# ---- the trainer


class ForkingTrainer:
    """Loads what all trips need and forks a process for each task."""

    def __init__(self, connection: Connection, threads: int, prepares: bool) -> None:
        self._connection, self._threads, self._prepares = connection, threads, prepares and PRELOADS
        self._numbers: dict[int, int] = {}
        self._app: Any = None
        self._loaded: list[Mapping[str, Any]] = []
        self._files = WatchedFiles()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # interrupts the wait
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def run(self, parent: int) -> None:
        """Fork on request until the executor has ended."""
        control = self._connection.fileno()
        self._say("ready", 0, 0)
        while os.getppid() == parent:
            ready, _, _ = select.select([control, self._woken], [], [], PARENT_SECONDS)
            if self._woken in ready:
                os.read(self._woken, 1 << 10)
                self._reap()
            if control in ready:
                self._start(*(self._connection.recv_bytes() for _ in range(3)))

    def _start(self, head: bytes, given: bytes, found: bytes) -> None:
        from flwr.proto.runtime_pb2 import PullAppMessagesResponse, PullTaskInputResponse

        task = json.loads(head)
        if changed := self._files.first_change():
            self._say("changed", task["number"], changed)
            return
        answers = (PullTaskInputResponse.FromString(given), PullAppMessagesResponse.FromString(found))
        if self._prepares:
            self._prepare(answers[0])
            if threads := other_threads():
                self._say("threads", task["number"], ", ".join(threads))
                return
        sys.stdout.flush()
        sys.stderr.flush()
        trainer, pid = os.getpid(), os.fork()
        if pid == 0:
            exit_with_parent(trainer)
            self._work(task, *answers)
        self._numbers[pid] = task["number"]
        self._say("started", task["number"], pid)

    def _prepare(self, given: Any) -> None:
        """Load the app and the data of a node. If that fails, the process of the trip fails alike and reports it."""
        from flwr.cli.install import install_from_fab
        from flwr.clientapp.utils import get_load_client_app_fn
        from flwr.common.serde import context_from_proto

        node = context_from_proto(given.context).node_config
        if node in self._loaded:
            return
        try:
            if self._app is None:
                install_from_fab(given.fab.content, skip_prompt=True)
            with self._files.recording():
                if self._app is None:
                    load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
                    self._app = load(given.run.fab_id, given.run.fab_version, given.fab.hash_str)
                if hasattr(self._app, "prepare"):
                    self._app.prepare(node)
            self._loaded.append(node)
        except BaseException:  # of the user's code, which may even exit
            traceback.print_exc()
        gc.collect()
        gc.freeze()  # keeps the pages that all trips share untouched

    def _work(self, task: Mapping[str, Any], given: Any, found: Any) -> NoReturn:
        """In the fork: work on a task and end."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._connection.close()
            os.close(self._woken)
            os.close(self._wake)
            flower.TAKEN_AT = float(task["taken_at"])
            _begin_computing(self._threads)
            answer_task(f"127.0.0.1:{task['port']}", task["token"], given, found, self._app)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # must not return to the trainer's loop
            traceback.print_exc()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    def _reap(self) -> None:
        for pid, number in list(self._numbers.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._numbers[pid]
                self._say("ended", number, os.waitstatus_to_exitcode(status))

    def _say(self, kind: str, number: int, value: int | str) -> None:
        self._connection.send_bytes(json.dumps([kind, number, value]).encode())


class _GivenInput:
    """Flower's client, for a task whose input has been fetched already."""

    def __init__(self, client: Any, given: Any, found: Any) -> None:
        self._client, self._given, self._found = client, given, found

    def PullTaskInput(self, _: Any) -> Any:  # noqa: N802
        return self._given

    def PullMessages(self, _: Any) -> Any:  # noqa: N802
        return self._found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def answer_task(address: str, token: str, given: Any, found: Any, app: Any = None) -> None:
    """Work on a task as Flower's own process does, with the input that was fetched and the app that is loaded."""
    from functools import partial

    import flwr.supercore.inflatable.inflatable_utils as objects
    import flwr.supernode.runtime.run_clientapp as clientapp

    module: Any = clientapp
    pull = module.pull_task_input
    module.pull_task_input = lambda client: pull(_GivenInput(client, given, found))
    # the SuperNode may still fetch the model; Flower would look again after a second
    objects.pull_objects = partial(objects.pull_objects, initial_backoff=SHORTEST_PAUSE)
    if app is not None:
        module.install_from_fab = lambda *_, **__: None
        module.get_load_client_app_fn = lambda **_: lambda *__: app
    module.run_clientapp(address, token, insecure=True, runtime_dependency_install=False)


def _begin_computing(threads: int) -> None:
    """Undo what a fork shares with its siblings: one thread, and the state of numpy's global generator."""
    import numpy as np
    import torch

    np.random.seed()
    torch.set_num_threads(threads)


def other_threads() -> list[str]:
    """The names of threads beside the main one that would not survive a fork. Empty where the system does not say."""
    names = []
    for each in Path("/proc/self/task").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if int(each.name) != os.getpid():
                names.append((each / "comm").read_text(encoding="utf-8", errors="replace").strip())
    return [name for name in names if name not in HARMLESS_THREADS]


def preload() -> None:
    """Import what every trip needs."""
    gc.disable()  # imports make many objects and no garbage
    for name in MODULES:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    gc.enable()


# ---- the commands


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m freshet.flower.warm")
    roles = parser.add_subparsers(dest="role", required=True)
    executor = roles.add_parser("executor")
    executor.add_argument("trainers", type=int)
    executor.add_argument("threads", type=int)
    executor.add_argument("nodes", nargs="+", metavar="PORT=SECRET_FILE")
    trainer = roles.add_parser("trainer")
    for name in ("descriptor", "threads", "prepares"):
        trainer.add_argument(name, type=int)
    given = parser.parse_args(words)
    parent = int(os.environ.get(PARENT, 0))
    if given.role == "executor":
        nodes = [each.partition("=") for each in given.nodes]
        found = [LocalNode(int(port), Path(secret).read_bytes()) for port, _, secret in nodes]
        if parent:
            exit_with_parent(parent)
        runs = WarmExecutor(found, given.trainers, given.threads)
        while True:
            runs.step()
    else:
        if PRELOADS:
            die_with_parent()
            preload()
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the executor has ended
            ForkingTrainer(Connection(given.descriptor), given.threads, bool(given.prepares)).run(parent)
        os._exit(0)  # skips torch's slow teardown


if __name__ == "__main__":
    main()
