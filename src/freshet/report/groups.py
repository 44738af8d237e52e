"""Runs put together: those that differ only in their seed make a group, and only runs that have ended are counted.

Runs that may be ranked with each other: those that train the same network and are tested on the same data.

Against whom a method is held, and how much faster or slower it is.

    time ratio = (time to target) / (time to target of the reference):  1.60 takes 1.6 times as long, 0.50 half as long

A median that is missing because runs never reach the target makes a bound: they took longer than they lasted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from freshet.errors import ConfigError
from freshet.report.columns import COUNTED
from freshet.report.log import Record
from freshet.report.palette import styles
from freshet.report.reading import RunData
from freshet.report.statistics import Spread, mean_crossing, on_grid, over_seeds, over_seeds_reached, paired, regular
from freshet.runs.records import ACCURACY, Maybe, Metric, first_crossing, number


@dataclass(frozen=True)
class ReportWorld:
    """Some runs, and a name that tells them from the others on the page.

    Fleet, partition and training may differ among them: their labels say how.
    """

    name: str
    runs: list[RunData]


def worlds(runs: Sequence[RunData]) -> list[ReportWorld]:
    """In the order of their first runs."""
    found: dict[tuple[str, ...], list[RunData]] = {}
    for run in runs:
        found.setdefault(_identity(run), []).append(run)
    return [ReportWorld(name, members) for name, members in zip(_names(list(found)), found.values(), strict=True)]


def _identity(run: RunData) -> tuple[str, ...]:
    """Data set, network, then what tells one test set from another of that name, in words."""
    data, world = run.config.get("data", {}), run.world
    held_out = number(data.get("validation")) or 0.0
    tested = shown(data.get("test_samples", 0)) if world is None else str(world.test_samples)
    return (
        shown(data.get("name", "unknown data")),
        shown(run.config.get("model", {}).get("name", "unknown model")),
        f"by {run.metric.name}",
        f"held-out {100 * held_out:g} %" if held_out else "test set",
        f"{tested} test samples",
        "" if world is None else f"{len(world.classes)} classes: {', '.join(world.classes)}",
    )


def _names(identities: Sequence[tuple[str, ...]]) -> list[str]:
    """The data set, and of the rest the first that tells those of one data set apart."""
    names = [identity[0] for identity in identities]
    for place in range(1, max(map(len, identities), default=0)):
        alike = [[other for name, other in zip(names, identities, strict=True) if name == mine] for mine in names]
        names = [
            f"{name}, {identity[place]:.60}" if len({other[place] for other in others}) > 1 else name
            for name, identity, others in zip(names, identities, alike, strict=True)
        ]
    return names


SECTIONS = ("method", "training", "fleet", "data", "model", "run")
#: More points than this on the common grid are not needed to read a time off it.
_MOST_POINTS = 100_000
_LONGEST_VALUE = 200
#: What may differ within a group, beside the settings that decide nothing.
SEED = "run.seed"


@dataclass
class Group:
    """Runs of one configuration over seeds."""

    label: str
    runs: list[RunData]
    #: Colour and dash, see ``palette``.
    style: int = 0

    @property
    def counted(self) -> list[RunData]:
        """The runs that have ended, diverged ones included: only these enter medians and bands."""
        return [run for run in self.runs if run.finished]

    @property
    def kind(self) -> str:
        """``sync`` for runs in rounds, else ``async``."""
        return "sync" if self.runs[0].config.get("run", {}).get("trigger") == "rounds" else "async"


def flat(config: dict[str, Record]) -> dict[str, str]:
    """``section.key`` to value as text, in the order of the file."""
    found = {}
    for section in (*SECTIONS, *(name for name in config if name not in SECTIONS)):
        for key, value in config.get(section, {}).items():
            found[f"{section}.{key}"] = shown(value)
    return found


def shown(value: Any) -> str:
    """A setting as a person would write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}" if abs(value) < 1e15 else repr(value)
    text = value if isinstance(value, str) else repr(value)
    text = text or "–"
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def grouped(runs: Sequence[RunData]) -> list[Group]:
    """Groups in the order of their first run, each with a label that tells it from the others."""
    tables = [flat(run.config) for run in runs]
    aside = {SEED} | _undecided(runs) | _newcomers(tables)
    found: dict[tuple[tuple[str, str], ...], list[RunData]] = {}
    for run, table in zip(runs, tables, strict=True):
        identity = tuple((key, value) for key, value in table.items() if key not in aside)
        found.setdefault(identity, []).append(run)
    identities = [dict(identity) for identity in found]
    labels = [_label(identity, identities) for identity in identities]
    looks = styles([members[0].method for members in found.values()])
    return [Group(*each) for each in zip(_told_apart(labels), found.values(), looks, strict=True)]


