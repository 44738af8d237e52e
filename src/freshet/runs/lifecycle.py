"""Drive a run from its first event to its summary: clock, checkpoints, Ctrl-C, and how it ended.

All of this holds for virtual and for real time. Only the driver knows which of them it is.
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

from freshet.core.events import Noted, Record
from freshet.core.server import Server
from freshet.core.vectors import Vector
from freshet.errors import RunError
from freshet.privacy import Accountant, NoisedSum
from freshet.runs import checkpoint
from freshet.runs.checkpoint import Tree
from freshet.runs.reader import ENDED
from freshet.runs.records import ACCURACY, Metric
from freshet.runs.software import NOTE_ABOUT
from freshet.runs.summary import remarks, summarise, tests_since_best, time_to_target
from freshet.runs.writer import RunWriter


class Driver(Protocol):
    """Brings events to the core, in virtual time (a simulation) or in real time (a network)."""

    @property
    def now(self) -> float:
        """Seconds since the start."""

    @property
    def checkpoint_due(self) -> bool:
        """Whether the driver wants a checkpoint before its time."""

    def run(self, until: float, between: Callable[[], bool]) -> bool:
        """Run to the end and return True. Call ``between`` between two events; if it returns True, return False."""

    def conclude(self) -> None:
        """Test the final model, after the last event and the last checkpoint. Not called for an interrupted run.

        A resumed run ignores this final test.
        """

    def state(self) -> Tree:
        """Everything that decides how the run continues, and under "log" where its logs end."""

    def restore(self, tree: Tree, until: float) -> None:
        """Restore a state; called once, before ``run``."""

    def facts(self) -> dict[str, Any]:
        """The driver's part of summary.json: counts, versions, rounds, mean staleness, and when the run diverged."""


@dataclass(frozen=True)
class RunPlan:
    """What a run does: its method, its end, how often it is saved, and whether it continues when it diverges."""

    method: str
    seed: int
    target: float | None
    until: float
    checkpoint_every: float
    checkpoint_minutes: float
    stop_diverged: bool
    #: Whether the run ends as soon as a test reaches the target.
    stop_at_target: bool = False
    #: Tests in a row without a better value after which the run ends (0: never).
    patience: int = 0
    #: Whether the model of the best test is saved besides the last one.
    keep_best: bool = False
    #: Whether the run keeps a checkpoint of its end, so that it can be extended.
    keep: bool = False
    #: Name and size of the data; ``part`` is a sentence if they are not complete.
    data: Mapping[str, Any] = field(default_factory=dict)
    metric: Metric = ACCURACY
    #: Parameters that are not trained, for the file of the final model.
    frozen: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    #: Bytes of log per compressed segment, once no resume can truncate them (0: no compression).
    rotate_bytes: int = 0
    #: Accounts for the privacy that noise guarantees, if there is any.
    accountant: Accountant | None = None
    #: The software that computes the run, for its checkpoints.
    software: Mapping[str, str] = field(default_factory=dict)
    #: What the user should know before the run.
    notices: tuple[str, ...] = ()


class OpenRun(NamedTuple):
    """A run about to begin: its driver, its server and its writer."""

    driver: Driver
    server: Server
    writer: RunWriter


class RunOutcome(NamedTuple):
    """Where a run wrote its files, its summary, its tests and its final weights."""

    directory: Path
    summary: Record
    rows: list[Record]
    weights: Vector


class Stopwatch:
    """Seconds of real time, including those before the checkpoint of a resumed run."""

    def __init__(self, before: float) -> None:
        self._start = time.perf_counter() - before

    def seconds(self) -> float:
        return time.perf_counter() - self._start


