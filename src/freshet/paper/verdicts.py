"""What these runs answer to every sentence with a number of the paper's evaluation."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from freshet.paper.archive import ArchivedRun, median_accuracy, outcome, read, common_seeds, median_time, variants
from freshet.paper.claims import BASELINES, CLAIMS, Claim, Outcome, verdict
from freshet.paper.studies import SUITE_SECONDS, VARIED, WORLDS, StudyRuns, Runs, Study, kind_of

HEAD = """## What the paper says, and what these runs say

Every number of the paper's evaluation. It speaks of twelve cells, or of other cells and longer runs than these; here it
is what was run at the scales above, and *confirmed* means: a win over every rival wherever it was run, large or small
(the figures are beside it). One tie or loss is enough for *not confirmed*; where seeds disagree (open) or are fewer
than three, and nothing else speaks against it, it cannot be told.
Percent of the rival's accuracy; percent of the rival's time to the paper's target saved; one figure per rival (of
several: in alphabetical order), a semicolon between settings.
"""


def section(found: Sequence[StudyRuns]) -> list[str]:
    """A row for each claim that can be answered; the others are named."""
    names = " | ".join(study.name for study, _, _ in found)
    lines = [HEAD, f"| the paper | {names} | verdict |", "|---" * (len(found) + 2) + "|"]
    missing = []
    for claim in CLAIMS:
        figures, said = answer(claim, found)
        if said == "not run":
            missing.append(str(claim))
        else:
            lines.append(f"| {claim} | {' | '.join(figures)} | {said} |")
    return [*lines, "", *([f"Not run: {'; '.join(missing)}.", ""] if missing else [])]


def answer(claim: Claim, found: Sequence[StudyRuns]) -> tuple[list[str], str]:
    """Our figures to a claim for each study, and the verdict over all of them."""
    outcomes: list[Outcome] = []
    figures: list[str] = []
    for study, runs, suites in found:
        pairs = [compare_with_rivals(claim, study, group) for group in groups_of(claim, study, runs, suites)]
        outcomes += [one for outcomes_here, _ in pairs for one in outcomes_here]
        figures.append("; ".join(", ".join(here) or "not run" for _, here in pairs) or "–")
    made: list[Outcome] = [one for one in outcomes if one != "none"]
    said = verdict(made)
    if said == "confirmed":
        return figures, said if made == outcomes else "confirmed where it was run"
    words = sorted({"too few seeds" if one == "few" else one for one in made})
    return figures, f"{said} ({', '.join(words)})" if made else "not run"


def groups_of(claim: Claim, study: Study, runs: Runs, suites: Path) -> list[Runs]:
    """The runs of a study that a claim speaks of, by name: one group for each of its settings."""
    if claim.suite == "table":
        return [runs]
    if claim.suite not in study.suites:
        return []
    short = {method: [run.truncate(SUITE_SECONDS) for run in group] for method, group in runs.items()}
    if claim.suite in VARIED:
        usual = runs.get(VARIED[claim.suite])
        return [short | (variants(suites / claim.suite, usual) if usual else {})]
    folders = [suites / claim.suite / name.replace(" ", "-", 1).replace("/", "-") for name in claim.settings]
    own = WORLDS[claim.suite]
    return [short if name == own else read(f) for name, f in zip(claim.settings, folders, strict=True)]


def compare_with_rivals(claim: Claim, study: Study, group: Runs) -> tuple[list[Outcome], list[str]]:
    """How a claim fares against each of its rivals in one group of runs, and by how much."""
    ours, rivals = group.get(claim.ours), claim.rivals
    if rivals == BASELINES:
        kind = kind_of(claim.ours)
        rivals = tuple(name for name in group if name in study.cell.published and kind_of(name) == kind)
    if ours is None:
        return ["none"], []
    rivals = tuple(rival for rival in sorted(rivals) if rival != claim.ours and common_seeds(ours, group.get(rival, []))[0])
    if not rivals:
        return ["none"], []
    figures = [_figure(claim, *common_seeds(ours, group[rival])) for rival in rivals]
    return [outcome(ours, group[rival], claim.gain) for rival in rivals], figures


def _figure(claim: Claim, mine: Sequence[ArchivedRun], theirs: Sequence[ArchivedRun]) -> str:
    """By how much, in percent of the rival's accuracy or time."""
    if claim.gain == "accuracy":
        return f"{100 * (median_accuracy(mine) / median_accuracy(theirs) - 1):+.1f} %" if median_accuracy(theirs) else "–"
    own, rival = median_time(mine), median_time(theirs)
    share = 1 - own / rival if rival else float("nan")
    return f"{100 * share:+.0f} %" if isfinite(share) else "never"
