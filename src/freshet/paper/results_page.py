"""The main runs of a study: a table of each kind, and the paper's method against every rival.

The suites of a study: variants of one method, and other worlds.

The page of results, from the folder of kept runs: its words, tables and pictures.
"""

from collections.abc import Mapping, Sequence
from math import isinf
from pathlib import Path
from statistics import median

from freshet.errors import ConfigError, RunError
from freshet.files import read_regular, reason, write_atomically, writing
from freshet.paper import other_cells, verdicts
from freshet.paper.archive import ArchivedRun, median_accuracy, outcome, common_seeds, median_time, variants
from freshet.paper.cells import Published
from freshet.paper.pictures import draw_study, draw_worlds
from freshet.paper.studies import (
    KINDS,
    STUDIES,
    SUITE_SECONDS,
    VARIED,
    WORLDS,
    StudyRuns,
    Runs,
    Study,
    suite_columns,
    kind_of,
    name_with_marks,
    seconds,
    time_to,
)

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


def main_section(study: Study, runs: Runs) -> list[str]:
    """The main runs of a study."""
    lines = [f"## {study.scale}", "", f"![accuracy over time](images/{study.picture})", ""]
    for kind in KINDS:
        lines += main_table(study, runs, kind)
    missing = [method for method in study.cell.published if method not in runs]
    return [*lines, f"Not run yet: {', '.join(missing)}.", ""] if missing else lines


def main_table(study: Study, runs: Runs, kind: str) -> list[str]:
    """The methods of one kind, the best first."""
    name, reference = KINDS[kind]
    mine = sorted((m for m in runs if kind_of(m) == kind), key=lambda method: -median_accuracy(runs[method]))
    lines = [
        f"### {name}",
        "",
        f"| method | accuracy | seeds 0, 1, 2 | to {study.target:.2f} | to {study.further:.2f} | stale | uploads "
        "| rate | models |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(study, method, runs[method]) for method in mine),
        "",
    ]
    return [*lines, *rival_verdicts(study, runs, mine, reference)] if reference in runs else lines


def _row(study: Study, method: str, group: Sequence[ArchivedRun]) -> str:
    each = ", ".join(f"{run.accuracy:.3f}" for run in group)
    stale = median(run.staleness or 0.0 for run in group)
    shas, reached = " ".join(f"`{run.sha[:8]}`" for run in group), seconds(median_time(group))
    mark = " (diverged)" if any(run.diverged is not None for run in group) else ""
    return (
        f"| {name_with_marks(method)}{mark} | **{median_accuracy(group):.3f}** | {each} | {reached} "
        f"| {time_to(group, study.further)} | {stale:.1f} | {median(run.uploads for run in group):,.0f} "
        f"| {group[0].lr:.3g} | {shas} |"
    )


def rival_verdicts(study: Study, runs: Runs, methods: Sequence[str], reference: str) -> list[str]:
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
        here, faster = 100 * (median_accuracy(ours) - median_accuracy(theirs)), _faster(ours, theirs)
        lines.append(f"| {name_with_marks(rival)} | {paper} | {here:+.1f} | {said} | {paper_time} | {faster} | {speed} |")
    return [*lines, "", "Accuracies in points of a hundred. Times: how many times as long the rival takes.", ""]


def _accuracy(
    ours: Sequence[ArchivedRun], theirs: Sequence[ArchivedRun], mine: Published, printed: Published | None
) -> list[str]:
    """The paper's lead in points, and the verdict on it."""
    found = outcome(ours, theirs)
    if printed is None:
        return ["–", OWN_WORDS.get(found, "cannot be told")]
    said = WORDS[found] if mine.accuracy > printed.accuracy else f"paper: no lead; here: {found}"
    return [f"{100 * (mine.accuracy - printed.accuracy):+.1f}", said]


def _time(
    ours: Sequence[ArchivedRun], theirs: Sequence[ArchivedRun], mine: Published, printed: Published | None
) -> list[str]:
    """How many times as long the rival takes in the paper, and the verdict on it."""
    if printed is None or not mine.time or not printed.time:
        return ["–", "–"]
    found = outcome(ours, theirs, "time")
    said = WORDS[found] if printed.time > mine.time else f"paper: no lead; here: {found}"
    return [f"{printed.time / mine.time:.2f}x", said]


def _faster(ours: Sequence[ArchivedRun], theirs: Sequence[ArchivedRun]) -> str:
    """How many times as long the rival takes here."""
    mine, rival = median_time(ours), median_time(theirs)
    if isinf(mine):
        return "never / never" if isinf(rival) else "never here"
    if isinf(rival):
        return "rival never"
    return f"{rival / mine:.2f}x" if mine else "–"


HEAD = """## Suites

Half as long as the main runs, with the settings that were tuned for those, as `results/SUITES.md` said before the first
of them. In the ablation `fedasmu-da` has no learned weights, `fedasmu-fa` no fresh models, `fedasmu-0` neither; so
`fedasmu-fa` is also the slot *never*.
"""


