"""The results of a grid as tables in a terminal, with everything that a reader must know to read them right."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from freshet.cli.screen import cell, fitting_parts, number, size
from freshet.report.columns import DEVICES, chosen, judged, overhead, reachable
from freshet.report.groups import said_diverged
from freshet.report.references import Ratio
from freshet.runs.facts import metric_of

Record = Mapping[str, Any]


def span(value: Record) -> str:
    """Least and greatest over seeds: 0.805–0.820."""
    return f"{number(value['low'])}–{number(value['high'])}" if value["count"] > 1 else "–"


def reached(value: Record) -> str:
    """Median time to the target, a dash when it was not reached, and how many seeds reached it if not all did."""
    text = "–" if value["median"] is None else f"{value['median']:.0f} s"
    return f"{text} ({value['count']}/{value['of']})" if 0 < value["count"] < value["of"] else text


def ratio(value: Record | None) -> str:
    """Time to target over the reference's: 1.60x, or a bound where one of them never got there."""
    return "–" if value is None else str(Ratio(value["ratio"], value["bound"]))


def _runs(line: Record) -> str:
    failed = f" [red]{line['failed']} failed[/red]" if line["failed"] else ""
    diverged = said_diverged(dict(line))
    return f"{line['finished']}/{line['all']}{failed}" + (f" [red]{diverged}[/red]" if diverged else "")


def accuracy_table(world: Record) -> Table:
    """What each method reached and how fast, held against its reference; the paper's numbers beside it."""
    lines, target, metric = world["lines"], world["target"], metric_of(world)
    paper, timed = any(line["published"] for line in lines), target is not None
    accuracy, best, *times = (
        judged(key, metric).short.format(target=f"{target or 0:g}")
        for key in reachable(("accuracy", "best", "time_raw", "time_mean"), target)
    )
    held = [*(["time vs reference"] if timed else []), f"{metric.name} vs", "p"]
    published = ["published", f"its time to {target:g}"] if paper and timed else []
    table = _table(["runs", accuracy, "range", best, *times, *held, *published])
    for line in lines:
        row = [escape(line["label"]), _runs(line), number(line["accuracy"]["median"]), span(line["accuracy"])]
        row += [number(line["best"]["median"]), *([reached(line[key]) for key in _TIMES] if timed else [])]
        row += _against(world, line)
        if published:
            theirs = line["published"]
            row.append("–" if theirs is None else f"{theirs['accuracy']:g}")
            row.append("–" if theirs is None or theirs["time"] is None else f"{theirs['time']:,g}")
        table.add_row(*row)
    return table


_TIMES = ("time_raw", "time_mean")


def _against(world: Record, line: Record) -> list[str]:
    """A method beside its reference: time where there is a target, difference and p."""
    against = line.get("against") or {}
    difference = against.get("difference")
    time = ratio(against.get("time_raw")) if against else _reference(world, line)
    told = "–" if difference is None else f"{difference:+.3f}"
    return [*([] if world["target"] is None else [time]), told, number(against.get("p"))]


def _reference(world: Record, line: Record) -> str:
    return "reference" if line["label"] in world["references"] else "–"


def cost_table(world: Record) -> Table:
    """What each method cost, as medians over seeds: staleness, discards, trips computed, real time."""
    lines = world["lines"]
    columns = chosen(("mean_staleness", "discards", "rejected", "trips", "wall_seconds"), lines)
    table = _table([column.short for column in columns])
    for line in lines:
        table.add_row(escape(line["label"]), *(cell(column, line[column.key]["median"]) for column in columns))
    return table


def devices_table(world: Record) -> Table | None:
    """How the devices fared, as medians over seeds; None where no run tested it."""
    lines = world["lines"]
    columns = chosen(DEVICES, lines)
    table = _table([column.short for column in columns])
    for line in lines:
        table.add_row(escape(line["label"]), *(cell(column, line[column.key]["median"]) for column in columns))
    return table if columns else None


