"""The pictures of the page: accuracy over time in a study, and at the end in other worlds."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from freshet.files import writing
from freshet.paper.archive import ArchivedRun, median_accuracy
from freshet.paper.studies import KINDS, SUITE_SECONDS, WORLDS, StudyRuns, Runs, Study, suite_columns, kind_of, name_with_marks, time_to
from freshet.report.palette import GRID, INK, MUTED, dash, paint, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SHAPES = {"solid": "-", "dash": "--", "dot": ":"}
OURS: dict[str, Any] = {"course": "-", "progress": (0, (3, 1.2))}
#: Methods in the picture of worlds; what a suite varies, in words.
COMPARED = ("fedasmu-course", "fedbuff", "fedasync", "fedasmu", "fedssmu-course", "fedavg", "fedssmu")
VARIES = {
    "heterogeneity": "slowest over fastest device",
    "bandwidth": "bandwidth of the devices",
    "devices": "devices that share the samples",
    "skew": "Dirichlet concentration of labels",
}


def look_of(method: str) -> dict[str, Any]:
    """Colour and line of a method wherever it is shown; ours look alike in both kinds."""
    variant = method.partition("-")[2]
    if variant in OURS:
        return {"color": INK, "ls": OURS[variant]}
    (style,) = styles([method])
    return {"color": paint(style), "ls": SHAPES[dash(style)]}


def draw_study(study: Study, runs: Runs, place: Path) -> Path:
    """Accuracy over virtual time, median over seeds (ours with their range), one panel for each kind."""
    figure = _figure((12, 5.6))
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (kind, (name, _)) in zip(axes, KINDS.items(), strict=True):
        mine = sorted((m for m in runs if kind_of(m) == kind), key=lambda method: -median_accuracy(runs[method]))
        for method in mine:
            _curve(axis, study, method, runs[method])
        axis.axhline(study.further, color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
        axis.set(title=name, xlabel="virtual time, s", xlim=(0, None), ylim=study.shown)
        _finish(axis)
        if mine:
            axis.legend(
                fontsize=8,
                loc="upper center",
                bbox_to_anchor=(0.5, -0.12),
                ncols=3,
                columnspacing=0.9,
                handlelength=1.5,
                handletextpad=0.5,
                frameon=False,
                title=f"accuracy at the end, time to {study.further:.2f}",
                title_fontsize=8,
            )
    axes[0].set_ylabel("test accuracy, median of 3 seeds")
    figure.suptitle(f"{study.scale}, 100 devices, every method tuned with 6 trials{study.twice}", fontsize=11)
    return _save(figure, place)


def _curve(axis: "Axes", study: Study, method: str, group: Sequence[ArchivedRun]) -> None:
    """One method: the median, and for ours the range."""
    ours, look = "smu" in method, look_of(method)
    length = min(len(run.times) for run in group)
    times, curves = group[0].times[:length], np.array([run.accuracies[:length] for run in group])
    label = f"{name_with_marks(method)}  {median_accuracy(group):.3f}, {time_to(group, study.further)}"
    if ours:
        axis.fill_between(times, curves.min(axis=0), curves.max(axis=0), color=look["color"], alpha=0.15, lw=0)
    width = 2.2 if ours else 1.1
    axis.plot(times, np.median(curves, axis=0), label=label, lw=width, zorder=2 + ours, **look)


def draw_worlds(found: StudyRuns, place: Path) -> Path:
    """Accuracy at the end in each suite of worlds: a column per suite, a row per kind."""
    study, runs, suites = found
    suite_worlds = {name: suite_columns(runs, suites / name, usual) for name, usual in WORLDS.items()}
    figure = _figure((12, 5.6))
    axes = figure.subplots(2, len(suite_worlds), sharey="row", sharex="col")
    for row, (kind, (title, _)) in zip(axes, KINDS.items(), strict=True):
        for axis, worlds in zip(row, suite_worlds.values(), strict=True):
            for method in (name for name in COMPARED if kind_of(name) == kind):
                points = [(n, median_accuracy(group[method])) for n, group in enumerate(worlds.values()) if group.get(method)]
                if points:
                    axis.plot(*zip(*points, strict=True), label=method, marker="o", ms=4, **look_of(method))
            _finish(axis)
        row[0].set_ylabel(f"{title.lower()}: test accuracy")
        if row[-1].lines:
            row[-1].legend(fontsize=8, frameon=False, loc="lower right")
    for axis, (suite, worlds) in zip(axes[1], suite_worlds.items(), strict=True):
        numbers = [next((word for word in name.split() if word[0].isdigit()), name) for name in worlds]
        axis.set(xlabel=VARIES[suite], xticks=range(len(worlds)), xticklabels=numbers)
    counts = {len(group) for worlds in suite_worlds.values() for world in worlds.values() for group in world.values()}
    seeds = " or ".join(map(str, sorted(counts))) + (" seed" if counts == {1} else " seeds")
    figure.suptitle(f"{study.scale}, {SUITE_SECONDS:,.0f} s or as many rounds, {seeds}", fontsize=11)
    return _save(figure, place)


def _figure(size: tuple[float, float]) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _finish(axis: "Axes") -> None:
    axis.grid(color=GRID)
    axis.spines[["top", "right"]].set_visible(False)


def _save(figure: "Figure", place: Path) -> Path:
    with writing(place, "choose another place with --page"):
        place.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(place, dpi=130)
    return place
