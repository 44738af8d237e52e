"""Write docs/results.md and its pictures from the runs under results/: ``python scripts/results.py``.

Every number comes from a run's metrics.jsonl and summary.json, counted as the protocols under results/ say. To bring
runs in, each as its settings, tests, world and summary only: ``python scripts/results.py --take FOLDER ... --cell
CELL``, with ``--suite NAME`` (or ``NAME/SETTING``) where they are not main runs.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from results_pictures import draw, draw_worlds
from results_study import (
    KINDS,
    PAGE,
    PICTURES,
    RESULTS,
    STUDIES,
    SUITE_SECONDS,
    VARIED,
    WORLDS,
    Runs,
    Study,
    columns,
    kind_of,
    marked,
    seconds,
    time_to,
)

from freshet.experiments.claims import BASELINES, CLAIMS, Claim, Outcome, verdict
from freshet.experiments.kept import Run, middle, outcome, read, shared, take, time_of, variants


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
    ]
    for method in mine:
        group = runs[method]
        each = ", ".join(f"{run.accuracy:.3f}" for run in group)
        stale = median(run.staleness or 0.0 for run in group)
        shas, reached = " ".join(f"`{run.sha[:8]}`" for run in group), seconds(time_of(group))
        mark = " (diverged)" if any(run.diverged is not None for run in group) else ""
        lines.append(
            f"| {marked(method)}{mark} | **{middle(group):.3f}** | {each} | {reached} "
            f"| {time_to(group, study.further)} | {stale:.1f} | {median(run.uploads for run in group):,.0f} "
            f"| {group[0].lr:.3g} | {shas} |"
        )
    if reference not in runs:
        return [*lines, ""]
    return [*lines, "", *verdicts(study, runs, mine, reference)]


def verdicts(study: Study, runs: Runs, methods: Sequence[str], reference: str) -> list[str]:
    """What the paper says of its method against each rival in this cell, and what these runs say."""
    lines = [
        f"| {reference} against | accuracy, paper | here | verdict | time to {study.target:.2f}, paper | here "
        "| verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    ours, published = runs[reference], study.cell.published
    words = {"win": "confirmed", "loss": "not confirmed", "tie": "not confirmed (tie)"}
    words |= {
        "open": "cannot be told (seeds disagree)",
        "few": "cannot be told (too few seeds)",
        "none": "cannot be told",
    }
    for rival in methods:
        if rival == reference:
            continue
        theirs, here = runs[rival], middle(ours) - middle(runs[rival])
        mine, printed = published[reference], published.get(rival)
        found = outcome(ours, theirs)
        faster, paper_time, speed = time_of(theirs) / time_of(ours), "–", "–"
        if printed is None:
            paper, said = "–", {"win": "ahead", "loss": "behind", "tie": "tie"}.get(found, "cannot be told")
        else:
            paper = f"{100 * (mine.accuracy - printed.accuracy):+.1f}"
            said = words[found] if mine.accuracy > printed.accuracy else f"paper: no lead; here: {found}"
            if mine.time and printed.time:
                paper_time = f"{printed.time / mine.time:.2f}x"
                found = outcome(ours, theirs, "time")
                speed = words[found] if printed.time > mine.time else f"paper: no lead; here: {found}"
        shown = "–" if np.isnan(faster) else "never / never" if np.isinf(time_of(ours)) else f"{faster:.2f}x"
        lines.append(f"| {marked(rival)} | {paper} | {100 * here:+.1f} | {said} | {paper_time} | {shown} | {speed} |")
    return [*lines, "", "Accuracies in points of a hundred. Times: how many times as long the rival takes.", ""]


def varied(study: Study, runs: Runs, suite: Path, reference: str) -> list[str]:
    """A suite of variants of one method, held against the main runs of it as they stood then."""
    if reference not in runs or not suite.is_dir():
        return [f"{study.name}: not run yet.", ""]
    usual = [run.until(SUITE_SECONDS) for run in runs[reference]]
    groups = {f"**{reference}**": usual} | variants(suite, runs[reference])
    lines = [
        f"{study.name}:",
        "",
        f"| | accuracy at {SUITE_SECONDS:,.0f} s | seeds | to {study.target:.2f} | {reference} is |",
    ]
    lines.append("|---|---|---|---|---|")
    for name, group in groups.items():
        each = ", ".join(f"{run.accuracy:.3f}" for run in group)
        said = "" if group is usual else judged(usual, group)
        lines.append(f"| {name} | {middle(group):.3f} | {each} | {seconds(time_of(group))} | {said} |")
    return [*lines, ""]


def judged(ours: Sequence[Run], theirs: Sequence[Run]) -> str:
    """The outcome in words with its size, on the seeds that both have."""
    mine, others = shared(ours, theirs)
    words = {"win": "ahead", "loss": "behind", "tie": "equal", "open": "not told apart"}
    words["few"] = f"{len(mine)} seed{'s' * (len(mine) > 1)}"
    return f"{words[outcome(mine, others)]}, {100 * (middle(mine) - middle(others)):+.1f}"


def worlds(study: Study, runs: Runs, suite: Path, usual: str) -> list[str]:
    """A suite of worlds: a column per setting, the main runs among them; median accuracy and time to the target."""
    found = columns(runs, suite, usual)
    methods = list(found.get(usual, ()))
    if not methods:
        return [f"### {suite.name}", "", "Not run yet.", ""]
    lines = [f"### {suite.name}", "", f"| | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for method in sorted(methods, key=lambda name: (kind_of(name), -middle(runs[name]))):
        cells = (
            f"{middle(group[method]):.3f}, {seconds(time_of(group[method]))}" if method in group else "–"
            for group in found.values()
        )
        lines.append(f"| {method} | {' | '.join(cells)} |")
    few = {name: max(map(len, group.values())) for name, group in found.items() if group}
    said = ", ".join(f"{name}: {count}" for name, count in few.items())
    return [*lines, "", f"Accuracy, time to {study.target:.2f}; medians. Seeds: {said}.", ""]


def groups_of(claim: Claim, study: Study, runs: Runs, suites: Path) -> list[Runs]:
    """The runs of a study that a claim speaks of, by name: one group for each of its settings."""
    if claim.suite == "table":
        return [runs]
    if claim.suite not in study.suites:
        return []
    short = {method: [run.until(SUITE_SECONDS) for run in group] for method, group in runs.items()}
    if claim.suite in VARIED:
        usual = runs.get(VARIED[claim.suite])
        return [short | (variants(suites / claim.suite, usual) if usual else {})]
    folders = [suites / claim.suite / name.replace(" ", "-", 1).replace("/", "-") for name in claim.settings]
    own = WORLDS[claim.suite]
    return [short if name == own else read(f) for name, f in zip(claim.settings, folders, strict=True)]


def compared(claim: Claim, study: Study, group: Runs) -> tuple[list[Outcome], list[str]]:
    """How a claim fares against each of its rivals in one group of runs, and by how much."""
    ours, rivals = group.get(claim.ours), claim.rivals
    if rivals == BASELINES:
        kind = kind_of(claim.ours)
        rivals = tuple(name for name in group if name in study.cell.published and kind_of(name) == kind)
    if ours is None:
        return ["none"], []
    rivals = tuple(rival for rival in sorted(rivals) if rival != claim.ours and shared(ours, group.get(rival, []))[0])
    if not rivals:
        return ["none"], []
    figures = []
    for rival in rivals:
        mine, theirs = shared(ours, group[rival])
        if claim.gain == "accuracy":
            figures.append(f"{100 * (middle(mine) / middle(theirs) - 1):+.1f} %")
        else:
            share = 1 - time_of(mine) / time_of(theirs)
            figures.append("never" if np.isnan(share) or np.isinf(share) else f"{100 * share:+.0f} %")
    return [outcome(ours, group[rival], claim.gain) for rival in rivals], figures


def answer(claim: Claim, found: Sequence[tuple[Study, Runs, Path]]) -> tuple[list[str], str]:
    """Our figures to a claim for each study, and the verdict over all of them."""
    outcomes: list[Outcome] = []
    figures: list[str] = []
    for study, runs, suites in found:
        pairs = [compared(claim, study, group) for group in groups_of(claim, study, runs, suites)]
        outcomes += [one for outcomes_here, _ in pairs for one in outcomes_here]
        figures.append("; ".join(", ".join(here) or "not run" for _, here in pairs) or "–")
    made: list[Outcome] = [one for one in outcomes if one != "none"]
    said = verdict(made)
    if said == "confirmed":
        return figures, said if made == outcomes else "confirmed where it was run"
    words = sorted({"too few seeds" if one == "few" else one for one in made})
    return figures, f"{said} ({', '.join(words)})" if made else "not run"


CLAIMS_HEAD = """## What the paper says, and what these runs say

