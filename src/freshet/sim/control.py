"""Around a running simulation: Ctrl-C, checkpoints, and the time that it has taken so far."""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from freshet.runs import checkpoint
from freshet.sim.driver import Simulation


class Stopwatch:
    """Seconds of real time, those before a resumed run's checkpoint included."""

    def __init__(self, before: float) -> None:
        self._start = time.perf_counter() - before

    def seconds(self) -> float:
        return time.perf_counter() - self._start


class Checkpoints:
    """Saves a simulation at its start, every so many virtual seconds and every so many minutes of real time."""

    def __init__(self, directory: Path, clock: Stopwatch, every: float, minutes: float) -> None:
        self._directory, self._clock = directory, clock
        self._every, self._wall = every, 60.0 * minutes
        self._last_time: float | None = None
        self._last_wall = clock.seconds()

    def consider(self, simulation: Simulation) -> None:
        """Called between two events: save if it is time (0 for both settings: never)."""
        if not (self._every or self._wall):
            return
        late = self._wall and self._clock.seconds() - self._last_wall >= self._wall
        if late or self._last_time is None or (self._every and simulation.heap.now - self._last_time >= self._every):
            self.write(simulation)

    def write(self, simulation: Simulation) -> None:
        """Save now."""
        tree = simulation.state() | {"wall_seconds": self._clock.seconds()}
        checkpoint.write(self._directory, tree)
        self._last_time, self._last_wall = simulation.heap.now, self._clock.seconds()

    def clear(self) -> None:
        """A finished run needs its checkpoints no more."""
        shutil.rmtree(self._directory / "checkpoint", ignore_errors=True)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C ends the run at the next event, with everything written; the second one at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def handler(*_: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
