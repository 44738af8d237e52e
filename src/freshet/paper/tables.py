"""The tables of the results pages: main runs, suites, the other ten cells, and FedASMU taken apart.

``results_page`` puts them on two pages: short tables on the first, complete ones in the appendix.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isinf
from pathlib import Path
from statistics import median

from freshet.experiments.store import archived_runs
from freshet.methods import class_and_preset
from freshet.paper.archive import (
    MIN_TESTS,
    TIE,
    ArchivedRun,
    Outcome,
    common_seeds,
    median_accuracy,
    median_tests,
    median_time,
    outcome,
    variants,
)
from freshet.paper.cells import CELLS, METHODS, Published
from freshet.paper.studies import (
    FORMER_WORLD,
    KINDS,
    NEW_WORLD,
    OTHERS,
    PARTS,
    SUITE_SECONDS,
    VARIED,
    WORLDS,
    AblationRuns,
    Runs,
    Study,
    StudyRuns,
    kind_of,
    name_with_marks,
    seconds,
    suite_columns,
    time_to,
)

#: What an outcome says about a lead that the paper reports, and about a rival that the paper does not have.
PAPER_VERDICTS = {
    "win": "confirmed",
    "loss": "not confirmed",
    "tie": "not confirmed (tie)",
    "open": "undecided (seeds disagree)",
    "few": "undecided (too few seeds)",
    "coarse": "no resolution",
    "never": "undecided (never)",
    "none": "undecided",
}
OWN_VERDICTS = {"win": "ahead", "loss": "behind", "tie": "tie"}
OUTCOME_WORDS: dict[Outcome, str] = {
    "win": "ahead",
    "loss": "behind",
    "tie": "equal",
    "open": "undecided",
    "few": "too few seeds",
    "coarse": "no resolution",
    "never": "undecided",
    "none": "–",
}


# ---- main runs


def study_section(study: Study, runs: Runs) -> list[str]:
    """The main runs of a study on the first page: picture, accuracies and times."""
    lines = [f"## {study.scale}", "", FORMER_WORLD, "", f"![accuracy over time](images/{study.picture})", ""]
    for kind, (title, _) in KINDS.items():
        columns = f"| {title.lower()} | accuracy | to {study.target:.2f} | to {study.further:.2f} |"
        lines += [columns, "|---|---|---|---|"]
        for method in _best_first(runs, kind):
            group = runs[method]
            entries = _accuracy_text(group), seconds(median_time(group)), time_to(group, study.further)
            lines.append(f"| {_name_with_state(method, group)} | {' | '.join(entries)} |")
        lines.append("")
    return [*lines, *_not_run(study, runs)]


def study_details(study: Study, runs: Runs) -> list[str]:
    """The main runs of a study in the appendix: every seed, and the paper's method against every rival."""
    lines = [f"## {study.scale}", "", FORMER_WORLD, ""]
    for kind in KINDS:
        lines += main_table(study, runs, kind)
    return [*lines, *_not_run(study, runs)]


def _not_run(study: Study, runs: Runs) -> list[str]:
    missing = [method for method in study.cell.published if method not in runs]
    return [f"Not run yet: {', '.join(missing)}.", ""] if missing else []


def _best_first(runs: Runs, kind: str) -> list[str]:
    return sorted((m for m in runs if kind_of(m) == kind), key=lambda method: -median_accuracy(runs[method]))


def main_table(study: Study, runs: Runs, kind: str) -> list[str]:
    """The methods of one kind, the best first."""
    title, reference = KINDS[kind]
    methods = _best_first(runs, kind)
    lines = [
        f"### {title}, {study.name}",
        "",
        f"| method | accuracy | seeds 0, 1, 2 | to {study.target:.2f} | to {study.further:.2f} | staleness | uploads "
        "| rate | models |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(study, method, runs[method]) for method in methods),
        "",
    ]
    return [*lines, *rival_verdicts(study, runs, methods, reference)] if reference in runs else lines


def _row(study: Study, method: str, group: Sequence[ArchivedRun]) -> str:
    each = ", ".join(f"{run.accuracy:.3f}" for run in group)
    staleness = median(run.staleness or 0.0 for run in group)
    hashes, reached = " ".join(f"`{run.sha[:8]}`" for run in group), seconds(median_time(group))
    return (
        f"| {_name_with_state(method, group)} | **{median_accuracy(group):.3f}** | {each} | {reached} "
        f"| {time_to(group, study.further)} | {staleness:.1f} | {median(run.uploads for run in group):,.0f} "
        f"| {group[0].lr:.3g} | {hashes} |"
    )


