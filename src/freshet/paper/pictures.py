"""The pictures: accuracy over time in a study, accuracy in other worlds, and the check of Theorem 1."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from freshet.files import writing
from freshet.paper.archive import ArchivedRun, median_accuracy
from freshet.paper.studies import (
    KINDS,
    SUITE_SECONDS,
    WORLDS,
    Runs,
    Study,
    StudyRuns,
    kind_of,
    name_with_marks,
    suite_columns,
    time_to,
)
from freshet.report.palette import GRID, INK, LIGHT, MUTED, dash, paint, styles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = dict[str, Any]
SHAPES = {"solid": "-", "dash": "--", "dot": ":"}
OURS: dict[str, Any] = {"course": "-", "progress": (0, (3, 1.2))}
#: Methods in the picture of worlds; the axis label of each suite.
COMPARED = ("fedasmu-course", "fedbuff", "fedasync", "fedasmu", "fedssmu-course", "fedavg", "fedssmu")
VARIES = {
    "heterogeneity": "slowest over fastest device",
    "bandwidth": "bandwidth of the devices",
    "devices": "devices that share the samples",
    "skew": "Dirichlet concentration of labels",
}


def look_of(method: str) -> dict[str, Any]:
    """Colour and line style of a method; ours look the same in both kinds."""
    variant = method.partition("-")[2]
    if variant in OURS:
        return {"color": INK, "ls": OURS[variant]}
    (style,) = styles([method])
    return {"color": paint(style), "ls": SHAPES[dash(style)]}


def draw_study(study: Study, runs: Runs, place: Path) -> Path:
    """Accuracy over virtual time: median over seeds (ours with their range), one panel per kind."""
    figure = _figure((12, 5.6))
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (kind, (name, _)) in zip(axes, KINDS.items(), strict=True):
        mine = sorted((m for m in runs if kind_of(m) == kind), key=lambda method: -median_accuracy(runs[method]))
        for method in mine:
            _plot_method(axis, study, method, runs[method])
        axis.axhline(study.further, color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
        axis.set(title=name, xlabel="virtual time, s", xlim=(0, None), ylim=study.shown)
        _clean(axis)
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
    tuned = f"every method tuned with 6 trials{study.tuning_note}"
    figure.suptitle(f"{study.scale}, 100 devices, {tuned}; the former world", fontsize=11)
    return _save(figure, place)


def _plot_method(axis: "Axes", study: Study, method: str, group: Sequence[ArchivedRun]) -> None:
    """The median curve of a method, with its range if it is ours."""
    ours, look = "smu" in method, look_of(method)
    length = min(len(run.times) for run in group)
    times, curves = group[0].times[:length], np.array([run.accuracies[:length] for run in group])
    label = f"{name_with_marks(method)}  {median_accuracy(group):.3f}, {time_to(group, study.further)}"
    if ours:
        axis.fill_between(times, curves.min(axis=0), curves.max(axis=0), color=look["color"], alpha=0.15, lw=0)
    width = 2.2 if ours else 1.1
    axis.plot(times, np.median(curves, axis=0), label=label, lw=width, zorder=2 + ours, **look)


def draw_worlds(found: StudyRuns, place: Path) -> Path:
    """Final accuracy in each suite of worlds: a column per suite, a row per kind."""
    study, runs, suites = found
    suite_worlds = {name: suite_columns(runs, suites / name, usual) for name, usual in WORLDS.items()}
    figure = _figure((12, 5.6))
    axes = figure.subplots(2, len(suite_worlds), sharey="row", sharex="col")
    for row, (kind, (title, _)) in zip(axes, KINDS.items(), strict=True):
        for axis, worlds in zip(row, suite_worlds.values(), strict=True):
            for method in (name for name in COMPARED if kind_of(name) == kind):
                points = [
                    (n, median_accuracy(group[method])) for n, group in enumerate(worlds.values()) if group.get(method)
                ]
                if points:
                    axis.plot(*zip(*points, strict=True), label=method, marker="o", ms=4, **look_of(method))
            _clean(axis)
        row[0].set_ylabel(f"{title.lower()}: test accuracy")
        if row[-1].lines:
            row[-1].legend(fontsize=8, frameon=False, loc="lower right")
    for axis, (suite, worlds) in zip(axes[1], suite_worlds.items(), strict=True):
        numbers = [next((word for word in name.split() if word[0].isdigit()), name) for name in worlds]
        axis.set(xlabel=VARIES[suite], xticks=range(len(worlds)), xticklabels=numbers)
    counts = {len(group) for worlds in suite_worlds.values() for world in worlds.values() for group in world.values()}
    seeds = " or ".join(map(str, sorted(counts))) + (" seed" if counts == {1} else " seeds")
    figure.suptitle(f"{study.scale}, {SUITE_SECONDS:,.0f} s or as many rounds, {seeds}; the former world", fontsize=11)
    return _save(figure, place)


def _figure(size: tuple[float, float]) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _clean(axis: "Axes") -> None:
    axis.grid(color=GRID)
    axis.spines[["top", "right"]].set_visible(False)


def _save(figure: "Figure", place: Path) -> Path:
    with writing(place, "choose another place with --page"):
        place.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(place, dpi=130)
    return place


# ---- Theorem 1

TITLES = {"fedasmu": "FedASMU", "fedssmu": "FedSSMU"}
DASHES, MARKERS = ("-", "--", ":"), ("o", "s", "^")


def draw_theory(found: Record, folder: Path) -> list[Path]:
    """Write ``theory.png`` and ``theory.pdf``: the measured means above, the bounds below."""
    figure = _figure((12, 7.2))
    axes = figure.subplots(2, 3)
    for panel in axes.flat:
        panel.set(xscale="log", yscale="log")
    for row in axes:  # the two methods on one scale
        row[1].sharey(row[0])
    parts = {part: [line for line in found["lines"] if line["part"] == part] for part in ("grid", "horizon", "witness")}
    for column, method in enumerate(TITLES):
        lines = [line for line in parts["grid"] if line["method"] == method]
        _plot_measured(axes[0, column], lines)
        _plot_bounds(axes[1, column], lines)
    _plot_horizon(axes[0, 2], parts["horizon"])
    _plot_witness(axes[1, 2], parts["witness"])
    for letter, panel in zip("abcdef", axes.flat, strict=True):
        _label(panel, letter)
    for row in axes:
        row[0].set_ylabel(r"mean of $\|\nabla F(w_t)\|^2$ over $t \leq T$")
    files = [folder / "theory.png", folder / "theory.pdf"]
    figure.savefig(files[0], dpi=130)
    figure.savefig(files[1], metadata={"Creator": "freshet", "CreationDate": None})
    return files


def _plot_measured(axes: "Axes", lines: Sequence[Record]) -> None:
    """Running means of the squared gradient norm; colour for local steps, dash for the staleness limit.

    A marker is the mean over the last tenth; a grey line is the floor set by the participation of devices.
    """
    taus, steps = (sorted({line[key] for line in lines}) for key in ("tau", "epochs"))
    for line in lines:
        place = taus.index(line["tau"])
        colour, style = LIGHT[steps.index(line["epochs"])], DASHES[place]
        axes.plot(*_points(line, "mean"), color=colour, ls=style, lw=1.5)
        axes.plot([line["versions"] * 1.3], [line["tail"]], MARKERS[place], color=colour, ms=4.5, mfc="white")
        if line["epochs"] == steps[-1]:
            axes.axhline(line["participation_floor"], color=MUTED, alpha=0.6, ls=style, lw=0.9, zorder=0)
    for index, n in enumerate(steps):
        axes.plot([], [], color=LIGHT[index], lw=1.5, label=f"{n} local step{'s' * (n > 1)}")
    for index, tau in enumerate(taus):
        form = f"{MARKERS[index]}{DASHES[index]}"
        axes.plot([], [], form, color=MUTED, lw=1.5, ms=4.5, mfc="white", label=f"limit {tau}")
    axes.plot([], [], color=MUTED, alpha=0.6, lw=0.9, label="floor")
    axes.legend(frameon=False, fontsize=8, loc="lower left", ncols=3, columnspacing=1.0)
    axes.set_ylim(1.2e-3, 0.6)
    axes.set_title(f"{TITLES[lines[0]['method']]}: measured (markers: last tenth)" if lines else "")


def _plot_bounds(axes: "Axes", lines: Sequence[Record]) -> None:
    """Measured means and the two bounds for the most local steps, one colour per staleness limit."""
    most = max((line["epochs"] for line in lines), default=0)
    chosen = sorted((line for line in lines if line["epochs"] == most), key=lambda line: line["tau"])
    for index, line in enumerate(chosen):
        colour = LIGHT[index + 3]
        axes.plot(*_points(line, "corrected"), color=colour, lw=1.5, label=f"limit {line['tau']}")
        axes.plot(*_points(line, "printed"), color=colour, lw=1.5, ls="--")
        axes.plot(*_points(line, "mean"), color=colour, lw=1.5, ls=":")
    if chosen:
        _level(axes, max(line["constants"]["second_moment"] for line in chosen), r"$G^2$ (trivial)")
        axes.set_title(f"{TITLES[chosen[0]['method']]}, {most} local step{'s' * (most > 1)}: bounds")
        axes.set_ylim(top=1e4 * max(line["corrected"] for line in chosen))
    _kinds(axes)


def _plot_horizon(axes: "Axes", lines: Sequence[Record]) -> None:
    """One run per T with the theorem's step size, and the slope that its first terms promise."""
    kinds = list(dict.fromkeys((line["method"], line["iota0"]) for line in lines))
    for index, (method, iota) in enumerate(kinds):
        mine = [line for line in lines if (line["method"], line["iota0"]) == (method, iota)]
        label = rf"{TITLES[method]}, $\iota_0$ = {iota:g}"
        points = [line["versions"] for line in mine], [line["mean"] for line in mine]
        axes.plot(*points, "o-", color=LIGHT[index], lw=1.5, ms=5, label=label)
    if lines:
        first = lines[0]
        ends = [min(line["versions"] for line in lines), max(line["versions"] for line in lines)]
        slope = [first["mean"] * (ends[0] / T) ** 0.5 for T in ends]
        axes.plot(ends, slope, color=MUTED, lw=1, ls="--", label=r"slope of $1/\sqrt{T}$")
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    axes.set_title(r"$\eta = 1/\sqrt{T}$, 1 local step: a run per T")


