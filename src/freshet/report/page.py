"""The report page: one HTML file with everything that the browser needs.

The data are JSON inside a script element that is never executed, with every ``<`` written as ``\\u003c``. The page
inserts texts as text. A content security policy lists the hashes of the page's scripts: nothing else can run, and the
page can make no request.
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from freshet._version import __version__
from freshet.errors import ConfigError, RunError
from freshet.methods import builtin_about
from freshet.report import plots
from freshet.report.closeup import closeup
from freshet.report.columns import DEVICES, best_median, by_result, choose_columns, format_target, without_times
from freshet.report.experiment import Experiment, read_experiments, run_order
from freshet.report.groups import (
    Comparable,
    Group,
    assign_references,
    common_step,
    comparables,
    final_value,
    group_runs,
    headline,
    metric_of_groups,
    resolve_target,
    settings_table,
)
from freshet.report.palette import THEMES, dash, variables
from freshet.report.reading import Places, Record, RunData, clock_of, find, read_all
from freshet.report.trips import MAX_TRIPS, count_entries, trips_of
from freshet.runs.reader import OnBytes, ignore_bytes
from freshet.runs.records import ACCURACY, Maybe, Metric, number

#: Close-ups are embedded up to this many trips in total, one run of each group first (see ``count_entries``).
MAX_CLOSEUP_TRIPS = 60_000
#: Passes over each log: one to read it, then one each for trips, weights and controls.
READS_PER_LOG = 4
#: The drawing library, packed: the page unpacks it. It is plotly.js's own bundle of plain charts (MIT).
PLOTLY = "plotly-cartesian.min.js.gz"
SCRIPTS = ("library.js", "theme.js", "words.js", "timeline.js", "experiments.js", "results.js", "page.js")
_COLUMNS = (
    "accuracy", "best", "time_raw", "time_mean", "mean_staleness", "uploads", "discards", "rejected",
    "lost", "bytes_up", "bytes_down", "wall_seconds",
)  # fmt: skip


def report(
    directories: Places,
    out: str | Path,
    target: float | None = None,
    results: Sequence[Path] = (),
    on_bytes: OnBytes = ignore_bytes,
) -> Path:
    """Write the report of runs, or of folders of runs with the results of compare, tune and paper, as one HTML file.

    ``results`` are further files of results.
    """
    found = find(directories)
    files = [*found.results, *results]
    experiments, notes = read_experiments(files)
    order = run_order(files)  # the folders of a grid's runs are named by hashes, which have no order
    runs = sorted(found.runs, key=lambda path: order.get(path.name, len(order)))
    content = document(read_all(runs, on_bytes), target, experiments)
    page = render(content | {"notes": content["notes"] + notes})
    path = Path(out)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--out", f"{path} cannot be written ({error.strerror or error})") from None
    return path


# ---- the data


def document(runs: Sequence[RunData], target: float | None = None, experiments: Sequence[Experiment] = ()) -> Record:
    """The content of the page as plain values."""
    if not runs and not experiments:
        raise RunError("there is no run to report")
    found = comparables(runs)
    groups = [group_runs(world.runs) for world in found]
    targets = [resolve_target(world.runs, target) for world in found]
    return {
        "freshet": __version__,
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "subject": subject(runs, groups),
        "worlds": [
            _world(world.name, *each) for world, each in zip(found, zip(groups, targets, strict=True), strict=True)
        ],
        "runs": [_run(run, groups) for run in runs],
        "notes": [note for world, goal in zip(found, targets, strict=True) for note in notes(world.runs, goal)],
        "experiments": [each.content for each in experiments],
        "settings": _settings(found, groups),
        "closeups": closeups(runs, [group for each in groups for group in each]),
    }


def _world(name: str, groups: Sequence[Group], target: Maybe) -> Record:
    """Table and curves of runs that are ranked with each other."""
    runs = [run for group in groups for run in group.runs]
    step, metric = common_step(runs), metric_of_groups(groups)
    held = assign_references([group.runs[0].method for group in groups], [group.kind for group in groups])
    lines = [
        headline(group, target, step, None if other is None else groups[other]) | {"group": place, "style": group.style}
        for place, (group, other) in enumerate(zip(groups, held, strict=True))
    ]
    lines = by_result(lines, lambda line: line["accuracy"]["median"], metric)
    counted = [line for line in lines if line["runs"]]
    curves = {axis: plots.accuracy(groups, target, axis) for axis in plots.AXES}
    losses = {axis: plots.loss(groups, axis) for axis in plots.AXES}
    return {
        "name": name,
        "target": target,
        "groups": [{"label": group.label, "style": group.style, "dash": dash(group.style)} for group in groups],
        "lines": lines,
        "metric": metric._asdict(),
        "clock": clock_of(runs),
        "columns": table_columns(counted, without_times(_COLUMNS, target), metric),
        "devices": table_columns(counted, DEVICES),
        "accuracy": {axis: figure for axis, figure in curves.items() if figure is not None},
        "loss": {axis: figure for axis, figure in losses.items() if figure is not None},
        "time_to_target": plots.time_to_target(counted, clock_of(runs)),
        "staleness": plots.staleness(groups),
        "broken": any(not run.finished for group in groups for run in group.runs),
    }


def _settings(found: Sequence[Comparable], groups: Sequence[Sequence[Group]]) -> Record:
    """The settings of all groups. Labels name the comparable as well if there are several."""
    several = len(found) > 1
    labels = [
        f"{world.name}: {group.label}" if several else group.label
        for world, members in zip(found, groups, strict=True)
        for group in members
    ]
    return settings_table([group for members in groups for group in members]) | {"labels": labels}


def table_columns(lines: Sequence[Record], keys: Sequence[str], metric: Metric = ACCURACY) -> list[Record]:
    """The columns of a results table, each with its best median."""
    found = choose_columns(keys, lines, metric)
    return [{"key": c.key, "title": c.title, "kind": c.kind, "best": best_median(c, lines)} for c in found]


def subject(runs: Sequence[RunData], groups: Sequence[Sequence[Group]]) -> Record:
    """What the runs are about, for the head of the page."""
    data = dict.fromkeys(str(run.config.get("data", {}).get("name", "unknown data")) for run in runs)
    models = dict.fromkeys(str(run.config.get("model", {}).get("name", "unknown model")) for run in runs)
    return {
        "methods": len({run.method for run in runs}),
        "configurations": sum(len(members) for members in groups),
        "runs": len(runs),
        "finished": sum(run.finished for run in runs),
        "data": list(data),
        "models": list(models),
        "devices": sorted({run.devices for run in runs}),
        "end": max((run.end for run in runs), default=0.0),
        "clock": clock_of(runs),
    }


def _run(run: RunData, groups: Sequence[Sequence[Group]]) -> Record:
    world, place = next(
        (world, index)
        for world, members in enumerate(groups)
        for index, group in enumerate(members)
        if any(run is member for member in group.runs)
    )
    return {
        "name": run.name,
        "method": run.method,
        "label": groups[world][place].label,
        "world": world,
        "group": place,
        "seed": run.seed,
        "status": run.status,
        "finished": run.finished,
        "diverged": run.diverged_at,
        "end": run.end,
        "clock": clock_of([run]),
        "until": run.setting("run", "until"),
        "accuracy": final_value(run),
        "metric": run.metric.name,
        "uploads": number(run.summary.get("uploads")) or run.events.kinds["upload"],
        "notes": run.notes,
    }


def notes(runs: Sequence[RunData], target: Maybe) -> list[str]:
    """What to know before comparing the runs."""
    found = [f"{run.name}: {note}." for run in runs for note in run.notes]
    targets = {t for run in runs if (t := run.setting("run", "target")) is not None}
    if target is not None and targets - {target}:
        metric = runs[0].metric
        asked = ", ".join(format_target(each, metric) for each in sorted(targets))
        against = format_target(target, metric)
        found.append(f"The runs were made with other targets ({asked}); here all are measured against {against}.")
    found += [_divergence_note(run) for run in runs if run.diverged_at is not None]
    return found + _remarks(runs)


def _divergence_note(run: RunData) -> str:
    counted = "its last numbers enter the medians" if run.finished else "it has not ended"
    return f"{run.name}: the model diverged at {run.diverged_at:g} s; {counted}."


def _remarks(runs: Sequence[RunData]) -> list[str]:
    """Footnotes of the built-in methods among the runs. Other methods are never imported."""
    found = {about.name: about for run in runs if (about := builtin_about(run.method)) is not None}
    return [f"{name} [{mark}]: {text}." for name, about in found.items() for mark, text in about.marks().items()]


def closeups(runs: Sequence[RunData], groups: Sequence[Group]) -> list[Record]:
    """Timelines and figures of single runs, one run of each group first, up to ``MAX_CLOSEUP_TRIPS`` trips."""
    firsts = [id((group.ended_runs or group.runs)[0]) for group in groups]
    order = sorted(range(len(runs)), key=lambda place: (id(runs[place]) not in firsts, place))
    found: dict[int, Record] = {}
    budget = MAX_CLOSEUP_TRIPS
    for place in order:
        trips = trips_of(runs[place])
        cost = min(count_entries(trips), MAX_TRIPS)
        if found and cost > budget:
            continue
        budget -= cost
        found[place] = {"run": place, **closeup(runs[place], trips)}
    return [found[place] for place in sorted(found)]


# ---- the file


def render(data: Record | None) -> str:
    """The page with its data embedded. Without data the page asks its server for them (``freshet watch``)."""
    packed = _bytes(PLOTLY)
    scripts = [_text(name) for name in SCRIPTS]
    for script in scripts:
        if "</script" in script.lower():
            raise ValueError("a script of the page contains a closing script tag")
    live = data is None
    return Template(_text("page.html")).substitute(
        policy=policy([gzip.decompress(packed).decode(), *scripts], live),
        plotly=base64.b64encode(packed).decode(),
        style=f"{variables()}\n{_text('page.css')}",
        palette=embed_json(THEMES),
        data=embed_json(data),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
        mode="live" if live else "still",
    )


def policy(scripts: Sequence[str], live: bool) -> str:
    """The content security policy: run the page's scripts, draw, and (live) ask the page's server."""
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def embed_json(data: Any) -> str:
    """JSON that is safe inside a script element, whatever texts it contains."""
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        plain = plain.replace(character, f"\\u{ord(character):04x}")
    return plain


def _text(name: str) -> str:
    return _bytes(name).decode()


def _bytes(name: str) -> bytes:
    return (files("freshet.report") / "assets" / name).read_bytes()