def _name_with_state(method: str, group: Sequence[ArchivedRun]) -> str:
    diverged = any(run.diverged is not None for run in group)
    return name_with_marks(method) + (" (diverged)" if diverged else "")


def rival_verdicts(study: Study, runs: Runs, methods: Sequence[str], reference: str) -> list[str]:
    """The paper's method against each rival: what the paper reports for this cell, and what these runs show."""
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
        paper, verdict = _accuracy_verdict(ours, theirs, mine, printed)
        paper_time, time_verdict = _time_verdict(ours, theirs, mine, printed)
        here, ratio = 100 * (median_accuracy(ours) - median_accuracy(theirs)), _time_ratio(ours, theirs)
        entries = name_with_marks(rival), paper, f"{here:+.1f}", verdict, paper_time, ratio, time_verdict
        lines.append(f"| {' | '.join(entries)} |")
    return [*lines, "", "Accuracies in percentage points. Times: the rival's time divided by that of the method.", ""]


def _accuracy_verdict(
    ours: Sequence[ArchivedRun], theirs: Sequence[ArchivedRun], mine: Published, printed: Published | None
) -> tuple[str, str]:
    """The paper's lead in points, and the verdict on it."""
    found = outcome(ours, theirs)
    if printed is None:
        return "–", OWN_VERDICTS.get(found, "undecided")
    lead = mine.accuracy - printed.accuracy
    return f"{100 * lead:+.1f}", _lead_verdict(lead > 0, found)


def _time_verdict(
    ours: Sequence[ArchivedRun], theirs: Sequence[ArchivedRun], mine: Published, printed: Published | None
) -> tuple[str, str]:
    """The rival's time over ours in the paper, and the verdict on it."""
    if printed is None or not mine.time or not printed.time:
        return "–", "–"
    found = outcome(ours, theirs, "time")
    return f"{printed.time / mine.time:.2f}x", _lead_verdict(printed.time > mine.time, found)


def _lead_verdict(paper_leads: bool, found: Outcome) -> str:
    """The verdict on a lead of the paper; without a lead, what these runs show."""
    return PAPER_VERDICTS[found] if paper_leads else f"paper: no lead; here: {OUTCOME_WORDS[found]}"


def _time_ratio(ours: Sequence[ArchivedRun], theirs: Sequence[ArchivedRun]) -> str:
    """The rival's time over ours in these runs."""
    mine, rival = median_time(ours), median_time(theirs)
    if isinf(mine):
        return "never / never" if isinf(rival) else "never here"
    if isinf(rival):
        return "rival never"
    return f"{rival / mine:.2f}x" if mine else "–"


# ---- suites

SUITES_HEAD = f"""## Suites

{FORMER_WORLD}
The suites are half as long as the main runs and use the settings that were tuned for them, as `results/SUITES.md` said
before the first of these runs. In the ablation `fedasmu-da` has no learned weights, `fedasmu-fa` no fresh models and
`fedasmu-0` neither. So `fedasmu-fa` is also the slot *never*. The ablation and the slots here answer no number of the
paper: the paper has them on CIFAR-10, and with its rates for Fashion-MNIST, 1e-4, the controls stand still.
"""


def suites_section(found: Sequence[StudyRuns]) -> list[str]:
    """Every suite of every study."""
    lines = [SUITES_HEAD]
    for suite, reference in VARIED.items():
        lines += [f"### {suite}", ""]
        for study, runs, suites in found:
            if suite in study.suites:
                lines += variants_table(study, runs, suites / suite, reference)
    for suite, usual in WORLDS.items():
        for study, runs, suites in found:
            if suite in study.suites:
                lines += worlds_table(study, runs, suites / suite, usual)
    return lines


def variants_table(study: Study, runs: Runs, suite: Path, reference: str) -> list[str]:
    """A suite of variants of one method, compared with its main runs truncated to the same time."""
    if reference not in runs or not archived_runs(suite):
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
        verdict = "" if group is usual else outcome_text(usual, group)
        lines.append(f"| {name} | {median_accuracy(group):.3f} | {each} | {seconds(median_time(group))} | {verdict} |")
    return [*lines, ""]