Every number of the paper's evaluation. It speaks of twelve cells, or of other cells and longer runs than these; here it
is what was run at the scales above, and *confirmed* means: a win over every rival wherever it was run. One tie or loss
is enough for *not confirmed*; where seeds disagree (open) or are fewer than three, and nothing else speaks against it,
it cannot be told.
Percent of the rival's accuracy; percent of the rival's time to the paper's target saved; one figure per rival (of
several: in alphabetical order), a semicolon between settings.
"""


def claims(found: Sequence[tuple[Study, Runs, Path]]) -> list[str]:
    names = " | ".join(study.name for study, _, _ in found)
    lines = [CLAIMS_HEAD, f"| the paper | {names} | verdict |", "|---" * (len(found) + 2) + "|"]
    missing = []
    for claim in CLAIMS:
        figures, said = answer(claim, found)
        if said == "not run":
            missing.append(str(claim))
        else:
            lines.append(f"| {claim} | {' | '.join(figures)} | {said} |")
    return [*lines, "", *([f"Not run: {'; '.join(missing)}.", ""] if missing else [])]


SUITES_HEAD = """## Suites

Half as long as the main runs, with the settings that were tuned for those, as `results/SUITES.md` said before the first
of them.
"""


def section(study: Study, runs: Runs) -> list[str]:
    """The main runs of a study."""
    lines = [f"## {study.scale}", "", f"![accuracy over time](images/{study.picture})", ""]
    for kind in KINDS:
        lines += table(study, runs, kind)
    missing = [method for method in study.cell.published if method not in runs]
    return [*lines, f"Not run yet: {', '.join(missing)}.", ""] if missing else lines


def page(found: Sequence[tuple[Study, Runs, Path]]) -> str:
    """All of it: what was found by study, with the folder of its suites."""
    lines = [(RESULTS / "INTRO.md").read_text()]
    for study, runs, _ in found:
        lines += section(study, runs) if runs else []
    lines.append(SUITES_HEAD)
    for suite, reference in VARIED.items():
        lines += [f"### {suite}", ""]
        for study, runs, suites in found:
            if suite in study.suites:
                lines += varied(study, runs, suites / suite, reference)
    lines += ["![Accuracy in other worlds](images/results-worlds.png)", ""]
    for suite, usual in WORLDS.items():
        for study, runs, suites in found:
            if suite in study.suites:
                lines += worlds(study, runs, suites / suite, usual)
    lines += claims(found)
    return "\n".join([*lines, (RESULTS / "NOTES.md").read_text()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--take", nargs="+", type=Path, default=[])
    parser.add_argument("--cell", default=STUDIES[0].cell.name, choices=[study.cell.name for study in STUDIES])
    parser.add_argument("--suite", help="NAME or NAME/SETTING of what is brought in")
    arguments = parser.parse_args()
    folder = RESULTS / arguments.cell
    take(arguments.take, folder / "suites" / arguments.suite if arguments.suite else folder)
    found = [(study, read(study.folder), study.folder / "suites") for study in STUDIES]
    for study, runs, _ in found:
        if runs:
            draw(study, runs, PICTURES / study.picture)
    draw_worlds(*found[0], PICTURES / "results-worlds.png")
    PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
