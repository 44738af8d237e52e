"""What a grid of runs looks like in a terminal: a live table while it runs, and the tables of its results."""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from freshet.cli.screen import number, size
from freshet.experiments.compare import Watch
from freshet.experiments.grid import Job, seconds_left
from freshet.experiments.store import State, Store

Record = Mapping[str, Any]


class GridScreen(Watch):
    """A live table of the comparison that is running, with the time left; on a pipe one line per finished run."""

    def __init__(self, console: Console, jobs: Sequence[Job], store: Store) -> None:
        self.console = console
        self._jobs = list(dict.fromkeys((job.key, job.entry, job.world) for job in jobs))
        self._by_key = {job.key: job for job in jobs}
        self._states = {key: store.state(key) for key in self._by_key}
        self._accuracy: dict[str, float] = {}
        self._timings: list[tuple[str, float, float]] = []
        self._job: Job | None = None
        self._now = self._from = 0.0
        self._began = self._start = time.monotonic()
        self._live = Live(console=console, get_renderable=self._picture, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    # ---- what happens

    def on_begin(self, job: Job, state: State) -> None:
        self._job, self._now, self._began = job, 0.0, time.monotonic()
        self._from = -1.0
        if state is State.UNFINISHED:
            self._say(f"{job.key}: going on")

    def on_progress(self, time: float) -> None:
        if self._from < 0:
            self._from = time
        self._now = time

    def on_metrics(self, row: dict[str, Any]) -> None:
        if self._job is not None and row["accuracy"] is not None:
            self._accuracy[self._job.key] = row["accuracy"]

    def on_message(self, message: str) -> None:
        self._say(message)

    def on_done(self, job: Job, state: State, error: str | None) -> None:
        self._states[job.key] = state
        spent = time.monotonic() - self._began
        if state is State.FINISHED:
            self._timings.append((job.entry.label, job.config.run.until - max(0.0, self._from), spent))
        if not self.console.is_terminal or error is not None:
            result = f"accuracy {number(self._accuracy.get(job.key))}" if error is None else error
            self._say(f"{job.key}: {state}, {result} ({spent:.1f} s)")
        self._job = None

    def _say(self, message: str) -> None:
        self.console.print(Text(message), highlight=False, soft_wrap=True)

    # ---- how it looks

    def _picture(self) -> RenderableType:
        job = self._job
        world = job.world if job is not None else self._jobs[-1][2]
        table = Table(box=None, header_style="bold", pad_edge=False)
        for heading, side in (("method", "left"), ("runs", "right"), ("now", "left"), ("accuracy", "right")):
            table.add_column(heading, justify=side)  # type: ignore[arg-type]
        for entry in dict.fromkeys(entry for _, entry, where in self._jobs if where == world):
            keys = [key for key, mine, where in self._jobs if (mine, where) == (entry, world)]
            running = job is not None and job.entry == entry
            bar = ProgressBar(job.config.run.until, self._now, width=24) if job is not None and running else ""
            last = next((self._accuracy[key] for key in reversed(keys) if key in self._accuracy), None)
            table.add_row(escape(entry.title), self._count(keys), bar, number(last))
        return Group(Text(self._headline(world.name), style="bold"), table)

    def _count(self, keys: Sequence[str]) -> str:
        states = [self._states[key] for key in keys]
        failed = states.count(State.FAILED)
        return f"{states.count(State.FINISHED)}/{len(keys)}" + (f" [red]{failed} failed" if failed else "")

    def _headline(self, world: str) -> str:
        over = sum(state in (State.FINISHED, State.FAILED) for state in self._states.values())
        left = self.left()
        parts = [world] if world else []
        parts += [f"{over} of {len(self._states)} runs", f"{_clock(time.monotonic() - self._start)} so far"]
        return " · ".join([*parts, *([] if left is None else [f"about {_clock(left)} left"])])

    def left(self) -> float | None:
        """Real seconds until everything is done, by the pace so far."""
        waiting = (State.MISSING, State.UNFINISHED)
        todo = {
            key: (job.entry.label, job.config.run.until)
            for key, job in self._by_key.items()
            if self._states[key] in waiting
        }
        done = list(self._timings)
        if self._job is not None and self._now > max(0.0, self._from):
            label, until = self._job.entry.label, self._job.config.run.until
            done.append((label, self._now - max(0.0, self._from), time.monotonic() - self._began))
            todo[self._job.key] = (label, max(0.0, until - self._now))
        return seconds_left(done, list(todo.values()))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# ---- results


def span(value: Record) -> str:
    """Least and greatest over seeds: 0.805–0.820."""
    return f"{number(value['low'])}–{number(value['high'])}" if value["count"] > 1 else "–"


def reached(value: Record) -> str:
    """Median time to the target, a dash when it was not reached, and how many seeds reached it if not all did."""
    text = "–" if value["median"] is None else f"{value['median']:.0f} s"
    return f"{text} ({value['count']}/{value['of']})" if 0 < value["count"] < value["of"] else text


def _runs(line: Record) -> str:
    failed = f" [red]{line['failed']} failed" if line["failed"] else ""
    return f"{line['finished']}/{line['all']}{failed}"


def accuracy_table(world: Record) -> Table:
    """What each method reached and how fast, held against the first one; the paper's numbers beside it."""
    lines, target = world["lines"], world["target"]
    paper = any(line["published"] for line in lines)
    headings = ["runs", "accuracy", "range", "best", f"to {target:g}", "5-mean", "vs first", "p"]
    table = _table([*headings, *(["published", f"its time to {target:g}"] if paper else [])])
    for line in lines:
        against = line.get("against")
        difference = None if against is None else against["difference"]
        row = [
            escape(line["label"]),
            _runs(line),
            number(line["accuracy"]["median"]),
            span(line["accuracy"]),
            number(line["best"]["median"]),
            reached(line["time_raw"]),
            reached(line["time_mean"]),
            "–" if difference is None else f"{difference:+.3f}",
            "–" if against is None else number(against["p"]),
        ]
        if paper:
            theirs = line["published"]
            row.append("–" if theirs is None else f"{theirs['accuracy']:g}")
            row.append("–" if theirs is None or theirs["time"] is None else f"{theirs['time']:,g}")
        table.add_row(*row)
    return table


def cost_table(world: Record) -> Table:
    """What each method cost, as medians over seeds: traffic, staleness, discards, trips computed, real time."""
    table = _table(["up", "down", "staleness", "discarded", "trips", "computed in"])
    for line in world["lines"]:
        up, down, stale, discards, trips, wall = (
            line[key]["median"]
            for key in ("bytes_up", "bytes_down", "mean_staleness", "discards", "trips", "wall_seconds")
        )
        table.add_row(
            escape(line["label"]),
            *("–" if count is None else size(count) for count in (up, down)),
            number(stale, 1),
            number(discards, 0),
            number(trips, 0),
            "–" if wall is None else f"{wall:.1f} s",
        )
    return table


def _table(headings: Sequence[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("method", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def wide_console() -> Console:
    """A console for tables; in a file or a pipe there is room for all columns."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=160)


def print_results(console: Console, results: Record) -> None:
    """All tables of a grid, with everything that a reader must know to read them right."""
    console.print(Text(results["title"], style="bold"))
    if results["scale"]:
        console.print(Text(f"SCALE {results['scale']['scale']:g}: {results['scale']['meaning']}", style="yellow"))
    for world in results["worlds"]:
        scaled = f" (scale {results['scale']['scale']:g})" if results["scale"] else ""
        name = (world["name"] or world["shared"]["data"]["name"]) + scaled
        devices = f"{world['shared']['fleet']['devices']} devices here"
        length = f"until {world['until']:g} s, tested every {world['eval_every']:g} s"
        console.print(Text(f"\n{name}, {devices}, {length}", style="bold"))
        console.print(accuracy_table(world))
        console.print(cost_table(world))
        for line in world["lines"]:
            for run in line["runs"]:
                if run["error"]:
                    console.print(Text(f"failed: {run['key']}: {run['error']}", style="red"), soft_wrap=True)
    for note in [*_reading(results), *results["notes"]]:
        console.print(Text(note, style="dim"), soft_wrap=True)


def _reading(results: Record) -> list[str]:
    """How to read the tables."""
    lines = [line for world in results["worlds"] for line in world["lines"]]
    pairs = max((line["against"]["pairs"] for line in lines if "against" in line), default=0)
    notes = [
        "accuracy, best, times: median over the seeds that finished; range: least–greatest. Times: first test with the "
        "target reached, and first with the mean of five tests there; – means never, (1/3) by one seed of three"
    ]
    if pairs:
        notes.append(
            "vs first: mean difference of accuracy over seeds; p: exact paired sign-flip test, not corrected for "
            f"the number of methods; with {pairs} seeds it cannot be below {2 / 2**pairs:.2g}"
        )
    if any(line["reconstructed"] for line in lines):
        notes.append("[R] reconstructed: the original formulas are not accessible")
    return notes
