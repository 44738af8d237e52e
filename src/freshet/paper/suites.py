"""The paper's experiments as grids: which cells, methods and settings, full or scaled down.

Where the paper leaves things open, we decide: in ``heterogeneity`` the fastest device keeps its speed, the cell of
``slots`` is LeNet on CIFAR-10, and ``bandwidth`` divides links of 10 Mbit/s up and 50 down (in the other suites, as in
the cells, transfers cost no time). The length of a run follows the synchronous rounds of its setting's fleet
(``experiments.grid``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from freshet import FleetOptions, UploadCount
from freshet.config import override
from freshet.data.catalogue import CATALOGUE
from freshet.errors import ConfigError
from freshet.experiments.grid import (
    Job,
    Scenario,
    UserSettings,
    expand,
    length_notes,
    override_note,
    parse_entries,
)
from freshet.methods import registry
from freshet.paper.cells import CELLS, IN_FLIGHT, METHODS, Cell, cell_scenario, find_cell
from freshet.paper.published import contradictions, published_numbers

#: The figure of a suite: accuracy curves per cell, bars per setting and kind, or bars per method and cell.
Look = Literal["curves", "settings", "methods"]
NAMES = (
    "names: fedasmu and fedssmu are the paper's methods; -published has its formulas as printed, errors included; "
    "-progress is ours"
)


@dataclass(frozen=True)
class SuiteSetting:
    """One setting of a suite: what it changes in the cell."""

    name: str = ""
    devices: int | None = None
    ratio: float | None = None
    #: Share of the default links of `FleetOptions`; None: the cell's links, which cost no time.
    bandwidth: float | None = None


@dataclass(frozen=True)
class Suite:
    """A named experiment of the paper."""

    name: str
    title: str
    cells: tuple[str, ...]
    methods: tuple[str, ...]
    look: Look
    settings: tuple[SuiteSetting, ...] = (SuiteSetting(),)
    #: The paper's results in words; for ``table`` its numbers also stand beside ours.
    published: tuple[str, ...] = ()


_LENET = ("lenet-fmnist",)
_SUITES = (
    Suite(
        "table",
        "the main table: twelve cells, twelve methods",
        tuple(CELLS),
        METHODS,
        "curves",
        published=(
            "FedASMU faster than FedAsync by 11.42 % to 84.96 %, PORT 18.22 % to 97.59 %, ASO-Fed 70.35 % to 93.77 %, "
            "FedBuff 11.17 % to 75.39 %, FedSA 19.83 % to 67.54 %",
            "FedASMU more accurate than FedAsync by 0.41 % to 58.93 %, PORT 0.68 % to 91.10 %, "
            "ASO-Fed 1.23 % to 103.82 %, FedBuff 0.68 % to 64.75 %, FedSA 1.97 % to 118.90 %",
            "FedSSMU faster than FedAvg, FedProx and MOON by 34.25 % to 85.92 %, FedDyn 20.80 % to 73.15 %, "
            "FedLWS 3.73 % to 54.86 %",
            "FedSSMU more accurate than FedAvg by 1.03 % to 133.04 %, FedProx 0.91 % to 145.87 %, "
            "MOON 0.91 % to 139.29 %, FedDyn 1.03 % to 79.06 %, FedLWS 1.03 % to 51.41 %",
            "both over all baselines: accuracy +0.41 % to +145.87 %, 3.73 % to 97.59 % faster",
        ),
    ),
    Suite(
        "devices",
        "number of devices",
        _LENET,
        METHODS,
        "settings",
        tuple(SuiteSetting(f"{count} devices", devices=count) for count in (100, 200, 250)),
        (
            "FedASMU: accuracy +0.49 % to +12.51 %, 19.83 % to 90.17 % faster than the asynchronous baselines",
            "FedSSMU: accuracy +0.1 % to +13.38 %, 54.5 % to 91.32 % faster than the synchronous baselines",
        ),
    ),
    Suite(
        "heterogeneity",
        "slowest over fastest device",
        _LENET,
        METHODS,
        "settings",
        tuple(SuiteSetting(f"ratio {ratio:g}", ratio=ratio) for ratio in (5.0, 110.0, 440.0)),
        (
            "FedASMU: accuracy +4.65 % to +7.07 %, 7.12 % to 69.75 % faster than the asynchronous baselines",
            "FedSSMU: accuracy +6.28 % to +12.38 %, 68.37 % to 79.44 % faster than the synchronous baselines",
        ),
    ),
    Suite(
        "bandwidth",
        "bandwidth of the devices",
        _LENET,
        METHODS,
        "settings",
        (
            SuiteSetting("bandwidth 1", bandwidth=1.0),
            SuiteSetting("bandwidth 1/50", bandwidth=1 / 50),
            SuiteSetting("bandwidth 1/100", bandwidth=1 / 100),
        ),
        (
            "FedASMU: accuracy +3.3 % to +11.93 % at 1/50, +2.97 % to +12.38 % at 1/100; "
            "43.1 % to 87.3 % and 31.28 % to 85.66 % faster than the asynchronous baselines",
            "FedSSMU: accuracy +1.15 % to +4.58 % at 1/50, +2.88 % to +6.1 % at 1/100; "
            "42.2 % to 51.82 % and 16.59 % to 81.78 % faster than the synchronous baselines",
        ),
    ),
    Suite(
        "ablation",
        "FedASMU without its parts",
        ("lenet-cifar10", "cnn-cifar10"),
        ("fedasmu", "fedasmu-da", "fedasmu-fa", "fedasmu-0", "fedavg"),
        "methods",
        published=(
            "FedASMU over -DA: accuracy +1.38 % to +4.32 %; over -FA: +1.75 % to +4.71 %, 44.77 % to 73.96 % faster",
            "-DA over -0: accuracy +1.04 % to +3.41 %, 15.71 % to 19.54 % faster; -FA over -0: +0.65 % to +3.04 %",
            "-DA and -FA over FedAvg: accuracy +0.73 % to +3.75 %, 72.88 % to 85.72 % faster",
            "-0 over FedAvg: accuracy +0.08 % to +0.34 %, 67.84 % to 82.26 % faster",
        ),
    ),
    Suite(
        "slots",
        "when to ask for the fresh model",
        ("lenet-cifar10",),
        ("fedasmu@slot=rl", "fedasmu@slot=h1", "fedasmu@slot=h2", "fedasmu@slot=h3"),
        "methods",
        published=("the learned slot over H1, H2, H3: accuracy +2.4 %, +2.2 %, +2.8 %",),
    ),
)
SUITES: dict[str, Suite] = {suite.name: suite for suite in _SUITES}

#: Lower limits of a scaled-down suite.
FEWEST_PER_ROUND = 2
FEWEST_DEVICES = 4
FEWEST_ROUNDS = 5
FEWEST_SAMPLES_PER_DEVICE = 20
UNITS = (
    "the paper names no unit of time, no device speed and no bandwidth: "
    "compare its times with each other, not with ours"
)


@dataclass(frozen=True)
class SuitePlan:
    """A suite ready to run."""

    suite: Suite
    jobs: list[Job]
    scale: float
    notes: list[str]
    #: The paper's numbers by run key.
    published: Mapping[str, dict[str, Any]]

    @property
    def stem(self) -> str:
        """Name of the result files; a scaled-down suite never overwrites the full one."""
        return self.suite.name if self.scale == 1.0 else f"{self.suite.name}-scale{self.scale:g}"

    @property
    def title(self) -> str:
        scaled = "" if self.scale == 1.0 else f", SCALED DOWN to {self.scale:g}"
        return f"{self.suite.name}: {self.suite.title}{scaled}"

    @property
    def scale_record(self) -> dict[str, Any] | None:
        """The scale as results.json records it; None for the full suite."""
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
) -> SuitePlan:
    """The grid of a suite: its settings, scaled down if asked, times its methods (or ``methods``) times the seeds."""
    if not 0 < scale <= 1:
        raise ConfigError("--scale", f"must be above 0 and at most 1, but {scale:g} was given")
    entries = parse_entries(methods or ",".join(suite.methods))
    chosen = [find_cell(name.strip()) for name in (cells.split(",") if cells else suite.cells)]
    changed: dict[str, Any] = {}
    override(changed, settings)
    dataset = changed.get("data", {}).get("name")
    scenarios = [_scenario(cell, setting, scale, dataset) for cell in chosen for setting in suite.settings]
    jobs = expand(entries, seeds, UserSettings(settings=settings), scenarios)
    published = published_numbers(jobs)
    notes = _notes(suite, jobs, scale, settings)
    return SuitePlan(suite, jobs, scale, [*notes, UNITS] if published else notes, published)


def _scenario(cell: Cell, setting: SuiteSetting, scale: float, dataset: str | None) -> Scenario:
    """A cell under one setting of a suite, scaled down; the length of its runs follows from its fleet and rounds."""
    varied = replace(
        cell,
        devices=setting.devices or cell.devices,
        slowest_over_fastest=setting.ratio or cell.slowest_over_fastest,
        rounds=max(FEWEST_ROUNDS, round(cell.rounds * scale)),
    )
    name = f"{cell.name}, {setting.name}" if setting.name else cell.name
    tables = _scaled_tables(varied, scale, dataset)
    if setting.bandwidth is not None:
        tables["fleet"] = tables.get("fleet", {}) | _links(setting.bandwidth)
    return cell_scenario(varied, name, tables, _buffers(tables.get("run", {}).get("per_round", 10) / 10))


def _links(share: float) -> dict[str, float]:
    """The default links, with this share of their bandwidth."""
    normal = FleetOptions()
    rates = {"up_mbps": share * normal.up_mbps, "down_mbps": share * normal.down_mbps}
    return rates | {"up_latency": normal.up_latency, "down_latency": normal.down_latency}


def _scaled_tables(cell: Cell, scale: float, dataset: str | None) -> dict[str, dict[str, Any]]:
    """Fewer devices and samples; the share of devices that train at once and the samples per device stay."""
    if scale == 1.0:
        return {}
    devices = max(FEWEST_DEVICES, round(cell.devices * scale))
    per_round = min(devices, max(FEWEST_PER_ROUND, round(cell.per_round * scale)))
    tables: dict[str, dict[str, Any]] = {
        "fleet": {"devices": devices},
        "run": {"per_round": per_round, "in_flight": min(devices, IN_FLIGHT * per_round // cell.per_round)},
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
    """Smaller buffers by method, for methods that wait for several uploads, when fewer devices train at once."""
    if share == 1.0:
        return {}
    usual = {
        name: {key: method.Options.model_fields[key].default for key in space if isinstance(space[key], UploadCount)}
        for name, method in registry().items()
        if (space := method.about.space)
    }
    return {
        name: {key: max(1, round(count * share)) for key, count in counts.items()}
        for name, counts in usual.items()
        if counts
    }


def _notes(suite: Suite, jobs: Sequence[Job], scale: float, settings: Sequence[str]) -> list[str]:
    notes = []
    if scale != 1.0:
        config = jobs[0].config
        notes.append(
            f"SCALED DOWN to {scale:g}: {config.fleet.devices} devices, {config.run.per_round} per round, "
            f"{config.data.train_samples} training samples, {config.run.until:g} s in the first world; "
            "these are not the paper's conditions"
        )
    notes += override_note(settings)
    notes += length_notes(jobs)
    notes.append(NAMES)
    notes += [f"published: {sentence}" for sentence in suite.published]
    if suite.name == "table":
        notes += contradictions()
    return notes
