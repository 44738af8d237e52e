"""Runs that may be ranked with each other: those that train the same network and are tested on the same data."""

from collections.abc import Sequence
from dataclasses import dataclass

from freshet.report.groups import shown
from freshet.report.reading import RunData

#: Settings that say what a model is tested on; all others may differ within a table, and the labels say how.
_TESTED = ("name", "validation", "test_samples")


@dataclass(frozen=True)
class ReportWorld:
    """Some runs, and a name that tells them from the others on the page."""

    name: str
    runs: list[RunData]


def worlds(runs: Sequence[RunData]) -> list[ReportWorld]:
    """In the order of their first runs."""
    found: dict[tuple[str, ...], list[RunData]] = {}
    for run in runs:
        found.setdefault(_identity(run), []).append(run)
    return [ReportWorld(name, members) for name, members in zip(_names(list(found)), found.values(), strict=True)]


def _identity(run: RunData) -> tuple[str, ...]:
    """Data set, network, then what tells one test set from another of that name."""
    config, data, world = run.config, run.config.get("data", {}), run.world
    tested = [shown(data.get(key, 0)) for key in _TESTED[1:]]
    own = [] if world is None else [str(world.test_samples), ", ".join(world.classes)]
    network = config.get("model", {}).get("name", "unknown model")
    return (shown(data.get("name", "unknown data")), shown(network), *tested, *own)


def _names(identities: Sequence[tuple[str, ...]]) -> list[str]:
    """The data set; with the network where there are several, and a number where that is not enough."""
    networks = {identity[1] for identity in identities}
    names = [identity[0] if len(networks) == 1 else f"{identity[0]}, {identity[1]}" for identity in identities]
    return [
        f"{name} #{names[: place + 1].count(name)}" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]
