"""The results of a grid or a tuning (``comparison.json`` and the like) for the page. Such files are not trusted."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freshet.report.columns import COLUMNS, DEVICES, Column, by_result, column_for, kind_of, overhead, without_times
from freshet.report.panels import panels, title_of
from freshet.report.plots import panel_figure
from freshet.report.reading import Record
from freshet.runs.records import metric_of, number

#: Larger files are not read.
_MAX_BYTES = 64_000_000
_MAX_NOTES = 40
_MAX_TRIALS = 100


@dataclass(frozen=True)
class Experiment:
    """The results of one grid or tuning as the page shows them."""

    name: str
    content: Record


def read_experiments(paths: Iterable[Path]) -> tuple[list[Experiment], list[str]]:
    """The experiments among these files, and a note for each damaged file."""
    found, notes = [], []
    for path in paths:
        try:
            results = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size < _MAX_BYTES else None
            if isinstance(results, dict) and "worlds" in results:
                found.append(Experiment(path.stem, experiment(results)))
            elif isinstance(results, dict) and "trials" in results:
                found.append(Experiment(path.stem, tuning(results)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            notes.append(f"{path.name} does not hold valid results of freshet and is not shown.")
    return found, notes


def run_order(paths: Iterable[Path]) -> dict[str, int]:
    """The place of each run of a grid by the name of its folder, as the grid was given."""
    names: dict[str, int] = {}
    for path in paths:
        try:
            results = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size < _MAX_BYTES else {}
            runs = [run for world in results["worlds"] for line in world["lines"] for run in line["runs"]]
            for run in runs:
                names.setdefault(str(run["key"]), len(names))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # no results of a grid; ``read_experiments`` notes damaged ones
    return names


def experiment(results: Record) -> Record:
    """Figures, and the tables of each world."""
    return {
        "title": str(results["title"]),
        "look": str(results.get("look", "curves")),
        "notes": [str(note) for note in results["notes"][:_MAX_NOTES]],
        "rows": [[panel_figure(panel) for panel in row] for row in panels(results)],
        "worlds": [_world(world) for world in results["worlds"]],
    }


def tuning(results: Record) -> Record:
    """A table of the trials of a tuning, the best first."""
    trials: list[Record] = [
        {
            "score": number(trial["value"]),
            "state": str(trial["state"]),
            "values": [number(trial["values"].get(key)) for key in results["space"]],
        }
        for trial in results["trials"]
    ]
    ranked = sorted(trials, key=lambda trial: math.inf if trial["score"] is None else -trial["score"])
    split, seeds = number(results["validation"]) or 0.0, len(results["seeds"])
    over = "1 seed" if seeds == 1 else f"{seeds} seeds"
    metric = metric_of(results)
    name = ("-" if metric.direction == "min" else "") + metric.name[:40]
    note = f"Scores: mean {name} over {over} on a held-out {100 * split:g} % of the training set."
    return {
        "title": f"tuning of {results['method']}",
        "look": "tuning",
        "notes": [note],
        "rows": [],
        "worlds": [],
        "score": {"key": "score", "title": "score", "kind": kind_of(metric)},
        "keys": [str(key) for key in results["space"]],
        "trials": ranked[:_MAX_TRIALS],
        "left_out": max(0, len(ranked) - _MAX_TRIALS),
    }


def _world(world: Record) -> Record:
    metric, target = metric_of(world), number(world["target"])
    lines = by_result([_line(line) for line in world["lines"]], lambda line: line["accuracy"], metric)
    devices = [COLUMNS[key] for key in DEVICES if any(line[key] is not None for line in lines)]
    extra = [COLUMNS["rejected"]] if any(line["rejected"] for line in lines) else []
    return {
        "name": title_of(world),
        "target": target,
        "metric": metric._asdict(),
        "until": number(world["until"]),
        "measures": [_column(column_for(key, metric)) for key in without_times(("accuracy", "time_raw"), target)],
        "columns": [_column(column) for column in extra],
        "devices": [_column(column) for column in devices],
        "lines": lines,
    }


def _column(column: Column) -> Record:
    return {"key": column.key, "title": column.short, "kind": column.kind}


def _line(line: Record) -> Record:
    """The numbers of one method in the page's table."""
    against = line.get("against") or {}
    paper = line.get("published") or {}
    ratio = against.get("time_raw") or {}
    medians = {key: number(line[key]["median"]) for key in _MEDIANS}
    return {
        "label": str(line["label"]),
        "style": int(line["style"]),
        "ended": int(line["finished"]),
        "all": int(line["all"]),
        "diverged": [number(each["time"]) for each in line["diverged"]],
        "reference": _text(against.get("reference")),
        "ratio": number(ratio.get("ratio")),
        "bound": "" if ratio.get("bound") not in ("<", ">") else ratio["bound"],
        "difference": number(against.get("difference")),
        "p": number(against.get("p")),
        "published": {key: number(paper.get(key)) for key in ("accuracy", "time")} if paper else None,
        **medians,
        **{key: number((line.get(key) or {}).get("median")) for key in ("rejected", *DEVICES)},
        "overhead": overhead(medians["bytes_up"], medians["bytes_down"], medians["bytes_fresh"]),
    }


_MEDIANS = ("accuracy", "time_raw", "bytes_up", "bytes_down", "bytes_fresh")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