def _undecided(runs: Sequence[RunData]) -> set[str]:
    """Settings that decide none of a run's bits, as the runs themselves say."""
    return {key for run in runs if run.world is not None for key in run.world.aside}


def _newcomers(tables: Sequence[dict[str, str]]) -> set[str]:
    """Settings that older runs do not have and on which all others agree: no reason to tell runs apart."""
    keys = {key for table in tables for key in table}
    values = {key: {table.get(key) for table in tables} for key in keys}
    return {key for key, found in values.items() if None in found and len(found) == 2}


def _label(mine: dict[str, str], everybody: list[dict[str, str]]) -> str:
    """The method's name, and where others share it the settings that differ among them."""
    name = mine.get("method.name", "unknown")
    namesakes = [other for other in everybody if other.get("method.name", "unknown") == name]
    keys = [key for key in mine if any(other.get(key) != mine[key] for other in namesakes)]
    parts = [f"{key.partition('.')[2]}={mine[key]}" for key in keys[:2]] + (["…"] if len(keys) > 2 else [])
    return f"{name} ({', '.join(parts)})" if parts else name


def _told_apart(labels: list[str]) -> list[str]:
    return [
        f"{label} #{labels[: place + 1].count(label)}" if labels.count(label) > 1 else label
        for place, label in enumerate(labels)
    ]


# ---- headline numbers


@dataclass(frozen=True)
class Times:
    """One run's times to the target on the common grid."""

    raw: Maybe
    mean: Maybe


def common_step(runs: Sequence[RunData]) -> float:
    """The step of the common grid: the coarsest of the runs' test intervals."""
    steps = [step for run in runs if (step := run.setting("run", "eval_every")) is not None and step > 0]
    return max(steps, default=10.0)


def times_to(run: RunData, target: Maybe, step: float) -> Times:
    """First crossing of the raw metric and of its trailing 5-point mean, on the grid that all runs share."""
    if run.end / step > _MOST_POINTS:
        step = run.end / _MOST_POINTS
    grid = regular(step, run.end)
    times = [float(row["time"]) for row in run.metrics]
    metric = run.metric
    values = on_grid(times, run.column(metric.name), grid)
    return Times(first_crossing(grid, values, target, metric), mean_crossing(grid, values, target, metric))


def final_value(run: RunData) -> Maybe:
    """The metric at the last test: usually the accuracy."""
    column = run.column(run.metric.name)
    return column[-1] if column else None


def best_value(run: RunData) -> Maybe:
    """The best of all tests."""
    return run.metric.best(run.column(run.metric.name))


def headline(group: Group, target: Maybe, step: float, reference: Group | None) -> Record:
    """One line of the results table: medians and spreads over the runs that have ended."""
    runs = group.counted
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
        "diverged": [{"seed": run.seed, "time": run.diverged} for run in runs if run.diverged is not None],
    }
    for column in COUNTED:
        line[column.key] = _spread(over_seeds([number(run.summary.get(column.summary)) for run in runs]))
    if reference is not None and reference is not group:
        line["against"] = versus(group, reference, target, step)
    return line


