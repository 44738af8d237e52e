"""The other ten cells of the paper, one seed of each: accuracies side by side, and how far ours are from the rivals."""

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
from collections.abc import Iterable, Mapping, Sequence
from math import isinf
from pathlib import Path
from statistics import median

from freshet.methods import class_and_preset
from freshet.paper.archive import TIE, ArchivedRun, median_accuracy, read
from freshet.paper.cells import CELLS, METHODS
from freshet.paper.studies import KINDS, Runs, kind_of, name_with_marks, seconds

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




# ---- the other ten cells

#: In the order of results/CELLS.md, which has the reasons.
OTHERS = (
    "lenet-cifar100",
    "cnn-cifar10",
    "cnn-cifar100",
    "alexnet-cifar10",
    "alexnet-cifar100",
    "resnet-cifar100",
    "textcnn-imdb",
    "vgg-cifar10",
    "vgg-cifar100",
    "resnet-tiny",
)
#: What each cell is to be run with: the paper's methods, and ours.
PLANNED = (*METHODS, "fedasmu-course", "fedssmu-course")
TITLE = "## The other ten cells"
HEAD = """A part of the training samples, one seed, a short virtual time, and nothing tuned: every method has its own
defaults and, where the first table says nothing else, plain SGD with the cell's rate. `results/CELLS.md` said so before
the first of these runs and lists what was changed since. So they show a direction and allow no verdict, and none of
those below counts them. *Accuracy*: mean of the last five tests, the best of a cell and kind in bold; a dash: not run.
"""
REST = (
    "Accuracies in points of a hundred, against the best of the other methods of the kind; below one point is a tie. "
    "*First there*: the first test at or above the paper's target, and whose."
)


def read_others(results: Path) -> dict[str, Runs]:
    """The runs of each of these cells that was run."""
    found = {name: read(results / name) for name in OTHERS}
    return {name: runs for name, runs in found.items() if runs}


def section(cells: Mapping[str, Runs]) -> list[str]:
    """Both kinds, and what is missing; where none of the cells was run, only that."""
    lines = [TITLE, ""]
    if cells:
        lines += [HEAD, *scale(cells), "", *(line for kind in KINDS for line in _kind(cells, kind)), REST, ""]
    return [*lines, *missing(cells)]


def scale(cells: Mapping[str, Runs]) -> list[str]:
    """What the runs of each cell were made with, so that nobody holds cells of different scale against each other."""
    lines = ["| cell | network | training samples | batch | rate | until |", "|---|---|---|---|---|---|"]
    for name, runs in cells.items():
        every, rate = [run for group in runs.values() for run in group], CELLS[name].lr
        entries = [
            _distinct(run.network for run in every),
            _distinct(f"{run.samples:,}" if run.samples else "all" for run in every),
            _distinct(str(run.batch) for run in every),
            _distinct(_rate(run, rate) for run in every),
            _end(runs),
        ]
        lines.append(f"| {name} | {' | '.join(entries)} |")
    return lines


def _rate(run: ArchivedRun, cell: float) -> str:
    """The learning rate, and in what it is not the cell's: plain SGD with the rate of the paper's table."""
    words = [f"{run.lr:g}"] if run.optimiser == "sgd" else [f"{run.lr:g}", f"with {run.optimiser.capitalize()}"]
    return " ".join(words) + ("" if run.lr == cell else f" (the cell has {cell:g})")


def _distinct(values: Iterable[str]) -> str:
    """What all runs have, or all that they have."""
    return ", ".join(sorted(set(values)))


def _end(runs: Runs) -> str:
    """How long the runs were, of both kinds or of each where they differ; one that diverged ends early."""
    ends = {kind: [run.times[-1] for m, group in runs.items() if kind_of(m) == kind for run in group] for kind in KINDS}
    until = {KINDS[kind][0].lower(): seconds(max(times)) for kind, times in ends.items() if times}
    told = [f"{time} {kind}" for kind, time in until.items()]
    return ", ".join(told) if len(set(until.values())) > 1 else next(iter(until.values()))