def _plot_witness(axes: "Axes", lines: Sequence[Record]) -> None:
    """Two devices of unequal size: the measured mean and both bounds."""
    for line in lines:
        axes.plot(*_points(line, "corrected"), color=LIGHT[4], lw=1.5)
        axes.plot(*_points(line, "printed"), color=LIGHT[4], lw=1.5, ls="--")
        axes.plot(*_points(line, "mean"), color=LIGHT[4], lw=1.5, ls=":")
        _level(axes, line["constants"]["second_moment"], r"$G^2$ (trivial)")
        axes.set_ylim(top=30 * line["corrected"])
    _kinds(axes)
    axes.set_title("Two devices of unequal size: bounds")


def _points(line: Record, key: str) -> tuple[list[int], list[float]]:
    return [point["T"] for point in line["curve"]], [point[key] for point in line["curve"]]


def _level(axes: "Axes", value: float, text: str) -> None:
    axes.axhline(value, color=MUTED, lw=0.8)
    axes.annotate(text, (1, value), (3, 3), textcoords="offset points", color=MUTED, fontsize=8)


def _kinds(axes: "Axes") -> None:
    for style, label in zip(DASHES, ("corrected bound", "printed bound", "measured"), strict=True):
        axes.plot([], [], color=MUTED, lw=1.5, ls=style, label=label)
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)


def _label(axes: "Axes", letter: str) -> None:
    axes.set_xlabel("global updates T")
    axes.set_title(f"({letter}) {axes.get_title()}", fontsize=10, loc="left")
    axes.set_title("")
    axes.grid(color=GRID, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=8)