def versus(group: Group, reference: Group, target: Maybe, step: float) -> Record:
    """A method held against another: paired difference of final accuracy, and the ratio of times to the target."""
    result = paired(_by_seed(group), _by_seed(reference))
    found: Record = {"reference": reference.label}
    found |= {"pairs": result.pairs, "difference": result.difference, "p": result.p}
    for name in ("raw", "mean"):
        sides = [side for each in (group, reference) for side in _median_and_length(each, name, target, step)]
        ratio = time_ratio(*sides)
        found[f"time_{name}"] = None if ratio is None else {"ratio": ratio.value, "bound": ratio.bound}
    return found


def _median_and_length(group: Group, name: str, target: Maybe, step: float) -> tuple[Maybe, Maybe]:
    """Median time to the target, and what it is at least: a run that never got there took longer than it lasted."""
    times: list[Maybe] = [getattr(times_to(run, target, step), name) for run in group.counted]
    least = [run.end if time is None else time for run, time in zip(group.counted, times, strict=True)]
    return over_seeds_reached(times).median, over_seeds(least).median


def said_diverged(line: Record) -> str:
    """``1 diverged at 240 s``, or nothing."""
    times = sorted(each["time"] for each in line["diverged"])
    return f"{len(times)} diverged at {', '.join(f'{time:g}' for time in times)} s" if times else ""


def _by_seed(group: Group) -> dict[int, Maybe]:
    return {run.seed: final_value(run) for run in group.counted if run.seed is not None}


def _spread(spread: Spread) -> Record:
    return {
        "median": spread.median,
        "low": spread.low,
        "high": spread.high,
        "count": spread.count,
        "of": spread.of,
    }


def judged_by(groups: Sequence[Group]) -> Metric:
    """What the runs of some groups, which are ranked with each other, are judged by."""
    return next((run.metric for group in groups for run in group.runs), ACCURACY)


def target_of(runs: Sequence[RunData]) -> Maybe:
    """What the first run with a target asks for; without one an accuracy of 0.8, and of another metric nothing."""
    targets = (run.setting("run", "target") for run in runs)
    usual = 0.8 if all(run.metric == ACCURACY for run in runs) else None
    return next((target for target in targets if target is not None), usual)


def aimed(runs: Sequence[RunData], target: Maybe) -> Maybe:
    """The target that was asked for, if these runs can have it, else their own."""
    if target is None:
        return target_of(runs)
    if not math.isfinite(target):
        raise ConfigError("--target", f"must be a finite number, but {target:g} was given")
    if any(run.metric == ACCURACY for run in runs) and not 0 <= target <= 1:
        raise ConfigError("--target", f"is an accuracy and must be in 0..1, but {target:g} was given")
    return target


def settings(groups: Sequence[Group]) -> Record:
    """The configuration: what all groups that have a setting agree on, by section, and what differs among them."""
    flats = [[flat(run.config) for run in group.runs] for group in groups]
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


#: The reference of each kind where it is among the methods; else the first of its kind.
USUAL = {"async": "fedasmu", "sync": "fedssmu"}


def references(methods: Sequence[str], kinds: Sequence[str], named: Sequence[int] = ()) -> list[int | None]:
    """For each method the place of the one that it is held against; None for a reference.

    Asynchronous methods have their reference and synchronous ones theirs, unless one is named for all. A method that is
    alone of its kind is held against the other kind's reference.
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
    return next((place for place in mine if methods[place] == USUAL.get(kind)), mine[0])


@dataclass(frozen=True)
class Ratio:
    """Time to target over the reference's: exact (``=``), or a bound (``>``, ``<``) where one never got there."""

    value: float
    bound: str = "="

    def __str__(self) -> str:
        return f"{'' if self.bound == '=' else self.bound}{self.value:.2f}x"


def time_ratio(mine: Maybe, my_least: Maybe, theirs: Maybe, their_least: Maybe) -> Ratio | None:
    """The ratio of two median times; with one missing a bound by what it is at least; with both nothing.

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