def traffic_table(world: Record) -> Table:
    """What each method sent, as medians over seeds; the fresh models are what FedASMU and FedSSMU send besides."""
    table = _table(["up", "down", "of it fresh models", "on top of the rest"])
    for line in world["lines"]:
        up, down, fresh = (line[key]["median"] for key in ("bytes_up", "bytes_down", "bytes_fresh"))
        share = overhead(up, down, fresh)
        table.add_row(
            escape(line["label"]),
            *("–" if count is None else size(count) for count in (up, down, fresh)),
            "–" if share is None else f"+{100 * share:.1f} %",
        )
    return table


def _table(headings: Sequence[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("method", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=heading != "runs", overflow="fold")
    return table


def wide_console() -> Console:
    """A console for tables; in a file or a pipe there is room for all columns."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=180)


def print_results(console: Console, results: Record) -> None:
    """All tables of a grid, with everything that a reader must know to read them right."""
    console.print(Text(results["title"], style="bold"))
    if results["scale"]:
        console.print(Text(f"SCALE {results['scale']['scale']:g}: {results['scale']['meaning']}", style="yellow"))
    for world in results["worlds"]:
        scaled = f" (scale {results['scale']['scale']:g})" if results["scale"] else ""
        name = (world["name"] or world["shared"]["data"]["name"]) + scaled
        devices = f"{world['shared']['fleet']['devices']} devices"
        length = f"until {world['until']:g} s, tested every {world['eval_every']:g} s"
        console.print(Text(f"\n{name}, {devices}, {length}", style="bold"))
        for table in (accuracy_table(world), devices_table(world), cost_table(world), traffic_table(world)):
            for part in [] if table is None else fitting_parts(console, table):
                console.print(part)
        for line in world["lines"]:
            for run in line["runs"]:
                if run["error"]:
                    console.print(Text(f"failed: {run['key']}: {run['error']}", style="red"), soft_wrap=True)
    for note in [*_reading(results), *results["notes"]]:
        console.print(Text(note, style="dim"), soft_wrap=True)


_HOW_TIMES = (
    " Times: first test with the target reached, and first with the mean of five tests there; – means never, (1/3) by "
    "one seed of 3"
)
_HOW_RATIOS = (
    "time vs reference: 1.60x = takes 1.6 times as long as its reference to reach the target, 0.50x = half as long; "
    ">2.10x: had not reached it when its runs ended, <0.50x: the reference had not. "
)


def _reading(results: Record) -> list[str]:
    """How to read the tables."""
    lines = [line for world in results["worlds"] for line in world["lines"]]
    held = [line for line in lines if "against" in line]
    pairs = max((line["against"]["pairs"] for line in held), default=0)
    name = "/".join(dict.fromkeys(metric_of(world).name for world in results["worlds"])) or "accuracy"
    timed = any(world["target"] is not None for world in results["worlds"])
    told, times = (f"{name}, best, times", _HOW_TIMES) if timed else (f"{name}, best", "")
    notes = [f"{told}: median over the seeds that came to their end; range: least–greatest.{times}"]
    if any(line[key]["count"] for line in lines for key in DEVICES):
        notes.append(
            "median device, 10th pct., worst device: accuracy of the last model on what each device is tested on; "
            "Jain: 1 when all devices fare alike, 1/n when one has everything; personal: after local steps there"
        )
    if held:
        named: dict[str, list[str]] = {}
        for line in held:
            named.setdefault(line["against"]["reference"], []).append(line["label"])
        said = "; ".join(f"{', '.join(dict.fromkeys(names))} against {reference}" for reference, names in named.items())
        notes.append(f"{_HOW_RATIOS if timed else ''}References: {said}")
    if pairs:
        notes.append(
            f"{name} vs: mean difference of {name} to the reference over common seeds; p: exact paired sign-flip "
            f"test, not corrected for the number of methods; with {pairs} seeds it cannot be below {2 / 2**pairs:.2g}"
        )
    if any(line["diverged"] for line in lines):
        notes.append("diverged: the model became useless; such a run has ended, and its last numbers enter the medians")
    marks = {mark: text for line in lines for mark, text in line["marks"].items()}
    return notes + [f"[{mark}] {text}" for mark, text in marks.items()]
