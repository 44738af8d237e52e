"""The main runs of a study: a table of each kind, and the paper's method against every rival."""

from collections.abc import Sequence
from math import isinf
from statistics import median

from freshet.experiments.cells import Published
from freshet.experiments.findings.studies import KINDS, Runs, Study, kind_of, marked, seconds, time_to
from freshet.experiments.kept import Run, middle, outcome, time_of

#: What an outcome says of a lead that the paper has, and of a rival that it does not know.
WORDS = {
    "win": "confirmed",
    "loss": "not confirmed",
    "tie": "not confirmed (tie)",
    "open": "cannot be told (seeds disagree)",
    "few": "cannot be told (too few seeds)",
    "none": "cannot be told",
}
OWN_WORDS = {"win": "ahead", "loss": "behind", "tie": "tie"}


def section(study: Study, runs: Runs) -> list[str]:
    """The main runs of a study."""
    lines = [f"## {study.scale}", "", f"![accuracy over time](images/{study.picture})", ""]
    for kind in KINDS:
        lines += table(study, runs, kind)
    missing = [method for method in study.cell.published if method not in runs]
    return [*lines, f"Not run yet: {', '.join(missing)}.", ""] if missing else lines


def table(study: Study, runs: Runs, kind: str) -> list[str]:
    """The methods of one kind, the best first."""
    name, reference = KINDS[kind]
    mine = sorted((m for m in runs if kind_of(m) == kind), key=lambda method: -middle(runs[method]))
    lines = [
        f"### {name}",
        "",
        f"| method | accuracy | seeds 0, 1, 2 | to {study.target:.2f} | to {study.further:.2f} | stale | uploads "
        "| rate | models |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(study, method, runs[method]) for method in mine),
        "",
    ]
    return [*lines, *verdicts(study, runs, mine, reference)] if reference in runs else lines


def _row(study: Study, method: str, group: Sequence[Run]) -> str:
    each = ", ".join(f"{run.accuracy:.3f}" for run in group)
    stale = median(run.staleness or 0.0 for run in group)
    shas, reached = " ".join(f"`{run.sha[:8]}`" for run in group), seconds(time_of(group))
    mark = " (diverged)" if any(run.diverged is not None for run in group) else ""
    return (
        f"| {marked(method)}{mark} | **{middle(group):.3f}** | {each} | {reached} "
        f"| {time_to(group, study.further)} | {stale:.1f} | {median(run.uploads for run in group):,.0f} "
        f"| {group[0].lr:.3g} | {shas} |"
    )


def verdicts(study: Study, runs: Runs, methods: Sequence[str], reference: str) -> list[str]:
    """What the paper says of its method against each rival in this cell, and what these runs say."""
    lines = [
        f"| {reference} against | accuracy, paper | here | verdict | time to {study.target:.2f}, paper | here "
        "| verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    ours, published = runs[reference], study.cell.published
    for rival in methods:
        if rival == reference:
            continue
        theirs, mine, printed = runs[rival], published[reference], published.get(rival)
        paper, said = _accuracy(ours, theirs, mine, printed)
        paper_time, speed = _time(ours, theirs, mine, printed)
        here, faster = 100 * (middle(ours) - middle(theirs)), _faster(ours, theirs)
        lines.append(f"| {marked(rival)} | {paper} | {here:+.1f} | {said} | {paper_time} | {faster} | {speed} |")
    return [*lines, "", "Accuracies in points of a hundred. Times: how many times as long the rival takes.", ""]


def _accuracy(ours: Sequence[Run], theirs: Sequence[Run], mine: Published, printed: Published | None) -> list[str]:
    """The paper's lead in points, and the verdict on it."""
    found = outcome(ours, theirs)
    if printed is None:
        return ["–", OWN_WORDS.get(found, "cannot be told")]
    said = WORDS[found] if mine.accuracy > printed.accuracy else f"paper: no lead; here: {found}"
    return [f"{100 * (mine.accuracy - printed.accuracy):+.1f}", said]


def _time(ours: Sequence[Run], theirs: Sequence[Run], mine: Published, printed: Published | None) -> list[str]:
    """How many times as long the rival takes in the paper, and the verdict on it."""
    if printed is None or not mine.time or not printed.time:
        return ["–", "–"]
    found = outcome(ours, theirs, "time")
    said = WORDS[found] if printed.time > mine.time else f"paper: no lead; here: {found}"
    return [f"{printed.time / mine.time:.2f}x", said]


def _faster(ours: Sequence[Run], theirs: Sequence[Run]) -> str:
    """How many times as long the rival takes here."""
    mine, rival = time_of(ours), time_of(theirs)
    if isinf(mine):
        return "never / never" if isinf(rival) else "never here"
    if isinf(rival):
        return "rival never"
    return f"{rival / mine:.2f}x" if mine else "–"
