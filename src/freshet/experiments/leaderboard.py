"""The results of a benchmark: scores and ranks per world, ranks over worlds, as JSON, tables and a picture."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freshet._version import __version__
from freshet.errors import RunError
from freshet.experiments.bench import BUDGETS, VERSION, BenchRun, BenchWorld
from freshet.experiments.ranking import ALPHA, Ranking, area, final, rank, rank_methods
from freshet.files import write_atomically
from freshet.report.palette import GRID, INK, LIGHT, MUTED
from freshet.report.statistics import over_seeds, over_seeds_reached
from freshet.runs.records import first_crossing, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = dict[str, Any]
#: What methods are ranked by, with its title. The first one orders the tables.
RANKED = {"area": "mean accuracy over the run", "accuracy": "accuracy at the end"}
PICTURE = "benchmark.png"
#: Parts of the page that are generated stand between two such comments.
BEGIN, END = "<!-- begin {} -->", "<!-- end {} -->"


# ---- scores


def score_run(run: BenchRun, targets: tuple[float, float]) -> Record:
    """The scores of one run. A test without a finite accuracy counts as 0, and so does the time after a divergence."""
    times = [float(row["time"]) for row in run.rows]
    values = [number(row.get("accuracy")) or 0.0 for row in run.rows]
    diverged = number(run.summary.get("diverged"))
    return {
        "seed": run.seed,
        "accuracy": final(values) if diverged is None else 0.0,
        "area": area(times, values, run.until),
        "times": [first_crossing(times, values, target) for target in targets],
        "bytes": [bytes_to(run.rows, values, target) for target in targets],
        "worst_decile": number(run.summary.get("devices_p10")),
        "diverged": diverged,
        "wall_seconds": run.wall,
        "source": run.source,
    }


def bytes_to(rows: Sequence[Mapping[str, Any]], values: Sequence[float], target: float) -> float | None:
    """Bytes sent up and down until the first test that reaches the target, or None."""
    for row, value in zip(rows, values, strict=True):
        up, down = number(row.get("bytes_up")), number(row.get("bytes_down"))
        if value >= target:
            return None if up is None or down is None else up + down
    return None


def world_record(world: BenchWorld, budget: str, runs: Sequence[BenchRun], failures: Mapping[str, str]) -> Record:
    """The lines of one world, the best first. ``failures`` has a sentence for each method with a crashed run."""
    targets = world.targets(budget)
    lines = [_line(method, [run for run in runs if run.method == method], targets) for method in _methods(runs)]
    lines += [_failed_line(method) for method in failures if method not in _methods(runs)]
    for line in lines:
        line["failures"] += [failures[line["method"]]] if line["method"] in failures else []
    for score in RANKED:
        medians = [line[score]["median"] if line["runs"] else -math.inf for line in lines]
        for line, place, band in zip(lines, rank(medians), _bands(lines, score), strict=True):
            line["rank"] |= {score: {"median": place, "low": band[0], "high": band[1]}}
    lines.sort(key=lambda line: (line["rank"]["area"]["median"], line["method"]))
    return {"name": world.name, "title": world.title, "targets": list(targets), "lines": lines}


def _line(method: str, runs: Sequence[BenchRun], targets: tuple[float, float]) -> Record:
    scores = [score_run(run, targets) for run in sorted(runs, key=lambda run: run.seed)]
    ends = [
        f"diverged at {each['diverged']:g} s (seed {each['seed']})" for each in scores if each["diverged"] is not None
    ]
    return {
        "method": method,
        "kind": runs[0].kind,
        "marks": dict(runs[0].marks),
        **{name: asdict(over_seeds([each[name] for each in scores])) for name in ("accuracy", "area", "worst_decile")},
        **{
            name: [asdict(over_seeds_reached([each[name][place] for each in scores])) for place in range(len(targets))]
            for name in ("times", "bytes")
        },
        "rank": {},
        "failures": ends,
        "runs": scores,
    }


def _failed_line(method: str) -> Record:
    nothing = asdict(over_seeds([]))
    line = dict.fromkeys(("accuracy", "area", "worst_decile"), nothing)
    never = {"times": [nothing, nothing], "bytes": [nothing, nothing], "rank": {}, "failures": [], "runs": []}
    return {"method": method, "kind": "", "marks": {}, **line, **never}


def _bands(lines: Sequence[Record], score: str) -> list[tuple[float, float]]:
    """Least and greatest rank of each method when one seed is counted, over the seeds that all methods have."""
    by_seed = [{each["seed"]: each[score] for each in line["runs"]} for line in lines]
    present = [set(each) for each in by_seed if each]
    seeds = sorted(set.intersection(*present)) if present else []
    single = [rank([each.get(seed, -math.inf) for each in by_seed]) for seed in seeds]
    middle = rank([line[score]["median"] if line["runs"] else -math.inf for line in lines])
    single = single or [middle]
    return [(min(each[n] for each in single), max(each[n] for each in single)) for n in range(len(lines))]


def _methods(runs: Iterable[BenchRun]) -> list[str]:
    return list(dict.fromkeys(run.method for run in runs))


# ---- over worlds


def board(
    worlds: Sequence[BenchWorld],
    budget: str,
    runs: Sequence[BenchRun],
    failures: Mapping[tuple[str, str], str] | None = None,
    notes: Sequence[str] = (),
) -> Record:
    """All results of a benchmark as plain values: the content of ``benchmark.json``.

    ``failures`` are errors of crashed runs by (world, method). A method that crashed in a world is last there. A method
    that was not run in one of the worlds is left out of the ranks over worlds, and named.
    """
    crashed = failures or {}
    records = [
        world_record(
            world,
            budget,
            [run for run in runs if run.world == world.name],
            {method: error for (name, method), error in crashed.items() if name == world.name},
        )
        for world in worlds
    ]
    shown = [record for record in records if record["lines"]]
    present = [{line["method"] for line in record["lines"]} for record in shown]
    everywhere = set.intersection(*present) if present else set()
    left_out = sorted({method for each in present for method in each} - everywhere)
    return {
        "version": VERSION,
        "budget": budget,
        "seeds": sorted({run.seed for run in runs}),
        "freshet": sorted({str(run.summary.get("freshet", __version__)) for run in runs}),
        "tuning": BUDGETS[budget].trials,
        "worlds": shown,
        "ranks": {score: ranking_record(_ranking(shown, everywhere, score)) for score in RANKED},
        "left_out": left_out,
        "notes": list(notes),
    }


def _ranking(records: Sequence[Record], methods: set[str], score: str) -> Ranking:
    """Ranks over worlds. A crashed method has the score minus infinity with every seed."""
    seeds = sorted({each["seed"] for record in records for line in record["lines"] for each in line["runs"]})
    nothing = dict.fromkeys(seeds, -math.inf)
    return rank_methods(
        {
            record["name"]: {
                line["method"]: {each["seed"]: each[score] for each in line["runs"]} or nothing
                for line in sorted(record["lines"], key=lambda line: line["method"])
                if line["method"] in methods
            }
            for record in records
        }
    )


def ranking_record(ranking: Ranking) -> Record:
    """Ranks as plain values."""
    return {
        "methods": ranking.methods,
        "mean": ranking.means,
        "bands": [list(band) for band in ranking.bands],
        "by_world": ranking.by_world,
        "friedman": ranking.statistic,
        "p": ranking.p,
        "critical_difference": ranking.difference,
        "alpha": ALPHA,
        "groups": [[ranking.methods[first], ranking.methods[last]] for first, last in ranking.groups],
    }


# ---- tables


def results_text(found: Record) -> str:
    """The results as Markdown: ranks over worlds, then a table per world."""
    if not found["worlds"]:
        return "No results are kept yet.\n"
    seeds = f"{len(found['seeds'])} seed{'s' * (len(found['seeds']) != 1)}"
    tuning = f"{found['tuning']} trials of tuning per method" if found["tuning"] else "nothing tuned"
    lines = [f"Budget `{found['budget']}`: {seeds}, {tuning}. Freshet {', '.join(found['freshet'])}.", ""]
    lines += _ranks_table(found)
    for world in found["worlds"]:
        lines += _world_table(world)
    marks = {mark: text for world in found["worlds"] for line in world["lines"] for mark, text in line["marks"].items()}
    lines += [f"[{mark}] {text}" for mark, text in marks.items()] + ([""] if marks else [])
    lines += _failures(found)
    lines += [f"* {note}" for note in found["notes"]]
    return "\n".join(lines).rstrip() + "\n"


def _ranks_table(found: Record) -> list[str]:
    """Mean ranks over worlds by both scores."""
    main, other = (found["ranks"][score] for score in RANKED)
    names = [world["name"] for world in found["worlds"]]
    lines = ["### Ranks over worlds", "", *_test_sentence(main, len(names)), ""]
    lines += [f"| method | mean rank | over seeds | {' | '.join(names)} | by {RANKED['accuracy']} |"]
    lines += [f"|---|---|---|{'---|' * len(names)}---|"]
    for place, method in enumerate(main["methods"]):
        low, high = main["bands"][place]
        row = [method, f"{main['mean'][place]:.2f}", f"{low:.2f} to {high:.2f}"]
        row += [f"{value:g}" for value in main["by_world"][place]]
        row.append(f"{other['mean'][other['methods'].index(method)]:.2f}")
        lines.append(f"| {' | '.join(row)} |")
    left = f"Not run in every world, so not ranked: {', '.join(found['left_out'])}."
    return [*lines, "", *([left, ""] if found["left_out"] else [])]


def _test_sentence(ranks: Record, worlds: int) -> list[str]:
    title = f"Rank by {RANKED['area']}; 1 is best."
    if ranks["critical_difference"] is None:
        return [title]
    difference, p = ranks["critical_difference"], ranks["p"]
    verdict = "differ" if p < ALPHA else "do not differ more than by chance"
    return [
        f"{title} Over {worlds} worlds the methods {verdict} (Friedman {ranks['friedman']:.1f}, p {p:.2g}). Two mean "
        f"ranks differ at the level {ALPHA:g} if they are {difference:.1f} apart (Nemenyi)."
    ]


def _world_table(world: Record) -> list[str]:
    first, second = (f"{100 * target:g} %" for target in world["targets"])
    heads = [
        "method",
        "rank",
        "over run",
        "at the end",
        f"to {first}",
        f"to {second}",
        f"bytes to {first}",
        "worst decile",
    ]
    lines = [f"### {world['title']} (`{world['name']}`)", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for line in world["lines"]:
        marks = "".join(f" [{mark}]" for mark in line["marks"])
        ranks = line["rank"]["area"]
        band = "" if ranks["low"] == ranks["high"] else f" ({ranks['low']:g} to {ranks['high']:g})"
        row = [f"{line['method']}{marks}", f"{ranks['median']:g}{band}"]
        row += [_share(line["area"]), _share(line["accuracy"])]
        row += [_amount(each, _seconds) for each in line["times"]]
        row += [_amount(line["bytes"][0], _megabytes), _share(line["worst_decile"])]
        lines.append(f"| {' | '.join(row)} |")
    return [*lines, ""]


def _failures(found: Record) -> list[str]:
    sentences = [
        f"* {line['method']} in {world['name']}: {'; '.join(line['failures'])}"
        for world in found["worlds"]
        for line in world["lines"]
        if line["failures"]
    ]
    return ["### Failures", "", *sentences, ""] if sentences else []


def _share(spread: Record) -> str:
    if spread["median"] is None:
        return "–"
    band = "" if spread["low"] == spread["high"] else f" ({spread['low']:.3f} to {spread['high']:.3f})"
    return f"{spread['median']:.3f}{band}"


def _amount(spread: Record, text: Any) -> str:
    """A median, with how many seeds reached it if not all did."""
    part = "" if spread["count"] in (0, spread["of"]) else f" ({spread['count']}/{spread['of']})"
    return ("never" if spread["median"] is None else str(text(spread["median"]))) + part


def _seconds(value: float) -> str:
    return f"{value:,.0f} s"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB"


def worlds_text(worlds: Iterable[BenchWorld]) -> str:
    """A paragraph per world, with what it needs."""
    lines = []
    for world in worlds:
        needs = f"Needs {world.data} (`freshet data get {world.data}`); `quick` needs nothing."
        lines += [f"### {world.title} (`{world.name}`)", "", " ".join(world.about.split()), "", needs, ""]
    return "\n".join(lines)


def fill_page(page: Path, parts: Mapping[str, str]) -> None:
    """Replace the generated parts of a page: what stands between the comments of their names."""
    text = page.read_text(encoding="utf-8")
    for name, content in parts.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, found, rest = text.partition(begin)
        after = rest.partition(end)[2]
        if not found or end not in rest:
            raise RunError(f"{page} has no part {begin} ... {end}; restore these comments")
        text = f"{before}{begin}\n\n{content.rstrip()}\n\n{end}{after}"
    write_atomically(page, text.encode())


def page_results(found: Record, picture: bool) -> str:
    """The results for the page, below their picture."""
    shown = f"![mean ranks of the methods over the worlds](images/{PICTURE})\n\n" if picture else ""
    return shown + results_text(found)


def write_json(found: Record, path: Path) -> None:
    """Write the results as JSON."""
    write_atomically(path, as_json(found).encode())


def write_board(found: Record, folder: Path, stem: str = "benchmark") -> list[Path]:
    """Write ``stem.json``, ``stem.md`` and ``stem.png`` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{stem}.json", folder / f"{stem}.md"]
    write_json(found, files[0])
    write_atomically(files[1], results_text(found).encode())
    return [*files, *draw_ranks(found, folder / f"{stem}.png")]


