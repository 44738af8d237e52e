"""The figure of the check of Theorem 1: what was measured above, beside the bounds below."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freshet.report.palette import GRID, LIGHT, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Record = dict[str, Any]
TITLES = {"fedasmu": "FedASMU", "fedssmu": "FedSSMU"}
DASHES, MARKERS = ("-", "--", ":"), ("o", "s", "^")


def draw_theory(found: Record, folder: Path) -> list[Path]:
    """``theory.png`` and ``theory.pdf``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
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
        _finish(panel, letter)
    for row in axes:
        row[0].set_ylabel(r"mean of $\|\nabla F(w_t)\|^2$ over $t \leq T$")
    files = [folder / "theory.png", folder / "theory.pdf"]
    figure.savefig(files[0], dpi=130)
    figure.savefig(files[1], metadata={"Creator": "freshet", "CreationDate": None})
    return files


def _plot_measured(axes: "Axes", lines: Sequence[Record]) -> None:
    """Running means of the squared gradient norm; colour for local steps, dash for the staleness limit.

    A marker is the mean over the last tenth, a grey level the floor that the participation of devices sets.
    """
    taus, steps = (sorted({line[key] for line in lines}) for key in ("tau", "epochs"))
    for line in lines:
        place = taus.index(line["tau"])
        colour, dash = LIGHT[steps.index(line["epochs"])], DASHES[place]
        axes.plot(*_curve(line, "mean"), color=colour, ls=dash, lw=1.5)
        axes.plot([line["versions"] * 1.3], [line["tail"]], MARKERS[place], color=colour, ms=4.5, mfc="white")
        if line["epochs"] == steps[-1]:
            axes.axhline(line["participation_floor"], color=MUTED, alpha=0.6, ls=dash, lw=0.9, zorder=0)
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
        axes.plot(*_curve(line, "corrected"), color=colour, lw=1.5, label=f"limit {line['tau']}")
        axes.plot(*_curve(line, "printed"), color=colour, lw=1.5, ls="--")
        axes.plot(*_curve(line, "mean"), color=colour, lw=1.5, ls=":")
    if chosen:
        _level(axes, max(line["constants"]["second_moment"] for line in chosen), r"$G^2$ (trivial)")
        axes.set_title(f"{TITLES[chosen[0]['method']]}, {most} local step{'s' * (most > 1)}: bounds")
        axes.set_ylim(top=1e4 * max(line["corrected"] for line in chosen))
    _kinds(axes)


def _plot_horizon(axes: "Axes", lines: Sequence[Record]) -> None:
    """One run per T with the theorem's step size, beside the slope that its first terms promise."""
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
    """Two devices of unequal size: the measured mean against both bounds."""
    for line in lines:
        axes.plot(*_curve(line, "corrected"), color=LIGHT[4], lw=1.5)
        axes.plot(*_curve(line, "printed"), color=LIGHT[4], lw=1.5, ls="--")
        axes.plot(*_curve(line, "mean"), color=LIGHT[4], lw=1.5, ls=":")
        _level(axes, line["constants"]["second_moment"], r"$G^2$ (trivial)")
        axes.set_ylim(top=30 * line["corrected"])
    _kinds(axes)
    axes.set_title("Two devices of unequal size: bounds")


def _curve(line: Record, key: str) -> tuple[list[int], list[float]]:
    return [point["T"] for point in line["curve"]], [point[key] for point in line["curve"]]


def _level(axes: "Axes", value: float, text: str) -> None:
    axes.axhline(value, color=MUTED, lw=0.8)
    axes.annotate(text, (1, value), (3, 3), textcoords="offset points", color=MUTED, fontsize=8)


def _kinds(axes: "Axes") -> None:
    for dash, label in zip(DASHES, ("corrected bound", "printed bound", "measured"), strict=True):
        axes.plot([], [], color=MUTED, lw=1.5, ls=dash, label=label)
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)


def _finish(axes: "Axes", letter: str) -> None:
    axes.set_xlabel("global updates T")
    axes.set_title(f"({letter}) {axes.get_title()}", fontsize=10, loc="left")
    axes.set_title("")
    axes.grid(color=GRID, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=8)
