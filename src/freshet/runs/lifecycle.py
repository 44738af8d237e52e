"""The life of a run, from its first event to its summary: clock, checkpoints, Ctrl-C, and how it ended.

Whether its time is virtual or real is the driver's affair: everything here holds for both.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from freshet.core.events import Record
from freshet.core.server import Server
from freshet.core.vectors import Vector
from freshet.errors import RunError
from freshet.privacy import Accountant
from freshet.runs import checkpoint
from freshet.runs.checkpoint import Tree
from freshet.runs.reader import ENDED
from freshet.runs.records import ACCURACY, Metric
from freshet.runs.summary import remarks, summarise, time_to_target
from freshet.runs.writer import RunWriter


class Driver(Protocol):
    """Brings events to the core: in virtual time (a simulation) or in real time (a network)."""

    @property
    def now(self) -> float:
        """Seconds since the start."""

    def run(self, until: float, between: Callable[[], bool]) -> bool:
        """Go on until the end (True), or until ``between``, called between two events, says to stop (False)."""

    def conclude(self) -> None:
        """Nothing more will come: test the model that is left and look at the result. Not asked of a run that is
        interrupted, and asked after its last checkpoint: a run that goes on later does so as if this had not been."""

    def state(self) -> Tree:
        """Everything that decides how the run goes on, and under "log" where its log ends."""

    def restore(self, tree: Tree, until: float) -> None:
        """Take up a state; asked once, before ``run``."""

    def facts(self) -> dict[str, Any]:
        """The driver's part of summary.json: counts, versions, rounds, mean staleness, and when the run diverged."""


@dataclass(frozen=True)
class Plan:
    """What is asked of a run: its name, its end, how often it is saved, and whether it goes on when it diverges."""

    method: str
    seed: int
    target: float | None
    until: float
    checkpoint_every: float
    checkpoint_minutes: float
    stop_diverged: bool
    #: Whether it ends as soon as a test reaches the target.
    stop_at_target: bool = False
    #: Whether it keeps a checkpoint of its end, from which it can be given a later one.
    keep: bool = False
    #: Which data, and how many of them; ``part`` is a sentence when they are not whole.
    data: Mapping[str, Any] = field(default_factory=dict)
    metric: Metric = ACCURACY
    #: Parameters that do not train, for the file of the final model.
    frozen: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    #: Bytes of the log that are compressed at a time, once no resume can cut them off (0: none).
    rotate_bytes: int = 0
    #: Counts what noise on the devices has left of their privacy, where there is noise.
    accountant: Accountant | None = None


class Ready(NamedTuple):
    """A run about to begin: who brings the events, who decides, who writes."""

    driver: Driver
    server: Server
    writer: RunWriter


class Ended(NamedTuple):
    """What a run has left behind."""

    directory: Path
    summary: Record
    rows: list[Record]
    weights: Vector


class Stopwatch:
    """Seconds of real time, those before a resumed run's checkpoint included."""

    def __init__(self, before: float) -> None:
        self._start = time.perf_counter() - before

    def seconds(self) -> float:
        return time.perf_counter() - self._start


class Checkpoints:
    """Saves a driver at its start, every so many of its seconds and every so many minutes of real time."""

    def __init__(self, driver: Driver, writer: RunWriter, clock: Stopwatch, every: float, minutes: float) -> None:
        self._driver, self._writer, self._directory, self._clock = driver, writer, writer.directory, clock
        self._every, self._wall = every, 60.0 * minutes
        self._last_time: float | None = None
        self._last_wall = clock.seconds()

    def consider(self) -> None:
        """Called between two events: save if it is time (0 for both settings: never)."""
        if not self.wanted:
            return
        late = self._wall and self._clock.seconds() - self._last_wall >= self._wall
        if late or self._last_time is None or (self._every and self._driver.now - self._last_time >= self._every):
            self.write()

    def write(self) -> None:
        """Save now."""
        tree = self._driver.state() | {"wall_seconds": self._clock.seconds()}
        checkpoint.write(self._directory, tree)
        self._writer.saved(tree["log"]["events"])
        self._last_time, self._last_wall = self._driver.now, self._clock.seconds()

    @property
    def wanted(self) -> bool:
        """Whether runs save themselves at all."""
        return bool(self._every or self._wall)

    def clear(self, keep: int = 0) -> None:
        """Drop all checkpoints, or all but the newest ones: a run that has ended needs one at most."""
        checkpoint.prune(self._directory, keep)


_listening: list[threading.Event] = []


