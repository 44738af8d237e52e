"""Runs that may be ranked with each other: those that train the same network and are tested on the same data."""

from collections.abc import Sequence
from dataclasses import dataclass

from freshet.report.groups import shown
from freshet.report.reading import RunData
from freshet.runs.facts import number


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
