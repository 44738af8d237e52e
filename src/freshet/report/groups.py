"""Which runs are compared, and how: groups over seeds, comparables, references and headline numbers.

Runs that differ only in their seed form a group; only ended runs count. Groups are comparable, and ranked with each
other, if they train the same network and are tested on the same data. Each method is compared with a reference:

    time ratio = (time to target) / (time to target of the reference):  1.60 takes 1.6 times as long, 0.50 half as long

If a median is missing because runs do not reach the target, the ratio is a bound: they need longer than they lasted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from freshet.errors import ConfigError
from freshet.report.columns import SUMMARY_COLUMNS
from freshet.report.palette import styles
from freshet.report.reading import Record, RunData
from freshet.report.statistics import (
    Spread,
    compare_paired,
    mean_crossing,
    on_grid,
    over_seeds,
    over_seeds_reached,
    regular_grid,
)
from freshet.runs.records import ACCURACY, Maybe, Metric, first_crossing, number


@dataclass(frozen=True)
class Comparable:
    """Runs that can be ranked with each other, under a name that is unique on the page.

    Fleet, partition and training may differ among them; the labels of the groups show this.
    """

    name: str
    runs: list[RunData]


def comparables(runs: Sequence[RunData]) -> list[Comparable]:
    """Split runs into comparables, in the order of their first runs."""
    found: dict[tuple[str, ...], list[RunData]] = {}
    for run in runs:
        found.setdefault(_identity(run), []).append(run)
    return [Comparable(name, members) for name, members in zip(_names(list(found)), found.values(), strict=True)]


def _identity(run: RunData) -> tuple[str, ...]:
    """Data set, network, metric, and what identifies the test set, as texts."""
    data, world = run.config.get("data", {}), run.world
    held_out = number(data.get("validation")) or 0.0
    tested = format_setting(data.get("test_samples", 0)) if world is None else str(world.test_samples)
    return (
        format_setting(data.get("name", "unknown data")),
        format_setting(run.config.get("model", {}).get("name", "unknown model")),
        f"by {run.metric.name}",
        f"held-out {100 * held_out:g} %" if held_out else "test set",
        f"{tested} test samples",
        "" if world is None else f"{len(world.classes)} classes: {', '.join(world.classes)}",
    )


def _names(identities: Sequence[tuple[str, ...]]) -> list[str]:
    """The data set, and of the other texts those that distinguish comparables of one data set."""
    names = [identity[0] for identity in identities]
    for place in range(1, max(map(len, identities), default=0)):
        alike = [[other for name, other in zip(names, identities, strict=True) if name == mine] for mine in names]
        names = [
            f"{name}, {identity[place]:.60}" if len({other[place] for other in others}) > 1 else name
            for name, identity, others in zip(names, identities, alike, strict=True)
        ]
    return names


SECTIONS = ("method", "training", "fleet", "data", "model", "run")
#: Most points of the common grid.
_MAX_GRID_POINTS = 100_000
_MAX_VALUE_LENGTH = 200
#: The setting that may differ within a group, beside those that do not affect the results.
SEED = "run.seed"


@dataclass
class Group:
    """Runs of one configuration with different seeds."""

    label: str
    runs: list[RunData]
    #: Number of colour and dash, see ``palette``.
    style: int = 0

    @property
    def ended_runs(self) -> list[RunData]:
        """The runs that have ended, including diverged ones. Only these enter medians and bands."""
        return [run for run in self.runs if run.finished]

    @property
    def kind(self) -> str:
        """``sync`` for runs in rounds, else ``async``."""
        return "sync" if self.runs[0].config.get("run", {}).get("trigger") == "rounds" else "async"


def flat_config(config: dict[str, Record]) -> dict[str, str]:
    """Settings as text by ``section.key``, in the order of the file."""
    found = {}
    for section in (*SECTIONS, *(name for name in config if name not in SECTIONS)):
        for key, value in config.get(section, {}).items():
            found[f"{section}.{key}"] = format_setting(value)
    return found


def format_setting(value: Any) -> str:
    """A setting as a person writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if abs(value) < 1e15 else repr(value)
    text = value if isinstance(value, str) else repr(value)
    text = text or "–"
    return text if len(text) <= _MAX_VALUE_LENGTH else text[: _MAX_VALUE_LENGTH - 1] + "…"


def group_runs(runs: Sequence[RunData]) -> list[Group]:
    """Split runs into groups, in the order of their first runs, with unique labels."""
    tables = [flat_config(run.config) for run in runs]
    aside = {SEED} | _non_semantic_keys(runs) | _new_keys(tables)
    found: dict[tuple[tuple[str, str], ...], list[RunData]] = {}
    for run, table in zip(runs, tables, strict=True):
        identity = tuple((key, value) for key, value in table.items() if key not in aside)
        found.setdefault(identity, []).append(run)
    identities = [dict(identity) for identity in found]
    labels = [_label(identity, identities) for identity in identities]
    looks = styles([members[0].method for members in found.values()])
    return [Group(*each) for each in zip(_unique_labels(labels), found.values(), looks, strict=True)]


