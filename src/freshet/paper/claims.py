"""The numbers of the paper's evaluation as data, and the answer of our runs to each.

A claim is a gain of one method over others, from ``least`` to ``most`` percent over the paper's cells or settings:
of accuracy relative to the rival's, or of time to the target."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from freshet.paper.archive import (
    MIN_TESTS,
    ArchivedRun,
    Outcome,
    common_seeds,
    median_accuracy,
    median_time,
    outcome,
    read,
)
from freshet.paper.cells import Cell
from freshet.paper.studies import (
    FORMER_WORLD,
    NEW_WORLD,
    PART_SUITES,
    SUITE_SECONDS,
    WORLDS,
    Archive,
    Runs,
    StudyRuns,
    kind_of,
)

Gain = Literal["accuracy", "time"]
Verdict = Literal["confirmed", "not confirmed", "undecided"]
BASELINES = ("baselines",)


@dataclass(frozen=True)
class Claim:
    """``ours`` gains over each of ``rivals`` (``BASELINES``: all baselines of its kind)."""

    suite: str
    ours: str
    rivals: tuple[str, ...]
    gain: Gain
    least: float
    most: float
    #: The settings of the suite that the claim is about; none means all.
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = {"table": ""}.get(self.suite, f"{', '.join(self.settings) or self.suite}: ")
        amount = f"{self.least:g} %" if self.least == self.most else f"{self.least:g} % to {self.most:g} %"
        rivals = "the baselines" if self.rivals == BASELINES else ", ".join(self.rivals)
        return f"{where}{self.ours} over {rivals}: {'accuracy' if self.gain == 'accuracy' else 'faster'} {amount}"


def _pairs(suite: str, ours: str, gains: dict[str, tuple[tuple[float, float], tuple[float, float]]]) -> Iterator[Claim]:
    """For each rival, the gain in time, then in accuracy."""
    for rival, (time, accuracy) in gains.items():
        yield Claim(suite, ours, (rival,), "time", *time)
        yield Claim(suite, ours, (rival,), "accuracy", *accuracy)


def _settings(suite: str, settings: tuple[str, ...], *gains: tuple[float, float]) -> Iterator[Claim]:
    """Gains over the baselines: FedASMU's in accuracy and time, then FedSSMU's."""
    names = (("fedasmu", "accuracy"), ("fedasmu", "time"), ("fedssmu", "accuracy"), ("fedssmu", "time"))
    for (ours, gain), amount in zip(names, gains, strict=True):
        yield Claim(suite, ours, BASELINES, gain, *amount, settings)  # type: ignore[arg-type]


CLAIMS: tuple[Claim, ...] = (
    *_pairs(
        "table",
        "fedasmu",
        {
            "fedasync": ((11.42, 84.96), (0.41, 58.93)),
            "port": ((18.22, 97.59), (0.68, 91.10)),
            "asofed": ((70.35, 93.77), (1.23, 103.82)),
            "fedbuff": ((11.17, 75.39), (0.68, 64.75)),
            "fedsa": ((19.83, 67.54), (1.97, 118.90)),
        },
    ),
    *_pairs(
        "table",
        "fedssmu",
        {
            "fedavg": ((34.25, 85.92), (1.03, 133.04)),
            "fedprox": ((34.25, 85.92), (0.91, 145.87)),
            "moon": ((34.25, 85.92), (0.91, 139.29)),
            "feddyn": ((20.80, 73.15), (1.03, 79.06)),
            "fedlws": ((3.73, 54.86), (1.03, 51.41)),
        },
    ),
    Claim("ablation", "fedasmu", ("fedasmu-da",), "accuracy", 1.38, 4.32),
    Claim("ablation", "fedasmu", ("fedasmu-fa",), "accuracy", 1.75, 4.71),
    Claim("ablation", "fedasmu", ("fedasmu-fa",), "time", 44.77, 73.96),
    Claim("ablation", "fedasmu-da", ("fedasmu-0",), "accuracy", 1.04, 3.41),
    Claim("ablation", "fedasmu-da", ("fedasmu-0",), "time", 15.71, 19.54),
    Claim("ablation", "fedasmu-fa", ("fedasmu-0",), "accuracy", 0.65, 3.04),
    Claim("ablation", "fedasmu-da", ("fedavg",), "accuracy", 0.73, 3.75),
    Claim("ablation", "fedasmu-da", ("fedavg",), "time", 72.88, 85.72),
    Claim("ablation", "fedasmu-fa", ("fedavg",), "accuracy", 0.73, 3.75),
    Claim("ablation", "fedasmu-fa", ("fedavg",), "time", 72.88, 85.72),
    Claim("ablation", "fedasmu-0", ("fedavg",), "accuracy", 0.08, 0.34),
    Claim("ablation", "fedasmu-0", ("fedavg",), "time", 67.84, 82.26),
    Claim("slots", "fedasmu", ("slot = h1",), "accuracy", 2.4, 2.4),
    Claim("slots", "fedasmu", ("slot = h2",), "accuracy", 2.2, 2.2),
    Claim("slots", "fedasmu", ("slot = h3",), "accuracy", 2.8, 2.8),
    *_settings(
        "devices",
        ("100 devices", "200 devices", "250 devices"),
        (0.49, 12.51),
        (19.83, 90.17),
        (0.1, 13.38),
        (54.5, 91.32),
    ),
    *_settings("heterogeneity", ("ratio 110", "ratio 440"), (4.65, 7.07), (7.12, 69.75), (6.28, 12.38), (68.37, 79.44)),
    *_settings("bandwidth", ("bandwidth 1/50",), (3.3, 11.93), (43.1, 87.3), (1.15, 4.58), (42.2, 51.82)),
    *_settings("bandwidth", ("bandwidth 1/100",), (2.97, 12.38), (31.28, 85.66), (2.88, 6.1), (16.59, 81.78)),
)


def verdict(outcomes: Sequence[Outcome]) -> Verdict:
    """The verdict on a claim from the outcomes against all rivals in all settings."""
    if any(outcome in ("loss", "tie") for outcome in outcomes):
        return "not confirmed"
    return "confirmed" if outcomes and all(outcome == "win" for outcome in outcomes) else "undecided"


# ---- what the runs say

NO_RESOLUTION, NOT_TESTED = "no resolution", "not tested"
SECTION_HEAD = f"""## Every number of the paper

