"""The numbers of the paper's evaluation as data, and the answer of our runs to each.

A claim is a gain of one method over others, from ``least`` to ``most`` percent over the paper's cells or settings:
of accuracy relative to the rival's, or of time to the target."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Literal

from freshet.paper.archive import (
    ArchivedRun,
    Outcome,
    common_seeds,
    median_accuracy,
    median_time,
    outcome,
    read,
    variants,
)
from freshet.paper.studies import SUITE_SECONDS, VARIED, WORLDS, Runs, Study, StudyRuns, kind_of

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

SECTION_HEAD = """## Every number of the paper

The paper speaks of twelve cells, or of other cells and longer runs than these. Here each number is compared with what
was run at the scales above. *Confirmed* means: a win over every rival wherever it was run, large or small (the figures
are beside it). One tie or loss is enough for *not confirmed*. *Undecided* means: seeds disagree (open) or there are
fewer than three, and nothing else contradicts the claim. Figures are percent of the rival's accuracy, or percent of the
rival's time to the paper's target saved: one figure per rival (several rivals in alphabetical order), a semicolon
between settings.
"""
SUMMARY_HEAD = """## The paper's numbers

*Confirmed*: a win over every rival wherever it was run. *Not confirmed*: at least one tie or loss. *Undecided*: seeds
disagree, or there are fewer than three. [Each number with its figures]({appendix}#every-number-of-the-paper).
"""
VERDICTS = ("confirmed", "not confirmed", "undecided", "not run")


def claims_summary(found: Sequence[StudyRuns], appendix: str) -> list[str]:
    """How many claims of each suite are confirmed, for the first page."""
    counts: dict[str, Counter[str]] = {}
    for claim in CLAIMS:
        text = answer(claim, found)[1]
        kind = next(kind for kind in VERDICTS if text.startswith(kind))
        counts.setdefault(claim.suite, Counter())[kind] += 1
    shown = [kind for kind in VERDICTS if any(count[kind] for count in counts.values())]
    rows = {**counts, "all": sum(counts.values(), Counter[str]())}
    lines = [
        SUMMARY_HEAD.format(appendix=appendix),
        f"| suite | {' | '.join(shown)} |",
        "|---" * (len(shown) + 1) + "|",
    ]
    lines += [f"| {suite} | {' | '.join(str(count[kind]) for kind in shown)} |" for suite, count in rows.items()]
    return [*lines, ""]


def claims_section(found: Sequence[StudyRuns]) -> list[str]:
    """A row for each claim that can be answered; the others are listed."""
    names = " | ".join(study.name for study, _, _ in found)
    lines = [SECTION_HEAD, f"| the paper | {names} | verdict |", "|---" * (len(found) + 2) + "|"]
    missing = []
    for claim in CLAIMS:
        figures, text = answer(claim, found)
        if text == "not run":
            missing.append(str(claim))
        else:
            lines.append(f"| {claim} | {' | '.join(figures)} | {text} |")
    return [*lines, "", *([f"Not run: {'; '.join(missing)}.", ""] if missing else [])]


def answer(claim: Claim, found: Sequence[StudyRuns]) -> tuple[list[str], str]:
    """Our figures for a claim by study, and the verdict over all of them."""
    outcomes: list[Outcome] = []
    figures: list[str] = []
    for study, runs, suites in found:
        compared = [compare_with_rivals(claim, study, group) for group in groups_of(claim, study, runs, suites)]
        outcomes += [one for outcomes_here, _ in compared for one in outcomes_here]
        figures.append("; ".join(", ".join(here) or "not run" for _, here in compared) or "–")
    decided: list[Outcome] = [one for one in outcomes if one != "none"]
    text = verdict(decided)
    if text == "confirmed":
        return figures, text if decided == outcomes else "confirmed where it was run"
    words = sorted({"too few seeds" if one == "few" else one for one in decided})
    return figures, f"{text} ({', '.join(words)})" if decided else "not run"


def groups_of(claim: Claim, study: Study, runs: Runs, suites: Path) -> list[Runs]:
    """The runs of a study that a claim is about, by name: one group for each of its settings."""
    if claim.suite == "table":
        return [runs]
    if claim.suite not in study.suites:
        return []
    short = {method: [run.truncate(SUITE_SECONDS) for run in group] for method, group in runs.items()}
    if claim.suite in VARIED:
        usual = runs.get(VARIED[claim.suite])
        return [short | (variants(suites / claim.suite, usual) if usual else {})]
    folders = [suites / claim.suite / name.replace(" ", "-", 1).replace("/", "-") for name in claim.settings]
    usual_world = WORLDS[claim.suite]
    return [short if name == usual_world else read(f) for name, f in zip(claim.settings, folders, strict=True)]


def compare_with_rivals(claim: Claim, study: Study, group: Runs) -> tuple[list[Outcome], list[str]]:
    """The outcome against each rival of a claim in one group of runs, and its size."""
    ours, rivals = group.get(claim.ours), claim.rivals
    if rivals == BASELINES:
        kind = kind_of(claim.ours)
        rivals = tuple(name for name in group if name in study.cell.published and kind_of(name) == kind)
    if ours is None:
        return ["none"], []
    rivals = tuple(
        rival for rival in sorted(rivals) if rival != claim.ours and common_seeds(ours, group.get(rival, []))[0]
    )
    if not rivals:
        return ["none"], []
    figures = [_figure(claim, *common_seeds(ours, group[rival])) for rival in rivals]
    return [outcome(ours, group[rival], claim.gain) for rival in rivals], figures


def _figure(claim: Claim, mine: Sequence[ArchivedRun], theirs: Sequence[ArchivedRun]) -> str:
    """The gain in percent of the rival's accuracy or time."""
    if claim.gain == "accuracy":
        return (
            f"{100 * (median_accuracy(mine) / median_accuracy(theirs) - 1):+.1f} %" if median_accuracy(theirs) else "–"
        )
    own, rival = median_time(mine), median_time(theirs)
    share = 1 - own / rival if rival else float("nan")
    return f"{100 * share:+.0f} %" if isfinite(share) else "never"
