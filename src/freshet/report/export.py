"""Exports: a tidy table of metrics (CSV, Parquet), figures for a paper (PDF), a table of results (LaTeX)."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freshet.errors import ConfigError
from freshet.report.groups import Group, common_step, grouped, headline, target_of
from freshet.report.reading import Record, RunData
from freshet.runs.facts import number

if TYPE_CHECKING:
    import pandas as pd

#: Columns that come first, in this order; further ones of metrics.jsonl follow.
FIRST = ("run", "method", "label", "seed", "status", "time", "version", "accuracy", "loss")


def tidy(runs: Sequence[RunData]) -> list[Record]:
    """One row per test of a model: which run, when, and every number of metrics.jsonl."""
    labels = {id(run): group.label for group in grouped(runs) for run in group.runs}
    rows = []
    for run in runs:
        who = {"run": run.name, "method": run.method, "label": labels[id(run)], "seed": run.seed, "status": run.status}
        for row in run.metrics:
            numbers = {key: value for key, value in row.items() if value is None or number(value) is not None}
            rows.append(who | {key: numbers.get(key) for key in FIRST[5:]} | numbers)
    return rows


def frame(runs: Sequence[RunData]) -> "pd.DataFrame":
    """The tidy table as a DataFrame."""
    import pandas as pd

    rows = tidy(runs)
    more = sorted({key for row in rows for key in row} - set(FIRST))
    return pd.DataFrame(rows, columns=pd.Index([*FIRST, *more]))


def to_csv(runs: Sequence[RunData], path: Path) -> None:
    """Numbers are written so that reading them back gives the same bits."""
    frame(runs).to_csv(path, index=False, lineterminator="\n")


def to_parquet(runs: Sequence[RunData], path: Path) -> None:
    if find_spec("pyarrow") is None:
        raise ConfigError("--parquet", "needs pyarrow, which is not installed; run `pip install pyarrow` or use --csv")
    frame(runs).to_parquet(path, index=False, engine="pyarrow")


def to_pdf(runs: Sequence[RunData], path: Path, target: float | None = None) -> None:
    from freshet.report.figures import paper_figures

    paper_figures(grouped(runs), target_of(runs) if target is None else target, path)


def to_latex(runs: Sequence[RunData], path: Path, target: float | None = None) -> None:
    path.write_text(latex(grouped(runs), target_of(runs) if target is None else target), encoding="utf-8")


# ---- LaTeX

_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


def tex(value: str) -> str:
    """Any text as LaTeX shows it."""
    plain = "".join(character if character.isprintable() else " " for character in value)
    return "".join(_SPECIAL.get(character, character) for character in plain)


def _cell(spread: Record, show: Callable[[float], str]) -> str:
    """Median, with the least and greatest behind it where seeds differ; a dash where there is none."""
    if spread["median"] is None:
        return "--"
    low, high = show(spread["low"]), show(spread["high"])
    middle = show(spread["median"])
    if spread["count"] < spread["of"]:
        return rf"{middle} {{\scriptsize ({spread['count']} of {spread['of']})}}"
    if low == high:
        return middle
    return rf"{middle} {{\scriptsize ({low}--{high})}}"


def latex(groups: Sequence[Group], target: float) -> str:
    """A results table (booktabs): one line per method, the best median in bold."""
    counted = [group for group in groups if group.counted]
    step = common_step([run for group in groups for run in group.runs])
    lines = [headline(group, target, step, None) for group in counted]
    columns: list[tuple[str, str, Callable[[float], str], int]] = [
        ("accuracy", r"Accuracy (\%)", lambda v: f"{100 * v:.1f}", -1),
        ("best", r"Best (\%)", lambda v: f"{100 * v:.1f}", -1),
        ("time_raw", rf"Time to {100 * target:g}\,\% (s)", lambda v: f"{v:.0f}", 1),
        ("time_mean", "5-point mean (s)", lambda v: f"{v:.0f}", 1),
        ("mean_staleness", "Staleness", lambda v: f"{v:.1f}", 0),
        ("discards", "Discarded", lambda v: f"{v:.0f}", 0),
        ("bytes_up", "Up (MB)", lambda v: f"{v / 1e6:.1f}", 0),
        ("bytes_down", "Down (MB)", lambda v: f"{v / 1e6:.1f}", 0),
    ]
    rows = []
    for line in lines:
        cells = [_cell(line[key], show) for key, _, show, _ in columns]
        for place, (key, _, _, sign) in enumerate(columns):
            if sign and len(lines) > 1 and line[key]["median"] == _best(lines, key, sign) is not None:
                cells[place] = rf"\textbf{{{cells[place]}}}"
        rows.append(" & ".join([tex(line["label"]), str(line["runs"]), *cells]) + r" \\")
    heads = " & ".join(["Method", "Seeds", *(title for _, title, _, _ in columns)]) + r" \\"
    head = [
        "% Medians over seeds (least--greatest) of finished runs; needs \\usepackage{booktabs}.",
        "% Times on a common grid: raw first crossing, and trailing 5-point mean; -- means not reached by the median.",
        rf"\begin{{tabular}}{{l{'r' * (len(columns) + 1)}}}",
        r"\toprule", heads, r"\midrule",
    ]  # fmt: skip
    return "\n".join([*head, *rows, r"\bottomrule", r"\end{tabular}", ""])


def _best(lines: Sequence[Record], key: str, sign: int) -> Any:
    medians = [line[key]["median"] for line in lines if line[key]["median"] is not None]
    return None if not medians else (min(medians) if sign > 0 else max(medians))
