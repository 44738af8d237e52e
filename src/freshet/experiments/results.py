"""What came out of a grid: one line per method, with medians and spreads over the seeds that finished.

A run that crashed or is unfinished is listed with its reason and never averaged.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from freshet._version import __version__
from freshet.errors import RunError
from freshet.experiments.grid import Entry, Job, World
from freshet.experiments.store import State, Store
from freshet.methods import find, options_for
from freshet.report.groups import Group, headline, times_to
from freshet.report.reading import RunData, number
from freshet.report.statistics import over_seeds
from freshet.runs.reader import Run
from freshet.runs.writer import write_atomically

Record = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """One run of the grid as its directory shows it now."""

    job: Job
    state: State
    error: str | None
    run: RunData | None


def outcome(job: Job, store: Store) -> Outcome:
    """Read a finished run's summary and metrics (its events are not needed); a damaged one counts as failed."""
    state = store.state(job.key)
    if state is not State.FINISHED:
        return Outcome(job, state, store.error(job.key) if state is State.FAILED else None, None)
    run = Run(store.directory(job.key))
    try:
        data = RunData(job.key, "finished", run.config(), run.summary(), run.metrics(), [])
    except RunError as problem:
        return Outcome(job, State.FAILED, str(problem), None)
    return Outcome(job, state, None, data)


def document(
    jobs: Sequence[Job], store: Store, *, title: str, notes: Sequence[str] = (), scale: Record | None = None
) -> Record:
    """All results of a grid as plain values: what ``comparison.json`` holds."""
    outcomes = [outcome(job, store) for job in jobs]
    worlds = list(dict.fromkeys(job.world for job in jobs))
    made_by = sorted({str(o.run.summary.get("freshet")) for o in outcomes if o.run is not None})
    mixed = [f"these runs were made by different versions of freshet: {', '.join(made_by)}"] if len(made_by) > 1 else []
    return {
        "title": title,
        "freshet": __version__,
        "scale": scale,
        "seeds": sorted({job.seed for job in jobs}),
        "notes": [*notes, *mixed],
        "worlds": [world_record(world, [o for o in outcomes if o.job.world == world]) for world in worlds],
    }


def world_record(world: World, outcomes: Sequence[Outcome]) -> Record:
    """The lines of one comparison; the first method is the one that the others are held against."""
    config = outcomes[0].job.config
    target, step = config.run.target, config.run.eval_every
    entries = list(dict.fromkeys(o.job.entry for o in outcomes))
    mine = {entry: [o for o in outcomes if o.job.entry == entry] for entry in entries}
    groups = {e: Group(e.title, [o.run for o in mine[e] if o.run is not None]) for e in entries}
    reference = groups[entries[0]]
    tables = config.tables()
    return {
        "name": world.name,
        "cell": world.cell.name if world.cell else None,
        "target": target,
        "until": config.run.until,
        "eval_every": step,
        "reference": entries[0].title,
        "shared": {name: tables[name] for name in ("data", "model", "fleet", "training")},
        "lines": [
            _line(entry, mine[entry], headline(groups[entry], target, step, reference), world) for entry in entries
        ],
    }


def _line(entry: Entry, outcomes: Sequence[Outcome], numbers: Record, world: World) -> Record:
    method = find(entry.method)[0]
    runs = [o.run for o in outcomes if o.run is not None]
    config = outcomes[0].job.config
    return {
        "method": entry.method,
        "kind": method.kind,
        "reconstructed": method.reconstructed,
        "options": config.tables()["method"],
        "lr": config.training.lr,
        "trigger": config.run.trigger,
        **numbers,
        "finished": len(runs),
        "failed": sum(o.state is State.FAILED for o in outcomes),
        "all": len(outcomes),
        "trips": asdict(over_seeds([number(run.summary.get("trips")) for run in runs])),
        "published": published(entry, world),
        "runs": [_run(o, config.run.target, config.run.eval_every) for o in outcomes],
    }


def published(entry: Entry, world: World) -> Record | None:
    """The paper's numbers for a line, where it has them for this world and the method runs with its own options."""
    if world.cell is None or not world.published or entry.method not in world.cell.published:
        return None
    usual = options_for(entry.method, {})
    if any(getattr(usual, key, None) != value for key, value in entry.options.items()):
        return None
    return asdict(world.cell.published[entry.method])


def _run(found: Outcome, target: float, step: float) -> Record:
    record: Record = {"seed": found.job.seed, "key": found.job.key, "state": str(found.state), "error": found.error}
    if found.run is not None:
        times = times_to(found.run, target, step)
        record |= {"time_raw": times.raw, "time_mean": times.mean}
        names = "final_accuracy", "best_accuracy", "trips", "wall_seconds", "weights_sha256"
        record |= {name: found.run.summary.get(name) for name in names}
    return record


# ---- files

_SPREADS = ("accuracy", "best", "time_raw", "time_mean")
_MEDIANS = ("bytes_up", "bytes_down", "mean_staleness", "discards", "trips", "wall_seconds")


def rows(results: Mapping[str, Any]) -> list[Record]:
    """One flat row per method and world, for a spreadsheet."""
    found = []
    scale = (results["scale"] or {"scale": 1})["scale"]
    for world in results["worlds"]:
        for line in world["lines"]:
            row = {"world": world["name"], "method": line["label"], "kind": line["kind"], "scale": scale}
            row |= {"finished": line["finished"], "failed": line["failed"], "all": line["all"]}
            row["target"] = world["target"]
            for name in _SPREADS:
                row |= {f"{name}_{part}": line[name][part] for part in ("median", "low", "high")}
            row["reached"] = line["time_raw"]["count"]
            row |= {name: line[name]["median"] for name in _MEDIANS}
            against = line.get("against", {})
            row |= {f"versus_first_{part}": against.get(part) for part in ("difference", "p", "pairs")}
            paper = line["published"] or {}
            row |= {f"published_{part}": paper.get(part) for part in ("accuracy", "time")}
            found.append(row)
    return found


def write(results: Mapping[str, Any], folder: Path, stem: str = "comparison") -> tuple[Path, Path]:
    """Write ``stem.json`` and ``stem.csv`` into a folder, each as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    table = rows(results)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    files = folder / f"{stem}.json", folder / f"{stem}.csv"
    write_atomically(files[0], (json.dumps(results, indent=2) + "\n").encode())
    write_atomically(files[1], text.getvalue().encode())
    return files