def as_json(found: Record) -> str:
    """The results as JSON, with scores of six digits."""
    return json.dumps(_round_floats(found), indent=1, allow_nan=False) + "\n"


def _round_floats(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _round_floats(each) for key, each in value.items()}
    return [_round_floats(each) for each in value] if isinstance(value, list | tuple) else value


# ---- the picture


def draw_ranks(found: Record, path: Path) -> list[Path]:
    """Draw the ranks over worlds; nothing if no method has runs in every world."""
    if not found["ranks"]["area"]["methods"]:
        return []
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = ranks_figure(found)
    FigureCanvasAgg(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return [path]


def ranks_figure(found: Record) -> "Figure":
    """A row per method, the best on top: mean rank, its band over seeds, and the rank in each world.

    The shaded part holds the methods that do not differ from the first by more than the critical difference. Bars on
    the right join methods that do not differ from each other.
    """
    from matplotlib.figure import Figure

    ranks = found["ranks"]["area"]
    methods, means, difference = ranks["methods"], ranks["mean"], ranks["critical_difference"]
    count = len(methods)
    figure = Figure(figsize=(8.6, 1.7 + 0.23 * count))
    axes = figure.subplots()
    rows = list(range(count))
    if difference is not None:
        axes.axvspan(means[0], means[0] + difference, color=LIGHT[0], alpha=0.08, lw=0)
    names = [world["name"] for world in found["worlds"]]
    for place, name in enumerate(names):
        values = [ranks["by_world"][row][place] for row in rows]
        axes.plot(values, rows, "o", ms=4, mfc="none", mew=1.2, color=LIGHT[1 + place], label=name, zorder=4)
    for row, (low, high) in enumerate(ranks["bands"]):
        axes.plot([low, high], [row, row], "-", lw=3.5, color=LIGHT[0], alpha=0.35, solid_capstyle="round")
    axes.plot(means, rows, "D", ms=6, color=LIGHT[0], label="mean rank")
    reach = max([count, *means]) + 0.5
    for place, (first, last) in enumerate(ranks["groups"]):
        at = reach + 0.02 * count * (1 + place % 4)
        top, bottom = methods.index(first), methods.index(last)
        axes.plot([at, at], [top - 0.25, bottom + 0.25], "-", lw=2.2, color=MUTED, clip_on=False)
    axes.set_yticks(rows, methods, fontsize=8.5)
    axes.set_ylim(count - 0.4, -0.6)
    axes.set_xlim(0.4, reach)
    axes.set_xlabel("rank by mean accuracy over the run (1 is best)", fontsize=9, color=INK)
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, colors=INK)
    seeds = f"{len(found['seeds'])} seed{'s' * (len(found['seeds']) != 1)}"
    axes.set_title(
        f"{found['version']}, {found['budget']}: {len(names)} worlds, {seeds}",
        loc="left",
        fontsize=10.5,
        color=INK,
        pad=34,
    )
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=len(names) + 1,
        fontsize=8,
        frameon=False,
        columnspacing=1.2,
        handletextpad=0.3,
    )
    if difference is not None:
        near = f"within the critical difference of the first ({difference:.1f}, Nemenyi, {ALPHA:g})"
        note = f"shaded: {near}; bars on the right join methods that do not differ"
        figure.text(0.01, 0.008, note, fontsize=7.5, color=MUTED)
    figure.subplots_adjust(
        left=0.2, right=0.93, top=1 - 0.85 / (1.7 + 0.23 * count), bottom=0.72 / (1.7 + 0.23 * count)
    )
    return figure