class Checkpoints:
    """Saves a driver at its start, every ``every`` seconds of its time and every ``minutes`` of real time.

    ``facts`` go into each checkpoint.
    """

    def __init__(
        self, driver: Driver, writer: RunWriter, clock: Stopwatch, every: float, minutes: float, facts: Tree
    ) -> None:
        self._facts = facts
        self._driver, self._writer, self._directory, self._clock = driver, writer, writer.directory, clock
        self._every, self._wall = every, 60.0 * minutes
        self._last_time: float | None = None
        self._last_wall = clock.seconds()

    def write_if_due(self) -> None:
        """Save if it is time; called between two events."""
        if not self.enabled:
            return
        late = self._wall and self._clock.seconds() - self._last_wall >= self._wall
        late = late or self._driver.checkpoint_due
        if late or self._last_time is None or (self._every and self._driver.now - self._last_time >= self._every):
            self.write()

    def write(self) -> None:
        """Save now."""
        tree = self._driver.state() | {"wall_seconds": self._clock.seconds()} | self._facts
        checkpoint.write(self._directory, tree)
        self._writer.record_checkpoint(tree["log"]["events"])
        self._last_time, self._last_wall = self._driver.now, self._clock.seconds()

    @property
    def enabled(self) -> bool:
        """Whether the run is saved at all (not if both intervals are 0)."""
        return bool(self._every or self._wall)

    def prune(self, keep: int = 0) -> None:
        """Remove all checkpoints but the ``keep`` newest."""
        checkpoint.prune(self._directory, keep)


_listeners: list[threading.Event] = []


