"""The results of a grid: one line per method, with medians and spreads over the seeds that ended.

A crashed or unfinished run is listed with its reason and never averaged. A run that diverged counts. The files are JSON
with everything, CSV with one row per method and scenario, and pictures.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from freshet._version import __version__
from freshet.errors import ConfigError, RunError
from freshet.experiments.grid import Entry, Job, Scenario
from freshet.experiments.store import State, Store
from freshet.files import write_atomically
from freshet.methods import class_and_preset
from freshet.report.columns import DEVICES
from freshet.report.export import neutralise
from freshet.report.groups import Group, assign_references, headline, target_of, times_to
from freshet.report.palette import styles
from freshet.report.reading import Log, RunData
from freshet.report.statistics import curve, over_seeds
from freshet.runs.reader import RunDirectory
from freshet.runs.records import ACCURACY, number

Record = dict[str, Any]


@dataclass(frozen=True)
class JobOutcome:
    """One run of the grid in its current state."""

    job: Job
    state: State
    error: str | None
    run: RunData | None


def read_outcome(job: Job, store: Store) -> JobOutcome:
    """Read the summary and the metrics of a run that ended, not its events. A damaged run counts as failed."""
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
    reference: str = "",
    published: Mapping[str, Record] | None = None,
) -> Record:
    """All results of a grid as plain values: the content of ``comparison.json``.

    ``reference`` names the methods that the others are compared with, ``published`` holds printed numbers by run key.
    """
    outcomes = [read_outcome(job, store) for job in jobs]
    scenarios = list(dict.fromkeys(job.scenario for job in jobs))
    made_by = sorted({str(o.run.summary.get("freshet")) for o in outcomes if o.run is not None})
    mixed = [f"these runs were made by different versions of freshet: {', '.join(made_by)}"] if len(made_by) > 1 else []
    return {
        "title": title,
        "look": look,
        "freshet": __version__,
        "scale": scale,
        "seeds": sorted({job.seed for job in jobs}),
        "notes": [*notes, *mixed],
        "worlds": [
            scenario_record(scenario, [o for o in outcomes if o.job.scenario == scenario], reference, published or {})
            for scenario in scenarios
        ],
    }


def reference_indices(entries: Sequence[Entry], reference: str) -> list[int]:
    """Positions of the named references among the entries: one for all, or one for each kind."""
    wanted = [name.strip() for name in reference.split(",") if name.strip()]
    labels = [entry.label for entry in entries]
    for name in wanted:
        if name not in labels:
            raise ConfigError("--reference", f"{name!r} is not in this comparison; choose from {', '.join(labels)}")
    places = [labels.index(name) for name in wanted]
    kinds = [class_and_preset(entries[place].method)[0].about.kind for place in places]
    if len(set(kinds)) < len(kinds):
        raise ConfigError("--reference", f"takes one method, or one of each kind; {reference!r} names two of one kind")
    return places


def scenario_record(
    scenario: Scenario, outcomes: Sequence[JobOutcome], reference: str, published: Mapping[str, Record]
) -> Record:
    """The lines of one comparison, each with its distance to the reference of its kind."""
    config = outcomes[0].job.config
    step = config.run.eval_every
    entries = list(dict.fromkeys(o.job.entry for o in outcomes))
    by_entry = [[o for o in outcomes if o.job.entry == entry] for entry in entries]
    groups = [
        Group(entry.title, [o.run for o in found if o.run is not None], style)
        for entry, found, style in zip(entries, by_entry, styles([entry.label for entry in entries]), strict=True)
    ]
    target = target_of([run for group in groups for run in group.runs])
    target = target if config.run.target is None else config.run.target
    kinds = [class_and_preset(entry.method)[0].about.kind for entry in entries]
    against = assign_references([entry.label for entry in entries], kinds, reference_indices(entries, reference))
    tables = config.tables()
    metric = next((run.metric for group in groups for run in group.runs), ACCURACY)
    return {
        "name": scenario.name,
        "cell": scenario.cell,
        "target": target,
        "metric": metric.name,
        "direction": metric.direction,
        "until": config.run.until,
        "eval_every": step,
        "references": [groups[index].label for index in dict.fromkeys(against) if index is not None],
        "shared": {name: tables[name] for name in ("data", "model", "fleet", "training")},
        "lines": [
            _line(
                entry,
                found,
                group,
                headline(group, target, step, None if index is None else groups[index]),
                published.get(found[0].job.key),
            )
            for entry, found, group, index in zip(entries, by_entry, groups, against, strict=True)
        ],
    }


def _line(
    entry: Entry, outcomes: Sequence[JobOutcome], group: Group, numbers: Record, published: Record | None
) -> Record:
    method = class_and_preset(entry.method)[0]
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
        "published": published,
        "curve": curve(runs, config.run.eval_every),
        "runs": [_run(o, config.run.eval_every) for o in outcomes],
    }


def fresh_bytes(run: RunData, size: int) -> float | None:
    """Bytes of the fresh models that devices merged during training; None if the downlink is compressed.

    If the server pushes, all pushed models count, also those that come too late for a merge.
    """
    sent = number(run.summary.get("pushes", run.summary.get("merges")))
    links = run.config.get("links", {})
    packed = links.get("down", "none") != "none" or links.get("fresh", "down") != "down"
    return None if sent is None or packed else sent * size


def _run(found: JobOutcome, step: float) -> Record:
    record: Record = {"seed": found.job.seed, "key": found.job.key, "state": str(found.state), "error": found.error}
    if found.run is not None:
        times = times_to(found.run, target_of([found.run]), step)
        record |= {"time_raw": times.raw, "time_mean": times.mean, "diverged": found.run.diverged_at}
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
    """One flat row per method and scenario, for a spreadsheet."""
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
    """Write ``stem.json`` and ``stem.csv`` into a folder, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    table = rows(results)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {key: neutralise(value) if isinstance(value, str) else value for key, value in row.items()} for row in table
    )
    files = folder / f"{stem}.json", folder / f"{stem}.csv"
    write_atomically(files[0], (json.dumps(results, indent=2) + "\n").encode())
    write_atomically(files[1], text.getvalue().encode())
    return files