def outcome_text(ours: Sequence[ArchivedRun], theirs: Sequence[ArchivedRun]) -> str:
    """The outcome in accuracy in words with its size, on the seeds that both have."""
    mine, others = common_seeds(ours, theirs)
    if not mine:
        return "no seed in common"
    words = OUTCOME_WORDS | {"few": f"{len(mine)} seed{'s' * (len(mine) > 1)}"}
    return f"{words[outcome(mine, others)]}, {100 * (median_accuracy(mine) - median_accuracy(others)):+.1f}"


def worlds_table(study: Study, runs: Runs, suite: Path, usual: str) -> list[str]:
    """A suite of worlds: a column per setting, the main runs among them; median accuracy and time to the target."""
    found = suite_columns(runs, suite, usual)
    methods = list(found.get(usual, ()))
    if not methods:
        return [f"### {suite.name}", "", "Not run yet.", ""]
    lines = [f"### {suite.name}", "", f"| | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for method in sorted(methods, key=lambda name: (kind_of(name), -median_accuracy(runs[name]))):
        entries = (
            f"{median_accuracy(group[method]):.3f}, {seconds(median_time(group[method]))}" if group.get(method) else "–"
            for group in found.values()
        )
        lines.append(f"| {method} | {' | '.join(entries)} |")
    counts = {name: max(map(len, group.values())) for name, group in found.items() if group}
    seeds = ", ".join(f"{name}: {count}" for name, count in counts.items())
    return [*lines, "", f"Accuracy, time to {study.target:.2f}; medians. Seeds: {seeds}.", ""]


# ---- FedASMU taken apart, in the new world

ABLATION_HEAD = f"""## Ablation and slots

{NEW_WORLD}
`fedasmu-da` has no learned weights, `fedasmu-fa` no fresh models and `fedasmu-0` neither. *judge* and *slot* are
options of FedASMU, which learns its slots. *Accuracy*: mean of the last five tests, median over seeds, then each seed.
*Tests before*: how many tests came before the target was reached, median over seeds; fewer than {MIN_TESTS} give no
resolution. The last two columns compare `fedasmu` with the row.
"""
FRESH_TITLE = "## What the fresh models bring"
#: FedASMU without fresh models; the two forms give the same runs.
WITHOUT_FRESH = ("fedasmu-fa", "slot = never")


def ablation_section(ablations: Sequence[AblationRuns]) -> list[str]:
    """A table for each cell, and what is missing."""
    lines = [ABLATION_HEAD]
    for each in ablations:
        lines += [f"### {each.name}", "", *(ablation_table(each) if each.runs else ["Not run yet.", ""])]
    return lines


def ablation_table(found: AblationRuns) -> list[str]:
    """FedASMU, its variants and its options in one cell; the planned ones first."""
    runs, target = found.runs, found.cell.target
    names = [name for name in PARTS if name in runs] + sorted(name for name in runs if name not in PARTS)
    lines = [
        _scale_sentence(runs),
        "",
        f"| | accuracy | seeds | to {target:.2f} | tests before | fedasmu, accuracy | fedasmu, time |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        group = runs[name]
        each = ", ".join(f"{run.accuracy:.3f}" for run in group)
        entries = [f"{median_accuracy(group):.3f}", each, seconds(median_time(group)), f"{median_tests(group):g}"]
        lines.append(f"| {' | '.join([name, *entries, *_ablation_outcomes(runs, name)])} |")
    absent = [name for name in PARTS if name not in runs]
    return [*lines, "", *([f"Not run yet: {', '.join(absent)}.", ""] if absent else [])]


def _ablation_outcomes(runs: Runs, name: str) -> list[str]:
    """FedASMU against this one: in accuracy with its size, and in time."""
    if name == "fedasmu" or "fedasmu" not in runs:
        return ["", ""]
    ours, theirs = runs["fedasmu"], runs[name]
    return [outcome_text(ours, theirs), OUTCOME_WORDS[outcome(ours, theirs, "time")]]


def _scale_sentence(runs: Runs) -> str:
    every = [run for group in runs.values() for run in group]
    samples = _distinct(f"{run.samples:,}" if run.samples else "all" for run in every)
    batches = _distinct(str(run.batch) for run in every)
    return f"Training samples: {samples}; batch {batches}; until {_end(every)}."


def fresh_models_section(ablations: Sequence[AblationRuns], appendix: str) -> list[str]:
    """One sentence for the first page: FedASMU with and without fresh models; nothing before they have run."""
    parts = [text for each in ablations if (text := _with_and_without(each))]
    if not parts:
        return []
    sentence = f"FedASMU reaches, {'; '.join(parts)}."
    return [FRESH_TITLE, "", sentence, "", f"{NEW_WORLD} [All runs]({appendix}#ablation-and-slots).", ""]


def _with_and_without(found: AblationRuns) -> str:
    """Accuracy and time to the target in a cell, with fresh models and without."""
    runs, ours = found.runs, found.runs.get("fedasmu", [])
    name = next((name for name in WITHOUT_FRESH if common_seeds(ours, runs.get(name, []))[0]), None)
    if name is None:
        return ""
    theirs = runs[name]
    accuracies = f"{median_accuracy(ours):.3f} with fresh models and {median_accuracy(theirs):.3f} without"
    times = f"time to {found.cell.target:.2f}: {seconds(median_time(ours))} and {seconds(median_time(theirs))}"
    in_time = OUTCOME_WORDS[outcome(ours, theirs, "time")]
    return f"for {found.name}, {accuracies} (`{name}`; {outcome_text(ours, theirs)} points; {times}, {in_time})"


# ---- the other ten cells

#: The methods planned for each cell: the paper's, and our variants.
PLANNED = (*METHODS, "fedasmu-course", "fedssmu-course")
CELLS_TITLE = "## The other ten cells"
CELLS_SHORT = f"""{FORMER_WORLD}
One seed, part of the data, a short virtual time, nothing tuned: these runs show a direction and allow no verdict. The
table shows how far FedASMU, FedSSMU and `-course` are ahead of the best rival of their kind, in percentage points;
below one point is a tie.
"""
CELLS_HEAD = f"""{FORMER_WORLD}
These runs have a part of the training samples, one seed, a short virtual time, and nothing tuned: every method has its
own defaults and, unless the first table says otherwise, plain SGD with the cell's rate. `results/CELLS.md` said so
before the first of these runs and lists what changed since. They show a direction and allow no verdict; no verdict
below counts them. *Accuracy*: mean of the last five tests. The best of a cell and kind is bold; a dash means not run.
"""
CELLS_REST = (
    "Accuracies in percentage points, against the best of the other methods of the kind; below one point is a tie. "
    "*First there*: the first test at or above the paper's target, and the method that reached it."
)


def cells_summary(cells: Mapping[str, Runs]) -> list[str]:
    """One row per cell for the first page: how far FedASMU, FedSSMU and ``-course`` are ahead of the best rival."""
    if not cells:
        return []
    heads = ["cell"]
    for _, ours in KINDS.values():
        heads += ["best rival", ours, f"{ours}-course"]
    lines = [CELLS_TITLE, "", CELLS_SHORT, f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, runs in cells.items():
        entries = [entry for kind in KINDS for entry in _distance_entries(_of_kind(runs, kind), kind)]
        lines.append(f"| {' | '.join([name, *entries])} |")
    return [*lines, ""]


def cells_section(cells: Mapping[str, Runs]) -> list[str]:
    """Both kinds in full, and what was not run; if no cell was run, only that."""
    lines = [CELLS_TITLE, ""]
    if cells:
        tables = [line for kind in KINDS for line in _kind_tables(cells, kind)]
        lines += [CELLS_HEAD, *scale_table(cells), "", *tables, CELLS_REST, ""]
    return [*lines, *missing(cells)]


def scale_table(cells: Mapping[str, Runs]) -> list[str]:
    """The scale of each cell's runs: cells of different scale must not be compared with each other."""
    lines = ["| cell | network | training samples | batch | rate | until |", "|---|---|---|---|---|---|"]
    for name, runs in cells.items():
        every, rate = [run for group in runs.values() for run in group], CELLS[name].lr
        entries = [
            _distinct(run.network for run in every),
            _distinct(f"{run.samples:,}" if run.samples else "all" for run in every),
            _distinct(str(run.batch) for run in every),
            _distinct(_rate(run, rate) for run in every),
            _end(every),
        ]
        lines.append(f"| {name} | {' | '.join(entries)} |")
    return lines


def _rate(run: ArchivedRun, cell: float) -> str:
    """The learning rate, and how it differs from the cell: plain SGD with the rate of the paper's table."""
    words = [f"{run.lr:g}"] if run.optimiser == "sgd" else [f"{run.lr:g}", f"with {run.optimiser.capitalize()}"]
    return " ".join(words) + ("" if run.lr == cell else f" (the cell has {cell:g})")


def _distinct(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))


def _end(runs: Sequence[ArchivedRun]) -> str:
    """How long the runs were, by kind if the kinds differ; the longest counts, since a diverged run ends early."""
    ends = {kind: [run.times[-1] for run in runs if kind_of(run.method) == kind] for kind in KINDS}
    until = {KINDS[kind][0].lower(): seconds(max(times)) for kind, times in ends.items() if times}
    texts = [f"{time} {kind}" for kind, time in until.items()]
    return ", ".join(texts) if len(set(until.values())) > 1 else next(iter(until.values()))


def missing(cells: Mapping[str, Runs]) -> list[str]:
    """What was not run: whole cells, then methods of a cell."""
    absent = [name for name in OTHERS if name not in cells]
    lines = [f"Not run: {', '.join(absent)}.", ""] if absent else []
    for name, runs in cells.items():
        methods = [method for method in PLANNED if method not in runs]
        lines += [f"Not run in {name}: {', '.join(methods)}.", ""] if methods else []
    return lines


def _of_kind(runs: Runs, kind: str) -> Runs:
    return {method: group for method, group in runs.items() if kind_of(method) == kind}


def _kind_tables(cells: Mapping[str, Runs], kind: str) -> list[str]:
    """The methods of one kind in all cells."""
    found = {name: _of_kind(runs, kind) for name, runs in cells.items()}
    mine = {name: runs for name, runs in found.items() if runs}
    if not mine:
        return []
    return [f"### {KINDS[kind][0]}, other cells", "", *accuracy_table(mine), "", *distance_table(mine, kind), ""]


def accuracy_table(cells: Mapping[str, Runs]) -> list[str]:
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
    """The accuracy, bold if it prints like the best one, and when a run diverged."""
    if group is None:
        return "–"
    text = _accuracy_text(group)
    ends = [run.diverged for run in group if run.diverged is not None]
    return (f"**{text}**" if text == best else text) + (f" (diverged at {seconds(min(ends))})" if ends else "")


def distance_table(cells: Mapping[str, Runs], kind: str) -> list[str]:
    """Per cell, the distance of FedASMU or FedSSMU from the best rival, and who reaches the paper's target first."""
    ours = _ours(kind)
    heads = ["cell", "best rival", *ours, "target", "first there", *(f"{name} there" for name in ours)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, runs in cells.items():
        target = CELLS[name].target
        entries = [
            name,
            *_distance_entries(runs, kind),
            f"{target:.2f}",
            _first(runs, target),
            *(seconds(_target_time(runs[method], target)) if method in runs else "–" for method in ours),
        ]
        lines.append(f"| {' | '.join(entries)} |")
    return lines


def _ours(kind: str) -> tuple[str, str]:
    name = KINDS[kind][1]
    return name, f"{name}-course"


def _distance_entries(runs: Runs, kind: str) -> list[str]:
    """The best rival of a kind in one cell, and the distance of FedASMU or FedSSMU and ``-course`` to it."""
    ours = _ours(kind)
    rivals = {method: group for method, group in runs.items() if _rank(method)[0] != _rank(ours[0])[0]}
    best = max(rivals, key=lambda method: median_accuracy(rivals[method]), default=None)
    rival = "–" if best is None else f"{best}, {_accuracy_text(rivals[best])}"
    return [rival, *(_distance(runs.get(method), rivals.get(best or "")) for method in ours)]


def _distance(ours: Sequence[ArchivedRun] | None, rival: Sequence[ArchivedRun] | None) -> str:
    if ours is None or rival is None:
        return "–"
    ahead = median_accuracy(ours) - median_accuracy(rival)
    return f"{100 * ahead:+.1f}{' (tie)' if abs(ahead) < TIE else ''}"


def _target_time(group: Iterable[ArchivedRun], target: float) -> float:
    return median(run.time_to(target) for run in group)


def _first(runs: Runs, target: float) -> str:
    """When the target is first reached, and by whom."""
    times = {method: _target_time(group, target) for method, group in runs.items()}
    first = min(times.values())
    if isinf(first):
        return "never"
    return f"{seconds(first)}: {', '.join(sorted((m for m in times if times[m] == first), key=_rank))}"
