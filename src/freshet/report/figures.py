"""Figures from run directories, drawn with matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from freshet.runs.reader import Run

COLOURS = ("#0b6e99", "#e07a1f", "#3a9d5d", "#8c5bb5", "#c8385a", "#8a7a52", "#4b5563", "#d4a017", "#2a9d8f", "#9d4b30")


def accuracy_figure(runs: Sequence[Run], path: Path) -> Path:
    """Accuracy of the global model over virtual time, one line per run, with the target's crossing marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    target = 0.0
    for index, run in enumerate(runs):
        rows, summary = run.metrics(), run.summary()
        colour = COLOURS[index % len(COLOURS)]
        times = [row["time"] for row in rows]
        axes.plot(times, [row["accuracy"] for row in rows], color=colour, lw=1.8, label=summary["method"])
        target, reached = summary["target"], summary["time_to_target"]
        if reached is not None:
            axes.plot([reached], [target], "o", color=colour, ms=6, mec="white", mew=1, zorder=5)
    axes.axhline(target, color="#9ca3af", lw=0.8, ls="--", zorder=0)
    axes.annotate(f"target {target:g}", (0, target), (4, 3), textcoords="offset points", color="#6b7280", fontsize=8)
    axes.set_xlabel("virtual time (s)")
    axes.set_ylabel("test accuracy")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1)
    axes.grid(color="#e5e7eb", lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)
    return path