@dataclass(frozen=True)
class Grid:
    """The runs of a grid, where they are stored, and what is written about them."""

    jobs: Sequence[Job]
    store: Store
    title: str
    notes: Sequence[str]
    stem: str
    scale: dict[str, Any] | None = None
    look: str = "curves"
    reference: str = ""
    #: Printed numbers by run key, shown beside those of the run.
    published: Mapping[str, Record] = field(default_factory=dict)


def summarise(grid: Grid) -> tuple[dict[str, Any], list[Path]]:
    """Write the current results as JSON, CSV and pictures; return them and the files."""
    from freshet.report.figures import draw

    found = document(
        grid.jobs,
        grid.store,
        title=grid.title,
        notes=[*grid.notes, *_stop_note(grid.jobs), *_other_runs_note(grid)],
        scale=grid.scale,
        look=grid.look,
        reference=grid.reference,
        published=grid.published,
    )
    folder = grid.store.folder
    return found, [*write(found, folder, grid.stem), *draw(found, folder, grid.stem)]


def _stop_note(jobs: Sequence[Job]) -> list[str]:
    """A note if runs stop at their target, or when they get no better."""
    stops = any(job.config.run.stop_at_target for job in jobs)
    notes = ["runs end when they reach the target: the final figures are those of that moment"] if stops else []
    patience = sorted({job.config.run.patience for job in jobs} - {0})
    tests = " or ".join(map(str, patience))
    return [*notes, *([f"runs end after {tests} tests in a row that are no better"] if patience else [])]


def _other_runs_note(grid: Grid) -> list[str]:
    """A note if an earlier command left other runs in the folder: a report shows them, this table does not."""
    mine, folder = {job.key for job in grid.jobs}, grid.store.folder
    others = [path for path in (folder / "runs").glob("*") if path.is_dir() and path.name not in mine]
    if not others:
        return []
    held = "another run, which is" if len(others) == 1 else f"{len(others)} other runs, which are"
    return [f"{folder} holds {held} not counted here; -o FOLDER keeps experiments apart"]
