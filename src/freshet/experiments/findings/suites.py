"""The suites of a study: variants of one method, and other worlds."""

from collections.abc import Sequence
from pathlib import Path

from freshet.experiments.findings.studies import (
    SUITE_SECONDS,
    VARIED,
    WORLDS,
    Found,
    Runs,
    Study,
    columns,
    kind_of,
    seconds,
)
from freshet.experiments.kept import Run, middle, outcome, shared, time_of, variants

HEAD = """## Suites

Half as long as the main runs, with the settings that were tuned for those, as `results/SUITES.md` said before the first
of them. In the ablation `fedasmu-da` has no learned weights, `fedasmu-fa` no fresh models, `fedasmu-0` neither; so
`fedasmu-fa` is also the slot *never*.
"""


def section(found: Sequence[Found], picture: str) -> list[str]:
    """Every suite of every study, with the picture of worlds between."""
    lines = [HEAD]
    for suite, reference in VARIED.items():
        lines += [f"### {suite}", ""]
        for study, runs, suites in found:
            if suite in study.suites:
                lines += varied(study, runs, suites / suite, reference)
    lines += [f"![Accuracy in other worlds](images/{picture})", ""]
    for suite, usual in WORLDS.items():
        for study, runs, suites in found:
            if suite in study.suites:
                lines += worlds(study, runs, suites / suite, usual)
    return lines


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
        "|---|---|---|---|---|",
    ]
    for name, group in groups.items():
        each = ", ".join(f"{run.accuracy:.3f}" for run in group)
        said = "" if group is usual else judged(usual, group)
        lines.append(f"| {name} | {middle(group):.3f} | {each} | {seconds(time_of(group))} | {said} |")
    return [*lines, ""]


def judged(ours: Sequence[Run], theirs: Sequence[Run]) -> str:
    """The outcome in words with its size, on the seeds that both have."""
    mine, others = shared(ours, theirs)
    if not mine:
        return "no seed in common"
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
            f"{middle(group[method]):.3f}, {seconds(time_of(group[method]))}" if group.get(method) else "–"
            for group in found.values()
        )
        lines.append(f"| {method} | {' | '.join(cells)} |")
    few = {name: max(map(len, group.values())) for name, group in found.items() if group}
    said = ", ".join(f"{name}: {count}" for name, count in few.items())
    return [*lines, "", f"Accuracy, time to {study.target:.2f}; medians. Seeds: {said}.", ""]