def missing(cells: Mapping[str, Runs]) -> list[str]:
    """What was not run: whole cells, then methods of a cell."""
    absent = [name for name in OTHERS if name not in cells]
    lines = [f"Not run: {', '.join(absent)}.", ""] if absent else []
    for name, runs in cells.items():
        methods = [method for method in PLANNED if method not in runs]
        lines += [f"Not run in {name}: {', '.join(methods)}.", ""] if methods else []
    return lines


def _kind(cells: Mapping[str, Runs], kind: str) -> list[str]:
    """The methods of one kind in all cells."""
    found = {name: {m: group for m, group in runs.items() if kind_of(m) == kind} for name, runs in cells.items()}
    mine = {name: runs for name, runs in found.items() if runs}
    return [f"### {KINDS[kind][0]}, other cells", "", *table(mine), "", *distances(mine, kind), ""] if mine else []


def table(cells: Mapping[str, Runs]) -> list[str]:
    """A row per method, a column per cell."""
    methods = sorted({method for runs in cells.values() for method in runs}, key=_rank)
    best = {name: max(_accuracy_text(group) for group in runs.values()) for name, runs in cells.items()}
    lines = [f"| method | {' | '.join(cells)} |", "|---" * (len(cells) + 1) + "|"]
    for method in methods:
        entries = (_entry(runs.get(method), best[name]) for name, runs in cells.items())
        lines.append(f"| {name_with_marks(method)} | {' | '.join(entries)} |")
    return lines


def _rank(method: str) -> tuple[int, str]:
    """The order of the paper's table, variants after their method."""
    name = class_and_preset(method)[0].about.name
    return METHODS.index(name) if name in METHODS else len(METHODS), method


def _accuracy_text(group: Sequence[ArchivedRun]) -> str:
    return f"{median_accuracy(group):.3f}"


def _entry(group: Sequence[ArchivedRun] | None, best: str) -> str:
    """Accuracy; bold what looks like the best, and say what diverged."""
    if group is None:
        return "–"
    shown = _accuracy_text(group)
    ends = [run.diverged for run in group if run.diverged is not None]
    return (f"**{shown}**" if shown == best else shown) + (f" (diverged at {seconds(min(ends))})" if ends else "")


def distances(cells: Mapping[str, Runs], kind: str) -> list[str]:
    """Per cell, how far ours are from the best rival, and who is first at the paper's target."""
    ours = (KINDS[kind][1], f"{KINDS[kind][1]}-course")
    heads = ["cell", "best rival", *ours, "target", "first there", *(f"{name} there" for name in ours)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, runs in cells.items():
        target = CELLS[name].target
        rivals = {method: group for method, group in runs.items() if _rank(method)[0] != _rank(ours[0])[0]}
        best = max(rivals, key=lambda method: median_accuracy(rivals[method]), default=None)
        entries = [
            name,
            "–" if best is None else f"{best}, {_accuracy_text(rivals[best])}",
            *(_distance(runs.get(method), rivals.get(best or "")) for method in ours),
            f"{target:.2f}",
            _first(runs, target),
            *(seconds(_time(runs[method], target)) if method in runs else "–" for method in ours),
        ]
        lines.append(f"| {' | '.join(entries)} |")
    return lines


def _distance(ours: Sequence[ArchivedRun] | None, rival: Sequence[ArchivedRun] | None) -> str:
    if ours is None or rival is None:
        return "–"
    ahead = median_accuracy(ours) - median_accuracy(rival)
    return f"{100 * ahead:+.1f}{' (tie)' if abs(ahead) < TIE else ''}"


def _time(group: Iterable[ArchivedRun], target: float) -> float:
    return median(run.time_to(target) for run in group)


def _first(runs: Runs, target: float) -> str:
    """When the target is first reached, and by whom."""
    times = {method: _time(group, target) for method, group in runs.items()}
    first = min(times.values())
    if isinf(first):
        return "never"
    return f"{seconds(first)}: {', '.join(sorted((m for m in times if times[m] == first), key=_rank))}"