The paper speaks of twelve cells, or of other cells and longer runs than these. Here each number is compared with what
was run at the scales above. *Confirmed* means: a win over every rival wherever it was run, large or small (the figures
are beside it). One tie or loss is enough for *not confirmed*. *Undecided* means: seeds disagree (open), there are fewer
than three, or neither method reaches the target (never), and nothing else contradicts the claim. *No resolution* means:
fewer than {MIN_TESTS} tests came before the target was reached, for one of the two methods (median over seeds, the test
of the initial model included). A method that never reaches the target has all its tests before it: it loses against one
that reaches it after {MIN_TESTS} tests or more. What has no resolution counts neither for nor against a claim. *Not
tested* means: there are no runs that answer it. Ablation and slots are answered only by runs of the new world, in the
paper's cells for them. Figures are percent of the rival's accuracy, or percent of the rival's time to the paper's
target saved: one figure per rival (several rivals in alphabetical order), a semicolon between settings.
"""
SUMMARY_HEAD = f"""## The paper's numbers

*Confirmed*: a win over every rival wherever it was run. *Not confirmed*: at least one tie or loss. *Undecided*: seeds
disagree, there are fewer than three, or neither method reaches the target. *No resolution*: fewer than {MIN_TESTS}
tests before the target was reached. *Not tested*: no runs answer it.
"""
VERDICTS = ("confirmed", "not confirmed", "undecided", NO_RESOLUTION, NOT_TESTED)
#: A verdict after a count, where it is not "is" or "are" with its name.
HAVE = {NO_RESOLUTION: ("has", "have")}


def count_verdicts(archive: Archive) -> dict[str, Counter[str]]:
    """How many claims of each suite got each verdict."""
    counts: dict[str, Counter[str]] = {}
    for claim in CLAIMS:
        text = answer(claim, archive)[1]
        kind = next(kind for kind in VERDICTS if text.startswith(kind))
        counts.setdefault(claim.suite, Counter())[kind] += 1
    return counts


def verdicts_sentence(archive: Archive) -> str:
    """The verdicts on all claims in one sentence, without those that no claim got, except *confirmed*."""
    total = sum(count_verdicts(archive).values(), Counter[str]())
    parts = []
    for kind in VERDICTS:
        one, many = HAVE.get(kind, ("is", "are"))
        count = total[kind]
        if count or kind == "confirmed":
            parts.append(f"{count or 'none'} {one if count < 2 else many} {kind}")
    return f"Of the {total.total()} numbers of the paper's evaluation, {', '.join(parts[:-1])} and {parts[-1]}."


def claims_summary(archive: Archive, appendix: str) -> list[str]:
    """How many claims of each suite are confirmed, for the first page."""
    counts = count_verdicts(archive)
    shown = [kind for kind in VERDICTS if kind == "confirmed" or any(count[kind] for count in counts.values())]
    rows = {**counts, "all": sum(counts.values(), Counter[str]())}
    lines = [
        f"{SUMMARY_HEAD}[Each number with its figures]({appendix}#every-number-of-the-paper).\n",
        f"| suite | {' | '.join(shown)} |",
        "|---" * (len(shown) + 1) + "|",
    ]
    lines += [f"| {suite} | {' | '.join(str(count[kind]) for kind in shown)} |" for suite, count in rows.items()]
    return [*lines, ""]


def claims_section(archive: Archive) -> list[str]:
    """A row for each claim: those that the former world answers, then those that only the new world answers."""
    old = [claim for claim in CLAIMS if claim.suite not in PART_SUITES]
    new = [claim for claim in CLAIMS if claim.suite in PART_SUITES]
    return [
        SECTION_HEAD,
        *[FORMER_WORLD, "", *_claims_table(old, [each.study.name for each in archive.studies], archive)],
        *[NEW_WORLD, "", *_claims_table(new, [each.name for each in archive.ablations], archive)],
    ]


def _claims_table(claims: Sequence[Claim], columns: Sequence[str], archive: Archive) -> list[str]:
    lines = [f"| the paper | {' | '.join([*columns, 'verdict'])} |", "|---" * (len(columns) + 2) + "|"]
    for claim in claims:
        figures, text = answer(claim, archive)
        lines.append(f"| {' | '.join([str(claim), *figures, text])} |")
    return [*lines, ""]


def answer(claim: Claim, archive: Archive) -> tuple[list[str], str]:
    """Our figures for a claim by cell, and the verdict over all of them."""
    outcomes: list[Outcome] = []
    figures: list[str] = []
    for cell, groups in groups_of(claim, archive):
        compared = [compare_with_rivals(claim, cell, group) for group in groups]
        outcomes += [one for outcomes_here, _ in compared for one in outcomes_here]
        figures.append(_figures_text([here for _, here in compared]))
    return figures, _verdict_text(outcomes)


def _figures_text(settings: Sequence[Sequence[str]]) -> str:
    """The figures of one cell, by setting and rival; a dash if the cell does not have the suite."""
    if settings and all(figure == NO_RESOLUTION for here in settings for figure in here or [NOT_TESTED]):
        return NO_RESOLUTION
    return "; ".join(", ".join(here) or NOT_TESTED for here in settings) or "–"


def _verdict_text(outcomes: Sequence[Outcome]) -> str:
    """The verdict with its reasons; what was not run or has no resolution decides nothing."""
    decided: list[Outcome] = [one for one in outcomes if one not in ("none", "coarse")]
    if not decided:
        return NO_RESOLUTION if "coarse" in outcomes else NOT_TESTED
    text = verdict(decided)
    if text != "confirmed":
        words = sorted({"too few seeds" if one == "few" else one for one in decided})
        return f"{text} ({', '.join(words)})"
    if "none" in outcomes:
        return "confirmed where it was run"
    return "confirmed where there is resolution" if "coarse" in outcomes else text


def groups_of(claim: Claim, archive: Archive) -> list[tuple[Cell, list[Runs]]]:
    """By cell, the runs that a claim is about: one group for each of its settings."""
    if claim.suite in PART_SUITES:
        return [(each.cell, [each.runs]) for each in archive.ablations]
    return [(each.study.cell, _study_groups(claim, each)) for each in archive.studies]


def _study_groups(claim: Claim, found: StudyRuns) -> list[Runs]:
    study, runs, suites = found
    if claim.suite == "table":
        return [runs]
    if claim.suite not in study.suites:
        return []
    short = {method: [run.truncate(SUITE_SECONDS) for run in group] for method, group in runs.items()}
    folders = [suites / claim.suite / name.replace(" ", "-", 1).replace("/", "-") for name in claim.settings]
    usual_world = WORLDS[claim.suite]
    return [short if name == usual_world else read(f) for name, f in zip(claim.settings, folders, strict=True)]


def compare_with_rivals(claim: Claim, cell: Cell, group: Runs) -> tuple[list[Outcome], list[str]]:
    """The outcome against each rival of a claim in one group of runs, and its size."""
    ours, rivals = group.get(claim.ours), claim.rivals
    if rivals == BASELINES:
        kind = kind_of(claim.ours)
        rivals = tuple(name for name in group if name in cell.published and kind_of(name) == kind)
    if ours is None:
        return ["none"], []
    rivals = tuple(
        rival for rival in sorted(rivals) if rival != claim.ours and common_seeds(ours, group.get(rival, []))[0]
    )
    if not rivals:
        return ["none"], []
    outcomes = [outcome(ours, group[rival], claim.gain) for rival in rivals]
    figures = [_figure(claim, *common_seeds(ours, group[rival])) for rival in rivals]
    return outcomes, [
        NO_RESOLUTION if one == "coarse" else figure for one, figure in zip(outcomes, figures, strict=True)
    ]


def _figure(claim: Claim, mine: Sequence[ArchivedRun], theirs: Sequence[ArchivedRun]) -> str:
    """The gain in percent of the rival's accuracy or time."""
    if claim.gain == "accuracy":
        return (
            f"{100 * (median_accuracy(mine) / median_accuracy(theirs) - 1):+.1f} %" if median_accuracy(theirs) else "–"
        )
    own, rival = median_time(mine), median_time(theirs)
    share = 1 - own / rival if rival else float("nan")
    return f"{100 * share:+.0f} %" if isfinite(share) else "never"