def suites_section(found: Sequence[StudyRuns], picture: str) -> list[str]:
    """Every suite of every study, with the picture of worlds between."""
    lines = [HEAD]
    for suite, reference in VARIED.items():
        lines += [f"### {suite}", ""]
        for study, runs, suites in found:
            if suite in study.suites:
                lines += variants_table(study, runs, suites / suite, reference)
    lines += [f"![Accuracy in other worlds](images/{picture})", ""]
    for suite, usual in WORLDS.items():
        for study, runs, suites in found:
            if suite in study.suites:
                lines += worlds_table(study, runs, suites / suite, usual)
    return lines


def variants_table(study: Study, runs: Runs, suite: Path, reference: str) -> list[str]:
    """A suite of variants of one method, held against the main runs of it as they stood then."""
    if reference not in runs or not suite.is_dir():
        return [f"{study.name}: not run yet.", ""]
    usual = [run.truncate(SUITE_SECONDS) for run in runs[reference]]
    groups = {f"**{reference}**": usual} | variants(suite, runs[reference])
    lines = [
        f"{study.name}:",
        "",
        f"| | accuracy at {SUITE_SECONDS:,.0f} s | seeds | to {study.target:.2f} | {reference} is |",
        "|---|---|---|---|---|",
    ]
    for name, group in groups.items():
        each = ", ".join(f"{run.accuracy:.3f}" for run in group)
        said = "" if group is usual else outcome_text(usual, group)
        lines.append(f"| {name} | {median_accuracy(group):.3f} | {each} | {seconds(median_time(group))} | {said} |")
    return [*lines, ""]


def outcome_text(ours: Sequence[ArchivedRun], theirs: Sequence[ArchivedRun]) -> str:
    """The outcome in words with its size, on the seeds that both have."""
    mine, others = common_seeds(ours, theirs)
    if not mine:
        return "no seed in common"
    words = {"win": "ahead", "loss": "behind", "tie": "equal", "open": "not told apart"}
    words["few"] = f"{len(mine)} seed{'s' * (len(mine) > 1)}"
    return f"{words[outcome(mine, others)]}, {100 * (median_accuracy(mine) - median_accuracy(others)):+.1f}"


def worlds_table(study: Study, runs: Runs, suite: Path, usual: str) -> list[str]:
    """A suite of worlds: a column per setting, the main runs among them; median accuracy and time to the target."""
    found = suite_columns(runs, suite, usual)
    methods = list(found.get(usual, ()))
    if not methods:
        return [f"### {suite.name}", "", "Not run yet.", ""]
    lines = [f"### {suite.name}", "", f"| | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for method in sorted(methods, key=lambda name: (kind_of(name), -median_accuracy(runs[name]))):
        cells = (
            f"{median_accuracy(group[method]):.3f}, {seconds(median_time(group[method]))}" if group.get(method) else "–"
            for group in found.values()
        )
        lines.append(f"| {method} | {' | '.join(cells)} |")
    few = {name: max(map(len, group.values())) for name, group in found.items() if group}
    said = ", ".join(f"{name}: {count}" for name, count in few.items())
    return [*lines, "", f"Accuracy, time to {study.target:.2f}; medians. Seeds: {said}.", ""]


WORLDS_PICTURE = "results-worlds.png"
#: The words before and after the tables, beside the runs; without the first, the page begins like this.
INTRO, NOTES = "INTRO.md", "NOTES.md"
PLAIN_INTRO = "# Results\n\nMade by `freshet paper results` from runs that were kept.\n"


def write(results: Path, page: Path) -> list[Path]:
    """Write the page of a folder of kept runs, with pictures in images/ beside it; returns all files."""
    if not results.is_dir():
        raise ConfigError("--out", f"there is no folder {results}; name the one with the kept runs")
    found = [StudyRuns.read(study, results) for study in STUDIES]
    cells = other_cells.read_others(results)
    if not cells and not any(each.runs for each in found):
        raise RunError(f"{results} holds no runs; bring some in with --take FOLDER --cell CELL")
    intro, notes = _words(results / INTRO, PLAIN_INTRO), _words(results / NOTES, "")
    text, pictures = text_of(found, cells, intro, notes), page.parent / "images"
    files = [draw_study(each.study, each.runs, pictures / each.study.picture) for each in found if each.runs]
    files += [draw_worlds(found[0], pictures / WORLDS_PICTURE)] if any(each.runs for each in found) else []
    with writing(page, "choose another place with --page"):
        page.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(page, text.encode())
    return [page, *files]


def text_of(found: Sequence[StudyRuns], cells: Mapping[str, Runs], intro: str = PLAIN_INTRO, notes: str = "") -> str:
    """The page: the main runs by study, the other cells, suites, and what the paper says to it all."""
    lines, main = [intro], any(each.runs for each in found)
    for study, runs, _ in found:
        lines += main_section(study, runs) if runs else []
    lines += other_cells.section(cells)
    if main:
        lines += [*suites_section(found, WORLDS_PICTURE), *verdicts.section(found)]
    return "\n".join([*lines, notes])


def _words(path: Path, otherwise: str) -> str:
    """A text beside the runs, if it is there."""
    if not path.exists():
        return otherwise
    try:
        return read_regular(path).decode()
    except OSError as error:
        raise RunError(f"{path} cannot be read ({reason(error)})") from None
    except UnicodeDecodeError:
        raise RunError(f"{path} cannot be read (it is not text in UTF-8)") from None
