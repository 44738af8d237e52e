"""Exports: a tidy table of metrics (CSV, Parquet), figures for a paper (PDF), a results table (LaTeX)."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from freshet.errors import ConfigError
from freshet.files import printable
from freshet.report.columns import DEVICES, Column, best_median, choose_columns, format_target, without_times
from freshet.report.groups import (
    Group,
    common_step,
    comparables,
    group_runs,
    headline,
    metric_of_groups,
    resolve_target,
)
from freshet.report.reading import Record, RunData
from freshet.runs.records import Maybe, Metric, number

if TYPE_CHECKING:
    import pandas as pd

#: The first columns, in this order; other columns of metrics.jsonl follow.
FIRST = ("run", "method", "label", "seed", "status", "time", "version", "accuracy", "loss")


def tidy(runs: Sequence[RunData]) -> list[Record]:
    """One row per test of a model: its run, its time, and all numbers of metrics.jsonl."""
    labels = {id(run): group.label for group in group_runs(runs) for run in group.runs}
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
    """Write the tidy table as CSV. Numbers read back to the same bits."""
    table = frame(runs)
    for name in FIRST[:5]:
        table[name] = [neutralise(value) if isinstance(value, str) else value for value in table[name]]
    table.rename(columns=neutralise).to_csv(path, index=False, lineterminator="\n")


def neutralise(text: str) -> str:
    """A text that no spreadsheet takes for a formula and no terminal for a control sequence."""
    shown = printable(text)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@")) else shown


def require_pyarrow() -> None:
    """Raise if Parquet cannot be written."""
    if find_spec("pyarrow") is None:
        raise ConfigError("--parquet", "needs pyarrow, which is not installed; run `pip install pyarrow` or use --csv")


def to_parquet(runs: Sequence[RunData], path: Path) -> None:
    require_pyarrow()
    frame(runs).to_parquet(path, index=False, engine="pyarrow")


def to_pdf(runs: Sequence[RunData], path: Path, target: float | None = None) -> None:
    from freshet.report.figures import paper_figures

    paper_figures([(group_runs(world.runs), resolve_target(world.runs, target)) for world in comparables(runs)], path)


def to_latex(runs: Sequence[RunData], path: Path, target: float | None = None) -> None:
    found = comparables(runs)
    tables = [latex(group_runs(world.runs), resolve_target(world.runs, target)) for world in found]
    heads = [f"% {tex(w.name)}\n" if len(found) > 1 else "" for w in found]
    path.write_text("\n".join(map(str.__add__, heads, tables)), encoding="utf-8")


# ---- LaTeX

_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


def tex(value: str) -> str:
    """A text with LaTeX's special characters escaped."""
    plain = "".join(character if character.isprintable() else " " for character in value)
    return "".join(_SPECIAL.get(character, character) for character in plain)


def _cell(spread: Record, show: Callable[[float], str]) -> str:
    """Median, with least and greatest if seeds differ; a dash if there is no median."""
    if spread["median"] is None:
        return "--"
    low, high = show(spread["low"]), show(spread["high"])
    middle = show(spread["median"])
    if spread["count"] < spread["of"]:
        return rf"{middle} {{\scriptsize ({spread['count']} of {spread['of']})}}"
    if low == high:
        return middle
    return rf"{middle} {{\scriptsize ({low}--{high})}}"


_LATEX = (
    "accuracy", "best", "time_raw", "time_mean", *DEVICES, "mean_staleness", "discards", "rejected", "bytes_up",
    "bytes_down",
)  # fmt: skip
_UNITS = {"share": r" (\%)", "value": "", "seconds": " (s)", "bytes": " (MB)", "mean": "", "index": "", "count": ""}
_SHOW: dict[str, Callable[[float], str]] = {
    "share": lambda value: f"{100 * value:.1f}",
    "value": lambda value: f"{float(f'{value:.4g}'):.15g}",
    "seconds": lambda value: f"{value:.0f}",
    "mean": lambda value: f"{value:.1f}",
    "index": lambda value: f"{value:.3f}",
    "count": lambda value: f"{value:.0f}",
    "bytes": lambda value: f"{value / 1e6:.1f}",
}
_TIMES = "% Times on a common grid: raw first crossing, and trailing 5-point mean; -- means not reached by the median."


def _heading(column: Column, target: Maybe, metric: Metric) -> str:
    of = ""
    if target is not None and column.key == "time_raw":
        of = " of " + tex(format_target(target, metric)).replace(" ", r"\,")
    title = column.title[0].upper() + column.title[1:]
    return tex(title) + of + _UNITS[column.kind]


def latex(groups: Sequence[Group], target: Maybe) -> str:
    """A results table (booktabs) with one line per method and the best medians in bold."""
    counted = [group for group in groups if group.ended_runs]
    step = common_step([run for group in groups for run in group.runs])
    lines = [headline(group, target, step, None) for group in counted]
    metric = metric_of_groups(groups)
    columns = choose_columns(without_times(_LATEX, target), lines, metric)
    tops = [best_median(column, lines) for column in columns]
    rows = []
    for line in lines:
        cells = [_cell(line[column.key], _SHOW[column.kind]) for column in columns]
        for place, (column, top) in enumerate(zip(columns, tops, strict=True)):
            median, show = line[column.key]["median"], _SHOW[column.kind]
            if top is not None and median is not None and show(median) == show(top):
                cells[place] = rf"\textbf{{{cells[place]}}}"
        rows.append(" & ".join([tex(line["label"]), str(line["runs"]), *cells]) + r" \\")
    heads = " & ".join(["Method", "Seeds", *(_heading(column, target, metric) for column in columns)]) + r" \\"
    head = [
        "% Medians over seeds (least--greatest) of finished runs; needs \\usepackage{booktabs}.",
        *([] if target is None else [_TIMES]),
        rf"\begin{{tabular}}{{l{'r' * (len(columns) + 1)}}}",
        r"\toprule", heads, r"\midrule",
    ]  # fmt: skip
    return "\n".join([*head, *rows, r"\bottomrule", r"\end{tabular}", ""])
