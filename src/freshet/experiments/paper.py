"""The paper's experiments as grids over the same machinery as a comparison, full or scaled down.

What the paper does not say and we decide: in ``heterogeneity`` the fastest device stays as fast as it is; in ``slots``
the cell is LeNet on CIFAR-10. A run is as long as the synchronous rounds of its own setting's fleet (``length.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from freshet.config import SECTIONS, override, undecided
from freshet.core.about import Uploads
from freshet.data.catalogue import CATALOGUE
from freshet.errors import ConfigError
from freshet.experiments.cells import Cell
from freshet.experiments.grid import Entry, GridWorld, Job, Request, expand, parse_entries
from freshet.experiments.length import length_note
from freshet.experiments.presets import find_cell
from freshet.experiments.published import published
from freshet.experiments.suites import NAMES, SUITES, Setting, Suite, contradictions, find_suite
from freshet.methods import registry
from freshet.options import FleetOptions

__all__ = ["SUITES", "Plan", "find_suite", "plan"]
#: A round needs at least so many devices, a federation so many times more.
FEWEST_PER_ROUND = 2
FEWEST_DEVICES = 4
FEWEST_ROUNDS = 5
FEWEST_SAMPLES_PER_DEVICE = 20
UNITS = (
    "the paper names no unit of time, no device speed and no bandwidth: "
    "compare its times with each other, not with ours"
)


@dataclass(frozen=True)
class Plan:
    """A suite ready to run."""

    suite: Suite
    jobs: list[Job]
    scale: float
    notes: list[str]

    @property
    def stem(self) -> str:
        """Name of the result files; a scaled-down suite never overwrites the full one."""
        return self.suite.name if self.scale == 1.0 else f"{self.suite.name}-scale{self.scale:g}"

    @property
    def title(self) -> str:
        said = "" if self.scale == 1.0 else f", SCALED DOWN to {self.scale:g}"
        return f"{self.suite.name}: {self.suite.title}{said}"

    @property
    def scaled(self) -> dict[str, Any] | None:
        """What the results say about the scale; None for the full suite."""
        if self.scale == 1.0:
            return None
        return {
            "scale": self.scale,
            "meaning": "devices, devices per round, K of buffers, samples and rounds times this",
        }


def plan(
    suite: Suite,
    seeds: Sequence[int],
    *,
    scale: float = 1.0,
    methods: str | None = None,
    cells: str | None = None,
    settings: Sequence[str] = (),
) -> Plan:
    """The grid of a suite: its worlds, scaled down if asked, times its methods (or some of them) times the seeds."""
    if not 0 < scale <= 1:
        raise ConfigError("--scale", f"must be above 0 and at most 1, but {scale:g} was given")
    entries = _entries(suite, methods)
    chosen = [find_cell(name.strip()) for name in (cells.split(",") if cells else suite.cells)]
    changed: dict[str, Any] = {}
    override(changed, settings)
    dataset = changed.get("data", {}).get("name")
    worlds = [_world(cell, setting, scale, dataset) for cell in chosen for setting in suite.settings]
    jobs = expand(entries, seeds, Request(settings=settings), worlds)
    return Plan(suite, jobs, scale, _notes(suite, jobs, scale, settings))


def _entries(suite: Suite, methods: str | None) -> list[Entry]:
    """The suite's methods, or those of them that were asked for; other methods may be added by name."""
    return parse_entries(methods if methods else ",".join(suite.methods))


def _world(cell: Cell, setting: Setting, scale: float, dataset: str | None) -> GridWorld:
    """A cell under one setting of a suite, scaled down; the length of its runs follows from its fleet and rounds."""
    varied = replace(
        cell,
        devices=setting.devices or cell.devices,
        slowest_over_fastest=setting.ratio or cell.slowest_over_fastest,
        rounds=max(FEWEST_ROUNDS, round(cell.rounds * scale)),
    )
    name = f"{cell.name}, {setting.name}" if setting.name else cell.name
    tables = _scaled(varied, scale, dataset)
    if setting.bandwidth != 1.0:
        normal = FleetOptions()
        links = {"up_mbps": normal.up_mbps, "down_mbps": normal.down_mbps}
        tables["fleet"] = tables.get("fleet", {}) | {key: rate * setting.bandwidth for key, rate in links.items()}
    return GridWorld(name, varied, tables, _buffers(tables.get("run", {}).get("per_round", 10) / 10))


def _scaled(cell: Cell, scale: float, dataset: str | None) -> dict[str, dict[str, Any]]:
    """Fewer devices, samples and rounds; the share of devices that train at once and samples per device stay."""
    if scale == 1.0:
        return {}
    devices = max(FEWEST_DEVICES, round(cell.devices * scale))
    per_round = min(devices, max(FEWEST_PER_ROUND, round(cell.per_round * scale)))
    tables: dict[str, dict[str, Any]] = {
        "fleet": {"devices": devices},
        "run": {"per_round": per_round},
    }
    spec = CATALOGUE.get(dataset or cell.dataset)
    if spec is not None:
        train, test = spec.counts[0]
        least = devices * FEWEST_SAMPLES_PER_DEVICE
        tables["data"] = {
            "train_samples": min(train, max(least, round(train * scale))),
            "test_samples": min(test, max(10 * spec.classes, round(test * scale))),
        }
    return tables


def _buffers(share: float) -> dict[str, dict[str, Any]]:
    """Methods that wait for so many uploads wait for fewer when fewer devices train at once."""
    if share == 1.0:
        return {}
    usual = {
        name: {key: method.Options.model_fields[key].default for key in space if isinstance(space[key], Uploads)}
        for name, method in registry().items()
        if (space := method.about.space)
    }
    return {
        name: {key: max(1, round(count * share)) for key, count in counts.items()}
        for name, counts in usual.items()
        if counts
    }


def changed(settings: Sequence[str]) -> list[str]:
    """A sentence about settings that decide bits, if there are any."""
    names = [s for s in settings if s.partition("=")[0].strip() not in undecided(SECTIONS)]
    return [f"changed by --set: {', '.join(names)}"] if names else []


def lengths(jobs: Sequence[Job]) -> list[str]:
    """How long the runs of each cell are; one sentence per world."""
    worlds = {job.world: job.config for job in reversed(jobs) if job.world.cell is not None}
    return [length_note(config, world.name) for world, config in reversed(worlds.items())]


def _notes(suite: Suite, jobs: Sequence[Job], scale: float, settings: Sequence[str]) -> list[str]:
    notes = []
    if scale != 1.0:
        config = jobs[0].config
        notes.append(
            f"SCALED DOWN to {scale:g}: {config.fleet.devices} devices, {config.run.per_round} per round, "
            f"{config.data.train_samples} training samples, {config.run.until:g} s in the first world; "
            "these are not the paper's conditions"
        )
    notes += changed(settings)
    notes += lengths(jobs)
    notes.append(NAMES)
    notes += [f"published: {sentence}" for sentence in suite.published]
    if suite.name == "table":
        notes += contradictions()
    if any(published(job) for job in jobs):
        notes.append(UNITS)
    return notes