def _non_semantic_keys(runs: Sequence[RunData]) -> set[str]:
    """Settings that do not affect the results, according to world.json of the runs."""
    return {key for run in runs if run.world is not None for key in run.world.aside}


def _new_keys(tables: Sequence[dict[str, str]]) -> set[str]:
    """Settings that older runs lack and all others agree on. They do not separate groups."""
    keys = {key for table in tables for key in table}
    values = {key: {table.get(key) for table in tables} for key in keys}
    return {key for key, found in values.items() if None in found and len(found) == 2}


def _label(mine: dict[str, str], everybody: list[dict[str, str]]) -> str:
    """The method's name, and the settings that differ if several groups share it."""
    name = mine.get("method.name", "unknown")
    namesakes = [other for other in everybody if other.get("method.name", "unknown") == name]
    keys = [key for key in mine if any(other.get(key) != mine[key] for other in namesakes)]
    parts = [f"{key.partition('.')[2]}={mine[key]}" for key in keys[:2]] + (["…"] if len(keys) > 2 else [])
    return f"{name} ({', '.join(parts)})" if parts else name


def _unique_labels(labels: list[str]) -> list[str]:
    return [
        f"{label} #{labels[: place + 1].count(label)}" if labels.count(label) > 1 else label
        for place, label in enumerate(labels)
    ]


# ---- headline numbers


@dataclass(frozen=True)
class Times:
    """Times of one run to the target on the common grid: of the raw metric and of its trailing mean."""

    raw: Maybe
    mean: Maybe


def common_step(runs: Sequence[RunData]) -> float:
    """Step of the common grid: the longest test interval of the runs."""
    steps = [step for run in runs if (step := run.setting("run", "eval_every")) is not None and step > 0]
    return max(steps, default=10.0)


def times_to(run: RunData, target: Maybe, step: float) -> Times:
    """First crossings of the raw metric and of its trailing 5-point mean on the common grid."""
    if run.end / step > _MAX_GRID_POINTS:
        step = run.end / _MAX_GRID_POINTS
    grid = regular_grid(step, run.end)
    times = [float(row["time"]) for row in run.metrics]
    metric = run.metric
    values = on_grid(times, run.column(metric.name), grid)
    return Times(first_crossing(grid, values, target, metric), mean_crossing(grid, values, target, metric))


def final_value(run: RunData) -> Maybe:
    """The metric at the last test."""
    column = run.column(run.metric.name)
    return column[-1] if column else None


def best_value(run: RunData) -> Maybe:
    """The best value of the metric over all tests."""
    return run.metric.best(run.column(run.metric.name))


def headline(group: Group, target: Maybe, step: float, reference: Group | None) -> Record:
    """One line of the results table: medians and spreads over the ended runs of a group."""
    runs = group.ended_runs
    times = [times_to(run, target, step) for run in runs]
    line: Record = {
        "label": group.label,
        "runs": len(runs),
        "all": len(group.runs),
        "seeds": sorted(run.seed for run in runs if run.seed is not None),
        "accuracy": _spread(over_seeds([final_value(run) for run in runs])),
        "best": _spread(over_seeds([best_value(run) for run in runs])),
        "time_raw": _spread(over_seeds_reached([each.raw for each in times])),
        "time_mean": _spread(over_seeds_reached([each.mean for each in times])),
        "times_raw": [each.raw for each in times],
        "times_mean": [each.mean for each in times],
        "diverged": [{"seed": run.seed, "time": run.diverged_at} for run in runs if run.diverged_at is not None],
    }
    for column in SUMMARY_COLUMNS:
        line[column.key] = _spread(over_seeds([number(run.summary.get(column.summary)) for run in runs]))
    if reference is not None and reference is not group:
        line["against"] = compare_groups(group, reference, target, step)
    return line


def compare_groups(group: Group, reference: Group, target: Maybe, step: float) -> Record:
    """A group compared with a reference: paired difference of the final metric, and ratio of times to the target."""
    result = compare_paired(_by_seed(group), _by_seed(reference))
    found: Record = {"reference": reference.label}
    found |= {"pairs": result.pairs, "difference": result.difference, "p": result.p}
    for name in ("raw", "mean"):
        sides = [side for each in (group, reference) for side in _median_and_length(each, name, target, step)]
        ratio = time_ratio(*sides)
        found[f"time_{name}"] = None if ratio is None else {"ratio": ratio.value, "bound": ratio.bound}
    return found


def _median_and_length(group: Group, name: str, target: Maybe, step: float) -> tuple[Maybe, Maybe]:
    """Median time to the target, and a lower bound: a run that misses the target counts with its length."""
    times: list[Maybe] = [getattr(times_to(run, target, step), name) for run in group.ended_runs]
    least = [run.end if time is None else time for run, time in zip(group.ended_runs, times, strict=True)]
    return over_seeds_reached(times).median, over_seeds(least).median