@contextmanager
def interrupt_listener() -> Iterator[Callable[[], bool]]:
    """For a caller that makes several runs: whether any of them was interrupted.

    A run that crashes at that moment, or ends anyway, does not report it. The next run must not begin all the same.
    """
    heard = threading.Event()
    _listeners.append(heard)
    try:
        yield heard.is_set
    finally:
        _listeners.remove(heard)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C ends the run at the next event, with everything written; the second one ends it at once.

    SIGTERM and SIGHUP (a batch system, a closed terminal) do the same, unless they are ignored (nohup).
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def handler(*_: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        for each in (asked, *_listeners):
            each.set()

    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {each: signal.signal(each, handler) for each in ends if signal.getsignal(each) != signal.SIG_IGN}
    try:
        yield asked.is_set
    finally:
        for each, before in previous.items():
            signal.signal(each, before)


def drive(plan: RunPlan, opened: AbstractContextManager[OpenRun], tree: Tree | None = None) -> RunOutcome:
    """Drive a run to its end, from the start or from a checkpoint's tree. Its files are complete whatever happens.

    ``opened`` opens the run (starts workers, opens the log) and cleans up after it.
    """
    clock = Stopwatch(0.0 if tree is None else tree["wall_seconds"])
    with interruptible() as stop, opened as (driver, server, writer):
        writer.configure(plan.metric, clock.seconds, plan.rotate_bytes, keep_best=plan.keep_best)
        part = plan.data.get("part")
        for sentence in [*([part] if part else []), *plan.notices, *server.method.notices()]:
            writer.say(sentence)
        changes, new = ([], []) if tree is None else (tree.get("changes", []), tree.get("new_changes", []))
        facts = {"software": dict(plan.software)} | ({"changes": changes} if changes else {})
        every, minutes = plan.checkpoint_every, plan.checkpoint_minutes
        checkpoints = Checkpoints(driver, writer, clock, every, minutes, facts)
        status = "failed"
        try:
            if tree is not None:
                _restore(driver, tree, plan.until)
                tree.clear()  # its arrays hold the file open
            if new:
                writer.event(driver.now, Noted(NOTE_ABOUT, {"changes": new}))
            status = _run(plan, driver, writer, checkpoints, stop)
        except KeyboardInterrupt:  # a second Ctrl-C: end at once, without a checkpoint
            status = "interrupted"
        finally:
            if status not in ENDED:
                writer.abandon(wait=status == "failed")
            weights = server.method.evaluation_model(server)
            head = {"method": plan.method, "seed": plan.seed, "status": status}
            course = {"virtual_time": driver.now} | driver.facts()
            summary = summarise(head, writer.metrics, plan.target, course, weights, clock.seconds(), plan.metric)
            summary |= server.method.summary() | ({"data": dict(plan.data)} if plan.data else {})
            summary |= {"changes": changes} if changes else {}
            summary |= {"stopped": writer.stop_reason} if status == "stopped" else {}
            summary |= writer.best.summary() if writer.best is not None else {}
            summary |= {"privacy": _privacy(plan.accountant, server)} if plan.accountant is not None else {}
            for remark in remarks(summary, writer.metrics):
                writer.say(remark)
            if status == "interrupted" and not writer.observers:  # else a script would take it for a finished run
                remedy = f"it can be resumed from {writer.directory}"
                writer.say(f"{plan.method} was interrupted at {driver.now:g} s; {remedy}")
            keep = plan.keep and status != "diverged"
            committed, cleanup = 0, None
            if status in ENDED:
                committed = writer.checkpoint_end if keep and writer.checkpoint_end is not None else writer.log_end
                cleanup = partial(checkpoints.prune, keep=1 if keep else 0)
            writer.close(summary, server.context.layout, weights, plan.frozen, committed, cleanup)
    return RunOutcome(writer.directory, summary, writer.metrics, weights)


def _privacy(accountant: Accountant, server: Server) -> dict[str, Any]:
    """What the noise of the devices, or that of the server, guarantees."""
    if isinstance(server.noise, NoisedSum):
        return accountant.summary_of_sums(server.noise.account)
    return accountant.summary(server.trips)


def _restore(driver: Driver, tree: Tree, until: float) -> None:
    """Restore a saved state. Its contents may be nonsense even if its checksums are right."""
    try:
        driver.restore(tree, until)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        problem = f"{type(error).__name__}: {str(error)[:160]}"
        raise RunError(f"the checkpoint makes no sense ({problem}); remove it to use the one before") from error


def _run(plan: RunPlan, driver: Driver, writer: RunWriter, checkpoints: Checkpoints, stop: Callable[[], bool]) -> str:
    """Run the driver to its end; returns the status of the run."""
    reached, exhausted = _target(plan, writer), _patience(plan, writer)

    def between() -> bool:
        if reached() or exhausted():  # these count even after a Ctrl-C
            return True
        if stop() or writer.stop_reason is not None:
            return True
        checkpoints.write_if_due()
        return False

    ended = driver.run(plan.until, between)
    if not ended or (plan.keep and checkpoints.enabled):
        checkpoints.write()  # before the final test, which an extended run does not make
    if not ended and writer.stop_reason is None:
        writer.drain(wait=True)
        return "interrupted"
    driver.conclude()
    writer.drain(wait=True)
    if not ended:
        return "stopped"
    return "diverged" if plan.stop_diverged and driver.facts()["diverged"] is not None else "finished"


def _target(plan: RunPlan, writer: RunWriter) -> Callable[[], bool]:
    """A function, called between two events, that says whether a test has reached the target that ends the run.

    It waits for the test, so that the run ends at the same event with any number of workers. A run that reached its
    target before it was resumed is not stopped again.
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
        writer.request_stop(f"the target of {plan.target:g} is reached")
        return True

    return reached


def _patience(plan: RunPlan, writer: RunWriter) -> Callable[[], bool]:
    """A function, called between two events, that says whether too many tests in a row were no better.

    It waits for tests, as the target does. A run that ended so before it was resumed counts anew.
    """
    if not plan.patience:
        return lambda: False
    start = len(writer.metrics) if tests_since_best(writer.metrics, plan.metric) >= plan.patience else 0

    def exhausted() -> bool:
        writer.await_tests()
        if tests_since_best(writer.metrics[start:], plan.metric) < plan.patience:
            return False
        writer.request_stop(f"{plan.patience} tests in a row were no better")
        return True

    return exhausted