@contextmanager
def listening() -> Iterator[Callable[[], bool]]:
    """For whoever makes several runs: whether one of them was asked to end, also one that could not act on it.

    A run may crash just then, or be at its last test and end anyway; the next one must not begin all the same.
    """
    heard = threading.Event()
    _listening.append(heard)
    try:
        yield heard.is_set
    finally:
        _listening.remove(heard)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C ends the run at the next event, with everything written; the second one at once.

    So do the signals of a batch system or a closed terminal (SIGTERM, SIGHUP), unless they are ignored (nohup).
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def handler(*_: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        for each in (asked, *_listening):
            each.set()

    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {each: signal.signal(each, handler) for each in ends if signal.getsignal(each) != signal.SIG_IGN}
    try:
        yield asked.is_set
    finally:
        for each, before in previous.items():
            signal.signal(each, before)


def drive(plan: Plan, opened: AbstractContextManager[Ready], tree: Tree | None = None) -> Ended:
    """Live a run to its end, from the start or from a checkpoint's tree; whatever happens, its files are whole.

    ``opened`` makes it ready (starts workers, opens the log) and tidies up behind it.
    """
    clock = Stopwatch(0.0 if tree is None else tree["wall_seconds"])
    with interruptible() as stop, opened as (driver, server, writer):
        writer.elapsed = clock.seconds
        writer.judge_by(plan.metric)
        part = plan.data.get("part")
        for sentence in [*([part] if part else []), *server.method.notices()]:
            writer.say(sentence)
        writer.rotate_bytes = plan.rotate_bytes
        keeper = Checkpoints(driver, writer, clock, plan.checkpoint_every, plan.checkpoint_minutes)
        status = "failed"
        try:
            if tree is not None:
                _restore(driver, tree, plan.until)
                tree.clear()  # its arrays keep the file open
            status = _run(plan, driver, writer, keeper, stop)
        except KeyboardInterrupt:  # a second Ctrl-C: at once, without a checkpoint of this moment
            status = "interrupted"
        finally:
            if status not in ENDED:
                writer.abandon(wait=status == "failed")
            weights = server.method.evaluated(server)
            head = {"method": plan.method, "seed": plan.seed, "status": status}
            facts = {"virtual_time": driver.now} | driver.facts()
            summary = summarise(head, writer.metrics, plan.target, facts, weights, clock.seconds(), plan.metric)
            summary |= server.method.summary() | ({"data": dict(plan.data)} if plan.data else {})
            summary |= {"stopped": writer.stopped} if status == "stopped" else {}
            summary |= {"privacy": plan.accountant.closing(server.trips)} if plan.accountant is not None else {}
            for remark in remarks(summary, writer.metrics):
                writer.say(remark)
            if status == "interrupted" and not writer.observers:  # a script would go on with what it is given
                where = f"all of it is in {writer.directory} and can be resumed"
                writer.say(f"{plan.method} was interrupted at {driver.now:g} s; {where}")
            keep = plan.keep and status != "diverged"
            sure, tidy = 0, None
            if status in ENDED:
                sure = writer.saved_at if keep and writer.saved_at is not None else writer.end
                tidy = partial(keeper.clear, keep=1 if keep else 0)
            writer.close(summary, server.context.layout, weights, plan.frozen, sure, tidy)
    return Ended(writer.directory, summary, writer.metrics, weights)


def _restore(driver: Driver, tree: Tree, until: float) -> None:
    """Take up a saved state; its checksums may be right and its contents nonsense all the same."""
    try:
        driver.restore(tree, until)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        problem = f"{type(error).__name__}: {str(error)[:160]}"
        raise RunError(f"the checkpoint makes no sense ({problem}); remove it to use the one before") from error


def _run(plan: Plan, driver: Driver, writer: RunWriter, keeper: Checkpoints, stop: Callable[[], bool]) -> str:
    """Bring the events of a run; returns its status."""
    reached = _target(plan, writer)

    def between() -> bool:
        if reached() or stop() or writer.stopped is not None:  # a target that is reached outlasts a Ctrl-C
            return True
        keeper.consider()
        return False

    ended = driver.run(plan.until, between)
    if not ended or (plan.keep and keeper.wanted):
        keeper.write()  # before the last test: a run with a later end would not have made it
    if not ended and writer.stopped is None:
        writer.drain(wait=True)
        return "interrupted"
    driver.conclude()
    writer.drain(wait=True)
    if not ended:
        return "stopped"
    return "diverged" if plan.stop_diverged and driver.facts()["diverged"] is not None else "finished"


def _target(plan: Plan, writer: RunWriter) -> Callable[[], bool]:
    """Asked between two events: whether a test has now reached the target that ends the run.

    It waits for the test, so that the run ends at the same event on any number of workers. A run that goes on with its
    target behind it is not stopped again.
    """
    seen = len(writer.metrics)
    if not plan.stop_at_target or time_to_target(writer.metrics, plan.target, plan.metric) is not None:
        return lambda: False

    def reached() -> bool:
        nonlocal seen
        writer.await_tests()
        new, seen = writer.metrics[seen:], len(writer.metrics)
        if time_to_target(new, plan.target, plan.metric) is None:
            return False
        writer.stopped = writer.stopped or f"the target of {plan.target:g} is reached"
        return True

    return reached