def describe_divergence(line: Record) -> str:
    """``1 diverged at 240 s``, or an empty text."""
    times = sorted(each["time"] for each in line["diverged"])
    return f"{len(times)} diverged at {', '.join(f'{time:g}' for time in times)} s" if times else ""


def _by_seed(group: Group) -> dict[int, Maybe]:
    return {run.seed: final_value(run) for run in group.ended_runs if run.seed is not None}


def _spread(spread: Spread) -> Record:
    return {
        "median": spread.median,
        "low": spread.low,
        "high": spread.high,
        "count": spread.count,
        "of": spread.of,
    }


def metric_of_groups(groups: Sequence[Group]) -> Metric:
    """The metric of some comparable groups."""
    return next((run.metric for group in groups for run in group.runs), ACCURACY)


def target_of(runs: Sequence[RunData]) -> Maybe:
    """The target of the first run that has one. Without any: 0.8 for an accuracy, None for another metric."""
    targets = (run.setting("run", "target") for run in runs)
    usual = 0.8 if all(run.metric == ACCURACY for run in runs) else None
    return next((target for target in targets if target is not None), usual)


def resolve_target(runs: Sequence[RunData], target: Maybe) -> Maybe:
    """The given target, checked against the runs' metric; without one, the runs' own."""
    if target is None:
        return target_of(runs)
    if not math.isfinite(target):
        raise ConfigError("--target", f"must be a finite number, but {target:g} was given")
    if any(run.metric == ACCURACY for run in runs) and not 0 <= target <= 1:
        raise ConfigError("--target", f"is an accuracy and must be in 0..1, but {target:g} was given")
    return target


def settings_table(groups: Sequence[Group]) -> Record:
    """The settings that all groups agree on, by section, and those that differ."""
    flats = [[flat_config(run.config) for run in group.runs] for group in groups]
    keys = list(dict.fromkeys(key for group in flats for table in group for key in table))
    common: dict[str, list[Record]] = {}
    differing: list[Record] = []
    for key in sorted(
        keys, key=lambda key: SECTIONS.index(key.partition(".")[0]) if key.partition(".")[0] in SECTIONS else 99
    ):
        cells = [sorted({table[key] for table in group if key in table}, key=_by_number) for group in flats]
        values = [", ".join(cell) for cell in cells]
        section, _, name = key.partition(".")
        if len({value for value in values if value}) == 1:
            value = next(value for value in values if value)
            common.setdefault(section, []).append({"key": name, "value": value, "in": sum(map(bool, values))})
        else:
            differing.append({"section": section, "key": name, "values": [value or "–" for value in values]})
    return {"common": common, "differing": differing}


def _by_number(value: str) -> tuple[float, str]:
    try:
        return float(value), value
    except ValueError:
        return 0.0, value


#: The default reference of each kind; if it is not among the methods, the first method of the kind.
DEFAULT_REFERENCES = {"async": "fedasmu", "sync": "fedssmu"}


def assign_references(methods: Sequence[str], kinds: Sequence[str], named: Sequence[int] = ()) -> list[int | None]:
    """For each method the index of its reference; None for a reference.

    Asynchronous and synchronous methods have one reference each, unless a single one is named for all. A method that is
    alone of its kind is compared with the other kind's reference.
    """
    if not methods:
        return []
    if len(named) == 1:
        return [None if place == named[0] else named[0] for place in range(len(methods))]
    chosen = {kind: _first(methods, kinds, kind) for kind in dict.fromkeys(kinds)}
    chosen |= {kinds[place]: place for place in named}
    lonely = [kind for kind in chosen if list(kinds).count(kind) == 1]
    if len(chosen) == 2 and lonely and not named:
        first, second = chosen
        chosen[second if second in lonely else first] = chosen[first if second in lonely else second]
    return [None if chosen[kind] == place else chosen[kind] for place, kind in enumerate(kinds)]


def _first(methods: Sequence[str], kinds: Sequence[str], kind: str) -> int:
    mine = [place for place, each in enumerate(kinds) if each == kind]
    return next((place for place in mine if methods[place] == DEFAULT_REFERENCES.get(kind)), mine[0])


@dataclass(frozen=True)
class Ratio:
    """Time to target divided by the reference's: exact (``=``), or a bound (``>``, ``<``) if one missed the target."""

    value: float
    bound: str = "="

    def __str__(self) -> str:
        return f"{'' if self.bound == '=' else self.bound}{self.value:.2f}x"


def time_ratio(mine: Maybe, my_least: Maybe, theirs: Maybe, their_least: Maybe) -> Ratio | None:
    """The ratio of two median times. If one is missing, a bound from its lower bound; if both are, None.

    >>> str(time_ratio(160.0, 600.0, 100.0, 600.0)), str(time_ratio(None, 600.0, 100.0, 600.0))
    ('1.60x', '>6.00x')
    """
    if theirs is not None and mine is not None:
        return Ratio(mine / theirs) if theirs > 0 else None
    if theirs is not None and theirs > 0 and my_least is not None:
        return Ratio(my_least / theirs, ">")
    if mine is not None and their_least:
        return Ratio(mine / their_least, "<")
    return None
