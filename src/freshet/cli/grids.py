"""A grid of runs in a terminal: a live table while it runs (on a pipe one line per run), then its results."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from freshet.cli.screen import print_results, wide_console
from freshet.cli.util import make_writable
from freshet.display import clock, number
from freshet.experiments import results
from freshet.experiments.compare import GridObserver, run_grid, to_do
from freshet.experiments.grid import Job, seconds_left
from freshet.experiments.results import Grid, summarise
from freshet.experiments.store import State, Store
from freshet.runs.records import metric_of


class GridScreen(GridObserver):
    """A live table of the running comparison with the time left; on a pipe one line per finished run."""

    def __init__(self, console: Console, jobs: Sequence[Job], store: Store) -> None:
        self.console = console
        self._jobs = list(dict.fromkeys((job.key, job.entry, job.scenario) for job in jobs))
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

    # ---- events

    def on_begin(self, job: Job, state: State) -> None:
        self._job, self._now, self._began = job, 0.0, time.monotonic()
        self._from = -1.0
        if state is State.UNFINISHED:
            self._say(f"{job.key}: continues")

    def on_progress(self, time: float) -> None:
        if self._from < 0:
            self._from = time
        self._now = time

    def on_metrics(self, row: dict[str, Any]) -> None:
        value = metric_of(row).of(row)
        if self._job is not None and value is not None:
            self._accuracy[self._job.key] = value

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

    # ---- drawing

    def _picture(self) -> RenderableType:
        job = self._job
        world = job.scenario if job is not None else self._jobs[-1][2]
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
        parts += [f"{over} of {len(self._states)} runs", f"{clock(time.monotonic() - self._start)} so far"]
        return " · ".join([*parts, *([] if left is None else [f"about {clock(left)} left"])])

    def left(self) -> float | None:
        """Estimated real seconds until everything is done."""
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


class TuneScreen(GridObserver):
    """A progress bar for the current run, and a line for each trial."""

    def __init__(self, console: Console, trials: int) -> None:
        self._console, self._trials = console, trials
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("accuracy [bold]{task.fields[accuracy]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task("tuning", total=1.0, accuracy="–", visible=console.is_terminal)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_begin(self, job: Job, state: State) -> None:
        self._bar.reset(self._task, total=job.config.run.until, description=f"seed {job.seed}", accuracy="–")

    def on_progress(self, time: float) -> None:
        self._bar.update(self._task, completed=time)

    def on_metrics(self, row: dict[str, Any]) -> None:
        self._bar.update(self._task, accuracy=number(metric_of(row).of(row)))

    def on_trial(self, record: Mapping[str, Any], count: int) -> None:
        """One trial is over."""
        values = ", ".join(f"{key.partition('.')[2]} {value:.4g}" for key, value in record["values"].items())
        result = record["error"] or (record["state"] if record["value"] is None else f"{record['value']:.4f}")
        best = "nothing yet" if record["best"] is None else f"best {record['best']:.4f}"
        line = f"trial {count}/{self._trials}: {result} ({best}) {values}"
        self._bar.console.print(Text(line), highlight=False, soft_wrap=True)


def work(grid: Grid, *, retry: bool, listing: bool) -> None:
    """Run what is missing, then print and write the results."""
    console, jobs, store = wide_console(), grid.jobs, grid.store
    results.reference_indices(list(dict.fromkeys(job.entry for job in jobs)), grid.reference)
    if listing:
        _list(console, jobs, store, grid.title, grid.notes)
        return
    make_writable(store.folder)
    with GridScreen(Console(stderr=True), jobs, store) as screen:
        done = run_grid(jobs, store, watch=screen, retry=retry)
    found, made = summarise(grid)
    print_results(console, found)
    for path in made:
        typer.echo(str(path))
    states = [run["state"] for world in found["worlds"] for line in world["lines"] for run in line["runs"]]
    if not done:
        left = len(to_do(jobs, store))
        typer.echo(f"interrupted; to do: {left} of {len(jobs)}; run the same command again to continue", err=True)
        raise typer.Exit(130)
    if State.FAILED in states:
        failed = f"{states.count(State.FAILED)} of {len(states)} runs failed and are not averaged"
        typer.echo(f"{failed}; --retry tries them again", err=True)
        raise typer.Exit(1)


def _list(console: Console, jobs: Sequence[Job], store: Store, title: str, notes: Sequence[str]) -> None:
    console.print(Text(title, style="bold"))
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("world", "method", "seed", "state", "run"):
        table.add_column(heading)
    for job in jobs:
        world, label = Text(job.scenario.name or job.config.data.name), Text(job.entry.title)
        table.add_row(world, label, str(job.seed), str(store.state(job.key)), job.key)
    console.print(table)
    for note in notes:
        console.print(Text(note, style="dim"), soft_wrap=True)
    typer.echo(f"{len(jobs)} runs, {len(to_do(jobs, store))} to do, in {store.folder}")
