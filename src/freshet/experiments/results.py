"""What came out of a grid: one line per method, with medians and spreads over the seeds that came to their end.

A run that crashed or is unfinished is listed with its reason and never averaged; one that diverged counts as it is.

The results of a grid as files: JSON with everything, CSV with one row per method and world.

What a grid's results are called and where they go: the same files, whoever ran it.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from freshet._version import __version__
from freshet.errors import ConfigError, RunError
from freshet.experiments.grid import Entry, Scenario, Job
from freshet.experiments.store import State, Store
from freshet.files import write_atomically
from freshet.methods import find
from freshet.paper.suites import published_numbers
from freshet.report.columns import DEVICES
from freshet.report.export import harmless
from freshet.report.groups import Group, headline, references, target_of, times_to
from freshet.report.log import Log
from freshet.report.palette import styles
from freshet.report.reading import RunData
from freshet.report.statistics import curve, over_seeds
from freshet.runs.reader import RunDirectory
from freshet.runs.records import ACCURACY, number

Record = dict[str, Any]


@dataclass(frozen=True)
class JobOutcome:
    """One run of the grid as its directory shows it now."""

    job: Job
    state: State
    error: str | None
    run: RunData | None


def read_outcome(job: Job, store: Store) -> JobOutcome:
    """Read an ended run's summary and metrics (its events are not needed); a damaged one counts as failed."""
    state = store.state(job.key)
    if state is not State.FINISHED:
        return JobOutcome(job, state, store.error(job.key) if state is State.FAILED else None, None)
    run = RunDirectory(store.directory(job.key))
    try:
        summary = run.summary()
        data = RunData(job.key, str(summary["status"]), run.config(), summary, run.metrics(), Log())
    except RunError as problem:
        return JobOutcome(job, State.FAILED, str(problem), None)
    return JobOutcome(job, state, None, data)


def document(
    jobs: Sequence[Job],
    store: Store,
    *,
    title: str,
    notes: Sequence[str] = (),
    scale: Record | None = None,
    look: str = "curves",
    named: str = "",
) -> Record:
    """All results of a grid as plain values: what ``comparison.json`` holds. ``named``: the references asked for."""
    outcomes = [read_outcome(job, store) for job in jobs]
    worlds = list(dict.fromkeys(job.scenario for job in jobs))
    made_by = sorted({str(o.run.summary.get("freshet")) for o in outcomes if o.run is not None})
    mixed = [f"these runs were made by different versions of freshet: {', '.join(made_by)}"] if len(made_by) > 1 else []
    return {
        "title": title,
        "look": look,
        "freshet": __version__,
        "scale": scale,
        "seeds": sorted({job.seed for job in jobs}),
        "notes": [*notes, *mixed],
        "worlds": [world_record(world, [o for o in outcomes if o.job.scenario == world], named) for world in worlds],
    }


def reference_indices(entries: Sequence[Entry], named: str) -> list[int]:
    """Where the references asked for are: one for all, or one for each kind."""
    wanted = [name.strip() for name in named.split(",") if name.strip()]
    labels = [entry.label for entry in entries]
    for name in wanted:
        if name not in labels:
            raise ConfigError("--reference", f"{name!r} is not in this comparison; choose from {', '.join(labels)}")
    places = [labels.index(name) for name in wanted]
    kinds = [find(entries[place].method)[0].about.kind for place in places]
    if len(set(kinds)) < len(kinds):
        raise ConfigError("--reference", f"takes one method, or one of each kind; {named!r} names two of one kind")
    return places


def world_record(world: Scenario, outcomes: Sequence[JobOutcome], named: str = "") -> Record:
    """The lines of one comparison, each held against the reference of its kind."""
    config = outcomes[0].job.config
    step = config.run.eval_every
    entries = list(dict.fromkeys(o.job.entry for o in outcomes))
    mine = [[o for o in outcomes if o.job.entry == entry] for entry in entries]
    groups = [
        Group(entry.title, [o.run for o in found if o.run is not None], style)
        for entry, found, style in zip(entries, mine, styles([entry.label for entry in entries]), strict=True)
    ]
    target = target_of([run for group in groups for run in group.runs])
    target = target if config.run.target is None else config.run.target
    kinds = [find(entry.method)[0].about.kind for entry in entries]
    held = references([entry.label for entry in entries], kinds, reference_indices(entries, named))
    tables = config.tables()
    metric = next((run.metric for group in groups for run in group.runs), ACCURACY)
    return {
        "name": world.name,
        "cell": world.cell.name if world.cell else None,
        "target": target,
        "metric": metric.name,
        "direction": metric.direction,
        "until": config.run.until,
        "eval_every": step,
        "references": [groups[place].label for place in dict.fromkeys(held) if place is not None],
        "shared": {name: tables[name] for name in ("data", "model", "fleet", "training")},
        "lines": [
            _line(entry, found, group, headline(group, target, step, None if place is None else groups[place]))
            for entry, found, group, place in zip(entries, mine, groups, held, strict=True)
        ],
    }


