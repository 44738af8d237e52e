"""The other ten cells of the paper, one seed of each: accuracies side by side, and how far ours are from the rivals."""

from collections.abc import Iterable, Mapping, Sequence
from math import isinf
from pathlib import Path
from statistics import median

from freshet.methods import find
from freshet.paper.archive import TIE, ArchivedRun, median_accuracy, read
from freshet.paper.cells import CELLS, METHODS
from freshet.paper.studies import KINDS, Runs, kind_of, name_with_marks, seconds

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
    name = find(method)[0].about.name
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
