"""The panels of an experiment's figure as plain data, from the results of a grid, in the paper's layout.

There are three looks. ``curves`` has one panel of curves per cell. ``settings`` has a row of bars per kind of method:
accuracy and time to target over the settings. ``methods`` has a column of bars per cell.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from freshet.report.columns import kind_of
from freshet.report.reading import Record
from freshet.runs.records import ACCURACY, Maybe, Metric, metric_of, number

KINDS = {"async": "asynchronous", "sync": "synchronous"}


@dataclass(frozen=True)
class Series:
    """One method's curve: median and extremes over seeds."""

    name: str
    style: int
    dashed: bool
    time: list[float]
    median: list[Maybe]
    low: list[Maybe]
    high: list[Maybe]
    diverged: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Curves:
    """The metric over virtual time, one curve per method."""

    title: str
    target: Maybe
    series: list[Series]
    metric: Metric = ACCURACY


@dataclass(frozen=True)
class Bar:
    """One method's bars, one per group. A median of None means: not reached."""

    name: str
    style: int
    median: list[Maybe]
    low: list[Maybe]
    high: list[Maybe]
    diverged: list[bool]


@dataclass(frozen=True)
class Bars:
    """Bars in groups. With a single group each bar is labelled with its method."""

    title: str
    what: str
    groups: list[str]
    bars: list[Bar]
    metric: Metric = ACCURACY

    @property
    def scale(self) -> str:
        """The title of its axis."""
        return "virtual time (s)" if self.what == "time" else f"test {self.metric.name}"

    def format_value(self, value: float) -> str:
        """The number shown at a bar."""
        if self.what == "time":
            return f"{value:,.0f}"
        return f"{value:.3f}" if kind_of(self.metric) == "share" else f"{value:.4g}"


Panel = Curves | Bars


def panels(results: Record) -> list[list[Panel]]:
    """Rows of panels; none for an experiment without an ended run."""
    worlds = [world for world in results["worlds"] if any(line["runs"] for line in world["lines"])]
    ended = any(line["finished"] for world in worlds for line in world["lines"])
    if not ended:
        return []
    draw = {"settings": _by_setting, "methods": _by_method}.get(str(results.get("look")))
    return draw(worlds) if draw else _in_rows([curves(world) for world in worlds])


def short_names(names: Sequence[str]) -> list[str]:
    """Names without a common prefix: ``slot=h1`` if all names are ``fedasmu@...``."""
    heads = {name.partition("@")[0] for name in names}
    if len(names) > 1 and len(heads) == 1 and all("@" in name for name in names):
        return [name.partition("@")[2] for name in names]
    return list(names)


def _in_rows(found: Sequence[Panel], columns: int = 3) -> list[list[Panel]]:
    return [list(found[start : start + columns]) for start in range(0, len(found), columns)]


def curves(world: Record) -> Curves:
    """The curves of one world."""
    lines = [line for line in world["lines"] if line["curve"]]
    names = short_names([line["label"] for line in lines])
    return Curves(
        title_of(world),
        number(world["target"]),
        [
            Series(
                name,
                int(line["style"]),
                dashed=line["kind"] == "sync",
                time=[float(time) for time in line["curve"]["time"]],
                median=list(map(number, line["curve"]["median"])),
                low=list(map(number, line["curve"]["low"])),
                high=list(map(number, line["curve"]["high"])),
                diverged=[float(each["time"]) for each in line["diverged"]],
            )
            for line, name in zip(lines, names, strict=True)
        ],
        metric_of(world),
    )


def title_of(world: Record) -> str:
    return str(world["name"] or world["shared"]["data"]["name"])


def _by_setting(worlds: Sequence[Record]) -> list[list[Panel]]:
    """A row per kind of method, accuracy beside time, with the settings as groups."""
    cells = {world["cell"] for world in worlds}
    groups = [title_of(world).partition(", ")[2] or title_of(world) if len(cells) == 1 else title_of(world)
              for world in worlds]  # fmt: skip
    rows: list[list[Panel]] = []
    for kind, word in KINDS.items():
        names = list(dict.fromkeys(line["label"] for w in worlds for line in w["lines"] if line["kind"] == kind))
        if names:
            chosen = [[_line(world, name) for world in worlds] for name in names]
            rows.append([_bars(f"{word}: {title}", key, groups, chosen, worlds) for key, title in _measures(worlds[0])])
    return rows


def _by_method(worlds: Sequence[Record]) -> list[list[Panel]]:
    """Accuracy above time, a column per cell."""
    rows: list[list[Panel]] = [
        [
            _bars(f"{title_of(world)}: {title}", key, [""], [[line] for line in world["lines"]], [world])
            for world in worlds
            for key, title in _measures(world)[place : place + 1]
        ]
        for place in range(2)
    ]
    return [row for row in rows if row]


def _measures(world: Record) -> list[tuple[str, str]]:
    """What bars show: the metric and, if there is a target, the time to it."""
    target = number(world["target"])
    return [("accuracy", metric_of(world).name), *([] if target is None else [("time_raw", f"time to {target:g}")])]


def _line(world: Record, label: str) -> Record | None:
    return next((line for line in world["lines"] if line["label"] == label), None)


def _bars(
    title: str, key: str, groups: list[str], chosen: Sequence[Sequence[Record | None]], worlds: Sequence[Record]
) -> Bars:
    known = [next(line for line in lines if line is not None) for lines in chosen]
    names = short_names([line["label"] for line in known])
    what = "accuracy" if key == "accuracy" else "time"
    bars = []
    for name, line, lines in zip(names, known, chosen, strict=True):
        spreads = [{} if each is None else each[key] for each in lines]
        known_top = [s.get("count", 0) == s.get("of") for s in spreads]  # otherwise the slowest seed is unknown
        median, low, high = ([number(s.get(part)) for s in spreads] for part in ("median", "low", "high"))
        high = [value if there else None for value, there in zip(high, known_top, strict=True)]
        diverged = [bool(each and each["diverged"]) for each in lines]
        bars.append(Bar(name, int(line["style"]), median, low, high, diverged))
    return Bars(title, what, groups, bars, metric_of(worlds[0]))