def _line(entry: Entry, outcomes: Sequence[JobOutcome], group: Group, numbers: Record) -> Record:
    method = find(entry.method)[0]
    runs = [o.run for o in outcomes if o.run is not None]
    config = outcomes[0].job.config
    return {
        "method": entry.method,
        "name": entry.label,
        "kind": method.about.kind,
        "marks": method.marks(),
        "options": config.tables()["method"],
        "lr": config.training.lr,
        "trigger": config.run.trigger,
        "style": group.style,
        **numbers,
        "finished": len(runs),
        "failed": sum(o.state is State.FAILED for o in outcomes),
        "all": len(outcomes),
        "bytes_fresh": asdict(over_seeds([fresh_bytes(run, outcomes[0].job.model_bytes) for run in runs])),
        "published": published_numbers(outcomes[0].job),
        "curve": curve(runs, config.run.eval_every),
        "runs": [_run(o, config.run.eval_every) for o in outcomes],
    }


def fresh_bytes(run: RunData, size: int) -> float | None:
    """Bytes of the fresh models that devices merged in mid-training: the price of the paper's idea."""
    merges, packed = number(run.summary.get("merges")), run.config.get("links", {}).get("down", "none") != "none"
    return None if merges is None or packed else merges * size


def _run(found: JobOutcome, step: float) -> Record:
    record: Record = {"seed": found.job.seed, "key": found.job.key, "state": str(found.state), "error": found.error}
    if found.run is not None:
        times = times_to(found.run, target_of([found.run]), step)
        record |= {"time_raw": times.raw, "time_mean": times.mean, "diverged": found.run.diverged}
        name = found.run.metric.name
        names = f"final_{name}", f"best_{name}", "trips", "wall_seconds", "weights_sha256"
        record |= {name: found.run.summary.get(name) for name in names}
    return record


_SPREADS = ("accuracy", "best", "time_raw", "time_mean")
_MEDIANS = (
    *DEVICES,
    "bytes_up",
    "bytes_down",
    "bytes_fresh",
    "mean_staleness",
    "discards",
    "rejected",
    "trips",
    "wall_seconds",
)


def rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One flat row per method and world, for a spreadsheet."""
    scale = (results["scale"] or {"scale": 1})["scale"]
    return [_row(world, line, scale) for world in results["worlds"] for line in world["lines"]]


def _row(world: Mapping[str, Any], line: Mapping[str, Any], scale: float) -> dict[str, Any]:
    row = {"world": world["name"], "method": line["label"], "kind": line["kind"], "scale": scale}
    row |= {"finished": line["finished"], "failed": line["failed"], "all": line["all"]}
    ends = [f"{each['time']:g}" for each in line["diverged"]]
    row |= {"diverged": len(ends), "diverged_at": " ".join(ends), "target": world["target"], "until": world["until"]}
    for name in _SPREADS:
        row |= {f"{name}_{part}": line[name][part] for part in ("median", "low", "high")}
    row["reached"] = line["time_raw"]["count"]
    row |= {name: line[name]["median"] for name in _MEDIANS}
    against = line.get("against", {})
    row["reference"] = against.get("reference")
    for name in ("raw", "mean"):
        ratio = against.get(f"time_{name}") or {}
        row |= {f"time_{name}_vs_reference": ratio.get("ratio"), f"time_{name}_bound": ratio.get("bound")}
    row |= {f"accuracy_vs_reference_{part}": against.get(part) for part in ("difference", "p", "pairs")}
    paper = line["published"] or {}
    return row | {f"published_{part}": paper.get(part) for part in ("accuracy", "time")}


def write(results: Mapping[str, Any], folder: Path, stem: str = "comparison") -> tuple[Path, Path]:
    """Write ``stem.json`` and ``stem.csv`` into a folder, each as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    table = rows(results)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {key: harmless(value) if isinstance(value, str) else value for key, value in row.items()} for row in table
    )
    files = folder / f"{stem}.json", folder / f"{stem}.csv"
    write_atomically(files[0], (json.dumps(results, indent=2) + "\n").encode())
    write_atomically(files[1], text.getvalue().encode())
    return files


@dataclass(frozen=True)
class Grid:
    """What is run and how its results are told."""

    jobs: Sequence[Job]
    store: Store
    title: str
    notes: Sequence[str]
    stem: str
    scale: dict[str, Any] | None = None
    look: str = "curves"
    reference: str = ""


def summarise(grid: Grid) -> tuple[dict[str, Any], list[Path]]:
    """The results as they are now, and the files they were written to: JSON, CSV and pictures."""
    from freshet.report.figures import draw

    found = document(
        grid.jobs,
        grid.store,
        title=grid.title,
        notes=[*grid.notes, *_stop_note(grid.jobs), *_other_runs_note(grid)],
        scale=grid.scale,
        look=grid.look,
        named=grid.reference,
    )
    folder = grid.store.folder
    return found, [*write(found, folder, grid.stem), *draw(found, folder, grid.stem)]


def _stop_note(jobs: Sequence[Job]) -> list[str]:
    """Runs that end at their target are not compared by what they would have become."""
    stops = any(job.config.run.stop_at_target for job in jobs)
    return ["runs end when they reach the target: the final figures are those of that moment"] if stops else []


def _other_runs_note(grid: Grid) -> list[str]:
    """Runs that an earlier command has left in the same folder are in no table, but a report of the folder has them."""
    mine, folder = {job.key for job in grid.jobs}, grid.store.folder
    others = [path for path in (folder / "runs").glob("*") if path.is_dir() and path.name not in mine]
    if not others:
        return []
    held = "another run, which is" if len(others) == 1 else f"{len(others)} other runs, which are"
    return [f"{folder} holds {held} not counted here; -o FOLDER keeps experiments apart"]
